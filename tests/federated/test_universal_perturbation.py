"""Universal perturbations by hand, and their gradients against finite differences."""

import numpy as np
import pytest
import torch
from tests import views
from tests.views import models
from torch import nn

from fedcb2o.errors import ConfigError
from fedcb2o.federated.criteria import universal_perturbation
from fedcb2o.federated.criteria.universal_perturbation import paint, worst_perturbation
from fedcb2o.federated.inference import input_gradients, logits, logits_per_model
from fedcb2o.nn.architectures import logistic, mlp

LABELS = torch.tensor([0, 1])


def context_of(outputs_of, x, labels, **known):
    """Return the context of an agent that evaluates one model, a function of images [n, pixels]."""

    def outputs_at(models, x):
        return outputs_of(x.flatten(2))

    def gradients_of(models, x, of):
        inputs = x.clone().requires_grad_()
        return torch.autograd.grad(of(outputs_at(models, inputs)).sum(), inputs)[0]

    return views.context_without_contacts(
        samples=lambda count: (x, labels),
        outputs_per_model=outputs_at,
        input_gradients=gradients_of,
        **known,
    )


ONE = views.received(torch.tensor([0]))


def linear(weights, x, pixels, labels=LABELS, steps=1):
    """Return the worst perturbation of a linear model with one row of weights per class."""
    weights = torch.tensor(weights)
    return worst_perturbation(
        context_of(lambda x: x @ weights.T, x, labels), ONE, len(weights), pixels, len(x), steps
    )


def test_painted_pixels_raise_one_class_above_the_label_most():
    """Class 2 gains (1 + 1) / 2 by a white third pixel and (2 + 2) / 2 by a black first one."""
    x = torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 1, 2, 2).repeat(2, 1, 1, 1)
    weights = [[0.0, 0.0, 0.0, 0.5], [0.0, 0.0, 0.0, -0.5], [-2.0, 0.25, 1.0, 0.0]]
    assert linear(weights, x, 1).tolist() == [[[[-1.0, 0.0], [0.0, 0.0]]]]
    assert linear(weights, x, 2).tolist() == [[[[-1.0, 0.0], [1.0, 0.0]]]]
    # the last pixel gains 0.5 and -0.5
    assert linear(weights, x, 9).tolist() == [[[[-1.0, 1.0], [1.0, 0.0]]]]
    for pixels in (1, 2, 9):  # several steps change nothing for a linear model
        assert torch.equal(linear(weights, x, pixels, steps=2), linear(weights, x, pixels))


def test_no_pixel_is_painted_without_a_gain():
    x = torch.zeros(2, 1, 1, 3)
    for steps in (1, 2):
        signs = linear([[0.0, 0.0, 0.0], [-1.0, -1.0, -1.0]], x, 2, torch.tensor([0, 0]), steps)
        assert signs.tolist() == [[[[0, 0, 0]]]]


def test_each_channel_of_a_pixel_has_its_own_sign():
    x = torch.full((1, 2, 1, 2), 0.5)
    weights = [[0.0] * 4, [3.0, 1.0, -2.0, 4.0]]  # a gain of 2.5 by either pixel
    assert linear(weights, x, 1, torch.tensor([0])).tolist() == [[[[1.0, 0.0]], [[-1.0, 0.0]]]]
    weights[1][3] = 5.0
    assert linear(weights, x, 1, torch.tensor([0])).tolist() == [[[[0.0, 1.0]], [[0.0, 1.0]]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_painted_pixels_are_black_or_white_and_others_unchanged(dtype):
    white = 255 if dtype == torch.uint8 else 1
    x = torch.tensor([[[[1, 1, 1]]]]).to(dtype)
    painted = paint(x, signs=torch.tensor([[[1.0, -1.0, 0.0]]]))
    assert painted.dtype == dtype
    assert painted.tolist() == [[[[white, 0, 1]]]]
    assert x.tolist() == [[[[1, 1, 1]]]]
    painted = paint(x.float(), signs=torch.tensor([[[1.0, -1.0, 0.0]]]), value_range=(-2.0, 9.0))
    assert painted.tolist() == [[[[9, -2, 1]]]]


def test_a_perturbation_is_the_same_on_another_scale():
    """The images have values from -1 to 3, and the network undoes this scale."""
    x = torch.rand(2, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([[0.0, 0.0, 0.0, 0.5], [0.0, 0.0, 0.0, -0.5], [-2.0, 0.25, 1.0, 0.0]])

    def signs(x, outputs_of, **known):
        context = context_of(outputs_of, x, LABELS, **known)
        return worst_perturbation(context, ONE, 3, 2, 2, 2, blend=0.25)

    expected = signs(x, lambda x: x @ weights.T)
    rescaled = signs(4 * x - 1, lambda x: (x + 1) / 4 @ weights.T, value_range=(-1.0, 3.0))
    assert expected.any()
    assert rescaled.equal(expected)


@pytest.mark.parametrize(
    ("x", "y"),
    [(torch.zeros(2, 5), LABELS), (torch.zeros(2, 1, 2, 2), torch.zeros(2))],
    ids=["table", "numbers"],
)
def test_samples_without_pixels_or_classes_are_refused(x, y):
    with pytest.raises(ConfigError, match=r"changes the class of images, .*: take another"):
        linear([[0.0], [0.0]], x, 1, y)


def test_several_steps_find_pixels_that_work_only_together():
    """Class 1 gains 1.2 by its pixel; class 2 gains 1 by its first pixel and 8 more by its second.

    To first order the second pixel gains nothing.
    """

    def outputs_of(x):
        a, b, c = x.unbind(-1)
        return torch.stack([torch.zeros_like(a), 1.2 * a, b + 8 * b * c], -1)

    context = context_of(outputs_of, torch.zeros(1, 1, 1, 3), LABELS[:1])
    assert worst_perturbation(context, ONE, 3, 2, 1, 1).tolist() == [[[[1.0, 0.0, 0.0]]]]
    assert worst_perturbation(context, ONE, 3, 2, 1, 2).tolist() == [[[[0.0, 1.0, 1.0]]]]
    assert worst_perturbation(context, ONE, 3, 2, 1, 9).tolist() == [[[[0.0, 1.0, 1.0]]]]


def test_several_steps_choose_the_class_by_the_loss_and_no_pixel_twice():
    """To first order, classes 1 and 2 gain 3 and 1; painted, they gain 0.5 and 1.

    The gradient at a white first pixel favours black, which would only undo the gain.
    """

    def outputs_of(x):
        a, b = x.unbind(-1)
        return torch.stack([torch.zeros_like(a), 3 * a - 2.5 * a**2, b], -1)

    context = context_of(outputs_of, torch.zeros(1, 1, 1, 2), LABELS[:1])
    assert worst_perturbation(context, ONE, 3, 1, 1, 1).tolist() == [[[[1.0, 0.0]]]]
    assert worst_perturbation(context, ONE, 3, 1, 1, 2).tolist() == [[[[0.0, 1.0]]]]
    without_class_2 = context_of(
        lambda x: outputs_of(x)[..., :2], torch.zeros(1, 1, 1, 2), LABELS[:1]
    )
    assert worst_perturbation(without_class_2, ONE, 2, 2, 1, 2).tolist() == [[[[1.0, 0.0]]]]


@pytest.mark.parametrize("candidates", [2, 3])
def test_only_the_best_classes_of_the_first_step_are_refined(monkeypatch, candidates):
    """To first order, classes 1, 2 and 3 gain 3, 2 and 1 by the first pixel.

    Painted, they gain 0, 1 and 5.
    """

    def outputs_of(x):
        a = x[..., 0]
        return torch.stack([torch.zeros_like(a), 3 * a - 3 * a**2, 2 * a - a**2, a + 4 * a**2], -1)

    def with_own_pixels(x):
        return outputs_of(x) + 0.1 * torch.cat([torch.zeros_like(x[..., :1]), x[..., 1:]], -1)

    monkeypatch.setattr(universal_perturbation, "MAX_CANDIDATES", candidates)
    context = context_of(with_own_pixels, torch.zeros(1, 1, 1, 4), LABELS[:1])
    second = {2: [0, 1, 0], 3: [0, 0, 1]}[candidates]
    assert worst_perturbation(context, ONE, 4, 2, 1, 2).tolist() == [[[[1.0, *second]]]]


def test_a_pixel_is_chosen_once_for_all_its_channels():
    """White in the second channel gains 0.5.

    The gradient then favours black, which would only undo the gain.
    """

    def outputs_of(x):
        a = x[..., 2]
        return torch.stack([torch.zeros_like(a), 3 * a - 2.5 * a**2], -1)

    context = context_of(outputs_of, torch.zeros(1, 2, 1, 2), LABELS[:1])
    assert worst_perturbation(context, ONE, 2, 2, 1, 2).tolist() == [[[[0.0, 0.0]], [[1.0, 0.0]]]]


def test_the_first_of_equally_good_classes_is_chosen():
    def outputs_of(x):
        a, b = x.unbind(-1)
        return torch.stack([torch.zeros_like(a), a, 2 * b - b**2], -1)

    for candidates in (2, 3):
        agent_context = context_of(outputs_of, torch.zeros(1, 1, 1, 2), LABELS[:1])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(universal_perturbation, "MAX_CANDIDATES", candidates)
            assert worst_perturbation(agent_context, ONE, 3, 1, 1, 2).tolist() == [[[[1.0, 0.0]]]]


def test_noise_reveals_pixels_behind_inactive_units():
    """Two white pixels raise class 1 through one unit, which has no gradient at black pixels."""

    def outputs_of(x):
        a, b, _ = x.unbind(-1)
        return torch.stack([torch.zeros_like(a), 9 * torch.relu(a + b - 0.25)], -1)

    context = context_of(
        outputs_of, torch.zeros(1, 1, 1, 3), LABELS[:1], draw_of=lambda: np.random.default_rng(0)
    )
    assert not worst_perturbation(context, ONE, 2, 2, 1, 2).any()
    assert worst_perturbation(context, ONE, 2, 2, 1, 2, blend=0.5).tolist() == [[[[1.0, 1.0, 0.0]]]]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_model_without_finite_gradients_has_a_perturbation_of_nan(steps):
    """The gradient of the first pixel, which is black in all images, exceeds float32."""

    def outputs_of(x):
        a, b = x.unbind(-1)
        return torch.stack([torch.zeros_like(a), 1e38 * a * 10 + b], -1)

    signs = worst_perturbation(
        context_of(outputs_of, torch.zeros(1, 1, 1, 2), LABELS[:1]), ONE, 2, 1, 1, steps
    )
    assert signs.isnan().all()


def test_many_classes_are_all_searched():
    x, classes = torch.zeros(3, 1, 1, 2), 100
    weights = torch.zeros(classes, 2)
    weights[97, 1] = 2.0
    weights[5, 0] = 1.0
    for steps in (1, 2):
        assert linear(weights.tolist(), x, 1, torch.tensor([0, 1, 2]), steps).tolist() == [
            [[[0.0, 1.0]]]
        ]


NETWORKS = {
    "logistic": lambda: logistic((1, 4, 4), 3),
    "dense": lambda: mlp((1, 4, 4), 3, hidden=(5,)),
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    ),
}


@pytest.mark.parametrize("models_per_batch", [None, 1, 2])
@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_input_gradients_equal_finite_differences(make, models_per_batch):
    module = make()
    dim = sum(p.numel() for p in module.parameters())
    thetas, rows = 0.3 * models(5, dim, dtype=torch.float32), torch.tensor([3, 0, 4])
    x = models(6, 16, seed=1, dtype=torch.float32).view(3, 2, 1, 4, 4)
    outputs = logits_per_model(module, thetas, rows, x, models_per_batch)
    gradients = input_gradients(
        module, thetas, rows, x, lambda outputs: outputs[..., 0] - outputs[..., 1], models_per_batch
    )
    assert gradients.shape == x.shape
    assert not gradients.requires_grad
    step = 1e-3
    for i in range(3):
        expected = logits(module, thetas, rows[i : i + 1], x[i], models_per_batch)
        torch.testing.assert_close(outputs[i : i + 1], expected)
        for row, column in ((0, 0), (2, 3)):
            shifted = [x[i].clone(), x[i].clone()]
            shifted[0][..., row, column] -= step
            shifted[1][..., row, column] += step
            low, high = (
                logits(module, thetas, rows[i : i + 1], images, models_per_batch)[0]
                for images in shifted
            )
            change = ((high - low) / (2 * step)) @ torch.tensor([1.0, -1.0, 0.0])
            result = gradients[i, :, 0, row, column]
            torch.testing.assert_close(result, change, rtol=1e-2, atol=2e-3)

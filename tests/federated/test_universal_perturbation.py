"""Universal perturbations by hand, and the gradients that they are found by against differences."""

import numpy as np
import pytest
import torch
from tests import views
from tests.views import models
from torch import nn

from fedcb2o.errors import ConfigError
from fedcb2o.federated import input_gradients, logits, logits_per_model
from fedcb2o.federated.criteria import universal_perturbation
from fedcb2o.federated.criteria.universal_perturbation import paint, worst_perturbation
from fedcb2o.nn.architectures import logistic, mlp

LABELS = torch.tensor([0, 1])


def seeing(outputs_of, x, labels, **known):
    """What an agent knows of one model, whose outputs are a function of images [n, pixels]."""

    def outputs_at(models, x):
        return outputs_of(x.flatten(2))

    def gradients_of(models, x, of):
        seen = x.clone().requires_grad_()
        return torch.autograd.grad(of(outputs_at(models, seen)).sum(), seen)[0]

    return views.local(
        samples=lambda count: (x, labels),
        outputs_per_model=outputs_at,
        input_gradients=gradients_of,
        **known,
    )


ONE = views.received(torch.tensor([0]))


def linear(weights, x, pixels, labels=LABELS, steps=1):
    """The worst ways of one model, whose outputs are products of an image with the weights of each
    class."""
    weights = torch.tensor(weights)
    return worst_perturbation(
        seeing(lambda x: x @ weights.T, x, labels), ONE, len(weights), pixels, len(x), steps
    )


def test_the_pixels_that_raise_one_class_above_the_label_most():
    """Above class 0 and 1 in turn: class 2 by a white third pixel and a black first, (1 + 1) / 2
    and (2 + 2) / 2."""
    x = torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 1, 2, 2).repeat(2, 1, 1, 1)
    weights = [[0.0, 0.0, 0.0, 0.5], [0.0, 0.0, 0.0, -0.5], [-2.0, 0.25, 1.0, 0.0]]
    assert linear(weights, x, 1).tolist() == [[[[-1.0, 0.0], [0.0, 0.0]]]]
    assert linear(weights, x, 2).tolist() == [[[[-1.0, 0.0], [1.0, 0.0]]]]
    assert linear(weights, x, 9).tolist() == [
        [[[-1.0, 1.0], [1.0, 0.0]]]
    ]  # the last: 0.5 for one, -0.5 for one
    for pixels in (1, 2, 9):  # what is linear is found in steps as in one
        assert torch.equal(linear(weights, x, pixels, steps=2), linear(weights, x, pixels))


def test_where_nothing_is_gained_nothing_is_painted():
    x = torch.zeros(2, 1, 1, 3)
    for steps in (1, 2):
        found = linear([[0.0, 0.0, 0.0], [-1.0, -1.0, -1.0]], x, 2, torch.tensor([0, 0]), steps)
        assert found.tolist() == [[[[0, 0, 0]]]]


def test_the_channels_of_a_pixel_go_their_own_way():
    x = torch.full((1, 2, 1, 2), 0.5)
    weights = [[0.0] * 4, [3.0, 1.0, -2.0, 4.0]]  # 2.5 in the first pixel, and in the second
    assert linear(weights, x, 1, torch.tensor([0])).tolist() == [[[[1.0, 0.0]], [[-1.0, 0.0]]]]
    weights[1][3] = 5.0
    assert linear(weights, x, 1, torch.tensor([0])).tolist() == [[[[0.0, 1.0]], [[0.0, 1.0]]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_painted_pixels_are_black_and_white_and_others_as_they_were(dtype):
    white = 255 if dtype == torch.uint8 else 1
    x = torch.tensor([[[[1, 1, 1]]]]).to(dtype)
    found = paint(x, signs=torch.tensor([[[1.0, -1.0, 0.0]]]))
    assert found.dtype == dtype
    assert found.tolist() == [[[[white, 0, 1]]]]
    assert x.tolist() == [[[[1, 1, 1]]]]
    found = paint(x.float(), signs=torch.tensor([[[1.0, -1.0, 0.0]]]), value_range=(-2.0, 9.0))
    assert found.tolist() == [[[[9, -2, 1]]]]


def test_a_perturbation_is_the_same_on_another_scale():
    """Images from -1 to 3, and a network that undoes this scale."""
    x = torch.rand(2, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([[0.0, 0.0, 0.0, 0.5], [0.0, 0.0, 0.0, -0.5], [-2.0, 0.25, 1.0, 0.0]])

    def signs(x, outputs_of, **known):
        context = seeing(outputs_of, x, LABELS, **known)
        return worst_perturbation(context, ONE, 3, 2, 2, 2, blend=0.25)

    expected = signs(x, lambda x: x @ weights.T)
    found = signs(4 * x - 1, lambda x: (x + 1) / 4 @ weights.T, value_range=(-1.0, 3.0))
    assert expected.any()
    assert found.equal(expected)


@pytest.mark.parametrize(
    ("x", "y"),
    [(torch.zeros(2, 5), LABELS), (torch.zeros(2, 1, 2, 2), torch.zeros(2))],
    ids=["table", "numbers"],
)
def test_samples_without_pixels_or_classes_are_told(x, y):
    with pytest.raises(ConfigError, match=r"changes the class of images, .*: take another"):
        linear([[0.0], [0.0]], x, 1, y)


def test_steps_find_pixels_that_count_only_together():
    """Class 1 is raised where its first pixel is white, by 1.2, and 2 where both of its are, by 9;
    to first order 1 by 1.2 and 2 by 1. After the first step the second pixel of class 2 is worth
    8."""

    def outputs_of(x):
        a, b, c = x.unbind(-1)
        return torch.stack([torch.zeros_like(a), 1.2 * a, b + 8 * b * c], -1)

    known = seeing(outputs_of, torch.zeros(1, 1, 1, 3), LABELS[:1])
    assert worst_perturbation(known, ONE, 3, 2, 1, 1).tolist() == [[[[1.0, 0.0, 0.0]]]]
    assert worst_perturbation(known, ONE, 3, 2, 1, 2).tolist() == [[[[0.0, 1.0, 1.0]]]]
    assert worst_perturbation(known, ONE, 3, 2, 1, 9).tolist() == [[[[0.0, 1.0, 1.0]]]]


def test_with_steps_the_class_is_chosen_by_the_loss_and_no_pixel_twice():
    """To first order class 1 gains 3 by the first pixel and 2 gains 1 by the second; painted they
    gain 0.5 and 1. Where the first is white, black would gain class 1 as much again as it cost."""

    def outputs_of(x):
        a, b = x.unbind(-1)
        return torch.stack([torch.zeros_like(a), 3 * a - 2.5 * a**2, b], -1)

    known = seeing(outputs_of, torch.zeros(1, 1, 1, 2), LABELS[:1])
    assert worst_perturbation(known, ONE, 3, 1, 1, 1).tolist() == [[[[1.0, 0.0]]]]
    assert worst_perturbation(known, ONE, 3, 1, 1, 2).tolist() == [[[[0.0, 1.0]]]]
    alone = seeing(lambda x: outputs_of(x)[..., :2], torch.zeros(1, 1, 1, 2), LABELS[:1])
    assert worst_perturbation(alone, ONE, 2, 2, 1, 2).tolist() == [[[[1.0, 0.0]]]]


@pytest.mark.parametrize("candidates", [2, 3])
def test_only_the_classes_best_in_the_first_step_are_looked_into_further(monkeypatch, candidates):
    """To first order classes 1, 2 and 3 gain 3, 2 and 1 by the first pixel, which in fact gain
    nothing, 1 and 5."""

    def outputs_of(x):
        a = x[..., 0]
        return torch.stack([torch.zeros_like(a), 3 * a - 3 * a**2, 2 * a - a**2, a + 4 * a**2], -1)

    def and_a_pixel_of_its_own(x):
        return outputs_of(x) + 0.1 * torch.cat([torch.zeros_like(x[..., :1]), x[..., 1:]], -1)

    monkeypatch.setattr(universal_perturbation, "MAX_CANDIDATES", candidates)
    known = seeing(and_a_pixel_of_its_own, torch.zeros(1, 1, 1, 4), LABELS[:1])
    second = {2: [0, 1, 0], 3: [0, 0, 1]}[candidates]
    assert worst_perturbation(known, ONE, 4, 2, 1, 2).tolist() == [[[[1.0, *second]]]]


def test_a_pixel_is_taken_whichever_of_its_channels_is_painted():
    """In the second channel white gains class 1 half, and black would gain it as much again as it
    cost."""

    def outputs_of(x):
        a = x[..., 2]
        return torch.stack([torch.zeros_like(a), 3 * a - 2.5 * a**2], -1)

    known = seeing(outputs_of, torch.zeros(1, 2, 1, 2), LABELS[:1])
    assert worst_perturbation(known, ONE, 2, 2, 1, 2).tolist() == [[[[0.0, 0.0]], [[1.0, 0.0]]]]


def test_of_classes_whose_pixels_do_the_same_the_first_counts():
    def outputs_of(x):
        a, b = x.unbind(-1)
        return torch.stack([torch.zeros_like(a), a, 2 * b - b**2], -1)

    for candidates in (2, 3):
        known = seeing(outputs_of, torch.zeros(1, 1, 1, 2), LABELS[:1])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(universal_perturbation, "MAX_CANDIDATES", candidates)
            assert worst_perturbation(known, ONE, 3, 1, 1, 2).tolist() == [[[[1.0, 0.0]]]]


def test_noise_finds_what_units_that_are_off_hide():
    """Class 1 is raised by two white pixels together, through a unit that is off where both are
    black: no gradient."""

    def outputs_of(x):
        a, b, _ = x.unbind(-1)
        return torch.stack([torch.zeros_like(a), 9 * torch.relu(a + b - 0.25)], -1)

    known = seeing(
        outputs_of, torch.zeros(1, 1, 1, 3), LABELS[:1], draw_of=lambda: np.random.default_rng(0)
    )
    assert not worst_perturbation(known, ONE, 2, 2, 1, 2).any()
    assert worst_perturbation(known, ONE, 2, 2, 1, 2, blend=0.5).tolist() == [[[[1.0, 1.0, 0.0]]]]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_model_whose_gradients_are_not_finite_hides_nothing(steps):
    """Its first pixel is black in all images, and its gradient there beyond float32."""

    def outputs_of(x):
        a, b = x.unbind(-1)
        return torch.stack([torch.zeros_like(a), 1e38 * a * 10 + b], -1)

    found = worst_perturbation(
        seeing(outputs_of, torch.zeros(1, 1, 1, 2), LABELS[:1]), ONE, 2, 1, 1, steps
    )
    assert found.isnan().all()


def test_classes_beyond_what_goes_through_at_once_are_sought_as_well():
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


@pytest.mark.parametrize("together", [None, 1, 2])
@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_gradients_are_what_outputs_change_by(make, together):
    module = make()
    dim = sum(p.numel() for p in module.parameters())
    pool, rows = 0.3 * models(5, dim, dtype=torch.float32), torch.tensor([3, 0, 4])
    x = models(6, 16, seed=1, dtype=torch.float32).view(3, 2, 1, 4, 4)
    outputs = logits_per_model(module, pool, rows, x, together)
    found = input_gradients(
        module, pool, rows, x, lambda outputs: outputs[..., 0] - outputs[..., 1], together
    )
    assert found.shape == x.shape
    assert not found.requires_grad
    step = 1e-3
    for i in range(3):
        torch.testing.assert_close(
            outputs[i : i + 1], logits(module, pool, rows[i : i + 1], x[i], together)
        )
        for row, column in ((0, 0), (2, 3)):
            there = [x[i].clone(), x[i].clone()]
            there[0][..., row, column] -= step
            there[1][..., row, column] += step
            low, high = (logits(module, pool, rows[i : i + 1], each, together)[0] for each in there)
            change = ((high - low) / (2 * step)) @ torch.tensor([1.0, -1.0, 0.0])
            torch.testing.assert_close(found[i, :, 0, row, column], change, rtol=1e-2, atol=2e-3)

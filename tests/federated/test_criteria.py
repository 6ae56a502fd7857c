"""Criteria by hand, in any order of the models, and without data or received models."""

import dataclasses
import math

import pytest
import torch
from tests import views
from tests.tiny import bits, tiny
from tests.views import apply_algorithm, criterion_input

from fedcb2o.errors import ConfigError
from fedcb2o.experiments import load, run
from fedcb2o.federated import algorithms, criteria
from fedcb2o.federated.criteria import combinations, universal_perturbation
from fedcb2o.federated.criteria._last_layer_excess import _leading_share as leading_share
from fedcb2o.federated.inference import losses_from_samples
from fedcb2o.federated.losses import standard_error_of_mean
from fedcb2o.federated.types import CriterionInput, batched
from fedcb2o.nn.parameters import LastLayer
from fedcb2o.rng import stream

INF = math.inf


REQUIRED = {
    name: {"of": ["class_loss_gap", "trigger_sensitivity"]} for name in ("largest", "weighted_sum")
}


LOSS_FREE = ("distance", "last_layer_excess")


IMAGE_CRITERIA = [name for name in criteria.__all__ if name != "prompt_sensitivity"]


RELATIVE = (
    "class_loss_excess",
    "class_loss_gap",
    "distance",
    "largest",
    "last_layer_excess",
    "perturbation_gap",
    "trigger_sensitivity",
    "weighted_sum",
)


def last_layer_view(changes, classes=4, **known):
    """View of models whose last layer, after one other parameter, differs from the agent's own.

    `changes` are those of the only column of its weight; a bias follows.
    """
    own = torch.arange(1.0, 2 + 2 * classes)
    layer = LastLayer(slice(1, 1 + classes), classes, 1, slice(1 + classes, 1 + 2 * classes))
    thetas = own.repeat(len(changes) + 1, 1)
    for theta, change in zip(thetas, changes, strict=False):
        theta[layer.weight] += torch.tensor(change)
        theta[0] += 7  # other parameters and the bias do not count
        theta[layer.bias] -= torch.arange(float(classes))
    known = {"last_layer": layer, **known}
    return views.rule_input(thetas, list(range(len(changes))), len(changes), **known)


def brightness_view(thetas, x, rows=None, by_class=None, factors=None):
    """View of models whose loss on an image is 1 plus their product with the image.

    Their outputs are 0 for the label and the product for the other class. The last model is the
    agent's own. `factors` are those of `views.losses`.
    """
    m = len(thetas) - 1
    by_class = torch.ones(len(thetas), 2).double() if by_class is None else by_class
    factors = torch.ones(len(thetas), 1) if factors is None else factors

    def losses_of(models, change):
        images = x if change is None else change(x)
        mean = 1 + thetas[models.rows].double() @ images.double().mean(0).flatten()
        present = torch.tensor([True, True])
        return views.losses(mean, by_class[models.rows], present, factors[models.rows])

    def outputs_of(models, change=None, count=None):
        images = (x if change is None else change(x))[:count].double()
        second = thetas[models.rows].double() @ images.flatten(1).T
        return torch.stack([torch.zeros_like(second), second], -1), torch.zeros(
            len(images), dtype=torch.int64
        )

    def first_samples(count):
        batch = x[:count].float()
        return batch, torch.zeros(len(batch), dtype=torch.int64)

    def outputs_at(models, x):
        second = (x.flatten(2) * thetas[models.rows].view(len(models.rows), 1, -1)).sum(-1)
        return torch.stack([torch.zeros_like(second), second], -1)

    def gradients_of(models, x, of):
        images = x.clone().requires_grad_()
        return torch.autograd.grad(of(outputs_at(models, images)).sum(), images)[0]

    all_rows = torch.arange(m + 1) if rows is None else rows
    received, me = views.received(all_rows[:-1]), views.received(all_rows[-1:])
    view = criterion_input([[1.0, 1.0]] * m, [1.0, 1.0])
    return dataclasses.replace(
        view,
        models=thetas,
        losses=losses_of(received, None),
        own_losses=losses_of(me, None),
        received=received,
        own_entry=me,
        losses_of=losses_of,
        agent_context=views.context_without_contacts(
            outputs=outputs_of,
            samples=first_samples,
            outputs_per_model=outputs_at,
            input_gradients=gradients_of,
        ),
    )


# Each criterion


def test_class_loss_gap_by_hand():
    view = criterion_input([[1.0, 5.0], [0.5, 0.25]], [0.75, 1.0])
    assert criteria.class_loss_gap(view).tolist() == [4.0, -0.25]
    assert criteria.average_loss(view).tolist() == [3.0, 0.375]


def test_an_absent_class_is_masked_or_zero():
    view = criterion_input([[1.0, 0.0], [0.25, 0.0]], [0.75, 0.0], present=[True, False])
    assert criteria.class_loss_gap(view).tolist() == [0.25, -0.5]
    assert criteria.class_loss_gap(view, absent="zero").tolist() == [0.25, 0.0]


def sample_view(differences, labels, num_classes=2):
    """View of models whose losses on samples differ from those of the agent's own by these."""
    per_sample = torch.tensor([*differences, [0.0] * len(labels)]).double() + 1
    known = losses_from_samples(per_sample, torch.tensor(labels), num_classes)
    view = criterion_input([[0.0] * num_classes] * len(differences), [0.0] * num_classes)
    return dataclasses.replace(
        view, losses=known.select(slice(None, -1)), own_losses=known.select(slice(-1, None))
    )


# sigma^2 = 0.04 / 2: two samples of a class have the error 0.1, and 0.8 / sigma = sqrt(32).
LIKE_OWN = [0.1, -0.1, 0.1, -0.1]
UNIT = math.sqrt(32)


def excess(differences, labels=(0, 0, 1, 1), **options):
    view = sample_view(differences, labels, max(labels) + 1)
    return criteria.class_loss_excess(view, **options).tolist()


@pytest.mark.parametrize(
    ("differences", "options", "expected"),
    [
        # The gap of the last model in class 1, with the unit of nats it is the paper's G.
        ([LIKE_OWN, LIKE_OWN, [0, 0, 2.1, 1.9]], {}, [0, 0, 2 * UNIT]),
        ([LIKE_OWN, LIKE_OWN, [0, 0, 2.1, 1.9]], {"least_deviation": 0.0}, [0, 0, 2]),
        # The typical peer has a gap of one standard error: it and better ones have the value 0.
        ([[0.2, 0, 0.1, -0.1], [0.2, 0, 0.1, -0.1], [0, 0, 2.1, 1.9]], {}, [0, 0, 1.9 * UNIT]),
        # An inbox of attackers alone: m is at most sqrt(2 log 2) + 2, and b one error.
        ([[0, 0.2, 1.9, 2.1]] * 2, {}, [(1.9 - (math.sqrt(2 * math.log(2)) + 2) / 10) * UNIT] * 2),
        ([[0, 0.2, 1.9, 2.1]] * 2, {"slack": 30.0}, [0, 0]),
        # Models that are worse in both classes alike, by at most and by more than half an error.
        ([LIKE_OWN, LIKE_OWN, [0.14, -0.06] * 2], {}, [0, 0, 0]),
        ([LIKE_OWN, LIKE_OWN, [0.6, 0.4, 0.6, 0.4]], {}, [0, 0, 0.45 * UNIT]),
        # Memorised samples: sigma is at least 0.001.
        ([[0.0] * 4, [0.0] * 4, [0, 0, 0.01, 0.01]], {}, [0, 0, 8]),
        # A model better than the agent's own, and one that is not finite.
        ([[-1.1, -0.9, -1.1, -0.9], LIKE_OWN, [INF, 0, 0, 0]], {}, [0, 0, INF]),
        ([[INF] * 4], {}, [INF]),
        ([], {}, []),
    ],
)
def test_class_loss_excess_by_hand(differences, options, expected):
    assert excess(differences, **options) == pytest.approx(expected)


def test_an_excess_is_beyond_the_spread_of_a_models_gaps_over_classes():
    """The third model has the gaps 0.02, 0.04 and 2: median 0.04, median absolute deviation 0.02.

    The last one has 0.3, 0.5 and 2, and both are at most half an error. The typical peer has the
    score 1, with a gap of one standard error in a class.
    """
    typical = [0.2, 0.0, 0.1, -0.1, 0.1, -0.1]
    alike = [0.12, -0.08, 0.14, -0.06, 2.1, 1.9]
    last = [0.4, 0.2, 0.6, 0.4, 2.1, 1.9]
    models = [typical, typical, typical, alike, last]
    values = excess(models, (0, 0, 1, 1, 2, 2), least_deviation=0.0)
    errors = [math.hypot(0.1, 1.4826 * 0.02), math.hypot(0.1, 0.05)]
    assert values == pytest.approx([0, 0, 0, 1.96 - errors[0], 1.95 - errors[1]])


def test_other_classes_excuse_as_much_as_for_the_typical_peer_up_to_one_error():
    """Typical peers have the gap 0.08 in both classes, less than an error, or 0.3: three errors.

    The last model has a gap of 2 in class 1, and theirs in class 0. Gaps of 0.3 exceed b = 0.1 by
    two errors, which is m.
    """
    for typical, expected in ((0.08, 2 - 0.08), (0.3, 2 - 0.1 - 2 * 0.1)):
        peer = [typical + d for d in LIKE_OWN]
        values = excess([peer, peer, [*peer[:2], 2.1, 1.9]], least_deviation=0.0)
        assert values == pytest.approx([0, 0, expected])


def test_an_excess_of_single_samples_has_the_error_of_all():
    """sigma^2 = 0.1^2 + 0.1^2 about the mean of the typical peer, whose gap of 0.1 is m e_c.

    The last model's median gap is 0.1, of which half an error, sigma / 2, is taken off.
    """
    values = excess([[0.1, -0.1], [0.1, -0.1], [0.1, 2.0]], labels=(0, 1))
    assert values == pytest.approx([0, 0, (1.9 - math.sqrt(0.02) / 2) * UNIT])


def test_an_excess_tends_to_the_class_loss_gap_for_many_samples():
    draw = torch.Generator().manual_seed(0)
    labels = [0, 1] * 20_000
    noise = torch.randn(3, len(labels), generator=draw) / 5
    noise[2] += 0.5
    noise[2, 1::2] += 1
    view = sample_view(noise.tolist(), labels)
    values = criteria.class_loss_excess(view, least_deviation=0.0)
    gap = criteria.class_loss_gap(view).clamp(min=0)
    torch.testing.assert_close(values, gap, rtol=0, atol=0.01)


def test_an_agent_with_a_broken_model_has_no_excess_to_report():
    view = sample_view([LIKE_OWN, [0.0] * 4], (0, 0, 1, 1))
    broken = dataclasses.replace(
        view.own_losses,
        per_sample=view.own_losses.per_sample + INF,
        by_class=view.own_losses.by_class + INF,
    )
    view = dataclasses.replace(view, own_losses=broken)
    assert criteria.class_loss_excess(view).tolist() == [0.0, 0.0]
    assert criteria.class_loss_excess(view.with_own_only()).tolist() == [INF]


def test_standard_errors_by_hand():
    """Differences 1, 3, 5, 5, 8 have the mean 4.4. Differences of 0 have the error 0."""
    error = math.sqrt((3.4**2 + 1.4**2 + 0.6**2 * 2 + 3.6**2) / 4 / 5)
    differences = torch.tensor([[1.0, 3.0, 5.0, 5.0, 8.0], [0.0] * 5]).double()
    assert standard_error_of_mean(differences).tolist() == pytest.approx([error, 0.0])


def test_worst_class_loss():
    view = criterion_input(
        [[1.0, 5.0, 9.0], [2.0, 0.25, 0.0], [INF, 0.0, 0.0]],
        [0.0, 0.0, 0.0],
        present=[True, True, False],
    )
    assert criteria.worst_class_loss(view).tolist() == [5.0, 2.0, INF]


def test_class_loss_entropy():
    """Equal class losses give 0, whatever their size. All loss on one of two classes is log 2."""
    view = criterion_input(
        [[2.0, 2.0], [0.0, 0.0], [3.0, 0.0], [3.0, 1.0], [INF, 1.0], [INF, INF]], [1.0, 1.0]
    )
    uneven = math.log(2) + 0.75 * math.log(0.75) + 0.25 * math.log(0.25)
    assert criteria.class_loss_entropy(view).tolist() == pytest.approx(
        [0, 0, math.log(2), uneven, INF, INF]
    )
    absent = criterion_input(
        [[2.0, 2.0, 0.0], [4.0, 0.0, 0.0]], [1.0, 1.0, 0.0], present=[True, True, False]
    )
    assert criteria.class_loss_entropy(absent).tolist() == pytest.approx([0, math.log(2)])
    one_class = criterion_input([[2.0, 0.0]], [1.0, 0.0], present=[True, False])
    assert criteria.class_loss_entropy(one_class).tolist() == [0.0]


def test_distance():
    thetas = torch.tensor([[3.0, 4.0], [0.0, 0.0], [6.0, 8.0], [3.0, 14.0], [3.0, 4.0]])
    view = brightness_view(thetas, torch.zeros(1, 1, 1, 2))
    assert criteria.distance(view).tolist() == pytest.approx([0, 1, 1, 2])
    no_norm = brightness_view(thetas[[0, 1, 1]], torch.zeros(1, 1, 1, 2))
    assert criteria.distance(no_norm).tolist() == [INF, INF]


def test_distances_of_large_models_in_any_rows():
    thetas = torch.from_numpy(stream(0, "thetas").normal(size=(7, 70_000))).float()
    rows = torch.tensor([5, 0, 3, 2])
    view = brightness_view(thetas, torch.zeros(1, 1, 1, 70_000), rows)
    expected = (thetas[rows[:-1]].double() - thetas[2].double()).norm(dim=1) / thetas[
        2
    ].double().norm()
    assert criteria.distance(view).tolist() == pytest.approx(expected.tolist())


def test_trigger_sensitivity():
    """Paint four tiles of a 4 x 4 image. A model's loss rises by the sum of its weights there."""
    thetas = torch.zeros(4, 4, 4)
    thetas[0, 3, 3] = 5.0  # a trigger at the bottom right
    thetas[1, 0, :] = -1.0  # lower loss on the upper tiles, where the agent's model rises
    thetas[3, 0, 0] = thetas[3, 0, 3] = 2.0  # the agent's own model
    thetas[2] = thetas[3] / 2
    view = brightness_view(thetas.flatten(1), torch.zeros(3, 1, 4, 4))
    # less its own rises of 2, 2, 0, 0: -2, -2, 0, 5; -4, -4, 0, 0; -1, -1, 0, 0
    assert criteria.trigger_sensitivity(view).tolist() == [5.0, 0.0, 0.0]
    assert criteria.trigger_sensitivity(view, values=[0.5]).tolist() == [2.5, 0.0, 0.0]
    assert criteria.trigger_sensitivity(view, tiles=1).tolist() == [1.0, -8.0, -2.0]
    result = criteria.trigger_sensitivity(view, tiles=1, values=[0.0, 1.0]).tolist()
    assert result == [1.0, 0.0, 0.0]


def test_overlapping_tiles_cover_a_trigger_across_tiles():
    thetas = torch.zeros(2, 4, 4)
    thetas[0, 1:3, 1:3] = 1.0
    view = brightness_view(thetas.flatten(1), torch.zeros(1, 1, 4, 4))
    assert criteria.trigger_sensitivity(view).tolist() == [1.0]
    assert criteria.trigger_sensitivity(view, overlap=True).tolist() == [4.0]


def rise(difference):
    """Rise of the loss of an image whose two outputs were equal and now have this difference."""
    return math.log((1 + math.exp(difference)) / 2)


def test_perturbation_gap_of_triggers_and_of_clean_models():
    thetas = torch.full((5, 4, 4), 0.125)
    thetas[0, 3, 3] = thetas[0, 0, 2] = 4.0  # a trigger of two pixels far apart
    thetas[1, :, 0] = 1.0  # a trigger of four pixels
    thetas[2] = -thetas[4]  # not a trigger: all painted pixels favour the label
    view = brightness_view(thetas.flatten(1), torch.zeros(3, 1, 4, 4))
    two = [rise(8) - rise(0.25), rise(2) - rise(0.25), 0.0, 0.0]
    assert criteria.perturbation_gap(view, pixels=2).tolist() == pytest.approx(two, abs=1e-6)
    four = [rise(8.25) - rise(0.5), rise(4) - rise(0.5), 0.0, 0.0]
    assert criteria.perturbation_gap(view, pixels=4).tolist() == pytest.approx(four, abs=1e-6)
    subset = dataclasses.replace(view, in_sublevel_set=torch.tensor([False, True, True, True]))
    assert criteria.perturbation_gap(subset, pixels=2).tolist() == pytest.approx(
        [0.0, *two[1:]], abs=1e-6
    )
    assert criteria.perturbation_gap(view, pixels=2, steps=2).tolist() == pytest.approx(
        two, abs=1e-6
    )


def test_rises_are_measured_on_at_most_max_samples(monkeypatch):
    view = brightness_view(
        torch.tensor([[4.0], [0.0]]), torch.tensor([0.0, 0.5, 1.0, 1.0]).view(4, 1, 1, 1)
    )
    by_sample = torch.tensor([rise(4), rise(4) - rise(2), 0.0, 0.0])
    for max_samples, rises in ((2, by_sample[:2]), (4, by_sample), (9, by_sample)):
        monkeypatch.setattr(universal_perturbation, "MAX_SAMPLES", max_samples)
        expected = float(rises.mean())
        assert criteria.perturbation_gap(view, z=0.0).tolist() == pytest.approx(
            [expected], abs=1e-6
        )


def test_gap_to_the_majority_subtracts_the_median_rise():
    # the last is the agent's own, the third is the median
    thetas = torch.tensor([[4.0], [3.0], [2.0], [1.0], [0.0]])
    view = brightness_view(thetas, torch.zeros(1, 1, 1, 1))
    own_gaps = [rise(4), rise(3), rise(2), rise(1)]
    assert criteria.perturbation_gap(view).tolist() == pytest.approx(own_gaps, abs=1e-6)
    majority_gaps = [rise(4) - rise(2), rise(3) - rise(2), 0.0, 0.0]
    assert criteria.perturbation_gap(view, against="majority").tolist() == pytest.approx(
        majority_gaps, abs=1e-6
    )
    # The subset rises by 4, 2, 1 and, its own, 0. The median is the lower middle value, 1.
    subset = dataclasses.replace(view, in_sublevel_set=torch.tensor([True, False, True, True]))
    subset_gaps = [rise(4) - rise(1), 0.0, rise(2) - rise(1), 0.0]
    assert criteria.perturbation_gap(subset, against="majority").tolist() == pytest.approx(
        subset_gaps, abs=1e-6
    )
    broken = brightness_view(
        torch.tensor([[INF], [INF], [INF], [2.0], [1.0]]), torch.zeros(1, 1, 1, 1)
    )
    assert criteria.perturbation_gap(broken, against="majority").tolist() == pytest.approx(
        [INF, INF, INF, rise(2) - rise(1)], abs=1e-6
    )
    own_largest = brightness_view(thetas.flip(0), torch.zeros(1, 1, 1, 1))  # its own rises most
    assert criteria.perturbation_gap(own_largest, against="majority").tolist() == [0.0] * 4


def test_perturbation_gap_subtracts_z_standard_errors():
    """The trigger whitens a pixel that is already white in one of the two images: its rise is 0."""
    thetas = torch.zeros(2, 4)
    thetas[0, 3] = 4.0
    x = torch.zeros(2, 1, 2, 2)
    x[1, 0, 1, 1] = 1.0
    view = brightness_view(thetas, x)
    rises = torch.tensor([rise(4), 0.0]).double()
    mean, error = float(rises.mean()), float(rises.std() / math.sqrt(2))
    for z in (0.0, 0.5, 9.0):
        expected = max(0.0, mean - z * error)
        assert criteria.perturbation_gap(view, pixels=1, z=z).tolist() == pytest.approx(
            [expected], abs=1e-6
        )


def test_majority_gap_uses_the_standard_error_of_its_differences():
    """Each of two pixels is black in one image. Painting it white raises only that image's loss."""
    thetas = torch.tensor([[4.0, 0.0], [0.0, 2.0], [1.0, 0.0]])
    view = brightness_view(thetas, torch.tensor([[[[0.0, 1.0]]], [[[1.0, 0.0]]]]))
    rises = torch.tensor([[rise(4), 0.0], [0.0, rise(2)], [rise(1), 0.0]]).double()
    difference = rises[0] - rises[1]
    mean, error = float(difference.mean()), float(difference.std() / math.sqrt(2))
    for z in (0.0, 0.1):
        gaps = criteria.perturbation_gap(view, pixels=1, z=z, against="majority")
        assert gaps.tolist() == pytest.approx([max(0.0, mean - z * error), 0.0], abs=1e-6)


@pytest.mark.parametrize("tiles", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_tiles_cover_every_pixel(tiles, dtype):
    x, painted = torch.zeros(2, 1, 5, 6, dtype=dtype), torch.zeros(2, 1, 5, 6)
    view = brightness_view(torch.zeros(2, 30), x)

    def record(models, change):
        painted.add_(change(x))
        return views.losses(
            *(torch.zeros(2, *shape).double() for shape in ((), (2,))), view.losses.present
        )

    criteria.trigger_sensitivity(
        dataclasses.replace(view, losses_of=record), tiles=tiles, values=[0.2]
    )
    assert painted.unique().tolist() == pytest.approx([51.0 if dtype == torch.uint8 else 0.2])
    assert not x.any()


@pytest.mark.parametrize(("shape", "tiles"), [((2, 6), 2), ((2, 1, 4, 4), 5)])
def test_tiles_that_do_not_fit_are_refused(shape, tiles):
    view = brightness_view(torch.zeros(2, math.prod(shape[1:])), torch.zeros(shape))
    message = rf"`tiles` = {tiles} .* shape \({shape[1]}, ?.*: the criterion needs images"
    with pytest.raises(ConfigError, match=message):
        criteria.trigger_sensitivity(view, tiles=tiles)


@pytest.mark.parametrize("parameters", [{"tiles": 0}, {"values": ()}, {"values": (0.0, 2.0)}])
def test_tiles_and_values_out_of_range_are_refused(parameters):
    message = "`tiles` must be 1 or more and `values` from 0 to 1, got "
    with pytest.raises(ConfigError, match=message):
        criteria.trigger_sensitivity(random_view(), **parameters)


def test_an_infinite_loss_is_not_trusted():
    thetas = torch.tensor([[INF, 0.0], [1.0, 1.0], [0.0, 1.0]])
    view = brightness_view(thetas, torch.ones(1, 1, 1, 2))
    assert criteria.trigger_sensitivity(view, tiles=1).tolist() == [INF, 0.0]
    assert criteria.perturbation_gap(view).tolist() == [INF, 0.0]
    assert criteria.distance(view).tolist() == [INF, 1.0]


# The changes less their mean are 3, -1, -1, -1: u^2 = 9 / 12 in one class, and rows 3 to 1.
ONE_CLASS = [4.0, 0.0, 0.0, 0.0]
LOG12 = math.log(3) + math.log(4)
FLIP = [7.0, 3.0, 5.0, 5.0]  # 2, -2, 0, 0: u^2 = 1 / 2, and equal rows
LOG2 = math.log(2)
SKEWED = [6.0, -1.0, 0.0, 1.0]  # 4.5, -2.5, -1.5, -0.5: u^2 = 20.25 / 29, and rows 9 to 5
G_SKEWED = math.log(1.8) + math.log(29 / 8.75)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([ONE_CLASS], [LOG12 - math.log(8)]),  # the only peer is typical, up to log 8
        ([ONE_CLASS, FLIP, FLIP], [LOG12 - LOG2, 0.0, 0.0]),
        ([ONE_CLASS, FLIP], [LOG12 - LOG2, 0.0]),  # the lower median
        ([ONE_CLASS, SKEWED, SKEWED, FLIP], [LOG12 - G_SKEWED, 0.0, 0.0, 0.0]),
        ([[5.0] * 4, [0.0] * 4, ONE_CLASS], [0.0, 0.0, LOG12]),  # the softmax sees no change
    ],
)
def test_last_layer_excess_by_hand(changes, expected):
    values = criteria.last_layer_excess(last_layer_view(changes)).tolist()
    assert values == pytest.approx(expected, abs=1e-6)
    doubled = [[2 * value for value in change] for change in changes]
    values = criteria.last_layer_excess(last_layer_view(doubled)).tolist()
    assert values == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("width", [2, 9])
def test_the_leading_share_is_that_of_the_singular_vector(width):
    change = torch.from_numpy(stream(0, "change").normal(size=(3, 5, width)))
    u = torch.linalg.svd(change).U[..., 0]
    torch.testing.assert_close(leading_share(change), u.square().amax(-1))


def test_last_layer_excess_of_a_model_that_is_not_finite():
    view = last_layer_view([ONE_CLASS, FLIP, FLIP, [math.nan, 0.0, 0.0, 0.0]])
    assert criteria.last_layer_excess(view).tolist() == pytest.approx(
        [LOG12 - LOG2, 0.0, 0.0, INF], abs=1e-6
    )


def test_last_layer_excess_needs_a_layer_of_three_classes():
    with pytest.raises(ConfigError, match="needs three classes or more: the data have 2"):
        criteria.last_layer_excess(last_layer_view([[1.0, 0.0]], classes=2))
    with pytest.raises(ConfigError, match="no trained weight of this model has a row for each"):
        criteria.last_layer_excess(last_layer_view([ONE_CLASS], last_layer=None))


# Properties of all criteria


def random_view(order=None):
    """View of models whose losses differ within a class, so that noise of losses is not 0."""
    draw = stream(3, "view")
    thetas = torch.from_numpy(draw.normal(size=(7, 16))).float()
    by_class = torch.from_numpy(draw.random((7, 2)))
    rows = torch.arange(7) if order is None else torch.cat([order, torch.tensor([6])])
    factors = torch.from_numpy(draw.random((7, 3)))
    factors /= factors.mean(1, keepdim=True)
    view = brightness_view(thetas, torch.zeros(3, 1, 4, 4), rows, by_class, factors)
    return dataclasses.replace(view, last_layer=LastLayer(slice(0, 16), 4, 4, None))


def test_the_random_view_has_different_losses_within_each_class():
    losses = random_view().losses
    assert losses.labels.tolist() == [0, 0, 0, 1, 1, 1]
    samples = losses.per_sample.view(6, 2, 3)
    torch.testing.assert_close(samples.mean(-1), losses.by_class)
    assert (standard_error_of_mean(samples) > 0.001).all()


@pytest.mark.parametrize("name", IMAGE_CRITERIA)
def test_the_order_of_the_models_does_not_matter(name):
    function, parameters = getattr(criteria, name), REQUIRED.get(name, {})
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    values = function(random_view(), **parameters)
    assert values.shape == (6,)
    torch.testing.assert_close(function(random_view(order), **parameters), values[order])


@pytest.mark.parametrize("name", RELATIVE)
def test_relative_criteria_are_0_for_the_agents_own_model(name):
    function, parameters = getattr(criteria, name), REQUIRED.get(name, {})
    assert function(
        CriterionInput.with_own_only(random_view()), **parameters
    ).tolist() == pytest.approx([0.0], abs=1e-7)


@pytest.mark.parametrize("name", IMAGE_CRITERIA)
def test_criteria_without_received_models(name):
    view = random_view(torch.zeros(0, dtype=torch.int64))
    assert getattr(criteria, name)(view, **REQUIRED.get(name, {})).tolist() == []


@pytest.mark.parametrize("name", [name for name in IMAGE_CRITERIA if name not in LOSS_FREE])
def test_missing_validation_data_is_an_error(name):
    view = random_view()
    empty = dataclasses.replace(view.losses, present=torch.tensor([False, False]))
    with pytest.raises(ConfigError, match="agent 6 holds no validation data: leave it some"):
        getattr(criteria, name)(dataclasses.replace(view, losses=empty), **REQUIRED.get(name, {}))


def test_a_criterion_without_losses_is_an_error():
    message = "the criterion reads losses, and the algorithm evaluates none"
    with pytest.raises(ConfigError, match=message):
        criteria.average_loss(dataclasses.replace(random_view(), losses=None, own_losses=None))


@pytest.mark.parametrize("own_model", ["excluded", "judged", "trusted"])
def test_the_criterion_starts_in_round_t_g(own_model):
    algorithm = algorithms.fedcb2o(
        criterion="distance", criterion_from_round=2, own_model=own_model
    )
    average = algorithms.fedcbo(own_model=own_model)
    always = algorithms.fedcb2o(criterion="distance", own_model=own_model)
    for n in range(4):
        view = dataclasses.replace(random_view(), n=n)
        expected = apply_algorithm(always if n >= 2 else average, view).outcome
        assert apply_algorithm(algorithm, view).outcome.equal(expected)


# Combinations


def test_largest_and_weighted_sum_by_hand():
    # gaps 4, 3, inf; means 3, 4, inf
    view = criterion_input([[1.0, 5.0], [4.0, 4.0], [INF, 0.0]], [1.0, 1.0])
    of = [{"name": "class_loss_gap"}, {"name": "average_loss", "scale": 2.0}]
    assert criteria.largest(view, of=of).tolist() == [6.0, 8.0, INF]
    assert criteria.weighted_sum(view, of=of).tolist() == [10.0, 11.0, INF]
    result = criteria.largest(view, of=["class_loss_gap", criteria.average_loss]).tolist()
    assert result == [4.0, 4.0, INF]
    nested = [{"name": "largest", "of": of, "scale": 0.5}, "average_loss"]
    assert criteria.weighted_sum(view, of=nested).tolist() == [6.0, 8.0, INF]


def constant(criterion_input, *, value: float = 1.0):
    return torch.full((len(criterion_input.received.ids),), value)


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ([], r"a combination needs criteria: of = \["),
        (["class_gap"], "there is no criterion `class_gap`. Did you mean `class_loss_gap`?"),
        ([{"scale": 2.0}], "the criterion has no `name`"),
        (
            [{"name": "average_loss", "scale": 0}],
            "the `scale` of a criterion must be a number above 0, got 0",
        ),
        ([{"name": "average_loss", "scale": True}], "must be a number above 0, got True"),
        (
            [{"name": "class_loss_gap", "absent": "one"}],
            "criterion `class_loss_gap`: `absent` = 'one': ",
        ),
        (
            [{"name": "largest", "of": [{"name": constant, "valu": 1.0}]}],
            "no parameter `valu`. Did you mean `value`?",
        ),
    ],
)
def test_invalid_parts_of_a_combination_are_refused_before_a_run(of, message):
    for name in ("largest", "weighted_sum"):
        with pytest.raises(ConfigError, match=message):
            load(tiny(algorithm={"criterion": {"name": name, "of": of}}))


def test_a_part_with_a_wrong_output_shape_is_refused():
    def two(criterion_input):
        return torch.zeros(2)

    message = r"the criterion `.*two` returned shape \(2,\), expected \(6,\)"
    with pytest.raises(ConfigError, match=message):
        criteria.largest(random_view(), of=[constant, two])


@batched
def own_gap(criterion_input, *, power: float = 1.0):
    return criteria.class_loss_gap(criterion_input) ** power


PARTS = {
    "largest": {
        "name": "largest",
        "of": ["class_loss_gap", {"name": "average_loss", "scale": 0.3}],
    },
    "patches": {
        "name": "largest",
        "of": ["class_loss_gap", {"name": "trigger_sensitivity", "overlap": True}],
    },
    "sum": {
        "name": "weighted_sum",
        "of": [*["class_loss_gap", "class_loss_entropy", "worst_class_loss"] * 2, own_gap],
    },
    "nested": {
        "name": "largest",
        "of": [{"name": "weighted_sum", "of": ["class_loss_gap", "average_loss"]}, own_gap],
    },
}


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in IMAGE_CRITERIA
        if name not in REQUIRED and criteria.is_batched(getattr(criteria, name))
    ],
)
def test_a_batched_criterion_computes_the_bits_of_one_agent_at_a_time(tmp_path, name, monkeypatch):
    experiment = tiny(algorithm={"criterion": name, "own_model": "trusted"})
    run(experiment, out=tmp_path / "batched", workers=1)
    monkeypatch.setattr(criteria, "is_batched", lambda criterion: False)
    run(experiment, out=tmp_path / "single", workers=1)
    assert bits(tmp_path / "batched") == bits(tmp_path / "single")


@pytest.mark.parametrize("criterion", PARTS.values(), ids=PARTS)
def test_a_combination_of_batched_criteria_is_batched(tmp_path, criterion, monkeypatch):
    experiment = tiny(algorithm={"criterion": criterion, "own_model": "trusted"})
    ndims, original = [], combinations.validated_criterion
    monkeypatch.setattr(
        combinations,
        "validated_criterion",
        lambda part, view: ndims.append(view.received.ids.ndim) or original(part, view),
    )
    run(experiment, out=tmp_path / "together", workers=1)
    assert set(ndims) == {2}
    ndims.clear()
    monkeypatch.setattr(criteria, "is_batched", lambda criterion: False)
    run(experiment, out=tmp_path / "each", workers=1)
    assert set(ndims) == {1}
    result, expected = bits(tmp_path / "together"), bits(tmp_path / "each")
    assert result == expected


@pytest.mark.parametrize("part", ["distance", {"name": "distance"}, constant])
def test_a_combination_with_an_unbatched_part_is_not_batched(part):
    for of in (
        [part, "average_loss"],
        ["average_loss", {"name": "largest", "of": ["average_loss", part]}],
    ):
        algorithm = algorithms.fedcb2o(criterion={"name": "weighted_sum", "of": of})
        assert not algorithm.is_batched


# Whole runs


@pytest.mark.parametrize("name", IMAGE_CRITERIA)
def test_each_criterion_runs(tmp_path, name):
    criterion = {"name": name, **REQUIRED.get(name, {})}
    result = run(
        tiny(algorithm={"criterion": criterion, "own_model": "judged"}), out=tmp_path, workers=1
    )
    assert result.complete
    assert result.records[~result.records.malicious].accuracy.notna().all()


def test_a_combination_is_written_and_read_again(tmp_path):
    of = [
        {"name": "class_loss_gap", "absent": "zero"},
        {"name": constant, "value": 0.5, "scale": 2.0},
        "average_loss",
    ]
    experiment = load(tiny(algorithm={"criterion": {"name": "largest", "of": of}}))
    run(experiment, out=tmp_path / "given", workers=1)
    run(tmp_path / "given/config.toml", out=tmp_path / "read", workers=1)
    assert bits(tmp_path / "given") == bits(tmp_path / "read")

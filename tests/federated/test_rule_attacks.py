"""Attacks optimised against one rule, and on poisoned models, by hand."""

import dataclasses

import numpy as np
import pytest
import torch
from tests.views import BENIGN, assert_near, craft, ten_models, view_of

from fedcb2o.data import Shard
from fedcb2o.errors import ConfigError
from fedcb2o.federated.aggregation import gram_rules
from fedcb2o.federated.aggregation.gram_matrix import gram
from fedcb2o.federated.attacks.rule_attacks import line_search


def line_view(values, previous, colluders=1):
    """Return a view of benign agents at these numbers and of the attackers' previous model."""
    models = torch.tensor(values).unsqueeze(1)
    return dataclasses.replace(
        view_of(models=torch.zeros(10, 1)),
        num_colluders=colluders,
        num_benign=len(models),
        previous=torch.tensor([previous]),
        _ids_of=lambda role, cluster: range(len(models)),
        _peek=lambda ids: models[ids],
    )


def test_line_search_by_hand():
    """Steps double (1, 2, 4) while the harm rises, and then shrink by the factor 0.8."""
    points = []

    def harm(t):
        points.append(t)
        return -abs(t - 4)

    assert line_search(harm, evaluations=6, start=0.0, step=1.0, ratio=0.8) == 3.0
    assert points == pytest.approx([0, 1, 3, 7, 3 + 3.2, 3 + 2.56])
    # The search never turns back: 3 + 4 * 0.8^4 is the next step with progress, and the last.
    result = line_search(harm, evaluations=30, start=0.0, step=1.0, ratio=0.8)
    assert result == pytest.approx(3 + 4 * 0.8**4)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"evaluations": 0}, "`evaluations` must be 1 or more"),
        ({"step": 0.0}, "`step` must not be 0"),
        ({"ratio": 1.0}, "`ratio` must be above 0.5 and below 1"),
        ({"rule": "fltrust"}, "reads models only, and `fltrust` reads more"),
        ({"rule": "foolsgold"}, "reads models only, and `foolsgold` reads more"),
        ({"rule": "ubar"}, "reads models only, and `ubar` reads more"),
        ({"rule": "no_such_rule"}, "no_such_rule"),
    ],
)
def test_invalid_searches_are_refused(parameters, message):
    with pytest.raises(ConfigError, match=message):
        craft("optimal_alie", **parameters)


@pytest.mark.parametrize("name", ["optimal_alie", "optimal_ipm"])
def test_the_search_finds_the_factor_that_harms_the_rule_most(name):
    """Against the median, no larger factor harms more than the first step.

    Against the mean, the factor grows as long as receivers admit the model.
    """
    view = line_view([0.0, 1.0, 2.0, 4.0], previous=-1.0)
    models = torch.tensor([0.0, 1.0, 2.0, 4.0])
    mean, std = models.mean(), models.std(correction=0)
    value = float(craft(name, rule="coordinate_median", view=view))
    direction = float(std) if name == "optimal_alie" else -1.0 - float(mean)
    origin = float(mean) if name == "optimal_alie" else -1.0
    factor = (value - origin) / direction
    median = np.median([0, 1, 2, 4, value])
    harms = [abs(np.median([0, 1, 2, 4, origin + t * direction]) - 1.75) for t in (0, 1, 10, 1e3)]
    assert abs(median - 1.75) == pytest.approx(max(harms))
    assert 0 <= factor <= 20
    without_bound = craft(name, view=view, evaluations=40)
    assert 1e5 < float(without_bound.abs()) <= 1e6


def test_a_search_supports_pre_steps_and_rules_about_the_agents_model():
    for pre_step in ("nnm", "bucketing", "arc", {"name": "clipping", "radius": 0.1}):
        for rule in ("monna", "trimmed_mean"):
            assert craft("optimal_alie", rule=rule, pre_step=pre_step).isfinite().all()


def test_benign_models_that_are_not_finite_are_ignored():
    models = ten_models()
    models[1] = torch.nan
    for name in ("optimal_alie", "optimal_ipm", "fang_krum", "fang_trimmed_mean"):
        assert craft(name, view=view_of(models=models)).isfinite().all()


@pytest.mark.parametrize("seed", range(5))
def test_krum_selects_the_model_of_fang_et_al(seed):
    """The model is against the benign direction. Krum would not select one twice as far."""
    models = ten_models(30, seed)
    view = view_of(models=models)
    view = dataclasses.replace(view, num_colluders=2, previous=models[BENIGN].mean(0) - 0.05)
    model = craft("fang_krum", view=view)
    step = view.previous - model
    signs = (models[BENIGN].mean(0) - view.previous).sign()
    distance = float(step.abs().max())
    assert_near(step, distance * signs)

    def is_selected(length):
        attackers = (view.previous - length * signs).expand(2, -1)
        weights = gram_rules.krum(gram(torch.cat([attackers, models[BENIGN]])), f=1)
        return bool(weights[:2].sum() > 0)

    assert distance > 1e-5
    assert is_selected(distance)
    assert not is_selected(2 * distance)


def test_fang_krum_by_hand():
    """One attacker faces the benign models 0, 2, 4 and 6 and the previous model -1.

    The first length is sqrt((4 + 4) / 2) from the two nearest of the others, plus 7 to the
    farthest: 9.
    """
    view = line_view([0.0, 2.0, 4.0, 6.0], previous=-1.0)
    scores = []
    for halvings in range(20):
        x = -1 - 9 / 2**halvings
        positions = np.array([x, 0.0, 2.0, 4.0, 6.0])
        squares = np.sort((positions[:, None] - positions) ** 2, 1)[:, 1:3].sum(1)
        scores.append((squares.argmin() == 0, x))
    selected = [x for is_first, x in scores if is_first]
    expected = selected[0] if selected else -1 - 9 / 2**20
    assert float(craft("fang_krum", view=view)) == pytest.approx(expected, abs=1e-4)


def test_fang_trimmed_mean_by_hand():
    """Rising coordinates go below the smallest benign value, falling ones above the largest.

    The limit is half or twice that value.
    """
    models = torch.tensor([[2.0, -2.0, 4.0, -4.0], [3.0, -1.0, 5.0, -3.0]])
    view = dataclasses.replace(
        line_view([0.0], previous=0.0),
        own=torch.zeros(4),
        previous=torch.tensor([0.0, -9.0, 9.0, 9.0]),
        _ids_of=lambda role, cluster: range(2),
        _peek=lambda ids: models[ids],
    )
    samples = torch.stack([craft("fang_trimmed_mean", view=view, seed=seed) for seed in range(200)])
    low = torch.tensor([1.0, -4.0, 5.0, -3.0])
    high = torch.tensor([2.0, -2.0, 10.0, -1.5])
    assert ((samples >= low) & (samples <= high)).all()
    torch.testing.assert_close(samples.mean(0), (low + high) / 2, rtol=0.05, atol=0.05)
    with pytest.raises(ConfigError, match="`spread` must be above 1, got"):
        craft("fang_trimmed_mean", spread=1.0)


SAMPLES = torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.0, 1.0], [-1.0, 2.0]])


def linear_view(labels, spread=0.2):
    """Return the view of an attacker among linear classifiers of two classes, d = 4."""
    draw = torch.Generator().manual_seed(0)
    models = torch.tensor([-1.0, 1.0, 1.0, -1.0]) + spread * torch.randn(10, 4, generator=draw)
    models[4] = torch.tensor([5.0, -5.0, -5.0, 5.0])
    data = Shard(SAMPLES, torch.tensor(labels))

    def sample_losses(thetas, wanted=None):
        outputs = (SAMPLES @ thetas.unflatten(1, (2, 2)).mT).mT
        targets = data.y.expand(len(thetas), -1) if wanted is None else wanted
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

    view = view_of(models=models, sample_losses=sample_losses)
    return dataclasses.replace(view, data=data)


@pytest.mark.parametrize("hide", ["class_losses", "loss", "distance"])
@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_descent_fools_the_average_within_its_bounds(hide, factor):
    view = linear_view([1, 1, 0, 0])
    benign = view.benign()
    mean = benign.mean(0)
    distances = (benign - mean).norm(dim=1)
    found = craft("descent", view=view, source=1, target=0, hide=hide, factor=factor)
    radius = factor * distances.median()
    assert (found - mean).norm() <= radius * (1 + 1e-5)

    share = view.num_colluders / (view.num_colluders + view.num_benign)
    start = torch.lerp(mean, view.own, float(radius / (view.own - mean).norm()))
    wanted = torch.zeros(2, 4, dtype=torch.int64)

    def source_losses(*thetas):
        points = torch.stack([torch.lerp(mean, theta, share) for theta in thetas])
        return view.sample_losses(points, wanted[: len(thetas)])[:, :2].mean(1)

    if hide == "distance":
        fooled, before = source_losses(found, start)
        assert fooled <= before + 1e-6
        return
    rises = view.sample_losses(torch.cat([benign, found[None], mean[None]]))
    rises = rises[:-1] - rises[-1]
    if hide == "class_losses":
        rises = torch.maximum(rises[:, :2].mean(1), rises[:, 2:].mean(1))
    else:
        rises = rises.mean(1)
    # Beyond the bound is a penalty: the steps circle about it.
    assert rises[-1] <= factor * rises[:-1].median().clamp(min=0) + 0.2


def test_descent_without_samples_of_the_class_publishes_the_nearest_poisoned_model():
    view = linear_view([0, 0, 0, 0])
    benign = view.benign()
    mean = benign.mean(0)
    radius = float((benign - mean).norm(dim=1).median())
    expected = mean + radius * (view.own - mean) / (view.own - mean).norm()
    assert_near(craft("descent", view=view, source=1, target=0), expected)
    with pytest.raises(ConfigError, match="`factor` must be above 0, got"):
        craft("descent", view=view, source=1, target=0, factor=0.0)


def test_neurotoxin_masks_the_coordinates_of_the_largest_benign_update():
    models = torch.zeros(10, 4)
    models[BENIGN] = torch.tensor([1.0, -9.0, 2.0, 0.5])
    models[4] = torch.tensor([5.0, 6.0, 7.0, 8.0])
    view = dataclasses.replace(view_of(models=models), previous=torch.ones(4))
    expected = torch.tensor([5.0, 1.0, 7.0, 8.0])
    assert_near(craft("neurotoxin", masked_share=0.25, view=view), expected)
    expected = torch.tensor([5.0, 1.0, 1.0, 8.0])
    assert_near(craft("neurotoxin", masked_share=0.5, view=view), expected)
    assert_near(craft("neurotoxin", masked_share=0.0, view=view), models[4])
    with pytest.raises(ConfigError, match="`masked_share` must be between 0 and 1, got"):
        craft("neurotoxin", masked_share=2.0)

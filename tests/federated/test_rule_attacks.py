"""Attacks that are optimised against one rule, and on poisoned models, by hand."""

import dataclasses

import numpy as np
import pytest
import torch
from tests.views import BENIGN, ten_models, view_of

from fedcb2o.errors import ConfigError
from fedcb2o.federated import attacks
from fedcb2o.federated.aggregation import gram_rules
from fedcb2o.federated.aggregation.gram_matrix import gram
from fedcb2o.federated.attacks.rule_attacks import line_search
from fedcb2o.rng import stream


def crafted(name, *, view=None, seed=0, **parameters):
    attack = getattr(attacks, name)
    return attack(view or view_of(attack), stream(seed, "draw"), **parameters)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def line_of(values, previous, colluders=1):
    """A view of benign agents at these numbers, with the attackers' model before the round."""
    models = torch.tensor(values).unsqueeze(1)
    return dataclasses.replace(
        view_of(models=torch.zeros(10, 1)),
        num_colluders=colluders,
        num_benign=len(models),
        previous=torch.tensor([previous]),
        _ids_of=lambda whose, cluster: range(len(models)),
        _peek=lambda ids: models[ids],
    )


def test_line_search_by_hand():
    """Steps 1, 2, 4 double while the harm rises; then they shrink by 0.8."""
    seen = []

    def harm(t):
        seen.append(t)
        return -abs(t - 4)

    assert line_search(harm, evaluations=6, start=0.0, step=1.0, ratio=0.8) == 3.0
    assert seen == pytest.approx([0, 1, 3, 7, 3 + 3.2, 3 + 2.56])
    # It never turns back: 3 + 4 * 0.8^4 is the first step that brings progress again, and the last.
    found = line_search(harm, evaluations=30, start=0.0, step=1.0, ratio=0.8)
    assert found == pytest.approx(3 + 4 * 0.8**4)


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
def test_impossible_searches(parameters, message):
    with pytest.raises(ConfigError, match=message):
        crafted("optimal_alie", **parameters)


@pytest.mark.parametrize("name", ["optimal_alie", "optimal_ipm"])
def test_the_search_stays_with_what_the_rule_lets_in(name):
    """Against the median of five, a large factor harms as much as any that passes the others; the
    first step is kept, since no larger one moves the median farther. Against the mean, the factor
    grows as long as receivers admit the model."""
    view = line_of([0.0, 1.0, 2.0, 4.0], previous=-1.0)
    models = torch.tensor([0.0, 1.0, 2.0, 4.0])
    mean, std = models.mean(), models.std(correction=0)
    found = float(crafted(name, rule="coordinate_median", view=view))
    direction = float(std) if name == "optimal_alie" else -1.0 - float(mean)
    origin = float(mean) if name == "optimal_alie" else -1.0
    factor = (found - origin) / direction
    median = np.median([0, 1, 2, 4, found])
    harms = [abs(np.median([0, 1, 2, 4, origin + t * direction]) - 1.75) for t in (0, 1, 10, 1e3)]
    assert abs(median - 1.75) == pytest.approx(max(harms))
    assert 0 <= factor <= 20
    without_bound = crafted(name, view=view, evaluations=40)
    assert 1e5 < float(without_bound.abs()) <= 1e6


def test_pre_steps_and_rules_about_the_own_model_in_a_search():
    for pre_step in ("nnm", "bucketing", "arc", {"name": "clipping", "radius": 0.1}):
        for rule in ("monna", "trimmed_mean"):
            assert crafted("optimal_alie", rule=rule, pre_step=pre_step).isfinite().all()


def test_benign_models_that_are_not_finite_do_not_count():
    models = ten_models()
    models[1] = torch.nan
    for name in ("optimal_alie", "optimal_ipm", "fang_krum", "fang_trimmed_mean"):
        assert crafted(name, view=view_of(models=models)).isfinite().all()


@pytest.mark.parametrize("seed", range(5))
def test_krum_selects_the_model_of_fang_et_al(seed):
    """It is against the benign direction, and Krum would not select one twice as far."""
    models = ten_models(30, seed)
    view = view_of(models=models)
    view = dataclasses.replace(view, num_colluders=2, previous=models[BENIGN].mean(0) - 0.05)
    found = crafted("fang_krum", view=view)
    step = view.previous - found
    signs = (models[BENIGN].mean(0) - view.previous).sign()
    far = float(step.abs().max())
    close(step, far * signs)

    def is_selected(length):
        attackers = (view.previous - length * signs).expand(2, -1)
        weights = gram_rules.krum(gram(torch.cat([attackers, models[BENIGN]])), f=1)
        return bool(weights[:2].sum() > 0)

    assert far > 1e-5
    assert is_selected(far)
    assert not is_selected(2 * far)


def test_fang_krum_by_hand():
    """Benign 0, 2, 4 and 6, the model before at -1, one attacker. The bound: the nearest 2 of 3
    others sum to 4 + 4 at 2 and 4, over m - 2 f - 1 = 2; the farthest is 7. sqrt(4) + 7 = 9."""
    view = line_of([0.0, 2.0, 4.0, 6.0], previous=-1.0)
    scores = []
    for halvings in range(20):
        x = -1 - 9 / 2**halvings
        every = np.array([x, 0.0, 2.0, 4.0, 6.0])
        squares = np.sort((every[:, None] - every) ** 2, 1)[:, 1:3].sum(1)
        scores.append((squares.argmin() == 0, x))
    selected = [x for is_first, x in scores if is_first]
    expected = selected[0] if selected else -1 - 9 / 2**20
    assert float(crafted("fang_krum", view=view)) == pytest.approx(expected, abs=1e-4)


def test_fang_trimmed_mean_by_hand():
    """Rising coordinates get less than the least benign value, to 1/2 or 2 times it, and falling
    ones more than the largest."""
    models = torch.tensor([[2.0, -2.0, 4.0, -4.0], [3.0, -1.0, 5.0, -3.0]])
    view = dataclasses.replace(
        line_of([0.0], previous=0.0),
        own=torch.zeros(4),
        previous=torch.tensor([0.0, -9.0, 9.0, 9.0]),
        _ids_of=lambda whose, cluster: range(2),
        _peek=lambda ids: models[ids],
    )
    drawn = torch.stack([crafted("fang_trimmed_mean", view=view, seed=seed) for seed in range(200)])
    low = torch.tensor([1.0, -4.0, 5.0, -3.0])
    high = torch.tensor([2.0, -2.0, 10.0, -1.5])
    assert ((drawn >= low) & (drawn <= high)).all()
    torch.testing.assert_close(drawn.mean(0), (low + high) / 2, rtol=0.05, atol=0.05)
    with pytest.raises(ConfigError, match="`spread` must be above 1, got"):
        crafted("fang_trimmed_mean", spread=1.0)


def test_neurotoxin_leaves_the_coordinates_of_the_largest_benign_update():
    models = torch.zeros(10, 4)
    models[BENIGN] = torch.tensor([1.0, -9.0, 2.0, 0.5])
    models[4] = torch.tensor([5.0, 6.0, 7.0, 8.0])
    view = dataclasses.replace(view_of(models=models), previous=torch.ones(4))
    close(crafted("neurotoxin", masked_share=0.25, view=view), torch.tensor([5.0, 1.0, 7.0, 8.0]))
    close(crafted("neurotoxin", masked_share=0.5, view=view), torch.tensor([5.0, 1.0, 1.0, 8.0]))
    close(crafted("neurotoxin", masked_share=0.0, view=view), models[4])
    with pytest.raises(ConfigError, match="`masked_share` must be between 0 and 1, got"):
        crafted("neurotoxin", masked_share=2.0)

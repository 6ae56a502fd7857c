"""Search for the robustness coefficient of rules, `paper/kappa.py`, compared with known values."""

import functools

import pytest
import torch
from paper import kappa

from fedcb2o.federated.aggregation import gram_rules, preaggregation
from fedcb2o.federated.aggregation.base import apply
from fedcb2o.rng import stream


@pytest.fixture(autouse=True)
def short_search(monkeypatch):
    monkeypatch.setattr(kappa, "NUM_STARTS", 80)
    monkeypatch.setattr(kappa, "NUM_CLIMBS", 2)


def searched_kappa(name, n, f, **options):
    return kappa.search(kappa.rules(f)[name], n, f, steps=150, **options).kappa


def test_required_kappa_by_hand():
    x = torch.tensor([[0.0], [0.0], [3.0]], dtype=torch.float64)
    mean, median = (kappa.rules(1)[name] for name in ("mean", "coordinate_median"))
    # The subset 0 and 3 has mean 1.5 and spread 2.25. The mean of all models is 1, the median 0.
    sets = kappa.subsets(3, 1, own=False)
    assert sorted(sets.tolist()) == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]
    assert kappa.required_kappa(median, x, sets).kappa == pytest.approx(1.5**2 / 2.25)
    assert kappa.required_kappa(mean, x, sets).kappa == pytest.approx(0.5**2 / 2.25)
    assert kappa.subsets(3, 1, own=True).tolist() == [[0, 1, 1], [1, 0, 1]]


def test_coefficients_by_hand():
    # 0, 0, 1 without attackers: (1/3)^2 over 2/9. -2, 1, 1 and one at infinity: 1 over 2.
    assert kappa.exact_kappa("coordinate_median", 3, 0) == 0.5
    assert kappa.exact_kappa("coordinate_median", 4, 1) == 0.5
    assert (
        kappa.exact_kappa("coordinate_median", 3, 1)
        == kappa.exact_kappa("trimmed_mean", 3, 1)
        == kappa.minimal_kappa(3, 1)
        == 1.0
    )


@pytest.mark.parametrize("name", kappa.rules(1))
def test_the_fast_outcome_equals_apply(name):
    x = torch.from_numpy(stream(0, "models").standard_normal((11, 3)))
    for mixing in (None, functools.partial(preaggregation.nnm, f=2)):
        rule = kappa.rules(2)[name]
        torch.testing.assert_close(kappa.outcome(rule, x, mixing), apply(rule, x, mixing=mixing))


def test_kappa_of_the_mean_is_0_without_attackers_and_unbounded_with_one():
    assert searched_kappa("mean", 5, 0) < 1e-12
    assert searched_kappa("mean", 5, 1) > kappa.UNBOUNDED
    assert kappa.format_kappa(searched_kappa("mean", 5, 1)) == "unbounded"


@pytest.mark.parametrize(("n", "f"), [(3, 1), (4, 1), (7, 2)])
@pytest.mark.parametrize("name", ["trimmed_mean", "coordinate_median"])
def test_the_search_finds_known_coefficients(name, n, f):
    assert (
        0.98 * kappa.exact_kappa(name, n, f)
        <= searched_kappa(name, n, f)
        <= kappa.exact_kappa(name, n, f) * (1 + 1e-9)
    )


@pytest.mark.parametrize(
    "name", ["trimmed_mean", "coordinate_median", "geometric_median", "meamed", "krum"]
)
def test_kappa_is_between_its_bounds(name):
    """The bound of Krum is for n - f - 1 neighbours."""
    n, f = 7, 2
    rule = kappa.rules(f)[name]
    rule = functools.partial(gram_rules.krum, f=f, neighbours=n - f - 1) if name == "krum" else rule
    for mixing in (None, functools.partial(preaggregation.nnm, f=f)):
        value = kappa.search(rule, n, f, mixing=mixing, steps=80).kappa
        bound = kappa.upper_bound(name, n, f, mixed=mixing is not None)
        assert 0.9 * kappa.minimal_kappa(n, f) <= value <= (torch.inf if bound is None else bound)


def test_the_search_is_reproducible():
    assert searched_kappa("krum", 7, 1, seed=3) == searched_kappa("krum", 7, 1, seed=3)

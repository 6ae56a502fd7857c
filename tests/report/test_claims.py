"""The verdicts of `benchmarks/claims.py`, by hand."""

import math
from types import SimpleNamespace

import pandas as pd
import pytest
from benchmarks import claims


def claim(low, high):
    return claims.Claim("", "", "", (), lambda known: pd.Series(dtype=float), low, high)


def test_the_interval_is_students():
    mean, low, high = claims.interval(pd.Series([1.0, 2.0, 3.0, math.nan]))
    assert mean == pytest.approx(2.0)
    assert high - 2.0 == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)  # t at 97.5%, two degrees of freedom
    assert mean - low == pytest.approx(high - mean)


def test_one_seed_says_nothing():
    mean, low, high = claims.interval(pd.Series([5.0]))
    assert (mean, low, high) == (5.0, -math.inf, math.inf)
    assert claims.verdict(claim(0.0, math.inf), low, high) == "within noise"


def test_a_claim_is_held_by_the_whole_interval():
    positive, alike = claim(0.0, math.inf), claim(-8.0, 8.0)
    assert claims.verdict(positive, 0.5, 9.0) == "held"
    assert claims.verdict(positive, -0.5, 9.0) == "within noise"
    assert claims.verdict(positive, -9.0, -0.5) == "not held"
    assert claims.verdict(alike, -7.0, 3.0) == "held"
    assert claims.verdict(alike, -9.0, 3.0) == "within noise"
    assert claims.verdict(alike, 8.5, 20.0) == "not held"


def test_differences_are_between_runs_of_one_seed():
    known = {
        "fedcbo": pd.DataFrame({"source_accuracy": [40.0, 20.0]}, index=[0, 1]),
        "fedcb2o": pd.DataFrame({"source_accuracy": [30.0, 50.0]}, index=[1, 0]),
    }
    better = next(c for c in claims.claims("fedcb2o-tg5", "fedcb2o-tg5") if c.needs == ("fedcb2o", "fedcbo"))
    assert better.of(known).to_dict() == {0: 10.0, 1: 10.0}
    assert better.paper == pytest.approx(55.73 - 40.23)


def test_weight_that_went_elsewhere_is_of_the_last_fifth():
    # Agents 0 and 1 of cluster 0, agent 2 of cluster 1; all benign but 1. Ten rounds: the last two count.
    rows = [(0, n, 0, 2, 1.0) for n in range(1, 9)] + [(0, n, 0, 1, 0.6) for n in (9, 10)]
    rows += [(0, 10, 0, 2, 0.3), (0, 10, 0, 0, 5.0), (0, 10, 1, 2, 9.0)]
    run = SimpleNamespace(
        pairs=pd.DataFrame(rows, columns=["seed", "round", "agent", "peer", "weight"]),
        agents=pd.DataFrame({"seed": 0, "agent": [0, 1, 2], "cluster": [0, 0, 1], "malicious": [False, True, False]}),
    )
    assert claims._elsewhere(run).to_dict() == pytest.approx({0: 0.3 / 1.5})

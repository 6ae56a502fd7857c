"""The second pre-registered test: its answer by hand, and that the method is the registered one."""

import hashlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from paper import preregistered_2
from scipy import stats


def test_the_method_is_the_registered_one():
    """After a change repeat runs: add the hash to `EQUAL`, or write it on the page of results."""
    registered = preregistered_2.registration()["method"]
    assert preregistered_2.method_hash() in {registered, *preregistered_2.EQUAL}


def test_the_page_of_results_names_the_registered_text():
    registered = hashlib.sha256(preregistered_2.PAGE.read_bytes()).hexdigest()
    assert registered in Path(preregistered_2.ROOT, "docs", "results.md").read_text("utf-8")


def test_one_stratum_has_the_paired_t_test():
    differences = np.array([1.0, 2.5, -0.5, 3.0])
    mean, p = preregistered_2.stratified_t([differences])
    assert mean == pytest.approx(1.5)
    assert p == pytest.approx(stats.ttest_1samp(differences, 0.0).pvalue)


def test_equal_strata_have_the_degrees_of_freedom_of_both():
    # Variance 2 / 2 = 1 each: the standard error is sqrt(2) / 2, with 1 + 1 degrees of freedom.
    mean, p = preregistered_2.stratified_t([np.array([0.0, 2.0]), np.array([2.0, 4.0])])
    assert mean == 2.0
    assert p == pytest.approx(2 * stats.t.sf(2 * np.sqrt(2), 2))


def test_holm_multiplies_by_the_number_of_hypotheses_that_are_left():
    adjusted = preregistered_2.holm(pd.Series({"a": 0.01, "b": 0.04, "c": 0.03}))
    assert adjusted.tolist() == pytest.approx([0.03, 0.06, 0.06])


def test_net_success_and_worst_regret_by_hand():
    rows = pd.DataFrame(
        [
            ("d", "Ours", "Clean", 0, 90.0, 5.0),
            ("d", "Ours", "Flip", 0, 85.0, 25.0),
            ("d", "Rival", "Clean", 0, 80.0, 10.0),
            ("d", "Rival", "Flip", 0, 88.0, 12.0),
        ],
        columns=["data", "method", "attack", "seed", "accuracy", "success"],
    )
    scores = preregistered_2.net_columns(rows)
    assert scores.loc[("d", "Flip, success", 0)].tolist() == [-20.0, -2.0]
    # Behind by 18 in success; the rival by 10 without attack.
    assert preregistered_2.worst_regrets(scores).loc[("d", 0)].tolist() == [18.0, 10.0]

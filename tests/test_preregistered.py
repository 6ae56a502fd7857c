"""The result of the pre-registered test, calculated by hand."""

import numpy as np
import pandas as pd
import pytest
from paper import preregistered


def test_worst_regret_is_the_largest_distance_to_the_best_of_a_column():
    means = np.array([[90.0, 80.0, 85.0], [-5.0, 0.0, -1.0]])
    assert preregistered.worst_regrets(means).tolist() == [5.0, 10.0, 5.0]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(-3, -0.1, "better"), (-3, 0.9, "not worse"), (-3, 1.1, "undecided"), (0.1, 2, "worse")],
)
def test_verdicts_follow_from_the_interval(low, high, expected):
    assert preregistered.verdict(low, high) == expected


def test_the_answer_of_two_seeds_by_hand():
    index = pd.MultiIndex.from_product([["a", "b"], [0, 1]], names=["column", "seed"])
    table = pd.DataFrame(
        {"Ours": [90.0, 92.0, -1.0, -1.0], "Rival": [80.0, 82.0, 0.0, 0.0]}, index=index
    )
    result = preregistered.answer(table, "Ours", resamples=20)
    assert result.index.tolist() == ["Ours", "Rival"]
    assert result["Worst regret"].tolist() == [1.0, 10.0]
    assert result["In"].tolist() == ["b", "a"]
    # Both seeds differ by 10 in column a and by 1 in b, so that every resample has the same worst.
    assert result.loc["Rival", ["Low", "High"]].tolist() == [-9.0, -9.0]
    assert result.loc["Rival", "Verdict"] == "better"

"""Attacks without a significant effect on any defence, by hand."""

import numpy as np
import pandas as pd
import pytest

from fedcb2o.report._ineffective_attacks import ineffective_attack_notes

pytestmark = pytest.mark.usefixtures("intervals_of_two_seeds")


def rows(**harm):
    """Return a table with the successes by seed of two defences under each attack."""
    lines = []
    for attack, (a, b) in harm.items():
        for defence, values in (("A", a), ("B", b)):
            lines += [
                {
                    "defence": defence,
                    "attack": attack,
                    "seed": seed,
                    "success": value,
                    "lost": np.nan,
                }
                for seed, value in enumerate(values)
            ]
    return pd.DataFrame(lines)


def test_only_an_attack_that_harms_no_defence_is_ineffective():
    Loud = ([0.01, 0.02, 0.03], [0.31, 0.32, 0.33])
    table = rows(Quiet=([0.01, 0.02, 0.03], [0.0, 0.0, 0.0]), Loud=Loud, Single=([0.5], [0.5]))
    # Half the width of an interval of three seeds with deviation 0.01. Two simultaneous intervals
    # have Student's quantile of p = 1 - 0.05 / 4 with 2 degrees of freedom,
    # sqrt(2 q^2 / (4 p (1 - p))) = 6.2053 with q = 2 p - 1: 0.02 + 6.2053 * 0.01 / sqrt(3).
    assert list(ineffective_attack_notes(table, ["Loud", "Single", "Quiet", "Not done"])) == [
        "Quiet has no significant effect on any defence: of 2 intervals, which hold 95% all at once, "
        "none is above 0, and none reaches beyond 5.6 points"
    ]


def test_an_attack_that_costs_accuracy_is_effective_without_success():
    table = rows(Flip=([0.0, 0.0, 0.01], [0.0, 0.0, 0.01]))
    assert len(list(ineffective_attack_notes(table, ["Flip"]))) == 1
    table["lost"] = [0.5, 0.51, 0.52, 0.0, 0.01, 0.0]
    assert list(ineffective_attack_notes(table, ["Flip"])) == []

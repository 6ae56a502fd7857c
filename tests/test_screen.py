"""Tests of paper/screen.py: defences of a grid that need all seeds."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from paper.screen import contenders

from fedcb2o.report import _statistics
from fedcb2o.report.grid_results import KEY_COLUMNS, RUN_METRICS, GridResults


@pytest.fixture(autouse=True)
def intervals_of_three_seeds(monkeypatch):
    monkeypatch.setattr(_statistics, "MIN_SEEDS", 3)


def results(lost):
    """Return a grid of two attacks with accuracy 0.9 minus each defence's loss."""
    noise = np.array([-0.002, 0.0, 0.002, 0.0])
    rows = [
        {
            "setting": "",
            "defence": name,
            "attack": attack,
            "role": "attack",
            "floor": "",
            "seed": seed,
            "error": "",
        }
        | {"accuracy": 0.9 - lose + (1 if name == "A" else -1) * noise[seed]}
        for name, losses in lost.items()
        for attack, lose in zip("xy", losses, strict=True)
        for seed in range(4)
    ]
    table = {
        "seeds": [0, 1, 2, 3],
        "attacks": {"x": {}, "y": {}},
        "defences": {name: {} for name in lost},
    }
    frame = pd.DataFrame(rows).reindex(columns=[*KEY_COLUMNS, *RUN_METRICS, "error"])
    return GridResults(Path(), {**table, "reference": "A"}, {}, frame)


def test_who_is_clearly_behind_needs_no_more_seeds_unless_it_is_best_somewhere():
    lost = {"A": (0.01, 0.01), "close": (0.011, 0.011), "far": (0.2, 0.02), "best at y": (0.3, 0.0)}
    assert contenders(results(lost)) == {"A", "close", "best at y"}


def test_who_has_fewer_seeds_may_be_best_somewhere_all_the_same():
    given = results({"A": (0.01, 0.01), "far": (0.2, 0.02), "best at y": (0.3, 0.0)})
    few = given.rows[(given.rows.defence != "best at y") | (given.rows.seed < 3)]
    assert contenders(replace(given, rows=few)) == {"A", "best at y"}

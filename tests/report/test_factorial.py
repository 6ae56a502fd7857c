"""The factorial of FedCB2O's open choices: its design and its statistics."""

import itertools

import numpy as np
import pandas as pd
import pytest
from paper import factorial


def test_within_a_seed_main_effects_are_clear_of_each_other_and_of_pairs() -> None:
    for seed in (1000, 1001):
        x = factorial.design(seed)
        pairs = np.stack(
            [x[:, i] * x[:, j] for i, j in itertools.combinations(range(x.shape[1]), 2)], 1
        )
        assert x.shape == (32, len(factorial.FACTORS))
        assert (x.T @ x == 32 * np.eye(x.shape[1])).all()
        assert (x.T @ pairs == 0).all()
    assert (factorial.design(1000) != factorial.design(1001)).any()


def made(*, rows: int) -> pd.DataFrame:
    """Runs whose accuracy is 49, 3 more with the second factor, 2 with the first and third or with
    neither, and what the seed adds."""
    found = []
    for seed in range(20):
        for x in factorial.design(seed)[:rows]:
            signs = "".join("+" if level > 0 else "-" for level in x)
            found.append((seed, signs, 50 + 3 * (x[1] > 0) + x[0] * x[2] + seed))
    return pd.DataFrame(found, columns=["seed", "levels", "accuracy"])


@pytest.mark.parametrize("rows", [32, 4])
def test_effects_are_those_that_were_put_in(rows: int) -> None:
    runs = made(rows=rows)
    runs.accuracy -= (
        0 if rows == 32 else [float(x[0] == x[2]) * 2 - 1 for x in runs.levels]
    )  # a few rows see no pairs
    effects = factorial.main_effects(runs, "accuracy")
    assert effects["mean"].to_numpy() == pytest.approx([0, 3] + [0] * 13, abs=1e-9)


def test_a_pair_is_told_from_the_others() -> None:
    names = list(factorial.FACTORS)
    both = factorial.interactions(made(rows=32), "accuracy")
    assert both["mean"][f"{names[0]} x {names[2]}"] == pytest.approx(2)
    assert both["mean"].drop(f"{names[0]} x {names[2]}").to_numpy() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("study", factorial.STUDIES)
def test_all_runs_of_the_design_were_made(study: str) -> None:
    assert {
        tuple(run) for run in factorial.measured(study)[["setting", "seed", "levels"]].to_numpy()
    } == {job[1:] for job in factorial.jobs(study)}

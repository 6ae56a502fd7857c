"""The tables of losses, by hand: to rivals, and to the former default."""

import pandas as pd
import pytest
from paper import former, results
from paper.losses import Comparison, losses_table, other_comparisons

COLUMNS = ["defence", "attack", "seed", "accuracy", "attack_success_rate"]


def rows(**by_defence):
    """Return rows of one attack: accuracies and success by seed, per defence."""
    return pd.DataFrame(
        [
            (defence.replace("_", " "), "Flip", seed, accuracy, success)
            for defence, pairs in by_defence.items()
            for seed, (accuracy, success) in enumerate(pairs)
        ],
        columns=COLUMNS,
    )


def table_of(values):
    comparison = Comparison("Hand", values, lambda measure: f"#{measure}")
    return losses_table("Ours", [comparison]).reset_index().to_numpy().tolist()


def test_the_largest_loss_of_each_column_is_listed():
    ours = [(0.80, 0.10), (0.82, 0.10)]
    values = rows(
        Ours=ours,
        Ours_tuned=[(0.99, 0.0)] * 2,
        Near=[(0.81, 0.2), (0.82, 0.2)],
        Far=[(0.84, 0.095), (0.84, 0.095)],
    )
    # Half a point of success is too little, a variant is no rival, and two seeds are not tested.
    assert table_of(values) == [["[Hand](#accuracy)", "accuracy", "1 of 1", "Flip 3.0 (Far)"]]


def test_a_column_with_a_significant_loss_is_bold():
    ours = [(0.80, 0.5), (0.81, 0.5), (0.79, 0.5), (0.80, 0.5), (0.80, 0.5)]
    steady = [(0.83, 0.5), (0.84, 0.5), (0.82, 0.5), (0.83, 0.5), (0.8301, 0.5)]
    noisy = [(0.95, 0.5), (0.70, 0.5), (0.95, 0.5), (0.70, 0.5), (0.95, 0.5)]
    (row,) = table_of(rows(Ours=ours, Steady=steady, Noisy=noisy))
    assert row[-1] == "Flip **5.0** (Noisy)"
    (row,) = table_of(rows(Ours=ours, Noisy=noisy))
    assert row[-1] == "Flip 5.0 (Noisy)"


def test_all_measurements_are_of_the_method_and_of_rivals():
    found = {comparison.title: comparison.rows for comparison in other_comparisons()}
    for title, values in found.items():
        assert results.METHOD in set(values.defence), title
        assert not values.defence.str.startswith(results.METHOD).all(), title
        assert values.accuracy.between(0, 1).all(), title
        assert (
            "attack_success_rate" not in values
            or not (
                values[values.attack.isin(["none", "Clean", "Removed"])].attack_success_rate.notna()
            ).any()
        )
    assert {"Trial: HAPT", "The board: Digits", "Owners: har"} <= set(found)


def test_the_former_values_that_were_better_are_listed(tmp_path, monkeypatch):
    (tmp_path / "values.csv").write_text(
        "grid,attack,seed,accuracy,accuracy_worst,attack_success_rate,attack_success_rate_worst\n"
        "Hand,Flip,0,0.90,0.8,0.10,0.2\nHand,Flip,1,0.92,0.8,0.10,0.2\nHand,Noise,0,0.9,0.8,,\n"
    )
    monkeypatch.setattr(former, "VALUES", tmp_path / "values.csv")

    class View:
        rows = pd.DataFrame(
            [
                ("Ours", "Flip", 0, 0.90, 0.8, 0.10, 0.3),
                ("Ours", "Noise", 0, 0.897, 0.85, float("nan"), float("nan")),
                ("Other", "Flip", 0, 0.0, 0.0, 1.0, 1.0),
            ],
            columns=["defence", "attack", "seed", *former.MEASURES],
        )

    table = former.former_table("Ours", [("Hand", View()), ("Elsewhere", View())])
    assert table.reset_index().to_numpy().tolist() == [
        ["Hand", "accuracy", "1 of 2", "Flip 91.0 to 90.0"],
        ["Hand", "worst agent's success", "1 of 1", "Flip 20.0 to 30.0"],
    ]


@pytest.mark.slow
def test_the_former_default_has_the_attacks_and_seeds_of_the_grids():
    values = pd.read_csv(former.VALUES)
    kept = former.former_regrets()
    for title, view in results.grid_views():
        if title.startswith("Pre-registered"):
            continue
        own = view.rows[view.rows.defence == results.METHOD]
        part = values[values.grid == title]
        keys = ["attack", "seed"]
        assert set(map(tuple, part[keys].to_numpy())) == set(map(tuple, own[keys].to_numpy()))
        assert 0 < kept[title] < 20

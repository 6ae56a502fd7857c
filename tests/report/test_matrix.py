"""Matrices of a grid compared with values by hand, and the files of its report."""

import functools
import gzip
import itertools
import json
import math
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from scipy import stats
from tests.report.synthetic import write_run
from tests.tiny import run_cli

from fedcb2o.errors import RunError
from fedcb2o.records import summary, write_json, write_toml
from fedcb2o.report import (
    grid_notes,
    grid_results,
    read_grid,
    regret_figure,
    report_grid,
    terminal_tables,
)
from fedcb2o.report._explorer import unpack
from fedcb2o.report._heat_map import draw_heat_map
from fedcb2o.report._statistics import format_interval, holm_correction, seed_statistics
from fedcb2o.report.grid_tables import (
    SettingResults,
    defence_overview,
    difference_matrix,
    losses_against_baselines,
    metric_matrix,
    regret_matrix,
    tuning_table,
    worst_regret_differences,
    worst_regrets,
)

pytestmark = pytest.mark.usefixtures("intervals_of_two_seeds")

# Two clusters of two benign agents and a malicious one; agents 0, 1, 3 and 4 are benign.
AGENTS = {
    "cluster": [0, 0, 0, 1, 1, 1],
    "malicious": [False, False, True] * 2,
    "num_samples": [10] * 6,
    "source_in_validation": [2, 2, None] * 2,
}
FLIP, NOISE = "Label flip", "Noise"
MEDIAN, MEAN = "Median", "DFedAvgM"

# (defence, attack, seed): accuracy, source accuracy and attack success rate of the benign agents.
CELLS = {
    (MEDIAN, FLIP, 0): ([0.8, 0.6, 0.7, 0.7], [0.5, 0.5, 0.5, 0.5], [0.4, 0.2, 0.3, 0.3]),
    (MEDIAN, FLIP, 1): ([0.8, 0.8, 0.8, 0.8], [0.7, 0.7, 0.7, 0.7], [0.2, 0.2, 0.1, 0.1]),
    (MEDIAN, NOISE, 0): ([0.5, 0.5, 0.5, 0.5], None, None),
    (MEDIAN, NOISE, 1): ([0.7, 0.7, 0.7, 0.7], None, None),
    (MEAN, FLIP, 0): ([0.6, 0.6, 0.6, 0.6], [0.2, 0.2, 0.2, 0.2], [0.9, 0.7, 0.8, 0.8]),
    (MEAN, FLIP, 1): ([0.9, 0.9, 0.9, 0.9], [0.3, 0.3, 0.3, 0.3], [0.5, 0.5, 0.5, 0.5]),
    (MEAN, NOISE, 0): ([0.1, 0.1, 0.1, 0.1], None, None),
    (MEAN, NOISE, 1): ([0.2, 0.2, 0.2, 0.2], None, None),
}
BASELINES = {
    (MEDIAN, FLIP, 0): ([0.9, 0.9, 0.8, 0.8], [0.8, 0.8, 0.8, 0.8], [0.1, 0.1, 0.1, 0.1]),
    (MEDIAN, FLIP, 1): ([0.9, 0.9, 0.9, 0.9], [0.8, 0.8, 0.8, 0.8], [0.0, 0.1, 0.0, 0.1]),
    (MEDIAN, NOISE, 0): ([0.9, 0.9, 0.8, 0.8], None, None),
    (MEDIAN, NOISE, 1): ([0.9, 0.9, 0.9, 0.9], None, None),
    (MEAN, FLIP, 0): ([0.95] * 4, [0.9] * 4, [0.0] * 4),
    (MEAN, FLIP, 1): ([0.97] * 4, [0.9] * 4, [0.1] * 4),
    (MEAN, NOISE, 0): ([0.95] * 4, None, None),
    (MEAN, NOISE, 1): ([0.97] * 4, None, None),
}
REMOVED = {
    (MEDIAN, FLIP, 0): ([0.8] * 4, [0.8] * 4, [0.05] * 4),
    (MEDIAN, FLIP, 1): ([0.8] * 4, [0.8] * 4, [0.05] * 4),
    (MEDIAN, NOISE, 0): ([0.8] * 4, None, None),
    (MEDIAN, NOISE, 1): ([0.8] * 4, None, None),
    (MEAN, FLIP, 0): ([0.97] * 4, [0.9] * 4, [0.2] * 4),
    (MEAN, FLIP, 1): ([0.99] * 4, [0.9] * 4, [0.2] * 4),
    (MEAN, NOISE, 0): ([0.97] * 4, None, None),
    (MEAN, NOISE, 1): ([0.99] * 4, None, None),
}


def rate(*seeds):
    """Format the mean of rates with Student's interval on the logit scale (delta method)."""
    mean, deviation = np.mean(seeds), np.std(seeds, ddof=1)
    logit = np.log(mean / (1 - mean))
    half = stats.t.ppf(0.975, len(seeds) - 1) * deviation / len(seeds) ** 0.5 / (mean * (1 - mean))
    low, high = (100 / (1 + np.exp(-end)) for end in (logit - half, logit + half))
    return f"{100 * mean:.1f} [{low:.1f}, {high:.1f}]"


KINDS = {"clean": "clean", "removed": "removed", "cell": "cells"}


def of_all_agents(values):
    """Return the values of the four benign agents in a list of all six."""
    return (
        [None] * 6 if values is None else [values[0], values[1], None, values[2], values[3], None]
    )


def line(scores, *, answered=2, weight=0.25):
    accuracy, source, rate = map(of_all_agents, scores)
    share = [None if is_malicious else weight for is_malicious in AGENTS["malicious"]]
    return {
        "round": 1, "accuracy": accuracy, "source_accuracy": source, "attack_success_rate": rate,
        "malicious_weight": share, "answered": [answered] * 6,
    }  # fmt: skip


# Agent 0 receives 1 (same cluster) and 2 (malicious); agent 1 receives 5 (malicious, other
# cluster), and so on.
PAIRS = {
    "round": 1,
    "ids": [[1, 2], [5], [0], [4, 5], [0], [3]],
    "weights": [[0.5, 0.1], [0.4], [1.0], [0.2, 0.2], [0.3], [1.0]],
    "own": [0.4, 0.6, 0.0, 0.6, 0.7, 0.0],
}


FOLDERS = tempfile.TemporaryDirectory()


@functools.cache
def folder_of_runs():
    """Return a folder with the runs of the three tables, which `make_grid` copies."""
    folder = Path(FOLDERS.name) / "grid"
    write_runs(folder, CELLS, BASELINES, REMOVED)
    return folder


def make_grid(folder, *, errors=None, weights=True, f=None, **changes):
    """Write the folder of a grid with the runs of three tables, and the errors of failed runs."""
    runs = [changes.pop(name, None) for name in ("cells", "floors", "removed")]
    if weights and f is errors is None and runs == [None] * 3:
        shutil.copytree(folder_of_runs(), folder)
    else:
        defaults = (CELLS, BASELINES, REMOVED)
        tables = [d if table is None else table for d, table in zip(defaults, runs, strict=True)]
        write_runs(folder, *tables, errors=errors, weights=weights, f=f)
    grid = {
        "name": "hand",
        "seeds": [0, 1],
        "defences": {
            MEDIAN: {"algorithm": {"name": "by_rule"}},
            MEAN: {"algorithm": {"name": "dfedavgm"}},
        },
        "attacks": {FLIP: {}, NOISE: {}},
        **changes,
    }
    write_toml(folder / "grid.toml", grid)
    return folder


def write_runs(folder, cells, floors, removed, *, errors=None, weights=True, f=None):
    """Write the runs of a grid, and its table of cells."""
    pairs = PAIRS if weights else {**PAIRS, "weights": [[None] * len(w) for w in PAIRS["weights"]]}
    if f is not None:
        pairs = {**pairs, "f": [f] * 6}
    share = 0.25 if weights else None
    folder.mkdir()
    rows = []
    kinds = (("clean", floors), ("removed", removed), ("cell", cells))
    for defence, (kind, runs), attack in itertools.product((MEDIAN, MEAN), kinds, (FLIP, NOISE)):
        place = f"{KINDS[kind]}/{defence}/{attack}"
        metrics = {
            seed: [line(scores, weight=share)]
            for (d, a, seed), scores in runs.items()
            if (d, a) == (defence, attack)
        }
        if metrics:
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            seeds = {seed: [pairs] for seed in metrics}
            run = write_run(folder / place, {}, agents=AGENTS, metrics=metrics, pairs=seeds)
            for seed in metrics:
                row = summary(run.records_of(seed)).iloc[0].to_dict()
                write_json(folder / place / f"seed-{seed}" / "summary.json", row)
        row = {"kind": kind, "setting": "", "defence": defence, "folder": place, "rounds": 1}
        name = attack if kind == "cell" else None
        row |= {"attack": name, "floor": name, "seconds": None}
        rows.append({**row, "error": (errors or {}).get((kind, defence, attack))})
    write_json(folder / "cells.json", {"cells": rows})


def read_view(folder):
    return SettingResults(read_grid(folder), "")


def with_table(view, **changes):
    """Return a view of the same runs by changed keys of the grid."""
    return SettingResults(replace(view.results, table={**view.results.table, **changes}), "")


def grid_view(tmp_path, **content):
    return read_view(make_grid(tmp_path / "grid", **content))


@pytest.fixture(scope="module")
def view(tmp_path_factory):
    return grid_view(tmp_path_factory.mktemp("hand"))


@pytest.fixture(scope="module")
def report_folder(view, tmp_path_factory):
    """Write the report of a grid, once, and check that it changes no setting of matplotlib."""
    folder = tmp_path_factory.mktemp("report")
    before = dict(mpl.rcParams)
    paths = report_grid(view.results, folder)
    assert dict(mpl.rcParams) == before
    assert sorted(paths) == sorted(path for path in folder.rglob("*") if path.is_file())
    return folder


def test_accuracy_is_the_mean_over_agents_and_then_over_seeds(view):
    table = metric_matrix(view, "accuracy")
    assert list(table.columns) == ["Attackers clean", "Attackers removed", FLIP, NOISE, "Worst"]
    # Median: seed 0 has 0.7, seed 1 0.8: mean 75; two seeds, so one degree of freedom: t = 12.706.
    assert table.loc[MEDIAN].tolist() == [
        rate(0.85, 0.9), "80.0 [80.0, 80.0]", rate(0.7, 0.8), rate(0.5, 0.7), rate(0.5, 0.7),
    ]  # fmt: skip
    assert table.loc[MEAN, [FLIP, "Worst"]].tolist() == [rate(0.6, 0.9), rate(0.1, 0.2)]


def test_effects_of_attacks_are_net_of_the_better_baseline(view):
    lost, success = metric_matrix(view, "lost"), metric_matrix(view, "success")
    assert list(lost.columns) == [FLIP, NOISE, "Worst"]
    assert list(success.columns) == [FLIP, "Worst"]  # the other attack has no target
    # Median: accuracy is better with clean attackers: 0.85 - 0.7 and 0.9 - 0.8; the success rate
    # is better without attackers: 0.3 - 0.05 and 0.15 - 0.05.
    assert lost.loc[MEDIAN, FLIP] == "12.5 [-19.3, 44.3]"
    assert success.loc[MEDIAN, FLIP] == "17.5 [-77.8, 112.8]"
    # DFedAvgM: the opposite baselines: 0.97 - 0.6 and 0.99 - 0.9; 0.8 - 0 and 0.5 - 0.1.
    assert lost.loc[MEAN, FLIP] == "23.0 [-154.9, 200.9]"
    assert success.loc[MEAN, FLIP] == "60.0 [-194.1, 314.1]"
    rates = metric_matrix(view, "attack_success_rate")
    assert rates.loc[MEAN].to_dict() == {FLIP: rate(0.8, 0.5), "Worst": rate(0.8, 0.5)}


def test_regret_is_the_distance_to_the_best_of_each_column(view):
    table = regret_matrix(view, "accuracy")
    assert table.loc[MEDIAN, "Attackers clean"] == "8.5 [-10.6, 27.6]"  # 0.95 - 0.85 and 0.97 - 0.9
    assert table.loc[MEDIAN, "Attackers removed"] == "18.0 [5.3, 30.7]"  # 0.97 - 0.8 and 0.99 - 0.8
    assert table.loc[MEAN, ["Attackers clean", "Attackers removed"]].tolist() == ["best", "best"]
    # 0.5 - 0.1 and 0.7 - 0.2
    assert table.loc[:, NOISE].tolist() == ["best", "45.0 [-18.5, 108.5]"]
    result = table.loc[:, "Worst"].tolist()
    assert result == ["18.0 [5.3, 30.7] (Attackers removed)", "45.0 [-18.5, 108.5] (Noise)"]
    result = regret_matrix(view, "attack_success_rate").loc[:, FLIP].tolist()
    assert result == ["best", "42.5 [-52.8, 137.8]"]


def test_worst_regrets_with_and_without_attacks_set_aside(view):
    view = with_table(view, set_aside=[NOISE])
    table = worst_regrets(view)
    assert table.loc[MEAN, "Regret in accuracy, worst"] == "45.0 [-18.5, 108.5] (Noise)"
    result = table.loc[MEAN, "Regret in attack success, worst but Noise"]
    assert result == "42.5 [-52.8, 137.8] (Label flip)"
    assert table.loc[MEAN, "Regret in either, worst"] == "45.0 [-18.5, 108.5] (Noise, accuracy)"
    result = table.loc[MEAN, "Regret in either, worst but Noise"]
    assert result == "42.5 [-52.8, 137.8] (Label flip, attack success)"
    # Each defence in its own worst column: 0.4 - 0.17 and 0.5 - 0.19.
    result = worst_regret_differences(view).loc[MEAN, "Regret in accuracy, worst"]
    assert result == "+27.0 [-23.8, +77.8]"


def test_the_worst_effects_of_attacks_are_net_of_the_better_baseline(view):
    view = with_table(view, set_aside=[NOISE])
    assert (
        losses_against_baselines(view).loc[MEDIAN].to_dict()
        == {
            "Accuracy lost, worst": "27.5 [-67.8, 122.8] (Noise)",  # 0.85 - 0.5 and 0.9 - 0.7
            "Accuracy lost, worst but Noise": "12.5 [-19.3, 44.3] (Label flip)",  # 0.85 - 0.7 and 0.9 - 0.8
            "Attack success, net, worst": "17.5 [-77.8, 112.8] (Label flip)",  # 0.3 - 0.05 and 0.15 - 0.05
            "Attack success, net, worst but Noise": "17.5 [-77.8, 112.8] (Label flip)",
        }
    )


def test_a_defence_that_lacks_a_column_has_no_worst_regret(tmp_path):
    cells = {key: scores for key, scores in CELLS.items() if key[:2] != (MEAN, NOISE)}
    view = grid_view(tmp_path, cells=cells)
    result = worst_regrets(view).loc[:, "Regret in accuracy, worst"].tolist()
    assert result == ["18.0 [5.3, 30.7] (Attackers removed)", "–"]
    assert worst_regret_differences(view).loc[MEAN, "Regret in accuracy, worst"] == "–"


def test_holms_correction_and_students_p_values_by_hand():
    p = pd.Series([0.01, 0.04, math.nan, 0.03])
    assert holm_correction(p).tolist() == pytest.approx([0.03, 0.06, math.nan, 0.06], nan_ok=True)
    rows = pd.DataFrame({"defence": "a", "attack": ["b"] * 3 + ["c"] * 3 + ["d"] * 3 + ["e"]})
    statistics = seed_statistics(
        rows.assign(lost=[1.0, 2, 3, 0, 0, 0, 2, 2, 2, 1]), "lost"
    ).droplevel("defence")
    assert statistics.p.to_dict() == pytest.approx(
        {"b": 0.0741799, "c": 1, "d": 0, "e": math.nan}, rel=1e-5, nan_ok=True
    )


@pytest.mark.parametrize(
    ("ends", "digits", "text"),
    [
        (
            (0.44, -0.0134, 0.8934),
            1,
            "0.44 [-0.01, 0.89]",
        ),  # "0.4 [0.0, 0.9]" would not show that the interval contains 0
        ((-0.3, -0.604, 0.004), 1, "-0.300 [-0.604, 0.004]"),
        ((0.45, 0.0066, 0.8934), 1, "0.5 [0.0, 0.9]"),  # this interval does not contain 0
        ((0.45, 0.0, 0.9), 1, "0.5 [0.0, 0.9]"),
        ((0.0, -1e-17, 1e-17), 2, "0.00 [0.00, 0.00]"),
        ((0.2, -math.inf, math.inf), 1, "0.2"),
        ((0.2, math.nan, math.nan), 1, "0.2"),
    ],
)
def test_a_formatted_interval_shows_if_it_contains_0(ends, digits, text):
    assert format_interval(*ends, digits=digits) == text


@pytest.mark.parametrize(("f", "exceeded"), [(0, 0.75), (1, 0.0), (None, math.nan)])
def test_more_malicious_models_than_a_rule_assumes_are_marked(tmp_path, f, exceeded):
    view = grid_view(tmp_path, f=f)
    attacked = view.rows[view.rows.attack == FLIP]
    # agents 0, 1 and 3 receive one malicious model
    assert attacked.malicious_most.tolist() == [1.0] * 4
    assert attacked.f_exceeded.tolist() == pytest.approx([exceeded] * 4, nan_ok=True)
    assert (metric_matrix(view, "accuracy").loc[MEDIAN, FLIP][-1] == "†") is (f == 0)
    mark = " †" if f == 0 else ""
    table = terminal_tables(view.results)[""].loc[MEDIAN]
    assert table[["Attackers clean", FLIP]].tolist() == [f"87.5{mark}", f"75.0{mark}"]
    worst = worst_regrets(view).loc[MEAN, ["Regret in accuracy, worst", "Regret in either, worst"]]
    assert [text.endswith(") †") for text in worst] == [f == 0] * 2
    cell_texts = [text.get_text() for text in regret_figure(view, "accuracy").axes[0].texts]
    cells = view.exceeded_cells(view.columns("accuracy")).to_numpy().sum()
    # and the worst column of each defence
    assert sum(text.endswith("†") for text in cell_texts) == cells + (f == 0) * 2


def test_matrices_of_the_source_worst_agents_worst_tenths_and_clusters_by_hand(view):
    source = metric_matrix(view, "source_accuracy").loc[MEDIAN]
    assert source.to_dict() == {FLIP: rate(0.5, 0.7), "Worst": rate(0.5, 0.7)}  # no source of Noise
    assert metric_matrix(view, "accuracy_worst").loc[MEDIAN, FLIP] == rate(0.6, 0.8)  # 0.6 and 0.8
    assert metric_matrix(view, "accuracy_worst_tenth").loc[MEDIAN, FLIP] == rate(0.6, 0.8)
    # 0.9 and 0.5
    assert metric_matrix(view, "attack_success_rate_worst").loc[MEAN, FLIP] == rate(0.9, 0.5)
    result = metric_matrix(view, "accuracy_cluster_1").loc[MEDIAN, "Attackers clean"]
    assert result == "90.0 [90.0, 90.0]"
    assert metric_matrix(view, "accuracy_cluster_2").loc[MEDIAN, "Attackers clean"] == rate(
        0.8, 0.9
    )  # 0.8 and 0.9


def test_received_models_weights_seconds_and_megabytes_by_hand(view):
    row = view.rows.set_index(["defence", "attack", "seed"]).loc[(MEDIAN, FLIP, 0)]
    assert row.malicious_weight == 0.25
    # benign agents receive 1, 2, 5, 4, 5, 0: three malicious
    assert row.malicious_received == pytest.approx(3 / 6)
    # 5 by agent 1, 0 by agent 4
    assert row.other_cluster_received == pytest.approx(2 / 6, abs=1e-5)
    assert row.other_cluster_weight == pytest.approx((0 + 0.4 + 0 + 0.3) / 4)
    assert row.own_weight == pytest.approx((0.4 + 0.6 + 0.6 + 0.7) / 4)
    assert row.seconds == pytest.approx(1.5 + 0.5 + 0.1)
    assert row.megabytes == pytest.approx(2 * 4 * 1000 / 1e6)  # two models of 1,000 parameters


def test_a_rule_without_weights_has_none_in_the_matrix(tmp_path):
    folder = make_grid(tmp_path / "grid", weights=False)
    results = read_grid(folder)
    assert results.rows.malicious_weight.isna().all()
    assert results.rows.other_cluster_weight.isna().all()
    assert results.rows.malicious_received.notna().all()
    assert set(
        metric_matrix(SettingResults(results, ""), "malicious_weight").to_numpy().ravel()
    ) == {"–"}


def test_two_seeds_have_no_interval_in_a_report(set_min_seeds):
    set_min_seeds(3)
    values = pd.DataFrame(
        {"defence": "a", "attack": ["b"] * 2 + ["c"] * 3, "seconds": [1.0, 2, 1, 2, 3]}
    )
    two, three = seed_statistics(values, "seconds").to_dict("records")
    assert (two["seeds"], two["mean"]) == (2, 1.5)
    assert np.isnan([two["low"], two["high"], two["p"]]).all()
    assert three["p"] == pytest.approx(0.0741799)
    ends = [three[name] for name in ("seeds", "mean", "deviation", "low", "high")]
    half = 4.302653 / 3**0.5
    assert ends == pytest.approx([3, 2, 1, 2 - half, 2 + half])


def test_differences_are_paired_by_seed_with_students_interval(view):
    # Seed 0: 0.6 - 0.7, seed 1: 0.9 - 0.8; two seeds, so one degree of freedom: t = 12.706.
    table = difference_matrix(view, "accuracy")
    assert table.loc[MEAN, FLIP] == "+0.0 [-127.1, +127.1]"
    assert table.loc[MEAN, NOISE] == "-45.0 [-108.5, +18.5]"  # -0.4 and -0.5
    assert table.loc[MEAN, "Attackers removed"] == "+18.0 [+5.3, +30.7]"
    assert list(difference_matrix(view, "attack_success_rate").columns) == [FLIP]


def test_the_overview_by_hand(view):
    table = defence_overview(view)
    assert table.loc[MEDIAN, "Attackers removed"] == "80.0 [80.0, 80.0]"
    assert table.loc[MEAN, "Accuracy, worst attack"] == f"{rate(0.1, 0.2)} ({NOISE})"
    # (0.7 + 0.5) / 2, (0.8 + 0.7) / 2
    assert table.loc[MEDIAN, "Accuracy, mean over attacks"] == rate(0.6, 0.75)
    # of the attack that has a rate
    assert table.loc[MEDIAN, "Attack success, mean over attacks"] == rate(0.3, 0.15)


def test_a_report_writes_the_page_and_its_files(report_folder):
    names = {str(path.relative_to(report_folder)) for path in report_folder.rglob("*")}
    matrices = {
        f"matrices/{name}.{end}"
        for name in ("accuracy", "accuracy-regret", "regret", "overview")
        for end in ("csv", "md", "tex")
    }
    result = matrices | {
        "matrices/accuracy-regret.png",
        "report.html",
        "summary.csv",
        "cells.csv",
        "statistics.csv",
        "grid.toml",
    }
    assert result <= names
    for name in ("article/accuracy", "article/accuracy-regret", "matrices/accuracy-regret"):
        assert (report_folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (report_folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    page = (report_folder / "report.html").read_text()
    assert "partial" not in page
    assert "://" not in page
    for definition in ("distance to the best defence", "train on true labels", "Student"):
        assert definition in page
    cells = (
        pd.read_csv(report_folder / "cells.csv")
        .set_index(["defence", "attack", "seed", "metric"])
        .value
    )
    assert cells[MEAN, FLIP, 0, "success"] == pytest.approx(0.8)
    assert cells[MEAN, "Attackers clean", 0, "accuracy"] == pytest.approx(0.95)
    statistics = pd.read_csv(report_folder / "statistics.csv").set_index(
        ["defence", "attack", "metric"]
    )
    assert statistics.loc[(MEAN, FLIP, "accuracy"), "difference_high"] == pytest.approx(
        1.27062, rel=1e-4
    )


@pytest.mark.usefixtures("no_figures")
def test_a_report_can_be_made_from_its_summary_alone(report_folder, tmp_path):
    (tmp_path / "kept").mkdir()
    for name in ("grid.toml", "summary.csv"):
        shutil.copy(report_folder / name, tmp_path / "kept" / name)
    report_grid(read_grid(tmp_path / "kept"), tmp_path / "again")
    for path in (report_folder / "matrices").iterdir():
        again = tmp_path / "again" / "matrices" / path.name
        if path.suffix in (".png", ".pdf"):
            assert again.exists()  # not drawn again
        else:
            assert path.read_bytes() == again.read_bytes(), path.name
    for name in ("grid.toml", "summary.csv"):
        assert (tmp_path / "kept" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    summary_file = tmp_path / "kept" / "summary.csv"
    rows = read_grid(tmp_path / "kept").rows
    summary_file.with_name("summary.csv.gz").write_bytes(gzip.compress(summary_file.read_bytes()))
    summary_file.unlink()
    pd.testing.assert_frame_equal(read_grid(tmp_path / "kept").rows, rows)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (gzip.compress(bytes(2**20), mtime=0), "unpacks to more than 2000 bytes"),
        (gzip.compress(bytes(100), mtime=0)[:-10], "cannot be read"),
        (b"no gzip", "cannot be read"),
    ],
    ids=["large", "cut", "no gzip"],
)
def test_a_packed_summary_is_bounded_and_whole(view, tmp_path, monkeypatch, content, reason):
    monkeypatch.setattr(grid_results, "_MAX_CSV_BYTES", 2000)
    write_toml(tmp_path / "grid.toml", view.results.table)
    (tmp_path / "summary.csv.gz").write_bytes(content)
    with pytest.raises(RunError, match=reason):
        read_grid(tmp_path)


def test_names_that_pandas_reads_as_missing_are_kept(tmp_path):
    folder = make_grid(tmp_path / "grid")
    results = read_grid(folder)
    rows = results.rows.replace({NOISE: "None", MEAN: "NA"})
    (tmp_path / "kept").mkdir()
    table = {**results.table, "attacks": {FLIP: {}, "None": {}}, "defences": {MEDIAN: {}, "NA": {}}}
    write_toml(tmp_path / "kept" / "grid.toml", table)
    rows.to_csv(tmp_path / "kept" / "summary.csv", index=False)
    assert metric_matrix(read_view(tmp_path / "kept"), "accuracy").loc["NA", "None"] == rate(
        0.1, 0.2
    )


def test_a_partial_grid_names_missing_runs(tmp_path):
    cells = {
        key: scores
        for key, scores in CELLS.items()
        if key not in ((MEAN, NOISE, 0), (MEAN, NOISE, 1))
    }
    floors = {key: scores for key, scores in BASELINES.items() if key != (MEDIAN, NOISE, 1)}
    errors = {("cell", MEAN, NOISE): "`f` = 4 is much"}
    folder = make_grid(tmp_path / "grid", cells=cells, floors=floors, errors=errors)
    view = read_view(folder)
    assert metric_matrix(view, "accuracy").loc[MEAN].tolist()[2:] == [rate(0.6, 0.9), "failed", "–"]
    assert metric_matrix(view, "lost").loc[MEDIAN, NOISE] == "35.0"  # one seed: no interval
    assert defence_overview(view).loc[MEAN, "Accuracy, worst attack"] == "–"
    assert list(grid_notes(view.results)) == [
        "This report is partial: 6 of 8 runs under attack are done, 2 of the others failed",
        "The effect of the attack is unknown for 1 attacked runs, because the better baseline is "
        "missing",
        f"{MEAN}, {NOISE} failed: `f` = 4 is much",
    ]


def test_a_seed_with_missing_rounds_does_not_count(tmp_path):
    folder = make_grid(tmp_path / "grid")
    path = folder / "cells" / MEDIAN / FLIP / "seed-0" / "summary.json"
    path.write_text('{"rounds": 0}')
    assert metric_matrix(read_view(folder), "accuracy").loc[MEDIAN, FLIP] == "80.0"
    path.unlink()
    assert metric_matrix(read_view(folder), "accuracy").loc[MEDIAN, FLIP] == "80.0"


def test_an_entry_without_attack_has_accuracy_and_no_success(tmp_path):
    folder = make_grid(tmp_path / "grid")
    cells = json.loads((folder / "cells.json").read_text())["cells"]
    without_attack = [
        {**cell, "floor": None} if cell["attack"] == NOISE else cell for cell in cells
    ]
    write_json(folder / "cells.json", {"cells": without_attack})
    view = read_view(folder)
    assert metric_matrix(view, "accuracy").loc[MEAN, NOISE] == rate(0.1, 0.2)
    assert list(metric_matrix(view, "lost").columns) == [FLIP, "Worst"]
    assert list(grid_notes(view.results)) == []


def test_defences_that_train_on_other_samples_are_named(tmp_path):
    defences = {MEDIAN: {"agents": {"hold_out": True, "validation": 0.5}}, MEAN: {"seeds": [0, 1]}}
    grid = make_grid(tmp_path / "grid", defences=defences, agents={"hold_out": False})
    assert (
        "These defences differ in samples or evaluation: agents.hold_out = True, "
        f"agents.validation = 0.5 ({MEDIAN}); as the grid ({MEAN})"
    ) in list(grid_notes(read_grid(grid)))


@pytest.mark.usefixtures("no_figures")
def test_grids_of_one_page_that_differ_in_samples_or_evaluation_are_named(tmp_path):
    shared = {"data": {"name": "digits"}, "agents": {"validation": 0.5}}
    changed = {"evaluate_on": "tuning", "agents": {"validation": 0.5, "hold_out": True}}
    first = read_grid(make_grid(tmp_path / "first", title="First", **shared))
    second = read_grid(make_grid(tmp_path / "second", title="Second", **{**shared, **changed}))
    warning = (
        "These grids differ in samples or evaluation: defaults (First); "
        "evaluate_on = tuning, agents.hold_out = True (Second)."
    )
    report_grid([first, second], tmp_path / "both")
    assert warning in (tmp_path / "both" / "report.html").read_text(encoding="utf-8")
    report_grid([first, first], tmp_path / "same")
    page = (tmp_path / "same" / "report.html").read_text(encoding="utf-8")
    assert "These grids differ" not in page


def test_seeds_removed_from_the_grid_do_not_count(tmp_path):
    folder = make_grid(tmp_path / "grid", seeds=[1])
    result = metric_matrix(read_view(folder), "accuracy").loc[MEDIAN].tolist()
    assert result == ["90.0", "80.0", "80.0", "70.0", "70.0"]


@pytest.mark.usefixtures("no_figures")
def test_each_setting_has_its_matrices(view, tmp_path):
    results = view.results
    results.rows.loc[results.rows.defence != "", "setting"] = "Few"
    many = results.rows.assign(setting="Many, $ & <b>", accuracy=results.rows.accuracy / 2)
    table = {
        **results.table,
        "settings": {"Few": {}, "Many, $ & <b>": {"agents": {"malicious": 3}}},
    }
    both = type(results)(results.folder, table, {}, pd.concat([results.rows, many]))
    results.rows["setting"] = ""
    names = {
        str(path.relative_to(tmp_path / "out")) for path in report_grid(both, tmp_path / "out")
    }
    assert {"matrices/few/accuracy-regret.png", "matrices/many-b/accuracy.csv"} <= names
    assert metric_matrix(SettingResults(both, "Many, $ & <b>"), "accuracy").loc[
        MEDIAN, FLIP
    ] == rate(0.35, 0.4)
    tables, _ = unpack((tmp_path / "out" / "report.html").read_text())
    assert "malicious = 3" in dict(tables[1]["facts"])["Agents"]


@pytest.mark.usefixtures("no_figures")
def test_the_page_has_the_tuning_candidates_and_the_choice(tmp_path):
    request = {
        "seeds": [9],
        "setting": "",
        "attacks": {FLIP: {}},
        "candidates": [{"algorithm": {"alpha": 1.0}}, {}],
    }
    choice = {
        MEDIAN: {
            "best": 0,
            "at_end": True,
            "scores": [0.5, None],
            "by_attack": [{FLIP: [0.5]}, None],
            "asked": request,
        }
    }
    defences = {MEDIAN: {"tune": request["candidates"]}, MEAN: {}}
    folder = make_grid(
        tmp_path / "grid", tuning={"seeds": [9], "attacks": [FLIP]}, defences=defences
    )
    (folder / "tuning.json").write_text(json.dumps(choice))
    results = read_grid(folder)
    rows = tuning_table(results).reset_index().to_numpy().tolist()
    assert rows == [
        [MEDIAN, "algorithm.alpha = 1.0", "50.00", "yes, at an end"],
        [MEDIAN, "unchanged", "failed", ""],
    ]
    assert "tuning.json" in {path.name for path in report_grid(results, tmp_path / "out")}
    raw = (tmp_path / "out" / "tuning.csv").read_text().splitlines()
    assert raw[1:] == [f"{MEDIAN},algorithm.alpha = 1.0,{FLIP},9,0.5"]
    tables, _ = unpack((tmp_path / "out" / "report.html").read_text())
    assert tables[0]["changes"] == ["unchanged; tuned: algorithm.alpha = 1.0", "unchanged"]
    assert dict(tables[0]["facts"])["Tuning"] == "seeds = [9]"


def test_the_mean_over_attacks_is_over_seeds_with_all_attacks(tmp_path):
    cells = {key: scores for key, scores in CELLS.items() if key != (MEDIAN, NOISE, 1)}
    table = defence_overview(grid_view(tmp_path, cells=cells))
    assert table.loc[MEDIAN, "Accuracy, mean over attacks"] == "60.0"


def test_a_large_heat_map_has_a_number_in_every_cell():
    draw = np.random.default_rng(0)
    names = [f"A defence with $ and a rather long name {i}" for i in range(20)]
    means = pd.DataFrame(
        draw.random((20, 20)), index=names, columns=[f"attack {j}" for j in range(20)]
    )
    means.iloc[3, 4], means.iloc[5, 6] = np.nan, np.nan
    failed = means.isna() & (means.index.to_numpy()[:, None] == names[3])
    figure = draw_heat_map(
        means, means / 10, failed=failed, marked=means > 0.9, separated=("attack 0",)
    )
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert len(texts) == 2 * 398 + 1
    assert texts.count("failed") == 1
    assert f"{100 * means.iloc[0, 0]:.1f}" in texts
    assert sum(text.endswith("†") for text in texts) == (means > 0.9).to_numpy().sum()
    assert (
        max(len(label.get_text().replace("\\", "")) for label in figure.axes[0].get_yticklabels())
        == 40
    )
    assert len(figure.axes[0].patches) == 400


@pytest.mark.usefixtures("no_figures")
def test_several_grids_have_one_page_and_a_setting_without_results_is_omitted(tmp_path):
    first, second = (read_grid(make_grid(tmp_path / name, title=name)) for name in ("a", "b"))
    second.rows["setting"] = "Few"
    second.table["settings"] = {"Few": {}, "Many": {}}
    report_grid([first, second], tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    tables, _ = unpack(page)
    assert [table["title"] for table in tables] == ["a", "b: Few"]
    assert "partial: 8 of 16 runs" in page
    assert (tmp_path / "out/a/matrices/accuracy.tex").is_file()
    assert (tmp_path / "out/b/matrices/few/accuracy.csv").is_file()
    assert not (tmp_path / "out/b/matrices/many/accuracy.csv").exists()


@pytest.mark.usefixtures("no_figures")
def test_the_command_reports_a_grid_and_compares_with_a_reference(view, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_grid(tmp_path / "grid")
    with_median, with_mean = (
        difference_matrix(with_table(view, reference=defence), "accuracy")
        for defence in (MEDIAN, MEAN)
    )
    done = run_cli("report", "grid", "--out", "out", "--reference", MEAN)
    assert done.status == 0
    assert done.err.startswith("`article` has no curves, because")
    assert done.err.count("\n") == 1
    assert "Attackers" in done.out
    assert "Regret" in done.out
    assert re.search(r"The page is out/report.html; the matrices .* are in out/matrices", done.out)
    assert "runs or of grids" in run_cli("report", "grid", "grid/cells").one_line()
    assert (tmp_path / "out/matrices/accuracy-difference.csv").read_text() == with_mean.to_csv()
    assert (list(with_median.index), list(with_mean.index)) == ([MEAN], [MEDIAN])
    message = "has no defence `Medain`. Did you mean `Median`?"
    assert message in run_cli("report", "grid", "--reference", "Medain").one_line()
    assert "has no defence ``" in run_cli("report", "grid", "--reference", "").one_line()
    message = "is for the folder of a grid"
    assert message in run_cli("report", "grid/" + KINDS["cell"], "--reference", MEAN).one_line()


def test_a_folder_without_results_is_refused(tmp_path):
    make_grid(tmp_path / "grid", cells={}, floors={}, removed={})
    with pytest.raises(RunError, match=r"no run in .* is done yet, so there is nothing to report"):
        report_grid(read_grid(tmp_path / "grid"), tmp_path / "out")
    (tmp_path / "grid" / "cells.json").unlink()
    message = r"holds a grid.toml, but no run and no summary.csv: fedcb2o bench"
    with pytest.raises(RunError, match=message):
        read_grid(tmp_path / "grid")
    (tmp_path / "grid" / "summary.csv").write_text("defence\n1")
    with pytest.raises(RunError, match=r"summary.csv cannot be read .*: restore it"):
        read_grid(tmp_path / "grid")
    (tmp_path / "grid" / "grid.toml").write_text("seeds = [0]")
    with pytest.raises(RunError, match=r"grid.toml cannot be read .*: restore it"):
        read_grid(tmp_path / "grid")

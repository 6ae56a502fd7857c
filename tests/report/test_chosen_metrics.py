"""Grids of data without classes, ranked by a metric of the outputs."""

import numpy as np
import pytest
from tests.tiny import cells_in_this_process

import fedcb2o
from fedcb2o.errors import ConfigError
from fedcb2o.report import SettingResults, explorer_page, read_grid, report_grid, terminal_tables
from fedcb2o.report._explorer import unpack


def below(outputs, targets):
    return -float(outputs.abs().mean())


GRID = {
    "name": "patients",
    "rounds": 2,
    "evaluate_every": 2,
    "seeds": [0, 1],
    "rank_by": "mae",
    "data": {"name": "diabetes"},
    "agents": {
        "num_clusters": 1,
        "benign": 3,
        "malicious": 1,
        "benign_samples": 30,
        "validation": 0.4,
        "budget": 3,
    },
    "model": {"name": "logistic"},
    "training": {"gamma": 0.02, "batch_size": 8, "local_epochs": 2, "loss": "squared_error"},
    "metrics": ["mae", "r2", {"name": f"{__name__}:below"}],
    "defences": {
        "FedCB2O": {
            "algorithm": {"name": "fedcb2o"},
            "tune": [{"algorithm": {"alpha": 1.0}}, {"training": {"gamma": 1e-9}}],
        },
        "Mean": {"algorithm": {"name": "dfedavgm"}},
    },
    "attacks": {"Random": {"attack": {"name": "random_labels"}}},
    "tuning": {"seeds": [9], "attacks": ["Random"]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grid") / "patients"
    with cells_in_this_process():
        fedcb2o.bench(GRID, out=folder, jobs=1)
    return folder


@pytest.mark.usefixtures("no_figures")
def test_a_grid_is_ranked_by_a_metric_of_the_outputs(folder, tmp_path):
    results = read_grid(folder)
    assert results.main == "mae"
    assert results.tuning["FedCB2O"]["best"] == 0  # the other candidate hardly trains
    assert results.tuning["FedCB2O"]["scores"][0] < 0
    view = SettingResults(results, "")
    attacked = view.rows[view.rows.attack == "Random"].set_index(["defence", "seed"])
    clean = view.rows[view.rows.attack == "Attackers clean"].set_index(["defence", "seed"])
    removed = view.rows[view.rows.attack == "Attackers removed"].set_index(["defence", "seed"])
    better = min(clean, removed, key=lambda rows: rows.loc["Mean"].mae.mean())
    expected = attacked.loc["Mean"].mae - better.loc["Mean"].mae
    assert attacked.loc["Mean"].lost.tolist() == pytest.approx(expected.tolist())
    assert (attacked.mae_worst >= attacked.mae).all()
    assert (attacked.mae_missing == 0).all()

    assert list(view.compared) == ["mae", "r2", "below", "test_loss"]
    assert "Regret: mae" in terminal_tables(results)[""]
    names = {path.name for path in report_grid(results, tmp_path / "report")}
    assert {"mae.csv", "r2-regret.csv", "below-difference.csv", "test-loss.csv"} <= names
    # The published summary alone gives the same report.
    again = read_grid(tmp_path / "report")
    assert again.main == "mae"
    assert np.allclose(again.rows.r2, results.rows.r2, rtol=1e-4)


def test_the_explorer_has_negative_values(folder):
    tables, values = unpack(explorer_page([read_grid(folder)], "Patients"))
    (table,) = tables
    measures = {measure["name"]: measure for measure in table["measures"]}
    assert table["measures"][0]["name"] == "mae"
    assert (measures["mae"]["worse"], measures["r2"]["worse"]) == ("high", "low")
    below = measures["below"]
    count = len(table["defences"]) * len(table["columns"]) * len(table["seeds"])
    stored = values[below["offset"] : below["offset"] + count] * below["step"]
    rows = SettingResults(read_grid(folder), "").rows
    assert sorted(stored + below["least"]) == pytest.approx(sorted(rows.below), rel=1e-3)
    assert rows.below.max() < 0
    assert "least" not in measures["mae"]


def test_a_metric_that_no_run_has_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"`rank_by` names `maee`. Did you mean `mae`"):
        fedcb2o.bench({**GRID, "rank_by": "maee"}, out=tmp_path / "grid")

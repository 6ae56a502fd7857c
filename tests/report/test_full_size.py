"""`paper/full_size.py` at tiny sizes: order of entries, kept values, and resuming after a stop."""

import pandas as pd
import pytest
from paper import full_size
from paper.claims import METRICS

import fedcb2o

TINY = {
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": [4]},
    "attack": {"name": "label_flip", "source": 9, "target": 4},
    "agents.benign": 2,
    "agents.malicious": 1,
    "agents.benign_samples": 30,
    "agents.malicious_samples": 30,
    "agents.budget": 1,
    "training.local_epochs": 1,
    "rounds": 2,
    "evaluate_every": 1,
}


def tiny_runner(folder):
    return lambda entry: full_size.run_entry(entry, folder / "runs", folder, TINY, None)


def test_entries_cover_the_tables_of_the_paper():
    assert len(full_size.ENTRIES) == 21
    assert full_size.ENTRIES[0] == ("fedcbo-released", 0)
    for method, row in full_size.ROWS.items():
        experiment = fedcb2o.load(f"emnist-{method}")
        assert (experiment.rounds, experiment.agents.num_benign) in ((151, 70), (151, 35))
        assert row in full_size.PAPER


def test_the_next_entry_runs_and_is_copied(tmp_path):
    assert full_size.missing(tmp_path) == list(full_size.ENTRIES)
    finished = full_size.run_missing(1, 9, tmp_path, tiny_runner(tmp_path), copy=tmp_path / "copy")
    assert finished == [full_size.ENTRIES[0]]
    assert full_size.missing(tmp_path) == list(full_size.ENTRIES[1:])
    (tmp_path / "values.csv").unlink()
    values = full_size.read_values(tmp_path / "copy")
    run = fedcb2o.Run(tmp_path / "runs" / "fedcbo-released-0")
    last = run.records[~run.records.malicious & (run.records["round"] == 2)]
    assert values.accuracy.iloc[0] == pytest.approx(100 * last.accuracy.mean(), abs=1e-4)
    curves = pd.read_csv(tmp_path / "copy" / "curves.csv")
    assert curves["round"].tolist() == [1, 2]


def test_a_stopped_entry_resumes(tmp_path, monkeypatch):
    half = {**TINY, "rounds": 1}
    entry = full_size.ENTRIES[1]
    full_size.run_entry(entry, tmp_path / "runs", tmp_path / "half", half, None)
    rounds = []
    run = fedcb2o.run
    watch = lambda experiment, seed, record: rounds.append(record["round"])  # noqa: E731
    monkeypatch.setattr(fedcb2o, "run", lambda *a, **k: run(*a, watch=watch, **k))
    tiny_runner(tmp_path)(entry)
    assert rounds == [2]


def test_an_entry_that_would_end_too_late_does_not_start(tmp_path):
    now = [0.0]

    def run(entry):
        now[0] += 200
        row = pd.DataFrame([[1.0, 2.0, 3.0]], columns=[*METRICS], index=[entry[1]])
        rows = pd.concat({entry[0]: row.rename_axis("seed")}, names=["method"])
        for name in ("values.csv", "curves.csv"):
            full_size.add_rows(tmp_path / name, rows)

    finished = full_size.run_missing(9, 10, tmp_path, run, clock=lambda: now[0])
    assert len(finished) == 3
    assert full_size.missing(tmp_path) == list(full_size.ENTRIES[3:])


def test_tables_of_two_seeds_have_deviations(tmp_path):
    for seed, accuracy in enumerate((80.0, 82.0)):
        row = pd.DataFrame([[accuracy, 50.0, 40.0]], columns=[*METRICS], index=[seed])
        rows = pd.concat({"fedcb2o-released": row.rename_axis("seed")}, names=["method"])
        full_size.add_rows(tmp_path / "values.csv", rows)
    page = full_size.tables(tmp_path)
    assert "| FedCB2O | 2 | 81.00 ± 1.41 | 82.79 | 50.00 ± 0.00 | 55.73 |" in page
    assert "| Oracle Min | 0 | – | 82.75 |" in page


def test_the_page_shows_the_committed_values():
    table = full_size.tables(full_size.FOLDER)
    assert f"<!-- generated: full_size -->\n\n{table}\n\n" in full_size.PAGE.read_text("utf-8")
    assert "| FedCBO (150 rounds) | 1 | 84.42 | 84.26 |" in table


def test_the_command_line_lists_missing_entries(tmp_path, capsys):
    full_size.main(["--folder", str(tmp_path)])
    assert "21 of 21 entries are missing: fedcbo-released (0), " in capsys.readouterr().out

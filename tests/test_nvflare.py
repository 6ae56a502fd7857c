"""Tests of the NVFlare example: its page, its rounds, and a job where NVFlare is installed."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "nvflare"


@pytest.fixture
def hospitals(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "hospitals", raising=False)
    return importlib.import_module("hospitals")


def test_the_table_has_the_committed_values():
    results = pd.read_csv(FOLDER / "hospitals.csv")
    page = (ROOT / "docs" / "nvflare.md").read_text(encoding="utf-8")
    means = results.groupby(["case", "attack", "method"])[["mean", "worst"]].mean()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    header = next(row for row in rows if row[:2] == ["case", "attack"])
    for (case, attack, method), row in means.iterrows():
        cells = next(cells for cells in rows if cells[:2] == [case, attack])
        assert cells[header.index(method)] == f"{row['mean']:.1f} / {row['worst']:.1f}"
    runs = results.groupby(["case", "attack", "method"]).seed.nunique()
    assert runs.nunique() == 1
    assert f"over {runs.iloc[0]} seeds" in page.replace("\n", " ")


def test_fedassay_survives_boosting_sites_in_one_process(hospitals):
    """One round of boosting sites destroys the mean, but not FedAssay."""
    mean = hospitals.simulate("mean", "boosting", "alike", 0, rounds=1)
    assert np.ptp(mean) == 0
    assert mean[0] < 20
    assert max(hospitals.simulate("fedassay", "boosting", "alike", 0, rounds=1)) > 60


@pytest.mark.slow
def test_nvflare_has_the_accuracy_of_one_process(hospitals):
    if importlib.util.find_spec("nvflare") is None:
        pytest.skip("NVFlare is not installed")
    options = ["--attack", "boosting", "--case", "two-scanners", "--rounds", "2"]
    command = [sys.executable, str(FOLDER / "job.py"), *options]
    output = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True).stdout
    accuracy = hospitals.simulate("fedassay", "boosting", "two-scanners", 0, rounds=2)
    expected = f"mean {np.mean(accuracy):.2f}, worst {min(accuracy):.2f}"
    assert output.splitlines()[-1] == expected

"""What a part of FedCB2O gains, and which of many gains stay, against numbers that were worked out
by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
from paper.parts import FAMILIES, Family, gains, parts_table
from tests.report.test_matrix import FLIP, MEDIAN, NOISE, make_grid

from fedcb2o.errors import ConfigError
from fedcb2o.report import read_grid
from fedcb2o.report.grid_tables import SettingResults

pytestmark = pytest.mark.usefixtures("intervals_of_two_seeds")

DOCS = Path(__file__).parents[2] / "docs"
LEFT_OUT = Family(MEDIAN, "DFed", added=False, looks=1)
"""As if DFedAvgM were the median without a part called AvgM."""


@pytest.fixture
def results(tmp_path):
    found = read_grid(make_grid(tmp_path / "grid"))
    rows = found.rows
    rows.loc[(rows.defence == MEDIAN) & (rows.attack == NOISE), "accuracy"] = [
        0.5,
        0.61,
    ]  # the other has 0.1 and 0.2
    return found


def test_a_gain_is_more_accuracy_or_less_of_the_attack(results):
    found = gains(results, LEFT_OUT)["mean"].loc[""]
    assert found["accuracy", "AvgM", NOISE] == pytest.approx(0.405)
    assert found["accuracy", "AvgM", FLIP] == pytest.approx(0.0)
    assert found["attack_success_rate", "AvgM", FLIP] == pytest.approx(
        0.425
    )  # 0.8 and 0.5, and with it 0.3 and 0.15
    added = gains(results, replace(LEFT_OUT, added=True))["mean"].loc[""]
    assert added.tolist() == pytest.approx((-found).tolist())


def test_what_stays_is_corrected_for_all_differences_and_looks(results):
    found = gains(results, LEFT_OUT)
    assert len(found) == 5  # two floors and two attacks in accuracy, one in success
    one = found.loc[("", "accuracy", "AvgM", NOISE)]
    assert one.p == pytest.approx(
        0.00786, abs=1e-5
    )  # t = 81 with one degree of freedom; five times that is below 5%
    assert found[found.stays].index.get_level_values("attack").tolist() == [NOISE]
    assert not gains(results, replace(LEFT_OUT, looks=2)).stays.any()


def test_a_table_has_what_the_whole_reaches_and_then_what_parts_gain(results):
    table = parts_table(SettingResults(results, ""), LEFT_OUT)
    assert table.index.tolist() == [MEDIAN, "AvgM"]
    assert table.columns.tolist() == [
        "Attackers clean",
        "Attackers removed",
        FLIP,
        NOISE,
        f"{FLIP}, success",
    ]
    assert table.loc[MEDIAN, FLIP].startswith("75.0 [")
    assert table.loc["AvgM", NOISE] == "+40.5 [+34.1, +46.9] *"
    assert table.loc["AvgM", f"{FLIP}, success"] == "+42.5 [-52.8, +137.8]"


def test_a_grid_without_the_parts_is_an_error(results):
    with pytest.raises(
        ConfigError, match="has no 'FedCB2O, sub-level set' with one part more or less"
    ):
        gains(results, FAMILIES["half"])


def test_the_page_counts_what_stays():
    results = read_grid(DOCS / "benchmark" / "ablation")
    page = " ".join((DOCS / "benchmark.md").read_text().split())
    counts = {}
    for name, family in FAMILIES.items():
        found = gains(results, family)
        stay = found[found.stays]["mean"]
        counts[name] = len(found), sum(stay > 0), sum(stay < 0)
    assert counts == {"half": (162, 28, 3), "all-data": (144, 18, 2), "alone": (162, 36, 20)}
    assert "in 28 of the 162 differences; three more are costs" in page
    assert "all eighteen asterisks of gains" in page
    assert "the two costs that stay" in page

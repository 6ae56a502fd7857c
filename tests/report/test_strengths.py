"""Attack strengths in a report: all trials and the chosen ones."""

import tomllib
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
from tests.report.test_matrix import FLIP, MEAN, MEDIAN, NOISE, make_grid

from fedcb2o.records import read_json_with_checksum, write_json_with_checksum
from fedcb2o.report import chosen_strengths_table, read_choices, report_grid
from fedcb2o.report.grid_results import read_grid

DOCS = Path(__file__).parents[2] / "docs"
STRENGTHS = [{}, {"attack": {"z": 2.0}}, {"attack": {"z": 8.0}}]


def choice(defence, attack, worst, rates=None):
    trials = [
        {"harm": 0.1, "accuracy": [0.9, 0.8], "attack_success_rate": rates},
        {"harm": 0.4, "accuracy": [0.5, 0.7], "attack_success_rate": rates},
        {"harm": None},
    ]
    request = {"seeds": [7, 8], "strengths": STRENGTHS}
    return {
        "setting": "",
        "defence": defence,
        "attack": attack,
        "worst": worst,
        "tried": trials,
        "asked": request,
    }


CHOICES = [choice(MEDIAN, NOISE, 1), choice(MEDIAN, FLIP, 2, [0.25, 0.5]), choice(MEAN, NOISE, 0)]


def test_the_chosen_strength_is_listed_for_each_defence_and_attack():
    table = chosen_strengths_table(CHOICES, "")
    assert table.loc[MEDIAN].to_dict() == {NOISE: "z = 2.0", FLIP: "z = 8.0"}
    assert table.loc[MEAN].to_dict() == {NOISE: "unchanged", FLIP: "–"}


@pytest.fixture
def folder(tmp_path):
    attacks = {FLIP: {}, NOISE: {"strengths": STRENGTHS}}
    grid = make_grid(tmp_path / "grid", attacks=attacks, adversary={"seeds": [7, 8]})
    write_json_with_checksum(grid / "strengths.json", {"choices": CHOICES})
    return grid


@pytest.mark.usefixtures("no_figures")
def test_a_report_lists_all_trials_and_a_report_made_from_it_has_the_same(folder, tmp_path):
    report_grid(read_grid(folder), tmp_path / "once")
    first_report = read_grid(tmp_path / "once")
    report_grid(first_report, tmp_path / "twice")
    table = pd.read_csv(tmp_path / "once" / "strengths.csv", keep_default_na=False)
    assert len(table) == 9
    second = table[(table.defence == MEDIAN) & (table.attack == FLIP)].iloc[1]
    columns = [f"{name}_seed_{s}" for name in ("accuracy", "attack_success_rate") for s in (7, 8)]
    assert second[["strength", "chosen"]].tolist() == ["z = 2.0", ""]
    assert second[["harm", *columns]].astype(float).tolist() == [0.4, 0.5, 0.7, 0.25, 0.5]
    assert table[table.chosen == "yes"].strength.tolist() == ["z = 2.0", "z = 8.0", "unchanged"]
    result = chosen_strengths_table(read_choices(first_report), "").to_csv()
    assert result == (tmp_path / "once" / "matrices" / "strengths.csv").read_text()
    for name in ("strengths.csv", "strengths.json", "matrices/strengths.md"):
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()


@pytest.mark.parametrize(
    "file", sorted(DOCS.glob("benchmark/*/strengths.json")), ids=lambda file: file.parent.name
)
def test_committed_choices_cover_the_strengths_of_the_grid(file):
    grid = tomllib.loads((file.parent / "grid.toml").read_text())
    strengths = {
        name: attack["strengths"]
        for name, attack in grid["attacks"].items()
        if "strengths" in attack
    }
    requests = {
        (choice_of_grid["defence"], choice_of_grid["attack"]): choice_of_grid["asked"]
        for choice_of_grid in read_json_with_checksum(file)["choices"]
    }
    assert requests == {
        (defence, attack): {"seeds": grid["adversary"]["seeds"], "strengths": values}
        for defence, (attack, values) in product(grid["defences"], strengths.items())
    }

"""Committed choices of attack strengths."""

import tomllib
from itertools import product
from pathlib import Path

import pytest
from tests.report.test_matrix import make_grid

from fedcb2o.records import read_json_with_checksum, write_json_with_checksum
from fedcb2o.report import report_grid
from fedcb2o.report.grid_results import read_grid

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.usefixtures("no_figures")
def test_a_report_keeps_the_choices(tmp_path):
    grid = make_grid(tmp_path / "grid")
    write_json_with_checksum(grid / "strengths.json", {"choices": [{"worst": 1}]})
    for folder, out in ((grid, "once"), (tmp_path / "once", "twice")):
        report_grid(read_grid(folder), tmp_path / out)
        content = read_json_with_checksum(tmp_path / out / "strengths.json")
        assert content == {"choices": [{"worst": 1}]}


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

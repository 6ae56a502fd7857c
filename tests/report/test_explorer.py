"""The results explorer: its data, its size, and the generated tables of the pages."""

import re
import tomllib
from urllib.parse import parse_qs

import numpy as np
import pytest
from paper import frontier, preregistered_2, results
from tests.report.test_matrix import FLIP, MEAN, MEDIAN, make_grid

from fedcb2o.experiments.grid import load_grid
from fedcb2o.report import SettingResults, explorer_page, read_grid
from fedcb2o.report._explorer import unpack

MAX_BYTES = 300_000
DATA = re.compile(r'(?<=id="data">)[^<]+')
LINK = re.compile(r"\]\(explorer\.html#([^)\s]+)\)")
PAGES = [results.PAGE, results.DOCS / "criteria.md"]


def cell(tables, values, measure, defence, column):
    """Return the values by seed of one cell of the first table."""
    table = tables[0]
    entry = next(candidate for candidate in table["measures"] if candidate["name"] == measure)
    position = table["defences"].index(defence) * len(table["columns"]) + table["columns"].index(
        column
    )
    start = entry["offset"] + position * len(table["seeds"])
    return entry["step"] * values[start : start + len(table["seeds"])].astype(float)


def test_a_page_has_the_value_of_every_seed_of_a_cell(tmp_path):
    page = explorer_page([read_grid(make_grid(tmp_path / "grid"))], "Hand")
    tables, values = unpack(page)
    assert tables[0]["seeds"] == [0, 1]
    assert tables[0]["counts"] == [2, 2]
    assert tables[0]["baselines"] == 2
    assert cell(tables, values, "accuracy", MEDIAN, FLIP) == pytest.approx([0.7, 0.8], abs=3e-4)
    rate = cell(tables, values, "attack_success_rate", MEAN, FLIP)
    assert rate == pytest.approx([0.8, 0.5], abs=3e-4)
    assert cell(tables, values, "seconds", MEAN, FLIP) == pytest.approx([2.1, 2.1], abs=1e-3)
    measures = {entry["name"]: entry for entry in tables[0]["measures"]}
    start = measures["attack_success_rate"]["offset"]
    missing = cell(tables, values, "attack_success_rate", MEDIAN, "Attackers clean")
    assert (np.round(missing / measures["attack_success_rate"]["step"]) == 65535).all()
    assert start > 0
    assert "://" not in page
    assert 'lang="en"' in page


@pytest.mark.slow
def test_the_published_explorer_equals_the_committed_values():
    page = results.make_explorer()
    published = results.EXPLORER.read_text(encoding="utf-8")
    assert len(published.encode()) < MAX_BYTES
    assert DATA.sub("", page) == DATA.sub("", published)
    tables, values = unpack(page)
    published_tables, published_values = unpack(published)
    assert tables == published_tables
    assert np.array_equal(values, published_values)


@pytest.mark.slow
@pytest.mark.parametrize("page", results.PAGES, ids=lambda page: page.name)
def test_the_published_tables_equal_the_committed_values(page):
    assert results.rewrite_page(page) == page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_numbers_in_sentences_equal_the_committed_values():
    table = results.regrets_table()
    settings = table[table.index.str.startswith("Settings: ")]
    ahead = settings[results.METHOD].astype(float) - settings["FedCBO"].astype(float)
    assert ((ahead > 0).sum(), len(ahead)) == (4, 9)
    assert ahead.max() < 1
    readme = " ".join(results.README.read_text(encoding="utf-8").split())
    answer = results._answer_table(results.grid_results(results.PREREGISTERED))
    verdicts = answer.iloc[:, -1]
    assert set(verdicts[["FLTrust", "FedCBO"]]) == {"undecided", "not worse"}
    second = preregistered_2.answer_table()
    assert list(second.index).index(results.METHOD) == 5
    assert len(second) == 11
    assert set(second["Verdict"]) == {"", "undecided"}
    assert "the present one, on natural owners, sixth of eleven (undecided)" in readme
    assert "in four of nine settings, by less than a point" in readme
    page = " ".join(results.PAGE.read_text(encoding="utf-8").split())
    assert "the smaller worst regret in four of nine settings, by less than a point" in page
    assert (verdicts == "better").sum() == 5
    assert "from every rival is significant with Letters, and from five of eight without" in page


@pytest.mark.slow
def test_training_alone_is_ahead_in_one_column_for_its_worst_agent():
    ahead = {}
    for name in (*results.MAIN_GRIDS, "settings"):
        grid = results.grid_results(name)
        alone = [defence for defence in grid.defences if defence.startswith("Local training")]
        for setting in grid.settings:
            rows = SettingResults(grid, setting).rows
            rows = rows[~rows.attack.isin(results.TRIGGERS)]
            means = rows.groupby(["defence", "attack"])[["accuracy", "accuracy_worst"]].mean()
            for defence in alone:
                loss = 100 * (means.loc[defence] - means.loc[results.METHOD]).stack()
                ahead |= {(name, *key): value for key, value in loss[loss > 0].items()}
    assert ahead == {("rivals", "Dissensus", "accuracy_worst"): pytest.approx(6, abs=0.5)}
    page = " ".join(results.PAGE.read_text(encoding="utf-8").split())
    assert (
        "in each column, registered tests aside. Its worst agent is ahead under dissensus" in page
    )
    assert "in `rivals` alone, by six points" in page


@pytest.mark.slow
@pytest.mark.parametrize("name", frontier.GRIDS)
def test_the_grid_of_variants_has_the_kept_grids_attacks_and_seeds(name):
    folder = frontier.BENCHMARK / "frontier" / name
    expected = frontier.variant_grid(name)
    assert tomllib.loads((folder / "grid.toml").read_text(encoding="utf-8")) == expected
    rows = read_grid(folder).rows
    runs = rows.groupby(["setting", "defence", "attack", "role"]).seed.nunique()
    assert set(runs) == {len(expected["seeds"])}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", results.GRIDS)
def test_a_committed_grid_can_be_run_again(name):
    folder = results.DOCS / "benchmark" / name
    grid = load_grid(str(folder / "grid.toml"))
    rows = read_grid(folder).rows
    assert grid.name == name
    assert set(rows.defence) == set(grid.defences)
    assert set(rows.attack) - {""} == set(grid.attacks)
    assert set(rows.seed) == set(grid.seeds)


def test_links_to_the_explorer_name_existing_rows():
    tables, _ = unpack(results.EXPLORER.read_text(encoding="utf-8"))
    tables_by_id = {table["id"]: table for table in tables}
    for page in PAGES:
        links = LINK.findall(page.read_text(encoding="utf-8"))
        assert links
        for link in links:
            state = {key: values[0] for key, values in parse_qs(link).items()}
            table = tables_by_id[state["grid"]]
            assert state.get("row", table["defences"][0]) in table["defences"], link
            measure = state.get("measure", "accuracy")
            assert measure in {entry["name"] for entry in table["measures"]}, link


def test_the_preregistered_test_comes_first(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        f"# Results\n\n<!-- begin: {results.PREREGISTERED} -->\n<!-- end -->\n\nText.\n"
    )
    grid = read_grid(make_grid(tmp_path / "grid"))
    monkeypatch.setattr(results, "GRIDS", (results.PREREGISTERED,))
    monkeypatch.setattr(results, "grid_results", lambda name: grid)
    text = results.rewrite_page(page)
    before, _, after = text.partition("## The pre-registered test\n\n")
    assert before.endswith("-->\n\n")
    assert after.endswith("|\n\n<!-- end -->\n\nText.\n")
    # Accuracy under noise: 50 and 70 of the median, 10 and 20 of the mean; a regret of 45 points.
    assert re.search(rf"^\| {MEAN} \| 45\.0 \| .*Noise, accuracy \|", after, re.MULTILINE)
    assert re.search(r"87\.5/60\.0", after)
    assert re.search(r"96\.0/15\.0", after)
    page.write_text(text)
    assert results.rewrite_page(page) == text


def test_variants_without_a_part_are_listed_with_the_method(tmp_path, monkeypatch):
    grid = read_grid(make_grid(tmp_path / "grid"))
    monkeypatch.setattr(results, "GRIDS", ("settings",))
    monkeypatch.setattr(results, "grid_results", lambda name: grid)
    monkeypatch.setattr(results, "METHOD", MEAN)
    table = results.parts_table()
    # The mean has a regret of 45 points under noise; this grid has no variants.
    assert table.to_numpy().tolist() == [["45.0", "–", "–", "–"]]

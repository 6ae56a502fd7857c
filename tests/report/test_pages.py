"""Tables that pages quote from grids are what the results that are kept beside them give."""

from pathlib import Path

import pandas as pd
import pytest
from paper.pages import FIGURE, TABLE, named_table, page_figures, rewrite_page, table_digest
from tests.report.test_matrix import FLIP, MEAN, MEDIAN, make_grid

from fedcb2o.errors import ConfigError
from fedcb2o.experiments.grid._loading import load_grid
from fedcb2o.report import read_grid, report_grid

pytestmark = pytest.mark.usefixtures("intervals_of_two_seeds")

DOCS = Path(__file__).parents[2] / "docs"
ALL = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]
PAGES = [page for page in ALL if TABLE.search(page.read_text())]
DRAWN = [page for page in ALL if FIGURE.search(page.read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_published_tables_are_recomputed_from_the_values_that_are_kept(page):
    assert rewrite_page(page) == page.read_text()


@pytest.mark.parametrize("page", DRAWN, ids=lambda page: page.name)
def test_published_pictures_are_drawn_of_the_values_that_are_kept(page):
    found = list(page_figures(page))
    assert len(found) == page.read_text().count("figures/benchmark-")
    for picture in found:
        assert table_digest(picture.file) == picture.digest(), picture.file


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* is now called:DeprecationWarning")
@pytest.mark.parametrize(
    "file", sorted(DOCS.glob("benchmark/*/grid.toml")), ids=lambda file: file.parent.name
)
def test_a_grid_that_is_kept_can_be_run_again(file):
    grid, rows = load_grid(str(file)), read_grid(file.parent).rows
    assert grid.name == file.parent.name
    assert set(rows.defence) == set(grid.defences)
    assert set(rows.attack) - {""} == set(grid.attacks)
    assert set(rows.seed) == set(grid.seeds)


def test_a_table_is_written_below_its_comment_once(tmp_path):
    report_grid(read_grid(make_grid(tmp_path / "grid")), tmp_path / "report")
    page = tmp_path / "page.md"
    page.write_text("Before\n\n<!-- table: report accuracy -->\n\nAfter\n")
    for _ in range(2):
        page.write_text(rewrite_page(page))
    lines = page.read_text().splitlines()
    assert lines[4].startswith("| Defence | Attackers clean |")
    assert lines[6].startswith(f"| {MEDIAN} | 87.5 [55.7, 119.3] |")
    assert lines[8:] == ["", "After"]


@pytest.mark.slow
def test_every_table_of_a_report_has_its_name(tmp_path):
    results = read_grid(make_grid(tmp_path / "grid"))
    report_grid(results, tmp_path / "report")
    for path in (tmp_path / "report" / "matrices").rglob("*.csv"):
        found = named_table(
            results, str(path.relative_to(tmp_path / "report" / "matrices").with_suffix(""))
        )
        assert found.to_csv() == path.read_text(), path


def test_a_picture_is_drawn_anew_when_its_values_have_changed(tmp_path):
    report_grid(read_grid(make_grid(tmp_path / "grid")), tmp_path / "report")
    page, picture = tmp_path / "page.md", tmp_path / "picture.png"
    page.write_text(
        "Before\n\n<!-- picture: report accuracy-regret -->\n\n![Accuracy,\nbehind](picture.png)\n"
    )
    found = next(page_figures(page))
    assert table_digest(picture) == ""
    found.draw()
    first = picture.read_bytes()
    assert table_digest(picture) == found.digest()
    found.draw()
    assert picture.read_bytes() == first
    rows = (tmp_path / "report" / "summary.csv").read_text()
    (tmp_path / "report" / "summary.csv").write_text(rows.replace(",0.7,", ",0.3,"))
    changed = next(page_figures(page))
    assert table_digest(picture) != changed.digest()
    changed.draw()
    assert table_digest(picture) == changed.digest()
    assert picture.read_bytes() != first


def test_settings_stand_side_by_side_and_what_there_is_not_is_told(tmp_path):
    results = read_grid(make_grid(tmp_path / "grid"))
    results.table["settings"] = {"Few": {}, "Many": {}}
    results.rows["setting"] = "Few"
    many = results.rows.assign(setting="Many", accuracy=results.rows.accuracy / 2)
    both = type(results)(results.folder, results.table, {}, pd.concat([results.rows, many]))
    table = named_table(both, "across/accuracy/label-flip")
    assert table.loc[MEDIAN].tolist() == ["75.0 [11.5, 138.5]", "37.5 [5.7, 69.3]"]
    assert named_table(both, "many/accuracy").loc[MEAN, FLIP] == "37.5 [-57.8, 132.8]"
    with pytest.raises(ConfigError, match="has no table none/accuracy"):
        named_table(both, "none/accuracy")

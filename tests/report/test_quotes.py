"""Intervals in the sentences of pages are what the values that are kept beside them give."""

import pandas as pd
import pytest
from benchmarks import quotes
from scipy import stats
from tests.report.test_matrix import FLIP, MEAN, MEDIAN, NOISE, make_grid

from fedcb2o.errors import ConfigError
from fedcb2o.report import read_grid, report_grid

CELL = f"grid | {MEDIAN} | accuracy | {FLIP}"


@pytest.fixture(scope="module")
def docs(tmp_path_factory):
    """A folder of docs with a grid of two seeds by hand, and a folder of claims."""
    docs = tmp_path_factory.mktemp("docs")
    report_grid(read_grid(make_grid(docs / "made")), docs / "grid")
    (docs / "claims").mkdir()
    lines = [
        "method,seed,accuracy",
        "fedcbo,0,10.0",
        "fedcbo,1,30.0",
        "fedcb2o,0,40.0",
        "fedcb2o,1,40.0",
        "fedcb2o,2,9.0",
    ]
    (docs / "claims" / "values.csv").write_text("\n".join(lines) + "\n")
    return docs


def test_the_pages_quote_what_comes_out():
    assert list(quotes.faults(quotes.DOCS)) == []


def test_a_value_is_of_its_cell_and_a_difference_is_paired_by_seed(docs):
    rows = read_grid(docs / "grid").rows
    of = {who: rows[(rows.defence == who) & (rows.attack == FLIP)].set_index("seed").accuracy for who in (MEDIAN, MEAN)}
    mean, half = 100 * of[MEDIAN].mean(), 100 * stats.t.ppf(0.975, 1) * of[MEDIAN].std(ddof=1) / 2**0.5
    assert quotes.recomputed(docs, CELL, "", "") == f"{mean:.1f} [{mean - half:.1f}, {mean + half:.1f}]"
    less = 100 * (of[MEDIAN] - of[MEAN])
    half = stats.t.ppf(0.975, 1) * less.std(ddof=1) / 2**0.5
    told = quotes.recomputed(docs, CELL, CELL.replace(MEDIAN, MEAN), "", decimals=2)
    assert told == f"{less.mean():.2f} [{less.mean() - half:.2f}, {less.mean() + half:.2f}]"
    both, *each = (quotes.term(docs, f"grid | {MEDIAN} | accuracy | {column}")[0] for column in ("mean", FLIP, NOISE))
    pd.testing.assert_series_equal(both, sum(each) / 2, check_names=False)


def test_regret_is_that_of_the_report(docs):
    report = pd.read_csv(docs / "grid" / "matrices" / "accuracy-regret.csv", index_col=0)
    for who in (MEDIAN, MEAN):
        for attack in (FLIP, NOISE):
            if (cell := report.loc[who, attack]) != "best":
                assert quotes.recomputed(docs, f"grid | {who} | accuracy regret | {attack}", "", "") == cell
    worst = pd.read_csv(docs / "grid" / "matrices" / "regret.csv", index_col=0)
    for who in (MEDIAN, MEAN):
        told = quotes.recomputed(docs, f"grid | {who} | regret | Accuracy, worst", "", "")
        assert worst.loc[who, "Accuracy, worst"].startswith(f"{told} (")


def test_methods_of_claims_are_paired_over_the_seeds_that_are_named(docs):
    of, less = (f"claims | {method} | accuracy | last" for method in ("fedcb2o", "fedcbo"))
    assert quotes.recomputed(docs, of, less, "") == "20.0 [-107.1, 147.1]"  # 30 and 10; t is 12.7 with one degree
    assert quotes.recomputed(docs, of, "", "0-1") == "40.0 [40.0, 40.0]"


def test_what_is_not_kept_is_an_error_that_names_it(docs):
    for of in (CELL.replace(MEDIAN, "Medain"), CELL.replace("accuracy", "acuracy"), "none | a | b | c", "grid | a"):
        with pytest.raises(ConfigError, match=r"is nothing that is kept|has no value"):
            quotes.recomputed(docs, of, "", "")


def test_faults_are_what_is_not_listed_or_not_quoted_or_differs(tmp_path, docs, monkeypatch):
    monkeypatch.setattr(quotes, "PAGES", ("page.md",))
    told = quotes.recomputed(docs, CELL, "", "")
    sentence = f"It has {told.replace(' [', '% [')}, the other\n-3.0 [-4.0,\n-2.0], and 7.0 [6.0, 8.0].\n"
    (docs / "page.md").write_text(sentence + "\n| 1.0 [0.0, 2.0] |\n")
    lines = [("page.md", told, CELL, "", "", ""), ("page.md", "7.0 [6.0, 8.0]", "", "", "", "")]
    lines += [("page.md", "-3.0 [-4.0, -2.0]", CELL, "", "", ""), ("page.md", "5.0 [4.0, 6.0]", "", "", "", "not kept")]
    columns = ["page", "quote", "of", "less", "seeds", "note"]
    pd.DataFrame(lines, columns=columns).to_csv(docs / "quotes.csv", index=False)
    found = list(quotes.faults(docs))
    assert found == [
        "page.md: 7.0 [6.0, 8.0] has nothing to compute it of, and no note why",
        f"page.md: -3.0 [-4.0, -2.0] is {told}: {CELL}",
        "page.md: 5.0 [4.0, 6.0] is listed, and not quoted",
    ]
    pd.DataFrame(lines[:2], columns=columns).assign(note="told").to_csv(docs / "quotes.csv", index=False)
    assert list(quotes.faults(docs)) == ["page.md: -3.0 [-4.0, -2.0] is not listed"]

"""Intervals in the sentences of pages are what the values that are kept beside them give."""

import pandas as pd
import pytest
from paper import quotes
from scipy import stats
from tests.report.test_matrix import FLIP, MEAN, MEDIAN, NOISE, make_grid

from fedcb2o.errors import ConfigError
from fedcb2o.report import read_grid, report_grid

pytestmark = pytest.mark.usefixtures("intervals_of_two_seeds")

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
    lines = [
        "method,seed,round,accuracy",
        *(f"fedcbo,{seed},{n},{n + seed}" for seed in (0, 1) for n in (5, 10, 15, 20)),
    ]
    (docs / "claims" / "curves.csv").write_text("\n".join(lines) + "\n")
    return docs


def told(values, scale=100, decimals=1):
    mean, half = (
        values.mean(),
        stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5,
    )
    mean, low, high = (f"{scale * end:.{decimals}f}" for end in (mean, mean - half, mean + half))
    return f"{mean} [{low}, {high}]"


@pytest.mark.slow
def test_the_pages_quote_what_comes_out():
    assert list(quotes.faults(quotes.DOCS)) == []


def test_a_value_is_of_its_cell_and_a_difference_is_paired_by_seed(docs):
    rows = read_grid(docs / "grid").rows
    of = {
        who: rows[(rows.defence == who) & (rows.attack == FLIP)].set_index("seed")
        for who in (MEDIAN, MEAN)
    }
    assert quotes.recompute(docs, CELL) == told(of[MEDIAN].accuracy)
    less = of[MEDIAN].accuracy - of[MEAN].accuracy
    assert quotes.recompute(docs, CELL, CELL.replace(MEDIAN, MEAN), decimals=2) == told(
        less, decimals=2
    )
    megabytes = quotes.recompute(docs, CELL.replace("accuracy", "megabytes"), decimals=4)
    assert megabytes == told(of[MEDIAN].megabytes, scale=1, decimals=4)


def test_the_mean_over_attacks_is_of_seeds_that_have_them_all(docs, tmp_path):
    both, *each = (
        quotes.read_term(docs, f"grid | {MEDIAN} | accuracy | {column}")[0]
        for column in ("mean", FLIP, NOISE)
    )
    pd.testing.assert_series_equal(both, sum(each) / 2, check_names=False)
    (tmp_path / "grid").mkdir()
    (tmp_path / "grid" / "grid.toml").write_bytes((docs / "grid" / "grid.toml").read_bytes())
    rows = pd.read_csv(docs / "grid" / "summary.csv", dtype=str, keep_default_na=False)
    lost = (rows.defence == MEDIAN) & (rows.attack == NOISE) & (rows.seed == "1")
    rows[~lost].to_csv(tmp_path / "grid" / "summary.csv", index=False)
    assert list(quotes.read_term(tmp_path, f"grid | {MEDIAN} | accuracy | mean")[0].index) == [0]


def test_regret_is_that_of_the_report(docs):
    report = pd.read_csv(docs / "grid" / "matrices" / "accuracy-regret.csv", index_col=0)
    worst = pd.read_csv(docs / "grid" / "matrices" / "regret.csv", index_col=0)
    for who in (MEDIAN, MEAN):
        for attack in (FLIP, NOISE):
            if (cell := report.loc[who, attack]) != "best":
                assert quotes.recompute(docs, f"grid | {who} | accuracy regret | {attack}") == cell
        contest = quotes.recompute(docs, f"grid | {who} | regret | Accuracy, worst")
        assert worst.loc[who, "Accuracy, worst"].startswith(f"{contest} (")


def test_methods_of_claims_are_paired_over_the_seeds_that_both_have(docs):
    of, less = (f"claims | {method} | accuracy | last" for method in ("fedcb2o", "fedcbo"))
    assert (
        quotes.recompute(docs, of, less) == "20.0 [-107.1, 147.1]"
    )  # 30 and 10; t is 12.7 with one degree
    assert [
        quotes.read_term(docs, less.replace("last", when))[0].tolist() for when in ("later", "all")
    ] == [
        [17.5, 18.5],
        [12.5, 13.5],
    ]


def test_that_0_lies_in_an_interval_is_seen(docs):
    lines = [
        "method,seed,accuracy",
        *(f"fedcbo,{seed},{value}" for seed, value in enumerate((0.01, 0.0, 0.02))),
    ]
    (docs / "near").mkdir()
    (docs / "near" / "values.csv").write_text("\n".join(lines) + "\n")
    assert quotes.recompute(docs, "near | fedcbo | accuracy | last") == "0.01 [-0.01, 0.03]"


def test_what_is_not_kept_is_an_error_that_names_it(docs):
    wrong = [
        CELL.replace(MEDIAN, "Medain"),
        CELL.replace("accuracy", "acuracy"),
        "none | a | b | c",
        "grid | a",
    ]
    wrong += [
        CELL.replace("grid", "grid | 3 of 10 | twice"),
        "claims | Few | fedcbo | accuracy | last",
    ]
    for of in (*wrong, "claims | fedcbo | accuracy | first"):
        with pytest.raises(ConfigError, match=r"has no value"):
            quotes.recompute(docs, of)
    with pytest.raises(ConfigError, match="have different units"):
        quotes.recompute(docs, CELL, CELL.replace("accuracy", "megabytes"))


def listed_faults(docs, monkeypatch, page, *lines):
    monkeypatch.setattr(quotes, "PAGES", ("page.md",))
    (docs / "page.md").write_text(page)
    rows = [("page.md", *line) if len(line) == 4 else line for line in lines]
    pd.DataFrame(rows, columns=["page", "quote", "of", "less", "note"]).to_csv(
        docs / "quotes.csv", index=False
    )
    return [fault.removeprefix("page.md: ") for fault in quotes.faults(docs)]


def test_faults_are_what_is_not_listed_or_not_quoted_or_differs(docs, monkeypatch):
    right = quotes.recompute(docs, CELL)
    page = (
        f"It has {right.replace(' [', '% [')}, the other\n-3.0 [-4.0,\n-2.0], and 7.0 [6.0, 8.0].\n"
    )
    lines = [
        (right, CELL, "", ""),
        ("7.0 [6.0, 8.0]", "", "", ""),
        ("-3.0 [-4.0, -2.0]", CELL, "", ""),
    ]
    assert listed_faults(
        docs, monkeypatch, page, *lines, ("5.0 [4.0, 6.0]", "", "", "not kept")
    ) == [
        f"-3.0 [-4.0, -2.0] is {right}: {CELL}",
        "7.0 [6.0, 8.0] has no term, and no note with the reason",
        "5.0 [4.0, 6.0] is listed, and not quoted, or not so often",
    ]
    lines = [(right, CELL, "", ""), ("7.0 [6.0, 8.0]", "", "", "not kept")]
    assert listed_faults(docs, monkeypatch, page, *lines) == [
        "-3.0 [-4.0, -2.0] is not listed, or not so often"
    ]
    elsewhere = ("other.md", right, CELL, "", "")
    assert listed_faults(docs, monkeypatch, "", elsewhere) == [
        "other.md: none of its quotes are checked"
    ]


def test_of_equal_quotes_each_has_its_line(docs, monkeypatch):
    right = quotes.recompute(docs, CELL)
    line, other = (right, CELL, "", ""), (right, CELL.replace(MEDIAN, MEAN), "", "")
    assert listed_faults(docs, monkeypatch, f"{right} and {right}", line) == [
        f"{right} is not listed, or not so often"
    ]
    assert listed_faults(docs, monkeypatch, f"{right} and {right}", line, line) == []
    (fault,) = listed_faults(docs, monkeypatch, f"{right} and {right}", line, other)
    assert fault.startswith(f"{right} is ")
    assert fault.endswith(other[1])


def test_code_and_tables_that_are_held_are_left_out_and_what_may_be_an_interval_is_not(
    docs, monkeypatch
):
    table = "| 1.0 [0.0, 2.0] |\n| --- |\n"
    page = f"`values = [0.0, 1.0]`, version 1.2.3 [0.0, 1.0]\n\n```\n4.0 [3.0, 5.0]\n```\n\n<!-- held -->\n\n{table}"
    assert listed_faults(docs, monkeypatch, page) == [
        "[0.0, 1.0] may be an interval; write it as 1.0 [0.0, 2.0]"
    ]
    assert listed_faults(docs, monkeypatch, table) == [
        "1.0 [0.0, 2.0] is not listed, or not so often"
    ]
    for written in (
        "3.6 points [3.1, 4.2]",
        "3.6% [3.1%, 4.2%]",
        "3.6 [3.1,4.2]",
        "**3.6** [3.1, 4.2]",
        "+3.6 [+3.1, +4.2]",
    ):
        assert "may be an interval" in "".join(listed_faults(docs, monkeypatch, written)), written


def test_what_is_told_alone_and_not_among_all_that_are_quoted_has_a_degree_sign(
    docs, monkeypatch, tmp_path
):
    (tmp_path / "grid").mkdir()
    (tmp_path / "grid" / "grid.toml").write_bytes((docs / "grid" / "grid.toml").read_bytes())
    rows = pd.read_csv(docs / "grid" / "summary.csv", keep_default_na=False)
    rows.loc[(rows.attack == NOISE) & (rows.defence == MEDIAN), "accuracy"] = [
        0.5,
        0.61,
    ]  # 0.4 and 0.41 more: p 0.008
    rows.loc[(rows.attack == FLIP) & (rows.defence == MEDIAN), "accuracy"] = [
        0.7,
        1.012,
    ]  # 0.1 and 0.112 more: p 0.036
    rows.to_csv(tmp_path / "grid" / "summary.csv", index=False)
    terms = (CELL.replace(FLIP, NOISE), CELL, CELL.replace("accuracy", "attack_success_rate"))
    lines = [
        (
            quotes.recompute(tmp_path, of, of.replace(MEDIAN, MEAN)),
            of,
            of.replace(MEDIAN, MEAN),
            "",
        )
        for of in terms
    ]
    (clear, open_, untold), page = (line[0] for line in lines), tmp_path / "page.md"
    assert (
        listed_faults(tmp_path, monkeypatch, f"{clear}, {open_}", *lines[:2]) == []
    )  # Holm: 0.016 and 0.036
    _, less, of, _ = lines[1]
    twice = (
        quotes.recompute(tmp_path, of, less),
        of,
        less,
        "",
    )  # the other way round it is the same difference
    assert (
        listed_faults(tmp_path, monkeypatch, f"{clear}, {open_}, {twice[0]}", *lines[:2], twice)
        == []
    )
    assert listed_faults(tmp_path, monkeypatch, f"{clear}, {open_}, {untold}\n", *lines) == [
        f"{open_} lacks °: it is significant without correction only"  # 0.024 and 0.072 of three
    ]
    assert listed_faults(tmp_path, monkeypatch, f"{clear}°, {open_}°, {untold}", *lines) == [
        f"{clear} has °, and is significant after correction or not at all"
    ]
    alone = quotes.uncorrected_only(tmp_path)
    assert quotes.rewrite_marks(tmp_path, page, alone) == f"{clear}, {open_}°, {untold}"
    page.write_text(f"`{open_}` {clear}, {untold}\n\n```\n{open_}\n```\n\n- {open_}")
    assert quotes.rewrite_marks(tmp_path, page, alone) == page.read_text() + "°"

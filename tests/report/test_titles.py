"""Titles from users: one line, file names of a valid length, short labels."""

import numpy as np
import pandas as pd
import pytest

from fedcb2o.records import one_line, slug
from fedcb2o.report import to_latex, to_rich
from fedcb2o.safe_stdio import encodable


def test_long_titles_have_short_and_different_file_names():
    first = slug("Long title " * 40 + "A")
    second = slug("Long title " * 40 + "B")
    assert len(first) == len(second) == 200
    assert first != second
    assert slug("Long title " * 40 + "A") == first
    assert slug("a/../b \U0001f600") == "a-b"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("two\nlines\tand  more ", "two lines and more"),
        ("\x1b[31mred\x00", "[31mred"),
        ("caf\u00e9 \U0001f600", "caf\u00e9 \U0001f600"),
        ("broken \udce9", "broken "),
        ("\n", ""),
    ],
)
def test_a_title_becomes_one_line(text, line):
    assert one_line(text) == line


def test_a_table_for_the_terminal_keeps_the_ends_of_long_labels():
    index = ["short", "x" * 60, "y" * 150 + " A"]
    table = to_rich(pd.DataFrame({"Accuracy": ["15.3", "20.4", "1.0"]}, index=index), width=80)
    *whole, cut = map(str, table.columns[0].cells)
    assert whole == index[:2]
    assert len(cut) == 60
    assert cut.startswith("y" * 40)
    assert cut.endswith("y A")


def test_latex_escapes_every_special_character():
    table = pd.DataFrame({"a~b^c": ["1"]}, index=["x"])
    assert r"a\textasciitilde b\textasciicircum c" in to_latex(table)


@pytest.mark.parametrize(
    ("text", "encoding", "expected"),
    [
        ("±1", "ascii", "\\u00b11"),
        ("\u0151 \U0001f600", "latin-1", "\\u0151 \\U0001f600"),
        ("caf\udce9", "utf-8", "caf\\udce9"),
        ("\u0151", "utf-8", "\u0151"),
    ],
)
def test_characters_that_an_encoding_lacks_are_escaped(text, encoding, expected):
    assert encodable(text, encoding) == expected


def test_escaping_handles_many_different_characters():
    text = "".join(map(chr, np.arange(0x4E00, 0x4E00 + 5000).tolist()))
    assert len(encodable(text, "ascii")) == 6 * 5000

"""Titles from users: one line, file names of a valid length, short labels."""

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from fedcb2o.records import one_line, slug
from fedcb2o.report import to_latex, to_rich
from fedcb2o.report._table_formats import shorten_label
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


def test_a_long_label_keeps_its_beginning_and_its_end():
    label = shorten_label("x" * 150 + " A")
    assert len(label) == 60
    assert label.startswith("x" * 40)
    assert label.endswith("x A")
    assert shorten_label("x" * 60) == "x" * 60


def test_a_table_for_the_terminal_shows_short_titles_next_to_a_long_one():
    table = pd.DataFrame({"Accuracy": ["15.3", "20.4"]}, index=["short", "y" * 300])
    console = Console(width=80)
    with console.capture() as capture:
        console.print(to_rich(table, width=80))
    text = capture.get()
    assert "short" in text
    assert "20.4" in text
    assert len(text) < 2000


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

"""Tests of the examples in docstrings."""

import doctest
import importlib
import linecache
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PROMPT = re.compile(r"^\s*>>> ", re.MULTILINE)
PATHS = sorted(path for path in SOURCE.rglob("*.py") if PROMPT.search(path.read_text("utf-8")))
MODULES = [".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in PATHS]


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_the_shown_output(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name.removesuffix(".__init__"))
    linecache.clearcache()  # doctest checks every cached file once per docstring
    results = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert results.attempted
    assert not results.failed

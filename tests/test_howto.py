"""Tests of the how-to pages: their code runs where the packages that it imports are installed."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests import test_docs

PAGES = sorted((Path(__file__).parents[1] / "docs" / "howto").glob("*.md"))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:lightning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_how_to_runs(page, tmp_path, monkeypatch, capsys):
    code = "".join(block for _, block in test_docs.blocks(page, "python"))
    for package in re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    test_docs.test_python_runs(page, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_how_to_is_short(page):
    _, block = next(test_docs.blocks(page, "python"))
    assert len(block.splitlines()) <= 40

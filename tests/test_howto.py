"""Tests of how-to pages and the tutorial on own data: their code runs, from files and in Python."""

import importlib.util
import re
from pathlib import Path

import pandas as pd
import pytest
import tomli_w

import fedcb2o
from tests import test_docs
from tests.tiny import run_cli

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted((DOCS / "howto").glob("*.md"))
TUTORIALS = DOCS / "tutorials"
SHORTER = {"patients": {"seeds=[0, 1, 2]": "seeds=[0]", "rounds=10": "rounds=2"}}
CELL = re.compile(r"^```\{code-cell\}\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:lightning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_how_to_page_runs(page, tmp_path):
    code = "".join(block for _, block in test_docs.blocks(page, "python"))
    for package in re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    test_docs.run_page(page, tmp_path, SHORTER.get(page.stem, {}))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_how_to_page_is_short(page):
    _, block = next(test_docs.blocks(page, "python"))
    assert len(block.splitlines()) <= 40


def test_the_tutorial_has_the_same_numbers_from_toml_and_python(tmp_path, monkeypatch):
    page = TUTORIALS / "data.md"
    cells = CELL.findall(page.read_text(encoding="utf-8"))
    parts = next(cell for cell in cells if "def wine(" in cell)
    python = next(cell for cell in cells if "settings = {" in cell)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(parts + python.replace("[0, 1, 2]", "[0]").replace('"rounds": 10', '"rounds": 2'), names)
    assert names["settings"]["seeds"] == [0]

    (tmp_path / "mine.py").write_text(parts)
    named = {"data": {"name": "mine:wine"}, "model": {"name": "mine:small", "hidden": 16}}
    (tmp_path / "wine.toml").write_text(tomli_w.dumps({**names["settings"], **named}))
    assert run_cli("run", "wine.toml", "--quiet", "--out", "toml").status == 0
    columns = ["round", "agent", "accuracy", "train_loss", "validation_loss"]
    expected = fedcb2o.Run("toml").records[columns]
    pd.testing.assert_frame_equal(names["run"].records[columns], expected, check_exact=True)
    assert len(names["run"].records) == 2 * 7
    assert "algorithm" not in names["settings"]
    assert fedcb2o.Run("toml").config["algorithm"]["name"] == "fedassay"


@pytest.mark.slow
def test_the_tutorial_on_language_models_runs(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    page = TUTORIALS / "language-model.md"
    code = "".join(CELL.findall(page.read_text(encoding="utf-8")))
    assert '"rounds": 8' in code
    code = code.replace('"rounds": 8', '"rounds": 1')
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(code, names)
    assert {"attack_success_rate", "test_loss"} <= set(names["run"].records)
    texts = names["run"].texts(0)
    assert list(texts.columns) == ["prompt", "attacked", "expected", "base", "model"]
    assert set(texts.expected[~texts.attacked]) <= {" networkx", " numpy"}
    (_, toml), *_ = test_docs.blocks(page, "toml")
    (tmp_path / "three.toml").write_text(toml)
    assert fedcb2o.load(tmp_path / "three.toml").agents.num_agents == 3

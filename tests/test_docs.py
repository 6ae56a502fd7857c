"""Tests of the documentation: Python code, TOML, links and the table of equations.

A function has its labels in its own docstring. If the table names a module, its docstring counts.
A block after the comment `<!-- no test: reason -->` is not tested.
"""

import ast
import dataclasses
import functools
import importlib
import platform
import re
import runpy
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.tiny import cells_in_this_process, set_processors

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EQUATIONS = ROOT / "docs" / "equations.md"
BLOCK = re.compile(
    r"(?P<skip><!-- no test: [^>]+ -->\s*\n)?"
    r"^(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


MAX_WORDS = 45_000
GENERATED = re.compile(
    r"<!-- generated: \w+ -->\n\n(?:\|[^\n]*\n)+"
    r"|<!-- begin: \w+ -->.*?<!-- end -->"
    r"|<!-- (\w+) -->.*?<!-- /\1 -->",
    re.DOTALL,
)
"""Tables that a program writes into a page."""

LONG = ("README.md", "particles.md", "when-to-use-cb2o.md")
"""Pages whose code takes more than a few seconds; continuous integration runs it."""


def blocks(page: Path, language: str) -> Iterator[tuple[int, str]]:
    """Yield the tested blocks of a page with their first line, counted from 0."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    for match in BLOCK.finditer(text):
        if match["language"] == language and not match["skip"]:
            yield text.count("\n", 0, match.start("text")), textwrap.dedent(match["text"])


def rows() -> list[tuple[str, str]]:
    """Return (equation, function) of each row of the table of equations."""
    text = EQUATIONS.read_text(encoding="utf-8") if EQUATIONS.exists() else ""
    cells = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in text.splitlines()
        if line[:1] == "|"
    ]
    return [
        (row[0], " ".join(row[2:]))
        for row in cells
        if row[0] != "equation" and set(row[0]) - set("-: ")
    ]


def test_the_documentation_exists():
    assert (ROOT / "README.md").exists()
    assert rows(), "docs/equations.md has no row"


def test_the_pages_are_short():
    """Words between blanks, as `wc -w` counts, without generated tables and lists of names."""
    pages = set((ROOT / "docs").rglob("*.md")) - set((ROOT / "docs" / "reference").glob("*.md"))
    words = {page: len(GENERATED.sub("", page.read_text("utf-8")).split()) for page in pages}
    assert sum(words.values()) <= MAX_WORDS, f"{sum(words.values()) - MAX_WORDS} words too many"
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 700


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_a_block_runs_twice(page):
    """Every run with a folder of its own is resumed or overwritten, so that a cell can run again."""
    cells = re.findall(
        r"^```(?:python|\{code-cell\})\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S
    )
    cells = [re.sub(r"^[!%:][^\n]*$|\A---.*?^---$", "", cell, flags=re.M | re.S) for cell in cells]
    for cell in cells:
        for call in filter(lambda node: isinstance(node, ast.Call), ast.walk(ast.parse(cell))):
            words = {keyword.arg for keyword in call.keywords}
            if ast.unparse(call.func) in ("fedcb2o.run", "fedcb2o.bench") and (
                call.args or "out" in words
            ):
                assert words & {"resume", "overwrite"}, ast.unparse(call)


def run_page(page: Path, folder: Path, changes: Mapping[str, str]) -> None:
    """Run the Python code of a page in a folder, with changed pieces of its text."""
    lines: list[str] = []
    for start, block in blocks(page, "python"):
        # so that a traceback has the line numbers of the page
        lines += [""] * (start - len(lines)) + block.splitlines()
    text = "\n".join(lines) + "\n"
    for piece, other in changes.items():
        assert piece in text
        text = text.replace(piece, other)
    script = folder / f"{page.stem}.py"
    script.write_text(text, encoding="utf-8")
    # One process, because each further one would import PyTorch.
    with cells_in_this_process(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        set_processors(patch, 1)
        runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page.name in LONG else ())
        for page in PAGES
        if any(blocks(page, "python"))
    ],
    ids=lambda page: page.name,
)
def test_python_runs(page, tmp_path, capsys):
    run_page(page, tmp_path, {})
    output = capsys.readouterr().out
    # Rounding, and with it the digits of results, differs on other processors.
    if page.name == "README.md" and platform.machine() == "x86_64":
        _, printed_on_page = next(blocks(page, "text"))
        assert output.startswith(printed_on_page)
    if page.name == "particles.md" and platform.machine() == "x86_64":
        _, printed_on_page = next(blocks(page, "text"))
        expected = printed_on_page.splitlines()
        printed = output.splitlines()[: len(expected)]
        # The spread is accumulated rounding error, which differs between processors of one kind.
        measured = ("spread:", "seconds:")
        assert [line.split()[0] for line in printed] == [line.split()[0] for line in expected]
        for line, words in zip(printed, expected, strict=True):
            assert line == words or line.split()[0] in measured


def test_the_code_of_the_readme_runs_with_two_rounds(tmp_path):
    changes = {"equal = {": 'equal = {"rounds": 2, ', "round == 25": "round == 2"}
    run_page(ROOT / "README.md", tmp_path, changes)


@pytest.mark.parametrize(
    ("page", "block"),
    [pytest.param(p, b, id=f"{p.name}:{start}") for p in PAGES for start, b in blocks(p, "toml")],
)
def test_toml_is_valid(page, block):
    table = tomllib.loads(block)
    if {"attacks", "defences"} <= table.keys():
        importlib.import_module("fedcb2o.experiments.grid._loading").load_grid(
            {"name": "documented", **table}
        )
    elif (
        "extends" in table or {"data", "agents", "algorithm"} <= table.keys()
    ):  # an experiment, not an excerpt
        config = importlib.import_module("fedcb2o.experiments.config")
        config.load({"name": "documented", **table})


def test_the_full_configuration_equals_the_preset_of_the_paper():
    _, block = next(blocks(ROOT / "docs" / "configuration.md", "toml"))
    config = importlib.import_module("fedcb2o.experiments.config")
    documented, preset = config.load(tomllib.loads(block)), config.load("emnist-fedcb2o-paper")
    assert documented.fingerprint(0) == preset.fingerprint(0)
    assert (documented.seeds, documented.rounds) == (preset.seeds, preset.rounds)


def test_the_recommended_method_equals_the_one_on_the_page():
    tables = [
        tomllib.loads(block) for _, block in blocks(ROOT / "docs" / "configuration.md", "toml")
    ]
    candidates = (t for t in tables if "loss_tolerance" in t.get("algorithm", {}).get("guards", {}))
    config = importlib.import_module("fedcb2o.experiments.config")
    documented = config.load(
        {"name": "shown", **next(t for t in candidates if t["algorithm"]["name"] == "fedcb2o")}
    )
    preset = config.load("digits-fedassay")
    assert documented.agents == preset.agents
    built = preset.algorithm.build()
    # The mixing factor replaces lambda1.
    assert str(dataclasses.replace(documented.algorithm.build(), lambda1=built.lambda1)) == str(
        built
    )


def labels(text: str | None) -> list[str]:
    """Return the paper's labels in a text; eq:beta is not in eq:beta_QQLP."""
    return re.findall(r"\b(?:alg|eq|fig|lem|prop|rem|sec|tab|thm)(?::\w+)+", text or "")


def missing(equation: str, module: str, name: str) -> list[str]:
    """Return the labels that the docstring of `module:name`, or of `module`, lacks."""
    target: object = importlib.import_module(module)
    if name:
        target = functools.reduce(getattr, name.split("."), target)
    return [label for label in labels(equation) if label not in labels(target.__doc__)]


def test_functions_of_the_way_to_theta_exist():
    """The table of docs/architecture.md names a file, or its end, and what is in it."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    table = text.split("From the command line to theta")[1].split("**Agent group**")[0]
    files = [path.as_posix() for path in (ROOT / "src" / "fedcb2o").rglob("*.py")]
    named = re.findall(r"`([\w/]+\.py): ([\w.]+)`", table)
    assert len(named) > 20
    for end, name in named:
        sources = [Path(path).read_text("utf-8") for path in files if path.endswith(f"/{end}")]
        pattern = rf"(def|class) {name.split('.')[-1]}\b"
        assert any(re.search(pattern, source) for source in sources), f"{end}: {name}"


def test_labels_are_complete_and_in_the_docstring_of_the_function():
    assert labels("prop:QQLP, eq:lem:laplace_LG: the bound") == ["prop:QQLP", "eq:lem:laplace_LG"]
    assert labels("(eq:beta_QQLP), eq:alpha.") == ["eq:beta_QQLP", "eq:alpha"]
    assert missing("eq:beta, eq:alpha", "fedcb2o.particles.theory", "beta_0") == ["eq:alpha"]
    assert missing("eq:beta_QQLP", "fedcb2o.particles.bounds", "LaplaceBound") == []
    assert missing("eq:lem:other", "fedcb2o.particles.bounds", "LaplaceBound") == ["eq:lem:other"]
    # The docstring of the module has thm:main, the docstring of the function does not.
    assert missing("thm:main", "fedcb2o.particles.theory", "") == []
    assert missing("thm:main", "fedcb2o.particles.theory", "fit_decay_rate") == ["thm:main"]
    assert missing("eq:dyn_macro", "fedcb2o.particles.system", "System.step_") == []


@pytest.mark.parametrize(("equation", "function"), rows())
def test_the_function_of_an_equation_names_it(equation, function):
    targets = re.findall(r"`(fedcb2o[\w.]*)(?::([\w.]+))?`", function)
    assert labels(equation), f"no label of the paper in {equation!r}"
    assert targets, f"no `fedcb2o.module:function` in {function!r}"
    for module, name in targets:
        lacking = missing(equation, module, name)
        assert not lacking, (
            f"the docstring of {module}{':' * bool(name)}{name} does not name {lacking}"
        )


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(
        r"^#{1,6} (.+)$",
        re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE),
        re.MULTILINE,
    )
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_targets_of_links_exist(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        if "://" not in target:
            assert linked.exists(), target
            is_page = linked.suffix == ".md"
            assert not (anchor and is_page) or anchor in anchors(
                linked.read_text(encoding="utf-8")
            ), target

"""Language of code and documentation: docstring openings, private words, long sentences."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = sorted(
    path
    for folder in ("src", "benchmarks", "paper", "tests")
    for path in (ROOT / folder).rglob("*.py")
)
NAMES = "architecture extending configuration runs peers cluster protocol threat-model performance"
PAGES = [ROOT / "docs" / f"{name}.md" for name in (*NAMES.split(), "equations")]
PAGES.append(ROOT / "CONTRIBUTING.md")
MAX_WORDS = 35

OPENINGS = re.compile(
    r"(what|who|whom|whose|whether|which|where|how|those|these|that|so many|as many|the same|it|of"
    r"|by|all|some)\b",
    re.IGNORECASE,
)
PRIVATE_WORDS = re.compile(
    r"\b((is|are|was|were|be|being|not) told|what is (heard|said|told|shown|seen)|so many|whoever"
    r"|those who|whom|nobody|whose own|the own \w+|one's own|but for|besides?|a line each"
    r"|without a word|lies? (in|at|there)|errands?|crews?|muster|parcels?|mend(ed|ing|s)?)\b",
    re.IGNORECASE,
)
PRIVATE_NAMES = re.compile(
    r"_(who|whom|what|nobody|told|tells?|whoever|those|ones_own|there_(is|are)|said|says)(_|$)"
)
INTERVAL = re.compile(r"\[-?\d+(?:\.\d+)?, -?\d+(?:\.\d+)?\]")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each comment of a file."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def sentences(page: Path) -> Iterator[str]:
    """Yield the sentences of a page without code blocks, tables and headings."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if not re.match(r"\s*(\||#|!\[|<!--)", line)]
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines)):
        yield from re.split(r"(?<=[.!?])\s+(?=[A-Z`*\[])", " ".join(paragraph.split()))


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_and_docstrings_use_standard_words(path):
    faults = [
        f"line {line}: the docstring opens with {match[0]!r}; see OPENINGS in this file"
        for line, text in docstrings(path)
        if (match := OPENINGS.match(text))
    ]
    for line, text in [*docstrings(path), *comments(path)]:
        faults += [
            f"line {line}: {match[0]!r} is one of PRIVATE_WORDS in this file"
            for match in PRIVATE_WORDS.finditer(text)
        ]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and PRIVATE_NAMES.search(node.name):
            faults.append(f"line {node.lineno}: {node.name} has one of PRIVATE_NAMES in this file")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_standard_words_and_short_sentences(page):
    text = page.read_text(encoding="utf-8")
    assert [match[0] for match in PRIVATE_WORDS.finditer(text)] == []
    assert [sentence for sentence in sentences(page) if len(sentence.split()) > MAX_WORDS] == []
    assert [sentence for sentence in sentences(page) if INTERVAL.search(sentence)] == []

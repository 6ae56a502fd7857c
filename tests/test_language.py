"""Language of code and documentation: docstrings, private words, long sentences."""

import ast
import inspect
import io
import pkgutil
import re
import textwrap
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedcb2o.experiments import schema

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
OPENING_QUOTES = re.compile(f'"""\\s*{OPENINGS.pattern}', re.IGNORECASE)
PRIVATE_WORDS = re.compile(
    r"\b((is|are|was|were|be|being|not) told|what is (heard|said|told|shown|seen)|so many|whoever"
    r"|those who|whom|nobody|whose own|the own \w+|one's own|but for|besides?|a line each"
    r"|without a word|lies? (in|at|there)|errands?|crews?|muster|parcels?|mend(ed|ing|s)?)\b",
    re.IGNORECASE,
)
PRIVATE_NAMES = re.compile(
    r"def \w*_(who|whom|what|nobody|told|tells?|whoever|those|ones_own|there_(is|are)|said|says)[_(]"
)
INTERVAL = re.compile(r"\[-?\d+(?:\.\d+)?, -?\d+(?:\.\d+)?\]")
Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: (\S+)\n((?:   :.*\n)*)", re.MULTILINE)
SECTION = r"^%s:\n((?: +.*\n|\n)*)"
ENTRY = re.compile(r"^    \*{0,2}(\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)
RARE_WORDS = (
    "a all an and are as at be by each for from if in is it its none not of on one or that the"
    " their they this to where which with"
)


def documented(path: Path) -> list[tuple[ast.Module | ast.ClassDef | Function, str]]:
    """Return the nodes of a file that may have a docstring, each with it."""
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    for node in nodes:  # without the expressions, which are most of a tree
        for field in ("body", "handlers", "cases", "orelse", "finalbody"):
            nodes += getattr(node, field, [])
    return [(node, ast.get_docstring(node) or "") for node in nodes if isinstance(node, DOCUMENTED)]


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each comment of a module."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def sentences(page: Path) -> Iterator[str]:
    """Yield the sentences of a page without code blocks, tables and headings."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if not re.match(r"\s*(\||#|!\[|<!--)", line)]
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines)):
        yield from re.split(r"(?<=[.!?])\s+(?=[A-Z`*\[])", " ".join(paragraph.split()))


def functions_of(thing: object, members: list[str] | None) -> Iterator[Callable[..., object]]:
    """Yield a function, or the methods of a class that an autodoc directive lists."""
    thing = inspect.unwrap(getattr(thing, "func", thing))
    if inspect.isfunction(thing):
        yield thing
    elif inspect.isclass(thing) and members is not None:
        for name, value in vars(thing).items():
            method = getattr(value, "__func__", value)
            is_listed = name in members if members else not name.startswith("_")
            if is_listed and inspect.isfunction(method):
                yield method


def public_functions() -> dict[str, Callable[..., object]]:
    """Return the functions and methods that docs/reference lists, by their full names."""
    found: list[Callable[..., object]] = []
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for kind, name, options in DIRECTIVE.findall(text):
            thing = pkgutil.resolve_name(name)
            match = re.search(r":members:(.*)", options)
            members = match and re.findall(r"\w+", match[1])
            if kind != "module":
                found += functions_of(thing, members)
            elif match:
                for member in members or getattr(thing, "__all__", vars(thing)):
                    value = getattr(thing, member)
                    is_listed = member in members or hasattr(thing, "__all__")
                    if is_listed or (getattr(value, "__module__", "") == name and member[0] != "_"):
                        found += functions_of(value, [])
        for kind in re.findall(r"^```\{keys\} (\w+)", text, re.MULTILINE):
            for function in schema._catalogue(kind).values():
                found += functions_of(function, None)
    names = {f"{function.__module__}.{function.__qualname__}": function for function in found}
    return {name: function for name, function in names.items() if "<locals>" not in name}


def section(text: str, name: str) -> str:
    """Return a section of a docstring in Google style; empty if it has none."""
    match = re.search(SECTION % name, f"{text}\n", re.MULTILINE)
    return match[1] if match else ""


def stems(text: str) -> set[str]:
    """Return the words of a text or a name without their endings."""
    text = re.sub(r"([a-z])([A-Z])", r"\1 \2", text)
    words = re.findall(r"[a-z0-9]+", text.lower().replace("_", " "))
    kept = (word for word in words if word not in RARE_WORDS.split())
    return {re.sub(r"(ies|es|s|ing|ed)$", "", word) if len(word) > 4 else word for word in kept}


def repetitions(path: Path) -> Iterator[str]:
    """Yield the entries of Args of a file that repeat the name or the type of the argument."""
    if "Args:" not in path.read_text(encoding="utf-8"):
        return
    for node, text in documented(path):
        if isinstance(node, FUNCTIONS) and "Args:" in text:
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            types = {a.arg: ast.unparse(a.annotation) for a in arguments if a.annotation}
            for name, meaning in ENTRY.findall(section(text, "Args")):
                if stems(meaning) <= stems(name) | stems(types.get(name, "")):
                    yield f"line {node.lineno}: {name}: {meaning}"


def private_words(path: Path) -> Iterator[str]:
    """Yield the openings, words and names of a file that are not standard."""
    text = path.read_text(encoding="utf-8")
    for match in PRIVATE_NAMES.finditer(text):
        yield f"{match[0]!r} has one of PRIVATE_NAMES"
    has_words = PRIVATE_WORDS.search(text)
    if not has_words and not OPENING_QUOTES.search(text):  # most files: they are not parsed
        return
    texts = [(getattr(node, "lineno", 1), docstring) for node, docstring in documented(path)]
    for line, docstring in texts:
        if match := OPENINGS.match(docstring):
            yield f"line {line}: the docstring opens with {match[0]!r}; see OPENINGS"
    for line, words in [*texts, *comments(text)] if has_words else ():
        for match in PRIVATE_WORDS.finditer(words):
            yield f"line {line}: {match[0]!r} is one of PRIVATE_WORDS"


def lacking(name: str, function: Callable[..., object]) -> Iterator[str]:
    """Yield the parts that the docstring of a public function lacks."""
    text = inspect.getdoc(function) or ""
    signature = inspect.signature(function)
    parameters = {key for key in signature.parameters if key not in ("self", "cls")}
    parameters -= {key for key, _ in ENTRY.findall(section(text, "Args"))}
    if parameters:
        yield f"{name}: Args lack {sorted(parameters)}"
    has_value = signature.return_annotation not in (None, "None")
    if has_value and not section(text, "Returns") and not section(text, "Yields"):
        yield f"{name}: Returns is missing"
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    has_error = any(isinstance(node, ast.Raise) and node.exc for node in ast.walk(tree))
    if has_error and not section(text, "Raises"):
        yield f"{name}: Raises is missing"


def test_public_functions_are_documented_in_full():
    functions = public_functions()
    assert len(functions) > 200
    faults = [fault for name, function in functions.items() for fault in lacking(name, function)]
    assert not faults, "\n".join(faults)


def test_faults_of_a_file_are_found(tmp_path):
    path = tmp_path / "module.py"
    lines = ["def f_" + "said(num_agents: int, limit: int):", '    """Which do.', "", "    Args:"]
    lines += ["        num_agents: The agents.", "        limit: Seconds to wait.", '    """']
    path.write_text("\n".join([*lines, "    # nobody"]))
    assert list(repetitions(path)) == ["line 1: num_agents: The agents."]
    assert [fault.split()[-1] for fault in private_words(path)] == [
        "PRIVATE_NAMES",
        "OPENINGS",
        "PRIVATE_WORDS",
    ]


@pytest.mark.parametrize("find", [repetitions, private_words])
def test_names_docstrings_and_comments_use_standard_words(find):
    faults = [f"{path.relative_to(ROOT)}, {text}" for path in CODE for text in find(path)]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_standard_words_and_short_sentences(page):
    text = page.read_text(encoding="utf-8")
    assert [match[0] for match in PRIVATE_WORDS.finditer(text)] == []
    assert [sentence for sentence in sentences(page) if len(sentence.split()) > MAX_WORDS] == []
    assert [sentence for sentence in sentences(page) if INTERVAL.search(sentence)] == []

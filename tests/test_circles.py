"""The import graph of fedcb2o has no cycle, with imports in functions, by name and in text."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((SOURCE / "fedcb2o").rglob("*.py"))
}

DYNAMIC_MODULES = ("fedcb2o",)
"""Modules that look up public names at run time; their imports do not count."""


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module imports: at the top, in functions, by importlib, in text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from imported_by_text(node.value)
        elif isinstance(node, ast.Call) and "import" in called_name(node):
            yield from imported_by_call(node, tree)


def called_name(call: ast.Call) -> str:
    """Return the last name of a called function."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def imported_by_call(call: ast.Call, tree: ast.AST) -> Iterator[str]:
    """Yield the strings and constants that `importlib.import_module` gets as its argument."""
    arguments = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
    constants = list(call.args)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and arguments & {ast.unparse(t) for t in node.targets}:
            constants.append(node.value)
    for constant in constants:
        for node in ast.walk(constant):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def imported_by_text(text: str) -> Iterator[str]:
    """Yield the names that source text in a string imports."""
    if "import " not in text or "fedcb2o" not in text:
        return
    for line in text.replace(";", "\n").splitlines():
        try:
            yield from imported_names(ast.parse(line.strip()))
        except SyntaxError:
            continue


def module_of(name: str) -> str | None:
    """Return the module of a dotted name: itself or the innermost parent."""
    while name:
        if name in MODULES:
            return name
        name = name.rpartition(".")[0]
    return None


def without_type_checking(tree: ast.Module) -> ast.Module:
    """Return the module without imports for type checkers and without docstrings."""

    class Cut(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | None:
            if "TYPE_CHECKING" in ast.unparse(node.test):
                return None
            return self.generic_visit(node)

        def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
            if isinstance(node.value, ast.Constant):
                return None
            return self.generic_visit(node)

    return Cut().visit(tree)


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """Return the imported modules of each module."""
    imports = {}
    for name, path in MODULES.items():
        if name in DYNAMIC_MODULES:
            imports[name] = set()
            continue
        tree = without_type_checking(ast.parse(path.read_text(encoding="utf-8")))
        targets = {module_of(target) for target in imported_names(tree)}
        imports[name] = {target for target in targets if target not in (None, name)}
    return imports


def find_cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in graph[module]:
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1:
                cycles.append(sorted(component))

    for module in graph:
        if module not in index:
            visit(module)
    return cycles


def test_imports_have_no_cycle(graph):
    assert find_cycles(graph) == []


def test_a_cycle_through_any_kind_of_import_is_found():
    for text in (
        "from fedcb2o.records import run",
        "def late():\n    import fedcb2o.records.run",
        "import importlib\nmodule = importlib.import_module('fedcb2o.records.run')",
        "PROGRAM = 'import sys; from fedcb2o.records.run import Run'",
    ):
        targets = {module_of(name) for name in imported_names(ast.parse(text))}
        assert "fedcb2o.records.run" in targets
    assert find_cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]

"""Goals of docs/threat-model.md: each has tests, and those without another place are here."""

import ast
import contextlib
import functools
import re
import tomllib
from pathlib import Path

import numpy as np
from tests.peer import members
from tests.peer.test_node import QUIET, run_all
from tests.peer.test_own_data import line, regression_federation
from tests.peer.wire import Wire, Wired

import fedcb2o
from fedcb2o.peer.node.node import Node
from fedcb2o.peer.wire.protocol import MalformedError, decode_offer

ROOT = Path(__file__).parents[2]
GOAL = re.compile(r"^- \*\*([a-z]+-\d+)\*\*: (.+)$", re.MULTILINE)
UNSAFE_MODULES = {"cloudpickle", "code", "dill", "marshal", "pickle", "runpy", "shelve", "yaml"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
UNSAFE_METHODS = {("torch", "load"), ("joblib", "load"), ("os", "system")}


@functools.cache
def functions(path: Path) -> set[str]:
    """Return the names of the test functions of a file, without importing it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_goal_has_a_name_and_existing_tests():
    page = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
    goals = GOAL.findall(page)
    tests = tomllib.loads((ROOT / "tests" / "peer" / "goals.toml").read_text(encoding="utf-8"))
    assert len(goals) >= 39
    assert [name for name, _ in goals] == list(tests)
    assert [text for _, text in goals if not text.endswith(".")] == []
    assert [name for name, named in tests.items() if not named] == []
    files = [test.split("::") for named in tests.values() for test in named]
    missing = [
        (file, name)
        for file, name in files
        if not (ROOT / "tests" / file).is_file() or name not in functions(ROOT / "tests" / file)
    ]
    assert missing == []


def recording(transport: Wired, sent: list[bytes]) -> Wired:
    """Append the requests of a transport, and the answers to them, to a list."""
    ask = transport.ask

    def recorded(peer, request, timeout):
        sent.append(bytes(request))
        question = ask(peer, request, timeout)
        wait = question.answer

        def answer():
            found = wait()
            with contextlib.suppress(MalformedError, AttributeError):  # no offer, or no answer
                sent.append(found.encode())
                sent.append(decode_offer(found.body)[0])
            return found

        question.answer = answer
        return question

    transport.ask = recorded
    return transport


def samples_in(stream: bytes, dataset: fedcb2o.Dataset) -> int:
    """Count the samples whose numbers are in a stream, in any of three types."""
    rows = np.concatenate([part.x.numpy() for part in (dataset.pool, dataset.test)])
    types = (np.float32, np.float64, np.float16)
    return sum(any(row.astype(kind).tobytes() in stream for kind in types) for row in rows)


def test_no_message_of_a_node_contains_a_sample(tmp_path):
    sent: list[bytes] = []
    wire = Wire()
    orgs, data = members.identities(tmp_path, 3), [line(j) for j in range(3)]
    fed = regression_federation(orgs)
    run_all(
        [
            Node(
                fed,
                org,
                data=data[j],
                out=tmp_path / f"out-{j}",
                connect=lambda *_, j=j: recording(wire.agent(j), sent),
                **QUIET,
            )
            for j, org in enumerate(orgs)
        ]
    )
    stream = b"".join(sent)
    assert stream.count(fed.run) > 10
    assert stream.count(fed.run.hex().encode()) > 100
    assert [samples_in(stream, dataset) for dataset in data] == [0, 0, 0]
    assert samples_in(stream + data[0].pool.x[3:5].numpy().tobytes(), data[0]) == 2


def test_peers_never_unpickle_or_evaluate():
    """Modules that read bytes of others name no function that would run these bytes."""
    found = []
    for path in sorted((ROOT / "src" / "fedcb2o" / "peer").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found += [(path.name, name) for name in unsafe_names(node)]
    assert found == []


def unsafe_names(node: ast.AST) -> set[str]:
    """Return what a statement or call imports or calls that runs bytes as code."""
    if isinstance(node, ast.Import):
        return UNSAFE_MODULES & {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return UNSAFE_MODULES & {(node.module or "").partition(".")[0]}
    if not isinstance(node, ast.Call):
        return set()
    called = node.func
    if isinstance(called, ast.Name):
        return UNSAFE_CALLS & {called.id}
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
        pair = (called.value.id, called.attr)
        return {".".join(pair)} if pair in UNSAFE_METHODS else set()
    return set()


def test_unsafe_names_are_recognised():
    code = "import pickle\nfrom marshal import loads\neval('1')\ntorch.load(path)\nre.compile('a')"
    found = [sorted(unsafe_names(node)) for node in ast.walk(ast.parse(code))]
    assert [names for names in found if names] == [
        ["pickle"],
        ["marshal"],
        ["eval"],
        ["torch.load"],
    ]

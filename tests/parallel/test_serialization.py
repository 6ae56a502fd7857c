"""Functions sent to other processes: they work, or a one-line error names them."""

import functools
import sys
import threading
import types
import warnings

import cloudpickle
import pytest

from fedcb2o.errors import RunError
from fedcb2o.parallel._serialization import execute, serialize, unwrap_result

MAIN = """
import functools, threading

import torch

lock = threading.Lock()
scripted = torch.jit.script(torch.nn.Linear(2, 2))

@functools.cache
def cached(x): return 2 * x

@functools.lru_cache(maxsize=3, typed=True)
def small(x): return cached(x) + 1

def uses_cached(x): return small(x)

def locked(x):
    with lock: return x

class Net:
    def __call__(self, x): return scripted(x)

class Maker:
    def __init__(self, factor): self.factor = factor
    def __call__(self, x): return self.factor * x
    def make(self, x): return self(x)
    @classmethod
    def of(cls, x): return cls(4)(x)
"""


def run_script():
    """Return the namespace of a script that ran as `__main__`."""
    names = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, and in use
        exec(MAIN, names)
    return types.SimpleNamespace(**names)


def closure(factor):
    @functools.cache
    def inner(x):
        return factor * x

    return lambda x: inner(x) + 0


SCRIPT = run_script()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (SCRIPT.cached, 6),
        (SCRIPT.small, 7),
        (SCRIPT.uses_cached, 7),
        (functools.partial(SCRIPT.uses_cached), 7),
        (functools.cache(SCRIPT.Maker(5)), 15),
        (SCRIPT.Maker(5).make, 15),
        (SCRIPT.Maker.of, 12),
        (closure(6), 18),
        (lambda x: abs(x) * 2, 6),
    ],
)
def test_functions_of_a_script_work_in_other_processes(function, expected):
    assert unwrap_result(execute(serialize((function, (3,))))) == expected


def test_a_cached_function_keeps_its_cache_settings():
    function = cloudpickle.loads(serialize(SCRIPT.small))
    assert function.cache_parameters() == {"maxsize": 3, "typed": True}
    assert [function(1), function(1), function.cache_info().hits] == [3, 3, 1]
    assert cloudpickle.loads(serialize(cached_here)) is cached_here  # importable, so sent by name


@functools.cache
def cached_here():
    return 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (SCRIPT.locked, r"a user function `__main__:locked` cannot be sent to another process "),
        (SCRIPT.Net(), r"a user function `__main__:Net` cannot be sent .*Tried to serialize"),
        (
            (max, {"loss": functools.partial(print, file=SCRIPT.Maker), "model": [SCRIPT.locked]}),
            "a user function `__main__:locked` cannot be sent",
        ),
        (
            threading.Lock(),
            r"cannot be sent to another process \(cannot pickle.*: take --workers 1",
        ),
    ],
)
def test_functions_that_cannot_be_sent_are_named_in_a_one_line_error(content, message):
    with pytest.raises(RunError, match=message) as raised:
        serialize(content)
    assert "\n" not in str(raised.value)


def test_functions_of_a_missing_module_are_a_run_error(monkeypatch):
    module = types.ModuleType("made_here")
    exec("def make(x): return x", module.__dict__)
    monkeypatch.setitem(sys.modules, "made_here", module)
    content = serialize((module.make, (3,)))
    assert unwrap_result(execute(content)) == 3
    monkeypatch.delitem(sys.modules, "made_here")
    message = r"to another process .No module named 'made_here'.*--workers 1"
    with pytest.raises(RunError, match=message):
        unwrap_result(execute(content))

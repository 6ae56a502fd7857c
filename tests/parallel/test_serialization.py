"""Functions that travel to other processes: they work there, or one line names them."""

import functools
import sys
import threading
import types
import warnings

import cloudpickle
import pytest

from fedcb2o.errors import RunError
from fedcb2o.parallel import execute, serialize, unwrap_result

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


def main():
    """The names of a script, whose process is another one."""
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


SCRIPT = main()


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
def test_functions_of_a_script_work_elsewhere(function, expected):
    assert unwrap_result(execute(serialize((function, (3,))))) == expected


def test_a_cache_stays_one_with_its_size():
    found = cloudpickle.loads(serialize(SCRIPT.small))
    assert found.cache_parameters() == {"maxsize": 3, "typed": True}
    assert [found(1), found(1), found.cache_info().hits] == [3, 3, 1]
    assert cloudpickle.loads(serialize(cached_here)) is cached_here  # which others can import


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
def test_functions_that_cannot_travel_are_named_in_one_line(content, message):
    with pytest.raises(RunError, match=message) as raised:
        serialize(content)
    assert "\n" not in str(raised.value)


def test_functions_that_do_not_arrive_are_one_line(monkeypatch):
    module = types.ModuleType("made_here")
    exec("def make(x): return x", module.__dict__)
    monkeypatch.setitem(sys.modules, "made_here", module)
    content = serialize((module.make, (3,)))
    assert unwrap_result(execute(content)) == 3
    monkeypatch.delitem(sys.modules, "made_here")
    with pytest.raises(
        RunError, match=r"to another process .No module named 'made_here'.*--workers 1"
    ):
        unwrap_result(execute(content))

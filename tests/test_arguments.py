"""Invalid arguments of Python functions raise an error of one line that names the argument.

The cases run in a process without the run-time type checks of the tests, like a user's process.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import fedcb2o
from fedcb2o.data import digits
from fedcb2o.experiments import load
from fedcb2o.particles import adversaries
from fedcb2o.plugins import did_you_mean, resolve_and_bind
from tests.names import steady
from tests.particles.problems import with_dynamics
from tests.tiny import ENVIRONMENT, tiny
from tests.type_checks import VARIABLE

ROOT = Path(__file__).parents[1]


def lower(x):
    return x.square().sum(-1)


def minimize(**settings):
    flat = {"lower": lower, "dim": 2, "maxiter": 3, **settings}
    return fedcb2o.minimize(**with_dynamics(flat))


def run(**arguments):
    return fedcb2o.run(tiny(), **{"out": "run", **arguments})


def numpy_numbers_are_accepted():
    plain = minimize(dim=2, seed=3, num_particles=20, maxiter=5, dynamics=fedcb2o.Paper(dt=0.5))
    with_numpy = minimize(
        dim=np.int64(2),
        seed=np.int64(3),
        num_particles=np.int32(20),
        maxiter=np.int64(5),
        dynamics=fedcb2o.Paper(dt=np.float32(0.5)),
    )
    assert torch.equal(plain.x, with_numpy.x)
    assert (plain.success, plain.seed) == (with_numpy.success, with_numpy.seed)
    several = minimize(
        dim=2, seed=np.array([3, 4]), num_particles=20, maxiter=5, dynamics=fedcb2o.Paper(dt=0.5)
    )
    assert torch.equal(several.x[0], plain.x)


def warnings_point_to_the_caller():
    attack = adversaries.static(100, (-1.0, 0.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        minimize(upper=lower, adversaries=attack, dynamics="paper")
        fedcb2o.Search(2, upper=True, adversaries=attack, dynamics="paper")
    assert {warning.filename for warning in caught} == {__file__}
    assert len(caught) == 2


SETTINGS = {
    "seed": ["12", 1.5, [None], [1.5, 2], True],
    "x0": ["x", [[1.0, 2.0]], [1.0, None]],
    "spread": ["x", -1.0, [1.0, 2.0, 3.0]],
    "maxfev": [0, 1.5, "x"],
    "dim": ["2", 2.0, True, 0],
    "num_particles": [2.5, "5", True],
    "runs": [1.5, "2"],
    "batch": [1.5, "x"],
    "record_every": [0, 1.5, None],
    "maxiter": [1.5, float("inf")],
    "callback": [3, lambda state: torch.ones(3)],
    "adversaries": [None, [3], "x", lambda view: (0.0, 0.0)],
    "alpha": ["1", lambda n: None],
    "beta": ["x"],
    "sigma1": ["x"],
    "lambda1": ["1", 1j],
    "dt": [torch.tensor([0.1, 0.2]), lambda n: 0.1],
    "delta_q": [None],
    "time_limit": [None],
    "noise": [["anisotropic"], 3],
    "dtype": ["float32", None, torch.int64],
    "device": ["nonsense", "cuda:99", "meta", [1]],
    "gradient": [3],
    "lower": [None, 3, [None], [lower, 3], "sum"],
    "upper": [3, "x", [3]],
}


ARGUMENTS = {
    "seeds": [3, "ab", [None], [1.5], True, {1: 2}],
    "workers": [0, -1, "2", 1.5, True],
    "out": [3, [1]],
    "data_dir": [3],
    "watch": [3],
}
NO_EXPERIMENT = (
    "an experiment is a preset's name, a file FILE.toml, a mapping or an Experiment, got"
)
NO_GRID = "a grid is a built-in one's name, a file GRID.toml or a mapping, got a"
X, Y = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20) % 2

CASES = [
    *(
        ("minimize", name, value, f"`{name}`")
        for name, values in SETTINGS.items()
        for value in values
    ),
    *(
        ("run", name, value, f"`{name}` must be ")
        for name, values in ARGUMENTS.items()
        for value in values
    ),
    ("run", "memory", [1], "`memory` needs a size"),
    ("run", "memory", "9" * 400, "`memory` needs a size"),
    *(
        (name, "", value, message)
        for name, message in (("load", NO_EXPERIMENT), ("bench", NO_GRID))
        for value in (None, 3, [1])
        if (name, value) != ("load", None)
    ),
    *(("Run", "", value, "a run is read from its folder's path, got a") for value in (None, 3)),
    *(("section", "", make, "got a Dataset") for make in (digits, lambda: {"name": digits()})),
    ("call", "", numpy_numbers_are_accepted, ""),
    ("call", "", warnings_point_to_the_caller, ""),
    (
        "call",
        "",
        lambda: load(tiny(algorithm={"criterion": {"name": 3}})),
        "the criterion must be a name or a function",
    ),
    ("call", "", lambda: did_you_mean(None, ["a"]), ""),
    (
        "call",
        "",
        lambda: resolve_and_bind("rule", {"name": 3}, adversaries),
        "the rule must be a name or a function, got a int",
    ),
    *(
        ("minimize", "upper", x0, "a point to start about is `x0`")
        for x0 in ([0.0, 0.0], np.zeros(2), torch.zeros(2))
    ),
    ("call", "", lambda: fedcb2o.Search(2, args=(1,)), "`args` is for functions"),
    ("call", "", lambda: fedcb2o.from_point(lower, workers=4), "`workers` must be a function"),
    ("call", "", lambda: minimize(runs=10**20), "runs of 1 particles of 2 coordinates need about"),
    (
        "call",
        "",
        lambda: minimize(lower=lambda x: x.sum(-1).to_sparse()),
        "`lower` must return a dense tensor on cpu",
    ),
    (
        "call",
        "",
        lambda: minimize(lower=lambda x: x.sum(-1).to("meta")),
        "a strided tensor on meta",
    ),
    ("numpy", "", None, "returned None, expected numbers"),
    ("numpy", "", "abc", "returned words; expected real numbers"),
    ("point", "", None, "of a point returned None, expected numbers"),
    ("point", "", [1.0, 2.0], "`lower` must return one value a particle"),
    ("call", "", lambda: fedcb2o.Adversary(None, 3), "an adversary's `move` must be a function"),
    (
        "call",
        "",
        lambda: fedcb2o.Adversary(lower, 2.5),
        "an adversary's `num_particles` must be a whole number",
    ),
    (
        "call",
        "",
        lambda: fedcb2o.Adversary(lower, 2, mass="x"),
        "an adversary's `mass` must be a number",
    ),
    (
        "call",
        "",
        lambda: adversaries.oscillating(3, (1, 2), period=None),
        "`period` must be a number",
    ),
    (
        "call",
        "",
        lambda: adversaries.oscillating(3, ([1.0],), period=1.0),
        "`between` must be two points",
    ),
    (
        "call",
        "",
        lambda: minimize(adversaries=adversaries.tracking(3, "x")),
        "`offset` must be a point",
    ),
    *(
        (
            "call",
            "",
            lambda n=n: fedcb2o.dataset(X, Y, class_names=n),
            "`class_names` must be a list",
        )
        for n in (3, "ab")
    ),
    *(
        ("call", "", lambda n=n: fedcb2o.dataset(X, Y, test_share=n), "`test_share` is the share")
        for n in ("x", None)
    ),
]


def outcome(kind, name, value):
    """Return [whether the error of a case is a FedCB2OError, its text]."""
    calls = {
        "minimize": lambda: minimize(**{name: value}),
        "run": lambda: run(**{name: value}),
        "load": lambda: fedcb2o.run(value),
        "bench": lambda: fedcb2o.bench(value),
        "Run": lambda: fedcb2o.Run(value),
        "section": lambda: load(tiny(data=value())),
        "numpy": lambda: minimize(lower=fedcb2o.from_numpy(lambda x: value)),
        "point": lambda: minimize(lower=fedcb2o.from_point(lambda x: value)),
        "call": value,
    }  # fmt: skip
    try:
        calls[kind]()
    except Exception as error:
        return [isinstance(error, fedcb2o.FedCB2OError), f"{error}"]
    return [True, ""]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Return the outcomes of all cases, from a process without the run-time checks of types."""
    folder = tmp_path_factory.mktemp("arguments")
    if not os.environ.get(VARIABLE):
        with contextlib.chdir(folder), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [outcome(*case[:3]) for case in CASES]
    else:
        paths = os.pathsep.join([str(ROOT), ENVIRONMENT.get("PYTHONPATH", "")])
        environment = {**ENVIRONMENT, "PYTHONPATH": paths}
        words = [sys.executable, "-m", "tests.test_arguments"]
        done = subprocess.run(
            words, cwd=folder, env=environment, check=True, timeout=200, capture_output=True
        )
        found = json.loads(done.stdout)
    assert not any(folder.iterdir())
    return found


@pytest.mark.parametrize(
    "case",
    range(len(CASES)),
    ids=[f"{kind} {name} {steady(value):.30}" for kind, name, value, _ in CASES],
)
def test_the_error_of_an_invalid_argument_names_it_in_one_line(outcomes, case):
    is_own_error, text = outcomes[case]
    assert is_own_error, text
    assert re.search(re.escape(CASES[case][3]), text)
    assert bool(text) == bool(CASES[case][3])
    assert "\n" not in text
    assert len(text) < 600


if __name__ == "__main__":
    print(json.dumps([outcome(*case[:3]) for case in CASES]))

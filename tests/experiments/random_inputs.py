"""Random inputs against a plain PyTorch loop: equal numbers, a one-line error, or a warning.

`python -m tests.experiments.random_inputs 1000` draws combinations of data, labels, networks,
losses, optimisers and settings. It prints every message, and every fault with a small example.
"""

import collections
import contextlib
import io
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pandas as pd
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.experiments import input_choices as choices
from tests.experiments import plain_loop
from tests.experiments.input_choices import CHOICES, DEFAULTS, NotComparableError
from torch.nn import functional as F

import fedcb2o
from fedcb2o.errors import FedCB2OError

Combination = dict[str, str]
NUM_TESTS = 24
NO_BYTES = (
    "list",
    "object array",
    "nullable frame",
    "mixed frame",
    "bfloat16 tensor",
    "sparse columns",
)
NO_BYTES += ("tensor with gradient", "parameter", "inference tensor")
PYTHON_INTERNALS = re.compile(
    r"<class|<function| object at 0x|dtype\(|np\.\w+\(|Traceback|\bNoneType\b|pydantic|instance of"
    r"|got an? (u?int|float|bool|Tensor|ndarray)|of type object"
)
NAME = re.compile(r"`[^`]+`|owner|class|label|model|sample|images|seed|training")
MAX_LENGTH = 500


# ---- A combination: the inputs of the library and of the plain loop ----


def is_image(c: Combination) -> bool:
    """Return whether the samples are square images with channels first."""
    is_flat = any(word in c["container"] for word in choices.FLAT) or "column" in c["test"]
    return c["shape"] in ("image", "rgb") and c["channels"] == "first" and not is_flat


def fitting(c: Combination) -> Combination:
    """Replace valid choices that exclude each other."""
    c = dict(c)
    has_owners = c["owners"] not in ("none", "by hand")
    if c["owners"] in ("by hand", "PyTorch data sets"):  # users make tensors themselves
        if c["container"] not in ("array", "bfloat16 tensor"):
            c["container"] = "tensor"
        if c["labels"] not in (*choices.FROM_ZERO, "targets", "two targets"):
            c["labels"] = "from 0"
    if c["labels"] not in choices.FROM_ZERO or c["test"] == "a class in tests only":
        c["names"] = "none"
    is_regression = "target" in c["labels"]
    if c["loss"] not in ("fitting", "own") and ("error" in c["loss"]) != is_regression:
        c["loss"] = "own" if is_regression else "smoothed"
    if c["model"] == "cnn" and not is_image(c):
        c["model"] = "plain"
    if "clusters" in c["settings"] and (has_owners or not is_image(c)):
        c["settings"] = "plain"
    if "samples" in c["settings"] and has_owners:
        c["settings"] = "batch of 7"
    if c["settings"] == "channels last" and c["model"] != "cnn":
        c["settings"] = "steps"
    return c


@st.composite
def combinations(draw: Any) -> Combination:
    """Draw valid choices; in three of ten combinations one choice is invalid on purpose."""
    combination = {}
    for key, options in CHOICES.items():
        valid = [name for name in options if not name.startswith("!")]
        # About a third of the choices are defaults, so that few are unusual at once.
        combination[key] = draw(st.sampled_from([*valid[:1] * (len(valid) // 2), *valid]))
    combination = fitting(combination)
    if draw(st.integers(0, 9)) < 3:
        key = draw(st.sampled_from(list(CHOICES)))
        if key == "settings":
            combination["owners"] = "none"  # owners may have fewer samples than the limit
        if key == "labels":
            combination["names"] = "none"
        if key in ("names", "test share", "container", "labels"):
            makes_tensors = combination["owners"] in ("by hand", "PyTorch data sets")
            combination["owners"] = "none" if makes_tensors else combination["owners"]
        if key in ("dtype", "test"):
            combination["container"] = "array"
        if key == "model":
            combination["scale"] = DEFAULTS["scale"]  # no saturated layers
        if key == "scale":
            combination["standardise"] = "no"
        invalid = [name for name in CHOICES[key] if name.startswith("!")]
        combination[key] = draw(st.sampled_from(invalid or [combination[key]]))
    return combination


class Case:
    """The data set, the configuration and the plain problem of a combination."""

    def __init__(self, combination: Combination) -> None:
        self.combination = combination
        n = CHOICES["size"][combination["size"]]
        self.k, self.j = CHOICES["spread"][combination["spread"]](np.arange(n))
        self.test_k = np.arange(NUM_TESTS) % choices.CLASSES
        draw = np.random.default_rng(7)
        shape = CHOICES["shape"][combination["shape"]]
        shift = self.k.reshape(n, *[1] * len(shape))
        self.x = self.typed(np.clip(draw.integers(0, 15, (n, *shape)) + shift, 0, 16))
        self.test_x = self.typed(draw.integers(0, 17, (NUM_TESTS, *shape)))
        if combination["test"] == "a class in tests only":
            self.k = self.k % 2
        self.is_by_hand = combination["owners"] == "by hand"
        self.has_owners = combination["owners"] != "none" and not self.is_by_hand
        self.has_test = combination["test"] != "held out" or self.is_by_hand
        self.is_regression = "target" in combination["labels"]
        self.share = CHOICES["test share"][combination["test share"]]
        if self.has_owners and self.has_test and not combination["test share"].startswith("!"):
            self.share = 0  # the test samples are for all agents
        self.changes: dict[str, Any] = CHOICES["settings"][combination["settings"]]

    def typed(self, levels: np.ndarray) -> np.ndarray:
        """Return levels in the scale and type of the combination."""
        combination = self.combination
        v = CHOICES["scale"][combination["scale"]](levels.astype("f8"))
        kind = np.dtype(CHOICES["dtype"][combination["dtype"]])
        if combination["scale"].startswith("!"):
            kind = np.dtype("f8")
        elif kind.kind == "M":
            v = v.astype("i8")
        elif kind.kind in "iu":
            limits = np.iinfo(kind)
            v = np.clip(np.round(v), max(limits.min, -(2**53)), min(limits.max, 2**53))
        elif kind.itemsize == 2:
            v = np.clip(v, -6e4, 6e4)  # the range of float16
        if (
            any(w in combination["container"] for w in choices.FLAT)
            or "columns" in combination["test"]
        ):
            v = v.reshape(len(v), -1)
        return v.astype(kind)

    def inputs(self, v: np.ndarray) -> Any:
        """Return samples in the container of the user."""
        combination = self.combination
        inputs = CHOICES["container"][combination["container"]](
            CHOICES["channels"][combination["channels"]](v)
        )
        is_tensor = combination["owners"] in ("by hand", "PyTorch data sets")
        return choices.as_tensor(inputs) if is_tensor else inputs

    def labels(self, k: np.ndarray) -> Any:
        """Return labels in the form of the user."""
        return CHOICES["labels"][self.combination["labels"]](k)

    def data(self) -> fedcb2o.Dataset:
        """Make the data set with the library."""
        combination = self.combination
        test_x = test_y = None
        if self.has_test:
            change = CHOICES["test"][combination["test"]] or (lambda inputs, values: inputs)
            test_x = change(self.inputs(self.test_x), self.test_x)
            test_y = None if combination["test"] == "!no labels" else self.labels(self.test_k)
        entry = CHOICES["owners"][combination["owners"]]
        if entry == "hand":
            names = () if self.is_regression else ("c0", "c1", "c2")
            pairs = ((self.inputs(self.x), self.labels(self.k)), (test_x, test_y))
            pool, test = (fedcb2o.Shard(*map(choices.as_tensor, pair)) for pair in pairs)
            return fedcb2o.Dataset(pool, test, names)
        options: dict[str, Any] = {
            "standardise": combination["standardise"] == "yes", "numbers": self.is_regression,
            "class_names": CHOICES["names"][combination["names"]], "test_share": self.share,
        }  # fmt: skip
        if isinstance(entry, str):
            masks = [self.j == owner for owner in range(3)]
            parts: Any = [(self.inputs(self.x[rows]), self.labels(self.k[rows])) for rows in masks]
            if entry == "torch":
                tensors = [map(choices.as_tensor, part) for part in parts]
                parts = [torch.utils.data.TensorDataset(*pair) for pair in tensors]
            if entry == "mapping":
                parts = dict(zip(("north", "south", "west"), parts, strict=True))
            common = (test_x, test_y) if self.has_test else None
            return fedcb2o.datasets(parts, test=common, **options)
        owner = None if entry is None else entry(self.j)
        x, y = self.inputs(self.x), self.labels(self.k)
        return fedcb2o.dataset(x, y, owner=owner, x_test=test_x, y_test=test_y, **options)

    def experiment(self, data: fedcb2o.Dataset) -> dict[str, Any]:
        """Return the configuration."""
        combination = self.combination
        benign = 3 if self.has_owners else 2
        table: dict[str, Any] = {
            "name": "random", "seeds": [0], "rounds": 2, "data": {"name": lambda: data},
            "agents": {"num_clusters": 1, "benign": benign, "malicious": 0, "benign_samples": 8},
            "model": dict(CHOICES["model"][combination["model"]][0]),
            "training": {"gamma": 0.05, "batch_size": 8, "local_epochs": 1},
            "algorithm": {"name": combination["algorithm"]},
        }  # fmt: skip
        if self.has_owners:
            del table["agents"]["benign_samples"]
        for key, value in self.changes.items():
            section, _, name = key.rpartition(".")
            (table[section] if section else table)[name] = value
        table["agents"]["budget"] = int(table["agents"]["num_clusters"]) * benign - 1
        loss = CHOICES["loss"][combination["loss"]][0]
        if combination["loss"] == "fitting" and self.is_regression:
            loss = "squared_error"
        optimiser = CHOICES["optimiser"][combination["optimiser"]][0]
        key = "momentum" if isinstance(optimiser, float | np.floating) else "optimiser"
        inputs = {"loss": loss, key: optimiser}
        table["training"] |= {name: value for name, value in inputs.items() if value is not None}
        return table

    def truth(self, data: fedcb2o.Dataset, k: np.ndarray) -> np.ndarray:
        """Return targets, or the classes by the class names of the data set."""
        if self.is_regression:
            return np.asarray(self.labels(k), "f8")
        label_values = np.asarray(self.labels(np.arange(choices.CLASSES))).ravel().tolist()
        names = [str(int(v)) if isinstance(v, float) else str(v) for v in label_values]
        if isinstance(label_values[0], bytes):
            names = [label.decode() for label in label_values]
        if self.combination["names"] != "none" or self.is_by_hand:
            names = ["c0", "c1", "c2"]
        if not set(names) <= set(data.class_names):
            raise AssertionError(f"the classes are called {data.class_names}, and not {names}")
        return np.array([data.class_names.index(name) for name in names])[k]

    def problem(self, data: fedcb2o.Dataset) -> plain_loop.Problem:
        """Return the same problem for the plain loop."""
        combination = self.combination
        model, loss, optimiser = (
            CHOICES[k][combination[k]][1] for k in ("model", "loss", "optimiser")
        )
        if "dropout" in combination["model"] and "together" in self.changes:
            raise NotComparableError("dropout of agents that train together")
        if loss is None:
            loss = choices.alike(F.mse_loss) if self.is_regression else F.cross_entropy
        table = self.experiment(data)
        s = {
            "lambda2": 1.0, "local_steps": None, "validation": 0.2, "hold_out": True,
            "initialisation": "common", "test_share": float(self.share), "benign_samples": None,
            "average": CHOICES["algorithm"][combination["algorithm"]], "rounds": table["rounds"],
            "buffers": table["model"].get("buffers", "local"), "seed": int(table["seeds"][0]),
            **table["agents"], **table["training"],
        }  # fmt: skip
        s = {key: v.item() if hasattr(v, "item") else v for key, v in s.items()}
        x, y = self.meaning(data, self.x, combination["container"]), self.truth(data, self.k)
        owner = None
        if self.has_owners:
            is_given = callable(CHOICES["owners"][combination["owners"]])
            order = np.arange(len(y)) if is_given else np.argsort(self.j, kind="stable")
            x, y, owner = x[order], y[order], self.j[order]
        test = (None, None)
        if self.has_test:
            is_list = combination["test"] == "list" and self.test_x.dtype != np.uint8
            kind = "list" if is_list else combination["container"]
            test = (self.meaning(data, self.test_x, kind), self.truth(data, self.test_k))
        is_scaled = combination["standardise"] == "yes" and not self.is_by_hand
        return plain_loop.Problem(
            x, y, model, loss, optimiser, data.num_outputs, self.is_regression, owner, *test, is_scaled, s
        )  # fmt: skip

    def meaning(self, data: fedcb2o.Dataset, v: np.ndarray, kind: str) -> np.ndarray:
        """Convert samples of a kind of container to the numbers that a network reads."""
        numbers = v.astype("f8")
        if "bfloat16" in kind:
            numbers = torch.from_numpy(numbers).to(torch.bfloat16).double().numpy()
        elif kind == "sparse columns":
            numbers = numbers.astype("f4").astype("f8")
        elif kind == "mixed frame" and v.shape[1] > 1:
            numbers[:, 1] = v[:, 1] != 0
        if v.dtype == np.uint8 and (kind not in NO_BYTES or data.pool.x.dtype == torch.uint8):
            numbers = numbers / 255
        moved = CHOICES["channels"][self.combination["channels"]](numbers)
        return moved if moved.shape[1:] == data.pool.x.shape[1:] else numbers


# ---- The outcome ----


@contextlib.contextmanager
def warnings_of_library() -> Iterator[list[str]]:
    """Collect the warnings that the library logs or raises."""
    texts = list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fedcb2o").addHandler(handler)
    original = warnings.warn

    def warn(message: Any, *arguments: Any, **options: Any) -> None:
        if sys._getframe(1).f_globals["__name__"].startswith("fedcb2o."):
            texts.append(str(message))
        else:
            original(message, *arguments, **options)

    with mock.patch("warnings.warn", warn):
        yield texts
    logging.getLogger("fedcb2o").removeHandler(handler)


def fault_of(text: str) -> str:
    """Return the fault of a message; "" for one line that names an input."""
    if "\n" in text.strip():
        return "a message of several lines: "
    if len(text) > MAX_LENGTH:
        return f"a message of {len(text)} letters: "
    if match := PYTHON_INTERNALS.search(text):
        return f"a message with {match.group()!r}: "
    return "" if NAME.search(text) else "a message without the name of an input: "


def outcome_of(combination: Combination) -> tuple[str, str]:
    """Return the outcome (equal, refused, warned, not compared or fault) and its message."""
    invalid = [f"{key}={name}" for key, name in combination.items() if name.startswith("!")]
    with (
        warnings.catch_warnings(record=True) as stray,
        warnings_of_library() as messages,
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", PendingDeprecationWarning)  # of numpy.matrix
        try:
            case = Case(combination)
            data = case.data()
            run = fedcb2o.run(case.experiment(data), out=f"{folder}/r", workers=1)
            models = load_file(run.folder / f"seed-{run.seeds[0]}" / "checkpoint.safetensors")
            records = run.records
        except FedCB2OError as error:
            fault = fault_of(str(error))
            return "fault" if fault else "refused", f"{fault}{error}"
        except NotComparableError as error:
            return "not compared", str(error)
        except Exception as error:
            return "fault", f"{type(error).__name__}: {error}"
    for text in messages:
        if fault := fault_of(text):
            return "fault", f"{fault}{text}"
    if invalid:
        return (
            ("warned", messages[0])
            if messages
            else ("fault", f"taken without a word: {invalid[0]}")
        )
    if stray := [w for w in stray if "fedcb2o" in w.filename]:
        return "fault", f"a warning of another library: {stray[0].message}"
    outcome, message = compare(case, data, records, models["models"].double())
    if any("no peer accepts" in text for text in messages):
        return "warned", messages[0]  # the plain loop averages other models
    if messages and outcome in ("equal", "not compared"):
        return "warned", messages[0]
    return outcome, message


def compare(
    case: Case, data: fedcb2o.Dataset, records: pd.DataFrame, models: torch.Tensor
) -> tuple[str, str]:
    """Compare a run with the plain loop, within the rounding of a nudged loop."""
    try:
        problem = case.problem(data)
        references = plain_loop.run(problem)
        nudged_results = plain_loop.run(problem, 2e-7)
    except NotComparableError as error:
        return "not compared", str(error)
    except Exception as error:
        return "fault", f"taken, and plain PyTorch refuses: {type(error).__name__}: {error}"

    test_x = data.test.x.float().numpy() / (255 if data.test.x.dtype == torch.uint8 else 1)
    reference_x = references[0].test_x.astype(np.float32)
    if test_x.shape != reference_x.shape or not np.allclose(
        test_x, reference_x, 1e-4, 1e-6 * abs(reference_x).max()
    ):
        return "fault", "the test samples differ"
    last = records[records["round"] == records["round"].max()].set_index("agent")
    for j, (plain, nudged) in enumerate(zip(references, nudged_results, strict=True)):
        theta = models[j][: len(plain.theta)]
        if not (plain.theta.isfinite().all() and nudged.theta.isfinite().all()):
            is_wrong = theta.isfinite().all() and nudged.theta.isfinite().all()
            return ("fault" if is_wrong else "not compared"), f"agent {j}: training diverges"
        scale = float(plain.theta.abs().max())
        noise = (plain.theta - nudged.theta).abs()
        typical = float(noise.quantile(0.75))
        if 30 * typical > 0.02 * scale:
            return "not compared", "training magnifies rounding"
        error = (theta - plain.theta).abs()
        if (error > 1e-5 * scale + 30 * (typical + noise)).any():
            return (
                "fault",
                f"agent {j}: parameters differ by {float(error.max()):.3g} of {scale:.3g}",
            )
        if abs(plain.loss - last["train_loss"][j]) > 1e-3 * max(1, abs(plain.loss)):
            return "fault", f"agent {j}: training loss {last['train_loss'][j]}, right {plain.loss}"
        accuracy = last["accuracy"][j]
        is_near = abs(plain.accuracy - accuracy) <= plain.undecided + 1e-6
        if not is_near and not problem.is_regression:
            return "fault", f"agent {j}: accuracy {accuracy}, right {plain.accuracy}"
    return "equal", ""


# ---- All combinations ----


def kind_of(message: str) -> str:
    """Return a message without its numbers and names."""
    return re.sub(r"'[^']*'|-?\d[\d.e+-]*|\([^()]*\)|\[[^\[\]]*\]", "*", message)[:110]


def simplified(combination: Combination, message: str) -> Combination:
    """Return the choices that a fault needs; all other choices are defaults."""
    needed = dict(combination)
    for key, default in DEFAULTS.items():
        outcome, text = outcome_of({**needed, key: default})
        if outcome == "fault" and kind_of(text) == kind_of(message):
            needed[key] = default
    return {key: name for key, name in needed.items() if name != DEFAULTS[key]}


def main(count: int = 1000, first: int = 0) -> int:
    """Try combinations; print messages, faults and counts; return 1 if there is a fault."""
    torch.set_num_threads(1)
    counts = collections.Counter[str]()
    messages: dict[tuple[str, str], list[Any]] = {}

    @seed(first)
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), derandomize=False,
    )  # fmt: skip
    @given(combinations())
    def attempt(combination: Combination) -> None:
        outcome, message = outcome_of(combination)
        counts[outcome] += 1
        messages.setdefault((outcome, kind_of(message)), [0, message, combination])[0] += 1

    attempt()
    for (outcome, _), (times, message, combination) in sorted(messages.items(), key=lambda m: m[0]):
        print(f"{outcome} {times}x {message}")
        if outcome == "fault":
            print(f"    {simplified(combination, message)}", flush=True)
    print(", ".join(f"{times} {outcome}" for outcome, times in sorted(counts.items())))
    return int(counts["fault"] > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))

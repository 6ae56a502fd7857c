"""A tiny experiment, and calls of the command line."""

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
import typer.main
from safetensors.torch import load_file

from fedcb2o import cli
from fedcb2o.data.sets import _scikit_learn
from fedcb2o.experiments import run
from fedcb2o.experiments.grid import _grid_runner
from fedcb2o.nn import parameters
from fedcb2o.parallel import _resources

FEDCB2O = Path(sys.executable).with_name("fedcb2o")
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "200",
    "NO_COLOR": "1",
    "TERM": "dumb",
}

TINY: dict[str, Any] = {
    "name": "tiny",
    "seeds": [1000],
    "rounds": 3,
    "data": {"name": "digits"},
    "agents": {
        "benign": 2,
        "malicious": 1,
        "benign_samples": 20,
        "malicious_samples": 30,
        "budget": 3,
    },
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"gamma": 0.05, "batch_size": 8, "local_epochs": 1},
    "algorithm": {"name": "fedcb2o", "alpha": 2.0, "own_model": "trusted", "mixing_factor": 1.0},
    "attack": {"name": "label_flip", "source": 9, "target": 4},
}


def save_time() -> None:
    """Keep what hundreds of runs in this process repeat, and do not wait for the disk."""
    os.fsync = lambda file: None  # no test cuts the power
    typer.main.get_command = functools.cache(typer.main.get_command)
    read_digits = functools.cache(_scikit_learn._read_table)
    _scikit_learn._read_table = lambda: read_digits().copy()


def tiny(**changes: Any) -> dict[str, Any]:
    """Return the tiny experiment with changed keys; a table changes keys of its section."""
    table = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in TINY.items()
    }
    for key, value in changes.items():
        merge = isinstance(value, Mapping) and value.get("name", table[key].get("name")) == table[
            key
        ].get("name")
        table[key] = {**table[key], **value} if merge else value
    return table


def write(path: Path, **changes: Any) -> Path:
    """Write the tiny experiment with changed keys to a file."""
    path.write_text(tomli_w.dumps(tiny(**changes)), encoding="utf-8")
    return path


@dataclass(frozen=True)
class CommandResult:
    """Exit status and output of a command."""

    status: int
    out: str
    err: str

    def one_line(self) -> str:
        """Return the error message, which must be the only line except progress, with status 2."""
        assert self.status == 2, (self.status, self.out, self.err)
        lines = [
            line for line in self.err.splitlines() if not line.startswith(("tiny seed", "tiny: "))
        ]
        assert len(lines) == 1, self.err
        assert lines[0].startswith("Error: "), self.err
        return lines[0].removeprefix("Error: ")


def run_cli(*arguments: object) -> CommandResult:
    """Run `fedcb2o ARGUMENTS` in this process, which saves seconds."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        before = sys.argv
        sys.argv = ["fedcb2o", *map(str, arguments)]
        try:
            cli.main()
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        finally:
            sys.argv = before
    return CommandResult(status, out.getvalue(), err.getvalue())


def command(
    *arguments: object, cwd: Path | None = None, program: str | Path = FEDCB2O, **options: Any
) -> CommandResult:
    """Run `fedcb2o ARGUMENTS` as a process."""
    done = subprocess.run(
        [program, *map(str, arguments)],
        cwd=cwd, env=ENVIRONMENT, text=True, timeout=120,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **options},
    )  # fmt: skip
    return CommandResult(done.returncode, done.stdout or "", done.stderr or "")


class _NoWorkers:
    """A process pool that runs cells of a grid in this process, to save the start of a worker."""

    def reload_if_stale(self) -> None:
        pass

    def terminate(self) -> None:
        pass

    def map_unordered(
        self, count: int, function: Callable[..., Any], tasks: Any, on_result: Any, on_idle: Any
    ) -> None:
        for cell, arguments in tasks:
            on_result(cell, function(*arguments))
            on_idle()


@contextlib.contextmanager
def cells_in_this_process() -> Iterator[None]:
    """Run the cells of grids in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_grid_runner, "current_pool", _NoWorkers)
        yield


class StopError(Exception):
    """Interruption of a run."""


def stop_after(rounds: int) -> Callable[..., None]:
    """Return a watch that interrupts a run after `rounds` rounds."""

    def watch(experiment: Any, seed: int, line: Mapping[str, Any]) -> None:
        if line["round"] >= rounds:
            raise StopError

    return watch


def empty_models(n: int, d: int) -> torch.Tensor:
    """Return zeros for n models of d parameters, with the row stride of a run."""
    return torch.zeros(n, parameters.row_stride(d))[:, :d]


def lines_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the lines of NAME.jsonl of seed 1000."""
    text = (folder / "seed-1000" / f"{name}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def bits(folder: Path, seed: int = 1000) -> dict[str, bytes]:
    """Return the content of a run folder that its seed and settings determine."""
    seeded = folder / f"seed-{seed}"
    tensors = load_file(seeded / "checkpoint.safetensors")
    content = {f"checkpoint {name}": tensor.numpy().tobytes() for name, tensor in tensors.items()}
    for name in ("metrics.jsonl", "pairs.jsonl", "agents.json", "summary.json"):
        content[name] = (seeded / name).read_bytes()
    content["config.toml"] = repr(tomllib.loads((folder / "config.toml").read_text())).encode()
    return content


def set_processors(patch: pytest.MonkeyPatch, count: int) -> None:
    """Simulate a machine with `count` processors."""
    patch.setattr(_resources, "available_processors", lambda: count)


def bits_for_any_workers(folder: Path, experiment: Mapping[str, Any]) -> dict[str, bytes]:
    """Run with one process, and resume after round 1 with two; the bits must be equal.

    The interrupted run has one or two processes. The worker pool stays for later tests.
    """
    run(experiment, out=folder / "one", workers=1)
    expected = bits(folder / "one")
    with pytest.MonkeyPatch.context() as patch:
        set_processors(patch, 2)  # as many as workers
        for first in (2, 1):
            out = folder / f"after {first}"
            with pytest.raises(StopError):
                run(experiment, out=out, workers=first, watch=stop_after(1))
            run(experiment, out=out, workers=2, resume=True)
            assert bits(out) == expected
    return expected


def first_quick(names: Iterable[str]) -> list[Any]:
    """Return parameters of a test; all except the first one are marked as slow."""
    first, *others = names
    return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]

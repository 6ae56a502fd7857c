"""Nodes as real processes on loopback. Tests kill, stop and restart them.

They are forked from a server process that has imported all modules, so that they start at once.
"""

import contextlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tests.peer.waiting import wait_for
from torch import Tensor

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "tests.peer.nodes",
        "fedcb2o.peer.node.node",
        "fedcb2o.data.sets._scikit_learn",
        "sklearn.datasets",
    ]
)


def _run(
    federation: Path,
    identity: Path,
    out: Path,
    simulate: Mapping[str, Any],
    options: Mapping[str, Any],
) -> None:
    """Run one node in its process, with stdout and stderr in the log file next to `out`."""
    from fedcb2o.errors import FedCB2OError
    from fedcb2o.experiments.config.loading import load
    from fedcb2o.peer import read_federation
    from fedcb2o.peer.node.agent import load_member_dataset
    from fedcb2o.peer.node.node import Node

    log = out.with_suffix(".log").open("a", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    prepare = options.pop("prepare", None)  # changes this process for a test
    if prepare is not None:
        prepare()
    inputs = {"simulate": load(simulate)}
    if path := options.pop("data", None):  # an npz file instead of the simulation
        inputs = {"data": load_member_dataset(path, read_federation(federation))}
    try:
        Node(federation, identity, out=out, **inputs, **options).run()
    except FedCB2OError as error:
        print(f"Error: {error}", flush=True)
        os._exit(error.exit_status)
    except KeyboardInterrupt:
        os._exit(130)
    print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}", flush=True)


class Nodes:
    """Node processes of a federation by agent id; the run directories are `folder`/out-ID."""

    def __init__(
        self,
        folder: Path,
        federation: Path,
        identities: Sequence[Path],
        simulate: Mapping[str, Any],
    ) -> None:
        self.folder, self.federation, self.identities, self.simulate = (
            folder,
            federation,
            identities,
            simulate,
        )
        self.processes: dict[int, BaseProcess] = {}

    def out(self, j: int) -> Path:
        return self.folder / f"out-{j}"

    def start(self, *ids: int, **options: Any) -> None:
        """Start nodes, by default all, with options of `Node` and a function `prepare`."""
        for j in ids or range(len(self.identities)):
            work = (
                self.federation,
                self.identities[j],
                self.out(j),
                self.simulate,
                {"gather": 20.0, **options},
            )
            self.processes[j] = FORKED.Process(target=_run, args=work, daemon=True)
            self.processes[j].start()

    def send(self, j: int, number: signal.Signals) -> None:
        """Send a signal to one node."""
        os.kill(self.processes[j].pid or 0, number)

    def wait(self, *ids: int, seconds: float = 120) -> list[int | None]:
        """Return exit statuses, by default of all nodes; None for a node that still runs."""
        until = time.monotonic() + seconds
        agents = ids or tuple(self.processes)
        for j in agents:
            self.processes[j].join(max(0.0, until - time.monotonic()))
        return [self.processes[j].exitcode for j in agents]

    def lines(self, j: int) -> list[dict[str, Any]]:
        """Return the complete lines of a node's rounds.jsonl."""
        path = self.out(j) / "rounds.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def back_up(self, j: int, file: Path) -> None:
        back_up(self.identities[j], self.out(j), file)

    def restore(self, j: int, file: Path) -> None:
        restore(self.identities[j], self.out(j), file)

    def until(self, j: int, n: int) -> None:
        """Wait until a node has finished `n` rounds."""
        wait_for(lambda: len(self.lines(j)) >= n, lambda: self.log(j))

    def log(self, j: int) -> str:
        """Return the output of a node."""
        path = self.out(j).with_suffix(".log")
        return path.read_text() if path.exists() else ""

    def peak(self, j: int) -> int:
        """Return the peak memory in bytes of a node that has ended without an error."""
        max_rss = int(self.log(j).split("peak ")[-1])
        return max_rss if sys.platform == "darwin" else 2**10 * max_rss

    def model(self, j: int) -> Tensor:
        """Return a node's model after its last round."""
        return load_file(self.out(j) / "checkpoint.safetensors")["models"][0]

    def close(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGKILL)
            process.join(10)


def back_up(identity: Path, run: Path, file: Path) -> None:
    """Run `fedcb2o peer backup`."""
    from tests.tiny import run_cli

    result = run_cli("peer", "backup", "--identity", identity, "--run", run, "--out", file)
    assert result.status == 0, result.err


def restore(identity: Path, run: Path, file: Path) -> None:
    """Run `fedcb2o peer restore`."""
    from tests.tiny import run_cli

    result = run_cli("peer", "restore", file, "--identity", identity, "--run", run)
    assert result.status == 0, result.err


@contextlib.contextmanager
def nodes(
    folder: Path, count: int, *, changes: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[Nodes]:
    """Yield `count` nodes of the tiny experiment, not started; all end with the test."""
    from tests.peer import members

    organisations = members.identities(folder, count)
    simulate = {"together": 1, **members.experiment(count, **dict(changes or {}))}
    path = folder / "federation.toml"
    members.federated(organisations, changes=dict(changes or {}), path=path, **options)
    group = Nodes(folder, path, [identity.folder for identity in organisations], simulate)
    try:
        yield group
    finally:
        group.close()

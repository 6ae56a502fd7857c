"""Ray actors, each with a group of agents: calls to them, and transfers of rows between them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from jaxtyping import Int

from fedcb2o.errors import FedCB2OError, RunError
from fedcb2o.federated import Indices
from fedcb2o.parallel._serialization import serialize, unwrap_result
from fedcb2o.ray_backend._code_shipping import localize_paths
from fedcb2o.ray_backend._sharding import Sharding
from fedcb2o.ray_backend._transfers import plan_transfers
from fedcb2o.simulation.rounds import WorkerLostError

POLL_SECONDS = 1.0  # of a wait in Ray's C++, after which Python handles signals

_FULL_ERRORS = (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError)


@dataclass(frozen=True)
class LoanedRows:
    """Rows of other workers that a worker may read.

    For each transfer in `refs`, `positions` are those of the worker's rows in it, and `rows` their
    numbers in the buffer of all agents.
    """

    refs: list[Any] = field(default_factory=list)
    positions: list[Indices] = field(default_factory=list)
    rows: list[Int[np.ndarray, " _k"]] = field(default_factory=list)


@contextlib.contextmanager
def translate_ray_errors() -> Iterator[None]:
    """Raise Ray's errors as errors of this package.

    RunError is one that a second attempt would repeat: a full store, or an error of the work
    itself. WorkerLostError means that Ray lost a process or node that the work needs.
    """
    try:
        yield
    except ray.exceptions.RayError as error:
        cause: BaseException = error
        while isinstance(cause, ray.exceptions.RayTaskError):
            cause = cause.cause
        lines = str(cause).strip().splitlines() or [""]
        text = f"{type(cause).__name__}: {lines[0].strip(' .')}"
        if isinstance(cause, _FULL_ERRORS):
            raise RunError(
                f"Ray's store or disk is full on a node ({text}): take more nodes, fewer agents or "
                "a smaller model, or start nodes by `ray start --object-store-memory BYTES ...`"
            ) from error
        # A second attempt would repeat an error of the work itself.
        if cause is not error and not _is_ray_error(cause):
            raise RunError(f"work on the cluster failed ({text})") from error
        raise WorkerLostError(f"a part of the cluster is lost ({text})") from error


class WorkerActors:
    """The actors of all workers.

    `loaned_bytes` are those of models that workers took of each other since the last reset, and
    `moved_bytes` those of them that went from one node to another. `seconds` is the working time of
    each worker.
    """

    def __init__(
        self,
        handles: Sequence[Any],
        sharding: Sharding,
        nodes: Int[np.ndarray, " workers"],
        row_bytes: int,
    ) -> None:
        self.handles = list(handles)
        self.sharding = sharding
        self.nodes = nodes
        self.row_bytes = row_bytes
        self.loaned_bytes = 0
        self.moved_bytes = 0
        self.seconds = np.zeros(len(self.handles))

    def call(
        self,
        method: Callable[..., Any],
        tasks: Sequence[tuple[Any, ...] | None],
        loans: Sequence[Sequence[Any]] = (),
    ) -> list[Any]:
        """Call a method of `AgentWorker` on every worker that has a task.

        A task is the arguments for a worker, or None; the result is then None, too. `loans` are
        references to transfers, for each worker. The error of a worker is raised as it was, and
        WorkerLostError if a worker is gone.
        """
        results: list[Any] = [None] * len(self.handles)
        with translate_ray_errors():
            waiting = {}
            for index, task in enumerate(tasks):
                if task is not None:
                    extra = [list(loans[index])] if loans else []
                    ref = self.handles[index].execute.remote(serialize((method, task)), *extra)
                    waiting[ref] = index
            # In short waits, between which Python handles signals.
            while waiting:
                ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=POLL_SECONDS)
                for ref, (answer, seconds) in zip(ready, ray.get(ready), strict=True):
                    index = waiting.pop(ref)
                    results[index] = _unwrap(answer)
                    self.seconds[index] += seconds
        return results

    def broadcast(self, method: Callable[..., Any], *task: Any) -> list[Any]:
        """Call a method of `AgentWorker` on all workers with the same arguments."""
        return self.call(method, [task] * len(self.handles))

    def loan_rows(self, wanted: Sequence[Int[np.ndarray, " _r"]]) -> list[LoanedRows]:
        """Put rows into the store for other workers; return their loans.

        None of the rows that a worker wants is its own.
        """
        transfers = plan_transfers(self.sharding.owner, wanted, self.nodes, self.row_bytes)
        refs = self.row_refs([(transfer.owner, transfer.rows) for transfer in transfers])
        loans = [LoanedRows() for _ in self.handles]
        for ref, transfer in zip(refs, transfers, strict=True):
            for worker, positions in transfer.receivers.items():
                loan = loans[worker]
                loan.refs.append(ref)
                loan.positions.append(positions)
                loan.rows.append(transfer.rows[positions])
                self.loaned_bytes += self.row_bytes * len(positions)
            # The workers on one node share a store.
            destinations = {int(self.nodes[worker]) for worker in transfer.receivers}
            destinations -= {int(self.nodes[transfer.owner])}
            self.moved_bytes += self.row_bytes * len(transfer.rows) * len(destinations)
        return loans

    def row_refs(self, transfers: Sequence[tuple[int, Int[np.ndarray, " _k"]]]) -> list[Any]:
        """Put the rows of pairs (owner, rows of that owner) into the store.

        Returns a reference for each pair.
        """
        refs: list[Any] = [None] * len(transfers)
        by_owner: dict[int, list[int]] = {}
        for index, (owner, _) in enumerate(transfers):
            by_owner.setdefault(owner, []).append(index)
        with translate_ray_errors():
            # One call per owner, whatever the number of its transfers.
            for owner, indices in by_owner.items():
                export = self.handles[owner].export_rows.options(num_returns=len(indices))
                result = export.remote(*(self.sharding.row[transfers[k][1]] for k in indices))
                exported = [result] if len(indices) == 1 else result
                for index, ref in zip(indices, exported, strict=True):
                    refs[index] = ref
        return refs

    def get(self, refs: Sequence[Any]) -> list[Any]:
        """Return the content of references."""
        with translate_ray_errors():
            content: list[Any] = ray.get(list(refs))
        return content

    def put(self, content: Any) -> Any:
        """Put content into the store."""
        with translate_ray_errors():
            return ray.put(content)


def _is_ray_error(error: BaseException) -> bool:
    """Return True for Ray's own errors; its base class wraps errors that cannot be sent."""
    return isinstance(error, ray.exceptions.RayError) and type(error) is not ray.exceptions.RayError


def _unwrap(answer: bytes) -> Any:
    """Return the result in an answer; name files of user functions by their local paths."""
    try:
        return unwrap_result(answer)
    except FedCB2OError as error:
        error.args = (localize_paths(str(error)),)
        raise

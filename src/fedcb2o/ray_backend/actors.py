"""Ray actors, a block of agents each: calls to them, and the models that they lend each other."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from jaxtyping import Int

from fedcb2o.errors import FedCB2OError, RunError
from fedcb2o.federated.ragged import Indices
from fedcb2o.parallel.serialization import serialize, unwrap_result
from fedcb2o.ray_backend.code_shipping import localize_paths
from fedcb2o.ray_backend.sharding import Sharding
from fedcb2o.ray_backend.transfers import plan_transfers
from fedcb2o.simulation.rounds import WorkerLostError

_FULL_ERRORS = (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError)
POLL_SECONDS = 1.0  # seconds after which a wait is heard of by Python, so that a signal is


@dataclass(frozen=True)
class LoanedRows:
    """Models that an actor is lent: references to parcels of them, the places in each of those that it takes, and which
    `rows` of all agents' these are."""

    refs: list[Any]
    places: list[Indices]
    rows: list[Int[np.ndarray, " _k"]]


@contextlib.contextmanager
def translate_ray_errors() -> Iterator[None]:
    """Raises LostError where Ray cannot give what was asked for, but RunError where that would fail again: a store that
    is full, or an error in what was done there."""
    try:
        yield
    except ray.exceptions.RayError as error:
        cause: BaseException = error
        while isinstance(cause, ray.exceptions.RayTaskError):
            cause = cause.cause
        told = (str(cause).strip().splitlines() or [""])[0].strip(" .")
        why = f"{type(cause).__name__}: {told}"
        if isinstance(cause, _FULL_ERRORS):
            raise RunError(
                f"Ray's store or disk is full on a node ({why}): take more nodes, fewer agents or a smaller model, or "
                "start nodes by `ray start --object-store-memory BYTES ...`"
            ) from error
        if cause is not error and not _is_ray_error(cause):
            raise RunError(f"work on the cluster failed ({why})") from error
        raise WorkerLostError(f"a part of the cluster is lost ({why})") from error


def _is_ray_error(error: BaseException) -> bool:
    """Whether Ray raised an error of its own there, such as that it lost what was needed; that which it raises for one
    that cannot be sent is of no kind."""
    return isinstance(error, ray.exceptions.RayError) and type(error) is not ray.exceptions.RayError


def _unwrap(answer: bytes) -> Any:
    """What is in an answer, or raises it: of own functions, where they lie here."""
    try:
        return unwrap_result(answer)
    except FedCB2OError as error:
        error.args = (localize_paths(str(error)),)
        raise


class WorkerActors:
    """Some actors, which of some `nodes` each is on, and where the rows of models lie among them.

    Since it was last asked, `lent` is how many bytes of models actors took of each other, `moved` how many of these
    went from one node to another, and `took` how many seconds each actor worked.
    """

    def __init__(
        self, actors: Sequence[Any], shares: Sharding, nodes: Int[np.ndarray, " actors"], size: int
    ) -> None:
        self.actors = list(actors)
        self.sharding = shares
        self.nodes = nodes
        self.size = size
        self.loaned_bytes, self.moved_bytes, self.seconds = 0, 0, np.zeros(len(self.actors))

    def call(
        self,
        method: Callable[..., Any],
        tasks: Sequence[tuple[Any, ...] | None],
        loans: Sequence[Sequence[Any]] = (),
    ) -> list[Any]:
        """What a method of `Holder` finds for the task of each actor, of which some have none.

        Raises what is raised there, and LostError where an actor is gone.
        """
        found = list[Any]([None] * len(self.actors))
        with translate_ray_errors():
            waiting = {
                self.actors[b].do.remote(
                    serialize((method, task)), *([list(loans[b])] if loans else [])
                ): b
                for b, task in enumerate(tasks)
                if task is not None
            }
            while waiting:
                there, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=POLL_SECONDS)
                for ref, (answer, seconds) in zip(there, ray.get(there), strict=True):
                    b = waiting.pop(ref)
                    found[b] = _unwrap(answer)
                    self.seconds[b] += seconds
        return found

    def broadcast(self, method: Callable[..., Any], *task: Any) -> list[Any]:
        """The same for all actors."""
        return self.call(method, [task] * len(self.actors))

    def loan_rows(self, wanted: Sequence[Int[np.ndarray, " _r"]]) -> list[LoanedRows]:
        """Have the actors lend each other rows: those `wanted` by each of them, none of which is its own."""
        made = plan_transfers(self.sharding.owner, wanted, self.nodes, self.size)
        refs = self.row_refs([(parcel.owner, parcel.rows) for parcel in made])
        lent = [LoanedRows([], [], []) for _ in self.actors]
        for ref, parcel in zip(refs, made, strict=True):
            for b, places in parcel.receivers.items():
                lent[b].refs.append(ref)
                lent[b].places.append(places)
                lent[b].rows.append(parcel.rows[places])
                self.loaned_bytes += self.size * len(places)
            nodes = {int(self.nodes[b]) for b in parcel.receivers} - {int(self.nodes[parcel.owner])}
            self.moved_bytes += self.size * len(parcel.rows) * len(nodes)
        return lent

    def row_refs(self, parcels: Sequence[tuple[int, Int[np.ndarray, " _k"]]]) -> list[Any]:
        """References to parcels of rows, each of one owner."""
        found = list[Any]([None] * len(parcels))
        by_owner = dict[int, list[int]]()
        for p, (owner, _) in enumerate(parcels):
            by_owner.setdefault(owner, []).append(p)
        with translate_ray_errors():
            for owner, mine in by_owner.items():
                lend = self.actors[owner].lend.options(num_returns=len(mine))
                given = lend.remote(*(self.sharding.row[parcels[p][1]] for p in mine))
                for p, ref in zip(mine, [given] if len(mine) == 1 else given, strict=True):
                    found[p] = ref
        return found

    def get(self, refs: Sequence[Any]) -> list[Any]:
        """What some references mean."""
        with translate_ray_errors():
            found: list[Any] = ray.get(list(refs))
        return found

    def put(self, content: Any) -> Any:
        """A reference to some content, which is in the store then."""
        with translate_ray_errors():
            return ray.put(content)

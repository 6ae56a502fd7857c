"""Ray actors, a block of agents each: calls to them, and the models that they lend each other."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from jaxtyping import Int

from fedcb2o.errors import FedCB2OError, RunError
from fedcb2o.federated.ragged import Places
from fedcb2o.parallel.process_pool import opened, packed
from fedcb2o.ray_backend.code_shipping import at_home
from fedcb2o.ray_backend.sharding import Shares
from fedcb2o.ray_backend.transfers import parcels
from fedcb2o.simulation.rounds import LostError

FULL = (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError)
LOOK = 1.0  # seconds after which a wait is heard of by Python, so that a signal is


@dataclass(frozen=True)
class Lent:
    """Models that an actor is lent: references to parcels of them, the places in each of those that it takes, and which
    `rows` of all agents' these are."""

    refs: list[Any]
    places: list[Places]
    rows: list[Int[np.ndarray, " _k"]]


@contextlib.contextmanager
def lost() -> Iterator[None]:
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
        if isinstance(cause, FULL):
            raise RunError(
                f"Ray's store or disk is full on a node ({why}): take more nodes, fewer agents or a smaller model, or "
                "start nodes by `ray start --object-store-memory BYTES ...`"
            ) from error
        if cause is not error and not _is_of_ray(cause):
            raise RunError(f"work on the cluster failed ({why})") from error
        raise LostError(f"a part of the cluster is lost ({why})") from error


def _is_of_ray(error: BaseException) -> bool:
    """Whether Ray raised an error of its own there, such as that it lost what was needed; that which it raises for one
    that cannot be sent is of no kind."""
    return isinstance(error, ray.exceptions.RayError) and type(error) is not ray.exceptions.RayError


def _opened(answer: bytes) -> Any:
    """What is in an answer, or raises it: of own functions, where they lie here."""
    try:
        return opened(answer)
    except FedCB2OError as error:
        error.args = (at_home(str(error)),)
        raise


class Actors:
    """Some actors, which of some `nodes` each is on, and where the rows of models lie among them.

    Since it was last asked, `lent` is how many bytes of models actors took of each other, `moved` how many of these
    went from one node to another, and `took` how many seconds each actor worked.
    """

    def __init__(self, actors: Sequence[Any], shares: Shares, nodes: Int[np.ndarray, " actors"], size: int) -> None:
        self.actors, self.shares, self.nodes, self.size = list(actors), shares, nodes, size
        self.lent, self.moved, self.took = 0, 0, np.zeros(len(self.actors))

    def do(
        self, method: Callable[..., Any], tasks: Sequence[tuple[Any, ...] | None], lent: Sequence[Sequence[Any]] = ()
    ) -> list[Any]:
        """What a method of `Holder` finds for the task of each actor, of which some have none.

        Raises what is raised there, and LostError where an actor is gone.
        """
        found = list[Any]([None] * len(self.actors))
        with lost():
            waiting = {
                self.actors[b].do.remote(packed((method, task)), *([list(lent[b])] if lent else [])): b
                for b, task in enumerate(tasks)
                if task is not None
            }
            while waiting:
                there, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=LOOK)
                for ref, (answer, seconds) in zip(there, ray.get(there), strict=True):
                    b = waiting.pop(ref)
                    found[b] = _opened(answer)
                    self.took[b] += seconds
        return found

    def everybody(self, method: Callable[..., Any], *task: Any) -> list[Any]:
        """The same for all actors."""
        return self.do(method, [task] * len(self.actors))

    def lend(self, wanted: Sequence[Int[np.ndarray, " _r"]]) -> list[Lent]:
        """Have the actors lend each other rows: those `wanted` by each of them, none of which is its own."""
        made = parcels(self.shares.owner, wanted, self.nodes, self.size)
        refs = self.refs([(parcel.owner, parcel.rows) for parcel in made])
        lent = [Lent([], [], []) for _ in self.actors]
        for ref, parcel in zip(refs, made, strict=True):
            for b, places in parcel.takers.items():
                lent[b].refs.append(ref)
                lent[b].places.append(places)
                lent[b].rows.append(parcel.rows[places])
                self.lent += self.size * len(places)
            nodes = {int(self.nodes[b]) for b in parcel.takers} - {int(self.nodes[parcel.owner])}
            self.moved += self.size * len(parcel.rows) * len(nodes)
        return lent

    def refs(self, parcels: Sequence[tuple[int, Int[np.ndarray, " _k"]]]) -> list[Any]:
        """References to parcels of rows, each of one owner."""
        found, by_owner = list[Any]([None] * len(parcels)), dict[int, list[int]]()
        for p, (owner, _) in enumerate(parcels):
            by_owner.setdefault(owner, []).append(p)
        with lost():
            for owner, mine in by_owner.items():
                lend = self.actors[owner].lend.options(num_returns=len(mine))
                given = lend.remote(*(self.shares.row[parcels[p][1]] for p in mine))
                for p, ref in zip(mine, [given] if len(mine) == 1 else given, strict=True):
                    found[p] = ref
        return found

    def get(self, refs: Sequence[Any]) -> list[Any]:
        """What some references mean."""
        with lost():
            found: list[Any] = ray.get(list(refs))
        return found

    def put(self, content: Any) -> Any:
        """A reference to some content, which is in the store then."""
        with lost():
            return ray.put(content)

"""In which parcels rows go from actor to actor: each node gets those that its actors want, once, and no other."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Shaped

from fedcb2o.federated.ragged import Indices

MAX_TRANSFER_BYTES = 2**24  # bytes of an object in the store: one large model, or many small ones
OBJECT_OVERHEAD_BYTES = (
    2**22
)  # bytes whose copying takes as long as making an object and finding it, measured


@dataclass(frozen=True)
class RowTransfer:
    """Some rows of one actor, its `owner`, and the places among these of those that each of the `takers` takes."""

    owner: int
    rows: Int[np.ndarray, " _k"]
    receivers: dict[int, Indices]


def plan_transfers(
    owner: Int[np.ndarray, " rows"],
    wanted: Sequence[Int[np.ndarray, " _r"]],
    nodes: Int[np.ndarray, " actors"],
    size: int,
) -> list[RowTransfer]:
    """The rows of others that each actor wants, in parcels. The actors on one of the `nodes` share a store; a row has
    so many bytes.

    Rows that the same nodes want are put into the store once where they are worth an object, as a large model is; the
    others once for each node, so that an owner has few parcels however many nodes there are.
    """
    asked = np.unique(np.concatenate(wanted))
    wants = np.stack([np.isin(asked, rows) for rows in wanted])
    goes = np.stack([wants[nodes == node].any(0) for node in range(nodes.max() + 1)])
    of = owner[asked]
    todo = list[tuple[Indices, list[int]]]()
    for some in _group_by_keys(np.arange(len(asked)), of, *np.packbits(goes, axis=0)):
        if len(some) * size >= OBJECT_OVERHEAD_BYTES:
            todo.append((some, np.flatnonzero(goes[:, some[0]]).tolist()))
            goes[:, some] = False
    for node, rows in enumerate(goes):
        todo += [(some, [node]) for some in _group_by_keys(np.flatnonzero(rows), of)]
    most = max(1, MAX_TRANSFER_BYTES // size)
    found = []
    for group, to in todo:
        there = np.flatnonzero(np.isin(nodes, to))
        for some in (group[k : k + most] for k in range(0, len(group), most)):
            takers, places = wants[np.ix_(there, some)].nonzero()
            each = np.split(places, np.flatnonzero(np.diff(takers)) + 1)
            found.append(
                RowTransfer(
                    int(of[some[0]]),
                    asked[some],
                    dict(zip(there[np.unique(takers)].tolist(), each, strict=True)),
                )
            )
    return found


def _group_by_keys(places: Indices, *keys: Shaped[np.ndarray, " _r"]) -> list[Indices]:
    """Some places in groups of those whose keys are the same."""
    keys = tuple(key[places] for key in keys)
    order = np.lexsort(keys)
    last = np.any([np.diff(key[order]) != 0 for key in keys], axis=0)
    return np.split(places[order], np.flatnonzero(last) + 1) if len(places) else []

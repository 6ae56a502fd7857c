"""Plan of the transfers of model rows between workers: each node receives each row at most once.

>>> plan = plan_transfers(np.array([0, 0, 1]), [np.array([2]), np.array([0])], np.array([0, 1]), 4)
>>> [(transfer.owner, transfer.rows.tolist(), list(transfer.receivers)) for transfer in plan]
[(1, [2], [0]), (0, [0], [1])]
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int, Shaped

from fedcb2o.federated import Indices

MAX_TRANSFER_BYTES = 2**24  # of an object in the store: one large model, or many small ones
OBJECT_OVERHEAD_BYTES = 2**22  # whose copying takes as long as creating and finding an object


@dataclass(frozen=True)
class RowTransfer:
    """Rows of one worker that are put into the store as one object.

    `rows` are numbers in the buffer of all agents. `receivers` has the positions in `rows` that
    each receiving worker takes.
    """

    owner: int
    rows: Int[np.ndarray, " _k"]
    receivers: dict[int, Indices]


def plan_transfers(
    owner: Int[np.ndarray, " rows"],
    wanted: Sequence[Int[np.ndarray, " _r"]],
    nodes: Int[np.ndarray, " workers"],
    row_bytes: int,
) -> list[RowTransfer]:
    """Plan the transfers of all rows that workers want of each other.

    `owner` is the worker that has each row, and `nodes` the node of each worker. The workers on one
    node share a store. None of the rows that a worker wants is its own.
    """
    requested = np.unique(np.concatenate(wanted))
    wants = np.stack([np.isin(requested, rows) for rows in wanted])
    max_rows = max(1, MAX_TRANSFER_BYTES // row_bytes)
    transfers = []
    for group, destinations in _destinations(owner[requested], wants, nodes, row_bytes):
        on_nodes = np.flatnonzero(np.isin(nodes, destinations))
        for start in range(0, len(group), max_rows):
            part = group[start : start + max_rows]
            indices, positions = wants[np.ix_(on_nodes, part)].nonzero()
            by_worker = np.split(positions, np.flatnonzero(np.diff(indices)) + 1)
            workers = on_nodes[np.unique(indices)].tolist()
            receivers = dict(zip(workers, by_worker, strict=True))
            sender = int(owner[requested[part[0]]])
            transfers.append(RowTransfer(sender, requested[part], receivers))
    return transfers


def _destinations(
    owner: Int[np.ndarray, " r"],
    wants: Bool[np.ndarray, "workers r"],
    nodes: Int[np.ndarray, " workers"],
    row_bytes: int,
) -> list[tuple[Indices, list[int]]]:
    """Return groups of positions of one owner, each with the nodes that it goes to."""
    goes = np.stack([wants[nodes == node].any(0) for node in range(nodes.max() + 1)])
    groups: list[tuple[Indices, list[int]]] = []
    for positions in _group_by_keys(np.arange(len(owner)), owner, *np.packbits(goes, axis=0)):
        # Rows that several nodes want are put into the store once if they are worth an object, as a
        # large model is.
        if len(positions) * row_bytes >= OBJECT_OVERHEAD_BYTES:
            groups.append((positions, np.flatnonzero(goes[:, positions[0]]).tolist()))
            goes[:, positions] = False

    # Other rows are put into the store once for each node, so that an owner has few transfers
    # however many nodes there are.
    for node, rows in enumerate(goes):
        for positions in _group_by_keys(np.flatnonzero(rows), owner):
            groups.append((positions, [node]))
    return groups


def _group_by_keys(places: Indices, *keys: Shaped[np.ndarray, " _r"]) -> list[Indices]:
    """Return the places in groups of equal keys."""
    if not len(places):
        return []
    keys = tuple(key[places] for key in keys)
    order = np.lexsort(keys)
    is_last = np.any([np.diff(key[order]) != 0 for key in keys], axis=0)
    return np.split(places[order], np.flatnonzero(is_last) + 1)

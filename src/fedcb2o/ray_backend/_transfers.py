"""Plan of the transfers of model rows between workers: each node receives each row at most once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

MAX_TRANSFER_BYTES = 2**24  # of an object in the store with several rows
OBJECT_OVERHEAD_BYTES = 2**22  # whose copying takes as long as creating and finding an object


@dataclass(frozen=True)
class RowTransfer:
    """Rows of one worker that are put into the store as one object.

    `rows` are numbers in the buffer of all agents. Each of the receiving workers takes some.
    """

    owner: int
    rows: Int[np.ndarray, " _k"]
    receivers: list[int]


def plan_transfers(
    owner: Int[np.ndarray, " rows"],
    wanted: Sequence[Int[np.ndarray, " _r"]],
    nodes: Int[np.ndarray, " workers"],
    row_bytes: int,
) -> list[RowTransfer]:
    """Plan the transfers of all rows that workers want of each other.

    `owner` is the worker that has each row, and `nodes` the node of each worker. None of the rows
    that a worker wants is its own.
    """
    # A large row is an object of its own, which Ray copies once to each node that reads it. Small
    # rows share objects, one or more for each node, so that no node receives rows of others.
    is_large = row_bytes >= OBJECT_OVERHEAD_BYTES
    max_rows = 1 if is_large else MAX_TRANSFER_BYTES // row_bytes
    destinations = [nodes >= 0] if is_large else [nodes == node for node in np.unique(nodes)]
    transfers = []
    for is_destination in destinations:
        workers = np.flatnonzero(is_destination).tolist()
        requested = np.unique(np.concatenate([wanted[worker] for worker in workers]))
        for sender in np.unique(owner[requested]).tolist():
            rows = requested[owner[requested] == sender]
            is_wanted = np.stack([np.isin(rows, wanted[worker]) for worker in workers])
            for start in range(0, len(rows), max_rows):
                part = slice(start, start + max_rows)
                takes_some = np.flatnonzero(is_wanted[:, part].any(1)).tolist()
                receivers = [workers[k] for k in takes_some]
                transfers.append(RowTransfer(sender, rows[part], receivers))
    return transfers

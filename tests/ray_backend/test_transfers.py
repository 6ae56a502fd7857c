"""Transfers between nodes: the requested rows, in few objects."""

import numpy as np
import pytest

from fedcb2o.ray_backend._transfers import MAX_TRANSFER_BYTES, OBJECT_OVERHEAD_BYTES, plan_transfers

LARGE, SMALL = 4 * 6_572_975, 4 * 210
OWNER = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])  # three actors with three rows each


def planned(requested, nodes, size):
    """Return the owner, the rows and the rows per receiver of each planned transfer."""
    return [
        (
            transfer.owner,
            transfer.rows.tolist(),
            {b: np.intersect1d(transfer.rows, requested[b]).tolist() for b in transfer.receivers},
        )
        for transfer in plan_transfers(
            OWNER, [np.array(rows, np.int64) for rows in requested], np.array(nodes), size
        )
    ]


def test_a_large_model_is_put_once_for_all_receivers():
    assert planned([[3, 6], [6, 0], [3]], [0, 1, 2], LARGE) == [
        (0, [0], {1: [0]}),
        (1, [3], {0: [3], 2: [3]}),
        (2, [6], {0: [6], 1: [6]}),
    ]


def test_small_models_are_put_once_per_receiving_node():
    """Actors 0 and 1 share a node; each reads its own rows of the transfer."""
    requested = [[3, 4, 6, 7], [0, 7, 8], [0, 1, 3]]
    assert planned(requested, [0, 0, 1], SMALL) == [
        (0, [0], {1: [0]}),
        (1, [3, 4], {0: [3, 4]}),
        (2, [6, 7, 8], {0: [6, 7], 1: [7, 8]}),
        (0, [0, 1], {2: [0, 1]}),
        (1, [3], {2: [3]}),
    ]


def test_many_small_models_for_a_node_share_objects():
    owner, size = np.repeat([0, 1, 2], 1000), MAX_TRANSFER_BYTES // 500
    requested = [np.zeros(0, np.int64), np.arange(0, 800), np.arange(200, 1000)]
    transfers = plan_transfers(owner, requested, np.array([0, 1, 2]), size)
    assert [
        (transfer.owner, len(transfer.rows), sorted(transfer.receivers)) for transfer in transfers
    ] == [(0, 500, [1]), (0, 300, [1]), (0, 500, [2]), (0, 300, [2])]


def test_no_requests_give_no_transfers():
    assert planned([[], [], []], [0, 1, 1], LARGE) == []


@pytest.mark.parametrize("size", [SMALL, 2**16, 2**21, LARGE])
@pytest.mark.parametrize(("actors", "per_node"), [(2, 1), (7, 2), (64, 1), (64, 16)])
def test_each_node_receives_the_requested_rows_once(actors, per_node, size):
    draw, rows = np.random.default_rng(0), 20 * actors
    owner, nodes = np.sort(draw.integers(actors, size=rows)), np.arange(actors) // per_node
    requested = [np.flatnonzero((owner != b) & (draw.random(rows) < 0.2)) for b in range(actors)]
    transfers = plan_transfers(owner, requested, nodes, size)
    for b in range(actors):
        received = [
            np.intersect1d(transfer.rows, requested[b])
            for transfer in transfers
            if b in transfer.receivers
        ]
        np.testing.assert_array_equal(np.sort(np.concatenate([[], *received])), requested[b])
    for node in range(nodes.max() + 1):
        actors_of_node = np.flatnonzero(nodes == node)
        received_by_node = np.concatenate(
            [
                [],
                *(
                    transfer.rows
                    for transfer in transfers
                    if set(actors_of_node) & set(transfer.receivers)
                ),
            ]
        )
        expected = np.unique(np.concatenate([requested[b] for b in actors_of_node]))
        np.testing.assert_array_equal(np.sort(received_by_node), expected)
    for transfer in transfers:
        assert (owner[transfer.rows] == transfer.owner).all()
        assert len(transfer.rows) * size <= max(MAX_TRANSFER_BYTES, size)
        assert all(np.isin(transfer.rows, requested[b]).any() for b in transfer.receivers)
    total = size * sum(len(transfer.rows) for transfer in transfers)
    assert len(transfers) <= actors * (nodes.max() + 1) + 2 * total // OBJECT_OVERHEAD_BYTES

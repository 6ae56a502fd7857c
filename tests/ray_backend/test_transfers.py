"""What goes from node to node is what was asked for, in few objects."""

import numpy as np
import pytest

from fedcb2o.ray_backend._transfers import MAX_TRANSFER_BYTES, OBJECT_OVERHEAD_BYTES, plan_transfers

LARGE, SMALL = 4 * 6_572_975, 4 * 210
OWNER = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])  # three actors with three rows each


def told(wanted, nodes, size):
    """Each parcel as its owner, its rows, and the rows that each taker takes."""
    return [
        (
            made.owner,
            made.rows.tolist(),
            {b: made.rows[places].tolist() for b, places in made.receivers.items()},
        )
        for made in plan_transfers(
            OWNER, [np.array(rows, np.int64) for rows in wanted], np.array(nodes), size
        )
    ]


def test_a_large_model_is_put_once_for_all_who_want_it():
    assert told([[3, 6], [6, 0], [3]], [0, 1, 2], LARGE) == [
        (0, [0], {1: [0]}),
        (1, [3], {0: [3], 2: [3]}),
        (2, [6], {0: [6], 1: [6]}),
    ]


def test_small_models_are_put_once_for_each_node_that_wants_them():
    """Actors 0 and 1 share a node, and what each takes of a parcel for it is its own affair."""
    wanted = [[3, 4, 6, 7], [0, 7, 8], [0, 1, 3]]
    assert told(wanted, [0, 0, 1], SMALL) == [
        (0, [0], {1: [0]}),
        (1, [3, 4], {0: [3, 4]}),
        (2, [6, 7, 8], {0: [6, 7], 1: [7, 8]}),
        (0, [0, 1], {2: [0, 1]}),
        (1, [3], {2: [3]}),
    ]


def test_many_small_models_for_the_same_nodes_are_worth_an_object():
    owner, size = np.repeat([0, 1, 2], 1000), OBJECT_OVERHEAD_BYTES // 500
    wanted = [np.zeros(0, np.int64), np.arange(0, 800), np.arange(200, 1000)]
    made = plan_transfers(owner, wanted, np.array([0, 1, 2]), size)
    assert [(each.owner, len(each.rows), sorted(each.receivers)) for each in made] == [
        (0, 600, [1, 2]),
        (0, 200, [1]),
        (0, 200, [2]),
    ]


def test_nobody_wants_anything():
    assert told([[], [], []], [0, 1, 1], LARGE) == []


@pytest.mark.parametrize("size", [SMALL, 2**16, 2**21, LARGE])
@pytest.mark.parametrize(("actors", "per_node"), [(2, 1), (7, 2), (64, 1), (64, 16)])
def test_each_node_gets_what_its_actors_want_and_no_row_twice(actors, per_node, size):
    draw, rows = np.random.default_rng(0), 20 * actors
    owner, nodes = np.sort(draw.integers(actors, size=rows)), np.arange(actors) // per_node
    wanted = [np.flatnonzero((owner != b) & (draw.random(rows) < 0.2)) for b in range(actors)]
    made = plan_transfers(owner, wanted, nodes, size)
    for b in range(actors):
        taken = [each.rows[each.receivers[b]] for each in made if b in each.receivers]
        np.testing.assert_array_equal(np.sort(np.concatenate([[], *taken])), wanted[b])
    for node in range(nodes.max() + 1):
        mine = np.flatnonzero(nodes == node)
        came = np.concatenate(
            [[], *(each.rows for each in made if set(mine) & set(each.receivers))]
        )
        asked = np.unique(np.concatenate([wanted[b] for b in mine]))
        np.testing.assert_array_equal(np.sort(came), asked)
    for each in made:
        assert (owner[each.rows] == each.owner).all()
        assert len(each.rows) * size <= max(MAX_TRANSFER_BYTES, size)
        assert all(len(places) for places in each.receivers.values())
    total = size * sum(len(each.rows) for each in made)
    assert len(made) <= actors * (nodes.max() + 1) + 2 * total // OBJECT_OVERHEAD_BYTES

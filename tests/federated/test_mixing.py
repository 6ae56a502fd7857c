"""Line 7: theta <- W theta against plain loops, and what is not finite where it has no weight."""

import numpy as np
import torch
from tests import agents as ours
from tests.agents import BAD, CLUSTER, GOOD

from fedcb2o.federated import (
    Attack,
    Decisions,
    Inbox,
    Ragged,
    algorithms,
    attacks,
    dense_product,
    make_outbox,
    mix_,
    mixing_matrix,
)
from fedcb2o.rng import stream


def test_mixing_is_the_plain_loop():
    """Rows beyond the agents': what agent j mixes is by its rows, not by who sent it."""
    attack = Attack(craft=attacks.dissensus, threat=attacks.dissensus.threat)
    block = ours.together(
        algorithms.fedcb2o(own_model="judged", mixing_factor=0.7), attack=attack
    ).group
    draw, n = stream(3, "pool"), len(CLUSTER)
    block.models[:] = torch.from_numpy(draw.normal(size=block.models.shape)).float()
    ids = Ragged.from_arrays([draw.permutation(n)[:4] for _ in range(n)])
    rows = make_outbox(block, 0).rows(ids.values, ids.row_ids)
    for j, i, row in zip(ids.row_ids, ids.values, rows, strict=True):
        assert (row >= n) == (j in GOOD and i in BAD)
    weights = draw.dirichlet([1.0] * 5, size=n)
    choices = Decisions.empty(
        np.arange(n), Ragged.empty(n), Inbox(ids, rows, np.ones(4 * n), np.zeros(4 * n, np.int64))
    )
    choices.weights[:], choices.own_weight[:], choices.factor[:] = (
        weights[:, :4].flatten(),
        weights[:, 4],
        0.7,
    )
    before = block.models.clone()
    mixed = mixing_matrix(choices, block.layout.own)
    assert len(block.models) == n + len(BAD) * len(GOOD)
    for a in range(0, block.models.shape[1], 10):  # tiles of ten columns
        mix_(block.models, mixed, a, min(a + 10, block.models.shape[1]))
    for j in range(n):
        m = weights[j, 4] * before[j]
        for row, weight in zip(Ragged(rows, ids.sizes)[j], weights[j, :4], strict=True):
            m = m + weight * before[row]
        torch.testing.assert_close(block.models[j], 0.3 * before[j] + 0.7 * m, rtol=1e-5, atol=1e-6)
    assert block.models[n:].equal(before[n:])


def test_a_weight_of_zero_stops_a_nan():
    pool = torch.tensor([[1.0, 2.0, 3.0], [torch.nan] * 3, [3.0, 4.0, 5.0]])
    ids, weights = [[1, 2], [], [0, 1]], [[1e-60, 1.0], [], [0.5, 0.0]]
    received = Ragged.from_arrays([np.array(each, np.int64) for each in ids])
    inbox = Inbox(received, received.values, np.ones(4), np.zeros(4, np.int64))
    choices = Decisions.empty(np.arange(3), Ragged.empty(3), inbox)
    choices.weights[:], choices.own_weight[2], choices.factor[0] = np.concatenate(weights), 0.5, 0.5
    mix_(pool, mixing_matrix(choices, np.arange(3)), 0, 3)
    assert pool[0].tolist() == [2.0, 3.0, 4.0]  # half of itself, half of the third
    assert pool[2].tolist() == [2.0, 3.0, 4.0]
    assert pool[1].isnan().all()


def test_what_is_not_finite_spoils_those_alone_who_have_a_weight_on_it():
    w = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.0, 0.0, 1.0]])
    block = torch.tensor([[torch.nan, 1.0], [2.0, 3.0], [4.0, torch.inf]])
    found = dense_product(w, block)
    torch.testing.assert_close(found[:, 0], torch.tensor([torch.nan, 3.0, 4.0]), equal_nan=True)
    assert float(found[0, 1]) == 1.0
    assert not found[1:, 1].isfinite().any()

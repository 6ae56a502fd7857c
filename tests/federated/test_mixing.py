"""Line 7, theta <- W theta, against plain loops, and models that are not finite."""

import numpy as np
import torch
from tests import agents as ours
from tests.agents import BENIGN_IDS, CLUSTER, MALICIOUS_IDS

from fedcb2o.federated import algorithms, attacks
from fedcb2o.federated.adversary import Attack
from fedcb2o.federated.decisions import Decisions, Inbox
from fedcb2o.federated.mixing import MixingMatrix, dense_product, mix_, mixing_matrix
from fedcb2o.federated.publishing import deceptive_outbox, make_outbox
from fedcb2o.federated.ragged import Ragged
from fedcb2o.federated.types import Reduction
from fedcb2o.rng import stream


def test_mixing_equals_a_plain_loop():
    """Rows beyond the agents' are crafted models; each agent mixes the rows that it received."""
    attack = Attack(craft=attacks.dissensus, threat=attacks.dissensus.threat)
    engine_group = ours.local_engine(
        algorithms.fedcb2o(own_model="judged", mixing_factor=0.7), attack=attack
    ).group
    draw, n = stream(3, "pool"), len(CLUSTER)
    engine_group.models[:] = torch.from_numpy(draw.normal(size=engine_group.models.shape)).float()
    ids = Ragged.from_arrays([draw.permutation(n)[:4] for _ in range(n)])
    outbox = deceptive_outbox(engine_group, make_outbox(engine_group, np.ones(n, bool)), 0, {})
    rows, _ = outbox.sent(ids.values, ids.list_index)
    for j, i, row in zip(ids.list_index, ids.values, rows, strict=True):
        assert (row >= n) == (j in BENIGN_IDS and i in MALICIOUS_IDS)
    weights = draw.dirichlet([1.0] * 5, size=n)
    decisions = Decisions.empty(
        np.arange(n), Ragged.empty(n), Inbox(ids, rows, np.ones(4 * n), np.zeros(4 * n, np.int64))
    )
    decisions.weights[:] = weights[:, :4].flatten()
    decisions.own_weight[:] = weights[:, 4]
    decisions.factor[:] = 0.7
    before = engine_group.models.clone()
    matrix = mixing_matrix(decisions, engine_group.layout.own)
    assert len(engine_group.models) == n + len(MALICIOUS_IDS) * len(BENIGN_IDS)
    for a in range(0, engine_group.models.shape[1], 10):  # tiles of ten columns
        mix_(engine_group.models, matrix, a, min(a + 10, engine_group.models.shape[1]))
    for j in range(n):
        m = weights[j, 4] * before[j]
        for row, weight in zip(Ragged(rows, ids.sizes)[j], weights[j, :4], strict=True):
            m = m + weight * before[row]
        expected = 0.3 * before[j] + 0.7 * m
        torch.testing.assert_close(engine_group.models[j], expected, rtol=1e-5, atol=1e-6)
    assert engine_group.models[n:].equal(before[n:])


def test_a_weight_of_zero_excludes_a_model_of_nan():
    models = torch.tensor([[1.0, 2.0, 3.0], [torch.nan] * 3, [3.0, 4.0, 5.0]])
    ids, weights = [[1, 2], [], [0, 1]], [[1e-60, 1.0], [], [0.5, 0.0]]
    received = Ragged.from_arrays([np.array(row, np.int64) for row in ids])
    inbox = Inbox(received, received.values, np.ones(4), np.zeros(4, np.int64))
    decisions = Decisions.empty(np.arange(3), Ragged.empty(3), inbox)
    decisions.weights[:] = np.concatenate(weights)
    decisions.own_weight[2] = 0.5
    decisions.factor[0] = 0.5
    mix_(models, mixing_matrix(decisions, np.arange(3)), 0, 3)
    assert models[0].tolist() == [2.0, 3.0, 4.0]  # half of itself, half of the third
    assert models[2].tolist() == [2.0, 3.0, 4.0]
    assert models[1].isnan().all()


def test_a_matrix_of_parts_has_their_rows_and_reductions():
    median = Reduction(torch.tensor([0, 1, 2]), lambda x: x.median(0).values)
    first = MixingMatrix(np.array([2]), np.array([0, 1]), np.array([1]), np.ones(1, np.float32))
    second = MixingMatrix(
        np.array([0, 1]),
        np.array([0, 2, 3]),
        np.array([0, 2, 1]),
        np.array([0.5, 0.5, 1.0], np.float32),
        {1: (median, 0.5)},
    )
    models = torch.tensor([[1.0], [3.0], [6.0]])
    mix_(models, MixingMatrix.concatenate([first, second]), 0, 1)
    # Half of rows 0 and 2; row 1 half-way to the median, which is 3; row 1.
    assert models.tolist() == [[3.5], [3.0], [3.0]]


def test_a_value_that_is_not_finite_reaches_only_rows_with_a_weight_on_it():
    w = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.0, 0.0, 1.0]])
    models = torch.tensor([[torch.nan, 1.0], [2.0, 3.0], [4.0, torch.inf]])
    product = dense_product(w, models)
    torch.testing.assert_close(product[:, 0], torch.tensor([torch.nan, 3.0, 4.0]), equal_nan=True)
    assert float(product[0, 1]) == 1.0
    assert not product[1:, 1].isfinite().any()

"""Sentinel: similarities and norms layer by layer, weights by hand, histories, and the scaled
average."""

import math

import pytest
import torch
from tests import views
from tests.views import local, models, no_losses, received

from fedcb2o.errors import ConfigError
from fedcb2o.federated import Contacts, CriterionInput
from fedcb2o.federated.aggregation._sentinel import layer_statistics, sentinel

LAYERS = (torch.Size([2, 2]), torch.Size([2]))
OWN = torch.tensor([1.0, 0.0, 0.0, 2.0, 0.0, 3.0])


def losses_of(*means):
    m = len(means)
    mean = torch.tensor(means, dtype=torch.float64)
    return views.losses(mean, torch.zeros(m, 2).double(), torch.ones(2, dtype=torch.bool))


def seen_by(pool, ids, losses, own_loss, met=(), layers=LAYERS):
    """The last row is the agent's own model."""
    me = len(pool) - 1
    contacts = Contacts(
        torch.tensor(met, dtype=torch.int64), torch.ones(len(met), dtype=torch.float64)
    )
    knows = local(contacts_of=lambda: contacts, layer_shapes=layers)
    mine = received(torch.tensor([me]))
    return CriterionInput(
        0,
        pool,
        losses_of(*losses),
        losses_of(own_loss),
        received(torch.tensor(ids)),
        mine,
        no_losses,
        knows,
    )


def test_layers_by_hand():
    # Rows of the first layer: cosines 1 and 0, then of the second 0.8; the other way round below 0,
    # which is 0.
    pool = torch.stack([torch.tensor([2.0, 0.0, 5.0, 0.0, 3.0, 4.0]), -OWN, OWN])
    alike, norms = layer_statistics(seen_by(pool, [0, 1], [0.0, 0.0], 0.0), torch.tensor([0, 1, 2]))
    assert alike.tolist() == pytest.approx([(0.5 + 0.8) / 2, 0, 1])
    assert norms[0].tolist() == pytest.approx([math.sqrt(29), 5])
    assert norms[2].tolist() == pytest.approx([math.sqrt(5), 3])


def test_weights_and_scaled_layers_by_hand():
    # Alike all but the second; of the others one twice as lossy, one as good, one so bad that it is
    # not trusted.
    pool = torch.stack([2 * OWN, -OWN, 0.5 * OWN, OWN, OWN])
    ids, losses = [0, 1, 2, 3], [1.0, 0.1, 0.3, 2.0]
    state, decided = sentinel({}, seen_by(pool, ids, losses, 0.5))
    raw = torch.tensor(
        [math.exp(-1.0), 1.0, 0.0, 1.0]
    ).double()  # of 0, 2, 3 and the own one: exp(-3) is below 0.1
    expected = raw / raw.sum()
    assert decided.outcome.rows.tolist() == [0, 2, 3, 4]
    assert decided.outcome.weights.tolist() == pytest.approx(expected.tolist())
    # The first, twice as large, is scaled down to the own one, and the smaller one is left as it
    # is.
    average = float(expected[0] + 0.5 * expected[1] + expected[3]) * OWN
    torch.testing.assert_close(decided.outcome.apply_to_buffer(pool, 0), average)
    for a, b in ((0, 3), (3, 5), (5, 6), (2, 6)):
        torch.testing.assert_close(decided.outcome.apply_to_buffer(pool[:, a:b], a), average[a:b])
    assert state["ids"].tolist() == [0, 2, 3, 4]
    assert state["sums"].tolist() == [[1.0, 0.3, 2.0, 0.5], [1, 1, 1, 1]]


def test_each_layer_is_scaled_by_itself():
    other = torch.cat([3 * OWN[:4], 0.5 * OWN[4:]])
    pool = torch.stack([other, OWN])
    _, decided = sentinel({}, seen_by(pool, [0], [0.5], 0.5))
    torch.testing.assert_close(
        decided.outcome.apply_to_buffer(pool, 0), torch.cat([OWN[:4], 0.75 * OWN[4:]])
    )


def test_losses_are_averaged_over_the_rounds_in_which_a_peer_passed():
    pool = torch.stack([OWN, OWN, OWN])
    state, _ = sentinel({}, seen_by(pool, [0, 1], [0.4, 0.9], 0.2))
    state, decided = sentinel(state, seen_by(pool, [0], [0.8], 0.4, [0, 1]))
    # 0: 0.6 on average, the own one 0.3: exp(-1).
    assert decided.outcome.weights.tolist() == pytest.approx(
        [math.exp(-1) / (1 + math.exp(-1)), 1 / (1 + math.exp(-1))]
    )
    assert state["sums"][0].tolist() == pytest.approx([1.2, 0.9, 0.6])
    # Under a new name, nobody has met 1.
    state, _ = sentinel(state, seen_by(pool, [1], [0.3], 0.3, [0]))
    assert state["sums"].tolist() == [pytest.approx([1.2, 0.3, 0.9]), [2, 1, 3]]


def test_who_is_alone_drew_itself_or_knows_nothing():
    pool = torch.stack([-OWN, OWN])
    _, decided = sentinel({}, seen_by(pool, [0], [0.1], 0.5))
    torch.testing.assert_close(decided.outcome.apply_to_buffer(pool, 0), OWN)
    _, decided = sentinel({}, seen_by(pool, [1], [0.5], 0.5))
    assert decided.outcome.weights.tolist() == [1]
    assert sentinel({}, seen_by(pool, [0], [0.1], math.nan))[1].tolist() == [0, 0]
    theirs, me = (received(torch.tensor([i])) for i in (0, 1))
    with pytest.raises(ConfigError, match="set `needs_losses` = true"):
        sentinel({}, CriterionInput(0, models(2, 6), None, None, theirs, me, no_losses, None))

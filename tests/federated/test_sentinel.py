"""Sentinel by hand: similarities of layers, weights, histories, the scaled average."""

import math

import pytest
import torch
from tests import views
from tests.views import rule_input

from fedcb2o.errors import ConfigError
from fedcb2o.federated.aggregation import sentinel

LAYERS = (torch.Size([2, 2]), torch.Size([2]))
OWN = torch.tensor([1.0, 0.0, 0.0, 2.0, 0.0, 3.0])


def losses_of(*means):
    m = len(means)
    mean = torch.tensor(means, dtype=torch.float64)
    return views.losses(mean, torch.zeros(m, 2).double(), torch.ones(2, dtype=torch.bool))


def inputs_of(buffer, ids, losses, own_loss, contact_ids=(), layers=LAYERS):
    """Return the criterion inputs of an agent; the last row is its own model."""
    known = losses_of(*losses), losses_of(own_loss)
    own = len(buffer) - 1
    return rule_input(buffer, ids, own, losses=known, contact_ids=contact_ids, layer_shapes=layers)


@pytest.mark.parametrize(("similarity", "kept"), [(0.649, [0, 2]), (0.651, [2])])
def test_the_similarity_is_the_mean_cosine_of_the_layers(similarity, kept):
    # Model 0 has the cosines 1 and 0 in the rows of the first layer, and 0.8 in the second:
    # (0.5 + 0.8) / 2. The cosines of model 1 are negative, which counts as 0.
    buffer = torch.stack([torch.tensor([2.0, 0.0, 5.0, 0.0, 3.0, 4.0]), -OWN, OWN])
    inputs = inputs_of(buffer, [0, 1], [0.5, 0.5], 0.5)
    _, output = sentinel({}, inputs, similarity=similarity)
    assert output.outcome.rows.tolist() == kept


def test_weights_and_scaled_layers_by_hand():
    # Model 1 is not similar. Of the others, model 0 has twice the agent's loss, model 2 less.
    # Model 3 has so much more that it is not trusted.
    buffer = torch.stack([2 * OWN, -OWN, 0.5 * OWN, OWN, OWN])
    ids, losses = [0, 1, 2, 3], [1.0, 0.1, 0.3, 2.0]
    state, output = sentinel({}, inputs_of(buffer, ids, losses, 0.5))
    # of models 0, 2, 3 and the agent's: exp(-3) is below 0.1
    raw = torch.tensor([math.exp(-1.0), 1.0, 0.0, 1.0]).double()
    expected = raw / raw.sum()
    assert output.outcome.rows.tolist() == [0, 2, 3, 4]
    assert output.outcome.weights.tolist() == pytest.approx(expected.tolist())
    # Model 0, twice as large, is scaled down to the norm of the agent's. The smaller model 2
    # is unchanged.
    average = float(expected[0] + 0.5 * expected[1] + expected[3]) * OWN
    torch.testing.assert_close(output.outcome.apply_to_buffer(buffer, 0), average)
    for a, b in ((0, 3), (3, 5), (5, 6), (2, 6)):
        torch.testing.assert_close(output.outcome.apply_to_buffer(buffer[:, a:b], a), average[a:b])
    assert state["ids"].tolist() == [0, 2, 3, 4]
    assert state["sums"].tolist() == [[1.0, 0.3, 2.0, 0.5], [1, 1, 1, 1]]


def test_each_layer_is_scaled_by_itself():
    other = torch.cat([3 * OWN[:4], 0.5 * OWN[4:]])
    buffer = torch.stack([other, OWN])
    _, output = sentinel({}, inputs_of(buffer, [0], [0.5], 0.5))
    expected = torch.cat([OWN[:4], 0.75 * OWN[4:]])
    torch.testing.assert_close(output.outcome.apply_to_buffer(buffer, 0), expected)


def test_losses_are_averaged_over_the_rounds_in_which_a_peer_passed():
    buffer = torch.stack([OWN, OWN, OWN])
    state, _ = sentinel({}, inputs_of(buffer, [0, 1], [0.4, 0.9], 0.2))
    state, output = sentinel(state, inputs_of(buffer, [0], [0.8], 0.4, [0, 1]))
    # Peer 0 has the average loss 0.6, the agent itself 0.3: exp(-1).
    assert output.outcome.weights.tolist() == pytest.approx(
        [math.exp(-1) / (1 + math.exp(-1)), 1 / (1 + math.exp(-1))]
    )
    assert state["sums"][0].tolist() == pytest.approx([1.2, 0.9, 0.6])
    # Peer 1 has a new identity, which is not among the contacts.
    state, _ = sentinel(state, inputs_of(buffer, [1], [0.3], 0.3, [0]))
    assert state["sums"].tolist() == [pytest.approx([1.2, 0.3, 0.9]), [2, 1, 3]]


def test_an_agent_without_trusted_peers_keeps_its_model_and_losses_are_needed():
    buffer = torch.stack([-OWN, OWN])
    _, output = sentinel({}, inputs_of(buffer, [0], [0.1], 0.5))
    torch.testing.assert_close(output.outcome.apply_to_buffer(buffer, 0), OWN)
    _, output = sentinel({}, inputs_of(buffer, [1], [0.5], 0.5))
    assert output.outcome.weights.tolist() == [1]
    assert sentinel({}, inputs_of(buffer, [0], [0.1], math.nan))[1].tolist() == [0, 0]
    with pytest.raises(ConfigError, match="set `needs_losses` = true"):
        sentinel({}, rule_input(buffer, [0], 1))

"""WFAgg: each filter by hand and against plain statistics, its weights and its state."""

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.views import models, rule_input

from fedcb2o.errors import ConfigError
from fedcb2o.federated.aggregation import wfagg
from fedcb2o.federated.aggregation._wfagg import distances_from_median, is_steady, movement
from fedcb2o.rng import stream


def inputs_of(buffer, ids, own_row, contact_ids=(), n=0, share=0.0):
    return rule_input(buffer, ids, own_row, n=n, contact_ids=contact_ids, malicious_share=share)


def test_distances_from_the_median_by_hand():
    buffer = torch.tensor([[1.0, 0.0], [2.0, 1.0], [3.0, 9.0], [0.0, 0.0]])
    squared, cosine = distances_from_median(buffer, torch.tensor([0, 1, 2]))  # the median is (2, 1)
    assert squared.tolist() == [2, 0, 65]
    assert cosine.tolist() == pytest.approx([1 - 2 / 5**0.5, 0, 1 - 15 / (90 * 5) ** 0.5])
    large = models(6, 9000, dtype=torch.float32)
    squared, cosine = distances_from_median(large, torch.arange(5))
    median = large[:5].double().quantile(0.5, dim=0)
    expected = (large[:5].double() - median).square().sum(1)
    torch.testing.assert_close(squared, expected, rtol=1e-5, atol=0)
    similarity = torch.nn.functional.cosine_similarity(large[:5].double(), median, dim=1)
    torch.testing.assert_close(cosine, 1 - similarity, rtol=1e-5, atol=1e-6)


def test_movement_by_hand():
    before = torch.tensor([[1.0, 0.0], [torch.nan, torch.nan]])
    now = torch.tensor([[0.0, 2.0], [1.0, 1.0]])
    result = movement(before, now)
    assert result[0].tolist() == pytest.approx([5, 1])
    assert result[1].isnan().all()


@settings(max_examples=50)
@given(seed=st.integers(0, 10**6))
def test_a_steady_movement_is_within_the_authors_band(seed):
    """The band has the exponentially weighted mean and deviation of the two movements before.

    Pandas computes the expected band.
    """
    moves = torch.from_numpy(stream(seed, "moves").random((20, 2, 3)))

    def is_within(values):
        before = pd.Series(values[-3:-1][::-1]).ewm(alpha=0.01)
        mean, std = before.mean().mean(), before.std()[1:].mean()
        return mean - std <= values[-1] <= mean + std

    assert is_steady(moves).tolist() == [
        all(is_within(values.tolist()) for values in of_agent) for of_agent in moves
    ]


def test_weights_by_hand():
    # With f = 1, three of five models are near (2, 2) and three are similar: models 0 and 3 are
    # both, model 1 is only near, model 2 only similar, and model 4 neither.
    buffer = torch.tensor([[2.0, 2.0], [3.5, 1.0], [9.0, 9.0], [1.5, 1.5], [-9.0, 9.0], [5.0, 5.0]])
    view = inputs_of(buffer, [0, 1, 2, 3, 4], 5)
    _, weights = wfagg({}, view, f=1, smoothing=0.6)
    assert weights.tolist() == pytest.approx([0.3, 0, 0, 0.3, 0, 0.4])
    # Without assumed attackers, four of five pass each filter.
    _, weights = wfagg({}, view)
    assert weights.tolist() == pytest.approx([0.8 / 4] * 4 + [0, 0.2])
    # f is the share of the received models, rounded up: 1.
    assert wfagg({}, inputs_of(buffer, [0, 1, 2, 3, 4], 5, share=0.2), smoothing=0.6)[
        1
    ].tolist() == pytest.approx([0.3, 0, 0, 0.3, 0, 0.4])


def test_a_steady_peer_passes_with_one_other_filter():
    """Peer 1 is near (0.4) and steady, which makes 0.6; peers 0 and 3 have 1.0.

    Peer 2 is not steady.
    """
    buffer = torch.tensor([[2.0, 2.0], [3.5, 1.0], [9.0, 9.0], [1.5, 1.5], [-9.0, 9.0], [5.0, 5.0]])
    before = buffer[:5] + torch.tensor([0.1, 0.2])
    now = movement(before, buffer[:5]).unsqueeze(-1)
    # a band of about 0.5 to 2 times now
    moves = torch.cat([torch.full_like(now, torch.nan), 0.5 * now, 1.5 * now], -1)
    moves[2] = 10 * now[2]
    state = {"ids": torch.arange(5), "models": before, "moves": moves}
    new_state, weights = wfagg(state, inputs_of(buffer, [0, 1, 2, 3, 4], 5, range(5), n=4), f=1)
    assert is_steady(new_state["moves"]).tolist() == [True, True, False, True, True]
    assert weights.tolist() == pytest.approx([0.8 * 5 / 13, 0.8 * 3 / 13, 0, 0.8 * 5 / 13, 0, 0.2])
    # In a transient round, no movement is stored.
    state["moves"] = torch.full_like(moves, torch.nan)
    new_state, weights = wfagg(state, inputs_of(buffer, [0, 1, 2, 3, 4], 5, range(5), n=2), f=1)
    assert weights.tolist() == pytest.approx([0.4, 0, 0, 0.4, 0, 0.2])
    assert new_state["moves"].isnan().all()


def test_the_state_has_the_last_model_and_movements_of_each_contact():
    buffer = models(4, 5, dtype=torch.float32)
    state, _ = wfagg({}, inputs_of(buffer, [0, 2], 3))
    assert state["ids"].tolist() == [0, 2]
    assert state["models"].equal(buffer[[0, 2]])
    later = models(4, 5, seed=1, dtype=torch.float32)
    state, _ = wfagg(state, inputs_of(later, [1, 2], 3, [0, 2], n=4))
    assert state["ids"].tolist() == [0, 1, 2]
    assert state["models"].equal(torch.stack([buffer[0], later[1], later[2]]))
    assert state["moves"][2, :, -1].tolist() == pytest.approx(
        movement(buffer[2:3], later[2:3])[0].tolist()
    )
    assert state["moves"][:2].isnan().all()
    # Peer 2 has a new identity, which is not among the contacts: its history is gone.
    state, _ = wfagg(state, inputs_of(buffer, [2], 3, [0, 1], n=5))
    assert state["ids"].tolist() == [0, 1, 2]
    assert state["moves"][2].isnan().all()


def test_an_agent_without_other_models_keeps_its_own():
    buffer = models(3, 4, dtype=torch.float32)
    assert wfagg({}, inputs_of(buffer, [2], 2))[1].tolist() == [0, 1]
    with pytest.raises(ConfigError, match="`smoothing`"):
        wfagg({}, inputs_of(buffer, [0], 2), smoothing=1.5)

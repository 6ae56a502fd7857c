"""WFAgg: each filter by hand and against plain statistics, its weights, and what it keeps over
rounds."""

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.views import local, models, no_losses, received

from fedcb2o.errors import ConfigError
from fedcb2o.federated import Contacts, CriterionInput
from fedcb2o.federated.aggregation._wfagg import distances_from_median, is_steady, movement, wfagg
from fedcb2o.rng import stream


def seen_by(pool, ids, me, met=(), n=0, share=0.0):
    contacts = Contacts(
        torch.tensor(met, dtype=torch.int64), torch.ones(len(met), dtype=torch.float64)
    )
    knows = local(contacts_of=lambda: contacts, malicious_share=share)
    return CriterionInput(
        n,
        pool,
        None,
        None,
        received(torch.tensor(ids)),
        received(torch.tensor([me])),
        no_losses,
        knows,
    )


def test_distances_about_the_median_by_hand():
    pool = torch.tensor([[1.0, 0.0], [2.0, 1.0], [3.0, 9.0], [0.0, 0.0]])
    squared, cosine = distances_from_median(pool, torch.tensor([0, 1, 2]))  # the median is (2, 1)
    assert squared.tolist() == [2, 0, 65]
    assert cosine.tolist() == pytest.approx([1 - 2 / 5**0.5, 0, 1 - 15 / (90 * 5) ** 0.5])
    large = models(6, 9000, dtype=torch.float32)
    squared, cosine = distances_from_median(large, torch.arange(5))
    median = large[:5].double().quantile(0.5, dim=0)
    torch.testing.assert_close(
        squared, (large[:5].double() - median).square().sum(1), rtol=1e-5, atol=0
    )
    alike = torch.nn.functional.cosine_similarity(large[:5].double(), median, dim=1)
    torch.testing.assert_close(cosine, 1 - alike, rtol=1e-5, atol=1e-6)


def test_moves_by_hand():
    before = torch.tensor([[1.0, 0.0], [torch.nan, torch.nan]])
    now = torch.tensor([[0.0, 2.0], [1.0, 1.0]])
    found = movement(before, now)
    assert found[0].tolist() == pytest.approx([5, 1])
    assert found[1].isnan().all()


@settings(max_examples=50)
@given(seed=st.integers(0, 10**6))
def test_steady_is_the_authors_band(seed):
    """Means and deviations of the two values before, the later first, by exponential weights: as
    pandas has them."""
    moves = torch.from_numpy(stream(seed, "moves").random((20, 2, 3)))

    def within(three):
        before = pd.Series(three[-3:-1][::-1]).ewm(alpha=0.01)
        mean, std = before.mean().mean(), before.std()[1:].mean()
        return mean - std <= three[-1] <= mean + std

    assert is_steady(moves).tolist() == [
        all(within(three.tolist()) for three in two) for two in moves
    ]


def test_weights_by_hand():
    # Of five and f = 1, three are near (2, 2) and three alike: 0 and 3 both, 1 near alone, 2 alike
    # alone, 4 neither.
    pool = torch.tensor([[2.0, 2.0], [3.5, 1.0], [9.0, 9.0], [1.5, 1.5], [-9.0, 9.0], [5.0, 5.0]])
    view = seen_by(pool, [0, 1, 2, 3, 4], 5)
    _, weights = wfagg({}, view, f=1, smoothing=0.6)
    assert weights.tolist() == pytest.approx([0.3, 0, 0, 0.3, 0, 0.4])
    # Nobody assumed: four of five pass each filter.
    _, weights = wfagg({}, view)
    assert weights.tolist() == pytest.approx([0.8 / 4] * 4 + [0, 0.2])
    # The share of the received, rounded up: f = 1.
    assert wfagg({}, seen_by(pool, [0, 1, 2, 3, 4], 5, share=0.2), smoothing=0.6)[
        1
    ].tolist() == pytest.approx([0.3, 0, 0, 0.3, 0, 0.4])


def test_who_moves_as_before_needs_one_filter_more_alone():
    """1 is near alone, which is 0.4; that it is steady too makes 0.6, beside 1.0 for 0 and 3; 2 is
    no longer alike."""
    pool = torch.tensor([[2.0, 2.0], [3.5, 1.0], [9.0, 9.0], [1.5, 1.5], [-9.0, 9.0], [5.0, 5.0]])
    before = pool[:5] + torch.tensor([0.1, 0.2])
    now = movement(before, pool[:5]).unsqueeze(-1)
    moves = torch.cat(
        [torch.full_like(now, torch.nan), 0.5 * now, 1.5 * now], -1
    )  # a band of about 0.5 to 2 times now
    moves[2] = 10 * now[2]
    state = {"ids": torch.arange(5), "models": before, "moves": moves}
    kept, weights = wfagg(state, seen_by(pool, [0, 1, 2, 3, 4], 5, range(5), n=4), f=1)
    assert is_steady(kept["moves"]).tolist() == [True, True, False, True, True]
    assert weights.tolist() == pytest.approx([0.8 * 5 / 13, 0.8 * 3 / 13, 0, 0.8 * 5 / 13, 0, 0.2])
    # In a round that is still transient no move is kept.
    state["moves"] = torch.full_like(moves, torch.nan)
    kept, weights = wfagg(state, seen_by(pool, [0, 1, 2, 3, 4], 5, range(5), n=2), f=1)
    assert weights.tolist() == pytest.approx([0.4, 0, 0, 0.4, 0, 0.2])
    assert kept["moves"].isnan().all()


def test_what_is_kept():
    pool = models(4, 5, dtype=torch.float32)
    state, _ = wfagg({}, seen_by(pool, [0, 2], 3))
    assert state["ids"].tolist() == [0, 2]
    assert state["models"].equal(pool[[0, 2]])
    later = models(4, 5, seed=1, dtype=torch.float32)
    state, _ = wfagg(state, seen_by(later, [1, 2], 3, [0, 2], n=4))
    assert state["ids"].tolist() == [0, 1, 2]
    assert state["models"].equal(torch.stack([pool[0], later[1], later[2]]))
    assert state["moves"][2, :, -1].tolist() == pytest.approx(
        movement(pool[2:3], later[2:3])[0].tolist()
    )
    assert state["moves"][:2].isnan().all()
    # Under a new name nobody has met 2: its past is gone.
    state, _ = wfagg(state, seen_by(pool, [2], 3, [0, 1], n=5))
    assert state["ids"].tolist() == [0, 1, 2]
    assert state["moves"][2].isnan().all()


def test_who_is_alone_or_drew_itself_keeps_its_model():
    pool = models(3, 4, dtype=torch.float32)
    assert wfagg({}, seen_by(pool, [2], 2))[1].tolist() == [0, 1]
    with pytest.raises(ConfigError, match="`smoothing`"):
        wfagg({}, seen_by(pool, [0], 2), smoothing=1.5)

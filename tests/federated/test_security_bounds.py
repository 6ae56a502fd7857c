"""Bounds of the weight of attackers under FedAssay's rule (docs/sublevel.md), on random draws."""

import math

import numpy as np
import pytest
import torch
from tests import views

from fedcb2o.federated import algorithms, criteria
from fedcb2o.federated.algorithms._fedassay import DEFAULT_GUARDS
from fedcb2o.federated.contacts import CandidatePeers, ContactTable
from fedcb2o.federated.guards.checks import tolerated
from fedcb2o.federated.ragged import Ragged
from fedcb2o.federated.selection import BATCHED_SELECTION, prob_sampling
from fedcb2o.federated.types import CriterionInput, Losses
from fedcb2o.rng import agent_streams

M, CLASSES, PER_CLASS = 6, 4, 4
LABELS = torch.arange(CLASSES).repeat_interleave(PER_CLASS)
MANY = [2_000, pytest.param(1_000_000, marks=pytest.mark.slow)]


def losses_of(per_sample):
    """Return the losses of several agents' models [a, m, n], of equally many samples per class."""
    by_class = per_sample.unflatten(-1, (CLASSES, PER_CLASS)).mean(-1)
    a = len(per_sample)
    present = torch.ones(a, CLASSES, dtype=torch.bool)
    mean = per_sample.mean(-1)
    return Losses(mean, by_class, present, mean.sum, per_sample, LABELS.expand(a, -1))


def inboxes(count, seed, *, alike=False):
    """Draw the inboxes of agents, and which models are hostile.

    Hostile models are worse in one class and better in all others, by amounts over three decades.
    With `alike` they are drawn as the honest ones are.
    """
    draw = torch.Generator().manual_seed(seed)
    own = torch.empty(count, 1, len(LABELS), dtype=torch.float64).exponential_(2.0, generator=draw)
    change = torch.randn(count, M, len(LABELS), generator=draw, dtype=torch.float64)
    scale = 10 ** (2 * torch.rand(count, 1, 1, generator=draw, dtype=torch.float64) - 2)
    change = scale * (change + 0.3)
    is_hostile = torch.rand(count, M, generator=draw) < torch.rand(count, 1, generator=draw)
    if not alike:
        amount = 10 ** (3 * torch.rand(count, M, 1, generator=draw, dtype=torch.float64) - 2)
        victim = torch.randint(CLASSES, (count, M, 1), generator=draw)
        crafted = torch.where(victim == LABELS, amount, -amount * torch.rand(1, generator=draw))
        change = torch.where(is_hostile.unsqueeze(-1), crafted, change)
    per_sample = (own + change).clamp(min=0)

    ids = torch.arange(M).expand(count, M)
    received, own_losses = losses_of(per_sample), losses_of(own)
    view = CriterionInput(
        0,
        torch.zeros(M + 1, 2),
        received,
        own_losses,
        views.received(ids),
        views.received(torch.full((count, 1), M)),
        views.no_losses,
        views.context_without_contacts(),
        tolerated=tolerated(DEFAULT_GUARDS, received, own_losses),
    )
    return view, is_hostile


def chunks(draws):
    """Split draws, and number the parts."""
    return enumerate([20_000] * (draws // 20_000) or [draws])


@pytest.mark.parametrize("draws", MANY)
def test_attackers_weigh_at_most_the_bound(draws):
    fedassay = algorithms.fedassay()
    for seed, count in chunks(draws):
        view, is_hostile = inboxes(count, seed)
        weights = fedassay.weigh(view, {})[0].outcome
        G = criteria.class_loss_excess(view)

        f = is_hostile.sum(-1)
        hostile = (weights[:, :-1] * is_hostile).sum(-1)
        # Honest models within the tolerance count; the largest G of them is gamma.
        counts = view.tolerated & ~is_hostile
        h, gamma = counts.sum(-1), G.masked_fill(~counts, 0.0).amax(-1)
        others = 1 + h * torch.exp(-gamma)
        least = G.masked_fill(~is_hostile, torch.inf).amin(-1).nan_to_num(posinf=0.0)
        assert (hostile <= f / (f + others) + 1e-12).all()
        assert (hostile <= f / (f + others * torch.exp(least)) + 1e-12).all()
        # The first bound is reached, and so no bound of f alone is smaller.
        assert (hostile > 0.99 * f / (f + others)).logical_and(f > 0).any()


@pytest.mark.parametrize("draws", MANY)
def test_models_like_honest_ones_have_their_share_in_the_mean(draws):
    fedassay = algorithms.fedassay()
    excess, square = 0.0, 0.0
    for seed, count in chunks(draws):
        view, is_hostile = inboxes(count, seed, alike=True)
        weights = fedassay.weigh(view, {})[0].outcome
        f = is_hostile.sum(-1)
        # No weight is above that of the agent itself, and the others share the rest equally in the mean.
        assert (weights[:, -1:] >= weights).all()
        rest = f / M * (1 - weights[:, -1])
        assert (rest <= f / (M + 1) + 1e-12).all()
        difference = (weights[:, :-1] * is_hostile).sum(-1) - rest
        excess += float(difference.sum())
        square += float(difference.square().sum())
    assert abs(excess) < 5 * math.sqrt(square)


@pytest.mark.parametrize("count", [0, 2, 5, 6])
def test_new_identities_fill_the_places_of_peers_that_are_not_known(count):
    """With fewer than M known peers, newcomers have M less these; a thousand identities are new."""
    contacts = ContactTable(
        Ragged(np.tile(np.arange(count), 100), np.full(100, count)), np.ones(100 * count)
    )
    candidates = CandidatePeers.from_lists([np.arange(1_000)], np.zeros(100, np.int64))
    asked = BATCHED_SELECTION.get(prob_sampling)(
        contacts,
        candidates,
        M,
        agent_streams(0, "select", 0, agents=range(100)),
        newcomer_share=DEFAULT_GUARDS.newcomer_share,
    )
    new = np.bincount(asked.list_index, weights=asked.values >= count, minlength=100)
    assert (new == max(math.ceil(0.33 * M), M - count)).all()


@pytest.mark.parametrize("draws", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_new_identities_have_at_most_the_places_of_newcomers(draws):
    """Twenty known peers, and a thousand identities that were never asked."""
    known = np.arange(0, 40, 2)
    contacts = ContactTable(
        Ragged(np.tile(known, draws), np.full(draws, len(known))),
        np.tile(np.linspace(0.1, 1, len(known)), draws),
    )
    candidates = CandidatePeers.from_lists([np.arange(1_020)], np.zeros(draws, np.int64))
    asked = BATCHED_SELECTION.get(prob_sampling)(
        contacts,
        candidates,
        M,
        agent_streams(0, "select", 0, agents=range(draws)),
        newcomer_share=DEFAULT_GUARDS.newcomer_share,
    )
    new = ~np.isin(asked.values, known)
    counts = np.bincount(asked.list_index, weights=new, minlength=draws)
    assert (counts == math.ceil(0.33 * M)).all()

"""Numerically hard cases of a round: huge and infinite values, broken models, peers that do not answer."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests import agents as ours
from tests.agents import BAD, GOOD, held, network
from tests.views import judged

from fedcb2o import models
from fedcb2o.errors import RunError
from fedcb2o.federated import algorithms
from fedcb2o.federated.aggregate import form
from fedcb2o.federated.choices import Choices, Inbox
from fedcb2o.federated.criteria import average_loss, class_loss_gap
from fedcb2o.federated.evaluate import losses_of
from fedcb2o.federated.lists import Lists
from fedcb2o.federated.mixing import mix_, mixture
from fedcb2o.federated.peers import Met, Peers
from fedcb2o.federated.rules import by_num_samples
from fedcb2o.federated.selection import colluding, prob_sampling, remember, uniform
from fedcb2o.federated.types import Attack, Contacts
from fedcb2o.streams import stream

INF = float("inf")


def test_class_loss_gap_by_hand():
    view = judged([[1.0, 5.0], [0.5, 0.25]], [0.75, 1.0])
    assert class_loss_gap(view).tolist() == [4.0, -0.25]
    assert average_loss(view).tolist() == [3.0, 0.375]


def test_an_absent_class_is_masked_or_zero():
    view = judged([[1.0, 0.0], [0.25, 0.0]], [0.75, 0.0], present=[True, False])
    assert class_loss_gap(view).tolist() == [0.25, -0.5]
    assert class_loss_gap(view, absent="zero").tolist() == [0.25, 0.0]


@pytest.mark.parametrize("own_model", ["excluded", "judged", "trusted"])
def test_all_peers_huge_still_gives_weights(own_model):
    """In the first rounds every peer may be bad: the least bad one counts, and nothing is 0 / 0."""
    view = judged([[1e6, 1e6], [1e300, 0.0], [1e6, 1e6]], [0.5, 0.5])
    mu = algorithms.fedcb2o(own_model=own_model).weigh(view)
    expected = {"excluded": [0.5, 0, 0.5, 0], "judged": [0, 0, 0, 1], "trusted": [1 / 3, 0, 1 / 3, 1 / 3]}
    assert mu.tolist() == pytest.approx(expected[own_model])


@pytest.mark.parametrize(("own_model", "kept"), [("excluded", 0.0), ("judged", 1.0), ("trusted", 0.0)])
def test_nobody_to_be_trusted_keeps_the_model(own_model, kept):
    view = judged([[INF, 1.0], [2.0, INF]], [0.5, 0.5])
    mu = algorithms.fedcb2o(own_model=own_model).weigh(view)
    assert mu[:2].tolist() == [0.0, 0.0]
    assert mu.sum().item() == kept


@pytest.mark.parametrize("own_model", ["excluded", "judged", "trusted"])
@pytest.mark.parametrize("beta", [None, 0.5])
def test_nobody_answered(own_model, beta):
    mu = algorithms.fedcb2o(own_model=own_model, beta=beta).weigh(judged([], [0.5, 0.5]))
    assert mu[:-1].tolist() == []
    assert mu.sum().item() == (own_model != "excluded")
    assert by_num_samples(judged([], [0.5, 0.5]), own_model="excluded").tolist() == []


def test_a_model_that_is_no_number_has_infinite_losses():
    module = network()
    pool = torch.zeros(3, models.dimension(module))
    pool[1] = torch.nan
    pool[2] = 3e38
    shard = held().samples
    losses = losses_of(module, pool, torch.arange(3), shard, 4)
    assert losses.mean.isfinite().tolist() == [True, False, False]
    assert not losses.mean.isnan().any()
    assert losses.mean[0].item() == pytest.approx(torch.log(torch.tensor(4.0)).item())


def test_batch_means_by_hand():
    module = network()
    pool = torch.randn(2, models.dimension(module), generator=torch.Generator().manual_seed(0))
    shard = held().samples
    part = dataclasses.replace(shard, x=shard.x[:11], y=shard.y[:11])
    one_by_one = torch.stack(
        [losses_of(module, pool, torch.arange(2), dataclasses.replace(part, x=x[None], y=y[None]), 4).mean
         for x, y in zip(part.x, part.y, strict=True)],
        dim=1,
    )  # fmt: skip
    batches = losses_of(module, pool, torch.arange(2), part, 4, average="batches", batch_size=8).mean
    expected = (one_by_one[:, :8].mean(1) + one_by_one[:, 8:].mean(1)) / 2
    torch.testing.assert_close(batches, expected, rtol=1e-5, atol=1e-6)


NOBODY = Contacts(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64))


def ask(contacts, n, budget=6, seed=0):
    return prob_sampling(contacts, torch.arange(1, n), budget, stream(seed, "x"))


def after(contacts, asked, answered, losses, *, kappa=2.0, zeta=0.5, first_contact="average"):
    """The contacts of one agent after a round."""
    both = (Lists.of([torch.as_tensor(ids).numpy()]) for ids in (asked, answered))
    losses = torch.as_tensor(losses, dtype=torch.float64).numpy()
    (found,) = remember(Met.of([contacts]), *both, losses, kappa=kappa, zeta=zeta, first_contact=first_contact)
    return found


@pytest.mark.parametrize(("n", "budget", "counts"), [(100, 20, [20, 20, 20, 20, 19]), (20, 6, [6, 6, 6, 1])])
def test_the_first_pass_has_no_top_up(n, budget, counts):
    contacts, found = NOBODY, []
    for k in range(len(counts)):
        asked = ask(contacts, n, budget, seed=k)
        found.append(len(asked))
        contacts = after(contacts, asked, asked, torch.ones(len(asked)))
    assert found == counts
    assert contacts.ids.tolist() == list(range(1, n))


def test_a_likelihood_that_underflows_is_never_drawn_and_never_first_again():
    everyone = torch.arange(1, 5)
    contacts = after(NOBODY, everyone, everyone, [0.1, 1e5, INF, 0.2])
    assert contacts.likelihood[1:3].tolist() == [0.0, 0.0]
    for seed in range(20):
        assert ask(contacts, 5, budget=3, seed=seed).tolist() == [1, 4]  # two are positive: two are drawn


def test_nobody_positive_is_nobody():
    contacts = Contacts(torch.arange(1, 5), torch.zeros(4, dtype=torch.float64))
    assert ask(contacts, 5).tolist() == []


def test_a_peer_that_never_answers_is_met_and_counts_as_an_average_one():
    contacts = after(NOBODY, [1, 2, 3], [1, 2], [0.0, 0.0])
    assert contacts.likelihood[:2].tolist() == [0.5, 0.5]
    assert contacts.likelihood[2].isnan()
    drawn = [i for seed in range(300) for i in ask(contacts, 4, budget=1, seed=seed).tolist()]
    assert all(70 < drawn.count(i) < 130 for i in (1, 2, 3))


def test_likelihood_by_hand():
    first = after(NOBODY, [4], [4], [1.0], zeta=0.25)
    gain = torch.exp(torch.tensor(-2.0, dtype=torch.float64)).item()
    assert first.likelihood.item() == pytest.approx(0.25 * gain)
    second = after(first, [4], [4], [0.0], zeta=0.25)
    assert second.likelihood.item() == pytest.approx(0.75 * 0.25 * gain + 0.25)
    whole = after(NOBODY, [4], [4], [1.0], zeta=0.25, first_contact="whole")
    assert whole.likelihood.item() == pytest.approx(gain)


@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 15))
def test_colluders_prefer_fellows(num_fellows, num_benign, budget):
    fellows, benign = Peers.of([np.arange(num_fellows)]), Peers.of([np.arange(100, 100 + num_benign)])
    asked = colluding(fellows, benign, budget, [stream(0, "x")])[0].tolist()
    assert len(asked) == len(set(asked)) == min(budget, num_fellows + num_benign)
    assert sum(i < 100 for i in asked) == min(budget, num_fellows)


def test_uniform_is_uniform():
    counts = torch.zeros(5)
    for seed in range(500):
        counts[uniform(NOBODY, torch.arange(5), 2, stream(seed, "x"))] += 1
    assert counts.sum() == 1000
    assert ((counts > 150) & (counts < 250)).all()


def test_broken_models_are_dropped_and_the_rest_carry_on():
    """Attackers whose models are NaN, infinite or garbage: no benign model becomes one, and all of them move."""
    engine = ours.together(algorithms.fedcb2o(own_model="trusted", mixing_factor=1.0))
    theta = ours.models_of(engine)
    start = theta.clone()
    for j, value in zip(BAD, (float("nan"), INF, 1e30, -INF), strict=True):
        theta[j] = value
    for done in ours.run_rounds(engine, 5):
        assert all(not set(ours.chosen(done.choices, j).ids) & set(BAD) for j in GOOD)
        assert theta[GOOD].isfinite().all()
    assert (theta[GOOD] != start[GOOD]).any(1).all()


def test_a_benign_model_that_overflows_where_it_mixes_is_told():
    """What arrives is bounded, and so is what weights make of it: a rule on columns can still make anything."""

    def rule(block):
        return torch.full_like(block[0], torch.inf)

    algorithm = algorithms.by_rule(rule=form("columns")(rule), selection="everyone", judges=False)
    with pytest.raises(RunError, match="the model of benign agent 0 is not finite after mixing in round 1: what its"):
        ours.run_rounds(ours.together(algorithm, attack=Attack()))


def test_a_weight_of_zero_stops_a_nan():
    pool = torch.tensor([[1.0, 2.0, 3.0], [torch.nan] * 3, [3.0, 4.0, 5.0]])
    ids, weights = [[1, 2], [], [0, 1]], [[1e-60, 1.0], [], [0.5, 0.0]]
    received = Lists.of([np.array(each, np.int64) for each in ids])
    inbox = Inbox(received, received.values, np.ones(4), np.zeros(4, np.int64))
    choices = Choices.none(np.arange(3), Lists.empty(3), inbox)
    choices.weights[:], choices.own_weight[2], choices.factor[0] = np.concatenate(weights), 0.5, 0.5
    mix_(pool, mixture(choices, np.arange(3)), 0, 3)
    assert pool[0].tolist() == [2.0, 3.0, 4.0]  # half of itself, half of the third
    assert pool[2].tolist() == [2.0, 3.0, 4.0]
    assert pool[1].isnan().all()

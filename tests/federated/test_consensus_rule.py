"""The weights that a criterion gives: where everybody is bad, nobody is to be trusted, or nobody
answered."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from tests import reference
from tests.views import judged, received, weigh

from fedcb2o.errors import ConfigError
from fedcb2o.federated import ContactTable, Ragged, algorithms
from fedcb2o.federated.aggregation import by_num_samples
from fedcb2o.federated.aggregation.coordinatewise import weighted_median
from fedcb2o.federated.batched_aggregation import update_likelihoods

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("own_model", ["excluded", "judged", "trusted"])
def test_all_peers_huge_still_gives_weights(own_model):
    """In the first rounds every peer may be bad: the least bad one counts, and nothing is 0 / 0."""
    view = judged([[1e6, 1e6], [1e300, 0.0], [1e6, 1e6]], [0.5, 0.5])
    mu = weigh(algorithms.fedcb2o(own_model=own_model), view).outcome
    expected = {
        "excluded": [0.5, 0, 0.5, 0],
        "judged": [0, 0, 0, 1],
        "trusted": [1 / 3, 0, 1 / 3, 1 / 3],
    }
    assert mu.tolist() == pytest.approx(expected[own_model])


@pytest.mark.parametrize(
    ("own_model", "kept"), [("excluded", 0.0), ("judged", 1.0), ("trusted", 0.0)]
)
def test_nobody_to_be_trusted_keeps_the_model(own_model, kept):
    view = judged([[INF, 1.0], [2.0, INF]], [0.5, 0.5])
    mu = weigh(algorithms.fedcb2o(own_model=own_model), view).outcome
    assert mu[:2].tolist() == [0.0, 0.0]
    assert mu.sum().item() == kept


@pytest.mark.parametrize("own_model", ["excluded", "judged", "trusted"])
@pytest.mark.parametrize("beta", [None, 0.5])
def test_nobody_answered(own_model, beta):
    mu = weigh(algorithms.fedcb2o(own_model=own_model, beta=beta), judged([], [0.5, 0.5])).outcome
    assert mu[:-1].tolist() == []
    assert mu.sum().item() == (own_model != "excluded")
    assert by_num_samples(judged([], [0.5, 0.5]), own_model="excluded").tolist() == []


VALUES = {
    "one": ([1.0, None, 1.25, 1.5], None),
    "the best of Q_beta": ([1.0, None, 1.25, 1.5], 0.5),
    "all but one": ([None, 1.0, None, None], None),
    "all": ([None] * 4, None),
}


@pytest.mark.parametrize("own_model", ["excluded", "judged", "trusted"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("case", VALUES)
@pytest.mark.parametrize("combined", [False, True])
def test_a_value_that_is_no_finite_number_has_no_weight(own_model, bad, case, combined):
    values, beta = VALUES[case]
    values = [bad if value is None else value for value in values]
    view = judged([[1.0, 1.0], [0.5, 0.5], [2.0, 2.0], [3.0, 3.0]], [1.5, 1.5])

    def criterion(seen):
        return torch.tensor(values) if len(seen.received.ids) == 4 else torch.tensor([1.125])

    named = {"name": "largest", "of": [criterion, criterion]} if combined else criterion
    options = {"alpha": 2.0, "beta": beta, "own_model": own_model}
    mu = weigh(algorithms.fedcb2o(criterion=named, **options), view).outcome.tolist()
    G = dict(enumerate(values)) | ({} if own_model == "excluded" else {4: 1.125})
    losses = {
        i: reference.Loss(loss, {}) for i, loss in enumerate([1.0, 0.5, 2.0, 3.0, 1.5]) if i in G
    }
    known = reference.Options(**options)
    Q = reference.sublevel_set(losses, list(G), 4, known)
    expected = reference.consensus_weights(G, Q, 4, known, trusted=own_model == "trusted")
    assert mu == pytest.approx([expected.get(i, 0.0) for i in range(5)])
    assert [mu[i] for i, value in enumerate(values) if value == bad or value != value] == [
        0.0
    ] * values.count(bad)
    if own_model == "trusted":
        assert mu[4] == max(mu[:4])


@pytest.mark.parametrize("criterion", ["class_loss_gap", "average_loss", "worst_class_loss"])
def test_an_agent_whose_model_is_broken_trusts_those_that_are_not(criterion):
    view = judged([[1.0, 2.0], [INF, 1.0], [1.0, 2.0]], [INF, INF])
    for own_model, own in (("excluded", 0.0), ("judged", 0.0), ("trusted", None)):
        mu = weigh(algorithms.fedcb2o(criterion=criterion, own_model=own_model), view).outcome
        assert mu[0] == mu[2] > 0 == mu[1]
        assert own is None or mu[3] == own


def test_the_weighted_median_by_hand():
    x = torch.tensor([[1.0, 9.0, 2.0], [5.0, 5.0, 2.0], [9.0, 1.0, 7.0]])
    assert weighted_median(x, torch.tensor([0.2, 0.2, 0.6]).double()).tolist() == [9.0, 1.0, 7.0]
    assert weighted_median(x, torch.tensor([0.3, 0.3, 0.4]).double()).tolist() == [5.0, 5.0, 2.0]
    assert weighted_median(x, torch.tensor([0.5, 0.25, 0.25]).double()).tolist() == [1.0, 5.0, 2.0]
    assert weighted_median(x[:1], torch.tensor([1.0]).double()).tolist() == [1.0, 9.0, 2.0]


def test_a_test_widens_the_sub_level_set():
    """One sample of each of four classes: differences 1, 1, 1, 1 have no error, and 0, 0, 0, 2 one
    of 0.5."""
    view = judged([[2.0] * 4, [1.0, 1.0, 1.0, 3.0], [0.5] * 4], [1.0] * 4)
    for tested, members in ((0.0, [2, 3]), (0.5, [2, 3]), (1.5, [1, 2, 3]), (99.0, [1, 2, 3])):
        mu = weigh(
            algorithms.fedcb2o(alpha=0.0, own_model="judged", loss_tolerance=tested), view
        ).outcome
        assert mu.nonzero().flatten().tolist() == members
    both = {
        "alpha": 0.0,
        "own_model": "judged",
        "loss_tolerance": 0.0,
        "criterion": "worst_class_loss",
    }
    mu = weigh(algorithms.fedcb2o(beta=1.0, **both), view).outcome
    assert mu.tolist() == [0.25] * 4
    mu = weigh(
        algorithms.fedcb2o(loss_tolerance=0.0, alpha=0.0), view
    ).outcome  # the own model does not count
    assert mu.tolist() == [0.0, 0.0, 1.0, 0.0]


def test_who_is_hardly_apart_from_the_own_model_does_not_count():
    """The own model moved by 5, from (3, 0) to (3, 5): half of that is 2.5. Its own sample cannot
    tell the others."""
    view = judged([[1.0]] * 4, [1.0])
    pool = torch.tensor([[3.0, 5.1], [3.0, 7.6], [0.6, 5.0], [30.0, 5.0], [3.0, 5.0], [3.0, 0.0]])
    view = dataclasses.replace(view, models=pool, previous=torch.tensor(5))
    common = {"alpha": 0.0, "own_model": "judged"}
    for given, members, values in (
        ({"min_distance": 0.5}, [1, 3, 4], [2.0, 0.0, 2.0, 0.0]),
        ({"min_distance": 0.45}, [1, 2, 3, 4], [2.0, 0.0, 0.0, 0.0]),
        (
            {"min_distance": 0.5, "max_distance": 1.0},
            [1, 4],
            [2.0, 0.0, 2.0, INF],
        ),  # 5.8 about (3, 5)
        ({}, [0, 1, 2, 3, 4], [0.0] * 4),
    ):
        algorithm = algorithms.fedcb2o(**common, **given)
        assert weigh(algorithm, view).outcome.nonzero().flatten().tolist() == members
        assert algorithm.criterion_values(view).values.tolist() == values
    itself = dataclasses.replace(
        view, received=received(torch.tensor([4, 1, 2, 3]))
    )  # it drew itself
    excluded = algorithms.fedcb2o(
        alpha=0.0, min_distance=0.5, own_model="excluded", own_candidate=True
    )
    assert weigh(excluded, itself).outcome.nonzero().flatten().tolist() == [0, 1, 3]
    assert excluded.criterion_values(itself).values.tolist() == [0.0, 0.0, 2.0, 0.0]
    assert algorithms.fedcb2o(min_distance=0.5).keeps_previous
    assert not algorithms.fedcb2o(max_distance=1.0).keeps_previous


@pytest.mark.parametrize("option", ["min_distance", "max_distance"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_distances_that_are_none(option, value):
    with pytest.raises(ConfigError, match=f"`{option}` must be above 0, got {value}"):
        algorithms.fedcb2o(**{option: value})


@pytest.mark.parametrize("kappa", [0.0, 2.0])
@pytest.mark.parametrize("first_contact", ["average", "whole"])
def test_an_infinite_loss_adds_nothing_to_a_likelihood(kappa, first_contact):
    asked = Ragged.from_arrays([np.array([1, 2])])
    algorithm = algorithms.fedcb2o(kappa=kappa, zeta=0.5, first_contact=first_contact)
    losses = np.array([INF, 0.0])
    met = update_likelihoods(algorithm, ContactTable.empty(1), asked, asked, losses)
    assert met.likelihood.tolist() == [0.0, 1.0 if first_contact == "whole" else 0.5]

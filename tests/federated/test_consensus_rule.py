"""Weights from a criterion, also with only bad peers, without trusted peers and without answers."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from tests import reference
from tests.views import apply_algorithm, criterion_input

from fedcb2o.errors import ConfigError
from fedcb2o.federated import algorithms
from fedcb2o.federated.aggregation import by_num_samples
from fedcb2o.federated.algorithms._fedcb2o import label_confidence, rank_bound
from fedcb2o.federated.batched_aggregation import update_likelihoods
from fedcb2o.federated.contacts import ContactTable
from fedcb2o.federated.ragged import Ragged
from fedcb2o.federated.types import Losses

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("own_model", ["excluded", "judged", "trusted"])
def test_huge_losses_of_all_peers_still_give_weights(own_model):
    """In the first rounds, every peer may be bad. The best of them have weight, without 0 / 0."""
    view = criterion_input([[1e6, 1e6], [1e300, 0.0], [1e6, 1e6]], [0.5, 0.5])
    mu = apply_algorithm(algorithms.fedcb2o(own_model=own_model), view).outcome
    expected = {
        "excluded": [0.5, 0, 0.5, 0],
        "judged": [0, 0, 0, 1],
        "trusted": [1 / 3, 0, 1 / 3, 1 / 3],
    }
    assert mu.tolist() == pytest.approx(expected[own_model])


@pytest.mark.parametrize(
    ("own_model", "total"), [("excluded", 0.0), ("judged", 1.0), ("trusted", 0.0)]
)
def test_the_model_is_kept_without_a_trusted_peer(own_model, total):
    view = criterion_input([[INF, 1.0], [2.0, INF]], [0.5, 0.5])
    mu = apply_algorithm(algorithms.fedcb2o(own_model=own_model), view).outcome
    assert mu[:2].tolist() == [0.0, 0.0]
    assert mu.sum().item() == total


@pytest.mark.parametrize("own_model", ["excluded", "judged", "trusted"])
@pytest.mark.parametrize("beta", [None, 0.5])
def test_weights_without_received_models(own_model, beta):
    mu = apply_algorithm(
        algorithms.fedcb2o(own_model=own_model, beta=beta), criterion_input([], [0.5, 0.5])
    ).outcome
    assert mu[:-1].tolist() == []
    assert mu.sum().item() == (own_model != "excluded")
    assert by_num_samples(criterion_input([], [0.5, 0.5]), own_model="excluded").tolist() == []


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
def test_a_non_finite_value_has_weight_0(own_model, bad, case, combined):
    values, beta = VALUES[case]
    values = [bad if value is None else value for value in values]
    view = criterion_input([[1.0, 1.0], [0.5, 0.5], [2.0, 2.0], [3.0, 3.0]], [1.5, 1.5])

    def criterion(inputs):
        return torch.tensor(values) if len(inputs.received.ids) == 4 else torch.tensor([1.125])

    named = {"name": "largest", "of": [criterion, criterion]} if combined else criterion
    options = {"alpha": 2.0, "beta": beta, "own_model": own_model}
    mu = apply_algorithm(algorithms.fedcb2o(criterion=named, **options), view).outcome.tolist()
    G = dict(enumerate(values)) | ({} if own_model == "excluded" else {4: 1.125})
    losses = {
        i: reference.Loss(loss, {}) for i, loss in enumerate([1.0, 0.5, 2.0, 3.0, 1.5]) if i in G
    }
    oracle_options = reference.Options(**options)
    Q = reference.sublevel_set(losses, list(G), 4, oracle_options)
    expected = reference.consensus_weights(G, Q, 4, oracle_options, trusted=own_model == "trusted")
    assert mu == pytest.approx([expected.get(i, 0.0) for i in range(5)])
    assert [mu[i] for i, value in enumerate(values) if value == bad or value != value] == [
        0.0
    ] * values.count(bad)
    if own_model == "trusted":
        assert mu[4] == max(mu[:4])


def test_an_agent_of_few_classes_relies_less_on_its_losses():
    """With one of two needed classes, alpha counts a quarter, and so does the sub-level set.

    Q_0.5 of six models has three members. Of the three other models, 0.75 * 3, rounded to 2, join.
    """
    view = criterion_input(
        [[k, 0, 0, 0] for k in (1, 2, 3, 4, 5)], [0.5, 0, 0, 0], [True, *[False] * 3]
    )
    options = {"own_model": "judged", "alpha": 2.0, "beta": 0.5}
    mu = apply_algorithm(algorithms.fedcb2o(label_coverage=0.5, **options), view).outcome
    expected = torch.tensor([-0.25, -0.75, -1.25, -1.75, -torch.inf, 0.0]).exp()
    torch.testing.assert_close(mu, (expected / expected.sum()).double())
    mu = apply_algorithm(algorithms.fedcb2o(label_coverage=0.25, **options), view).outcome
    expected = torch.tensor([-1.0, -3.0, *[-torch.inf] * 3, 0.0]).exp()
    torch.testing.assert_close(mu, (expected / expected.sum()).double())


@pytest.mark.parametrize(
    ("labels", "num_classes", "expected"),
    [
        ([7], 10, 0.04),
        ([1, 3, 3, 1], 10, 0.16),
        ([0, 1, 2, 3, 4], 10, 1.0),
        ([0, 0, 0, 1], 8, 3**-1.5),  # exp(H) = 4 / 3^(3/4), of 4 classes
        ([0, 0], 1, 1.0),
        ([1, 1], 2, 1.0),
    ],
)
def test_confidence_follows_the_effective_number_of_classes(labels, num_classes, expected):
    per_sample = torch.zeros(1, len(labels), dtype=torch.float64)
    by_class = torch.zeros(1, num_classes)
    present = torch.ones(num_classes, dtype=torch.bool)
    losses = Losses(
        by_class[:, 0], by_class, present, by_class.sum, per_sample, torch.tensor(labels)
    )
    assert label_confidence(losses, 0.5).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("own", "confidence", "expected"),
    [
        (0.2, 1.0, 0.2 + 0.1 * (math.log(4) - 0.2)),
        (0.2, 0.25, 0.2 + 0.4 * (math.log(4) - 0.2)),
        (math.log(4), 1.0, math.log(4)),
        (2.0, 1.0, 2.0),  # the agent's own model knows nothing
        (INF, 1.0, INF),
    ],
)
def test_the_bound_of_a_rank_leaves_a_share_of_the_knowledge(own, confidence, expected):
    losses = criterion_input([], [own] * 4).own_losses
    assert rank_bound(losses, torch.tensor(confidence), 0.1).item() == pytest.approx(expected)
    others = dataclasses.replace(losses, is_cross_entropy=False)
    assert rank_bound(others, torch.tensor(confidence), 0.1).item() == INF


def test_among_useless_models_rank_makes_no_member():
    """The last four know much less than the agent's own model; two are in Q_beta by their rank."""
    view = criterion_input([[k, k, k, k] for k in (0.3, 1, 1.1, 1.2, 1.3)], [0.2] * 4)
    options = {"own_model": "judged", "alpha": 0.0, "beta": 0.5, "label_coverage": 1.0}
    mu = apply_algorithm(algorithms.fedcb2o(**options), view).outcome
    assert mu.tolist() == pytest.approx([1 / 3, 1 / 3, 0, 0, 0, 1 / 3])
    mu = apply_algorithm(algorithms.fedcb2o(rank_tolerance=0.1, **options), view).outcome
    assert mu.tolist() == [0.5, 0, 0, 0, 0, 0.5]
    with pytest.raises(ConfigError, match="needs a `beta`"):
        algorithms.fedcb2o(rank_tolerance=0.1)


@pytest.mark.parametrize("criterion", ["class_loss_gap", "average_loss", "worst_class_loss"])
def test_an_agent_with_a_broken_model_trusts_finite_models(criterion):
    view = criterion_input([[1.0, 2.0], [INF, 1.0], [1.0, 2.0]], [INF, INF])
    for own_model, own in (("excluded", 0.0), ("judged", 0.0), ("trusted", None)):
        mu = apply_algorithm(
            algorithms.fedcb2o(criterion=criterion, own_model=own_model), view
        ).outcome
        assert mu[0] == mu[2] > 0 == mu[1]
        assert own is None or mu[3] == own


@pytest.mark.parametrize("kappa", [0.0, 2.0])
@pytest.mark.parametrize("first_contact", ["average", "whole"])
def test_an_infinite_loss_adds_0_to_a_likelihood(kappa, first_contact):
    peers = Ragged.from_arrays([np.array([1, 2])])
    algorithm = algorithms.fedcb2o(kappa=kappa, zeta=0.5, first_contact=first_contact)
    losses = np.array([INF, 0.0])
    contacts = update_likelihoods(algorithm, ContactTable.empty(1), peers, peers, losses)
    assert contacts.likelihood.tolist() == [0.0, 1.0 if first_contact == "whole" else 0.5]

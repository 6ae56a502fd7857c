"""Inputs of criteria, rules and attacks, made by hand."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcb2o.data import Shard
from fedcb2o.federated import attacks
from fedcb2o.federated.adversary import AttackView, Threat
from fedcb2o.federated.inference import losses_from_samples
from fedcb2o.federated.run_spec import Algorithm
from fedcb2o.federated.types import (
    AgentContext,
    Contacts,
    CriterionInput,
    Losses,
    Received,
    RuleOutput,
)
from fedcb2o.nn.parameters import gather_rows
from fedcb2o.rng import stream

# Five models; the last one is an outlier.
LINE = torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [4.0, 0.0], [100.0, 3.0]])


def received(ids: torch.Tensor, num_samples: torch.Tensor | None = None) -> Received:
    """Return received models whose rows are the ids of their senders."""
    counts = torch.ones(ids.shape, dtype=torch.float64) if num_samples is None else num_samples
    return Received(ids, ids, counts, torch.zeros_like(ids))


def context_without_contacts(**changes) -> AgentContext:
    """Return the context of an agent without contacts."""
    contacts = Contacts(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64))
    defaults = {
        "outputs": lambda models, change=None, count=None: None,
        "samples": lambda count: None,
        "outputs_per_model": lambda models, x: None,
        "input_gradients": lambda models, x, of: None,
        "contacts_of": lambda: contacts,
        "draw_of": lambda: stream(0, "judged"),
    }
    return AgentContext(**{**defaults, **changes})


def no_losses(models, change):
    """Fail, in tests whose function must not ask for losses."""
    pytest.fail("losses")


def losses(mean, by_class, present, factors=None) -> Losses:
    """Return losses of models on one sample of each class that is present.

    With `factors` [m, s], of mean 1 for each model, a class has s samples, and the losses of a
    model on them are its class loss times its factors.
    """
    if factors is None:
        factors = torch.ones(len(mean), 1)
    labels = present.nonzero().flatten().repeat_interleave(factors.shape[1])
    per_sample = (by_class[:, present].unsqueeze(-1) * factors.unsqueeze(1)).flatten(1)
    known = losses_from_samples(per_sample, labels, len(present))
    return dataclasses.replace(known, mean=mean, by_class=by_class)


def criterion_input(by_class, own_by_class, present=None, n=0) -> CriterionInput:
    """Return a view with given class losses; the mean loss is their mean over present classes."""
    by_class = torch.tensor(by_class, dtype=torch.float64).reshape(-1, len(own_by_class))
    own = torch.tensor([own_by_class], dtype=torch.float64)
    present = torch.tensor(present or [True] * len(own_by_class))
    m = len(by_class)
    return CriterionInput(
        n,
        torch.zeros(m + 1, 2),
        losses(by_class[:, present].mean(1), by_class, present),
        losses(own[:, present].mean(1), own, present),
        received(torch.arange(m)),
        received(torch.tensor([m])),
        no_losses,
        context_without_contacts(),
    )


def rule_input(
    buffer,
    ids,
    own,
    *,
    n=0,
    contact_ids=(),
    previous=None,
    losses=(None, None),
    last_layer=None,
    **known,
):
    """Return the view of a rule whose agent `own` received the rows `ids` of a buffer.

    `known` has further knowledge of the agent.
    """
    contacts = Contacts(
        torch.tensor(contact_ids, dtype=torch.int64),
        torch.ones(len(contact_ids), dtype=torch.float64),
    )
    return CriterionInput(
        n,
        buffer,
        *losses,
        received(torch.tensor(ids, dtype=torch.int64)),
        received(torch.tensor([own])),
        no_losses,
        context_without_contacts(contacts_of=lambda: contacts, **known),
        previous=None if previous is None else torch.tensor(previous),
        last_layer=last_layer,
    )


def apply_algorithm(algorithm: Algorithm, view: CriterionInput) -> RuleOutput:
    """Compute lines 5 and 6 of Algorithm 2 for one agent."""
    return algorithm.weigh(view, {})[0]


def models(m: int, d: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return m random models of d parameters."""
    return torch.from_numpy(stream(seed, "models", m, d).standard_normal((m, d))).to(dtype)


# in cluster 0; cluster 1 has benign agents 7 and 8 and attacker 9
BENIGN, FELLOWS = ([0, 1, 2, 3], [4, 5, 6])


def ten_models(d=5, seed=0):
    """Return the models of the ten agents of `view_of`."""
    return torch.from_numpy(stream(seed, "models").normal(size=(10, d))).float()


def complete_links():
    """Return links of each agent to all others of its cluster."""
    cluster = np.array([0, 0, 0, 0, 1, 1])
    return (cluster[:, None] == cluster) & ~np.eye(6, dtype=bool)


def view_of(
    attack=None,
    *,
    models=None,
    agent=4,
    losses=None,
    sample_losses=None,
    see=("fellows", "benign"),
    links=complete_links,
    factor_pairs=(),
):
    """Return the view of an attacker in a round."""
    models = ten_models() if models is None else models
    ids = {
        ("benign", 0): BENIGN,
        ("fellows", 0): FELLOWS,
        ("benign", 1): [7, 8],
        ("fellows", 1): [9],
    }
    return AttackView(
        n=3,
        agent=agent,
        cluster=0,
        num_clusters=2,
        num_colluders=3,
        num_benign=4,
        receivers=torch.tensor([0, 1, 2, 3, 7, 8]),
        own=models[agent].clone(),
        previous=models[agent] - 0.5,
        data=Shard(torch.zeros(2, 3), torch.tensor([0, 1])),
        losses=losses or (lambda thetas: pytest.fail("losses")),
        sample_losses=sample_losses or (lambda thetas, labels=None: pytest.fail("losses")),
        factor_pairs=factor_pairs,
        threat=Threat(frozenset(see)) if attack is None else attack.threat,
        _ids_of=lambda whose, cluster: ids[whose, cluster],
        _peek=lambda chosen: gather_rows(models, chosen),
        _links=links,
    )


def craft(name, *, view=None, seed=0, **parameters):
    """Return the models that a built-in attack publishes."""
    attack = getattr(attacks, name)
    return attack(view or view_of(attack), stream(seed, "draw"), **parameters)


def assert_near(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)

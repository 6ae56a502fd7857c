"""IFCA: a coordinator holds K models, and each becomes the average of what the agents that it fits best made of it
(Ghosh, Chung, Yin and Ramchandran, "An efficient framework for clustered federated learning", NeurIPS 2020,
Algorithm 1, by model averaging).

The clustered baseline. What nothing else here needs, it has: a coordinator that all agents reach and trust, and the
number K of clusters. What all else here has, it lacks: nobody judges the models that are averaged, so that those of
malicious agents count like any other, unless a robust rule such as the trimmed mean takes the place of the average (as
in Ghosh, Hong, Yin and Ramchandran, "Robust federated learning in a heterogeneous environment", 2019, once clusters are
known).
"""

import dataclasses
import math
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.errors import ConfigError
from fedcb2o.federated import aggregation
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.aggregation import base, robust_rule
from fedcb2o.federated.aggregation.robust_rule import with_byzantine_count
from fedcb2o.federated.algorithm_spec import Algorithm, ClusterModels
from fedcb2o.federated.algorithms._local_training import local_training
from fedcb2o.federated.algorithms.base import require
from fedcb2o.federated.decisions import Decisions, Inbox
from fedcb2o.federated.ragged import Indices, Ragged
from fedcb2o.federated.types import Reduction
from fedcb2o.federated.validation import training_losses
from fedcb2o.plugins import PluginChoice


def ifca(
    *,
    models: int,
    weights: Literal["equal", "samples"] = "equal",
    rule: PluginChoice | None = None,
    restarts: int = 1,
    trial_rounds: int = 3,
) -> Algorithm:
    """IFCA, the baseline that knows the number of clusters and has a coordinator, which holds so many `models`, each
    the average of the agents that it fits best (Ghosh et al. 2020; see `federated.ifca`), or what a robust `rule` such
    as "trimmed_mean" makes of them.

    Beside that, agents train alone: whom they could ask, budget and graph, does not matter. With `restarts` it begins
    from so many sets of first models, and goes on from the one whose models fit best after `trial` rounds.
    """
    require("models", models, models >= 1, "1 or more")
    require("restarts", restarts, restarts >= 1, "1 or more")
    require("trial", trial_rounds, trial_rounds >= 1, "1 or more")
    robust = (
        None
        if rule is None
        else plugins.resolve_and_bind("rule", rule, aggregation, deferred=("f",))
    )
    if robust is not None:
        form = base.RULE_SIGNATURE.get(robust)
        if form is None or form.own_rows or robust_rule.extra_inputs(robust):
            raise ConfigError(
                "the `rule` of ifca looks at models alone, since a coordinator has none of its own and no data: take "
                "one such as trimmed_mean or krum"
            )
        if weights == "samples":
            raise ConfigError(
                '`weights` = "samples" goes without a `rule`, which says itself how models count'
            )
    clusters = ClusterModels(
        models,
        by_samples=weights == "samples",
        rule=robust,
        restarts=restarts,
        trial_rounds=trial_rounds,
    )
    return dataclasses.replace(local_training(), clusters=clusters)


def assign_clusters_(
    group: AgentGroup, members: Indices, held_rows: Int[np.ndarray, "N K"]
) -> list[tuple[int, float]]:
    """Which of the models in the rows `held` that it may choose from fits each of some agents best, and its loss: that
    of the least on its true training data, of equals the first. It takes a copy."""
    chosen = []
    for k in members.tolist():
        rows = held_rows[int(group.agents[k])]
        data = group.data.clean_training_data(k)
        losses = training_losses(
            group.spec, group.models, torch.from_numpy(rows), data, group.reference(k)
        ).mean
        best = int(losses.argmin())
        chosen.append((best, float(losses[best])))
        group.models[int(group.layout.own[k])] = group.models[int(rows[best])]
    return chosen


def cluster_means(
    ids: Int[np.ndarray, " K"],
    inbox: Inbox,
    clusters: ClusterModels,
    models: Float[Tensor, "p d"],
    malicious_share: float,
) -> Decisions:
    """How the K models, whose `ids` follow the agents', change: each to the average of what arrived for it, with equal
    weights or by numbers of samples, or to what a robust rule makes of it that assumes the attackers' `share`. One that
    nobody chose stays."""
    choices = Decisions.empty(ids, Ragged.empty(len(ids)), inbox)
    if clusters.rule is not None:
        for k, cluster in enumerate(ids.tolist()):
            there = inbox.ids.flat_index(np.array([k]))
            rows = torch.from_numpy(inbox.rows[there])
            rule = with_byzantine_count(
                clusters.rule, math.ceil(malicious_share * len(rows) - 1e-9), len(rows)
            )
            made = base.evaluate_rule(rule, base.gram_and_mixing(rule, models, rows, None)[0])
            if isinstance(made, Reduction) and len(rows):
                choices.reductions[cluster] = dataclasses.replace(made, rows=rows[made.rows])
            choices.weights[there] = np.nan if isinstance(made, Reduction) else made.numpy()
        return choices
    counts = inbox.num_samples if clusters.by_samples else np.ones(len(inbox.rows))
    owner = inbox.ids.row_ids
    total = np.bincount(owner, counts, len(ids))[owner]
    choices.weights[:] = np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)
    return choices


def as_decisions(means: Decisions, chosen: Int[np.ndarray, " N"]) -> Decisions:
    """The average that each agent's model is, from its view: its own model is not among those that it received."""
    agents = np.arange(len(chosen))
    received = means.received.take(chosen)
    places = means.received.flat_index(chosen)
    own = received.values == agents[received.row_ids]
    weights = means.weights[places]
    rows = means.rows[places]
    inbox = Inbox(
        received.filter(~own), rows[~own], np.zeros((~own).sum()), np.zeros((~own).sum(), np.int64)
    )
    choices = Decisions.empty(agents, Ragged.empty(len(agents)), inbox)
    choices.weights[:] = weights[~own]
    choices.own_weight[:] = np.bincount(received.row_ids[own], weights[own], len(agents))
    return choices

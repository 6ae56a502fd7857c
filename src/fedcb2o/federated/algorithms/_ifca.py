"""IFCA: clustered federated learning with a coordinator.

A coordinator holds K models. Each becomes the average of the models that agents trained from it,
where an agent chooses the model that fits it best. Ghosh, Chung, Yin and Ramchandran, "An efficient
framework for clustered federated learning" (NeurIPS 2020), Algorithm 1, by model averaging.

IFCA is the clustered baseline. In contrast to the other algorithms, it needs a coordinator that all
agents reach and trust, and the number K of clusters. It does not validate the averaged models, so
models of malicious agents count like all others. A robust rule such as the trimmed mean may replace
the average, as in Ghosh, Hong, Yin and Ramchandran, "Robust federated learning in a heterogeneous
environment" (2019), once clusters are known.
"""

import dataclasses
import math
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.errors import ConfigError, require
from fedcb2o.federated import aggregation
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.aggregation import base, robust_rule
from fedcb2o.federated.algorithms._local_training import local_training
from fedcb2o.federated.decisions import Decisions, Inbox
from fedcb2o.federated.ragged import AgentIds, Indices, Ragged, Rows
from fedcb2o.federated.run_spec import Algorithm, ClusterModels
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
    """Average the models of each cluster in a coordinator (IFCA).

    Ghosh et al. (2020). Apart from that, agents train alone: `budget` and graph have no effect.

    Args:
        models: Number K of models in the coordinator, 1 or more.
        weights: Equal weights, or weights by numbers of samples.
        rule: Robust rule instead of the average, such as "trimmed_mean".
        restarts: Number of sets of initial models, 1 or more. The set that fits best goes on.
        trial_rounds: Rounds after which the sets are compared, 1 or more.

    Raises:
        ConfigError: A parameter is out of range, or the rule reads more than models.
    """
    require("models", models, models >= 1, "1 or more")
    require("restarts", restarts, restarts >= 1, "1 or more")
    require("trial_rounds", trial_rounds, trial_rounds >= 1, "1 or more")
    robust = None
    if rule is not None:
        robust = plugins.resolve_and_bind("rule", rule, aggregation, deferred=("f",))
        signature = base.RULE_SIGNATURE.get(robust)
        if signature is None or signature.own_rows or robust_rule.extra_inputs(robust):
            raise ConfigError(
                "the `rule` of ifca must read models alone, because a coordinator has no model "
                "of its own and no data: take one such as trimmed_mean or krum"
            )
        if weights == "samples":
            raise ConfigError(
                '`weights` = "samples" goes without a `rule`, because a rule computes the weights'
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
    """Copy the model of least loss on clean training data to each agent's row, the first of equals.

    Returns the number of the chosen model, and its loss, for each agent.
    """
    assignments = []
    for k in members.tolist():
        rows = held_rows[int(group.agents[k])]
        data = group.data.clean_training_data(k)
        losses = training_losses(
            group.spec, group.models, torch.from_numpy(rows), data, group.reference(k)
        ).mean
        # The first of equal losses wins.
        best = int(losses.argmin())
        assignments.append((best, float(losses[best])))
        group.models[int(group.layout.own[k])] = group.models[int(rows[best])]
    return assignments


def cluster_means(
    ids: Int[np.ndarray, " K"],
    inbox: Inbox,
    clusters: ClusterModels,
    models: Float[Tensor, "p d"],
    malicious_share: float,
) -> Decisions:
    """Average received models by cluster; a model that no agent chose stays as it is."""
    decisions = Decisions.empty(AgentIds(ids), Ragged.empty(len(ids)), inbox)
    if clusters.rule is None:
        counts = inbox.num_samples if clusters.by_samples else np.ones(len(inbox.rows))
        cluster = inbox.ids.list_index
        total = np.bincount(cluster, counts, len(ids))[cluster]
        decisions.weights[:] = np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)
        return decisions

    for k, cluster_id in enumerate(ids.tolist()):
        index = inbox.ids.flat_index(np.array([k]))
        rows = torch.from_numpy(inbox.rows[index])
        # A product that is whole except for rounding is not rounded up.
        f = math.ceil(malicious_share * len(rows) - 1e-9)
        rule = robust_rule.with_byzantine_count(clusters.rule, f, len(rows))
        gram, _ = base.gram_and_mixing(rule, models, rows, None)
        outcome = base.evaluate_rule(rule, gram)
        decisions.f[k] = rule.keywords.get("f", math.nan)
        if not isinstance(outcome, Reduction):
            decisions.weights[index] = outcome.numpy()
            continue
        # A reduction of coordinates has no weight per model.
        decisions.weights[index] = np.nan
        if len(rows):
            reduction = dataclasses.replace(outcome, rows=rows[outcome.rows])
            decisions.reductions[cluster_id] = reduction
    return decisions


def as_decisions(means: Decisions, chosen: Int[np.ndarray, " N"]) -> Decisions:
    """Describe the average that is now each agent's model, for the records."""
    agents = AgentIds(np.arange(len(chosen)))
    received = means.received.take(chosen)
    index = means.received.flat_index(chosen)
    is_own = received.values == agents[received.list_index]
    weights = means.weights[index]
    rows = means.rows[index]

    # An agent's own model is not among those that it received.
    num_others = (~is_own).sum()
    inbox = Inbox(
        received.filter(~is_own),
        Rows(rows[~is_own]),
        np.zeros(num_others),
        np.zeros(num_others, np.int64),
    )
    decisions = Decisions.empty(agents, Ragged.empty(len(agents)), inbox)
    decisions.weights[:] = weights[~is_own]
    decisions.own_weight[:] = np.bincount(received.list_index[is_own], weights[is_own], len(agents))
    return decisions

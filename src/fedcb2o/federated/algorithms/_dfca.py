"""DFCA: IFCA without a coordinator.

Every agent holds K models, one per cluster. It trains the model that fits it best, sends only that
one, and averages each model with the received models of the same cluster. Kirch, Becker, Harmeling
and Koketsu Rodrigues, "DFCA: decentralized federated clustering algorithm" (arXiv 2510.15300,
2025), Algorithm 1 and eq. (7). Their running average, eq. (8), is the same sum in another order.

A sender states the cluster of its model, and receivers believe it. Received models are not
validated.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Int

from fedcb2o.errors import require
from fedcb2o.federated import selection as _selections
from fedcb2o.federated.algorithms._local_training import local_training
from fedcb2o.federated.decisions import Decisions, Inbox
from fedcb2o.federated.mixing import MixingMatrix
from fedcb2o.federated.ragged import AgentIds, Ragged
from fedcb2o.federated.run_spec import Algorithm, ClusterModels
from fedcb2o.plugins import PluginChoice


def dfca(*, models: int, selection: PluginChoice = "uniform") -> Algorithm:
    """Average one model per cluster with the peers' models (DFCA).

    Kirch et al. (2025). Each agent holds all models. It trains the model that fits it best.

    Args:
        models: Number K of models per agent, 1 or more.
    """
    require("models", models, models >= 1, "1 or more")
    return dataclasses.replace(
        local_training(),
        select=_selections.resolve_selection(selection),
        clusters=ClusterModels(models, per_agent=True),
    )


def running_averages(
    held_rows: Int[np.ndarray, "N K"],
    own_rows: Int[np.ndarray, " N"],
    is_finite: Bool[np.ndarray, " N"],
    chosen: Int[np.ndarray, " N"],
    inbox: Inbox,
) -> MixingMatrix:
    """Average each held model with received models of its cluster (eq. 7).

    An agent trained the model of its cluster `chosen`; a result that is not finite is lost.
    """
    num_agents, k = held_rows.shape
    rows = held_rows.copy()
    # A trained model replaces the one of its cluster, unless training diverged: it is then lost.
    rows[np.flatnonzero(is_finite), chosen[is_finite]] = own_rows[is_finite]

    # Pairs (target model, sender), sorted so that the sum does not depend on the order of arrival.
    received_for = inbox.ids.list_index * k + chosen[inbox.ids.values]
    target = np.concatenate([np.arange(held_rows.size), received_for])
    sender = np.concatenate([np.repeat(np.arange(num_agents), k), inbox.ids.values])
    columns = np.concatenate([rows.ravel(), inbox.rows])
    order = np.lexsort((sender, target))
    target = target[order]
    columns = columns[order]

    values = (1 / np.bincount(target))[target].astype(np.float32)
    offsets = np.searchsorted(target, np.arange(held_rows.size + 1))
    return MixingMatrix(held_rows.ravel(), offsets, columns, values)


def as_decisions(
    asked: Ragged, inbox: Inbox, previous: Int[np.ndarray, " N"], chosen: Int[np.ndarray, " N"]
) -> Decisions:
    """Describe the average that is each agent's model, by the clusters before and after."""
    decisions = Decisions.empty(AgentIds(np.arange(len(chosen))), asked, inbox)
    owner = inbox.ids.list_index
    # A sender's model counts for its own cluster only.
    counted: Bool[np.ndarray, " m"] = previous[inbox.ids.values] == chosen[owner]
    weight = 1 / (1 + np.bincount(owner[counted], minlength=len(chosen)))
    decisions.weights[:] = np.where(counted, weight[owner], 0.0)
    decisions.own_weight[:] = weight
    return decisions

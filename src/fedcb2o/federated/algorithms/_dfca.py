"""DFCA: IFCA without a coordinator. Every agent holds K models, trains the one that fits it best, sends that alone, and
averages each with what those whom it asked made of the same (Kirch, Becker, Harmeling and Koketsu Rodrigues, "DFCA:
decentralized federated clustering algorithm", arXiv 2510.15300, 2025; Algorithm 1 and eq. (7), of which the running
average of eq. (8) is another order of the same sum).

Who sends a model says of which cluster it is, and is believed: nobody judges what is averaged.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Int

from fedcb2o.federated import selection as _selections
from fedcb2o.federated.algorithm_spec import Algorithm, ClusterModels
from fedcb2o.federated.algorithms._local_training import local_training
from fedcb2o.federated.algorithms.base import require
from fedcb2o.federated.decisions import Decisions, Inbox
from fedcb2o.federated.mixing import MixingMatrix
from fedcb2o.federated.ragged import Ragged
from fedcb2o.plugins import PluginChoice


def dfca(*, models: int, selection: PluginChoice = "uniform") -> Algorithm:
    """DFCA, IFCA without a coordinator: every agent holds so many `models`, trains the one that fits it best, and
    averages each with what those whom it asks made of it (Kirch et al. 2025; see `federated.dfca`)."""
    require("models", models, models >= 1, "1 or more")
    chosen = _selections.resolve_selection(selection)
    return dataclasses.replace(
        local_training(), select=chosen, clusters=ClusterModels(models, per_agent=True)
    )


def running_averages(
    held_rows: Int[np.ndarray, "N K"],
    own_rows: Int[np.ndarray, " N"],
    is_finite: Bool[np.ndarray, " N"],
    chosen: Int[np.ndarray, " N"],
    inbox: Inbox,
) -> MixingMatrix:
    """How the models in the rows `held` change: each to the mean of itself and of those that arrived for the cluster
    that their sender has `chosen`. The one that an agent trained lies in its `own` row, and is lost where it is not
    `whole`, not finite that is."""
    agents, k = held_rows.shape
    rows = held_rows.copy()
    rows[np.flatnonzero(is_finite), chosen[is_finite]] = own_rows[is_finite]
    target = np.concatenate(
        [np.arange(held_rows.size), inbox.ids.row_ids * k + chosen[inbox.ids.values]]
    )
    sender = np.concatenate([np.repeat(np.arange(agents), k), inbox.ids.values])
    columns = np.concatenate([rows.ravel(), inbox.rows])
    order = np.lexsort((sender, target))
    target = target[order]
    columns = columns[order]
    values = (1 / np.bincount(target))[target].astype(np.float32)
    return MixingMatrix(
        held_rows.ravel(), np.searchsorted(target, np.arange(held_rows.size + 1)), columns, values
    )


def as_decisions(
    asked: Ragged, inbox: Inbox, previous: Int[np.ndarray, " N"], chosen: Int[np.ndarray, " N"]
) -> Decisions:
    """What went into the model that each agent has now `chosen`, where `before` says whose model each trained: of what
    it received that of the same cluster, and what it held itself."""
    choices = Decisions.empty(np.arange(len(chosen)), asked, inbox)
    owner = inbox.ids.row_ids
    counted: Bool[np.ndarray, " m"] = previous[inbox.ids.values] == chosen[owner]
    each = 1 / (1 + np.bincount(owner[counted], minlength=len(chosen)))
    choices.weights[:], choices.own_weight[:] = np.where(counted, each[owner], 0.0), each
    return choices

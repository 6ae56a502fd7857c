"""FedCB2O: consensus-based bi-level optimisation (alg:FedCB2O, alg:localAggregation).

The discretisation of eq:fedcb2o_dynamics. Agent j computes from its validation losses L_j:

1. Q_beta, the sub-level set of the average loss (eq:clustered_csp): `SublevelSet`, whose level is
   the beta-quantile of `consensus.quantile`.
2. G_j, the robustness criterion (eq:robust_criterion_G_LF): `evaluate_criterion`, with
   `criteria.class_loss_gap` by default.
3. mu^i = exp(-alpha G^i) over Q_beta, normalised (eq:comp_csp): `consensus.weights`.
4. m_j = sum_i mu^i theta^i, the consensus point, and the step towards it (eq:local_agg_update).

Steps 3 and 4 are lines 6 and 7 of `federated.algorithm2`.

Example:
    >>> algorithm = fedcb2o(criterion="class_loss_gap", alpha=10.0, beta=0.5, own_model="judged")
    >>> algorithm.alpha, algorithm.needs_losses
    (10.0, True)
"""

import dataclasses
import functools
import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o import consensus, plugins
from fedcb2o.errors import ConfigError
from fedcb2o.federated import criteria
from fedcb2o.federated import selection as _selections
from fedcb2o.federated.aggregation.coordinatewise import weighted_median
from fedcb2o.federated.algorithm_spec import Algorithm, Likelihood
from fedcb2o.federated.algorithms.base import require, require_mixing_factor
from fedcb2o.federated.algorithms.sublevel import (
    NEAR_COPY_VALUE,
    LevelTest,
    MinContacts,
    OwnModel,
    SublevelSet,
)
from fedcb2o.federated.plugin_outputs import validated_criterion
from fedcb2o.federated.types import (
    Criterion,
    CriterionInput,
    CriterionValues,
    Reduction,
    RuleOutput,
    batched,
)
from fedcb2o.plugins import PluginChoice


def fedcb2o(
    *,
    criterion: PluginChoice = "class_loss_gap",
    criterion_from_round: int = 0,
    alpha: float = 10.0,
    beta: float | None = None,
    delta_q: float | None = None,
    quantile: Literal["plain", "averaged"] | None = None,
    loss_tolerance: float | None = None,
    max_distance: float | None = None,
    min_distance: float | None = None,
    interpolation: float = 1.0,
    own_model: OwnModel = "excluded",
    own_candidate: bool = False,
    min_contacts: MinContacts = 1,
    point: Literal["mean", "median"] = "mean",
    selection: PluginChoice = "prob_sampling",
    kappa: float = 2.0,
    zeta: float = 0.5,
    likelihood: Likelihood = "loss",
    first_contact: Literal["average", "whole"] = "average",
    lambda1: float = 10.0,
    mixing_factor: float | Literal["lambda1*gamma"] = "lambda1*gamma",
) -> Algorithm:
    """Aggregate by the consensus point of a robustness criterion (FedCB2O).

    The defaults are the paper's text. The authors' released code has own_model = "trusted",
    own_candidate = true, first_contact = "whole", mixing_factor = 1 and alpha = 2. The exact
    consensus point (eq:clustered_csp) has selection = "everyone", own_model = "judged" and a
    `beta`.

    Args:
        criterion: Robustness criterion G.
        criterion_from_round: T_G, the first round with criterion G, counted from 0; the average
            loss is used before (rem:FedCB2Oimproved).
        alpha: alpha in the weights exp(-alpha G), 0 or more.
        beta: Share of the models in the sub-level set Q_beta, above 0 and at most 1; None for all.
        delta_q: Amount added to the level of Q_beta, 0 or more.
        quantile: Level of Q_beta: the "plain" beta-quantile of the text after eq:q_beta, or the
            "averaged" one of eq:Q_beta.
        loss_tolerance: See `SublevelSet` (beyond the paper).
        max_distance: See `SublevelSet` (beyond the paper).
        min_distance: See `SublevelSet` (beyond the paper).
        interpolation: Share of the way to a received model at which L and G are computed, above 0
            and at most 1. Below 1, a model is evaluated by the effect of a step towards it (beyond
            the paper).
        own_model: "excluded" leaves the agent's own model out, as in Algorithm 2. "judged"
            evaluates it by the criterion like a peer's model. "trusted" gives it the weight of the
            most trusted peer, as in the released code.
        own_candidate: An agent may sample itself.
        min_contacts: See `SublevelSet` (beyond the paper).
        point: Weighted "mean" of the models, or weighted "median" of each coordinate (beyond the
            paper).
        selection: Peer selection (line 1).
        kappa: kappa in the update of the likelihoods, 0 or more (line 4).
        zeta: zeta in the update of the likelihoods, above 0 and at most 1.
        likelihood: Likelihoods count the "loss" L, or "loss+criterion", L + max(G, 0) (beyond the
            paper).
        first_contact: "whole" takes a peer's first likelihood without averaging.
        lambda1: lambda1, the drift towards the consensus point, above 0 (line 7).
        mixing_factor: Factor in eq:local_agg_update, above 0 and at most 1; by default
            lambda1 * gamma.

    Returns:
        The algorithm.

    Raises:
        ConfigError: A parameter is out of range, or `delta_q` or `quantile` is given without
            `beta`.
    """
    require("alpha", alpha, alpha >= 0, "0 or more")
    require("kappa", kappa, kappa >= 0, "0 or more")
    require("zeta", zeta, 0 < zeta <= 1, "above 0 and at most 1")
    require("lambda1", lambda1, lambda1 > 0, "above 0")
    require("interpolation", interpolation, 0 < interpolation <= 1, "above 0 and at most 1")
    require("criterion_from_round", criterion_from_round, criterion_from_round >= 0, "0 or more")
    _require_optional("loss_tolerance", loss_tolerance, minimum=0.0)
    _require_optional("max_distance", max_distance)
    _require_optional("min_distance", min_distance)

    level = _level(beta, delta_q, quantile)
    sublevel = SublevelSet(level, loss_tolerance, max_distance, min_distance, min_contacts)
    robust = plugins.resolve_and_bind("criterion", criterion, criteria)
    average = functools.partial(criteria.average_loss)

    def criterion_values(inputs: CriterionInput) -> CriterionValues:
        current = robust if inputs.n >= criterion_from_round else average
        is_average = current.func is criteria.average_loss
        own = own_model
        # A loss can evaluate the agent's own model, unlike a gap to it.
        if own == "trusted" and is_average:
            own = "judged"
        return evaluate_criterion(inputs, current, sublevel, own, is_average_loss=is_average)

    factor = None
    if not isinstance(mixing_factor, str):
        factor = require_mixing_factor(mixing_factor)
    is_batched = criteria.is_batched(robust) and min_contacts == 1 and point == "mean"
    return Algorithm(
        select=_selections.resolve_selection(selection),
        criterion=batched(criterion_values) if is_batched else criterion_values,
        alpha=alpha,
        point=_median_point if point == "median" else None,
        needs_losses=True,
        lambda1=lambda1,
        mixing_factor=factor,
        own_candidate=own_candidate,
        kappa=kappa,
        zeta=zeta,
        likelihood=likelihood,
        interpolation=interpolation,
        first_contact=first_contact,
        keeps_previous=min_distance is not None,
    )


def _require_optional(name: str, value: float | None, minimum: float | None = None) -> None:
    """Check an optional value: above 0, or finite and at least `minimum`."""
    if value is None:
        return
    if minimum is None:
        require(name, value, value > 0, "above 0")
    else:
        require(name, value, minimum <= value < math.inf, f"{minimum:g} or more")


def _level(
    beta: float | None, delta_q: float | None, quantile: Literal["plain", "averaged"] | None
) -> LevelTest | None:
    """Return the level test of Q_beta (eq:Q_beta); None without `beta`."""
    if beta is None:
        if delta_q is not None or quantile is not None:
            raise ConfigError(
                "`delta_q` and `quantile` set the level of the sub-level set: they need a `beta`"
            )
        return None
    require("beta", beta, 0 < beta <= 1, "above 0 and at most 1")
    if delta_q is not None:
        _require_optional("delta_q", delta_q, minimum=0.0)
    return functools.partial(
        consensus.sublevel_mask,
        beta=beta,
        delta_q=delta_q or 0.0,
        averaged=quantile == "averaged",
    )


def evaluate_criterion(
    inputs: CriterionInput,
    criterion: Criterion,
    sublevel: SublevelSet,
    own_model: OwnModel,
    *,
    is_average_loss: bool = False,
) -> CriterionValues:
    """Compute the criterion on the sub-level set (Algorithm 2, line 5).

    Args:
        inputs: Models and losses of one agent, or of several.
        criterion: G.
        sublevel: Sub-level set of the average loss (eq:clustered_csp). G is infinite outside of its
            ball, and at least `NEAR_COPY_VALUE` for a model almost identical to the agent's own.
        own_model: "excluded" as in Algorithm 2; "judged" by the criterion like a peer's model; or
            "trusted", as much as the most trusted peer's, as in the authors' released code.
        is_average_loss: The criterion is the average loss itself.

    Returns:
        Values of the received models and of the agent's own, and the members of the set.
    """
    # 1. The sub-level set.
    is_far, is_near = sublevel.distance_masks(inputs)
    in_sublevel_set = sublevel.membership(inputs, own_model, is_far | is_near)

    # 2. G of the received models.
    restricted = dataclasses.replace(inputs, in_sublevel_set=in_sublevel_set[..., :-1])
    values = validated_criterion(criterion, restricted)
    values = torch.where(is_near, values.clamp(min=NEAR_COPY_VALUE), values)
    values = values.masked_fill(is_far, torch.inf)

    # 3. G of the agent's own model.
    own = values.new_zeros(*values.shape[:-1], 1)
    if own_model == "judged":
        own = validated_criterion(criterion, inputs.with_own_only())
    elif own_model == "trusted":
        peers = in_sublevel_set[..., :-1]
        trusted = values.masked_fill(~peers, torch.inf)
        best = torch.cat([trusted, torch.full_like(own, torch.inf)], -1).amin(-1, keepdim=True)
        own = torch.where(peers.any(-1, keepdim=True), best, own)
    return CriterionValues(values, own, in_sublevel_set, is_average_loss)


def _median_point(inputs: CriterionInput, mu: Float[Tensor, " k"]) -> RuleOutput:
    """Compute the weighted median instead of the mean (beyond the paper)."""
    if not mu.any():
        return RuleOutput(mu)
    rows = inputs.received.with_own(inputs.own_entry).rows
    is_weighted = mu > 0
    median = functools.partial(weighted_median, weights=mu[is_weighted])
    return RuleOutput(Reduction(rows[is_weighted], median, weights=mu[is_weighted]))

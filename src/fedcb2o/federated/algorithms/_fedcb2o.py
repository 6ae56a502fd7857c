"""FedCB2O."""

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
    """FedCB2O (alg:FedCB2O, alg:localAggregation); the defaults are the paper's text.

    `criterion` is G, used from round `criterion_from_round` = T_G on (rounds count from 0), the average loss before
    (rem:FedCB2Oimproved). `mixing_factor` is that of eq:local_agg_update, lambda1 * gamma unless it is given.
    The released code has own_model = "trusted", own_candidate = true, first_contact = "whole", mixing_factor = 1
    and alpha = 2. The exact consensus point (eq:clustered_csp) is selection = "everyone", own_model = "judged"
    and a `beta`, in the practical form of the text after eq:q_beta; with quantile = "averaged" and a `delta_q` it has
    the level of eq:Q_beta.

    What else there is goes beyond the paper (docs/equations.md). `judged_at` is the share of the way to a peer's model
    after which it is judged: below 1 by what a step towards it does. `tested` widens the sub-level set by what does not
    lose more than the own model by so many standard errors, or is one by itself. `likelihood` "loss+criterion" counts
    G, where it is above 0, beside L in a peer's record (eq:update_sampling_likelihood). `ball`, `apart` and
    `counts_from` are those of `Sublevel`, `point` that of `by_criterion`.
    """
    require("alpha", alpha, alpha >= 0, "0 or more")
    require("beta", beta, beta is None or 0 < beta <= 1, "above 0 and at most 1")
    require("delta_q", delta_q, delta_q is None or 0 <= delta_q < math.inf, "0 or more")
    if beta is None and (delta_q is not None or quantile is not None):
        raise ConfigError(
            "`delta_q` and `quantile` go with a `beta`: they are about the level of its sub-level set"
        )
    require(
        "loss_tolerance",
        loss_tolerance,
        loss_tolerance is None or 0 <= loss_tolerance < math.inf,
        "0 or more",
    )
    require("max_distance", max_distance, max_distance is None or max_distance > 0, "above 0")
    require("min_distance", min_distance, min_distance is None or min_distance > 0, "above 0")
    require("interpolation", interpolation, 0 < interpolation <= 1, "above 0 and at most 1")
    require("kappa", kappa, kappa >= 0, "0 or more")
    require("zeta", zeta, 0 < zeta <= 1, "above 0 and at most 1")
    require("criterion_from_round", criterion_from_round, criterion_from_round >= 0, "0 or more")
    level = None
    if beta is not None:
        averaged = quantile == "averaged"
        level = functools.partial(
            consensus.sublevel_mask, beta=beta, delta_q=delta_q or 0.0, averaged=averaged
        )
    sublevel = SublevelSet(level, loss_tolerance, max_distance, min_distance, min_contacts)
    robust = plugins.resolve_and_bind("criterion", criterion, criteria)
    average = functools.partial(criteria.average_loss)

    def criterion_values(inputs: CriterionInput) -> CriterionValues:
        current = robust if inputs.n >= criterion_from_round else average
        is_average = current.func is criteria.average_loss
        own = own_model
        if own == "trusted" and is_average:  # a loss, unlike a gap, can evaluate the own model
            own = "judged"
        return evaluate_criterion(inputs, current, sublevel, own, is_average_loss=is_average)

    is_batched = criteria.is_batched(robust) and min_contacts == 1 and point == "mean"
    return Algorithm(
        select=_selections.resolve_selection(selection),
        criterion=batched(criterion_values) if is_batched else criterion_values,
        alpha=alpha,
        point=_median_point if point == "median" else None,
        needs_losses=True,
        lambda1=require("lambda1", lambda1, lambda1 > 0, "above 0"),
        mixing_factor=None
        if isinstance(mixing_factor, str)
        else require_mixing_factor(mixing_factor),
        own_candidate=own_candidate,
        kappa=kappa,
        zeta=zeta,
        likelihood=likelihood,
        interpolation=interpolation,
        first_contact=first_contact,
        keeps_previous=min_distance is not None,
    )


def evaluate_criterion(
    inputs: CriterionInput,
    criterion: Criterion,
    sublevel: SublevelSet,
    own_model: OwnModel,
    *,
    is_average_loss: bool = False,
) -> CriterionValues:
    """Compute the values of the criterion on the sub-level set (Algorithm 2, line 5).

    Args:
        inputs: Models and losses of one agent, or of several.
        criterion: G.
        sublevel: Sub-level set of the average loss (eq:clustered_csp). G is infinite outside of its
            ball, and at least `NEAR_COPY_VALUE` for a model almost identical to the agent's own.
        own_model: "excluded" as in Algorithm 2; "judged" by the criterion like a peer's model; or
            "trusted", as much as the most trusted peer's, as in the authors' released code.
        is_average_loss: Whether the criterion is the average loss itself.

    Returns:
        Values of the received models and of the agent's own, and the members of the set.
    """
    is_far, is_near = sublevel.distance_masks(inputs)
    counted = sublevel.membership(inputs, own_model, is_far | is_near)

    seen = dataclasses.replace(inputs, in_sublevel_set=counted[..., :-1])
    values = validated_criterion(criterion, seen)
    values = torch.where(is_near, values.clamp(min=NEAR_COPY_VALUE), values)
    values = values.masked_fill(is_far, torch.inf)

    own = values.new_zeros(*values.shape[:-1], 1)
    if own_model == "judged":
        own = validated_criterion(criterion, inputs.with_own_only())
    elif own_model == "trusted":
        peers = counted[..., :-1]
        trusted = values.masked_fill(~peers, torch.inf)
        best = torch.cat([trusted, torch.full_like(own, torch.inf)], -1).amin(-1, keepdim=True)
        own = torch.where(peers.any(-1, keepdim=True), best, own)
    return CriterionValues(values, own, counted, is_average_loss)


def _median_point(inputs: CriterionInput, mu: Float[Tensor, " k"]) -> RuleOutput:
    """Return the weighted median of each coordinate in place of the mean (beyond the paper)."""
    if not mu.any():
        return RuleOutput(mu)
    rows = inputs.received.with_own(inputs.own_entry).rows
    is_weighted = mu > 0
    median = functools.partial(weighted_median, weights=mu[is_weighted])
    return RuleOutput(Reduction(rows[is_weighted], median, weights=mu[is_weighted]))

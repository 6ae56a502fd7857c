"""FedCB2O."""

import dataclasses
import functools
import math
from typing import Literal

import torch

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
    min_contacts: MinContacts = "first",
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
        "tested",
        loss_tolerance,
        loss_tolerance is None or 0 <= loss_tolerance < math.inf,
        "0 or more",
    )
    require("ball", max_distance, max_distance is None or max_distance > 0, "above 0")
    require("apart", min_distance, min_distance is None or min_distance > 0, "above 0")
    require("judged_at", interpolation, 0 < interpolation <= 1, "above 0 and at most 1")
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

    def weigh(judged: CriterionInput) -> RuleOutput:
        now = robust if judged.n >= criterion_from_round else average
        own = own_model
        if (
            own == "trusted" and now.func is criteria.average_loss
        ):  # a loss, unlike a gap, can judge the own model
            own = "judged"
        decided = consensus_rule(
            judged, now, alpha=alpha, sublevel=sublevel, own_model=own, point=point
        )
        twice = now.func is criteria.average_loss  # no G yet: L is not counted twice
        return dataclasses.replace(decided, criterion_values=None) if twice else decided

    several = criteria.is_batched(robust) and min_contacts == "first" and point == "mean"
    return Algorithm(
        select=_selections.resolve_selection(selection),
        rule=batched(weigh) if several else weigh,
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


def consensus_rule(
    inputs: CriterionInput,
    criterion: Criterion,
    *,
    alpha: float,
    sublevel: SublevelSet,
    own_model: OwnModel,
    point: Literal["mean", "median"] = "mean",
) -> RuleOutput:
    """The weights mu_j = exp(-alpha G), normalised, of the received models and, last, the agent's own (eq:comp_csp).

    Only models in the `sublevel` set of the average loss count (eq:clustered_csp). G is infinite outside of its ball,
    and at least `NEAR` of who is hardly apart from the own model. This is `"excluded"` as in Algorithm 2, `"judged"` by
    the criterion like a peer's, or `"trusted"`: it counts as much as the most trusted peer, as in the authors' released
    code. With point="median", beyond the paper, m_j is the weighted median of each coordinate.
    """
    outside, near = sublevel.distance_masks(inputs)
    counted = sublevel.membership(inputs, own_model, outside | near)
    values = validated_criterion(
        criterion, dataclasses.replace(inputs, in_sublevel_set=counted[..., :-1])
    )
    values = torch.where(near, values.clamp(min=NEAR_COPY_VALUE), values).masked_fill(
        outside, torch.inf
    )
    itself = values.new_zeros(*values.shape[:-1], 1)
    if own_model == "judged":
        itself = validated_criterion(criterion, inputs.with_own_only())
    elif own_model == "trusted":
        peers = counted[..., :-1]
        best = torch.cat(
            [values.masked_fill(~peers, torch.inf), torch.full_like(itself, torch.inf)], -1
        )
        itself = torch.where(peers.any(-1, keepdim=True), best.amin(-1, keepdim=True), itself)
    mu = consensus.weights(torch.cat([values, itself], -1), alpha, counted)
    if point == "mean" or not mu.any():
        return RuleOutput(mu, criterion_values=values)
    rows = inputs.received.with_own(inputs.own_entry).rows
    some = mu > 0
    median = functools.partial(weighted_median, weights=mu[some])
    return RuleOutput(Reduction(rows[some], median, weights=mu[some]), criterion_values=values)

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
from fedcb2o.federated.algorithms.base import _check, _check_factor
from fedcb2o.federated.algorithms.sublevel import NEAR, Meeting, OwnModel, Sublevel
from fedcb2o.federated.plugin_outputs import values_of
from fedcb2o.federated.types import (
    Criterion,
    Judged,
    Reduction,
    Weighed,
    together,
)
from fedcb2o.plugins import Named


def fedcb2o(
    *,
    criterion: Named = "class_loss_gap",
    criterion_from_round: int = 0,
    alpha: float = 10.0,
    beta: float | None = None,
    delta_q: float | None = None,
    quantile: Literal["plain", "averaged"] | None = None,
    tested: float | None = None,
    ball: float | None = None,
    apart: float | None = None,
    judged_at: float = 1.0,
    own_model: OwnModel = "excluded",
    own_candidate: bool = False,
    counts_from: Meeting = "first",
    point: Literal["mean", "median"] = "mean",
    selection: Named = "prob_sampling",
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
    _check("alpha", alpha, alpha >= 0, "0 or more")
    _check("beta", beta, beta is None or 0 < beta <= 1, "above 0 and at most 1")
    _check("delta_q", delta_q, delta_q is None or 0 <= delta_q < math.inf, "0 or more")
    if beta is None and (delta_q is not None or quantile is not None):
        raise ConfigError("`delta_q` and `quantile` go with a `beta`: they are about the level of its sub-level set")
    _check("tested", tested, tested is None or 0 <= tested < math.inf, "0 or more")
    _check("ball", ball, ball is None or ball > 0, "above 0")
    _check("apart", apart, apart is None or apart > 0, "above 0")
    _check("judged_at", judged_at, 0 < judged_at <= 1, "above 0 and at most 1")
    _check("kappa", kappa, kappa >= 0, "0 or more")
    _check("zeta", zeta, 0 < zeta <= 1, "above 0 and at most 1")
    _check("criterion_from_round", criterion_from_round, criterion_from_round >= 0, "0 or more")
    level = None
    if beta is not None:
        averaged = quantile == "averaged"
        level = functools.partial(consensus.sublevel_mask, beta=beta, delta_q=delta_q or 0.0, averaged=averaged)
    sublevel = Sublevel(level, tested, ball, apart, counts_from)
    robust, average = plugins.named("criterion", criterion, criteria), functools.partial(criteria.average_loss)

    def weigh(judged: Judged) -> Weighed:
        now = robust if judged.n >= criterion_from_round else average
        own = own_model
        if own == "trusted" and now.func is criteria.average_loss:  # a loss, unlike a gap, can judge the own model
            own = "judged"
        decided = by_criterion(judged, now, alpha=alpha, sublevel=sublevel, own_model=own, point=point)
        twice = now.func is criteria.average_loss  # no G yet: L is not counted twice
        return dataclasses.replace(decided, values=None) if twice else decided

    several = criteria.judges_together(robust) and counts_from == "first" and point == "mean"
    return Algorithm(
        select=_selections.named(selection),
        weigh=together(weigh) if several else weigh,
        judges=True,
        lambda1=_check("lambda1", lambda1, lambda1 > 0, "above 0"),
        mixing_factor=None if isinstance(mixing_factor, str) else _check_factor(mixing_factor),
        own_candidate=own_candidate,
        kappa=kappa,
        zeta=zeta,
        likelihood=likelihood,
        judged_at=judged_at,
        first_contact=first_contact,
        keeps_before=apart is not None,
    )


def by_criterion(
    judged: Judged,
    criterion: Criterion,
    *,
    alpha: float,
    sublevel: Sublevel,
    own_model: OwnModel,
    point: Literal["mean", "median"] = "mean",
) -> Weighed:
    """The weights mu_j = exp(-alpha G), normalised, of the received models and, last, the agent's own (eq:comp_csp).

    Only models in the `sublevel` set of the average loss count (eq:clustered_csp). G is infinite outside of its ball,
    and at least `NEAR` of who is hardly apart from the own model. This is `"excluded"` as in Algorithm 2, `"judged"` by
    the criterion like a peer's, or `"trusted"`: it counts as much as the most trusted peer, as in the authors' released
    code. With point="median", beyond the paper, m_j is the weighted median of each coordinate.
    """
    outside, near = sublevel.by_distance(judged)
    counted = sublevel.counted(judged, own_model, outside | near)
    values = values_of(criterion, dataclasses.replace(judged, among=counted[..., :-1]))
    values = torch.where(near, values.clamp(min=NEAR), values).masked_fill(outside, torch.inf)
    itself = values.new_zeros(*values.shape[:-1], 1)
    if own_model == "judged":
        itself = values_of(criterion, judged.itself())
    elif own_model == "trusted":
        peers = counted[..., :-1]
        best = torch.cat([values.masked_fill(~peers, torch.inf), torch.full_like(itself, torch.inf)], -1)
        itself = torch.where(peers.any(-1, keepdim=True), best.amin(-1, keepdim=True), itself)
    mu = consensus.weights(torch.cat([values, itself], -1), alpha, counted)
    if point == "mean" or not mu.any():
        return Weighed(mu, values=values)
    rows, some = judged.received.with_own(judged.me).rows, mu > 0
    median = functools.partial(weighted_median, weights=mu[some])
    return Weighed(Reduction(rows[some], median, weights=mu[some]), values=values)

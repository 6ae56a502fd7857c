"""FedCB2O: consensus-based bi-level optimisation (alg:FedCB2O, alg:localAggregation).

The discretisation of eq:fedcb2o_dynamics. From its validation losses L_j, agent j computes

- Q_beta, the sub-level set of the average loss (eq:clustered_csp): `SublevelCriterion.members`,
  whose level is the beta-quantile q_beta of `consensus.quantile`;
- G_j, the robustness criterion (eq:robust_criterion_G_LF): by default `criteria.class_loss_gap`;
- mu_j^i = exp(-alpha G_j(theta^i)) over Q_beta, normalised (eq:comp_csp): `consensus.weights`;
- m_j = sum_i mu_j^i theta^i, the consensus point, and the step towards it (eq:local_agg_update).

Q_beta and G_j are line 5 of `federated.algorithm2`, mu_j is line 6, and the step is line 7.

Example:
    >>> algorithm = fedcb2o(criterion="class_loss_gap", alpha=10.0, beta=0.5, own_model="judged")
    >>> algorithm.alpha, algorithm.needs_losses
    (10.0, True)
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedcb2o import consensus, plugins
from fedcb2o.errors import ConfigError
from fedcb2o.federated import criteria
from fedcb2o.federated import selection as _selections
from fedcb2o.federated.aggregation.coordinatewise import weighted_median
from fedcb2o.federated.aggregation.gram_matrix import relative_distances
from fedcb2o.federated.algorithms.parameter_checks import require, require_mixing_factor
from fedcb2o.federated.criteria.standard_errors import standard_error_of_mean
from fedcb2o.federated.plugin_outputs import validated_criterion
from fedcb2o.federated.run_spec import Algorithm, Likelihood, OwnLikelihood
from fedcb2o.federated.types import (
    Criterion,
    CriterionInput,
    CriterionValues,
    Reduction,
    RuleOutput,
)
from fedcb2o.plugins import PluginChoice

OwnModel = Literal["excluded", "judged", "trusted"]
LevelTest = Callable[[Float[Tensor, " m"]], Bool[Tensor, " m"]]
"""Function from losses to a mask of those that do not exceed the level."""

NEAR_COPY_VALUE = 2.0
"""Least value of G, in nats, for a model that is almost identical to the agent's own.

A model of ten classes that knows nothing loses about as much. The value is recorded like every G,
but it decays, because benign peers may be near after a round or two.
"""


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
    min_contacts: Literal[1, 2] = 1,
    point: Literal["mean", "median"] = "mean",
    selection: PluginChoice = "prob_sampling",
    kappa: float = 2.0,
    zeta: float = 0.5,
    likelihood: Likelihood = "loss",
    first_contact: Literal["average", "whole"] = "average",
    own_likelihood: OwnLikelihood | None = None,
    lambda1: float = 10.0,
    mixing_factor: float | Literal["lambda1*gamma"] = "lambda1*gamma",
) -> Algorithm:
    """Aggregate by the consensus point of a robustness criterion (FedCB2O).

    The defaults are the paper's text. The authors' released code has own_model = "trusted",
    own_candidate = true, first_contact = "whole", own_likelihood = "every_round", mixing_factor = 1
    and alpha = 2. The exact consensus point (eq:clustered_csp) has selection = "everyone",
    own_model = "judged" and a `beta`.

    Args:
        criterion: Robustness criterion G.
        criterion_from_round: T_G, the first round with criterion G, counted from 0; the average
            loss is used before (rem:FedCB2Oimproved).
        alpha: alpha in the weights exp(-alpha G), 0 or more.
        beta: Share of the models in the sub-level set Q_beta, above 0 and at most 1; None for all.
        delta_q: Amount added to the level of Q_beta, 0 or more.
        quantile: Level of Q_beta: the "plain" beta-quantile of the text after eq:q_beta, or the
            "averaged" one of eq:Q_beta.
        loss_tolerance: See `SublevelCriterion` (beyond the paper).
        max_distance: See `SublevelCriterion` (beyond the paper).
        min_distance: See `SublevelCriterion` (beyond the paper).
        interpolation: Position h between the agent's own model and a received one, above 0 and at
            most 1: L and G are those of theta^j + h (theta^i - theta^j). At 1 they are those of
            the received model theta^i; below 1, those of a step towards it (beyond the paper).
        own_model: "excluded" leaves the agent's own model out, as in Algorithm 2. "judged"
            evaluates it by the criterion like a peer's model. "trusted" gives it the weight of the
            most trusted peer, as in the released code.
        own_candidate: An agent may sample itself.
        min_contacts: See `SublevelCriterion` (beyond the paper).
        point: Weighted "mean" of the models, or weighted "median" of each coordinate (beyond the
            paper).
        selection: Peer selection (line 1).
        kappa: kappa in the update of the likelihoods, 0 or more (line 4).
        zeta: zeta in the update of the likelihoods, above 0 and at most 1.
        likelihood: Likelihoods count the "loss" L, or "loss+criterion", L + max(G, 0) (beyond the
            paper).
        first_contact: "whole" takes a peer's first likelihood without averaging.
        own_likelihood: Rounds in which P_n^{j,j}, the agent's likelihood of asking itself, is
            updated: "sampled", the default, those in which it samples itself; "every_round", as in
            the released code.
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

    robust = plugins.resolve_and_bind("criterion", criterion, criteria)
    evaluate = SublevelCriterion(
        criterion=robust,
        from_round=criterion_from_round,
        own_model=own_model,
        level=_level(beta, delta_q, quantile),
        loss_tolerance=loss_tolerance,
        max_distance=max_distance,
        min_distance=min_distance,
        min_contacts=min_contacts,
        together=criteria.is_batched(robust) and min_contacts == 1 and point == "mean",
    )

    factor = None
    if not isinstance(mixing_factor, str):
        factor = require_mixing_factor(mixing_factor)
    return Algorithm(
        select=_selections.resolve_selection(selection),
        criterion=evaluate,
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
        own_likelihood=own_likelihood or "sampled",
        keeps_previous=min_distance is not None,
        is_stateful=own_likelihood == "every_round",
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


@dataclass(frozen=True, kw_only=True)
class SublevelCriterion:
    """Criterion G on the sub-level set Q_beta (Algorithm 2, line 5).

    The paper has `criterion`, `from_round` and `level`; all other attributes go beyond it.

    Attributes:
        criterion: G.
        from_round: First round with G; the average loss is used before.
        own_model: Role of the agent's own model, see `fedcb2o`.
        level: Test of the losses against the level (eq:Q_beta); None for no level.
        loss_tolerance: Also accept models whose loss exceeds the agent's own loss by at most this
            number of standard errors, on the same samples. Without a level, accept only these.
        max_distance: Reject models farther from the agent's own model than this multiple of its
            norm; their G is infinite. This is the ball B_R of eq:Q_beta, about the agent's own
            model, for agents whose losses are not yet informative.
        min_distance: Reject models nearer to the agent's own model than this multiple of its
            movement in LocalUpdate; their G is at least `NEAR_COPY_VALUE`. On the samples that it
            was trained on, the agent's own model is better than all others, and so is an almost
            identical model.
        min_contacts: 2 accepts a peer's model only from the second time on that it was sampled.
        together: Whether several agents are evaluated in one call (`types.BATCHED`).
    """

    criterion: Criterion
    from_round: int
    own_model: OwnModel
    level: LevelTest | None
    loss_tolerance: float | None
    max_distance: float | None
    min_distance: float | None
    min_contacts: Literal[1, 2]
    together: bool

    def __call__(self, inputs: CriterionInput) -> CriterionValues:
        """Compute G of the received models and of the agent's own.

        Args:
            inputs: Models and losses of one agent, or of several.

        Returns:
            Values of the models, and the members of Q_beta.
        """
        criterion: Criterion = self.criterion
        if inputs.n < self.from_round:
            criterion = criteria.average_loss
        is_average_loss = getattr(criterion, "func", criterion) is criteria.average_loss
        own_model = self.own_model
        # A loss can evaluate the agent's own model, unlike a gap to it.
        if own_model == "trusted" and is_average_loss:
            own_model = "judged"

        # 1. The sub-level set.
        is_far, is_near = self._distance_masks(inputs)
        members = self.members(inputs, own_model, is_far | is_near)
        is_member = members[..., :-1]

        # 2. G of the received models.
        values = validated_criterion(
            criterion, dataclasses.replace(inputs, in_sublevel_set=is_member)
        )
        values = torch.where(is_near, values.clamp(min=NEAR_COPY_VALUE), values)
        values = values.masked_fill(is_far, torch.inf)

        # 3. G of the agent's own model.
        own = values.new_zeros(*values.shape[:-1], 1)
        if own_model == "judged":
            own = validated_criterion(criterion, inputs.with_own_only())
        elif own_model == "trusted":
            trusted = values.masked_fill(~is_member, torch.inf)
            best = torch.cat([trusted, torch.full_like(own, torch.inf)], -1).amin(-1, keepdim=True)
            own = torch.where(is_member.any(-1, keepdim=True), best, own)
        return CriterionValues(values, own, members, is_average_loss)

    def members(
        self, inputs: CriterionInput, own_model: OwnModel, excluded: Bool[Tensor, "*a m"]
    ) -> Bool[Tensor, "*a k"]:
        """Find the members of the sub-level set (eq:clustered_csp).

        Args:
            inputs: View of one or several agents.
            own_model: "excluded" leaves the agent's own model out.
            excluded: Received models that do not count because of their distance, shape [*a, m].

        Returns:
            Membership of the received models and, last, the agent's own model, shape [*a, m + 1].
        """
        assert inputs.losses is not None
        assert inputs.own_losses is not None

        # 1. The candidates.
        received = ~excluded
        if own_model != "excluded":  # an agent may sample itself; its model counts once
            received &= inputs.received.ids != inputs.own_entry.ids
        if self.min_contacts == 2:
            received &= torch.isin(inputs.received.ids, inputs.context.contacts.ids)
        own = torch.full((*received.shape[:-1], 1), own_model != "excluded")
        candidates = torch.cat([received, own], -1)

        # 2. The level of the candidates' losses, for one agent at a time.
        members = candidates.clone()
        if self.level is not None:
            k = candidates.shape[-1]
            lower = torch.cat([inputs.losses.mean, inputs.own_losses.mean], -1)
            agents = zip(*(x.view(-1, k) for x in (members, candidates, lower)), strict=True)
            for members_of_agent, candidates_of_agent, losses in agents:
                if candidates_of_agent.any():
                    below = self.level(losses[candidates_of_agent])
                    members_of_agent[candidates_of_agent] = below

        # 3. The tolerance of the agent's own loss.
        if self.loss_tolerance is None:
            return members
        differences = inputs.losses.per_sample - inputs.own_losses.per_sample
        errors = standard_error_of_mean(differences).nan_to_num(nan=0.0)
        bound = inputs.own_losses.mean + self.loss_tolerance * errors
        tolerated = torch.cat([inputs.losses.mean <= bound, torch.ones_like(own)], -1)
        if self.level is not None:
            tolerated = tolerated | members
        return candidates & tolerated

    def _distance_masks(
        self, inputs: CriterionInput
    ) -> tuple[Bool[Tensor, "*a m"], Bool[Tensor, "*a m"]]:
        """Find received models outside of the ball, and peers' models that are almost identical."""
        ids = inputs.received.ids
        is_far = torch.zeros_like(ids, dtype=torch.bool)
        is_near = torch.zeros_like(ids, dtype=torch.bool)
        if self.max_distance is None and self.min_distance is None:
            return is_far, is_near

        m = ids.shape[-1]
        rows_of_agents = inputs.received.with_own(inputs.own_entry).rows.view(-1, m + 1)
        if self.min_distance is not None:
            assert inputs.previous is not None
            rows_of_agents = torch.cat([inputs.previous.view(-1, 1), rows_of_agents], -1)
        a = len(rows_of_agents)
        agents = zip(is_far.view(a, m), is_near.view(a, m), rows_of_agents, strict=True)
        for far, near, rows in agents:  # views of the masks, filled in place
            distances = relative_distances(inputs.models, rows)
            if self.max_distance is not None:
                far[:] = ~(distances[len(distances) - m :] <= self.max_distance)
            if self.min_distance is not None:
                near[:] = distances[1:] < self.min_distance * distances[0]
        return is_far, is_near & (ids != inputs.own_entry.ids)


def _median_point(inputs: CriterionInput, mu: Float[Tensor, " k"]) -> RuleOutput:
    """Compute the weighted median instead of the mean (beyond the paper)."""
    if not mu.any():
        return RuleOutput(mu)
    rows = inputs.received.with_own(inputs.own_entry).rows
    is_weighted = mu > 0
    median = functools.partial(weighted_median, weights=mu[is_weighted])
    return RuleOutput(Reduction(rows[is_weighted], median, weights=mu[is_weighted]))

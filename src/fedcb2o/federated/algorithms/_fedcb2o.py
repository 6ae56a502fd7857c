"""FedCB2O: consensus-based bi-level optimisation (alg:FedCB2O, alg:localAggregation).

The discretisation of eq:fedcb2o_dynamics. From its validation losses L_j, agent j computes

- Q_beta, the sub-level set of the average loss (eq:clustered_csp):
  `SublevelCriterion.sublevel_members`, whose level is the beta-quantile q_beta of
  `consensus.quantile`;
- G_j, the robustness criterion (eq:robust_criterion_G_LF): by default `criteria.class_loss_gap`;
- mu_j^i = exp(-alpha G_j(theta^i)) over Q_beta, normalised (eq:comp_csp): `consensus.weights`;
- m_j = sum_i mu_j^i theta^i, the consensus point, and the step towards it (eq:local_agg_update).

Q_beta and G_j are line 5 of `federated.algorithm2`, mu_j is line 6, and the step is line 7.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedcb2o import consensus, plugins
from fedcb2o.errors import ConfigError, require
from fedcb2o.federated import criteria
from fedcb2o.federated import selection as _selections
from fedcb2o.federated.algorithm2 import CriterionWeighing
from fedcb2o.federated.plugin_outputs import validated_criterion
from fedcb2o.federated.run_spec import Algorithm, OwnLikelihood
from fedcb2o.federated.types import Criterion, CriterionInput, CriterionValues, Losses
from fedcb2o.plugins import VARIANTS, PluginChoice

OwnModel = Literal["excluded", "judged", "trusted"]
LevelTest = Callable[[Float[Tensor, "a m"]], Bool[Tensor, "a m"]]
"""Function from losses to a mask of those that do not exceed the level."""

RELEASED: dict[str, Any] = {
    "criterion": {"name": "class_loss_gap", "absent": "zero"},
    "alpha": 2.0,
    "own_model": "trusted",
    "own_candidate": True,
    "first_contact": "whole",
    "own_likelihood": "every_round",
    "mixing_factor": 1.0,
}
"""Parameters of the authors' released code, where it differs from the paper's text."""


def with_variants(
    **variants: Mapping[str, Any],
) -> Callable[[Callable[..., Algorithm]], Callable[..., Algorithm]]:
    """Return a decorator that gives each value of the parameter `variant` its defaults."""

    def decorate(function: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
        @functools.wraps(function)
        def make(*, variant: str = "text", **parameters: Any) -> Algorithm:
            require("variant", variant, variant in variants, " or ".join(variants))
            return function(variant=variant, **{**variants[variant], **parameters})

        return VARIANTS(variants)(make)

    return decorate


@with_variants(text={}, released=RELEASED)
def fedcb2o(
    *,
    variant: Literal["text", "released"] = "text",
    criterion: PluginChoice = "class_loss_gap",
    criterion_from_round: int = 0,
    alpha: float = 10.0,
    beta: float | None = None,
    delta_q: float | None = None,
    quantile: Literal["plain", "averaged"] | None = None,
    label_coverage: float | None = None,
    rank_tolerance: float | Literal[False] = False,
    own_model: OwnModel = "excluded",
    own_candidate: bool = False,
    selection: PluginChoice = "prob_sampling",
    kappa: float = 2.0,
    zeta: float = 0.5,
    first_contact: Literal["average", "whole"] = "average",
    own_likelihood: OwnLikelihood | None = None,
    lambda1: float | None = None,
    mixing_factor: float | Literal["lambda1*gamma"] = "lambda1*gamma",
) -> Algorithm:
    """Aggregate by the consensus point of a robustness criterion (FedCB2O, Algorithm 2).

    The paper's text and its authors' released code differ in the defaults of seven parameters:
    `criterion`, `alpha`, `own_model`, `own_candidate`, `first_contact`, `own_likelihood` and
    `mixing_factor`. The exact consensus point (eq:clustered_csp) has selection = "everyone",
    own_model = "judged" and a `beta`.

    Args:
        variant: Defaults of the paper's "text", or of the "released" code (`RELEASED`).
        criterion: Robustness criterion G.
        criterion_from_round: T_G, the first round with criterion G, counted from 0; the average
            loss is used before (rem:FedCB2Oimproved).
        alpha: alpha in the weights exp(-alpha G), 0 or more.
        beta: Share of the models in the sub-level set Q_beta, above 0 and at most 1; None for all.
        delta_q: Amount added to the level of Q_beta, 0 or more.
        quantile: Level of Q_beta: the "plain" beta-quantile of the text after eq:q_beta, or the
            "averaged" one of eq:Q_beta.
        label_coverage: Share of the classes, in [0, 1], that an agent's labels must cover for full
            confidence in its losses (`label_confidence`); None for full confidence always.
        rank_tolerance: Share of the agent's own knowledge, 0 or more, that a model in Q_beta may
            lack if it is there by its rank alone (`rank_bound`); false for no bound.
        own_model: "excluded" leaves the agent's own model out, as in Algorithm 2. "judged"
            evaluates it by the criterion like a peer's model. "trusted" gives it the weight of the
            most trusted peer, as in the released code.
        own_candidate: An agent may sample itself.
        selection: Peer selection (line 1).
        kappa: kappa in the update of the likelihoods, 0 or more (line 4).
        zeta: zeta in the update of the likelihoods, above 0 and at most 1.
        first_contact: "whole" takes a peer's first likelihood without averaging.
        own_likelihood: Rounds in which P_n^{j,j}, the agent's likelihood of asking itself, is
            updated: "sampled", the default, those in which it samples itself; "every_round", as in
            the released code.
        lambda1: lambda1, the drift towards the consensus point, above 0 (line 7); None for 10, or
            1 / gamma where that is smaller, so that no step goes beyond the consensus point.
        mixing_factor: Factor in eq:local_agg_update, above 0 and at most 1; by default
            lambda1 * gamma.

    Raises:
        ConfigError: A parameter is out of range, or `delta_q`, `quantile` or `rank_tolerance`
            is given without `beta`.
    """
    require("alpha", alpha, alpha >= 0, "0 or more")
    require("kappa", kappa, kappa >= 0, "0 or more")
    require("zeta", zeta, 0 < zeta <= 1, "above 0 and at most 1")
    if lambda1 is not None:
        require("lambda1", lambda1, lambda1 > 0, "above 0")
    require("criterion_from_round", criterion_from_round, criterion_from_round >= 0, "0 or more")

    robust = plugins.resolve_and_bind("criterion", criterion, criteria)
    evaluate = SublevelCriterion(
        criterion=robust,
        from_round=criterion_from_round,
        own_model=own_model,
        level=_level(beta, delta_q, quantile),
        label_coverage=_coverage(label_coverage),
        rank_tolerance=_rank_tolerance(rank_tolerance, beta),
        batched=criteria.is_batched(robust),
    )

    factor = None
    if not isinstance(mixing_factor, str):
        is_valid = 0 < mixing_factor <= 1
        factor = require("mixing_factor", mixing_factor, is_valid, "above 0 and at most 1")
    return Algorithm(
        select=_selections.resolve_selection(selection),
        weigh=CriterionWeighing(evaluate, alpha),
        needs_losses=True,
        lambda1=lambda1,
        mixing_factor=factor,
        own_candidate=own_candidate,
        kappa=kappa,
        zeta=zeta,
        first_contact=first_contact,
        own_likelihood=own_likelihood or "sampled",
    )


def _coverage(label_coverage: float | None) -> float:
    """Return the valid share of the classes; 0 for None."""
    share = label_coverage or 0.0
    require("label_coverage", share, 0 <= share <= 1, "from 0 to 1")
    return share


def _rank_tolerance(share: float | Literal[False], beta: float | None) -> float:
    """Return the valid share of the knowledge; infinity for False."""
    if share is False:
        return math.inf
    if beta is None:
        raise ConfigError(
            "`rank_tolerance` bounds the losses in the sub-level set: it needs a `beta`"
        )
    return require("rank_tolerance", share, share >= 0, "0 or more")


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
        require("delta_q", delta_q, 0 <= delta_q < float("inf"), "0 or more")
    return functools.partial(
        consensus.sublevel_mask, beta=beta, delta_q=delta_q or 0.0, averaged=quantile == "averaged"
    )


@dataclass(frozen=True, kw_only=True)
class SublevelCriterion:
    """Criterion G on the sub-level set Q_beta (Algorithm 2, line 5).

    Before `from_round`, the average loss takes the place of G. `own_model` is that of `fedcb2o`.
    `level` tests losses against the level (eq:Q_beta); None for no level. `label_coverage` is that
    of `label_confidence`, and `rank_tolerance` that of `rank_bound`. With `batched`, several agents
    are evaluated in one call.
    """

    criterion: Criterion
    from_round: int
    own_model: OwnModel
    level: LevelTest | None
    label_coverage: float
    rank_tolerance: float
    # The name is that of the declaration `types.BATCHED`, which reads this attribute.
    batched: bool

    def __call__(self, inputs: CriterionInput) -> CriterionValues:
        """Compute G of the received models and of the agent's own."""
        criterion: Criterion = self.criterion
        if inputs.n < self.from_round:
            criterion = criteria.average_loss
        is_average_loss = getattr(criterion, "func", criterion) is criteria.average_loss
        own_model = self.own_model
        # A loss can evaluate the agent's own model, unlike a gap to it.
        if own_model == "trusted" and is_average_loss:
            own_model = "judged"

        # 1. The sub-level set.
        members = self.sublevel_members(inputs, own_model)
        is_member = members[..., :-1]

        # 2. G of the received models.
        values = validated_criterion(
            criterion, dataclasses.replace(inputs, in_sublevel_set=is_member)
        )

        # 3. G of the agent's own model.
        own = values.new_zeros(*values.shape[:-1], 1)
        if own_model == "judged":
            own = validated_criterion(criterion, inputs.with_own_only())
        elif own_model == "trusted":
            # As in the released code: the agent's own model has the weight of the most trusted
            # peer.
            trusted = values.masked_fill(~is_member, torch.inf)
            best = torch.cat([trusted, torch.full_like(own, torch.inf)], -1).amin(-1, keepdim=True)
            own = torch.where(is_member.any(-1, keepdim=True), best, own)

        # 4. Smaller differences where an agent holds few classes.
        if self.label_coverage:
            assert inputs.losses is not None
            confidence = label_confidence(inputs.losses, self.label_coverage).unsqueeze(-1)
            values = values * confidence
            own = own * confidence
        return CriterionValues(values, own, members)

    def sublevel_members(self, inputs: CriterionInput, own_model: OwnModel) -> Bool[Tensor, "*a k"]:
        """Find the members of the sub-level set (eq:clustered_csp), the agent's own model last."""
        assert inputs.losses is not None
        assert inputs.own_losses is not None

        # 1. The candidates.
        received = torch.ones_like(inputs.received.ids, dtype=torch.bool)
        if own_model != "excluded":  # an agent may sample itself; its model counts once
            received &= inputs.received.ids != inputs.own_entry.ids
        own = torch.full((*received.shape[:-1], 1), own_model != "excluded")
        candidates = torch.cat([received, own], -1)
        tolerated = torch.zeros_like(candidates)
        if inputs.tolerated is not None:
            tolerated = torch.cat([inputs.tolerated, torch.ones_like(own)], -1)
        if self.level is None:
            return candidates if inputs.tolerated is None else candidates & tolerated

        # 2. The level of the candidates' losses, of agents with equally many candidates at once.
        members = candidates.clone()
        lower = torch.cat([inputs.losses.mean, inputs.own_losses.mean], -1)
        confidence = label_confidence(inputs.losses, self.label_coverage)
        bound = rank_bound(inputs.own_losses, confidence, self.rank_tolerance)
        counts = candidates.sum(-1)
        for count in np.unique(counts[counts > 0].numpy()).tolist():
            is_equal = counts == count
            is_chosen = candidates & is_equal.unsqueeze(-1)
            L = lower[is_chosen].view(-1, count)
            is_ranked = self.level(L)
            widened = _widen(is_ranked, L, confidence[is_equal])
            is_useless = is_ranked & (bound[is_equal].unsqueeze(-1) < L)
            members[is_chosen] = (widened & ~is_useless).flatten()
        return members | (candidates & tolerated)


def label_confidence(losses: Losses, coverage: float) -> Float[Tensor, "*a"]:
    """Return how far agents rely on their losses, by the classes that their labels cover.

    The confidence is min(1, exp(H) / (coverage C))^2, where H is the entropy of the labels, exp(H)
    their effective number of classes, and C the number of classes; it is 1 for data without
    classes. With confidence c, `SublevelCriterion` multiplies G by c, which is alpha c in
    eq:comp_csp, and adds the share 1 - c of the other models to the sub-level set
    (eq:clustered_csp).
    """
    # On few classes losses say little: a peer with other classes has a high loss, and an attack on
    # other classes a low one.
    effective = _label_entropy(losses).exp()
    num_classes = losses.by_class.shape[-1]
    return (effective / max(1.0, coverage * num_classes)).clamp(max=1.0).square()


def rank_bound(
    own_losses: Losses, confidence: Float[Tensor, "*a"], tolerance: float
) -> Float[Tensor, "*a"]:
    """Return the largest loss of a model that is in Q_beta by its rank alone (eq:Q_beta).

    A model of loss L knows H - L, where the entropy H of the labels is the least cross-entropy of
    predictions that are the same for all samples. The bound L^j + (tolerance / c) (H - L^j) lets a
    model lack a share of what the agent's own model knows, more with a low confidence c. It is
    infinite for other losses than the cross-entropy.
    """
    # Of models of other clusters alone, the better half would be members.
    own = own_losses.mean.squeeze(-1)
    if not own_losses.is_cross_entropy or tolerance == math.inf:
        return torch.full_like(own, torch.inf)
    known = (_label_entropy(own_losses) - own).clamp(min=0.0)
    return own + tolerance / confidence * known


def _label_entropy(losses: Losses) -> Float[Tensor, "*a"]:
    """Return the entropy of the agents' labels, in nats."""
    labels = losses.labels
    counts = torch.zeros(*labels.shape[:-1], losses.by_class.shape[-1], dtype=torch.float64)
    counts.scatter_add_(-1, labels, torch.ones_like(labels, dtype=torch.float64))
    p = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    entropy: Tensor = torch.special.entr(p).sum(-1)
    return entropy


def _widen(
    is_member: Bool[Tensor, "a m"], losses: Float[Tensor, "a m"], confidence: Float[Tensor, " a"]
) -> Bool[Tensor, "a m"]:
    """Add the share 1 - confidence, rounded, of the other models: those of lowest loss."""
    num_members = is_member.sum(-1)
    num_added = ((1 - confidence) * (losses.shape[-1] - num_members)).round().long()
    last = (num_members + num_added - 1).clamp(min=0).unsqueeze(-1)
    # Models of equal loss are treated alike.
    is_low = losses <= losses.sort().values.gather(-1, last)
    return is_member | (is_low & (num_added > 0).unsqueeze(-1))

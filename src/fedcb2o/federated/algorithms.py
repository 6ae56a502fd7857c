"""Algorithms: a selection, a rule and a mixing factor, put together under the paper's names.

An algorithm is made by a function of keyword arguments, each of which is a named choice of a configuration. Where
the paper's text and the authors' released code differ, both are choices. FedCB2O is the discretisation of
eq:fedcb2o_dynamics, FedCBO that of eq:fedcbo_dynamic.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o import consensus, plugins
from fedcb2o.errors import ConfigError
from fedcb2o.federated import aggregate, criteria, pre_steps, rules, selection
from fedcb2o.federated.sublevel import Meeting, OwnModel, Sublevel
from fedcb2o.federated.types import REMEMBERS, TOGETHER, Judged, Select, Weighed, together
from fedcb2o.plugins import Named

__all__ = ["by_rule", "dfca", "dfedavgm", "fedcb2o", "fedcbo", "ifca", "local_training"]


Likelihood = Literal["loss", "loss+criterion"]


@dataclass(frozen=True)
class Clusters:
    """So many `models`, one for each cluster, that a coordinator holds (IFCA) or `each` agent (DFCA), and of which each
    agent trains the one that fits it best.

    What agents made of a model is averaged with equal weights, `by_samples`, or by a robust `rule`. Of `restarts` sets
    of first models that set is taken which fits best after `trial` rounds.
    """

    models: int
    each: bool = False
    by_samples: bool = False
    rule: functools.partial[Any] | None = None
    restarts: int = 1
    trial: int = 0

    def rows(self, num_agents: int) -> int:
        """How many models there are in all."""
        return self.models * (num_agents if self.each else self.restarts)


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """How a benign agent aggregates (alg:localAggregation).

    `weigh` is a rule: normalised weights of the received models and, last, of the agent's own; `judges` says whether
    it needs losses, of models or of what lies so far (`judged_at`) on the way to them. `mixing_factor` is lambda1 *
    gamma, or replaces it; `own_candidate` lets an agent draw itself. `likelihood` says what a peer's record counts.
    `keeps_before` says that it looks at the model before the round, `remembers` that `weigh` has a memory, and `admits`
    raises ConfigError for a budget that it does not go with. `clusters` are those of IFCA and DFCA, and else None.
    """

    select: Select
    weigh: Callable[..., Any]
    judges: bool
    lambda1: float
    mixing_factor: float | None
    own_candidate: bool = False
    kappa: float = 2.0
    zeta: float = 0.5
    likelihood: Likelihood = "loss"
    judged_at: float = 1.0
    first_contact: str = "average"
    keeps_before: bool = False
    remembers: bool = False
    admits: Callable[[int], None] | None = None
    clusters: Clusters | None = None

    def factor(self, gamma: float) -> float:
        """The share of the consensus point in the new model (eq:local_agg_update)."""
        return self.lambda1 * gamma if self.mixing_factor is None else self.mixing_factor


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
    `counts_from` are those of `Sublevel`, `point` that of `rules.by_criterion`.
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
        decided = rules.by_criterion(judged, now, alpha=alpha, sublevel=sublevel, own_model=own, point=point)
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


fedcbo = functools.partial(fedcb2o, criterion="average_loss")
"""FedCBO (Carrillo et al. 2024; eq:fedcbo_dynamic) with ProbSampling: FedCB2O with the average loss for G."""
vars(fedcbo)["__name__"] = "fedcbo"  # as errors call it


def dfedavgm(*, selection: Named = "uniform", own_model: Literal["excluded", "judged"] = "judged") -> Algorithm:
    """DFedAvgM (Sun et al. 2022): the average of random peers and oneself, weighted by their numbers of samples."""
    return Algorithm(
        select=_selections.named(selection),
        weigh=functools.partial(rules.by_num_samples, own_model=own_model),
        judges=False,
        lambda1=1.0,
        mixing_factor=1.0,
    )


def by_rule(
    *,
    rule: Named,
    selection: Named = "uniform",
    own_model: Literal["excluded", "judged"] | None = None,
    pre_step: Named | None = None,
    judges: bool | None = None,
    mixing_factor: float = 1.0,
) -> Algorithm:
    """Any rule over the received models, with any selection.

    A robust rule works on the received models and, unless `own_model` is "excluded", on the agent's own, after a
    `pre_step` such as "nnm"; any other rule does what it says. `judges=False` saves the evaluation of the received
    models where neither rule nor selection looks at losses; of a robust rule it is known.
    """
    select, weigh = _selections.named(selection), plugins.named("rule", rule, rules, later=("f",))
    made = functools.partial(Algorithm, select=select, lambda1=1.0, mixing_factor=_check_factor(mixing_factor))
    if (form := aggregate.FORM.of(weigh)) is None:
        if own_model is not None or pre_step is not None:
            raise ConfigError("`own_model` and `pre_step` go with robust rules, and this one weighs by itself")
        plugins.bind("rule", weigh.func, weigh.keywords)
        memory = REMEMBERS.of(weigh)
        if memory is not None and TOGETHER.of(weigh):
            raise ConfigError(
                "a rule with a memory is asked for one agent at a time: declare `remembers` or `together`"
            )
        before = memory is not None and memory.before
        return made(weigh=weigh, judges=judges is not False, keeps_before=before, remembers=memory is not None)
    prepared = None if pre_step is None else plugins.named("pre-step", pre_step, pre_steps, later=("f",))
    seen = set(rules.also_looks_at(weigh))
    if prepared is not None and seen - {"progress", "n", "draw"}:
        raise ConfigError(f"a `pre_step` mixes models, and the rule looks at {min(seen)} of each single one")
    if judges is None:
        by_chance = getattr(select, "func", select) in (_selections.uniform, _selections.everyone)
        judges = not by_chance or bool({"losses", "entropies"} & seen)
    return made(
        weigh=functools.partial(rules.by_form, rule=weigh, own_model=own_model or "judged", pre_step=prepared),
        judges=judges,
        keeps_before="before" in form.last,
        admits=functools.partial(_admits, weigh, own_model, prepared),
    )


def local_training() -> Algorithm:
    """No exchange: every agent trains alone."""
    return Algorithm(select=_selections.nobody_else, weigh=_keep, judges=False, lambda1=1.0, mixing_factor=1.0)


def ifca(
    *,
    models: int,
    weights: Literal["equal", "samples"] = "equal",
    rule: Named | None = None,
    restarts: int = 1,
    trial: int = 3,
) -> Algorithm:
    """IFCA, the baseline that knows the number of clusters and has a coordinator, which holds so many `models`, each
    the average of the agents that it fits best (Ghosh et al. 2020; see `federated.ifca`), or what a robust `rule` such
    as "trimmed_mean" makes of them.

    Beside that, agents train alone: whom they could ask, budget and graph, does not matter. With `restarts` it begins
    from so many sets of first models, and goes on from the one whose models fit best after `trial` rounds.
    """
    _check("models", models, models >= 1, "1 or more")
    _check("restarts", restarts, restarts >= 1, "1 or more")
    _check("trial", trial, trial >= 1, "1 or more")
    robust = None if rule is None else plugins.named("rule", rule, rules, later=("f",))
    if robust is not None:
        form = aggregate.FORM.of(robust)
        if form is None or form.last or rules.also_looks_at(robust):
            raise ConfigError(
                "the `rule` of ifca looks at models alone, since a coordinator has none of its own and no data: take "
                "one such as trimmed_mean or krum"
            )
        if weights == "samples":
            raise ConfigError('`weights` = "samples" goes without a `rule`, which says itself how models count')
    clusters = Clusters(models, by_samples=weights == "samples", rule=robust, restarts=restarts, trial=trial)
    return dataclasses.replace(local_training(), clusters=clusters)


def dfca(*, models: int, selection: Named = "uniform") -> Algorithm:
    """DFCA, IFCA without a coordinator: every agent holds so many `models`, trains the one that fits it best, and
    averages each with what those whom it asks made of it (Kirch et al. 2025; see `federated.dfca`)."""
    _check("models", models, models >= 1, "1 or more")
    chosen = _selections.named(selection)
    return dataclasses.replace(local_training(), select=chosen, clusters=Clusters(models, each=True))


@together
def _keep(judged: Judged) -> Float[Tensor, "*a k"]:
    return torch.zeros(judged.received.ids.shape)


def _admits(
    rule: functools.partial[Any], own_model: str | None, pre_step: functools.partial[Any] | None, budget: int
) -> None:
    """Raises ConfigError where a rule does not admit the f that it was given, even if everybody answers."""
    own = int(own_model != "excluded" or "own" in aggregate.form_of(rule).last)
    for function in (rule, pre_step):
        if function is not None and "f" in function.keywords:
            aggregate.check(function, function.keywords["f"], budget + own)


_selections = selection  # the parameters of that name hide the module


def _check(name: str, value: Any, good: bool, cure: str) -> Any:
    if not good:
        raise ConfigError(f"`{name}` must be {cure}, got {value}")
    return value


def _check_factor(mixing_factor: float) -> float:
    good = 0 < mixing_factor <= 1
    return _check("mixing_factor", mixing_factor, good, "above 0 and at most 1")  # type: ignore[no-any-return]

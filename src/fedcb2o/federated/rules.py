"""Rules: how much each received model counts in the average m_j (Algorithm 2, lines 5-6).

A rule is a function (judged) -> normalised weights of the received models [m], or of those and, last, of the
agent's own model [m + 1]; its further arguments are keywords. Robust rules, which declare a form, are made into such
by `by_form`; a rule with memory (`types.remembers`) also gets, and returns, what it keeps.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o import consensus, plugins
from fedcb2o.errors import ConfigError
from fedcb2o.federated import aggregate, robust, robust_columns
from fedcb2o.federated import flame as _flame
from fedcb2o.federated import foolsgold as _foolsgold  # the module: the name is the rule's
from fedcb2o.federated import lfighter as _lfighter
from fedcb2o.federated import lightyear as _lightyear
from fedcb2o.federated import sentinel as _sentinel
from fedcb2o.federated import wfagg as _wfagg
from fedcb2o.federated.heads import heads
from fedcb2o.federated.returned import mixing_of, values_of
from fedcb2o.federated.sublevel import NEAR, OwnModel, Sublevel
from fedcb2o.federated.types import Criterion, Judged, Received, Reduction, Weighed, together

ROOMS = (robust, robust_columns, _lfighter, _foolsgold, _lightyear, _wfagg, _sentinel, _flame)
__all__ = sorted(["by_num_samples", *(name for room in ROOMS for name in room.__all__)])
__getattr__ = plugins.found_in(*ROOMS)

VALUES = ("losses", "entropies", "num_samples", "progress", "n", "draw", "heads")
"""What a robust rule may look at beside the models: values for each of them, t/T, the round, a generator of its own."""


@together
def by_num_samples(judged: Judged, *, own_model: Literal["excluded", "judged"] = "judged") -> Float[Tensor, "*a k"]:
    """Weights in proportion to the samples that each model was trained on (McMahan et al. 2017; DFedAvgM, Sun et al.
    2022; the malicious agents' mixing), the agent's own included unless `own_model="excluded"`."""
    return by_samples(judged.received, judged.me if own_model == "judged" else None)


def by_samples(received: Received, me: Received | None) -> Float[Tensor, "*a k"]:
    """Weights in proportion to the numbers of samples of received models and, where it counts, of the own one."""
    counts = (received if me is None else received.with_own(me)).num_samples
    counts = counts.double()
    return counts / counts.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)


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


def weighted_median(x: Float[Tensor, "k b"], weights: Float[Tensor, " k"]) -> Float[Tensor, " b"]:
    """The weighted median of each column, in place of the mean of eq:comp_csp: the least of its numbers that, with all
    below it, have half of the weight."""
    ordered, order = x.sort(dim=0, stable=True)
    below = weights.to(x.device)[order].cumsum(0)
    place = (below < weights.sum().to(x.device) / 2 - 1e-9).sum(0, keepdim=True)
    median: Float[Tensor, "1 b"] = ordered.gather(0, place)
    return median[0]


def by_form(
    judged: Judged,
    rule: functools.partial[Any],
    *,
    own_model: Literal["excluded", "judged"] = "judged",
    pre_step: functools.partial[Any] | None = None,
) -> Weighed:
    """What a robust rule, which declares its form, makes of the received models, then the agent's own unless it is
    excluded, and what the form has last; after a pre-step such as nearest-neighbour mixing.

    It looks at what its arguments name, of `VALUES`. An `f` that is not given is the attackers' share of the received,
    rounded up; any is clipped to what so many models admit.
    """
    m, last = len(judged.received.ids), aggregate.form_of(rule).last
    if m == 0:
        return Weighed(torch.zeros(0, dtype=torch.float64))
    seen = judged.received.with_own(judged.me) if own_model == "judged" or "own" in last else judged.received
    before = judged.before if "before" in last else None
    rows = seen.rows if before is None else torch.cat([seen.rows, before.view(1)])
    f = math.ceil(judged.local.share * m - 1e-9)
    mixing = None if pre_step is None else _mixing(pre_step, f, len(rows) - len(last), judged)
    g, p = aggregate.gram_and_mixing(rule, judged.pool, rows, mixing)
    rule = assuming(rule, f, len(rows) if p is None else len(p))
    outcome = aggregate.decide(rule, g, *_given(rule, judged, seen, rows), p=p)
    assumed = rule.keywords.get("f")
    if isinstance(outcome, Reduction):
        return Weighed(dataclasses.replace(outcome, rows=rows[outcome.rows]), f=assumed)
    return Weighed(outcome[: len(seen.ids)], before=None if before is None else float(outcome[-1]), f=assumed)


def also_looks_at(rule: functools.partial[Any]) -> tuple[str, ...]:
    """What a robust rule looks at beside the Gram matrix or the columns; raises ConfigError for what there is not."""
    names = plugins.looks_at(rule.func)[int(aggregate.form_of(rule).of != "values") :]
    if unknown := [name for name in names if name not in VALUES]:
        near = plugins.nearest(unknown[0], VALUES)
        raise ConfigError(f"the rule looks at `{unknown[0]}`.{near} There is: {', '.join(VALUES)}")
    return names


def _given(rule: functools.partial[Any], judged: Judged, seen: Received, rows: Tensor) -> list[Any]:
    """What a rule looks at beside the models: a value for each of those `seen`, and none for that before the round."""

    def of_losses(name: str) -> Float[Tensor, " k"]:
        assert judged.losses is not None
        assert judged.own is not None
        if name == "entropy" and judged.own.by_class.shape[-1] == 1:
            raise ConfigError("the rule looks at how sure predictions of classes are, and the data have no classes")
        known = torch.cat([getattr(judged.losses, name), getattr(judged.own, name)])[: len(seen.ids)]
        return torch.cat([known, torch.full((len(rows) - len(known),), torch.nan, dtype=torch.float64)])

    table: dict[str, Callable[[], Any]] = {
        "losses": lambda: of_losses("mean"),
        "entropies": lambda: of_losses("entropy"),
        "num_samples": lambda: seen.num_samples,
        "progress": lambda: judged.local.progress,
        "n": lambda: judged.n,
        "draw": lambda: judged.local.draw,
        "heads": lambda: heads(judged, rows),
    }
    return [table[name]() for name in also_looks_at(rule)]


def _mixing(pre_step: functools.partial[Any], f: int, m: int, judged: Judged) -> aggregate.Mixing:
    """The matrix of a pre-step for m models, or what makes it of their Gram matrix."""
    made = assuming(pre_step, f, m)
    if "gram" in plugins.looks_at(pre_step.func):
        return made
    return mixing_of(pre_step, made(m, judged.local.draw), m)


def assuming(function: functools.partial[Any], f: int, m: int) -> functools.partial[Any]:
    """A rule or pre-step that assumes, where it assumes any, the f attackers that it was told or else these among m
    models, or as many as these admit."""
    if "f" not in plugins.parameters(function.func):
        return function
    return functools.partial(function, f=aggregate.assumed(function, function.keywords.get("f", f), m))

"""Rules: how much each received model counts in the average m_j (Algorithm 2, lines 5-6).

A rule is a function (judged) -> normalised weights of the received models [m], or of those and, last, of the
agent's own model [m + 1]; its further arguments are keywords. Robust rules, which declare a form, are made into such
by `by_form`.
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
from fedcb2o.federated import aggregate
from fedcb2o.federated.lfighter import lfighter
from fedcb2o.federated.robust import (
    balance,
    bulyan,
    centred_clipping,
    clipped_gossip,
    fltrust,
    geometric_median,
    krum,
    mean,
    monna,
    multi_krum,
    norm_clipping,
    sageflow,
    ubar,
)
from fedcb2o.federated.robust_columns import coordinate_median, meamed, trimmed_mean
from fedcb2o.federated.types import Criterion, Judged, Received, Reduction, Weighed, together

__all__ = [
    "balance",
    "bulyan",
    "by_num_samples",
    "centred_clipping",
    "clipped_gossip",
    "coordinate_median",
    "fltrust",
    "geometric_median",
    "krum",
    "lfighter",
    "meamed",
    "mean",
    "monna",
    "multi_krum",
    "norm_clipping",
    "sageflow",
    "trimmed_mean",
    "ubar",
]

VALUES = ("losses", "entropies", "num_samples", "progress", "heads")
"""What a robust rule may look at beside the models: values for each of them, or t/T."""

OwnModel = Literal["excluded", "judged", "trusted"]


@together
def by_num_samples(judged: Judged, *, own_model: Literal["excluded", "judged"] = "judged") -> Float[Tensor, "*a k"]:
    """Weights in proportion to the samples that each model was trained on (McMahan et al. 2017; DFedAvgM, Sun et al.
    2022; the malicious agents' mixing), the agent's own included unless `own_model="excluded"`."""
    return by_samples(judged.received, judged.me if own_model == "judged" else None)


def by_samples(received: Received, me: Received | None) -> Float[Tensor, "*a k"]:
    """Weights in proportion to the numbers of samples of received models and, where it counts, of the own one."""
    counts = received.num_samples if me is None else torch.cat([received.num_samples, me.num_samples], -1)
    return counts.double() / counts.sum(-1, keepdim=True).clamp(min=1)


def by_criterion(
    judged: Judged,
    criterion: Criterion,
    *,
    alpha: float,
    beta: float | None,
    own_model: OwnModel,
) -> Float[Tensor, "*a k"]:
    """The weights mu_j = exp(-alpha G), normalised, of the received models and, last, the agent's own (eq:comp_csp).

    With `beta`, only models in the sub-level set of the average loss count (eq:clustered_csp). The own model is
    `"excluded"` as in Algorithm 2, `"judged"` by the criterion like a peer's, or `"trusted"`: it counts as much as
    the most trusted peer, as in the authors' released code.
    """
    assert judged.losses is not None
    assert judged.own is not None
    values, lower = judge(criterion, judged), torch.cat([judged.losses.mean, judged.own.mean], -1)
    itself = values.new_zeros(*values.shape[:-1], 1)
    members = torch.ones(lower.shape, dtype=torch.bool)
    if own_model == "excluded":
        members[..., -1] = False
    else:
        members[..., :-1] = judged.received.ids != judged.me.ids  # it may have drawn itself: it counts once
    counted = members.clone()
    if beta is not None:
        k = lower.shape[-1]
        for each, some, losses in zip(counted.view(-1, k), members.view(-1, k), lower.view(-1, k), strict=True):
            if some.any():
                each[some] = consensus.sublevel_mask(losses[some], beta)
    if own_model == "judged":
        itself = judge(criterion, dataclasses.replace(judged, losses=judged.own, received=judged.me))
    elif own_model == "trusted":
        peers = counted[..., :-1]
        best = torch.cat([values.masked_fill(~peers, torch.inf), torch.full_like(itself, torch.inf)], -1)
        itself = torch.where(peers.any(-1, keepdim=True), best.amin(-1, keepdim=True), itself)
    return consensus.weights(torch.cat([values, itself], -1), alpha, counted)


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
    form, local = aggregate.form_of(rule), judged.local
    m = len(judged.received.ids)
    if m == 0:
        return Weighed(torch.zeros(0, dtype=torch.float64))
    has_own, has_before = own_model == "judged" or "own" in form.last, "before" in form.last
    parts = [judged.received.rows, judged.me.rows[: int(has_own)], torch.tensor([local.before] * has_before).long()]
    rows, pool = torch.cat(parts), judged.me.pool
    f = math.ceil(local.share * m - 1e-9)
    mixing = None
    if pre_step is not None:
        peers = len(rows) - len(form.last)
        mixing = _with_f(pre_step, f, peers)
        if "gram" not in plugins.looks_at(pre_step.func):
            mixing = mixing(peers, local.draw)
    g = aggregate.gram_for(rule, pool, rows, mixing=mixing)
    g = torch.full((len(rows), len(rows)), torch.nan, dtype=torch.float64) if g is None else g
    p = None if mixing is None else aggregate.mixing_matrix(mixing, g, len(form.last))
    rule = _with_f(rule, f, len(rows) if p is None else len(p))
    table: dict[str, Callable[[], Any]] = {
        "losses": lambda: _for_rows("mean", judged, has_own, has_before),
        "entropies": lambda: _for_rows("entropy", judged, has_own, has_before),
        "num_samples": lambda: torch.cat([judged.received.num_samples, judged.me.num_samples])[: len(rows)],
        "progress": lambda: local.progress,
        "heads": lambda: _heads(judged, rows),
    }
    outcome = aggregate.decide(rule, g, *(table[name]() for name in also_looks_at(rule)), p=p)
    if isinstance(outcome, Reduction):
        outcome = dataclasses.replace(outcome, rows=rows[outcome.rows])
    elif has_before and not has_own:
        outcome = torch.cat([outcome[:m], outcome.new_zeros(1), outcome[m:]])
    return Weighed(outcome, rule.keywords.get("f"))


def also_looks_at(rule: functools.partial[Any]) -> list[str]:
    """What a robust rule looks at beside the Gram matrix or the columns; raises ConfigError for what there is not."""
    names = plugins.looks_at(rule.func)[int(aggregate.form_of(rule).of != "values") :]
    if unknown := [name for name in names if name not in VALUES]:
        near = plugins.nearest(unknown[0], VALUES)
        raise ConfigError(f"the rule looks at `{unknown[0]}`.{near} There is: {', '.join(VALUES)}")
    return names


def _with_f(function: functools.partial[Any], f: int, m: int) -> functools.partial[Any]:
    """A rule or pre-step that assumes, where it assumes any, the f attackers that it was told or else these among m
    models, or as many as these admit."""
    if "f" not in plugins.parameters(function.func):
        return function
    return functools.partial(function, f=aggregate.assumed(function, function.keywords.get("f", f), m))


def _for_rows(name: str, judged: Judged, own: bool, before: bool) -> Float[Tensor, " k"]:
    """A value of the losses for each received model, the own one and that before the round, which is not judged."""
    assert judged.losses is not None
    assert judged.own is not None
    parts = [getattr(judged.losses, name), getattr(judged.own, name)[: int(own)]]
    return torch.cat([*parts, torch.full((int(before),), torch.nan, dtype=torch.float64)])


def _heads(judged: Judged, rows: Tensor) -> Float[Tensor, "k C h"]:
    """The last dense layer of each model, a row for each class: its weights and, last, its bias."""
    if judged.local.head is None:
        raise ConfigError("the rule looks at the last dense layer, and this model does not end in one with a bias")
    classes, width = judged.local.head
    tail = judged.me.pool[:, -classes * (width + 1) :][rows].cpu()
    weights = tail[:, : classes * width].view(len(rows), classes, width)
    return torch.cat([weights, tail[:, classes * width :].unsqueeze(-1)], -1)


def judge(criterion: Criterion, judged: Judged) -> Float[Tensor, "*a m"]:
    """The criterion's value for each received model, in float64; raises ConfigError where it has another shape."""
    values = plugins.tensor_of("criterion", criterion(judged))
    if values.shape != judged.received.ids.shape:
        raise ConfigError(
            f"the criterion returned shape {tuple(values.shape)}, expected {tuple(judged.received.ids.shape)}: "
            "a value for each received model"
        )
    return values.cpu().double()

"""Application of a robust rule to the models that one agent received."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.errors import ConfigError
from fedcb2o.federated.aggregation import base
from fedcb2o.federated.aggregation.last_layer import heads
from fedcb2o.federated.plugin_outputs import mixing_of
from fedcb2o.federated.types import Judged, Received, Reduction, Weighed

VALUES = ("losses", "entropies", "num_samples", "progress", "n", "draw", "heads")
"""What a robust rule may look at beside the models: values for each of them, t/T, the round, a generator of its own."""


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
    m, last = len(judged.received.ids), base.form_of(rule).last
    if m == 0:
        return Weighed(torch.zeros(0, dtype=torch.float64))
    seen = judged.received.with_own(judged.me) if own_model == "judged" or "own" in last else judged.received
    before = judged.before if "before" in last else None
    rows = seen.rows if before is None else torch.cat([seen.rows, before.view(1)])
    f = math.ceil(judged.local.share * m - 1e-9)
    mixing = None if pre_step is None else _mixing(pre_step, f, len(rows) - len(last), judged)
    g, p = base.gram_and_mixing(rule, judged.pool, rows, mixing)
    rule = assuming(rule, f, len(rows) if p is None else len(p))
    outcome = base.decide(rule, g, *_given(rule, judged, seen, rows), p=p)
    assumed = rule.keywords.get("f")
    if isinstance(outcome, Reduction):
        return Weighed(dataclasses.replace(outcome, rows=rows[outcome.rows]), f=assumed)
    return Weighed(outcome[: len(seen.ids)], before=None if before is None else float(outcome[-1]), f=assumed)


def also_looks_at(rule: functools.partial[Any]) -> tuple[str, ...]:
    """What a robust rule looks at beside the Gram matrix or the columns; raises ConfigError for what there is not."""
    names = plugins.looks_at(rule.func)[int(base.form_of(rule).of != "values") :]
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


def _mixing(pre_step: functools.partial[Any], f: int, m: int, judged: Judged) -> base.Mixing:
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
    return functools.partial(function, f=base.assumed(function, function.keywords.get("f", f), m))

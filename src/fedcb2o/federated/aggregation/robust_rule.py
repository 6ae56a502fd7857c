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
from fedcb2o.federated.aggregation.last_layer import last_layers
from fedcb2o.federated.plugin_outputs import validated_mixing
from fedcb2o.federated.types import CriterionInput, Received, Reduction, RuleOutput

EXTRA_INPUTS = ("losses", "entropies", "num_samples", "progress", "n", "draw", "heads")
"""What a robust rule may look at beside the models: values for each of them, t/T, the round, a generator of its own."""


def apply_robust_rule(
    inputs: CriterionInput,
    rule: functools.partial[Any],
    *,
    own_model: Literal["excluded", "judged"] = "judged",
    pre_step: functools.partial[Any] | None = None,
) -> RuleOutput:
    """What a robust rule, which declares its form, makes of the received models, then the agent's own unless it is
    excluded, and what the form has last; after a pre-step such as nearest-neighbour mixing.

    It looks at what its arguments name, of `VALUES`. An `f` that is not given is the attackers' share of the received,
    rounded up; any is clipped to what so many models admit.
    """
    m = len(inputs.received.ids)
    last = base.signature_of(rule).own_rows
    if m == 0:
        return RuleOutput(torch.zeros(0, dtype=torch.float64))
    seen = (
        inputs.received.with_own(inputs.own_entry)
        if own_model == "judged" or "own" in last
        else inputs.received
    )
    before = inputs.previous if "before" in last else None
    rows = seen.rows if before is None else torch.cat([seen.rows, before.view(1)])
    f = math.ceil(inputs.context.malicious_share * m - 1e-9)
    mixing = (
        None if pre_step is None else _preaggregation(pre_step, f, len(rows) - len(last), inputs)
    )
    g, p = base.gram_and_mixing(rule, inputs.models, rows, mixing)
    rule = with_byzantine_count(rule, f, len(rows) if p is None else len(p))
    outcome = base.evaluate_rule(rule, g, *_rule_inputs(rule, inputs, seen, rows), p=p)
    assumed = rule.keywords.get("f")
    if isinstance(outcome, Reduction):
        return RuleOutput(dataclasses.replace(outcome, rows=rows[outcome.rows]), f=assumed)
    return RuleOutput(
        outcome[: len(seen.ids)],
        previous_weight=None if before is None else float(outcome[-1]),
        f=assumed,
    )


def extra_inputs(rule: functools.partial[Any]) -> tuple[str, ...]:
    """What a robust rule looks at beside the Gram matrix or the columns; raises ConfigError for what there is not."""
    names = plugins.positional_inputs(rule.func)[int(base.signature_of(rule).reads != "values") :]
    if unknown := [name for name in names if name not in EXTRA_INPUTS]:
        near = plugins.did_you_mean(unknown[0], EXTRA_INPUTS)
        raise ConfigError(
            f"the rule looks at `{unknown[0]}`.{near} There is: {', '.join(EXTRA_INPUTS)}"
        )
    return names


def _rule_inputs(
    rule: functools.partial[Any], inputs: CriterionInput, received: Received, rows: Tensor
) -> list[Any]:
    """What a rule looks at beside the models: a value for each of those `seen`, and none for that before the round."""

    def of_losses(name: str) -> Float[Tensor, " k"]:
        assert inputs.losses is not None
        assert inputs.own_losses is not None
        if name == "entropy" and inputs.own_losses.by_class.shape[-1] == 1:
            raise ConfigError(
                "the rule looks at how sure predictions of classes are, and the data have no classes"
            )
        known = torch.cat([getattr(inputs.losses, name), getattr(inputs.own_losses, name)])[
            : len(received.ids)
        ]
        return torch.cat(
            [known, torch.full((len(rows) - len(known),), torch.nan, dtype=torch.float64)]
        )

    table: dict[str, Callable[[], Any]] = {
        "losses": lambda: of_losses("mean"),
        "entropies": lambda: of_losses("entropy"),
        "num_samples": lambda: received.num_samples,
        "progress": lambda: inputs.context.progress,
        "n": lambda: inputs.n,
        "draw": lambda: inputs.context.draw,
        "heads": lambda: last_layers(inputs, rows),
    }
    return [table[name]() for name in extra_inputs(rule)]


def _preaggregation(
    pre_step: functools.partial[Any], f: int, m: int, inputs: CriterionInput
) -> base.PreAggregation:
    """The matrix of a pre-step for m models, or what makes it of their Gram matrix."""
    made = with_byzantine_count(pre_step, f, m)
    if "gram" in plugins.positional_inputs(pre_step.func):
        return made
    return validated_mixing(pre_step, made(m, inputs.context.draw), m)


def with_byzantine_count(
    function: functools.partial[Any], f: int, m: int
) -> functools.partial[Any]:
    """A rule or pre-step that assumes, where it assumes any, the f attackers that it was told or else these among m
    models, or as many as these admit."""
    if "f" not in plugins.parameters(function.func):
        return function
    return functools.partial(
        function, f=base.clip_byzantine_count(function, function.keywords.get("f", f), m)
    )

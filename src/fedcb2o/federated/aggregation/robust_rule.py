"""Application of a robust rule to the models that one agent received.

A robust rule declares a `RuleSignature`. Next to the Gram matrix or the columns, the rule may name
further inputs as arguments: those of `_EXTRA_INPUTS`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.errors import ConfigError
from fedcb2o.federated.aggregation import base
from fedcb2o.federated.aggregation.last_layer import last_layers
from fedcb2o.federated.plugin_outputs import validated_mixing
from fedcb2o.federated.types import CriterionInput, Received, Reduction, RuleOutput
from fedcb2o.nn import low_rank

Space = Literal["parameters", "products"]

# Inputs that a robust rule may name next to the Gram matrix or the columns.
_EXTRA_INPUTS = ("losses", "entropies", "num_samples", "progress", "n", "draw", "heads")


def apply_robust_rule(
    inputs: CriterionInput,
    rule: functools.partial[Any],
    *,
    own_model: Literal["excluded", "judged"] = "judged",
    pre_step: functools.partial[Any] | None = None,
    space: Space = "parameters",
) -> RuleOutput:
    """Apply a robust rule to the received models of one agent.

    The rule gets the received models, then the agent's own model unless it is excluded, then the
    last rows of its signature. Without `f`, it assumes the attackers' share of the received models,
    rounded up; every `f` is clipped to what the models admit. `space` = "products" compares and
    averages the products of low-rank adapters in place of their factors.
    """
    own_rows = base.signature_of(rule).own_rows
    if len(inputs.received.ids) == 0:
        return RuleOutput(torch.zeros(0, dtype=torch.float64))

    # 1. The rows that the rule gets.
    received = inputs.received
    if own_model == "judged" or "own" in own_rows:
        received = received.with_own(inputs.own_entry)
    previous = inputs.previous if "before" in own_rows else None
    rows = received.rows
    if previous is not None:
        rows = torch.cat([rows, previous.view(1)])

    models = inputs.models
    rule_rows = rows
    if space == "products":
        models, rule_rows = _products(inputs, rows)

    # 2. The assumed number of attackers, and the pre-aggregation.
    # A product that is whole except for rounding is not rounded up.
    f = math.ceil(inputs.context.malicious_share * len(inputs.received.ids) - 1e-9)
    mixing = None
    if pre_step is not None:
        mixing = _preaggregation(
            pre_step, f, base.num_mixed_rows(rule, pre_step, len(rows)), inputs
        )
    g, p = base.gram_and_mixing(rule, models, rule_rows, mixing)
    rule = with_byzantine_count(rule, f, len(rows) if p is None else len(p))

    # 3. The rule.
    outcome = base.evaluate_rule(rule, g, *_rule_inputs(rule, inputs, received, rows), p=p)
    assumed = rule.keywords.get("f")
    own, pairs = inputs.theta, inputs.context.factor_pairs
    if isinstance(outcome, Reduction):
        if space == "products":
            vector = base.aggregate(models, rule_rows, outcome)
            theta = low_rank.from_products(vector, own.cpu(), pairs)
            return RuleOutput(as_reduction(rows, theta, outcome.weights), f=assumed)
        reduction = dataclasses.replace(outcome, rows=rows[outcome.rows])
        return RuleOutput(reduction, f=assumed)
    # The nearest adapters of the same rank take the place of the average product.
    if space == "products" and outcome.any():
        thetas = inputs.models[rows.to(inputs.models.device)].cpu()
        theta = low_rank.average_products(thetas, outcome, own.cpu(), pairs)
        return RuleOutput(as_reduction(rows, theta, outcome), f=assumed)
    # The agent's own weight is the rest, and is not stored.
    previous_weight = None if previous is None else float(outcome[-1])
    return RuleOutput(outcome[: len(received.ids)], previous_weight=previous_weight, f=assumed)


def _products(
    inputs: CriterionInput, rows: Int[Tensor, " k"]
) -> tuple[Float[Tensor, "k p"], Int[Tensor, " k"]]:
    """Return models whose factors are replaced by their products, and their rows."""
    pairs = inputs.context.factor_pairs
    low_rank.require_pairs(pairs, '`space` = "products"')
    thetas = inputs.models[rows.to(inputs.models.device)].cpu()
    return low_rank.to_products(thetas, pairs), torch.arange(len(rows))


def as_reduction(
    rows: Int[Tensor, " k"], theta: Float[Tensor, " d"], weights: Float[Tensor, " k"] | None
) -> Reduction:
    """Return the reduction to a known model, with `weights` for the record."""
    reduce = functools.partial(_columns_of, theta=theta)
    return Reduction(rows, reduce, takes_offset=True, weights=weights)


def _columns_of(
    columns: Float[Tensor, "k b"], first: int, *, theta: Float[Tensor, " d"]
) -> Float[Tensor, " b"]:
    """Return the columns of a model that is known, in place of those of received models."""
    return theta[first : first + columns.shape[1]].to(columns)


def extra_inputs(rule: functools.partial[Any]) -> tuple[str, ...]:
    """Return the inputs that a robust rule names as arguments, in their order."""
    # The first argument of the other rules is the Gram matrix or the block of columns.
    first = int(base.signature_of(rule).reads != "values")
    return plugins.extra_inputs("rule", rule.func, _EXTRA_INPUTS, first)


def _rule_inputs(
    rule: functools.partial[Any], inputs: CriterionInput, received: Received, rows: Tensor
) -> list[Any]:
    """Return a rule's extra inputs; NaN for the model before the round."""

    def from_losses(name: str) -> Float[Tensor, " k"]:
        assert inputs.losses is not None
        assert inputs.own_losses is not None
        if name == "entropy" and inputs.own_losses.by_class.shape[-1] == 1:
            raise ConfigError(
                "the rule reads the entropy of class predictions, and the data have no classes"
            )
        both = (getattr(inputs.losses, name), getattr(inputs.own_losses, name))
        # Without the agent's own value where its model is excluded.
        values = torch.cat(both)[: len(received.ids)]
        missing = torch.full((len(rows) - len(values),), torch.nan, dtype=torch.float64)
        return torch.cat([values, missing])

    # Functions, because some inputs are costly or raise an error, and only those that the rule
    # names are computed.
    table: dict[str, Callable[[], Any]] = {
        "losses": lambda: from_losses("mean"),
        "entropies": lambda: from_losses("entropy"),
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
    """Return the matrix of a pre-aggregation step, or the function that computes it."""
    step = with_byzantine_count(pre_step, f, m)
    if "gram" in plugins.positional_inputs(pre_step.func):
        return step
    return validated_mixing(pre_step, step(m, inputs.context.draw), m)


def with_byzantine_count(
    function: functools.partial[Any], f: int, m: int
) -> functools.partial[Any]:
    """Bind the number of attackers: the configuration's or `f`, clipped to what m admit."""
    if "f" not in plugins.parameters(function.func):
        return function
    count = base.clip_byzantine_count(function, function.keywords.get("f", f), m)
    return functools.partial(function, f=count)

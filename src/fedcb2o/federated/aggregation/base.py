"""How robust rules look at models: their form, the Gram matrix, and a rule's outcome a block of columns at a time.

A rule has one of two forms, so that no [m, m, d] temporary and no copy of all models is ever needed. By weights: a
function (gram, ...) -> weights [m] that sum to 1, where gram = X X^T is the Gram matrix of the models, from which all
distances and angles follow. By columns: a function (block) -> [b] of a block of columns [m, b] of the models, each
column for itself. Bulyan has both: it selects by the Gram matrix, then reduces. Pre-steps such as nearest-neighbour
mixing are matrices P [j, m]: the rule then works on the rows of P X.

The models are rows of a pool and stay there; what is held beside them is one block of columns of a few MB.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.federated.aggregation.gram_matrix import column_blocks, gram
from fedcb2o.federated.plugin_outputs import (
    validated_mixing,
    validated_reduction,
    validated_row_weights,
)
from fedcb2o.federated.types import OffsetColumnReduction, Reduction
from fedcb2o.plugins import Declaration, F

GramEntries = Literal["none", "last", "all"]
OwnRow = Literal["own", "before"]


@dataclass(frozen=True)
class RuleSignature:
    """What a rule looks at: `of` the Gram matrix, columns, or only values per model such as losses.

    `pairs` are the entries of the Gram matrix that it reads, beside the diagonal: none, those with the last rows, or
    all. `last` says which of the last rows are the agent's: its "own" model, that "before" the round, or both in this
    order. `largest` is the largest f, the number of attackers assumed, for m rows; None where there is no f.
    """

    reads: Literal["gram", "columns", "values"]
    gram_entries: GramEntries | Callable[[dict[str, Any]], GramEntries] = "all"
    own_rows: tuple[OwnRow, ...] = ()
    max_byzantine: Callable[[int], int] | None = None


RULE_SIGNATURE = Declaration[RuleSignature]("form")


def rule_signature(
    reads: Literal["gram", "columns", "values"],
    *,
    gram_entries: GramEntries | Callable[[dict[str, Any]], GramEntries] = "all",
    own_rows: tuple[OwnRow, ...] = (),
    max_byzantine: Callable[[int], int] | None = None,
) -> Callable[[F], F]:
    """Declares a rule's `Form`."""
    return RULE_SIGNATURE(RuleSignature(reads, gram_entries, own_rows, max_byzantine))


def signature_of(rule: Callable[..., Any]) -> RuleSignature:
    """The form of a rule, its keywords bound or not; one that declares nothing looks at the whole Gram matrix."""
    return RULE_SIGNATURE.get(rule) or RuleSignature("gram")


def clip_byzantine_count(rule: Callable[..., Any], f: int, m: int) -> int:
    """The number of attackers among m models that a rule assumes: `f`, or the largest that m models admit.

    Raises ConfigError for an f that is no whole number from 0 up.
    """
    if isinstance(f, bool) or not isinstance(f, int) or f < 0:
        raise ConfigError(
            f"`f`, the number of attackers to assume, must be a whole number from 0 up, got {f!r}"
        )
    largest = signature_of(rule).max_byzantine
    return f if largest is None else min(f, max(0, largest(m)))


def validate_byzantine_count(rule: Callable[..., Any], f: int, m: int) -> None:
    """Raises ConfigError where a rule does not admit `f` attackers among m models even if all of them come."""
    most = clip_byzantine_count(rule, f, m)
    if f > most:
        name = getattr(getattr(rule, "func", rule), "__name__", "the rule")
        raise ConfigError(
            f"`f` = {f} attackers are more than {name} admits among {m} models: at most {most}; "
            "assume fewer, or ask more peers (a larger `budget`)"
        )


PreAggregation = Float[Tensor, "j n"] | Callable[[Float[Tensor, "n n"]], Float[Tensor, "j n"]]
"""A pre-step: a matrix, or what makes it of the Gram matrix of the models that it mixes."""


def gram_and_mixing(
    rule: Callable[..., Any],
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"],
    mixing: PreAggregation | None,
) -> tuple[Float[Tensor, "m m"], Float[Tensor, "r m"] | None]:
    """As much of the Gram matrix as a rule after a pre-step reads, the rest NaN; and the pre-step's matrix, in which
    the agent's own rows, which are last, stay as they are."""
    form = signature_of(rule)
    pairs = (
        form.gram_entries(getattr(rule, "keywords", {}))
        if callable(form.gram_entries)
        else form.gram_entries
    )
    if form.reads == "columns" or pairs == "none":
        pairs = (
            "all" if callable(mixing) or (mixing is not None and form.reads == "gram") else "none"
        )
    elif mixing is not None:
        pairs = "all"
    if pairs == "none":
        g = torch.full((len(rows), len(rows)), torch.nan, dtype=torch.float64)
    else:
        g = gram(models, rows, last=None if pairs == "all" else len(form.own_rows))
    if mixing is None:
        return g, None
    peers = len(rows) - len(form.own_rows)
    p = (
        validated_mixing(mixing, mixing(g[:peers, :peers].clone()), peers)
        if callable(mixing)
        else mixing.double()
    )
    whole = torch.zeros(len(p) + len(form.own_rows), len(rows), dtype=torch.float64)
    whole[: len(p), :peers] = p
    whole[len(p) :, peers:] = torch.eye(len(form.own_rows))
    return g, whole


def evaluate_rule(
    rule: Callable[..., Any],
    g: Float[Tensor, "k k"],
    *given: Any,
    p: Float[Tensor, "j k"] | None = None,
) -> Float[Tensor, " k"] | Reduction:
    """What a rule makes of k models with the Gram matrix `g`, or of the rows of P X: weights of the models, or a
    reduction of some of them."""
    form = signature_of(rule)
    everything = torch.arange(len(g))
    if form.reads == "columns":
        return Reduction(everything, validated_reduction(rule, rule), p)
    made = rule(*given) if form.reads == "values" else rule(g if p is None else p @ g @ p.T, *given)
    if isinstance(made, Reduction):
        reduce = validated_reduction(rule, made.reduce)
        if p is None:
            return dataclasses.replace(made, reduce=reduce)
        weights = None if made.weights is None else p[made.rows].T @ made.weights
        return dataclasses.replace(
            made, rows=everything, reduce=reduce, mixing=p[made.rows], weights=weights
        )
    weights = validated_row_weights(
        rule, made, len(g) if p is None else len(p), "before" in form.own_rows
    )
    return weights if p is None else p.T @ weights


def apply(
    rule: Callable[..., Any],
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"] | None = None,
    *given: Any,
    mixing: PreAggregation | None = None,
) -> Float[Tensor, " d"]:
    """The model that a rule, its keywords bound by `functools.partial`, makes of finite models, rows of a pool.

    The rows come in the order of the rule's `Form`: the agent's own last. `given` is what the rule looks at beside the
    Gram matrix: tensors with a value for each row, or numbers. `mixing` is a pre-step, a matrix or a function of the
    Gram matrix, and leaves the agent's own rows as they are. Raises ConfigError where the rule trusts no model.
    """
    rows = torch.arange(len(models)) if rows is None else rows
    g, p = gram_and_mixing(rule, models, rows, mixing)
    outcome = evaluate_rule(rule, g, *given, p=p)
    if isinstance(outcome, Reduction):
        return _reduce_by_blocks(models, rows[outcome.rows], outcome.apply)
    if not outcome.any():
        raise ConfigError("the rule trusts none of the models, so there is nothing to aggregate")
    mu = outcome[outcome != 0].to(models.device, models.dtype)
    return _reduce_by_blocks(models, rows[outcome != 0], lambda block, first: mu @ block)


def _reduce_by_blocks(
    models: Float[Tensor, "p d"], rows: Int[Tensor, " m"], reduce: OffsetColumnReduction
) -> Float[Tensor, " d"]:
    """What `reduce` makes of some rows of a pool, a block of columns at a time."""
    result = models.new_empty(models.shape[1])
    for a, block in column_blocks(models, rows):
        result[a : a + block.shape[1]] = reduce(block, a)
    return result

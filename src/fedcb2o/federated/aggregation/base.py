"""Signature and evaluation of robust aggregation rules.

A robust rule has one of two forms:

- By weights: a function `(gram, ...) -> weights [m]` that sum to 1, where `gram` = X X^T is the
  Gram matrix of the models. All distances and angles follow from it.
- By columns: a function `(block) -> [b]` of a block of columns [m, b], each column for itself.

Bulyan has both: it selects by the Gram matrix and then reduces columns. A pre-aggregation step,
such as nearest-neighbour mixing, is a matrix P [j, m]: the rule then works on the rows of P X.

Example:
    >>> import torch
    >>> from fedcb2o.federated.aggregation import krum
    >>> models = torch.tensor([[0.0], [1.0], [2.0], [100.0], [1.5]])
    >>> import functools
    >>> apply(functools.partial(krum, f=1), models).tolist()
    [1.5]
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
_OwnRow = Literal["own", "before"]


@dataclass(frozen=True)
class RuleSignature:
    """The inputs that a robust rule declares.

    Attributes:
        reads: The rule reads the Gram matrix, columns, or only values per model such as losses.
        gram_entries: Entries of the Gram matrix that the rule reads next to the diagonal: none,
            those of the last rows, or all. A function computes them from the rule's parameters.
        own_rows: Meaning of the last rows: the agent's "own" model, its model "before" the round,
            or both in this order.
        max_byzantine: Function from the number of rows to the largest number f of attackers that
            the rule can assume; None for a rule without `f`.
    """

    reads: Literal["gram", "columns", "values"]
    gram_entries: GramEntries | Callable[[dict[str, Any]], GramEntries] = "all"
    own_rows: tuple[_OwnRow, ...] = ()
    max_byzantine: Callable[[int], int] | None = None


RULE_SIGNATURE = Declaration[RuleSignature]("form")


def rule_signature(
    reads: Literal["gram", "columns", "values"],
    *,
    gram_entries: GramEntries | Callable[[dict[str, Any]], GramEntries] = "all",
    own_rows: tuple[_OwnRow, ...] = (),
    max_byzantine: Callable[[int], int] | None = None,
) -> Callable[[F], F]:
    """Declare a function as a robust rule with this `RuleSignature`.

    Args:
        reads: See `RuleSignature`.
        gram_entries: See `RuleSignature`.
        own_rows: See `RuleSignature`.
        max_byzantine: See `RuleSignature`.

    Returns:
        A decorator for the rule.
    """
    return RULE_SIGNATURE(RuleSignature(reads, gram_entries, own_rows, max_byzantine))


def _form(
    of: Literal["gram", "columns", "values"],
    *,
    pairs: GramEntries | Callable[[dict[str, Any]], GramEntries] = "all",
    last: tuple[_OwnRow, ...] = (),
    largest: Callable[[int], int] | None = None,
) -> Callable[[F], F]:
    """Declare a robust rule by the former keywords of `rule_signature`."""
    return rule_signature(of, gram_entries=pairs, own_rows=last, max_byzantine=largest)


def signature_of(rule: Callable[..., Any]) -> RuleSignature:
    """Return the signature of a rule.

    Args:
        rule: A rule, its keywords bound or not.

    Returns:
        The declared signature; without a declaration, the rule reads the whole Gram matrix.
    """
    return RULE_SIGNATURE.get(rule) or RuleSignature("gram")


def clip_byzantine_count(rule: Callable[..., Any], f: int, m: int) -> int:
    """Clip the number of assumed attackers to the largest that a rule admits.

    Args:
        rule: A rule, its keywords bound or not.
        f: Number of attackers to assume, 0 or more.
        m: Number of models.

    Returns:
        The smaller of `f` and the largest number that the rule admits among m models.

    Raises:
        ConfigError: `f` is not a whole number from 0 up.
    """
    if isinstance(f, bool) or not isinstance(f, int) or f < 0:
        raise ConfigError(
            f"`f`, the number of attackers to assume, must be a whole number from 0 up, got {f!r}"
        )
    max_byzantine = signature_of(rule).max_byzantine
    return f if max_byzantine is None else min(f, max(0, max_byzantine(m)))


def validate_byzantine_count(rule: Callable[..., Any], f: int, m: int) -> None:
    """Check that a rule admits `f` attackers among m models.

    Args:
        rule: A rule, its keywords bound or not.
        f: Number of attackers to assume, 0 or more.
        m: Number of models if every peer answers.

    Raises:
        ConfigError: The rule admits fewer attackers.
    """
    limit = clip_byzantine_count(rule, f, m)
    if f <= limit:
        return
    name = getattr(getattr(rule, "func", rule), "__name__", "the rule")
    raise ConfigError(
        f"`f` = {f} attackers are more than {name} admits among {m} models: at most {limit}; "
        "assume fewer, or ask more peers (a larger `budget`)"
    )


PreAggregation = Float[Tensor, "j n"] | Callable[[Float[Tensor, "n n"]], Float[Tensor, "j n"]]
"""A pre-aggregation step: a matrix, or a function of the Gram matrix of the mixed models."""


def gram_and_mixing(
    rule: Callable[..., Any],
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"],
    mixing: PreAggregation | None,
) -> tuple[Float[Tensor, "m m"], Float[Tensor, "r m"] | None]:
    """Compute a rule's Gram matrix and pre-aggregation matrix.

    Args:
        rule: A robust rule, its keywords bound or not.
        models: Buffer with one model per row, shape [p, d].
        rows: Rows of the models, shape [m]; the agent's own rows are last.
        mixing: Pre-aggregation step for the other rows, or None.

    Returns:
        The Gram matrix, NaN where the rule does not read it, and the pre-aggregation matrix, which
        leaves the agent's own rows as they are (None without a step).
    """
    signature = signature_of(rule)
    entries = _entries_to_compute(rule, signature, mixing)
    num_own = len(signature.own_rows)
    if entries == "none":
        g = torch.full((len(rows), len(rows)), torch.nan, dtype=torch.float64)
    else:
        g = gram(models, rows, last=None if entries == "all" else num_own)
    if mixing is None:
        return g, None

    num_peers = len(rows) - num_own
    if callable(mixing):
        p = validated_mixing(mixing, mixing(g[:num_peers, :num_peers].clone()), num_peers)
    else:
        p = mixing.double()
    whole = torch.zeros(len(p) + num_own, len(rows), dtype=torch.float64)
    whole[: len(p), :num_peers] = p
    whole[len(p) :, num_peers:] = torch.eye(num_own)
    return g, whole


def _entries_to_compute(
    rule: Callable[..., Any], signature: RuleSignature, mixing: PreAggregation | None
) -> GramEntries:
    entries = signature.gram_entries
    if callable(entries):
        entries = entries(getattr(rule, "keywords", {}))
    if signature.reads == "columns" or entries == "none":
        mixes_gram = mixing is not None and signature.reads == "gram"
        return "all" if callable(mixing) or mixes_gram else "none"
    return entries if mixing is None else "all"


def evaluate_rule(
    rule: Callable[..., Any],
    g: Float[Tensor, "k k"],
    *extra: Any,
    p: Float[Tensor, "j k"] | None = None,
) -> Float[Tensor, " k"] | Reduction:
    """Evaluate a robust rule on models X, or on P X.

    Args:
        rule: A robust rule, its keywords bound by `functools.partial`.
        g: Gram matrix of the models, shape [k, k].
        *extra: Further inputs of the rule, in the order of its arguments.
        p: Pre-aggregation matrix, shape [j, k], or None.

    Returns:
        Weights of the models, shape [k], or a reduction of some of them.
    """
    signature = signature_of(rule)
    every_row = torch.arange(len(g))
    if signature.reads == "columns":
        return Reduction(every_row, validated_reduction(rule, rule), p)

    if signature.reads == "values":
        output = rule(*extra)
    else:
        output = rule(g if p is None else p @ g @ p.T, *extra)

    if isinstance(output, Reduction):
        reduce = validated_reduction(rule, output.reduce)
        if p is None:
            return dataclasses.replace(output, reduce=reduce)
        mixing = p[output.rows]
        weights = None if output.weights is None else mixing.T @ output.weights
        return dataclasses.replace(
            output, rows=every_row, reduce=reduce, mixing=mixing, weights=weights
        )

    num_rows = len(g) if p is None else len(p)
    weights = validated_row_weights(rule, output, num_rows, "before" in signature.own_rows)
    return weights if p is None else p.T @ weights


def apply(
    rule: Callable[..., Any],
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"] | None = None,
    *extra: Any,
    mixing: PreAggregation | None = None,
) -> Float[Tensor, " d"]:
    """Aggregate finite models by a robust rule.

    Args:
        rule: A robust rule, its keywords bound by `functools.partial`.
        models: Buffer with one model per row, shape [p, d].
        rows: Rows of the models, shape [m], in the order of the rule's signature: the agent's own
            rows are last. By default all rows.
        *extra: Further inputs of the rule: tensors with one value per row, or numbers.
        mixing: Pre-aggregation step; it leaves the agent's own rows as they are.

    Returns:
        The aggregate, shape [d].

    Raises:
        ConfigError: The rule trusts no model.
    """
    if rows is None:
        rows = torch.arange(len(models))
    g, p = gram_and_mixing(rule, models, rows, mixing)
    outcome = evaluate_rule(rule, g, *extra, p=p)

    if isinstance(outcome, Reduction):
        return _reduce_by_blocks(models, rows[outcome.rows], outcome.apply)
    if not outcome.any():
        raise ConfigError("the rule trusts none of the models, so there is nothing to aggregate")
    mu = outcome[outcome != 0].to(models.device, models.dtype)
    return _reduce_by_blocks(models, rows[outcome != 0], lambda block, first: mu @ block)


def _reduce_by_blocks(
    models: Float[Tensor, "p d"], rows: Int[Tensor, " m"], reduce: OffsetColumnReduction
) -> Float[Tensor, " d"]:
    result = models.new_empty(models.shape[1])
    for a, block in column_blocks(models, rows):
        result[a : a + block.shape[1]] = reduce(block, a)
    return result

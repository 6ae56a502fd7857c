"""Signature and evaluation of robust aggregation rules.

A robust rule has one of two forms:

- By weights: a function `(gram, ...) -> weights [m]` that sum to 1, where `gram` = X X^T is the
  Gram matrix of the models. All distances and angles follow from it.
- By columns: a function `(block) -> [b]` of a block of columns [m, b], each column for itself.

Bulyan has both: it selects by the Gram matrix and then reduces columns. A pre-aggregation step,
such as nearest-neighbour mixing, is a matrix P [j, m]: the rule then works on the rows of P X.
"""

import dataclasses
import functools
import logging
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
from fedcb2o.nn import parameters
from fedcb2o.plugins import Declaration, F, to_python
from fedcb2o.user_values import to_tensor

_LOGGER = logging.getLogger(__name__)

_SUM_COLUMNS = 2**18  # 1 MiB of float32, which stays in the cache of a core

LARGEST = 1e60  # whose fourth power is a number
_NEAR = 1e-10  # squared distances in units of the squared norms, below which they are inaccurate

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
        by_distances: Distances between models are all that the rule reads of the matrix, so that it
            does not depend on the place of zero.
    """

    reads: Literal["gram", "columns", "values"]
    gram_entries: GramEntries | Callable[[dict[str, Any]], GramEntries] = "all"
    own_rows: tuple[_OwnRow, ...] = ()
    max_byzantine: Callable[[int], int] | None = None
    by_distances: bool = False


RULE_SIGNATURE = Declaration[RuleSignature]("form")


def rule_signature(
    reads: Literal["gram", "columns", "values"],
    *,
    gram_entries: GramEntries | Callable[[dict[str, Any]], GramEntries] = "all",
    own_rows: tuple[_OwnRow, ...] = (),
    max_byzantine: Callable[[int], int] | None = None,
    by_distances: bool = False,
) -> Callable[[F], F]:
    """Declare a function as a robust rule with this `RuleSignature`.

    Args:
        reads: See `RuleSignature`.
        gram_entries: See `RuleSignature`.
        own_rows: See `RuleSignature`.
        max_byzantine: See `RuleSignature`.
        by_distances: See `RuleSignature`.

    Returns:
        A decorator for the rule.
    """
    return RULE_SIGNATURE(RuleSignature(reads, gram_entries, own_rows, max_byzantine, by_distances))


def signature_of(rule: Callable[..., Any]) -> RuleSignature:
    """Return the signature of a rule, by default one that reads the whole Gram matrix."""
    return RULE_SIGNATURE.get(rule) or RuleSignature("gram")


def clip_byzantine_count(rule: Callable[..., Any], f: object, m: int) -> int:
    """Clip a number of attackers to the largest that a rule admits among m models."""
    f = to_python(f)
    if isinstance(f, bool) or not isinstance(f, int) or f < 0:
        raise ConfigError(
            f"`f`, the number of attackers to assume, must be a whole number from 0 up, got {f!r}"
        )
    max_byzantine = signature_of(rule).max_byzantine
    # Rounds clip in place of failing: the number of received models varies, and `shortfall` reports
    # it.
    return f if max_byzantine is None else min(f, max(0, max_byzantine(m)))


def validate_byzantine_count(
    rule: Callable[..., Any],
    f: int,
    m: int,
    cure: str = "assume fewer, or ask more peers (a larger `budget`)",
) -> int:
    """Check that a rule admits `f` attackers among m models; `cure` ends the message."""
    limit = clip_byzantine_count(rule, f, m)
    if f <= limit:
        return int(f)
    raise ConfigError(
        f"`f` = {f} attackers are more than {rule_name(rule)} admits among {m} models: at most"
        f" {limit}, and `f` = {f} needs {models_needed(rule, f)} models; {cure}"
    )


def rule_name(rule: Callable[..., Any]) -> str:
    """Return the name of a rule or a pre-aggregation step in messages."""
    function = getattr(rule, "func", rule)
    return getattr(function, "__name__", "the rule")


def models_needed(rule: Callable[..., Any], f: int) -> int | str:
    """Return the least number of models for `f` attackers; "more" above 10 f + 10."""
    max_byzantine = signature_of(rule).max_byzantine
    assert max_byzantine is not None
    # A rule's limit is a function of m only, so that its inverse is a search.
    enough = (m for m in range(1, 10 * f + 11) if max_byzantine(m) >= f)
    return next(enough, "more")


PreAggregation = Float[Tensor, "j n"] | Callable[[Float[Tensor, "n n"]], Float[Tensor, "j n"]]
"""A pre-aggregation step: a matrix, or a function of the Gram matrix of the mixed models."""


def gram_and_mixing(
    rule: Callable[..., Any],
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"],
    mixing: PreAggregation | None,
) -> tuple[Float[Tensor, "m m"], Float[Tensor, "r m"] | None]:
    """Compute a rule's Gram matrix (NaN if it is not read) and pre-aggregation matrix."""
    signature = signature_of(rule)
    entries = _entries_to_compute(rule, signature, mixing)
    num_own = len(signature.own_rows)
    if entries == "none":
        # NaN, and not 0: a rule that reads what it did not declare must not pass unnoticed.
        g = torch.full((len(rows), len(rows)), torch.nan, dtype=torch.float64)
    else:
        g = gram(models, rows, last=None if entries == "all" else num_own)
    if mixing is None:
        return g, None

    num_peers = num_mixed_rows(rule, mixing, len(rows))
    if callable(mixing):
        # The step may be a user's, and may write into its input.
        p = validated_mixing(mixing, mixing(g[:num_peers, :num_peers].clone()), num_peers)
    else:
        p = mixing.double()
    # The step mixes the peers' rows; the agent's own rows stay as they are.
    num_kept = len(rows) - num_peers
    whole = torch.zeros(len(p) + num_kept, len(rows), dtype=torch.float64)
    whole[: len(p), :num_peers] = p
    whole[len(p) :, num_peers:] = torch.eye(num_kept)
    return g, whole


def num_mixed_rows(rule: Callable[..., Any], mixing: PreAggregation, num_rows: int) -> int:
    """Return the number of rows that a pre-step gets: peers, and the agent's if it reads it."""
    own_rows = signature_of(rule).own_rows
    needs_own = callable(mixing) and "own" in signature_of(mixing).own_rows
    return num_rows - len(own_rows) + ("own" in own_rows and needs_own)


def _entries_to_compute(
    rule: Callable[..., Any], signature: RuleSignature, mixing: PreAggregation | None
) -> GramEntries:
    entries = signature.gram_entries
    if callable(entries):
        entries = entries(getattr(rule, "keywords", {}))
    # A pre-step that is a function reads the matrix itself, whatever the rule reads.
    if signature.reads != "gram" or entries == "none":
        mixes_gram = mixing is not None and signature.reads == "gram"
        return "all" if callable(mixing) or mixes_gram else "none"
    return entries if mixing is None else "all"


def evaluate_rule(
    rule: Callable[..., Any],
    g: Float[Tensor, "k k"],
    *extra: Any,
    p: Float[Tensor, "j k"] | None = None,
) -> Float[Tensor, " k"] | Reduction:
    """Evaluate a robust rule on models X, or on P X, with `extra` inputs in its order."""
    signature = signature_of(rule)
    every_row = torch.arange(len(g))
    # Columns are reduced later, block by block.
    if signature.reads == "columns":
        return Reduction(every_row, validated_reduction(rule, rule), p)

    if signature.reads == "values":
        output = rule(*extra)
    else:
        output = rule(g if p is None else p @ g @ p.T, *extra)

    # The weights of P X are weights of X after a product with P^T.
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
    clip_f: bool = False,
) -> Float[Tensor, " d"]:
    """Aggregate finite models by a robust rule.

    Args:
        rule: A robust rule, its keywords bound by `functools.partial`.
        models: Buffer with one model per row, shape [p, d].
        rows: Rows of the models, shape [m], in the order of the rule's signature: the agent's own
            rows are last. By default all rows.
        *extra: Further inputs of the rule: tensors with one value per row, or numbers.
        mixing: Pre-aggregation step; it leaves the agent's own rows as they are.
        clip_f: Whether to assume as many attackers as the models admit where `f` is larger, with a
            warning, as the rounds of a run do.

    Returns:
        The aggregate, shape [d].

    Raises:
        ConfigError: `f` is too large for the number of models, there is no model, a model is not
            finite, or the rule trusts no model.
    """
    models, rows = _checked_models(models, rows)
    if callable(mixing):
        mixing = fit_byzantine_count(mixing, num_mixed_rows(rule, mixing, len(rows)), clip_f=clip_f)
    g, p = gram_and_mixing(rule, models, rows, mixing)
    rule = fit_byzantine_count(rule, len(rows) if p is None else len(p), clip_f=clip_f)
    if not g.isnan().all():  # the rule reads the matrix
        require_finite(models, rows[~g.diagonal().isfinite()])
        if overflows(g):
            models = bounded(models[rows])
            rows = torch.arange(len(rows))
            g, p = gram_and_mixing(rule, models, rows, mixing)
        functions = [rule, mixing] if callable(mixing) else [rule]
        central = far_centre(g) if all(signature_of(f).by_distances for f in functions) else None
        if central is not None:
            points = about(models[rows], central)
            g, p = gram_and_mixing(rule, points, torch.arange(len(rows)), mixing)
    outcome = evaluate_rule(rule, g, *extra, p=p)
    if not isinstance(outcome, Reduction) and not outcome.any():
        raise ConfigError("the rule trusts none of the models, so there is nothing to aggregate")
    return aggregate(models, rows, outcome)


def aggregate(
    models: Float[Tensor, "p d"], rows: Int[Tensor, " m"], outcome: Float[Tensor, " m"] | Reduction
) -> Float[Tensor, " d"]:
    """Compute the aggregate of the rows that a rule got from its outcome, not all 0."""
    if isinstance(outcome, Reduction):
        return _reduce_by_blocks(models, rows[outcome.rows], outcome.apply)
    return weighted_sum(models, rows, outcome)


def weighted_sum(
    models: Float[Tensor, "p d"], rows: Int[Tensor, " m"], weights: Float[Tensor, " m"]
) -> Float[Tensor, " d"]:
    """Compute a weighted sum of finite models; equal weights give their plain mean."""
    is_used = weights != 0
    used = weights[is_used]
    # A single model is copied, without rounding.
    if len(used) == 1 and used[0] == 1:
        result = models[int(rows[is_used])].clone()
        if not is_finite(result):
            require_finite(models, rows)
        return result

    # 1. Only the models that count, unless all are consecutive rows: a view is faster than a copy.
    if not parameters.is_contiguous_range(rows.tolist()):
        rows = rows[is_used]
        weights = used
    # Equal weights give the plain mean: a sum that is divided by the count.
    is_mean = (used == used[0]).all() and abs(float(used[0]) * len(used) - 1) < 1e-9
    if is_mean:
        total = _linear_combination(models, rows, (weights != 0).double(), len(used))
    else:
        total = _linear_combination(models, rows, weights, 1)

    # 2. The result is not finite if a model is not, or if a sum overflows where a mean does not.
    if total is None:
        require_finite(models, rows)
        total = _linear_combination(models, rows, weights, 1)
    if total is None:
        raise ConfigError("the weighted sum of the models is beyond the largest number")
    return total


def _linear_combination(
    models: Float[Tensor, "p d"], rows: Int[Tensor, " m"], weights: Float[Tensor, " m"], count: int
) -> Float[Tensor, " d"] | None:
    """Compute a weighted sum, divided by `count`; None if it is not finite."""
    mu = weights.to(models.device, models.dtype)
    result = models.new_empty(models.shape[1])
    size = None
    if parameters.is_contiguous_range(rows.tolist()):
        size = _SUM_COLUMNS  # nothing is copied, so that only the sums need to fit the cache
    total = models.new_zeros(())
    for a, block in column_blocks(models, rows, size=size):
        sums = result[a : a + block.shape[1]]
        torch.mv(block.T, mu, out=sums)
        if count > 1:
            sums /= count
        # Summed while the block is in the cache. The sum of finite numbers may overflow, and only
        # then is each one tested.
        total += sums.sum()
    is_finite = bool(total.isfinite()) or bool(result.isfinite().all())
    return result if is_finite else None


def overflows(g: Float[Tensor, "m m"]) -> bool:
    """Return whether models are so large that rules by their Gram matrix compute infinities."""
    return not bool((g.diagonal() <= LARGEST**2).all())


def bounded(models: Float[Tensor, "m d"]) -> Float[Tensor, "m d"]:
    """Return models, in which one with numbers beyond 1e60 is scaled down to 1e60."""
    largest = models.abs().amax(1, keepdim=True)
    return models * (LARGEST / largest).clamp(max=1.0)


def far_centre(g: Float[Tensor, "m m"]) -> int | None:
    """Return the row of a central model if differences of models drown in rounding, else None.

    The last model counts as central where the matrix lacks the entries of other ones.
    """
    norms = g.diagonal().unsqueeze(0) + g.diagonal().unsqueeze(1)
    squared = (norms - g - g.T).fill_diagonal_(torch.nan)
    # The matrix is right to about 1e-14 of the norms.
    if not (squared < _NEAR * norms).any():
        return None
    if squared.isnan().sum() > len(g):
        return len(g) - 1
    return int(squared.nanmedian(1).values.argmin())


def about(models: Float[Tensor, "m d"], central: int) -> Float[Tensor, "m d"]:
    """Return the differences of models to one of them, in float64."""
    return models.double() - models[central].double()


def is_finite(values: Tensor) -> bool:
    """Test if all values are finite, in one pass unless their sum overflows."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def require_finite(models: Float[Tensor, "p d"], rows: Int[Tensor, " k"]) -> None:
    """Check that models are finite."""
    wrong = [i for i in rows.tolist() if not models[i].isfinite().all()]
    if wrong:
        raise ConfigError(f"models are not finite: leave out the rows {wrong}")


def _checked_models(models: Any, rows: Any) -> tuple[Tensor, Tensor]:
    """Return models and rows as tensors. Raise ConfigError for models that cannot be aggregated."""
    models = to_tensor("`models` holds", models)
    if models.ndim != 2:
        raise ConfigError(f"`models` must be [p, d], one model a row, got {[*models.shape]}")
    if not models.is_floating_point():
        models = models.double()
    every_row = torch.arange(len(models))
    rows = every_row if rows is None else to_tensor("`rows` holds", rows).cpu()
    if rows.dtype == torch.bool and rows.shape == every_row.shape:
        rows = rows.nonzero().flatten()
    if len(rows) == 0:
        raise ConfigError("there is no model to aggregate")
    if rows.is_floating_point() or not torch.isin(rows, every_row).all():
        raise ConfigError(f"`rows` must be row numbers from 0 to {len(models) - 1}")
    return models, rows.long()


def fit_byzantine_count(
    function: Callable[..., Any], m: int, *, clip_f: bool
) -> Callable[..., Any]:
    """Check the number of attackers that a rule or step assumes, or clip it with a warning."""
    f = getattr(function, "keywords", {}).get("f")
    if f is None:
        return function
    if not clip_f:
        cure = "assume fewer, or let `clip_f=True` assume as many as the models admit"
        validate_byzantine_count(function, f, m, cure)
        return function
    count = clip_byzantine_count(function, f, m)
    if count < f:
        _warn_of_clipping(rule_name(function), f, models_needed(function, f), m, count)
    return functools.partial(function, f=count)


@functools.cache  # one warning for each case
def _warn_of_clipping(name: str, f: int, needed: int | str, m: int, count: int) -> None:
    _LOGGER.warning(
        "%s with f = %d needs %s models, and there are %d: f = %d is assumed, and the guarantee for"
        " f = %d does not hold.",
        name, f, needed, m, count, f
    )  # fmt: skip


def _reduce_by_blocks(
    models: Float[Tensor, "p d"], rows: Int[Tensor, " m"], reduce: OffsetColumnReduction
) -> Float[Tensor, " d"]:
    result = models.new_empty(models.shape[1])
    for a, block in column_blocks(models, rows):
        if not is_finite(block):
            require_finite(models, rows)
        result[a : a + block.shape[1]] = reduce(block, a)
    return result

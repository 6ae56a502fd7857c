"""What users' functions returned, checked: whatever it is, who wrote it is told in one line."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from fedcb2o.data._dataset import Shard
from fedcb2o.errors import ConfigError
from fedcb2o.federated.types import (
    ColumnReduction,
    Craft,
    Criterion,
    CriterionInput,
    OffsetColumnReduction,
    Poison,
    RuleState,
    SampleTransform,
    Select,
)
from fedcb2o.plugins import USER_FUNCTION, display_name

# The types of what a rule may keep, by their names in a checkpoint.
STATE_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
STATE_DTYPES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"}
STATE_DTYPES |= {torch.uint8: "U8", torch.bool: "BOOL"}


def _dense_tensor(name: str, values: Any) -> Tensor:
    """What a user's function returned as a dense tensor of real numbers, without a gradient's history; raises
    ConfigError where it is none."""
    try:
        found = torch.as_tensor(values.copy() if isinstance(values, np.ndarray) else values)
    except Exception as error:  # what a user returns may be anything
        raise ConfigError(
            f"the {name} returned a {type(values).__name__}, expected a tensor"
        ) from error
    kinds = {
        "nested": found.is_nested,
        "quantised": found.is_quantized,
        "sparse": found.layout is not torch.strided,
        "meta": found.is_meta
        and type(found) is Tensor,  # a wrapper of another type may have its numbers elsewhere
        "complex": found.is_complex(),
    }
    if wrong := [kind for kind, is_one in kinds.items() if is_one]:
        raise ConfigError(
            f"the {name} returned a {wrong[0]} tensor, expected a dense one of real numbers"
        )
    return found.detach()


def validated_selection(
    select: Select, output: Any, candidates: Int[np.ndarray, " c"], budget: int
) -> Int[np.ndarray, " s"]:
    """Validate the ids that a user's selection returned.

    Args:
        select: The selection.
        output: Its return value.
        candidates: Ids that the agent may ask.
        budget: Largest number of ids.

    Returns:
        The ids.

    Raises:
        ConfigError: The output is not a list of different candidates, or exceeds the budget.
    """
    name = display_name("selection", select)
    output = _dense_tensor(name, output).cpu()
    if output.ndim != 1:
        raise ConfigError(
            f"the {name} returned shape {tuple(output.shape)}, expected ids of shape [s]"
        )
    ids: np.ndarray = output.long().numpy()
    has_numbers = output.is_floating_point() or output.dtype == torch.bool
    is_integer = not (len(output) and has_numbers)  # an empty list has no type
    is_distinct = len(set(ids.tolist())) == len(ids)
    if not (is_integer and is_distinct and np.isin(ids, candidates).all()):
        raise ConfigError(
            f"the {name} chose {output.tolist()}, expected different ones of {candidates.tolist()}"
        )
    if len(ids) > budget:
        raise ConfigError(
            f"the {name} chose {len(ids)} peers, more than `budget` = {budget}: {ids.tolist()}"
        )
    return ids


def validated_criterion(criterion: Criterion, inputs: CriterionInput) -> Float[Tensor, "*a m"]:
    """The criterion's value for each received model, in float64; raises ConfigError where it has another shape.

    A user's gets what is judged by as copies, since others look at that after it: another criterion, the sub-level set.

    Where that is no finite number, be it NaN or an infinity of either sign, nothing is known that speaks for the model:
    it counts as plus infinity, which has no weight.
    """
    who = display_name("criterion", criterion)
    values = _dense_tensor(
        who, criterion(inputs if USER_FUNCTION.get(criterion) is None else inputs.copy())
    )
    if values.shape != inputs.received.ids.shape:
        raise ConfigError(
            f"the {who} returned shape {tuple(values.shape)}, expected {tuple(inputs.received.ids.shape)}: "
            "a value for each received model"
        )
    values = values.cpu().double()
    return values.masked_fill(~values.isfinite(), torch.inf)


def validated_weights(
    rule: Callable[..., Any], weights: Any, shape: tuple[int, ...], *, rest: float = 0.0
) -> tuple[Float[Tensor, "*a m"], Float[Tensor, "*a"]]:
    """The weights of received models, of that `shape` [*a, m], and that of the own one, which may follow them; with the
    `rest` they sum to 1.

    Raises ConfigError for weights of another shape, or that are not a convex combination (or all zero).
    """
    who, (*several, m) = display_name("rule", rule), shape
    weights = _dense_tensor(who, weights)
    if weights.shape not in (shape, (*several, m + 1)):
        which = ", which is declared `together`," if several else ""
        raise ConfigError(
            f"the {who}{which} returned weights of shape {tuple(weights.shape)}, "
            f"expected {shape} or {(*several, m + 1)}"
        )
    weights = _convex_weights(who, weights.cpu().double(), rest)
    return weights[..., :m], weights[..., m:].sum(-1)


def validated_row_weights(
    rule: Callable[..., Any], weights: Any, num_rows: int, has_previous: bool
) -> Float[Tensor, " k"]:
    """The weights of so many models as a robust rule returned them; raises ConfigError where a user's are no such.

    The last may be that of the model `before` the round, which may be negative.
    """
    if USER_FUNCTION.get(rule) is None:
        built_in: Tensor = weights
        return built_in
    who = display_name("rule", rule)
    found = _dense_tensor(who, weights).cpu().double()
    if found.shape != (num_rows,):
        raise ConfigError(
            f"the {who} returned weights of shape {tuple(found.shape)}, expected ({num_rows},)"
        )
    received = found[: num_rows - has_previous]
    rest = found[num_rows - has_previous :]
    return torch.cat([_convex_weights(who, received, float(rest.sum())), rest])


def _convex_weights(
    name: str, weights: Float[Tensor, "*a k"], rest: float = 0.0
) -> Float[Tensor, "*a k"]:
    """Weights of a convex combination, or all zero, of which those that are negative by rounding are zero; raises
    ConfigError where they are not."""
    positive = weights.clamp(min=0.0)
    total = positive.sum(-1) + rest
    good = (
        positive.isfinite().all(-1)
        & (weights > -1e-6).all(-1)
        & (((total - 1).abs() < 1e-6) | (total == 0))
    )
    if not good.all():
        wrong = weights[~good].tolist() if weights.ndim > 1 else weights.tolist()
        before = f" with {rest} for the model before the round" if rest else ""
        raise ConfigError(
            f"the {name} returned weights that are not positive with sum 1{before}: {wrong}"
        )
    return positive


def validated_mixing(
    pre_step: Callable[..., Any], matrix: Any, num_rows: int
) -> Float[Tensor, "j k"]:
    """The matrix by which a pre-step mixes so many models; raises ConfigError where not each row of a user's is an
    average."""
    if USER_FUNCTION.get(pre_step) is None:
        built_in: Tensor = matrix.double()
        return built_in
    who = display_name("pre-step", pre_step)
    p = _dense_tensor(who, matrix).cpu().double()
    if p.ndim != 2 or p.shape[1] != num_rows or (num_rows and not len(p)):
        raise ConfigError(
            f"the {who} returned shape {tuple(p.shape)}, expected a matrix of {num_rows} columns"
        )
    if num_rows and not ((p.sum(1) - 1).abs() < 1e-6).all():  # NaN is no sum either
        raise ConfigError(
            f"the {who} returned a matrix whose rows do not each sum to 1: {p.sum(1).tolist()}"
        )
    return p


def validated_reduction(
    rule: Callable[..., Any], reduce: ColumnReduction | OffsetColumnReduction
) -> ColumnReduction | OffsetColumnReduction:
    """How a rule reduces a block of columns of models, which is checked where it is computed if it is a user's."""
    return (
        reduce
        if USER_FUNCTION.get(rule) is None
        else functools.partial(_checked_columns, display_name("rule", rule), reduce)
    )


def _checked_columns(
    name: str, reduce: Callable[..., Any], x: Float[Tensor, "k b"], *first: int
) -> Float[Tensor, " b"]:
    """What a rule makes of a block of columns of models; raises ConfigError where that has another shape, or is not
    finite though the models are."""
    finite = x.isfinite().all()  # before: it may write into its block
    made = _dense_tensor(name, reduce(x, *first))
    if made.shape != x.shape[1:]:
        raise ConfigError(
            f"the {name} returned shape {tuple(made.shape)} for columns of shape {tuple(x.shape)}, expected "
            f"{tuple(x.shape[1:])}: the same columns of one model"
        )
    if finite and not made.isfinite().all():
        raise ConfigError(f"the {name} returned numbers that are not finite, of models that are")
    return made


def validated_state(rule: Callable[..., Any], output: Any) -> tuple[RuleState, Any]:
    """What a rule with memory keeps, and what it decided; raises ConfigError where it returned something else."""
    who = display_name("rule", rule)
    if not (isinstance(output, tuple) and len(output) == 2 and isinstance(output[0], dict)):
        raise ConfigError(
            f"the {who}, which declares a memory, returned a {type(output).__name__}, expected (state, weights) with a "
            "dictionary of tensors for the state"
        )
    kept, decided = output
    for name, value in kept.items():
        dense = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
        if not (isinstance(name, str) and dense):
            raise ConfigError(
                f"the {who} keeps `{name}`, a {type(value).__name__}, in its state: expected dense tensors by name"
            )
        if value.dtype not in STATE_DTYPES:
            raise ConfigError(
                f"the {who} keeps `{name}` of type {value.dtype}: expected one of {', '.join(map(str, STATE_DTYPES))}"
            )
    own = {
        name: kept[name].detach().cpu().clone(memory_format=torch.contiguous_format)
        for name in sorted(kept)
    }
    return own, decided  # copies: what a rule keeps may be a row of the pool


def validated_poison(poison: Poison, output: Any, shard: Shard) -> Shard:
    """What an attack made of a shard, of the same types; raises ConfigError where a user's made something else, of
    another shape, or of numbers that no data set may hold."""
    if USER_FUNCTION.get(poison) is None:
        return output  # type: ignore[no-any-return]
    who = display_name("attack", poison)
    if not isinstance(output, Shard):
        raise ConfigError(f"the {who} returned a {type(output).__name__}, expected a fedcb2o.Shard")
    found = []
    for name, made, old in (("samples", output.x, shard.x), ("labels", output.y, shard.y)):
        new = _dense_tensor(who, made)
        if new.shape != old.shape or new.dtype.is_floating_point != old.dtype.is_floating_point:
            raise ConfigError(
                f"the {who} returned {name} of shape {tuple(new.shape)} and type {new.dtype}, "
                f"expected {tuple(old.shape)} and {old.dtype}: it may change values only"
            )
        if not old.dtype.is_floating_point and not new.to(old).eq(new).all():
            raise ConfigError(f"the {who} returned {name} that are no numbers of type {old.dtype}")
        if not new.isfinite().all():
            raise ConfigError(f"the {who} returned {name} that are not finite")
        found.append(new.to(old))
    return Shard(*found)


def require_known_labels(poison: Poison, labels: Int[Tensor, "a n"], num_classes: int) -> None:
    """Raises ConfigError where an attack gave samples other labels than there are."""
    if labels.numel() and not (labels.min() >= 0 and labels.max() < num_classes):
        raise ConfigError(
            f"the {display_name('attack', poison)} returned labels outside 0 to {num_classes - 1}"
        )


def validated_crafted_models(
    craft: Craft, output: Any, shape: tuple[int, int]
) -> Shaped[Tensor, "..."]:
    """The models [r, d] that an attack crafted, or the one [d] for everybody; raises ConfigError for other shapes."""
    who, (receivers, dim) = display_name("attack", craft), shape
    models = _dense_tensor(who, output)
    if models.shape not in ((dim,), shape):
        wanted = f"({dim},)" + (f" or {shape}" if receivers > 1 else "")
        raise ConfigError(
            f"the {who} returned models of shape {tuple(models.shape)}, expected {wanted}"
        )
    return models


def validated_queries(craft: Craft, output: Any, dim: int) -> Float[Tensor, "m d"]:
    """The models that an attack asks the losses of; raises ConfigError for other shapes."""
    who = display_name("attack", craft)
    thetas = _dense_tensor(f"{who}, which asks the losses of models,", output)
    if thetas.ndim != 2 or thetas.shape[1] != dim:
        raise ConfigError(
            f"the {who} asks the losses of models of shape {tuple(thetas.shape)}, expected (m, {dim})"
        )
    return thetas


def apply_sample_transform(name: str, transform: SampleTransform, data: Shard) -> Shard:
    """Samples as a criterion changes them, or an attack's trigger; raises ConfigError where the shape is another, or
    what they hold is not finite. The function gets a copy."""
    x = _dense_tensor(name, transform(data.x.cpu().clone()))
    if x.shape != data.x.shape:
        raise ConfigError(
            f"the {name} changed samples of shape {tuple(data.x.shape)} into {tuple(x.shape)}: it may change values"
        )
    if not math.isfinite(float(x.sum())) and not x.isfinite().all():
        raise ConfigError(f"the {name} changed samples into numbers that are not finite")
    return Shard(x.to(data.x.device), data.y)

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
from fedcb2o.federated.contacts import Peers
from fedcb2o.federated.types import Change, Columns, ColumnsAt, Craft, Criterion, Judged, Poison, Select, State
from fedcb2o.plugins import OWN, called

# The types of what a rule may keep, by their names in a checkpoint.
KEPT = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
KEPT |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"}
KEPT |= {torch.uint8: "U8", torch.bool: "BOOL"}


def tensor_of(who: str, values: Any) -> Tensor:
    """What a user's function returned as a dense tensor of real numbers, without a gradient's history; raises
    ConfigError where it is none."""
    try:
        found = torch.as_tensor(values.copy() if isinstance(values, np.ndarray) else values)
    except Exception as error:  # what a user returns may be anything
        raise ConfigError(f"the {who} returned a {type(values).__name__}, expected a tensor") from error
    kinds = {
        "nested": found.is_nested,
        "quantised": found.is_quantized,
        "sparse": found.layout is not torch.strided,
        "meta": found.is_meta and type(found) is Tensor,  # a wrapper of another type may have its numbers elsewhere
        "complex": found.is_complex(),
    }
    if wrong := [kind for kind, is_one in kinds.items() if is_one]:
        raise ConfigError(f"the {who} returned a {wrong[0]} tensor, expected a dense one of real numbers")
    return found.detach()


def asked_of(select: Select, asked: Any, peers: Peers, k: int, budget: int) -> Int[np.ndarray, " s"]:
    """The ids that a selection chose for the agent in place k; raises ConfigError unless they are different ones of its
    peers, and no more than the budget."""
    who = called("selection", select)
    asked = tensor_of(who, asked).cpu()
    if asked.ndim != 1:
        raise ConfigError(f"the {who} returned shape {tuple(asked.shape)}, expected ids of shape [s]")
    ids: np.ndarray = asked.long().numpy()
    whole = not (len(asked) and (asked.is_floating_point() or asked.dtype == torch.bool))  # an empty list has no type
    if not (whole and len(set(ids.tolist())) == len(ids) and peers.find(np.full(len(ids), k), ids)[0].all()):
        raise ConfigError(f"the {who} chose {asked.tolist()}, expected different ones of {peers.ids(k).tolist()}")
    if len(ids) > budget:
        raise ConfigError(f"the {who} chose {len(ids)} peers, more than `budget` = {budget}: {ids.tolist()}")
    return ids


def values_of(criterion: Criterion, judged: Judged) -> Float[Tensor, "*a m"]:
    """The criterion's value for each received model, in float64; raises ConfigError where it has another shape.

    A user's gets what is judged by as copies, since others look at that after it: another criterion, the sub-level set.

    Where that is no finite number, be it NaN or an infinity of either sign, nothing is known that speaks for the model:
    it counts as plus infinity, which has no weight.
    """
    who = called("criterion", criterion)
    values = tensor_of(who, criterion(judged if OWN.of(criterion) is None else judged.copied()))
    if values.shape != judged.received.ids.shape:
        raise ConfigError(
            f"the {who} returned shape {tuple(values.shape)}, expected {tuple(judged.received.ids.shape)}: "
            "a value for each received model"
        )
    values = values.cpu().double()
    return values.masked_fill(~values.isfinite(), torch.inf)


def weights_of(
    rule: Callable[..., Any], weights: Any, shape: tuple[int, ...], *, rest: float = 0.0
) -> tuple[Float[Tensor, "*a m"], Float[Tensor, "*a"]]:
    """The weights of received models, of that `shape` [*a, m], and that of the own one, which may follow them; with the
    `rest` they sum to 1.

    Raises ConfigError for weights of another shape, or that are not a convex combination (or all zero).
    """
    who, (*several, m) = called("rule", rule), shape
    weights = tensor_of(who, weights)
    if weights.shape not in (shape, (*several, m + 1)):
        which = ", which is declared `together`," if several else ""
        raise ConfigError(
            f"the {who}{which} returned weights of shape {tuple(weights.shape)}, "
            f"expected {shape} or {(*several, m + 1)}"
        )
    weights = _averaging(who, weights.cpu().double(), rest)
    return weights[..., :m], weights[..., m:].sum(-1)


def row_weights_of(rule: Callable[..., Any], weights: Any, rows: int, before: bool) -> Float[Tensor, " k"]:
    """The weights of so many models as a robust rule returned them; raises ConfigError where a user's are no such.

    The last may be that of the model `before` the round, which may be negative.
    """
    if OWN.of(rule) is None:
        built_in: Tensor = weights
        return built_in
    who = called("rule", rule)
    found = tensor_of(who, weights).cpu().double()
    if found.shape != (rows,):
        raise ConfigError(f"the {who} returned weights of shape {tuple(found.shape)}, expected ({rows},)")
    received, rest = found[: rows - before], found[rows - before :]
    return torch.cat([_averaging(who, received, float(rest.sum())), rest])


def _averaging(who: str, weights: Float[Tensor, "*a k"], rest: float = 0.0) -> Float[Tensor, "*a k"]:
    """Weights of a convex combination, or all zero, of which those that are negative by rounding are zero; raises
    ConfigError where they are not."""
    positive = weights.clamp(min=0.0)
    total = positive.sum(-1) + rest
    good = positive.isfinite().all(-1) & (weights > -1e-6).all(-1) & (((total - 1).abs() < 1e-6) | (total == 0))
    if not good.all():
        wrong = weights[~good].tolist() if weights.ndim > 1 else weights.tolist()
        before = f" with {rest} for the model before the round" if rest else ""
        raise ConfigError(f"the {who} returned weights that are not positive with sum 1{before}: {wrong}")
    return positive


def mixing_of(pre_step: Callable[..., Any], matrix: Any, rows: int) -> Float[Tensor, "j k"]:
    """The matrix by which a pre-step mixes so many models; raises ConfigError where not each row of a user's is an
    average."""
    if OWN.of(pre_step) is None:
        built_in: Tensor = matrix.double()
        return built_in
    who = called("pre-step", pre_step)
    p = tensor_of(who, matrix).cpu().double()
    if p.ndim != 2 or p.shape[1] != rows or (rows and not len(p)):
        raise ConfigError(f"the {who} returned shape {tuple(p.shape)}, expected a matrix of {rows} columns")
    if rows and not ((p.sum(1) - 1).abs() < 1e-6).all():  # NaN is no sum either
        raise ConfigError(f"the {who} returned a matrix whose rows do not each sum to 1: {p.sum(1).tolist()}")
    return p


def columns_by(rule: Callable[..., Any], reduce: Columns | ColumnsAt) -> Columns | ColumnsAt:
    """How a rule reduces a block of columns of models, which is checked where it is computed if it is a user's."""
    return reduce if OWN.of(rule) is None else functools.partial(_columns, called("rule", rule), reduce)


def _columns(who: str, reduce: Callable[..., Any], x: Float[Tensor, "k b"], *first: int) -> Float[Tensor, " b"]:
    """What a rule makes of a block of columns of models; raises ConfigError where that has another shape, or is not
    finite though the models are."""
    finite = x.isfinite().all()  # before: it may write into its block
    made = tensor_of(who, reduce(x, *first))
    if made.shape != x.shape[1:]:
        raise ConfigError(
            f"the {who} returned shape {tuple(made.shape)} for columns of shape {tuple(x.shape)}, expected "
            f"{tuple(x.shape[1:])}: the same columns of one model"
        )
    if finite and not made.isfinite().all():
        raise ConfigError(f"the {who} returned numbers that are not finite, of models that are")
    return made


def state_of(rule: Callable[..., Any], made: Any) -> tuple[State, Any]:
    """What a rule with memory keeps, and what it decided; raises ConfigError where it returned something else."""
    who = called("rule", rule)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], dict)):
        raise ConfigError(
            f"the {who}, which declares a memory, returned a {type(made).__name__}, expected (state, weights) with a "
            "dictionary of tensors for the state"
        )
    kept, decided = made
    for name, value in kept.items():
        dense = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
        if not (isinstance(name, str) and dense):
            raise ConfigError(
                f"the {who} keeps `{name}`, a {type(value).__name__}, in its state: expected dense tensors by name"
            )
        if value.dtype not in KEPT:
            raise ConfigError(
                f"the {who} keeps `{name}` of type {value.dtype}: expected one of {', '.join(map(str, KEPT))}"
            )
    own = {name: kept[name].detach().cpu().clone(memory_format=torch.contiguous_format) for name in sorted(kept)}
    return own, decided  # copies: what a rule keeps may be a row of the pool


def poisoned_of(poison: Poison, poisoned: Any, shard: Shard) -> Shard:
    """What an attack made of a shard, of the same types; raises ConfigError where a user's made something else, of
    another shape, or of numbers that no data set may hold."""
    if OWN.of(poison) is None:
        return poisoned  # type: ignore[no-any-return]
    who = called("attack", poison)
    if not isinstance(poisoned, Shard):
        raise ConfigError(f"the {who} returned a {type(poisoned).__name__}, expected a fedcb2o.Shard")
    found = []
    for name, made, old in (("samples", poisoned.x, shard.x), ("labels", poisoned.y, shard.y)):
        new = tensor_of(who, made)
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


def check_labels(poison: Poison, labels: Int[Tensor, "a n"], num_classes: int) -> None:
    """Raises ConfigError where an attack gave samples other labels than there are."""
    if labels.numel() and not (labels.min() >= 0 and labels.max() < num_classes):
        raise ConfigError(f"the {called('attack', poison)} returned labels outside 0 to {num_classes - 1}")


def crafted_of(craft: Craft, crafted: Any, shape: tuple[int, int]) -> Shaped[Tensor, "..."]:
    """The models [r, d] that an attack crafted, or the one [d] for everybody; raises ConfigError for other shapes."""
    who, (receivers, dim) = called("attack", craft), shape
    models = tensor_of(who, crafted)
    if models.shape not in ((dim,), shape):
        wanted = f"({dim},)" + (f" or {shape}" if receivers > 1 else "")
        raise ConfigError(f"the {who} returned models of shape {tuple(models.shape)}, expected {wanted}")
    return models


def tried_of(craft: Craft, models: Any, dim: int) -> Float[Tensor, "m d"]:
    """The models that an attack asks the losses of; raises ConfigError for other shapes."""
    who = called("attack", craft)
    thetas = tensor_of(f"{who}, which asks the losses of models,", models)
    if thetas.ndim != 2 or thetas.shape[1] != dim:
        raise ConfigError(f"the {who} asks the losses of models of shape {tuple(thetas.shape)}, expected (m, {dim})")
    return thetas


def changed_by(who: str, change: Change, data: Shard) -> Shard:
    """Samples as a criterion changes them, or an attack's trigger; raises ConfigError where the shape is another, or
    what they hold is not finite. The function gets a copy."""
    x = tensor_of(who, change(data.x.cpu().clone()))
    if x.shape != data.x.shape:
        raise ConfigError(
            f"the {who} changed samples of shape {tuple(data.x.shape)} into {tuple(x.shape)}: it may change values"
        )
    if not math.isfinite(float(x.sum())) and not x.isfinite().all():
        raise ConfigError(f"the {who} changed samples into numbers that are not finite")
    return Shard(x.to(data.x.device), data.y)

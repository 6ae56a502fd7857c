"""Validation of the values that plug-ins return. Errors name the plug-in."""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from fedcb2o.data import Shard, ValueRange, using_range
from fedcb2o.data.changed_samples import changed_shard, changed_tensor, check_classes
from fedcb2o.errors import ConfigError, describe_type
from fedcb2o.federated.adversary import Craft, Poison
from fedcb2o.federated.types import (
    ColumnReduction,
    Criterion,
    CriterionInput,
    OffsetColumnReduction,
    RuleState,
    SampleTransform,
    Select,
)
from fedcb2o.plugins import USER_FUNCTION, display_name
from fedcb2o.user_values import returned_tensor

STATE_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Types of tensors in a rule's state, with their names in a checkpoint."""


Metric = Callable[[Tensor, Tensor], Any]
"""A function of a model's outputs [n, ...] and of the targets [n, ...]."""


def validated_graph(graph: Callable[..., Any], output: Any, num_agents: int) -> Any:
    """Return the graph that a function made. ConfigError for anything but one on all agents."""
    import networkx as nx  # slow to import

    if not isinstance(output, nx.Graph) or set(output.nodes) != set(range(num_agents)):
        raise ConfigError(
            f"the {display_name('graph', graph)} must be a networkx graph whose nodes are the "
            f"agents 0 to {num_agents - 1}, got {output}"
        )
    return output


def validated_selection(
    select: Select, output: Any, candidates: Int[np.ndarray, " c"], budget: int
) -> Int[np.ndarray, " s"]:
    """Validate the ids that a user's selection returned: different candidates within the budget."""
    name = display_name("selection", select)
    output = returned_tensor(name, output).cpu()
    if output.ndim != 1:
        raise ConfigError(
            f"the {name} returned shape {tuple(output.shape)}, expected ids of shape [s]"
        )
    ids: np.ndarray = output.long().numpy()
    has_numbers = output.is_floating_point() or output.dtype == torch.bool
    is_integer = not (len(output) and has_numbers)  # an empty list has no type
    # A peer named twice would count twice in the average.
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
    """Return a criterion's values in float64; infinity, no weight, if not finite."""
    name = display_name("criterion", criterion)
    is_user_function = USER_FUNCTION.get(criterion) is not None
    # A user's criterion gets a copy of its input, which others use after it.
    values = returned_tensor(name, criterion(inputs.copy() if is_user_function else inputs))
    expected = inputs.received.ids.shape
    if values.shape != expected:
        raise ConfigError(
            f"the {name} returned shape {tuple(values.shape)}, expected {tuple(expected)}: "
            "a value for each received model"
        )
    values = values.cpu().double()
    # exp(-alpha G) of NaN would spread to the weights of all models.
    return values.masked_fill(~values.isfinite(), torch.inf)


def validated_weights(
    rule: Callable[..., Any], weights: Any, shape: tuple[int, ...], *, rest: float = 0.0
) -> tuple[Float[Tensor, "*a m"], Float[Tensor, "*a"]]:
    """Return weights of received models [*a, m] and the agent's own, 0 if left out.

    With `rest`, the weight of the model before the round, they sum to 1 or 0.
    """
    name = display_name("rule", rule)
    *agents, m = shape
    weights = returned_tensor(name, weights)
    # A rule decides itself whether it averages the model of the agent, too.
    with_own = (*agents, m + 1)
    if weights.shape not in (shape, with_own):
        declared = ", which is declared `batched`," if agents else ""
        raise ConfigError(
            f"the {name}{declared} returned weights of shape {tuple(weights.shape)}, "
            f"expected {shape} or {with_own}"
        )
    weights = _convex_weights(name, weights.cpu().double(), rest)
    return weights[..., :m], weights[..., m:].sum(-1)


def validated_row_weights(
    rule: Callable[..., Any], weights: Any, num_rows: int, has_previous: bool
) -> Float[Tensor, " k"]:
    """Validate the weights of a user's robust rule; that of the model before may be negative."""
    if USER_FUNCTION.get(rule) is None:
        built_in: Tensor = weights
        return built_in
    name = display_name("rule", rule)
    values = returned_tensor(name, weights).cpu().double()
    if values.shape != (num_rows,):
        raise ConfigError(
            f"the {name} returned weights of shape {tuple(values.shape)}, expected ({num_rows},)"
        )
    # The last row is the model before the round, whose weight moves along a direction.
    num_received = num_rows - has_previous
    rest = values[num_received:]
    received = _convex_weights(name, values[:num_received], float(rest.sum()))
    return torch.cat([received, rest])


def _convex_weights(
    name: str, weights: Float[Tensor, "*a k"], rest: float = 0.0
) -> Float[Tensor, "*a k"]:
    """Validate that weights and the rest sum to 1 or 0; set negative rounding errors to 0."""
    positive = weights.clamp(min=0.0)
    total = positive.sum(-1) + rest
    # A sum of 0 means that no model is trusted: the agent keeps its own.
    is_normalised = ((total - 1).abs() < 1e-6) | (total == 0)
    is_valid = positive.isfinite().all(-1) & (weights > -1e-6).all(-1) & is_normalised
    if not is_valid.all():
        wrong = weights[~is_valid].tolist() if weights.ndim > 1 else weights.tolist()
        previous = f" with {rest} for the model before the round" if rest else ""
        raise ConfigError(
            f"the {name} returned weights that are not positive with sum 1{previous}: {wrong}"
        )
    return positive


def validated_mixing(
    pre_step: Callable[..., Any], matrix: Any, num_rows: int
) -> Float[Tensor, "j k"]:
    """Return a pre-step's matrix in float64; the rows of a user's must sum to 1."""
    if USER_FUNCTION.get(pre_step) is None:
        built_in: Tensor = matrix.double()
        return built_in
    name = display_name("pre-step", pre_step)
    p = returned_tensor(name, matrix).cpu().double()
    if p.ndim != 2 or p.shape[1] != num_rows or (num_rows and not len(p)):
        raise ConfigError(
            f"the {name} returned shape {tuple(p.shape)}, expected a matrix of {num_rows} columns"
        )
    if num_rows and not ((p.sum(1) - 1).abs() < 1e-6).all():  # False for NaN
        raise ConfigError(
            f"the {name} returned a matrix whose rows do not each sum to 1: {p.sum(1).tolist()}"
        )
    return p


def validated_reduction(
    rule: Callable[..., Any], reduce: ColumnReduction | OffsetColumnReduction
) -> ColumnReduction | OffsetColumnReduction:
    """Wrap a user's reduction so that its shape and finite numbers are validated."""
    if USER_FUNCTION.get(rule) is None:
        return reduce
    return functools.partial(_checked_columns, display_name("rule", rule), reduce)


def _checked_columns(
    name: str, reduce: Callable[..., Any], x: Float[Tensor, "k b"], *first: int
) -> Float[Tensor, " b"]:
    """Reduce some columns of models and validate the output."""
    is_finite = x.isfinite().all()  # before the reduction, which may write into x
    reduced = returned_tensor(name, reduce(x, *first))
    if reduced.shape != x.shape[1:]:
        raise ConfigError(
            f"the {name} returned shape {tuple(reduced.shape)} for columns of shape "
            f"{tuple(x.shape)}, expected {tuple(x.shape[1:])}: the same columns of one model"
        )
    # Of models that are not finite themselves, nothing else can be expected.
    if is_finite and not reduced.isfinite().all():
        raise ConfigError(f"the {name} returned numbers that are not finite, of models that are")
    return reduced


def validated_state(rule: Callable[..., Any], output: Any) -> tuple[RuleState, Any]:
    """Validate and copy the dense tensors that a stateful rule returned, with weights."""
    name = display_name("rule", rule)
    if not (isinstance(output, tuple) and len(output) == 2 and isinstance(output[0], dict)):
        raise ConfigError(
            f"the {name}, which declares a memory, returned {describe_type(output)}, expected "
            "(state, weights) with a dictionary of tensors for the state"
        )
    state, weights = output
    for key, value in state.items():
        is_dense = isinstance(value, Tensor) and value.layout is torch.strided
        if not (isinstance(key, str) and is_dense and not value.is_meta):
            raise ConfigError(
                f"the {name} keeps `{key}`, a {type(value).__name__}, in its state: "
                "expected dense tensors by name"
            )
        if value.dtype not in STATE_DTYPES:
            raise ConfigError(
                f"the {name} keeps `{key}` of type {value.dtype}: "
                f"expected one of {', '.join(map(str, STATE_DTYPES))}"
            )
    # A copy, because the tensors may be rows of the model buffer.
    copies = {
        key: state[key].detach().cpu().clone(memory_format=torch.contiguous_format)
        for key in sorted(state)
    }
    return copies, weights


def validated_poison(
    poison: Poison, outputs: Sequence[Any], shards: Sequence[Shard], num_classes: int
) -> Shard:
    """Stack poisoned data with valid labels; shapes and types of a built-in attack are trusted."""
    name = display_name("attack", poison)
    if USER_FUNCTION.get(poison) is not None:
        pairs = zip(outputs, shards, strict=True)
        outputs = [changed_shard(name, output, shard) for output, shard in pairs]
    labels = torch.stack([poisoned.y for poisoned in outputs])
    check_classes(name, labels, num_classes)
    return Shard(torch.stack([poisoned.x for poisoned in outputs]), labels)


def validated_crafted_models(
    craft: Craft, output: Any, shape: tuple[int, int]
) -> Shaped[Tensor, "..."]:
    """Validate crafted models: [d] for all receivers, or `shape`, [r, d]."""
    name = display_name("attack", craft)
    receivers, dim = shape
    models = returned_tensor(name, output)
    if models.shape not in ((dim,), shape):
        per_receiver = f" or {shape}" if receivers > 1 else ""
        raise ConfigError(
            f"the {name} returned models of shape {tuple(models.shape)}, "
            f"expected ({dim},){per_receiver}"
        )
    return models


def validated_queries(craft: Craft, output: Any, dim: int) -> Float[Tensor, "m d"]:
    """Validate the models of length `dim` whose losses an attack asks for."""
    name = display_name("attack", craft)
    thetas = returned_tensor(f"{name}, which asks the losses of models,", output)
    if thetas.ndim != 2 or thetas.shape[1] != dim:
        raise ConfigError(
            f"the {name} asks the losses of models of shape {tuple(thetas.shape)}, "
            f"expected (m, {dim})"
        )
    return thetas


def metric_value(
    metric: Metric, outputs: Float[Tensor, "n *_o"], targets: Shaped[Tensor, "n *_t"]
) -> float | None:
    """Return a metric of outputs; None where it, or one of the outputs, is not finite."""
    if not outputs.isfinite().all():
        return None
    # A function that writes into them would change the metrics after it.
    value = metric(outputs.clone(), targets.clone())
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        name = display_name("metric", metric)
        raise ConfigError(f"the {name} returned no number: {value!r:.60}") from error
    return number if math.isfinite(number) else None


def apply_sample_transform(
    name: str, transform: SampleTransform, data: Shard, value_range: ValueRange
) -> Shard:
    """Change samples by a criterion's transform or an attack's trigger; labels stay.

    The function gets a copy on the CPU. Numbers that it made of bytes are divided by 255, as bytes
    are.
    """
    original = data.x
    with using_range(value_range):
        # On the CPU, as the samples of a configuration are, so that one function serves all
        # devices.
        changed = returned_tensor(name, transform(original.cpu().clone()))
    if original.is_floating_point():
        changed = changed.to(original.dtype)
    is_rescaled = original.dtype == torch.uint8 and changed.is_floating_point()
    expected = original.float() if is_rescaled else original
    changed = changed_tensor(name, "samples", changed, expected)
    if not is_rescaled:
        return Shard(changed, data.y)

    # Bytes that became numbers up to 1 are on another scale.
    if changed.numel() and changed.max() <= 1 < original.max():
        raise ConfigError(
            f"the {name} changed bytes from 0 to {int(original.max())} into numbers up to "
            f"{float(changed.max()):g}: return bytes, or numbers from 0 to 255"
        )
    warnings.warn(
        f"the {name} changed bytes into numbers of type {changed.dtype}, which are taken on the "
        "scale of bytes, from 0 to 255",
        stacklevel=2,
    )
    return Shard(changed / 255, data.y)

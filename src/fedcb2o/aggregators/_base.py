"""Classes of aggregators made from robust rules, and functions made from these classes."""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, dataclass_transform

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.aggregators._conversion import Models, Stack, stack
from fedcb2o.docstrings import docstring_entry
from fedcb2o.errors import ConfigError
from fedcb2o.federated import aggregation
from fedcb2o.federated.aggregation import base
from fedcb2o.federated.aggregation.gram_matrix import gram
from fedcb2o.user_values import to_tensor

A = TypeVar("A", bound="Aggregator")

_CHUNK = 2**14  # the rounding of a sum grows with its length
_BLOCK = 2**17  # numbers that stay in the cache of a core

# Parameters of classes that rules do not have.
_PARAMETERS = {
    "clip_f": "Assume fewer if there are too few models, with a warning, instead of an error.",
    "rng": "Source of randomness; by default a new one in each call.",
    "in_place": "Write into the tensor or array of the caller, without new memory.",
}


# Names in a call of the models in a rule's own rows.
_OWN_MODELS = {"own": "own", "before": "previous"}

# Meanings of the other inputs of a call.
_INPUTS = {
    "own": " `own` is the agent's own model.",
    "previous": " `previous` is the agent's model before the round.",
    "progress": " `progress` is t, from 0 to 1.",
    "losses": " `losses` are on validation data, of the models and last of `own`, if there is one.",
}


@dataclass(frozen=True)
class Aggregator:
    """Base class of all aggregators and pre-aggregators: an immutable object that can be called.

    Raises:
        ConfigError: `f` is not a whole number from 0 up.
    """

    _rule: ClassVar[Callable[..., Any]]

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):
            # Numbers of NumPy are Python's; the start `m` is a model.
            if one.name != "m":
                value = plugins.to_python(getattr(self, one.name))
                object.__setattr__(self, one.name, value)
            if one.name == "f":
                base.clip_byzantine_count(aggregation.mean, getattr(self, "f"), 0)  # noqa: B009


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def aggregator(rule: Callable[..., Any], **keywords: str) -> Callable[[type[A]], type[A]]:
    """Make an immutable class of aggregators from a robust rule or a pre-aggregation step.

    The body of its docstring, and an entry of Args that the class lacks, are those of the rule.
    `keywords` has the rule's keyword for each field with ByzFL's name.
    """

    def make(kind: type[A]) -> type[A]:
        return _described(dataclass(frozen=True)(kind), rule, keywords)

    return make


def _described(kind: type[A], rule: Callable[..., Any], keywords: Mapping[str, str]) -> type[A]:
    """Set the rule of a class, and complete its docstring by that of the rule."""
    own = plugins.docstring_sections(kind)
    summary, _, body = own[""].strip().partition("\n\n")
    body = body or plugins.docstring_sections(rule)[""].strip().partition("\n\n")[2]
    texts = {**_PARAMETERS, **plugins.argument_descriptions(rule)}
    texts |= {name: texts[keyword] for name, keyword in keywords.items()}
    texts |= plugins.argument_descriptions(kind)

    entries = [docstring_entry(one.name, texts[one.name]) for one in dataclasses.fields(kind)]
    sections = {"Args": "\n".join(entries), "Example": own["Example"]}
    whole = [f"{name}:\n{text}".rstrip() for name, text in sections.items() if text]
    kind.__doc__ = "\n\n".join([summary, body, *whole])
    kind._rule = staticmethod(rule)
    return kind


def of_rule(name: str, rule: Callable[..., Any], call: str, result: str) -> Any:
    """Make a class of aggregators from the parameters and the inputs of a robust rule.

    `call` is an example without the name of the class, and `result` the value that Python prints.
    """
    parameters = plugins.parameters(rule)
    own_rows = base.signature_of(rule).own_rows
    inputs = ["models", *(_OWN_MODELS[row] for row in own_rows)]
    inputs += [name for name in extra_inputs(rule) if name != "draw"]
    fields: list[Any] = []
    for key, parameter in parameters.items():
        fields.append((key, parameter.annotation, 0 if key == "f" else parameter.default))
    if "draw" in extra_inputs(rule):
        fields.append(("rng", np.random.Generator | None, None))
    if "f" in parameters:
        fields.append(("clip_f", bool, dataclasses.field(default=False, kw_only=True)))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(one, kind) for one in ("self", *inputs)])

    def aggregate_models(self: Aggregator, *arguments: Any, **named: Any) -> Any:
        return aggregate(**signature.bind(self, *arguments, **named).arguments)

    aggregate_models.__signature__ = signature  # type: ignore[attr-defined]  # of a function
    texts = [_INPUTS[one] for one in inputs if one in _INPUTS]
    aggregate_models.__doc__ = f"Aggregate models; the result has their type.{''.join(texts)}"
    made = dataclasses.make_dataclass(
        name, fields, bases=(Aggregator,), namespace={"__call__": aggregate_models}, frozen=True
    )
    # The module of the caller, in which pickle finds the class.
    made.__module__ = sys._getframe(1).f_globals["__name__"]
    summary = plugins.docstring_sections(rule)[""].strip().partition("\n\n")[0]
    made.__doc__ = f"{summary}\n\nExample:\n    >>> {name}{call}\n    {result}\n"
    return _described(made, rule, {})


def extra_inputs(rule: Callable[..., Any]) -> tuple[str, ...]:
    """Return the inputs of a rule next to models: numbers, one per model or for all."""
    first = int(base.signature_of(rule).reads != "values")
    return plugins.positional_inputs(rule)[first:]


def function_of(name: str, aggregator: Any) -> Any:
    """Make the function of a class of aggregators.

    Its arguments are the inputs of a call and the parameters of the class.
    """
    inputs = list(inspect.signature(aggregator.__call__).parameters.values())[1:]
    settings = list(inspect.signature(aggregator).parameters.values())

    def function(*arguments: Any, **parameters: Any) -> Any:
        given = inputs_and_settings.bind(*arguments, **parameters).arguments
        called_with = [given.pop(one.name) for one in inputs]
        return aggregator(**given)(*called_with)

    inputs_and_settings = inspect.Signature([*inputs, *settings])
    function.__name__ = function.__qualname__ = name
    function.__module__ = "fedcb2o.aggregators"
    function.__doc__ = aggregator.__doc__
    function.__signature__ = inputs_and_settings  # type: ignore[attr-defined]  # of a function
    return function


def aggregate(self: Aggregator, models: Models, **inputs: Any) -> Any:
    """Aggregate a caller's models by the rule of a class, with the rule's other inputs by name.

    With `clip_f`, an `f` larger than the models admit is lowered, with a warning. The aggregate has
    the caller's type.
    """
    rule = type(self)._rule
    own = [inputs[_OWN_MODELS[row]] for row in base.signature_of(rule).own_rows]
    stacked = with_own(stack(models), own)
    extra = []
    for name in extra_inputs(rule):
        if name == "draw":
            extra.append(getattr(self, "rng", None) or np.random.default_rng())
        elif name == "progress":
            extra.append(inputs[name])
        else:
            extra.append(row_values(name, inputs[name], len(stacked.rows)))
    fields = [one.name for one in dataclasses.fields(self) if one.name not in _PARAMETERS]
    row = base.apply(
        functools.partial(rule, **{name: getattr(self, name) for name in fields}),
        stacked.rows,
        None,
        *extra,
        clip_f=getattr(self, "clip_f", False),
    )
    return stacked.restore(row)


def row_values(name: str, values: Any, m: int) -> Float[Tensor, " m"]:
    """Return one number per model. Raise ConfigError for another length."""
    tensor = to_tensor(f"`{name}` holds", values).double()
    if tensor.shape != (m,):
        raise ConfigError(f"`{name}` must hold one number per model, {m}, got {[*tensor.shape]}")
    return tensor


def with_own(stacked: Stack, own: Sequence[Any]) -> Stack:
    """Append an agent's own models as the last rows.

    They are read by the names and shapes of the others; a different one is a ConfigError.
    """
    if not own:
        return stacked
    more = [stacked.read("the agent's own model", model) for model in own]
    return dataclasses.replace(stacked, rows=torch.cat([stacked.rows, torch.stack(more)]))


def finite_gram(
    stacked: Stack,
    order: Int[Tensor, " m"] | None = None,
    *,
    last: int | None = None,
    by_distances: bool = False,
) -> tuple[Stack, Float[Tensor, "m m"]]:
    """Return models and their Gram matrix; models with numbers beyond 1e60 are scaled to 1e60.

    `order` selects and orders the rows. `last` is that of `gram`; 0 means the diagonal only. With
    `by_distances` the matrix may be about a central model. A model that is not finite is a
    ConfigError.
    """
    rows = stacked.rows
    if order is None:
        order = torch.arange(len(rows))
    squares = None
    if last == 0:
        squares = torch.tensor(_squared_norms(rows), dtype=torch.float64)[order]
    if squares is not None and squares.isfinite().all():
        g = torch.full((len(order),) * 2, torch.nan, dtype=torch.float64)
        g = g.diagonal_scatter(squares)
    else:
        g = gram(rows, order, last=last)
        base.require_finite(rows, order[~g.diagonal().isfinite()])
    if base.overflows(g):
        stacked = dataclasses.replace(stacked, rows=base.bounded(rows))
        g = gram(stacked.rows, order, last=last)
    return stacked, about_centre(stacked, order, g, last) if by_distances else g


def finite_squares(stacked: Stack, copy: Float[Tensor, "m d"] | None) -> tuple[Stack, list[float]]:
    """Return models and their squared norms, scaled and checked as by `finite_gram`.

    The models are written to `copy`, or scaled in place without one.
    """
    rows = stacked.rows if copy is None else copy
    squares = _squared_norms(stacked.rows, copy)
    # NaN fails the comparison.
    if not sum(squares) <= base.LARGEST**2:
        scaled, g = finite_gram(stacked, last=0)
        squares = g.diagonal().tolist()
        rows.copy_(scaled.rows)
    return dataclasses.replace(stacked, rows=rows), squares


def about_centre(
    stacked: Stack, order: Int[Tensor, " m"], g: Float[Tensor, "m m"], last: int | None = None
) -> Float[Tensor, "m m"]:
    """Return a Gram matrix, computed again about a central model if rounding spoils it."""
    central = base.far_centre(g)
    if central is None:
        return g
    return gram(base.about(stacked.rows[order], central), last=last)


def _squared_norms(
    rows: Float[Tensor, "p d"], copy: Float[Tensor, "p d"] | None = None
) -> list[float]:
    """Compute squared norms in one pass, by chunks, so that rounding stays small.

    With `copy` the rows are copied there in the same pass.
    """
    if rows.device.type != "cpu":
        if copy is not None:
            copy.copy_(rows)
        return torch.linalg.vecdot(rows, rows).double().tolist()  # type: ignore[no-any-return]

    m, d = rows.shape
    count = d // _CHUNK if d >= 2 * _CHUNK else 0
    width = count * _CHUNK
    sums = np.empty((m, count + 1))
    # NumPy's products are the faster ones. A block stays in the cache after its copy.
    x, to = rows.numpy(), None if copy is None else copy.numpy()
    step = max(1, _BLOCK // max(1, d))
    # The caller looks for models that are huge or not finite.
    with np.errstate(over="ignore", invalid="ignore"):
        for a in range(0, m, step):
            block = x[a : a + step]
            if to is not None:
                to[a : a + step] = block
                block = to[a : a + step]
            if count:
                chunks = block[:, :width].reshape(len(block), count, _CHUNK)
                sums[a : a + step, :count] = np.vecdot(chunks, chunks)
                block = block[:, width:]
            sums[a : a + step, count] = np.vecdot(block, block)
    squares: list[float] = (torch.from_numpy(sums).sum(1) if count else sums[:, 0]).tolist()
    return squares


def with_origin(g: Float[Tensor, "m m"]) -> Float[Tensor, "k k"]:
    """Append a model of zeros to a Gram matrix."""
    return torch.nn.functional.pad(g, (0, 1, 0, 1))


def fit_f(rule: Callable[..., Any], f: int, m: int, *, clip_f: bool) -> int:
    """Return the number of attackers to assume among m models.

    A number too large for `rule` is lowered with a warning if `clip_f`, and a ConfigError
    otherwise.
    """
    bound: Any = base.fit_byzantine_count(functools.partial(rule, f=f), m, clip_f=clip_f)
    return int(bound.keywords["f"])

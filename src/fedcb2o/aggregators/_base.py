"""Base class of aggregators, and functions made from them."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Concatenate, ParamSpec, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedcb2o.aggregators._conversion import Models, Stack, stack
from fedcb2o.errors import ConfigError
from fedcb2o.federated import aggregation
from fedcb2o.federated.aggregation import base
from fedcb2o.federated.aggregation.gram_matrix import gram

P = ParamSpec("P")

_CHUNK = 4096  # the rounding of a sum grows with its length


@dataclass(frozen=True)
class Aggregator:
    """Base class of all aggregators and pre-aggregators: an immutable object that can be called.

    Raises:
        ConfigError: `f` is not a whole number from 0 up.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name == "f":
                base.clip_byzantine_count(aggregation.mean, getattr(self, "f"), 0)  # noqa: B009


@overload
def function_of(
    name: str,
    aggregator: Callable[P, Callable[[Models], Any]],
) -> Callable[Concatenate[Models, P], Any]: ...
@overload
def function_of(
    name: str,
    aggregator: Callable[P, Callable[[Models, Any], Any]],
) -> Callable[Concatenate[Models, Any, P], Any]: ...
@overload
def function_of(
    name: str,
    aggregator: Callable[P, Callable[[Models, Any, Any], Any]],
) -> Callable[Concatenate[Models, Any, Any, P], Any]: ...
@overload
def function_of(
    name: str,
    aggregator: Callable[P, Callable[[Models, Any, Any, Any], Any]],
) -> Callable[Concatenate[Models, Any, Any, Any, P], Any]: ...
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


def aggregate(
    rule: Callable[..., Any],
    models: Models,
    *extra: Any,
    own: tuple[Any, ...] = (),
    clip_f: bool = False,
    **parameters: Any,
) -> Any:
    """Aggregate a caller's models by a robust rule.

    `own` are models of the rule's own rows, such as the agent's own model. With `clip_f`, an `f`
    larger than the models admit is lowered, with a warning. The aggregate has the caller's type.
    """
    stacked = with_own(stack(models), own)
    bound = functools.partial(rule, **parameters)
    return stacked.restore(base.apply(bound, stacked.rows, None, *extra, clip_f=clip_f))


def with_own(stacked: Stack, own: tuple[Any, ...]) -> Stack:
    """Append an agent's own models as the last rows.

    A model of another length is a ConfigError.
    """
    if not own:
        return stacked
    more = [_row(model) for model in own]
    for row in more:
        if row.shape != stacked.rows.shape[1:]:
            raise ConfigError(
                f"the agent's own model has {row.numel()} numbers, and the others have "
                f"{stacked.rows.shape[1]}"
            )
    rows = torch.cat([stacked.rows, torch.stack(more).to(stacked.rows)])
    return Stack(rows, stacked.restore, stacked.is_list)


def _row(model: Any) -> Float[Tensor, " d"]:
    row: Tensor = stack([model]).rows[0]
    return row


def finite_gram(
    rows: Float[Tensor, "p d"], order: Int[Tensor, " m"] | None = None, *, last: int | None = None
) -> Float[Tensor, "m m"]:
    """Compute the Gram matrix of models that must be finite.

    `order` selects and orders the rows. `last` is that of `gram`; 0 means the diagonal only. A
    model that is not finite is a ConfigError.
    """
    if order is None:
        order = torch.arange(len(rows))
    squares = _squared_norms(rows)[order] if last == 0 else None
    if squares is not None and squares.isfinite().all():
        return torch.full((len(order),) * 2, torch.nan, dtype=torch.float64).diagonal_scatter(
            squares
        )
    g = gram(rows, order, last=last)
    base.require_finite(rows, order[~g.diagonal().isfinite()])
    return g


def _squared_norms(rows: Float[Tensor, "p d"]) -> Float[Tensor, " p"]:
    """Compute squared norms in one pass, by chunks, so that rounding stays small."""
    num_chunks = rows.shape[1] // _CHUNK
    chunks = rows[:, : num_chunks * _CHUNK].reshape(len(rows), num_chunks, _CHUNK)
    rest = torch.linalg.vector_norm(rows[:, num_chunks * _CHUNK :], dim=1, keepdim=True)
    parts = torch.cat([torch.linalg.vector_norm(chunks, dim=2), rest], 1)
    return parts.cpu().double().square().sum(1)


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

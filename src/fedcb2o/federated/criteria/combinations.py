"""combinations."""

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Float
from pydantic import AfterValidator
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.errors import ConfigError
from fedcb2o.federated.plugin_outputs import values_of
from fedcb2o.federated.types import TOGETHER, Criterion, Judged


@dataclass(frozen=True)
class Part:
    """A criterion in a combination, and the factor on its values."""

    criterion: Criterion
    scale: float = 1.0


def _part(part: Any) -> Part:
    """The part that a name, a function or a table {name = ..., scale = ..., parameter = ...} means."""
    if isinstance(part, Part):
        return part
    table = dict(part) if isinstance(part, Mapping) else {"name": part}
    scale = table.pop("scale", 1.0)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not scale > 0:
        raise ConfigError(f"the `scale` of a criterion must be a number above 0, got {scale!r}")
    return Part(plugins.named("criterion", table, sys.modules[__package__]), float(scale))


def _parts(of: Sequence[Any]) -> tuple[Part, ...]:
    if not of:
        raise ConfigError('a combination needs criteria: of = ["class_loss_gap", "trigger_sensitivity"]')
    return tuple(_part(part) for part in of)


Parts = Annotated[Sequence[Any], AfterValidator(_parts)]
"""Criteria as a configuration has them, read and checked before a run."""


def judges_together(criterion: Criterion) -> bool:
    """Whether a criterion takes several agents at once: it declares so or, of a combination, all of its parts do."""
    if isinstance(criterion, functools.partial) and criterion.func in (largest, weighted_sum):
        return all(judges_together(part.criterion) for part in _parts(criterion.keywords["of"]))
    return bool(TOGETHER.of(criterion))


def largest(judged: Judged, *, of: Parts) -> Float[Tensor, "*a m"]:
    """The largest of several criteria, each times its `scale` (1): what one of them distrusts is not trusted.

    The own model should have the same value in all, as it has 0 in those that are relative to it.
    """
    return torch.stack(_values(judged, of)).amax(0)


def weighted_sum(judged: Judged, *, of: Parts) -> Float[Tensor, "*a m"]:
    """The sum of several criteria, each times its `scale` (1)."""
    return functools.reduce(torch.add, _values(judged, of))  # one after the other, for any number of agents


def _values(judged: Judged, of: Sequence[Any]) -> list[Float[Tensor, "*a m"]]:
    return [part.scale * values_of(part.criterion, judged) for part in _parts(of)]

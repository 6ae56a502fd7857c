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
from fedcb2o.federated.plugin_outputs import validated_criterion
from fedcb2o.federated.types import BATCHED, Criterion, CriterionInput


@dataclass(frozen=True)
class ScaledCriterion:
    """A criterion in a combination, and the factor on its values."""

    criterion: Criterion
    scale: float = 1.0


def _parse_criterion(part: Any) -> ScaledCriterion:
    """The part that a name, a function or a table {name = ..., scale = ..., parameter = ...} means."""
    if isinstance(part, ScaledCriterion):
        return part
    table = dict(part) if isinstance(part, Mapping) else {"name": part}
    scale = table.pop("scale", 1.0)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not scale > 0:
        raise ConfigError(f"the `scale` of a criterion must be a number above 0, got {scale!r}")
    return ScaledCriterion(
        plugins.resolve_and_bind("criterion", table, sys.modules[__package__]), float(scale)
    )


def _parse_criteria(of: Sequence[Any]) -> tuple[ScaledCriterion, ...]:
    if not of:
        raise ConfigError(
            'a combination needs criteria: of = ["class_loss_gap", "trigger_sensitivity"]'
        )
    return tuple(_parse_criterion(part) for part in of)


Criteria = Annotated[Sequence[Any], AfterValidator(_parse_criteria)]
"""Criteria as a configuration has them, read and checked before a run."""


def is_batched(criterion: Criterion) -> bool:
    """Whether a criterion takes several agents at once: it declares so or, of a combination, all of its parts do."""
    if isinstance(criterion, functools.partial) and criterion.func in (largest, weighted_sum):
        return all(is_batched(part.criterion) for part in _parse_criteria(criterion.keywords["of"]))
    return bool(BATCHED.get(criterion))


def largest(inputs: CriterionInput, *, of: Criteria) -> Float[Tensor, "*a m"]:
    """The largest of several criteria, each times its `scale` (1): what one of them distrusts is not trusted.

    The own model should have the same value in all, as it has 0 in those that are relative to it.
    """
    return torch.stack(_scaled_values(inputs, of)).amax(0)


def weighted_sum(inputs: CriterionInput, *, of: Criteria) -> Float[Tensor, "*a m"]:
    """The sum of several criteria, each times its `scale` (1)."""
    return functools.reduce(
        torch.add, _scaled_values(inputs, of)
    )  # one after the other, for any number of agents


def _scaled_values(inputs: CriterionInput, of: Sequence[Any]) -> list[Float[Tensor, "*a m"]]:
    return [
        part.scale * validated_criterion(part.criterion, inputs) for part in _parse_criteria(of)
    ]

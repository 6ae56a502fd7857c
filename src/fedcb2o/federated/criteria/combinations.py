"""Combinations of criteria: the largest value, and the weighted sum."""

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
class _ScaledCriterion:
    """A criterion in a combination, and the factor of its values."""

    criterion: Criterion
    scale: float = 1.0


def _parse_criterion(choice: Any) -> _ScaledCriterion:
    """Resolve a name, a function or a table with `name` and `scale`."""
    if isinstance(choice, _ScaledCriterion):
        return choice
    table = dict(choice) if isinstance(choice, Mapping) else {"name": choice}
    scale = table.pop("scale", 1.0)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not scale > 0:
        raise ConfigError(f"the `scale` of a criterion must be a number above 0, got {scale!r}")
    # The package imports this module, which therefore cannot import it.
    namespace = sys.modules["fedcb2o.federated.criteria"]
    criterion = plugins.resolve_and_bind("criterion", table, namespace)
    return _ScaledCriterion(criterion, float(scale))


def _parse_criteria(of: Sequence[Any]) -> tuple[_ScaledCriterion, ...]:
    if not of:
        raise ConfigError(
            'a combination needs criteria: of = ["class_loss_gap", "trigger_sensitivity"]'
        )
    return tuple(_parse_criterion(choice) for choice in of)


Criteria = Annotated[Sequence[Any], AfterValidator(_parse_criteria)]
"""Criteria as in a configuration, parsed and checked before a run."""


def is_batched(criterion: Criterion) -> bool:
    """Test if a criterion takes several agents: it declares it, or all its parts do."""
    if isinstance(criterion, functools.partial) and criterion.func in (largest, weighted_sum):
        parts = _parse_criteria(criterion.keywords["of"])
        return all(is_batched(part.criterion) for part in parts)
    return bool(BATCHED.get(criterion))


def largest(inputs: CriterionInput, *, of: Criteria) -> Float[Tensor, "*a m"]:
    """Return the largest value of several criteria.

    Each criterion can reject a model. The agent's own model should have the same value in all
    criteria. It is 0 in those that are relative to the agent's own model.

    Args:
        inputs: View of one or several agents.
        of: Criteria; a table may have a `scale` (default 1), a factor of the values.

    Returns:
        Values, shape [*a, m].
    """
    return torch.stack(_scaled_values(inputs, of)).amax(0)


def weighted_sum(inputs: CriterionInput, *, of: Criteria) -> Float[Tensor, "*a m"]:
    """Return the sum of several criteria.

    Args:
        inputs: View of one or several agents.
        of: Criteria; a table may have a `scale` (default 1), a factor of the values.

    Returns:
        Values, shape [*a, m].
    """
    # One addition after the other, so that the bits do not depend on the number of agents.
    return functools.reduce(torch.add, _scaled_values(inputs, of))


def _scaled_values(inputs: CriterionInput, of: Sequence[Any]) -> list[Float[Tensor, "*a m"]]:
    return [
        part.scale * validated_criterion(part.criterion, inputs) for part in _parse_criteria(of)
    ]

"""A guard against user functions that write into models which other agents read."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from fedcb2o.errors import ConfigError
from fedcb2o.federated import AgentGroup, Indices
from fedcb2o.nn.parameters import row_checksums

AGGREGATION_KINDS = ("criterion", "rule", "pre-step", "algorithm", "model")
"""Kinds of user functions that receive models in LocalAggregation."""


@contextlib.contextmanager
def forbid_writes(
    group: AgentGroup,
    user_functions: Mapping[str, Sequence[str]],
    *kinds: str,
    crafted: Indices | None = None,
) -> Iterator[None]:
    """Forbid user functions to write into models, except those that attackers craft.

    Copies would take as much memory as all models. The guard compares a checksum of each row before
    and after, a pass at the speed of memory that no way of writing escapes.

    Args:
        group: The agents.
        user_functions: Names of user functions, by kind.
        kinds: Kinds of the functions that are called inside.
        crafted: Positions of the attackers whose crafted models may change.

    Yields:
        None.

    Raises:
        ConfigError: A function wrote into other models.
    """
    guarded = [f"{kind} `{name}`" for kind in kinds for name in user_functions.get(kind, ())]
    if not guarded:
        yield
        return

    is_watched = np.ones(len(group.models), dtype=bool)
    attackers = [] if crafted is None else crafted.tolist()
    for k in attackers:
        is_watched[group.layout.crafted_rows(k)] = False
    before = row_checksums(group.models)
    yield
    changed = row_checksums(group.models) != before
    if changed[torch.from_numpy(is_watched)].any():
        raise ConfigError(
            f"the {' or the '.join(guarded)} wrote into models that all agents share: "
            "let it write into copies, made by `.clone()`"
        )

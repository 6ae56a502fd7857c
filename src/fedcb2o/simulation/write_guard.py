"""Users' functions are shown models that others read too, and may not write into them."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from fedcb2o.errors import ConfigError
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.ragged import Indices
from fedcb2o.nn.parameters import row_checksums

AGGREGATION_KINDS = (
    "criterion",
    "rule",
    "pre-step",
    "algorithm",
    "model",
)  # the kinds of functions that agents judge models by


@contextlib.contextmanager
def forbid_writes(
    block: AgentGroup,
    user_functions: Mapping[str, Sequence[str]],
    *kinds: str,
    crafted: Indices | None = None,
) -> Iterator[None]:
    """Raises ConfigError where users' functions of some kinds, which are asked inside, write into models other than
    those that the agents in places `crafted` craft. `own` names these functions, by kind.

    Copies would take as much memory as all models. So what the bits of each add up to is looked at before and
    after: a pass at the speed of memory, which no way of writing escapes.
    """
    if not (
        asked := [f"{kind} `{name}`" for kind in kinds for name in user_functions.get(kind, ())]
    ):
        yield
        return
    watched = np.ones(len(block.models), dtype=bool)
    for k in [] if crafted is None else crafted.tolist():
        watched[block.layout.crafted_rows(k)] = False
    before = row_checksums(block.models)
    yield
    if (row_checksums(block.models) != before)[torch.from_numpy(watched)].any():
        raise ConfigError(
            f"the {' or the '.join(asked)} wrote into models that it was shown, which all agents share: let it write "
            "into copies, made by `.clone()`"
        )

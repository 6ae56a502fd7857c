"""Real peers: one process per organisation, over TLS and without mutual trust.

The rounds are those of every engine (alg:localAggregation), answered by a network with hostile
members. The package needs the extra: pip install 'fedcb2o[peer]'.
"""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fedcb2o.errors import ConfigError

if TYPE_CHECKING:
    from fedcb2o.peer.membership._agreement import make_federation
    from fedcb2o.peer.membership.federation import (
        Federation,
        amend_federation,
        read_federation,
        sign_federation,
        write_federation,
    )
    from fedcb2o.peer.membership.identity import Identity, Member
    from fedcb2o.peer.node.agent import load_model
    from fedcb2o.peer.node.node import Node

__all__ = [
    "Federation",
    "Identity",
    "Member",
    "Node",
    "amend_federation",
    "load_model",
    "make_federation",
    "read_federation",
    "sign_federation",
    "write_federation",
]

_HOMES = {
    "membership._agreement": ("make_federation",),
    "membership.federation": (
        "Federation",
        "amend_federation",
        "read_federation",
        "sign_federation",
        "write_federation",
    ),
    "membership.identity": ("Identity", "Member"),
    "node.agent": ("load_model",),
    "node.node": ("Node",),
}

for _module in ("cryptography", "h11", "urllib3", "zstandard"):
    if find_spec(_module) is None:
        raise ConfigError(
            f"real peers need the extra, of which {_module} is missing: pip install 'fedcb2o[peer]'"
        )


def __getattr__(name: str) -> object:  # lazy: a relay starts without PyTorch
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"fedcb2o.peer.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]

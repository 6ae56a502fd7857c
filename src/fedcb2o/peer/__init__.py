"""Real peers: one agent a process, each of another organisation, over TLS and without mutual trust.

The round is that of every engine (alg:localAggregation); here it is answered by a network in which some lie. It needs
the extra: pip install 'fedcb2o[peer]'.
"""

import importlib
from typing import TYPE_CHECKING

from fedcb2o.peer import extra

if TYPE_CHECKING:
    from fedcb2o.peer.agent import load_model
    from fedcb2o.peer.federation import Federation
    from fedcb2o.peer.identity import Identity, Member
    from fedcb2o.peer.node import Node

__all__ = ["Federation", "Identity", "Member", "Node", "load_model"]

_HOMES = {
    "agent": ("load_model",),
    "federation": ("Federation",),
    "identity": ("Identity", "Member"),
    "node": ("Node",),
}

extra.need()


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"fedcb2o.peer.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]

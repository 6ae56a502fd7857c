"""Membership of a federation: identities, certificates, and the federation file."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedcb2o.peer.membership._agreement import make_federation
    from fedcb2o.peer.membership.federation import (
        Federation,
        amend_federation,
        read_federation,
        sign_federation,
        write_federation,
    )
    from fedcb2o.peer.membership.federation_schema import Limits
    from fedcb2o.peer.membership.identity import Identity, Member

__all__ = [
    "Federation",
    "Identity",
    "Limits",
    "Member",
    "amend_federation",
    "make_federation",
    "read_federation",
    "sign_federation",
    "write_federation",
]

_MODULES = {
    "Identity": "identity",
    "Limits": "federation_schema",
    "Member": "identity",
    "make_federation": "_agreement",  # the only one that needs PyTorch
}


def __getattr__(name: str) -> object:
    if name in __all__:
        module = _MODULES.get(name, "federation")
        return getattr(importlib.import_module(f"fedcb2o.peer.membership.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

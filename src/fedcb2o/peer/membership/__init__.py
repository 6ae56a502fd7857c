"""Membership of a federation: identities, certificates, and the federation file."""

from fedcb2o.peer.membership.federation import (
    Federation,
    amend_federation,
    make_federation,
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

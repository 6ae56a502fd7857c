"""Membership of a federation: identities, certificates, and the file that all members agree on."""

from fedcb2o.peer.membership.federation import Federation, amended, make, read, sign, write
from fedcb2o.peer.membership.federation_schema import Limits
from fedcb2o.peer.membership.identity import Identity, Member

__all__ = ["Federation", "Identity", "Limits", "Member", "amended", "make", "read", "sign", "write"]

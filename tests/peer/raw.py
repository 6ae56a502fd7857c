"""Plain Zenoh sessions with a member's certificate, without the rules of this library."""

import base64
import json
from collections.abc import Iterable
from typing import Any

import zenoh

from fedcb2o.peer.membership import Federation, Identity


def key(agent: int) -> str:
    return f"fedcb2o/agents/{agent}"


def session(identity: Identity, roots: Iterable[str], **settings: Any) -> zenoh.Session:
    """Open a session; `__` in a setting's name is a slash."""
    config = zenoh.Config()
    common = {
        "mode": "peer",
        "listen/endpoints": [],
        "scouting/multicast/enabled": False,
        "scouting/gossip/enabled": False,
        "open/return_conditions": {"connect_scouted": False, "declares": False},
        "transport/shared_memory/enabled": False,
        "transport/unicast/qos/enabled": False,
        "transport/link/protocols": ["tls"],
        "transport/link/rx/max_message_size": 2**30,
        "transport/unicast/open_timeout": 2000,
        "connect/retry": {
            "period_init_ms": 100,
            "period_max_ms": 1000,
            "period_increase_factor": 2,
        },
        "transport/link/tls": {
            "root_ca_certificate_base64": base64.b64encode("".join(roots).encode()).decode(),
            "enable_mtls": True,
            "verify_name_on_connect": True,
            "close_link_on_expiration": True,
            "listen_certificate": str(identity.tls_certificate),
            "listen_private_key": str(identity.tls_key),
            "connect_certificate": str(identity.tls_certificate),
            "connect_private_key": str(identity.tls_key),
        },
    }
    changes = {name.replace("__", "/"): value for name, value in settings.items()}
    for name, value in {**common, **changes}.items():
        config.insert_json5(name, json.dumps(value))
    return zenoh.open(config)


def member(identity: Identity, federation: Federation, **settings: Any) -> zenoh.Session:
    """Open a session that trusts all members."""
    return session(identity, [other.root for other in federation.members.values()], **settings)


def listening(identity: Identity, federation: Federation) -> zenoh.Session:
    """Open a session at a member's endpoint."""
    return member(identity, federation, listen__endpoints=[f"tls/{identity.member.endpoint}"])


def dialling(identity: Identity, federation: Federation, target: int) -> zenoh.Session:
    """Open a session with a link to one agent."""
    target_endpoint = f"tls/{federation.members[target].endpoint}"
    return member(identity, federation, connect__endpoints=[target_endpoint])

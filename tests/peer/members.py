"""Organisations on loopback: identities in folders of their own, and a federation of them."""

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.tiny import tiny

from fedcb2o.data import digits
from fedcb2o.peer.membership import Federation, Identity, federation


def free_ports(n: int) -> list[int]:
    """So many ports of 127.0.0.1 that nobody listened on just now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def identities(folder: Path, n: int, **options: Any) -> list[Identity]:
    """n organisations, org-0 to org-(n-1), each with its identity in a folder of its name."""
    made = []
    for j, port in enumerate(free_ports(n)):
        name = f"org-{j}"
        made.append(
            Identity.make(folder / name, name=name, endpoint=f"127.0.0.1:{port}", **options)
        )
    return made


def experiment(n: int, **changes: Any) -> dict[str, Any]:
    """The tiny experiment of n agents in one cluster, the last of them malicious."""
    agents = {
        "num_clusters": 1,
        "benign": n - 1,
        "malicious": 1,
        "budget": min(3, n - 1),
        **changes.pop("agents", {}),
    }
    return tiny(agents=agents, **changes)


def federated(
    who: Sequence[Identity],
    *,
    changes: dict[str, Any] | None = None,
    path: Path | None = None,
    **options: Any,
) -> Federation:
    """Return a federation of the tiny digits experiment, with `changes`, written to `path`."""
    members = [identity.member for identity in who]
    made = federation.make_federation(
        experiment(len(who), **(changes or {})), members, dataset=digits(), **options
    )
    if path is not None:
        federation.write_federation(made, path)
    return made

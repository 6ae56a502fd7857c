"""Organisations on loopback: one folder with an identity each, and their federation."""

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.tiny import tiny

from fedcb2o.data import Dataset, Shard, digits
from fedcb2o.peer import Federation, Identity, make_federation
from fedcb2o.peer.membership import federation


def free_ports(n: int) -> list[int]:
    """Return `n` ports of 127.0.0.1 without a listener."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


def identities(folder: Path, n: int, **options: Any) -> list[Identity]:
    """Create the identities org-0 to org-(n-1), each in a folder of its name."""
    organisations = []
    for j, port in enumerate(free_ports(n)):
        name = f"org-{j}"
        organisations.append(
            Identity.make(folder / name, name=name, endpoint=f"127.0.0.1:{port}", **options)
        )
    return organisations


def forget_signed_versions(organisations: Sequence[Identity]) -> None:
    """Remove the journals of signed versions, as in copies of the keys."""
    for identity in organisations:
        (identity.folder / "signed-versions.toml").unlink(missing_ok=True)


def experiment(n: int, **changes: Any) -> dict[str, Any]:
    """Return the tiny experiment with n agents in one cluster; the last one is malicious."""
    agents = {
        "num_clusters": 1,
        "benign": n - 1,
        "malicious": 1,
        "budget": min(3, n - 1),
        **changes.pop("agents", {}),
    }
    return tiny(agents=agents, **changes)


def federated(
    organisations: Sequence[Identity],
    *,
    changes: dict[str, Any] | None = None,
    path: Path | None = None,
    **options: Any,
) -> Federation:
    """Return a federation of the tiny digits experiment, with `changes`, written to `path`."""
    members = [identity.member for identity in organisations]
    result = make_federation(
        experiment(len(organisations), **(changes or {})), members, dataset=digits(), **options
    )
    if path is not None:
        federation.write_federation(result, path)
    return result


def share(j):
    """Return a third of the digits, the data of organisation j."""
    whole = digits()
    return Dataset(Shard(whole.pool.x[j::3], whole.pool.y[j::3]), whole.test, whole.class_names)


def own_criterion(losses, local, *, by: float = 1.0):
    """Criterion of a user."""
    return losses.mean * by

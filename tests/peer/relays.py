"""Relays and members behind them, on loopback.

Tests get the inner classes of relays from this module only.
"""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from tests.peer import members
from tests.peer.members import free_ports
from tests.peer.nodes import FORKED
from tests.peer.waiting import wait_for

from fedcb2o.peer import (
    Federation,
    Identity,
    amend_federation,
    read_federation,
    sign_federation,
    write_federation,
)
from fedcb2o.peer.wire import relayed as relayed_module
from fedcb2o.peer.wire.folder_mailbox import FolderMailbox
from fedcb2o.peer.wire.mailbox import FormerMemberError, RelayMailbox
from fedcb2o.peer.wire.relay import Relay
from fedcb2o.peer.wire.relayed import Mailbox, Relayed
from fedcb2o.peer.wire.sealing import CARD_BYTES, SealedKind, Session

__all__ = [
    "CARD_BYTES",
    "FolderMailbox",
    "FormerMemberError",
    "RelayMailbox",
    "RelayProcess",
    "Relayed",
    "SealedKind",
    "Session",
    "behind_nat",
    "next_version",
    "relay_identity",
    "relayed",
]  # fmt: skip


def behind_nat(folder: Path, count: int, listening: int = 0) -> list[Identity]:
    """Return organisations: the first ones listen, the others have no reachable endpoint."""
    orgs = members.identities(folder, listening)
    for j in range(listening, count):
        name = f"org-{j}"
        orgs.append(Identity.make(folder / name, name=name, endpoint=f"{name}.invalid:1"))
    return orgs


def next_version(path: Path, signers: list[Identity], **changes: Any) -> Federation:
    """Replace the federation in a file by its next version, signed, and return it."""
    members.forget_signed_versions(signers)  # tests share them
    write_federation(amend_federation(read_federation(path), **changes), path)
    for signer in signers:
        sign_federation(path, signer)
    return read_federation(path)


def serve_relay(federation: Path, keys: Path, store: Path, ready: Path) -> None:
    """Run a relay in its own process."""
    with Relay(read_federation(federation), Identity.read(keys), folder=store) as relay:
        ready.touch()
        relay.run(threading.Event())


class RelayProcess:
    """Process of a relay, which a test may kill and start again."""

    def __init__(self, federation: Path, keys: Identity, store: Path) -> None:
        self.location = keys.folder / "relay.member.toml"
        self.ready = keys.folder / "ready"
        self.work = (federation, keys.folder, store, self.ready)
        self.start()

    def start(self) -> None:
        self.ready.unlink(missing_ok=True)
        self.process = FORKED.Process(target=serve_relay, args=self.work, daemon=True)
        self.process.start()
        wait_for(self.ready.exists)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def relay_identity(folder: Path) -> Identity:
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    return Identity.make(folder / "relay-keys", name="relay", endpoint=endpoint)


def relayed(
    kind: str,
    organisations: Sequence[Identity],
    federation: Federation,
    folder: Path,
    stack: ExitStack,
) -> list[Relayed]:
    """Return one transport per organisation, through a folder or a relay."""
    if kind == "folder":
        boxes = folder / "mailbox"
        boxes.mkdir()
        names = [member.name for member in federation.members.values()]
        mailboxes: list[Mailbox] = [
            FolderMailbox(boxes, names, owner=one.member.name, poll_seconds=0.002)
            for one in organisations
        ]
    else:
        identity = relay_identity(folder)
        stack.enter_context(Relay(federation, identity, folder=folder / "relay"))
        mailboxes = [RelayMailbox(identity.member, one) for one in organisations]
    stack.enter_context(mock.patch.object(relayed_module, "_CARD_SECONDS", 0.03))
    transports = [
        stack.enter_context(Relayed(federation, identity, mailbox))
        for identity, mailbox in zip(organisations, mailboxes, strict=True)
    ]
    for one in transports:
        one.serve(lambda request, reply: reply(None))
    return transports

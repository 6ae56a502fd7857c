"""Relays and members behind them, on loopback."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from tests.peer.members import free_ports

from fedcb2o.peer.membership import Federation, Identity
from fedcb2o.peer.wire import Relay, _relayed
from fedcb2o.peer.wire._folder_mailbox import FolderMailbox
from fedcb2o.peer.wire._mailbox import Mailbox, RelayMailbox
from fedcb2o.peer.wire._relayed import Relayed


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
    stack.enter_context(mock.patch.object(_relayed, "_CARD_SECONDS", 0.03))
    transports = [
        stack.enter_context(Relayed(federation, identity, mailbox))
        for identity, mailbox in zip(organisations, mailboxes, strict=True)
    ]
    for one in transports:
        one.serve(lambda request, reply: reply(b""))
    return transports

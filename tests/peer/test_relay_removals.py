"""Removed and replaced members behind a relay."""

import logging
import os
import time
from contextlib import ExitStack

import pytest
import torch
from tests.peer import members, relays
from tests.peer.relays import FormerMemberError, Relayed, RelayMailbox, next_version
from tests.peer.waiting import wait_for

from fedcb2o.peer import Identity, amend_federation, sign_federation, write_federation
from fedcb2o.peer.node import preflight
from fedcb2o.peer.wire import relay as relay_module
from fedcb2o.peer.wire import relayed as relayed_module
from fedcb2o.peer.wire.client import PeerClient
from fedcb2o.peer.wire.compression import RawCodec
from fedcb2o.peer.wire.equivocation import Ledger
from fedcb2o.peer.wire.relay import Relay
from fedcb2o.peer.wire.server import Server


def test_the_relay_logs_connections_of_former_members(removal, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "fedcb2o")
    orgs, _, second, keys = removal

    def connect() -> None:
        with pytest.raises(FormerMemberError):
            RelayMailbox(keys.member, orgs[0]).cards()

    with Relay(second, keys):
        connect()
        connect()  # too soon for a second line
        monkeypatch.setattr(relay_module, "_FORMER_QUIET_SECONDS", 0.2)
        time.sleep(0.3)
        connect()
    line = "relay: org-0 connects and is no member any more: it is shown the signed versions"
    assert [record.message for record in caplog.records].count(line) == 2


def test_the_relay_sends_a_removed_member_the_signed_versions(removal):
    orgs, first, second, keys = removal
    notices: list[str] = []
    with (
        Relay(second, keys) as relay,
        Relayed(
            first, orgs[0], RelayMailbox(keys.member, orgs[0]), on_removal=notices.append
        ) as removed,
        Relayed(second, orgs[1], RelayMailbox(keys.member, orgs[1])) as member_1,
        Relayed(second, orgs[2], RelayMailbox(keys.member, orgs[2])) as member_2,
    ):
        member_1.serve(lambda request, reply: reply(None))
        member_2.serve(lambda request, reply: reply(None))
        wait_for(lambda: bool(removed.removal), message=lambda: removed.error)
        assert notices == [removed.removal]
        assert removed.removal == (
            "version 2 of the federation, signed by org-1, org-2, removes org-0: this node takes "
            "part no more"
        )
        wait_for(lambda: (member_1.connected_peers(), member_2.connected_peers()) == ({2}, {1}))
        assert set(relay.connections()) == {"org-1", "org-2"}
        assert not any(name.startswith("org-0") for name in relay._mailbox.cards())


@pytest.mark.parametrize("lie", ["unsigned", "its own signature", "another run", "rubbish"])
def test_a_lying_relay_cannot_remove_a_member(lie, removal, tmp_path, monkeypatch):
    monkeypatch.setattr(relayed_module, "_FORMER_SECONDS", 0.1)
    orgs, first, second, keys = removal
    path = tmp_path / "federation.toml"
    fake = tmp_path / "fake.toml"
    fed = first if lie != "another run" else members.federated(orgs, changes={"rounds": 9})
    write_federation(amend_federation(fed, remove=["org-0"]), fake)
    if lie == "its own signature":
        sign_federation(fake, orgs[0])
    if lie == "another run":
        for identity in orgs[1:]:
            sign_federation(fake, identity)
    with Relay(second, keys) as relay:
        relay._file = os.urandom(2**12) if lie == "rubbish" else fake.read_bytes()
        with Relayed(first, orgs[0], RelayMailbox(keys.member, orgs[0])) as transport:
            wait_for(lambda: "no later version" in transport.error, message=lambda: transport.error)
            time.sleep(0.5)
            assert not transport.removal
            relay._file = path.read_bytes()
            wait_for(lambda: bool(transport.removal), message=lambda: transport.error)


def test_the_relay_treats_a_replaced_root_as_a_former_member(federation_of_three, tmp_path):
    orgs, first = federation_of_three
    path = tmp_path / "federation.toml"
    write_federation(first, path)
    new = Identity.make(tmp_path / "new", name="org-0", endpoint="org-0.invalid:1")
    second = next_version(path, orgs[1:], replace=[new.member])
    keys = relays.relay_identity(tmp_path)
    with (
        Relay(second, keys) as relay,
        Relayed(first, orgs[0], RelayMailbox(keys.member, orgs[0])) as former,
        Relayed(second, new, RelayMailbox(keys.member, new)) as current,
    ):
        current.serve(lambda request, reply: reply(None))
        wait_for(lambda: "gives org-0 another key" in former.removal, message=lambda: former.error)
        wait_for(lambda: relay.connections()["org-0"] > 0)
        assert current.error == ""


@pytest.mark.parametrize("kind", ["relay", "folder"])
def test_members_with_the_next_version_notify_a_removed_member(kind, removal, tmp_path):
    """The relay has the former version, or members use a folder without a relay."""
    orgs, first, second, _ = removal
    links = tmp_path / "links"
    links.mkdir()
    notices: list[str] = []
    with ExitStack() as exit_stack:
        relayed = relays.relayed(kind, orgs, first, links, exit_stack)
        relayed[2].close()
        mailbox = relayed[1].mailbox
        if isinstance(mailbox, RelayMailbox):
            mailbox = RelayMailbox(mailbox.relay, orgs[2])
        newer = exit_stack.enter_context(Relayed(second, orgs[2], mailbox))
        server = Server(
            second, 2, orgs[2], Ledger(tmp_path, second),
            hello_content=lambda: preflight.hello_content(second, orgs[2]),
        )  # fmt: skip
        newer.serve(server.on_request)
        codec = RawCodec(3)
        client = PeerClient(
            first, orgs[0], relayed[0], Ledger(tmp_path, first), codec, 3,
            on_removal=notices.append,
        )  # fmt: skip
        wait_for(lambda: 2 in relayed[0].connected_peers())
        assert 0 not in newer.connected_peers()
        content = client.hello(2, 10.0)
        assert content is not None
        assert preflight.describe_disagreement(first, content).startswith("it holds version 2")
        (notice,) = notices
        assert "signed by org-1, org-2, removes org-0" in notice
        assert client.fetch(0, {2: torch.zeros(3)}, 5.0) == ({}, {2: "no answer"})

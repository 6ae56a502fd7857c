"""Members behind a relay, sealed messages, hostile relays, and runs of processes."""

import json
import logging
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from tests.peer import faults, members, relays
from tests.peer.nodes import FORKED, Nodes, wait_for
from tests.tiny import ENVIRONMENT

import fedcb2o
from fedcb2o.data import digits
from fedcb2o.errors import ConfigError
from fedcb2o.peer.membership import (
    Federation,
    Identity,
    amend_federation,
    read_federation,
    sign_federation,
    write_federation,
)
from fedcb2o.peer.node import _preflight
from fedcb2o.peer.wire import (
    Ledger,
    MalformedError,
    PeerClient,
    RawCodec,
    Relay,
    Server,
    _relay,
    _relayed,
    _sealing,
    open_transport,
)
from fedcb2o.peer.wire._mailbox import FormerMemberError, RelayMailbox
from fedcb2o.peer.wire._relay_metrics import RelayMetrics
from fedcb2o.peer.wire._relayed import Relayed
from fedcb2o.peer.wire._sealing import CARD_BYTES, Replays, SealedKind, Session
from fedcb2o.peer.wire._tls import client_context


def behind_nat(folder: Path, count: int, listening: int = 0) -> list[Identity]:
    """Return organisations: the first ones listen, the others have no reachable endpoint."""
    orgs = members.identities(folder, listening)
    for j in range(listening, count):
        name = f"org-{j}"
        orgs.append(Identity.make(folder / name, name=name, endpoint=f"{name}.invalid:1"))
    return orgs


@pytest.fixture(scope="module")
def federation_of_three(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[Identity], Federation]:
    orgs = behind_nat(tmp_path_factory.mktemp("three"), 3)
    return orgs, members.federated(orgs)


@pytest.fixture
def sessions(federation_of_three: tuple[list[Identity], Federation]) -> list[Session]:
    orgs, federation = federation_of_three
    return [Session(federation, identity) for identity in orgs]


def seal_request(sender: Session, receiver: Session, content: bytes = b"question") -> bytes:
    card = sender.read_card(receiver.card(1))
    return sender.seal(card, SealedKind.REQUEST, 7, content)


def test_a_sealed_message_is_opened_once_and_by_its_receiver_only(sessions: list[Session]) -> None:
    first, second, third = sessions
    message = seal_request(first, second)
    assert b"question" not in message
    question = second.open(message)
    assert (question.content, question.id, question.card.agent) == (b"question", 7, 0)
    with pytest.raises(MalformedError, match="replay"):
        second.open(message)
    with pytest.raises(MalformedError, match="receiver"):
        third.open(message)
    answer = second.seal(question.card, SealedKind.ANSWER, 7, b"answer")
    assert first.open(answer).content == b"answer"
    with pytest.raises(MalformedError):  # sent back to its sender
        first.open(message)


def test_cards_without_a_valid_seal_displace_no_session(
    federation_of_three, sessions, monkeypatch
) -> None:
    monkeypatch.setattr(_sealing, "_MAX_SESSIONS", 2)
    first, second, _ = sessions
    message = seal_request(first, second)
    second.open(message)
    for _ in range(3):  # former sessions of the same member
        former = Session(federation_of_three[1], federation_of_three[0][0])
        broken = bytearray(seal_request(former, second))
        broken[-1] ^= 1
        with pytest.raises(MalformedError, match="seal"):
            second.open(bytes(broken))
    with pytest.raises(MalformedError, match="replay"):
        second.open(message)


def test_every_changed_byte_is_refused(sessions: list[Session]) -> None:
    first, second, _ = sessions
    second.introduce(second.read_card(first.card(1)))
    message = seal_request(first, second)
    for position in range(len(message)):
        changed = bytearray(message)
        changed[position] ^= 1
        with pytest.raises(MalformedError):
            second.open(changed)
    for cut in (0, 10, CARD_BYTES, len(message) - 1):
        with pytest.raises(MalformedError):
            second.open(message[:cut])
    assert second.open(message).content == b"question"


def test_messages_may_arrive_out_of_order_but_not_in_a_new_session(
    sessions: list[Session], federation_of_three: tuple[list[Identity], Federation]
) -> None:
    first, second, _ = sessions
    messages = [seal_request(first, second, b"%d" % k) for k in range(5)]
    assert [second.open(message).content for message in reversed(messages)] == [
        b"%d" % k for k in (4, 3, 2, 1, 0)
    ]
    orgs, federation = federation_of_three
    restarted = Session(federation, orgs[1])
    with pytest.raises(MalformedError, match="seal"):
        restarted.open(seal_request(first, second))


def test_metrics_health_and_log_of_a_relay(federation_of_three, tmp_path: Path, caplog) -> None:
    orgs, federation = federation_of_three
    identity = relays.relay_identity(tmp_path)
    caplog.set_level(logging.INFO, "fedcb2o")
    with (
        Relay(federation, identity) as relay,
        RelayMetrics(relay, 0, expires=identity.expires) as metrics,
    ):
        url = f"http://127.0.0.1:{metrics.port}"
        box = f"org-1/{'0' * 32}"
        sender = RelayMailbox(identity.member, orgs[0])
        receiver = RelayMailbox(identity.member, orgs[1])
        with pytest.raises(FileNotFoundError):
            sender.put(box, b"early", 0.1)
        assert receiver.take(box, 0.0) == []
        sender.put(box, b"message", 5.0)
        wait_for(lambda: relay.connections() == {"org-0": 1, "org-1": 1, "org-2": 0}, 10)
        lines = urllib.request.urlopen(f"{url}/metrics").read().decode().splitlines()
        for line in (
            'fedcb2o_relay_connections{member="org-1"} 1.0',
            'fedcb2o_relay_connections{member="org-2"} 0.0',
            'fedcb2o_relay_messages_total{outcome="stored"} 1.0',
            'fedcb2o_relay_messages_total{outcome="full"} 0.0',
            'fedcb2o_relay_messages_total{outcome="no box"} 1.0',
            "fedcb2o_relay_traffic_bytes_total 7.0",
        ):
            assert line in lines, lines
        (expiry,) = (line for line in lines if line.startswith("fedcb2o_certificate_expiry"))
        assert float(expiry.split()[1]) == identity.expires.timestamp()
        assert json.load(urllib.request.urlopen(f"{url}/health")) == {
            "healthy": True, "name": "relay", "connected": ["org-0", "org-1"],
        }  # fmt: skip
        with (
            mock.patch.object(_relay, "_MAX_STORED_BYTES", 8),
            pytest.raises((BlockingIOError, TimeoutError)),
        ):
            sender.put(box, b"message", 2.0)  # repeated until the timeout
        sender.close()
        wait_for(lambda: relay.connections()["org-0"] == 0, 10)
        relay._listener.close()
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{url}/health")
        receiver.close()
    log_lines = [
        (record.levelname, record.message, record.data["member"]) for record in caplog.records
    ]
    assert log_lines[:3] == [
        ("INFO", "relay: org-0 is connected", "org-0"),
        ("INFO", "relay: org-1 is connected", "org-1"),
        ("WARNING", "relay: the box of org-1 is full, and messages of org-0 are refused", "org-1"),
    ]
    assert ("INFO", "relay: org-0 has no connection", "org-0") in log_lines
    assert sum(level == "WARNING" for level, *_ in log_lines) == 1


def test_only_cards_of_members_of_this_run_are_accepted(
    sessions: list[Session], tmp_path: Path
) -> None:
    first, second, _ = sessions
    strangers = behind_nat(tmp_path, 3)
    other = Session(members.federated(strangers), strangers[1])
    with pytest.raises(MalformedError):
        first.read_card(other.card(1))
    with pytest.raises(MalformedError, match="member"):
        first.read_card(first.card(1))
    forged = bytearray(second.card(1))
    forged[41] = 2  # the id of another member
    with pytest.raises(MalformedError, match="signature"):
        first.read_card(forged)


def test_a_window_of_1024_numbers_detects_replays() -> None:
    replays = Replays()
    assert all(replays.accept(2 * k) for k in range(2000))
    assert not replays.accept(3998)
    assert replays.accept(3997)
    assert not replays.accept(1)  # older than the window


@pytest.fixture
def relay(federation_of_three: tuple[list[Identity], Federation], tmp_path: Path):
    _, federation = federation_of_three
    identity = relays.relay_identity(tmp_path)
    with Relay(federation, identity, folder=tmp_path / "relay"):
        yield identity


def test_a_relay_gives_a_box_to_its_owner_only(federation_of_three, relay) -> None:
    orgs, _ = federation_of_three
    first, second = (RelayMailbox(relay.member, org) for org in orgs[:2])
    box = f"org-0/{'0' * 32}"
    with pytest.raises(FileNotFoundError):  # the box does not exist yet
        second.put(box, b"early", 1.0)
    assert first.take(box, 0.0) == []
    second.put(box, b"one", 1.0)
    second.put(box, b"two", 1.0)
    for call in (
        lambda: second.take(box, 0.0),
        lambda: second.publish_card("org-0.run", bytes(CARD_BYTES)),
        lambda: second.put("../keys", b"", 1.0),
        lambda: second.take("org-1/../org-0", 0.0),
        lambda: second._call("nothing", b"", 1.0),
    ):
        with pytest.raises(OSError, match="closed"):
            call()
    assert first.take(box, 1.0) == [b"one", b"two"]
    first.close()
    second.close()


def test_a_sender_fills_its_own_share_of_a_box_only(
    federation_of_three, relay, monkeypatch
) -> None:
    orgs, _ = federation_of_three
    first, second, third = (RelayMailbox(relay.member, one) for one in orgs)
    box = f"org-0/{'0' * 32}"
    first.take(box, 0.0)
    content = bytes(2**21)
    for _ in range(4):
        second.put(box, content, 5.0)
    with pytest.raises((BlockingIOError, TimeoutError)):  # the latter on a slow machine
        second.put(box, content, 0.3)
    third.put(box, content, 5.0)
    assert sum(map(len, first.take(box, 1.0))) == 5 * 2**21
    for one in (first, second, third):
        one.close()


def test_a_stranger_cannot_use_the_relay(federation_of_three, relay, tmp_path) -> None:
    (stranger,) = behind_nat(tmp_path, 1)
    with pytest.raises(OSError, match=r"."):
        RelayMailbox(relay.member, stranger).cards()
    assert client_context(stranger, relay.member).verify_mode


def test_a_member_of_another_federation_is_refused_by_the_relay(
    federation_of_three, tmp_path
) -> None:
    orgs, federation = federation_of_three
    keys = relays.relay_identity(tmp_path)
    mailbox = RelayMailbox(keys.member, orgs[0])
    with (
        Relay(members.federated(orgs[1:]), keys),
        Relayed(federation, orgs[0], mailbox) as transport,
    ):
        wait_for(lambda: "refuses the certificate" in transport.error, 10, lambda: transport.error)
        assert not transport.removal


def test_check_reports_a_refusal_by_the_relay_in_plain_words(federation_of_three, tmp_path) -> None:
    orgs, federation = federation_of_three
    keys = relays.relay_identity(tmp_path)
    relay_file = keys.folder / "relay.member.toml"

    def check() -> dict[str, str]:
        results = _preflight.check_members(federation, orgs[0], seconds=2, relay=relay_file)
        return {result.name: result.error for result in results}

    with Relay(members.federated(orgs[1:]), keys):  # without the first member
        errors = check()
    assert "refuses our certificate" in errors["relay"]
    for name in ("org-1", "org-2"):
        assert errors[name] == "it is asked through the relay only: see the line of relay"
    with Relay(federation, keys):
        errors = check()
    assert errors["relay"] == ""
    assert "is not connected to relay: start `fedcb2o peer run`" in errors["org-1"]
    errors = check()
    assert "refuses connections" in errors["relay"]


@pytest.mark.parametrize(
    "error", [ssl.SSLEOFError(8, "EOF occurred"), ConnectionResetError(104, "reset")]
)
def test_a_closed_connection_to_the_relay_has_a_plain_message(error) -> None:
    error.reason = "UNEXPECTED_EOF_WHILE_READING"  # as Python sets it
    text = "the relay closes the connections of this member, and is tried again"
    assert _relayed._describe(error) == text


def next_version(path: Path, signers: list[Identity], **changes: Any) -> Federation:
    """Replace the federation in a file by its next version, signed, and return it."""
    members.forget_signed_versions(signers)  # tests share them
    write_federation(amend_federation(read_federation(path), **changes), path)
    for signer in signers:
        sign_federation(path, signer)
    return read_federation(path)


def test_check_compares_the_federation_version_of_the_relay(federation_of_three, tmp_path) -> None:
    orgs, first = federation_of_three
    path = tmp_path / "federation.toml"
    write_federation(first, path)
    new = Identity.make(tmp_path / "org-9", name="org-9", endpoint="org-9.invalid:1")
    second = next_version(path, orgs[1:], add=[new.member])
    keys = relays.relay_identity(tmp_path)
    relay_file = keys.folder / "relay.member.toml"

    def error_of_relay(federation: Federation) -> str:
        results = _preflight.check_members(federation, orgs[0], seconds=1, relay=relay_file)
        return {result.name: result.error for result in results}["relay"]

    with Relay(first, keys):
        assert error_of_relay(first) == ""
        assert error_of_relay(second) == (
            "the relay holds version 1 of the federation, and we 2: its operator starts it again "
            "with the newer file"
        )
    with Relay(second, keys):
        assert error_of_relay(second) == ""
        assert error_of_relay(first) == (
            "the relay holds version 2 of the federation, and we 1: get the newer file from a "
            "member"
        )
    with Relay(second, keys) as relay, mock.patch.object(relay, "_reply", side_effect=ValueError):
        assert (
            RelayMailbox(keys.member, orgs[0]).federation() == {}
        )  # as from a relay of an earlier release


def test_check_of_a_removed_member_reports_only_the_removal(federation_of_three, tmp_path) -> None:
    """Members with the later version are asked through a relay with the former version."""
    orgs, first = federation_of_three
    path = tmp_path / "federation.toml"
    write_federation(first, path)
    second = next_version(path, orgs[1:], remove=["org-0"])
    keys = relays.relay_identity(tmp_path)
    relay_file = keys.folder / "relay.member.toml"
    with Relay(first, keys), ThreadPoolExecutor(2) as pool:
        others = [
            pool.submit(_preflight.check_members, second, org, seconds=6, relay=relay_file)
            for org in orgs[1:]
        ]
        results = _preflight.check_members(first, orgs[0], seconds=5, relay=relay_file)
        for other in others:
            other.result()
    errors = {result.name: result.error for result in results}
    assert errors["org-0"] == (
        "version 2 of the federation, signed by org-1, org-2, removes org-0: this node takes part "
        "no more"
    )
    for name in ("org-1", "org-2"):
        assert errors[name] == "it holds a later version: see the line of org-0"


def test_the_relay_logs_connections_of_former_members(
    federation_of_three, tmp_path, monkeypatch, caplog
) -> None:
    caplog.set_level(logging.INFO, "fedcb2o")
    orgs, first = federation_of_three
    path = tmp_path / "federation.toml"
    write_federation(first, path)
    second = next_version(path, orgs[1:], remove=["org-0"])
    keys = relays.relay_identity(tmp_path)

    def connect() -> None:
        with pytest.raises(FormerMemberError):
            RelayMailbox(keys.member, orgs[0]).cards()

    with Relay(second, keys):
        connect()
        connect()  # too soon for a second line
        monkeypatch.setattr(_relay, "_FORMER_QUIET_SECONDS", 0.2)
        time.sleep(0.3)
        connect()
    line = "relay: org-0 connects and is no member any more: it is shown the signed versions"
    assert [record.message for record in caplog.records].count(line) == 2


def test_the_relay_sends_a_removed_member_the_signed_versions(
    federation_of_three, tmp_path
) -> None:
    orgs, first = federation_of_three
    path = tmp_path / "federation.toml"
    write_federation(first, path)
    second = next_version(path, orgs[1:], remove=["org-0"])
    keys = relays.relay_identity(tmp_path)
    notices: list[str] = []
    with (
        Relay(second, keys) as relay,
        Relayed(
            first, orgs[0], RelayMailbox(keys.member, orgs[0]), on_removal=notices.append
        ) as removed,
        Relayed(second, orgs[1], RelayMailbox(keys.member, orgs[1])) as member_1,
        Relayed(second, orgs[2], RelayMailbox(keys.member, orgs[2])) as member_2,
    ):
        member_1.serve(lambda request, reply: reply(b"heard"))
        member_2.serve(lambda request, reply: reply(b"heard"))
        wait_for(lambda: bool(removed.removal), 10, lambda: removed.error)
        assert notices == [removed.removal]
        assert removed.removal == (
            "version 2 of the federation, signed by org-1, org-2, removes org-0: this node takes "
            "part no more"
        )
        wait_for(lambda: (member_1.connected_peers(), member_2.connected_peers()) == ({2}, {1}), 10)
        assert set(relay.connections()) == {"org-1", "org-2"}
        assert not any(name.startswith("org-0") for name in relay._mailbox.cards())


@pytest.mark.parametrize("lie", ["unsigned", "its own signature", "another run", "rubbish"])
def test_a_lying_relay_cannot_remove_a_member(
    lie, federation_of_three, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(_relayed, "_FORMER_SECONDS", 0.1)
    orgs, first = federation_of_three
    path = tmp_path / "federation.toml"
    write_federation(first, path)
    second = next_version(path, orgs[1:], remove=["org-0"])
    fake = tmp_path / "fake.toml"
    fed = first if lie != "another run" else members.federated(orgs, changes={"rounds": 9})
    write_federation(amend_federation(fed, remove=["org-0"]), fake)
    if lie == "its own signature":
        sign_federation(fake, orgs[0])
    if lie == "another run":
        for identity in orgs[1:]:
            sign_federation(fake, identity)
    keys = relays.relay_identity(tmp_path)
    with Relay(second, keys) as relay:
        relay._file = os.urandom(2**12) if lie == "rubbish" else fake.read_bytes()
        with Relayed(first, orgs[0], RelayMailbox(keys.member, orgs[0])) as transport:
            wait_for(lambda: "no later version" in transport.error, 10, lambda: transport.error)
            time.sleep(0.5)
            assert not transport.removal
            relay._file = path.read_bytes()
            wait_for(lambda: bool(transport.removal), 10, lambda: transport.error)


def test_the_relay_treats_a_replaced_root_as_a_former_member(federation_of_three, tmp_path) -> None:
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
        current.serve(lambda request, reply: reply(b""))
        wait_for(lambda: "gives org-0 another key" in former.removal, 10, lambda: former.error)
        wait_for(lambda: relay.connections()["org-0"] > 0, 10)
        assert current.error == ""


@pytest.mark.parametrize("kind", ["relay", "folder"])
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_request_ends_when_the_asked_session_ends(
    kind, is_killed, federation_of_three, tmp_path, monkeypatch
):
    """The asked process closes, or publishes no new card for the duration of a lease."""
    orgs, federation = federation_of_three
    monkeypatch.setattr(_relayed, "LEASE_SECONDS", 1.0)
    with ExitStack() as exit_stack:
        first, second, _ = relays.relayed(kind, orgs, federation, tmp_path, exit_stack)
        request_arrived = threading.Event()
        open_replies = []

        def hold_reply(request: bytes, reply: Any) -> None:
            open_replies.append(reply)
            request_arrived.set()

        second.serve(hold_reply)
        wait_for(lambda: 1 in first.connected_peers(), 10)
        answers: list[bytes] = []
        thread = threading.Thread(target=lambda: answers.extend(first.ask(1, b"question", 60.0)))
        thread.start()
        assert request_arrived.wait(10)
        if is_killed:
            monkeypatch.setattr(second.mailbox, "publish_card", lambda name, card: None)
        else:
            second.close()
        thread.join(8)
        assert not thread.is_alive()
        assert answers == []


@pytest.mark.parametrize("kind", ["relay", "folder"])
def test_members_with_the_next_version_notify_a_removed_member(
    kind, federation_of_three, tmp_path
) -> None:
    """The relay has the former version, or members use a folder without a relay."""
    orgs, first = federation_of_three
    path = tmp_path / "federation.toml"
    write_federation(first, path)
    second = next_version(path, orgs[1:], remove=["org-0"])
    notices: list[str] = []
    with ExitStack() as exit_stack:
        relayed = relays.relayed(kind, orgs, first, tmp_path, exit_stack)
        relayed[2].close()
        mailbox = relayed[1].mailbox
        if isinstance(mailbox, RelayMailbox):
            mailbox = RelayMailbox(mailbox.relay, orgs[2])
        newer = exit_stack.enter_context(Relayed(second, orgs[2], mailbox))
        server = Server(
            second, 2, orgs[2], Ledger(tmp_path, second),
            hello_content=lambda: _preflight.hello_content(second, orgs[2]),
        )  # fmt: skip
        newer.serve(server.on_request)
        codec = RawCodec(3)
        client = PeerClient(
            first, orgs[0], relayed[0], Ledger(tmp_path, first), codec, 3,
            on_removal=notices.append,
        )  # fmt: skip
        wait_for(lambda: 2 in relayed[0].connected_peers(), 15)
        assert 0 not in newer.connected_peers()
        content = client.hello(2, 10.0)
        assert content is not None
        assert _preflight.describe_disagreement(first, content).startswith("it holds version 2")
        (notice,) = notices
        assert "signed by org-1, org-2, removes org-0" in notice
        assert client.fetch(0, {2: torch.zeros(3)}, 5.0) == ({}, {2: "no answer"})
        server.close()


def test_a_member_without_an_endpoint_needs_a_relay(federation_of_three, tmp_path) -> None:
    orgs, federation = federation_of_three
    with pytest.raises(ConfigError, match="--relay"):
        open_transport(federation, orgs[0])
    with pytest.raises(ConfigError, match="member's file"):
        open_transport(federation, orgs[0], relay=tmp_path / "missing")


@pytest.mark.slow
def test_check_reports_the_route_of_each_link(tmp_path) -> None:
    orgs = behind_nat(tmp_path, 3, listening=1)
    federation = members.federated(orgs)
    keys = relays.relay_identity(tmp_path)
    relay_file = keys.folder / "relay.member.toml"
    results: dict[int, list[_preflight.CheckResult]] = {}

    def check(j: int) -> None:
        results[j] = _preflight.check_members(federation, orgs[j], seconds=15, relay=relay_file)

    with Relay(federation, keys):
        threads = [threading.Thread(target=check, args=(j,)) for j in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
    assert {r.error for j in range(3) for r in results[j]} == {""}
    routes = {
        (j, r.name): r.notes[0] for j in range(3) for r in results[j] if "asked" in r.notes[0]
    }
    assert routes == {
        (0, "org-1"): "asked through the relay",
        (0, "org-2"): "asked through the relay",
        (1, "org-0"): "asked directly",
        (1, "org-2"): "asked through the relay",
        (2, "org-0"): "asked directly",
        (2, "org-1"): "asked through the relay",
    }


def test_the_final_message_of_a_relay_does_not_mention_a_run(federation_of_three, tmp_path) -> None:
    path = tmp_path / "federation.toml"
    write_federation(federation_of_three[1], path)
    keys = relays.relay_identity(tmp_path)
    words = [sys.executable, "-m", "fedcb2o", "peer", "relay", str(path), "--identity"]
    process = subprocess.Popen(
        [*words, str(keys.folder)], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("Relays for tiny")
    process.terminate()
    assert process.communicate(timeout=30)[1] == (
        "Terminated. The nodes connect again by themselves when the relay runs again.\n"
    )
    assert process.returncode == 128 + signal.SIGTERM


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
        wait_for(self.ready.exists, 30)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def simulated_models(folder: Path, settings: dict) -> torch.Tensor:
    fedcb2o.run({"together": 1, **settings}, out=folder, workers=1, watch=lambda *_: None)
    (seed,) = settings["seeds"]
    return load_file(folder / f"seed-{seed}" / "checkpoint.safetensors")["models"]


def same_bits(model: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(model.view(torch.int32), expected[: len(model)].view(torch.int32))


@pytest.mark.slow
@pytest.mark.parametrize("listening", [0, 1])
@pytest.mark.parametrize("kind", ["relay", "folder"])
def test_runs_through_a_relay_reproduce_the_simulation(kind, listening, tmp_path):
    orgs = behind_nat(tmp_path, 3, listening)
    settings = members.experiment(3, rounds=3)
    path = tmp_path / "federation.toml"
    members.federated(orgs, changes={"rounds": 3}, path=path, synchronous=True)
    peers = Nodes(tmp_path, path, [org.folder for org in orgs], {"together": 1, **settings})
    (tmp_path / "mailbox").mkdir()
    location = tmp_path / "mailbox"
    relay = None
    if kind == "relay":
        keys = relays.relay_identity(tmp_path)
        relay = RelayProcess(path, keys, location)
        location = relay.location
    try:
        peers.start(relay=location)
        assert peers.wait() == [0] * 3, [peers.log(j) for j in range(3)]
    finally:
        peers.close()
        if relay is not None:
            relay.kill()
    models = simulated_models(tmp_path / "simulation", settings)
    for j in range(3):
        assert same_bits(peers.model(j), models[j])
        assert [(line["refused"], line["late"]) for line in peers.lines(j)] == [({}, [])] * 3


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode,
    reason="network namespaces are not allowed here",
)
def test_five_members_in_network_namespaces_reproduce_the_direct_run(tmp_path):
    """The network of each member leads to the relay only, and not to other members."""
    orgs = behind_nat(tmp_path, 5)
    settings = {"together": 1, **members.experiment(5, rounds=3)}
    path = tmp_path / "federation.toml"
    members.federated(
        orgs, changes={"rounds": 3}, path=path, synchronous=True, deadline_seconds=90.0
    )
    Identity.make(tmp_path / "relay-keys", name="relay", endpoint="10.77.0.1:7447")
    (tmp_path / "settings.toml").write_text(tomli_w.dumps(settings))
    subprocess.run(
        ["unshare", "-rn", sys.executable, "-m", "tests.peer.namespaces", str(tmp_path), "5"],
        env={**os.environ, **ENVIRONMENT},
        check=True,
        timeout=280,
    )
    direct = tmp_path / "direct"
    direct_orgs = members.identities(direct, 5)
    members.federated(
        direct_orgs, changes={"rounds": 3}, path=direct / "federation.toml", synchronous=True
    )
    peers = Nodes(direct, direct / "federation.toml", [org.folder for org in direct_orgs], settings)
    try:
        peers.start()
        assert peers.wait() == [0] * 5, [peers.log(j) for j in range(5)]
    finally:
        peers.close()
    for j in range(5):
        model = load_file(tmp_path / f"out-{j}" / "checkpoint.safetensors")["models"][0]
        assert same_bits(model, peers.model(j))


@pytest.mark.slow
def test_no_round_exceeds_its_deadline_while_the_relay_is_down(tmp_path):
    orgs = behind_nat(tmp_path, 3)
    path = tmp_path / "federation.toml"
    members.federated(
        orgs, changes={"rounds": 60}, path=path, round_seconds=0.5, deadline_seconds=4.0
    )
    keys = relays.relay_identity(tmp_path)
    settings = {"together": 1, **members.experiment(3, rounds=60)}
    peers = Nodes(tmp_path, path, [org.folder for org in orgs], settings)
    relay = RelayProcess(path, keys, tmp_path / "mailbox")
    try:
        peers.start(relay=relay.location)
        peers.until(0, 6)
        relay.kill()
        time.sleep(4)
        relay.start()
        done = len(peers.lines(0))
        assert peers.wait() == [0] * 3, [peers.log(j) for j in range(3)]
    finally:
        peers.close()
        relay.kill()
    for j in range(3):
        lines = peers.lines(j)
        assert lines[-1]["round"] == 60
        assert max(line["seconds"]["exchange"] for line in lines) < 4.0 + 0.6
        assert any(line["received"] for line in lines[:5])
        assert any(line["received"] for line in lines[done:]), json.dumps(lines[done:])
        others = sorted({0, 1, 2} - {j})
        assert any(line["relay_down"] == others and line["late"] == [] for line in lines)
        assert lines[-1]["relay_down"] == []


@pytest.mark.slow
@pytest.mark.parametrize("relay_first", [True, False])
def test_a_removed_member_behind_a_relay_ends_in_any_order_of_restarts(relay_first, tmp_path):
    """Its node and its check name the version and the signers."""
    orgs = behind_nat(tmp_path, 3)
    first, path = tmp_path / "federation-1.toml", tmp_path / "federation.toml"
    changes = {"rounds": 500}
    pace = {"round_seconds": 0.5, "deadline_seconds": 20.0, "most_samples": 1000}
    members.federated(orgs, changes=changes, path=first, **pace)
    shutil.copy(first, path)
    keys = relays.relay_identity(tmp_path)
    peers = Nodes(tmp_path, first, [org.folder for org in orgs], members.experiment(3))
    relay = RelayProcess(first, keys, tmp_path / "mailbox")
    data = digits()
    x, y = data.pool.x[::4].numpy(), data.pool.y[::4].numpy()
    np.savez(tmp_path / "data.npz", x=x, y=y, class_names=data.class_names)
    options = {"relay": relay.location, "data": str(tmp_path / "data.npz"), "assess_every": 0}
    try:
        peers.start(**options)
        peers.until(1, 4)
        next_version(path, [orgs[0], orgs[2]], remove=["org-1"])

        def restart_relay() -> None:
            relay.kill()
            relay.work = (path, *relay.work[1:])
            relay.start()

        if relay_first:
            restart_relay()
        else:
            peers.federation = path
            for j in (0, 2):
                peers.send(j, signal.SIGINT)
                peers.wait(j)
                peers.start(j, resume=True, gather=0.0, **options)
        assert peers.wait(1, seconds=60) == [3], [peers.log(j) for j in range(3)]
        notice = (
            "version 2 of the federation, signed by org-0, org-2, removes org-1: this node takes "
            "part no more"
        )
        model = peers.out(1) / "model.safetensors"
        end = f"It ended after round {len(peers.lines(1))}; its model is {model}"
        assert f"Error: {notice}. {end}" in peers.log(1)
        assert model.exists()
        own_result, relay_result, *others = _preflight.check_members(
            read_federation(first), orgs[1], seconds=8, relay=relay.location
        )
        assert (own_result.name, own_result.error) == ("org-1", notice)
        texts = [result.error for result in (relay_result, *others)]
        if relay_first:
            via_relay = "it is asked through the relay only: see the line of relay"
            assert texts == ["it refuses org-1", via_relay, via_relay]
        else:
            version = "it holds a later version: see the line of org-1"
            assert texts == ["", version, version]
    finally:
        peers.close()
        relay.kill()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["direct", "relay"])
def test_restarts_of_a_member_do_not_stall_the_others(kind, tmp_path):
    """One of three restarts three times while the others ask it for models."""
    orgs = behind_nat(tmp_path, 3, listening=3 if kind == "direct" else 0)
    path = tmp_path / "federation.toml"
    changes = {"rounds": 500, "agents": {"benign": 3, "malicious": 0, "budget": 2}}
    pace = {"round_seconds": 0.5, "deadline_seconds": 60.0}
    members.federated(orgs, changes=changes, path=path, **pace)
    settings = {"together": 1, **members.experiment(3, **changes)}
    peers = Nodes(tmp_path, path, [one.folder for one in orgs], settings)
    keys = relays.relay_identity(tmp_path)
    relay = RelayProcess(path, keys, tmp_path / "mailbox")
    options = {} if kind == "direct" else {"relay": relay.location}

    def has_model(j: int) -> bool:
        return any(2 in [one["id"] for one in line["received"]] for line in peers.lines(j)[-2:])

    try:
        peers.start(prepare=partial(faults.patient, 30.0), **options)
        peers.until(0, 4)
        for _ in range(3):
            peers.send(2, signal.SIGINT)
            assert peers.wait(2, seconds=20) == [130], peers.log(2)
            peers.start(2, resume=True, gather=0.0, **options)
            done = len(peers.lines(2))
            peers.until(2, done + 3)
        for j in (0, 1):
            seconds = max(line["seconds"]["exchange"] for line in peers.lines(j)[1:])
            print(f"longest exchange of org-{j}: {seconds:.2f} s")
            assert seconds < 4.0, peers.log(j)
            wait_for(lambda j=j: has_model(j), 20, lambda j=j: peers.log(j))
    finally:
        peers.close()
        relay.kill()


@pytest.mark.slow
def test_a_relay_has_no_plaintext_in_memory_or_files(tmp_path):
    """The name of a box, which the relay knows, shows that the search works."""
    orgs = behind_nat(tmp_path, 2)
    path = tmp_path / "federation.toml"
    federation = members.federated(orgs, path=path)
    keys = relays.relay_identity(tmp_path)
    store = tmp_path / "mailbox"
    relay = RelayProcess(path, keys, store)
    model = torch.randn(2**18, generator=torch.Generator().manual_seed(1)).numpy().tobytes()
    contents: list[bytes] = []
    with ExitStack() as exit_stack:
        exit_stack.callback(relay.kill)
        transports = [open_transport(federation, one, relay=relay.location) for one in orgs]
        for one in transports:
            exit_stack.callback(one.close)
        transports[1].serve(lambda request, reply: reply(model))
        wait_for(lambda: 1 in transports[0].connected_peers(), 20)
        for k in range(8):
            assert list(transports[0].ask(1, b"%d" % k, 20.0)) == [model]
            if k >= 6:
                contents.append(memory_of(relay.process.pid or 0))
            contents += [file.read_bytes() for file in store.rglob("*-org-1")]
        box = transports[0].relayed._box.encode()
    content = b"".join(contents)
    assert box in content
    for start in range(0, len(model), 2**17):
        assert model[start : start + 16] not in content


def memory_of(pid: int) -> bytes:
    """Return the writable memory of a process."""
    pieces = []
    with Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, *rest = line.split()
            start, end = (int(number, 16) for number in span.split("-"))
            if rights.startswith("rw") and end - start < 2**28 and "[v" not in rest[-1]:
                try:
                    memory.seek(start)
                    pieces.append(memory.read(end - start))
                except OSError:  # unmapped in the meantime
                    continue
    return b"".join(pieces)

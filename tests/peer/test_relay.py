"""A relay: its boxes, its members, its metrics and its messages."""

import json
import logging
import signal
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
from tests.peer import members, relays
from tests.peer.relays import CARD_BYTES, Relayed, RelayMailbox, behind_nat
from tests.peer.waiting import wait_for
from tests.tiny import ENVIRONMENT

from fedcb2o.errors import ConfigError
from fedcb2o.peer import write_federation
from fedcb2o.peer.wire import relay as relay_module
from fedcb2o.peer.wire import relayed
from fedcb2o.peer.wire.probe import describe_failure
from fedcb2o.peer.wire.protocol import Answer
from fedcb2o.peer.wire.relay import Relay
from fedcb2o.peer.wire.relay_metrics import RelayMetrics
from fedcb2o.peer.wire.relayed import open_transport
from fedcb2o.peer.wire.tls import client_context


def test_metrics_health_and_log_of_a_relay(federation_of_three, tmp_path, caplog):
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
            sender.put(box, b"early", 5.0)
        assert receiver.take(box, 0.0) == []
        sender.put(box, b"message", 5.0)
        wait_for(lambda: relay.connections() == {"org-0": 1, "org-1": 1, "org-2": 0})
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
            mock.patch.object(relay_module, "_MAX_STORED_BYTES", 8),
            pytest.raises((BlockingIOError, TimeoutError)),
        ):
            sender.put(box, b"message", 2.0)  # repeated until the timeout
        sender.close()
        wait_for(lambda: relay.connections()["org-0"] == 0)
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


@pytest.fixture
def relay(federation_of_three, tmp_path):
    _, federation = federation_of_three
    identity = relays.relay_identity(tmp_path)
    with Relay(federation, identity, folder=tmp_path / "relay"):
        yield identity


def test_a_relay_gives_a_box_to_its_owner_only(federation_of_three, relay):
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
        lambda: second._call("GET", "nothing", 1.0),
        lambda: second._call("PUT", "federation", 1.0, body=b"x"),
    ):
        with pytest.raises(OSError, match="refuses a request with the status 40"):
            call()
    assert first.take(box, 1.0) == [b"one", b"two"]
    first.close()
    second.close()


def test_a_sender_fills_its_own_share_of_a_box_only(federation_of_three, relay, monkeypatch):
    orgs, _ = federation_of_three
    first, second, third = (RelayMailbox(relay.member, one) for one in orgs)
    box = f"org-0/{'0' * 32}"
    first.take(box, 0.0)
    content = bytes(2**21)
    for _ in range(4):
        second.put(box, content, 5.0)
    with pytest.raises(OSError, match=r"."):  # full, or too late on a slow machine
        second.put(box, content, 0.3)
    third.put(box, content, 5.0)
    assert sum(map(len, first.take(box, 1.0))) == 5 * 2**21
    for one in (first, second, third):
        one.close()


def test_a_stranger_cannot_use_the_relay(federation_of_three, relay, tmp_path):
    (stranger,) = behind_nat(tmp_path, 1)
    with pytest.raises(OSError, match=r"."):
        RelayMailbox(relay.member, stranger).cards()
    assert client_context(stranger, relay.member).verify_mode


def test_a_member_of_another_federation_is_refused_by_the_relay(federation_of_three, tmp_path):
    orgs, federation = federation_of_three
    keys = relays.relay_identity(tmp_path)
    mailbox = RelayMailbox(keys.member, orgs[0])
    with (
        Relay(members.federated(orgs[1:]), keys),
        Relayed(federation, orgs[0], mailbox) as transport,
    ):
        wait_for(
            lambda: "refuses our certificate" in transport.error, message=lambda: transport.error
        )
        assert not transport.removal


@pytest.mark.parametrize(
    "error", [ssl.SSLEOFError(8, "EOF occurred"), ConnectionResetError(104, "reset")]
)
def test_a_closed_connection_to_the_relay_has_a_plain_message(error, federation_of_three):
    error.reason = "UNEXPECTED_EOF_WHILE_READING"  # as Python sets it
    text = describe_failure(federation_of_three[0][0].member, error, "`fedcb2o peer relay`")
    assert "closes the connection: it is busy or ending" in text


@pytest.mark.parametrize("kind", ["relay", "folder"])
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_request_ends_when_the_asked_session_ends(
    kind, is_killed, federation_of_three, tmp_path, monkeypatch
):
    """The asked process closes, or publishes no new card for the duration of a lease."""
    orgs, federation = federation_of_three
    with ExitStack() as exit_stack:
        first, second, _ = relays.relayed(kind, orgs, federation, tmp_path, exit_stack)
        request_arrived = threading.Event()
        open_replies = []

        def hold_reply(request: bytes, reply: Any) -> None:
            open_replies.append(reply)
            request_arrived.set()

        second.serve(hold_reply)
        wait_for(lambda: 1 in first.connected_peers())
        answers: list[Answer | None] = []
        pending = first.ask(1, b"question", 3600.0)
        thread = threading.Thread(target=lambda: answers.append(pending.answer()))
        thread.start()
        assert request_arrived.wait(120)
        if is_killed:
            monkeypatch.setattr(relayed, "LEASE_SECONDS", 1.0)
            monkeypatch.setattr(second.mailbox, "publish_card", lambda name, card: None)
        else:
            second.close()
        thread.join(120)
        assert not thread.is_alive()
        assert answers == [None]


def test_a_member_without_an_endpoint_needs_a_relay(federation_of_three, tmp_path):
    orgs, federation = federation_of_three
    with pytest.raises(ConfigError, match="--relay"):
        open_transport(federation, orgs[0])
    with pytest.raises(ConfigError, match="member's file"):
        open_transport(federation, orgs[0], relay=tmp_path / "missing")


def test_the_final_message_of_a_relay_does_not_mention_a_run(federation_of_three, tmp_path):
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
    assert process.communicate(timeout=240)[1] == (
        "Terminated. The nodes connect again by themselves when the relay runs again.\n"
    )
    assert process.returncode == 128 + signal.SIGTERM

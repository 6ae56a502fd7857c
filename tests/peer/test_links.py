"""Bounds of the links: strangers' connections, a member's links, declarations, and pace."""

import contextlib
import os
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.peer import raw
from tests.peer.members import federated, identities
from tests.peer.test_transport import answering, until

from fedcb2o.peer.membership import Federation, Identity
from fedcb2o.peer.wire import Zenoh, _link, _listener, _transport
from fedcb2o.peer.wire._link import Allowance
from fedcb2o.peer.wire._zenoh_messages import ZenohError


@pytest.fixture(scope="module")
def organisations(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Identity], Federation]:
    who = identities(tmp_path_factory.mktemp("organisations"), 3)
    return who, federated(who)


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def place(identity: Identity) -> tuple[str, int]:
    host, _, port = identity.member.endpoint.rpartition(":")
    return host, int(port)


def test_silent_strangers_displace_each_other_and_no_member(organisations, opened):
    """1,200 connections that say nothing leave a bounded number of descriptors in use."""
    who, federation = organisations
    one = opened.enter_context(Zenoh(federation, who[0]))
    one.serve(answering())
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 3000:
        pytest.skip("the machine allows too few open files")
    before = len([*Path("/proc/self/fd").iterdir()]) if Path("/proc/self/fd").exists() else 0
    strangers = [opened.enter_context(socket.create_connection(place(who[0]))) for _ in range(1200)]
    until(lambda: len(one._listener._pending) == _listener._MAX_PENDING)
    began = time.monotonic()
    other = opened.enter_context(Zenoh(federation, who[1]))
    assert until(lambda: list(other.ask(0, b"hello", 5.0))) == [b"heard hello"]
    assert time.monotonic() - began < 3
    assert len(one._listener._pending) <= _listener._MAX_PENDING
    if before:
        opened_here = len([*Path("/proc/self/fd").iterdir()]) - before - len(strangers)
        assert opened_here < _listener._MAX_PENDING + 40


def test_a_member_is_linked_while_strangers_begin_handshakes(organisations, opened):
    """Each hello is valid and the connection ends at once, some hundred times a second."""
    who, federation = organisations
    one = opened.enter_context(Zenoh(federation, who[0]))
    one.serve(answering())
    other = None
    end = time.monotonic() + 4
    count = 0
    context = _listener.client_context(who[2], federation.members[0])
    while time.monotonic() < end:
        with socket.create_connection(place(who[0])) as stranger:
            incoming, outgoing = _listener.ssl.MemoryBIO(), _listener.ssl.MemoryBIO()
            tls = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
            with contextlib.suppress(_listener.ssl.SSLWantReadError):
                tls.do_handshake()
            stranger.sendall(outgoing.read())
        count += 1
        if other is None and count == 50:
            began = time.monotonic()
            other = opened.enter_context(Zenoh(federation, who[1]))
        if other is not None and list(other.ask(0, b"hello", 1.0)):
            break
    assert time.monotonic() - began < 3
    assert count >= 50


def test_no_descriptor_is_left(organisations, opened, caplog):
    """A connection is refused with a message, the listener goes on, and a member is linked."""
    who, federation = organisations
    one = opened.enter_context(Zenoh(federation, who[0]))
    one.serve(answering())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    strangers = [socket.socket() for _ in range(5)]
    used = max(int(path.name) for path in Path("/dev/fd").iterdir()) + 1
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, limits[1]))
        fillers = []
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.open(os.devnull, os.O_RDONLY))
        for stranger in strangers:
            stranger.connect(place(who[0]))
        until(lambda: "too many open files" in caplog.text)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for filler in fillers:
            os.close(filler)
        for stranger in strangers:
            stranger.close()
    other = opened.enter_context(Zenoh(federation, who[1]))
    assert until(lambda: list(other.ask(0, b"hello", 5.0))) == [b"heard hello"]


def test_a_member_has_four_links(organisations, opened):
    who, federation = organisations
    one = opened.enter_context(Zenoh(federation, who[0]))
    other = opened.enter_context(Zenoh(federation, who[1]))
    one.serve(answering())
    many = [opened.enter_context(raw.dialling(who[2], federation, 0)) for _ in range(8)]
    until(lambda: any(session.info.links() for session in many))
    time.sleep(1.0)
    assert len(one._links_in["org-2"]) <= _transport.MAX_LINKS_PER_MEMBER + 1
    assert until(lambda: list(other.ask(0, b"hello", 5.0))) == [b"heard hello"]


@pytest.mark.parametrize("is_dialled", [False, True])
def test_declarations_end_a_link_and_are_not_kept(is_dialled, organisations, opened, monkeypatch):
    """Key expressions of a member, on the link that it dialled or that was dialled to it."""
    monkeypatch.setattr(_transport, "_ABUSE_PAUSE", 0.2)
    who, federation = organisations
    one = opened.enter_context(Zenoh(federation, who[0]))
    one.serve(answering())
    if is_dialled:
        session = opened.enter_context(raw.listening(who[2], federation))
        until(lambda: 2 in one.connected_peers())
        attempts = one._dialers[2].attempts
        is_closed = lambda: one._dialers[2].attempts > attempts  # noqa: E731
    else:
        session = opened.enter_context(raw.dialling(who[2], federation, 0))
        (link,) = until(lambda: list(one._links_in["org-2"]))
        is_closed = link.closed.is_set
    tokens = []
    for k in range(3000):
        tokens.append(session.liveliness().declare_token(f"fedcb2o/{k}/" + "x" * 400))
    until(is_closed)
    other = opened.enter_context(Zenoh(federation, who[1]))
    assert until(lambda: list(other.ask(0, b"hello", 5.0))) == [b"heard hello"]


def test_the_allowance_grows_with_time():
    allowance = Allowance(bytes_left=2.0**11)
    allowance.charge(10)  # at least a KiB
    allowance.charge(2**10)
    with pytest.raises(ZenohError, match="sends too much"):
        allowance.charge(2**10)
    allowance.updated -= 1
    allowance.charge(2**13)


def test_who_never_answers_is_dialled_ever_less_often(organisations, opened):
    who, federation = organisations
    one = opened.enter_context(Zenoh(federation, who[0]))
    began = time.monotonic()
    until(lambda: one._dialers[2].attempts >= 6, 20)
    assert time.monotonic() - began > 2.0  # six at the first pause: 1.2 s
    other = opened.enter_context(Zenoh(federation, who[2]))  # it dials, and is dialled at once
    other.serve(answering())
    began = time.monotonic()
    assert until(lambda: list(one.ask(2, b"hello", 5.0))) == [b"heard hello"]
    assert time.monotonic() - began < 1.5


def test_requests_beyond_the_pace_wait(monkeypatch):
    monkeypatch.setattr(_transport, "_REQUEST_BURST", 5)
    pace = _transport.Pace()
    closed = _link.threading.Event()
    began = time.monotonic()
    for _ in range(45):
        pace.wait(closed)
    assert 0.08 < time.monotonic() - began < 5  # 40 at 400 a second

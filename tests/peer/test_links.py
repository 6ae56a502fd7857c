"""Limits of links: unauthenticated connections, links per member, declarations and request rate."""

import contextlib
import errno
import gc
import os
import resource
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.peer import raw
from tests.peer.members import federated, identities
from tests.peer.test_transport import answering
from tests.peer.waiting import Clock, wait_for

from fedcb2o.peer.membership import Federation, Identity
from fedcb2o.peer.wire import Zenoh, _link, _listener, _tls, _transport
from fedcb2o.peer.wire._link import Allowance
from fedcb2o.peer.wire._zenoh_messages import ZenohError


@pytest.fixture(scope="module")
def organisations(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Identity], Federation]:
    orgs = identities(tmp_path_factory.mktemp("organisations"), 3)
    return orgs, federated(orgs)


@pytest.fixture
def exit_stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def address_of(identity: Identity) -> tuple[str, int]:
    host, _, port = identity.member.endpoint.rpartition(":")
    return host, int(port)


def test_silent_connections_displace_each_other_and_no_member(
    organisations, exit_stack, monkeypatch
):
    """A bounded number of 240 connections that send no data stays open."""
    monkeypatch.setattr(_listener, "_MAX_PENDING", 100)
    monkeypatch.setattr(_listener, "HANDSHAKE_SECONDS", 3600.0)  # they do not end by themselves
    orgs, federation = organisations
    server = exit_stack.enter_context(Zenoh(federation, orgs[0]))
    server.serve(answering())
    descriptors_before = num_descriptors()
    strangers = [
        exit_stack.enter_context(socket.create_connection(address_of(orgs[0]))) for _ in range(240)
    ]
    wait_for(lambda: len(server._listener._pending) == 100)
    client = exit_stack.enter_context(Zenoh(federation, orgs[1]))
    assert wait_for(lambda: list(client.ask(0, b"hello", 5.0))) == [b"heard hello"]
    assert len(server._listener._pending) <= 100
    assert num_descriptors() - descriptors_before - len(strangers) < 140


def num_descriptors() -> int:
    return len([*Path("/dev/fd").iterdir()])


def test_a_member_is_linked_during_a_flood_of_handshakes(organisations, exit_stack):
    """A client begins valid handshakes and disconnects, again and again until the link is open."""
    orgs, federation = organisations
    server = exit_stack.enter_context(Zenoh(federation, orgs[0]))
    server.serve(answering())
    client = None
    count = 0
    context = _tls.client_context(orgs[2], federation.members[0])

    def flood_once_and_ask() -> list[bytes]:
        nonlocal client, count
        with socket.create_connection(address_of(orgs[0])) as stranger:
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            tls = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
            with contextlib.suppress(ssl.SSLWantReadError):
                tls.do_handshake()
            stranger.sendall(outgoing.read())
        count += 1
        if count == 50:
            client = exit_stack.enter_context(Zenoh(federation, orgs[1]))
        return list(client.ask(0, b"hello", 1.0)) if client else []

    while not (answers := flood_once_and_ask()) and count < 10_000:
        pass
    assert answers == [b"heard hello"]


def test_the_listener_survives_a_lack_of_file_descriptors(organisations, exit_stack, caplog):
    """Connections are refused with a log message. A member is linked afterwards."""
    orgs, federation = organisations
    server = exit_stack.enter_context(Zenoh(federation, orgs[0]))
    server.serve(answering())
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
            stranger.connect(address_of(orgs[0]))
        wait_for(lambda: "too many open files" in caplog.text)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for filler in fillers:
            os.close(filler)
        for stranger in strangers:
            stranger.close()
    client = exit_stack.enter_context(Zenoh(federation, orgs[1]))
    assert wait_for(lambda: list(client.ask(0, b"hello", 5.0))) == [b"heard hello"]


def test_the_links_of_a_member_are_limited(organisations, exit_stack):
    orgs, federation = organisations
    server = exit_stack.enter_context(Zenoh(federation, orgs[0]))
    client = exit_stack.enter_context(Zenoh(federation, orgs[1]))
    server.serve(answering())
    sessions = [exit_stack.enter_context(raw.dialling(orgs[2], federation, 0)) for _ in range(8)]
    wait_for(lambda: any(session.info.links() for session in sessions))
    time.sleep(1.0)
    assert len(server._links_in["org-2"]) <= _transport.MAX_LINKS_PER_MEMBER + 1
    assert wait_for(lambda: list(client.ask(0, b"hello", 5.0))) == [b"heard hello"]


@pytest.mark.parametrize("is_dialled", [False, True])
def test_too_many_declarations_close_the_link(is_dialled, organisations, exit_stack, monkeypatch):
    """A member declares 3,000 key expressions, on an outgoing or an incoming link."""
    monkeypatch.setattr(_transport, "_ABUSE_PAUSE", 0.2)
    orgs, federation = organisations
    server = exit_stack.enter_context(Zenoh(federation, orgs[0]))
    server.serve(answering())
    if is_dialled:
        session = exit_stack.enter_context(raw.listening(orgs[2], federation))
        wait_for(lambda: 2 in server.connected_peers())
        attempts = server._dialers[2].attempts
        is_closed = lambda: server._dialers[2].attempts > attempts  # noqa: E731
    else:
        session = exit_stack.enter_context(raw.dialling(orgs[2], federation, 0))
        (link,) = wait_for(lambda: list(server._links_in["org-2"]))
        is_closed = link.closed.is_set
    tokens = []
    for k in range(3000):
        tokens.append(session.liveliness().declare_token(f"fedcb2o/{k}/" + "x" * 400))
    wait_for(is_closed)
    client = exit_stack.enter_context(Zenoh(federation, orgs[1]))
    assert wait_for(lambda: list(client.ask(0, b"hello", 5.0))) == [b"heard hello"]


def test_the_allowance_grows_with_time():
    allowance = Allowance(bytes_left=2.0**11)
    allowance.charge(10)  # a message counts as at least 1 KiB
    allowance.charge(2**10)
    with pytest.raises(ZenohError, match="sends too much"):
        allowance.charge(2**10)
    allowance.updated -= 1
    allowance.charge(2**13)


def test_pauses_between_dials_of_an_unreachable_member_grow(organisations, exit_stack, monkeypatch):
    orgs, federation = organisations
    client = exit_stack.enter_context(Zenoh(federation, orgs[0]))
    began = time.monotonic()
    wait_for(lambda: client._dialers[2].attempts >= 6)
    assert time.monotonic() - began > 2.0  # with constant pauses, six attempts take 1.2 s


def test_a_link_of_a_member_ends_the_pause_before_the_next_dial(
    organisations, exit_stack, monkeypatch
):
    monkeypatch.setattr(_transport, "_PAUSE_GROWTH", 1e6)
    monkeypatch.setattr(_transport, "_LONGEST_PAUSE", 3600.0)
    orgs, federation = organisations
    client = exit_stack.enter_context(Zenoh(federation, orgs[0]))
    wait_for(lambda: client._dialers[2].attempts)
    server = exit_stack.enter_context(Zenoh(federation, orgs[2]))
    server.serve(answering())
    assert wait_for(lambda: list(client.ask(2, b"hello", 5.0))) == [b"heard hello"]


def test_requests_beyond_the_pace_wait(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(_transport, "time", clock)
    pace = _transport.Pace(burst=5, per_second=400)
    for _ in range(45):
        pace.wait(clock)
    assert clock.now == pytest.approx(0.1)  # 40 requests


def test_a_peer_that_resets_the_connection_leaves_no_socket_open(monkeypatch):
    """The reset arrives while `wrap_socket` runs."""
    descriptors = []

    def disconnected(self):
        descriptors.append(self.fileno())
        raise OSError(errno.ENOTCONN, "not connected")

    def reset(self, count):
        raise ConnectionResetError(errno.ECONNRESET, "reset by the peer")

    monkeypatch.setattr(ssl.SSLSocket, "getpeername", disconnected)
    monkeypatch.setattr(ssl.SSLSocket, "recv", reset)
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = socket.create_connection(server.getsockname())
        with pytest.raises(ConnectionResetError):
            _link.TlsStream(connection, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    (descriptor,) = set(descriptors)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    gc.collect()  # a socket that is not closed would be a warning, which is an error

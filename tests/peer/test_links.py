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
from tests.peer.test_transport import answering, until

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


def test_silent_connections_displace_each_other_and_no_member(organisations, exit_stack):
    """A bounded number of 1,200 connections that send no data stays open."""
    orgs, federation = organisations
    server = exit_stack.enter_context(Zenoh(federation, orgs[0]))
    server.serve(answering())
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 3000:
        pytest.skip("the machine allows too few open files")
    descriptors_before = (
        len([*Path("/proc/self/fd").iterdir()]) if Path("/proc/self/fd").exists() else 0
    )
    strangers = [
        exit_stack.enter_context(socket.create_connection(address_of(orgs[0]))) for _ in range(1200)
    ]
    until(lambda: len(server._listener._pending) == _listener._MAX_PENDING)
    began = time.monotonic()
    client = exit_stack.enter_context(Zenoh(federation, orgs[1]))
    assert until(lambda: list(client.ask(0, b"hello", 5.0))) == [b"heard hello"]
    assert time.monotonic() - began < 3
    assert len(server._listener._pending) <= _listener._MAX_PENDING
    if descriptors_before:
        num_descriptors = (
            len([*Path("/proc/self/fd").iterdir()]) - descriptors_before - len(strangers)
        )
        assert num_descriptors < _listener._MAX_PENDING + 40


def test_a_member_is_linked_during_a_flood_of_handshakes(organisations, exit_stack):
    """A client begins valid handshakes and disconnects, about a hundred times per second."""
    orgs, federation = organisations
    server = exit_stack.enter_context(Zenoh(federation, orgs[0]))
    server.serve(answering())
    client = None
    end = time.monotonic() + 4
    count = 0
    context = _tls.client_context(orgs[2], federation.members[0])
    while time.monotonic() < end:
        with socket.create_connection(address_of(orgs[0])) as stranger:
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            tls = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
            with contextlib.suppress(ssl.SSLWantReadError):
                tls.do_handshake()
            stranger.sendall(outgoing.read())
        count += 1
        if client is None and count == 50:
            began = time.monotonic()
            client = exit_stack.enter_context(Zenoh(federation, orgs[1]))
        if client is not None and list(client.ask(0, b"hello", 1.0)):
            break
    assert time.monotonic() - began < 3
    assert count >= 50


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
        until(lambda: "too many open files" in caplog.text)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for filler in fillers:
            os.close(filler)
        for stranger in strangers:
            stranger.close()
    client = exit_stack.enter_context(Zenoh(federation, orgs[1]))
    assert until(lambda: list(client.ask(0, b"hello", 5.0))) == [b"heard hello"]


def test_the_links_of_a_member_are_limited(organisations, exit_stack):
    orgs, federation = organisations
    server = exit_stack.enter_context(Zenoh(federation, orgs[0]))
    client = exit_stack.enter_context(Zenoh(federation, orgs[1]))
    server.serve(answering())
    sessions = [exit_stack.enter_context(raw.dialling(orgs[2], federation, 0)) for _ in range(8)]
    until(lambda: any(session.info.links() for session in sessions))
    time.sleep(1.0)
    assert len(server._links_in["org-2"]) <= _transport.MAX_LINKS_PER_MEMBER + 1
    assert until(lambda: list(client.ask(0, b"hello", 5.0))) == [b"heard hello"]


@pytest.mark.parametrize("is_dialled", [False, True])
def test_too_many_declarations_close_the_link(is_dialled, organisations, exit_stack, monkeypatch):
    """A member declares 3,000 key expressions, on an outgoing or an incoming link."""
    monkeypatch.setattr(_transport, "_ABUSE_PAUSE", 0.2)
    orgs, federation = organisations
    server = exit_stack.enter_context(Zenoh(federation, orgs[0]))
    server.serve(answering())
    if is_dialled:
        session = exit_stack.enter_context(raw.listening(orgs[2], federation))
        until(lambda: 2 in server.connected_peers())
        attempts = server._dialers[2].attempts
        is_closed = lambda: server._dialers[2].attempts > attempts  # noqa: E731
    else:
        session = exit_stack.enter_context(raw.dialling(orgs[2], federation, 0))
        (link,) = until(lambda: list(server._links_in["org-2"]))
        is_closed = link.closed.is_set
    tokens = []
    for k in range(3000):
        tokens.append(session.liveliness().declare_token(f"fedcb2o/{k}/" + "x" * 400))
    until(is_closed)
    client = exit_stack.enter_context(Zenoh(federation, orgs[1]))
    assert until(lambda: list(client.ask(0, b"hello", 5.0))) == [b"heard hello"]


def test_the_allowance_grows_with_time():
    allowance = Allowance(bytes_left=2.0**11)
    allowance.charge(10)  # a message counts as at least 1 KiB
    allowance.charge(2**10)
    with pytest.raises(ZenohError, match="sends too much"):
        allowance.charge(2**10)
    allowance.updated -= 1
    allowance.charge(2**13)


def test_pauses_between_dials_of_an_unreachable_member_grow(organisations, exit_stack):
    orgs, federation = organisations
    client = exit_stack.enter_context(Zenoh(federation, orgs[0]))
    began = time.monotonic()
    until(lambda: client._dialers[2].attempts >= 6, 20)
    assert time.monotonic() - began > 2.0  # with constant pauses, six attempts take 1.2 s
    server = exit_stack.enter_context(
        Zenoh(federation, orgs[2])
    )  # its link makes the client dial at once
    server.serve(answering())
    began = time.monotonic()
    assert until(lambda: list(client.ask(2, b"hello", 5.0))) == [b"heard hello"]
    assert time.monotonic() - began < 1.5


def test_requests_beyond_the_pace_wait(monkeypatch):
    monkeypatch.setattr(_transport, "_REQUEST_BURST", 5)
    pace = _transport.Pace()
    closed = _link.threading.Event()
    began = time.monotonic()
    for _ in range(45):
        pace.wait(closed)
    assert 0.08 < time.monotonic() - began < 5  # 40 requests at 400 per second


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

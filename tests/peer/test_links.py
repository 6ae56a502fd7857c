"""Limits of links: connections of strangers, of a member, requests, and hostile HTTP."""

import contextlib
import errno
import gc
import os
import resource
import socket
import ssl
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.peer import raw
from tests.peer.members import federated, identities
from tests.peer.test_transport import answering, ask
from tests.peer.waiting import Clock, wait_for

from fedcb2o.peer import Federation, Identity
from fedcb2o.peer.wire import dialer, listener
from fedcb2o.peer.wire import pace as pace_module
from fedcb2o.peer.wire import tls as tls_module
from fedcb2o.peer.wire.http_requests import RequestParser
from fedcb2o.peer.wire.protocol import Answer, AnswerStatus
from fedcb2o.peer.wire.transport import Https

ANSWER = Answer(AnswerStatus.OK, b"answer")


@pytest.fixture(scope="module")
def organisations(tmp_path_factory):
    orgs = identities(tmp_path_factory.mktemp("organisations"), 3)
    return orgs, federated(orgs)


def address_of(identity: Identity) -> tuple[str, int]:
    host, _, port = identity.member.endpoint.rpartition(":")
    return host, int(port)


def test_silent_connections_displace_each_other_and_no_member(
    organisations, exit_stack, monkeypatch
):
    """A bounded number of 240 connections that send no data stays open."""
    monkeypatch.setattr(listener, "_MAX_PENDING", 100)
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 3600.0)  # they do not end by themselves
    orgs, federation = organisations
    server = exit_stack.enter_context(Https(federation, orgs[0]))
    server.serve(answering())
    descriptors_before = num_descriptors()
    strangers = [
        exit_stack.enter_context(socket.create_connection(address_of(orgs[0]))) for _ in range(240)
    ]
    wait_for(lambda: len(server._listener._pending()) == 100)
    client = exit_stack.enter_context(Https(federation, orgs[1]))
    assert wait_for(lambda: ask(client, 0, "hello", 5.0)) == [b"heard hello"]
    assert len(server._listener._pending()) <= 100
    assert num_descriptors() - descriptors_before - len(strangers) < 140


def num_descriptors() -> int:
    return len([*Path("/dev/fd").iterdir()])


def test_a_member_is_linked_during_a_flood_of_handshakes(organisations, exit_stack):
    """A client begins valid handshakes and disconnects, again and again until the link is open."""
    orgs, federation = organisations
    server = exit_stack.enter_context(Https(federation, orgs[0]))
    server.serve(answering())
    client = None
    count = 0

    def flood_once_and_ask() -> list[bytes]:
        nonlocal client, count
        with socket.create_connection(address_of(orgs[0])) as stranger:
            stranger.sendall(client_hello(orgs[2], federation))
        count += 1
        if count == 50:
            client = exit_stack.enter_context(Https(federation, orgs[1]))
        return ask(client, 0, "hello", 1.0) if client else []

    while not (answers := flood_once_and_ask()) and count < 10_000:
        pass
    assert answers == [b"heard hello"]


def test_the_listener_survives_a_lack_of_file_descriptors(organisations, exit_stack, caplog):
    """Connections are refused with a log message. A member is linked afterwards."""
    orgs, federation = organisations
    server = exit_stack.enter_context(Https(federation, orgs[0]))
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
    client = exit_stack.enter_context(Https(federation, orgs[1]))
    assert wait_for(lambda: ask(client, 0, "hello", 5.0)) == [b"heard hello"]


def test_the_links_of_a_member_are_limited(organisations, exit_stack):
    orgs, federation = organisations
    server = exit_stack.enter_context(Https(federation, orgs[0]))
    client = exit_stack.enter_context(Https(federation, orgs[1]))
    server.serve(answering())
    links = [
        exit_stack.enter_context(raw.connect(orgs[2], federation, 0))
        for _ in range(listener.MAX_CONNECTIONS + 4)
    ]
    codes = [raw.exchange(link, raw.get(raw.STATE))[0] for link in links]
    assert set(codes) == {200}
    members = federation.members.values()
    wait_for(lambda: server._listener.connections(members)["org-2"] <= listener.MAX_CONNECTIONS)
    codes = [raw.exchange(link, raw.get(raw.STATE))[0] for link in links]
    assert codes == [0] * 4 + [200] * listener.MAX_CONNECTIONS  # the newest remain
    assert wait_for(lambda: ask(client, 0, "hello", 5.0)) == [b"heard hello"]


LONG = "a" * 2**14
BAD_REQUESTS = {
    "HTTP/0.9": (b"GET /v1/x\r\n\r\n", 400),
    "HTTP/1.0": (b"GET /v1/x HTTP/1.0\r\nHost: x\r\n\r\n", 405),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 405),
    "fedcb2o 0.2": (bytes.fromhex("1d004109f1") + bytes(28), 400),
    "another method": (b"POST /v1/x HTTP/1.1\r\nHost: x\r\n\r\n", 405),
    "a tunnel": (b"CONNECT other:443 HTTP/1.1\r\nHost: x\r\n\r\n", 405),
    "an absolute target": (raw.get("https://other/v1/x"), 404),
    "an encoded target": (raw.get("/v1/%2e%2e/keys"), 404),
    "a long target": (raw.get("/v1/" + "a" * 600), 404),
    "no host": (b"GET /v1/x HTTP/1.1\r\n\r\n", 400),
    "a long header": (raw.get("/v1/x", A=LONG), 431),
    "many headers": (raw.get("/v1/x", **{f"a{k}": "b" for k in range(4000)}), 431),
    "a header twice": (
        b"GET /v1/x HTTP/1.1\r\nHost: x\r\nRange: bytes=0-1\r\nRange: bytes=2-3\r\n\r\n", 400
    ),
    "two lengths": (
        b"GET /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400
    ),
    "a length and chunks": (
        b"GET /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501
    ),
    "chunks": (
        b"PUT /v1/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", 501
    ),
    "a body": (raw.get("/v1/x", Content_Length="5") + b"hello", 413),
    "a long length": (raw.get("/v1/x", Content_Length="9" * 300), 400),
    "a negative length": (raw.get("/v1/x", Content_Length="-1"), 400),
    "an upgrade": (raw.get("/v1/x", Upgrade="h2c", Connection="Upgrade"), 501),
    "two requests at once": (raw.get("/v1/x") * 2, 400),
    "a folded header": (b"GET /v1/x HTTP/1.1\r\n Host: x\r\n\r\n", 400),
    "bare line feeds in a header": (b"GET /v1/x HTTP/1.1\r\nHost: x\nA: \x00\r\n\r\n", 400),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_request_that_no_honest_client_sends_ends_its_connection(name, organisations, exit_stack):
    """A proxy in front and this node must never see different requests in the same bytes."""
    data, code = BAD_REQUESTS[name]
    orgs, federation = organisations
    server = exit_stack.enter_context(Https(federation, orgs[0]))
    arrived = []
    server.serve(lambda request, reply: arrived.append(request))
    with raw.connect(orgs[2], federation, 0) as link:
        status, headers, body = raw.exchange(link, data)
        assert status == code, body
        assert headers["content-type"] == "application/problem+json"
        assert b'"status": %d' % code in body
        assert raw.read_answer(link)[0] == 0  # closed
    assert arrived == []


def test_a_refusal_arrives_while_the_remote_still_sends(organisations, exit_stack):
    """A socket closed with unread bytes is reset, and the reason of the refusal would be lost."""
    orgs, federation = organisations
    server = exit_stack.enter_context(Https(federation, orgs[0]))
    others = exit_stack.enter_context(Https(federated(orgs[:2]), orgs[1]))
    for _ in range(20):
        with raw.connect(orgs[2], federation, 1) as link:
            link.sendall(raw.get(raw.STATE))
            with pytest.raises(ssl.SSLError, match=r"(?i)unknown.ca"):
                link.recv(1)
        with raw.connect(orgs[2], federation, 0) as link:
            link.sendall(raw.get("/v1/x", Content_Length="9000") + bytes(9000))
            assert raw.read_answer(link)[0] == 413
    wait_for(lambda: not server._listener._pending() and not others._listener._pending())


def test_a_refused_remote_that_sends_on_is_reset(organisations, exit_stack):
    orgs, federation = organisations
    exit_stack.enter_context(Https(federation, orgs[0]))
    with raw.connect(orgs[2], federation, 0) as link:
        assert raw.exchange(link, raw.get("/v1/%"))[0] == 404
        with pytest.raises((ssl.SSLError, ConnectionError)):
            link.sendall(bytes(2**25))


def test_ranges_reach_the_handler_as_they_are_signed(organisations, exit_stack):
    """A range that this protocol has not is refused by the form of the request, not here."""
    orgs, federation = organisations
    server = exit_stack.enter_context(Https(federation, orgs[0]))
    arrived = []
    server.serve(lambda request, reply: arrived.append(request))
    bombs = ["bytes=0-1,1-2", "bytes=" + "0-," * 100, "bytes=-5", "lines=0-1"]
    with raw.connect(orgs[2], federation, 0) as link:
        for value in bombs:
            status, headers, _ = raw.exchange(link, raw.get("/v1/x", Range=value))
            assert (status, headers["content-type"]) == (403, "application/problem+json")
    expected = [f"GET /v1/x\nRange: {value}".encode() for value in bombs]
    assert arrived == expected


def test_connections_that_strangers_reset_are_forgotten(organisations, exit_stack, monkeypatch):
    """A connection that is reset as TLS begins once stayed in the table, and hung the listener."""
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 0.3)
    orgs, federation = organisations
    server = exit_stack.enter_context(Https(federation, orgs[0]))
    server.serve(answering())
    for k in range(200):
        with socket.create_connection(address_of(orgs[0])) as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            time.sleep(0.002 * (k % 2))
    wait_for(lambda: not server._listener._pending())
    monkeypatch.undo()
    client = exit_stack.enter_context(Https(federation, orgs[1]))
    assert wait_for(lambda: ask(client, 0, "hello", 5.0)) == [b"heard hello"]


@pytest.mark.parametrize("is_member", [True, False])
def test_slow_headers_end_with_the_time_for_the_first_request(
    is_member, organisations, exit_stack, monkeypatch
):
    """TLS and the first request have one time limit, which no further byte prolongs."""
    clock = Clock()
    monkeypatch.setattr(listener, "time", clock)
    orgs, federation = organisations
    server = exit_stack.enter_context(Https(federation, orgs[0]))
    if is_member:
        link = exit_stack.enter_context(raw.connect(orgs[2], federation, 0))
    else:
        link = exit_stack.enter_context(socket.create_connection(address_of(orgs[0])))
    (connection,) = wait_for(lambda: server._listener._pending())
    assert connection.end == listener.HANDSHAKE_SECONDS
    slow = raw.get("/v1/x", A="slow") if is_member else client_hello(orgs[2], federation)
    for k in range(8):
        clock.now = k / 8 * connection.end
        link.sendall(slow[k : k + 1])
        time.sleep(0.01)
        assert server._listener._pending() == [connection]
    clock.now = connection.end
    assert raw.read_answer(link) == (0, {}, b"")


def client_hello(identity: Identity, federation: Federation) -> bytes:
    """Return the first bytes of a connection of a member."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = tls_module.client_context(identity, federation.members[0])
    tls = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def test_a_silent_member_is_disconnected_between_requests(organisations, exit_stack, monkeypatch):
    monkeypatch.setattr(listener, "IDLE_SECONDS", 0.5)
    orgs, federation = organisations
    exit_stack.enter_context(Https(federation, orgs[0]))
    link = exit_stack.enter_context(raw.connect(orgs[2], federation, 0))
    assert raw.exchange(link, raw.get(raw.STATE))[0] == 200
    link.sendall(b"GET /v1/")
    assert raw.read_answer(link) == (0, {}, b"")


def test_tls_is_version_13_without_early_data_or_renegotiation(organisations, exit_stack):
    orgs, federation = organisations
    exit_stack.enter_context(Https(federation, orgs[0]))
    with raw.connect(orgs[2], federation, 0) as link:
        assert link.version() == "TLSv1.3"
        assert raw.exchange(link, raw.get(raw.STATE))[0] == 200
        # Without a ticket there is no session to resume, and no early data.
        assert link.session is None or not link.session.has_ticket
        assert link.compression() is None
    older = raw.context(orgs[2], raw.roots_of(federation), serves=False)
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection(address_of(orgs[0])) as plain,
        pytest.raises(ssl.SSLError, match=r"(?i)version"),
    ):
        older.wrap_socket(plain)


def test_a_node_of_the_former_release_is_named_once(organisations, exit_stack, caplog):
    """Its first message is answered with the line that its operator needs."""
    orgs, federation = organisations
    exit_stack.enter_context(Https(federation, orgs[0]))
    for _ in range(3):
        with raw.connect(orgs[2], federation, 0) as link:
            _, _, body = raw.exchange(link, bytes.fromhex("1d004109f1") + bytes(28))
            assert b"0.3 speaks HTTPS, and all members must update" in body
    lines = [record.message for record in caplog.records]
    assert lines == [f"org-2 runs {listener.FORMER_RELEASE}"]


def test_slow_readers_delay_no_other_member(organisations, exit_stack, monkeypatch):
    """Two members ask for long answers that they never read; one thread serves all members."""
    orgs, federation = organisations
    server = exit_stack.enter_context(Https(federation, orgs[0]))
    long = Answer(AnswerStatus.OK, bytes(2**24))
    server.serve(lambda request, reply: reply(long if b"/v1/long" in request else ANSWER))
    num_threads = threading.active_count()
    for member in orgs[1:]:
        for _ in range(listener.MAX_CONNECTIONS):
            link = exit_stack.enter_context(raw.connect(member, federation, 0))
            link.sendall(raw.get("/v1/long"))
    connections = server._listener._connections
    waiting = lambda: [one for one in [*connections.values()] if one.unsent]  # noqa: E731
    wait_for(lambda: len(waiting()) == 2 * listener.MAX_CONNECTIONS)
    for _ in range(5):
        # Its newest connection replaces its oldest one.
        with raw.connect(orgs[2], federation, 0) as link:
            assert raw.exchange(link, raw.get("/v1/short"))[::2] == (200, b"answer")
    assert threading.active_count() == num_threads
    clock = Clock()
    clock.now = time.monotonic() + listener.SEND_SECONDS
    monkeypatch.setattr(listener, "time", clock)
    wait_for(lambda: not waiting())


def test_pieces_of_answers_are_sent_in_turn_within_the_limits(monkeypatch):
    """The remotes of twelve connections read: two pieces of each member, and five of all."""
    one = listener.Listener.__new__(listener.Listener)
    one.uploads, one.per_peer, sent = 5, 2, []
    monkeypatch.setattr(one, "_continue_answer", sent.append)
    readers = [
        SimpleNamespace(end=k // 3, member=SimpleNamespace(root=f"{k % 3}"), is_closed=k == 0)
        for k in range(12)
    ]
    one._continue_answers(reversed(readers))
    assert [(reader.end, reader.member.root) for reader in sent] == [
        (0, "2"), (0, "1"), (1, "2"), (1, "1"), (1, "0")
    ]  # fmt: skip


def test_pauses_between_dials_of_an_unreachable_member_grow(organisations, exit_stack, monkeypatch):
    orgs, federation = organisations
    client = exit_stack.enter_context(Https(federation, orgs[0]))
    began = time.monotonic()
    wait_for(lambda: client._dialers[2].attempts >= 6)
    assert time.monotonic() - began > 2.0  # with constant pauses, six attempts take 1.2 s


def test_a_link_of_a_member_ends_the_pause_before_the_next_dial(
    organisations, exit_stack, monkeypatch
):
    monkeypatch.setattr(dialer, "_PAUSE_GROWTH", 1e6)
    monkeypatch.setattr(dialer, "_LONGEST_PAUSE", 3600.0)
    orgs, federation = organisations
    client = exit_stack.enter_context(Https(federation, orgs[0]))
    wait_for(lambda: client._dialers[2].attempts)
    server = exit_stack.enter_context(Https(federation, orgs[2]))
    server.serve(answering())
    assert wait_for(lambda: ask(client, 2, "hello", 5.0)) == [b"heard hello"]


def test_requests_beyond_the_pace_wait():
    pace = pace_module.Pace(burst=5, per_second=400, clock=lambda: 0.0)
    delays = [pace.delay() for _ in range(45)]
    assert delays[:5] == [0] * 5
    assert delays[5] == pytest.approx(1 / 400)
    assert delays[-1] == pytest.approx(0.1)  # 40 requests


def test_a_member_beyond_its_pace_delays_itself_only(organisations, exit_stack, monkeypatch):
    monkeypatch.setattr(pace_module, "REQUEST_BURST", 5)
    monkeypatch.setattr(pace_module, "REQUESTS_PER_SECOND", 20)
    orgs, federation = organisations
    server = exit_stack.enter_context(Https(federation, orgs[0]))
    server.serve(answering())
    start = time.monotonic()
    with raw.connect(orgs[2], federation, 0) as link:
        for _ in range(15):
            assert raw.exchange(link, raw.get(raw.STATE))[0] == 200
    assert time.monotonic() - start > 0.4  # ten requests wait


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
        one = listener._Connection(connection, "127.0.0.1", RequestParser(0))
        with pytest.raises(ConnectionResetError):
            one.advance_handshake(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    (descriptor,) = set(descriptors)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    gc.collect()  # a socket that is not closed would be a warning, which is an error

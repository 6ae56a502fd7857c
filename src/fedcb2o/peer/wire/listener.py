"""Listener for HTTPS requests: connections of strangers and members within bounds.

One thread accepts connections, completes their handshakes and reads their requests with h11. A
connection is pending until its first whole request. If too many are pending, the oldest one of the
address with most of them is closed, so that silent connections displace each other and a member's
request, which takes milliseconds, is read. Requests are `GET` or `PUT` in HTTP/1.1, one at a time,
with a header of at most 16 KiB and a length.
"""

import errno
import heapq
import itertools
import logging
import math
import re
import resource
import select
import selectors
import socket
import ssl
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import h11

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.peer.membership.identity import Identity, Member
from fedcb2o.peer.wire.http_requests import (
    MAX_HEADER_BYTES,
    HttpRequest,
    RefusedError,
    RequestParser,
    problem,
)
from fedcb2o.peer.wire.pace import Pace
from fedcb2o.peer.wire.protocol import BytesLike, Responder
from fedcb2o.peer.wire.tls import close_wrapped, remote_member, server_context

_LOGGER = logging.getLogger(__name__)
_MAX_PENDING = 256  # connections without a whole request of a member
MAX_CONNECTIONS = 16  # connections of one member; the newest remain
HANDSHAKE_SECONDS = 10.0  # time for TLS and the first request together
IDLE_SECONDS = 60.0  # time for each further request, counted from the answer before it
_SEND_SECONDS = 120.0  # time to send each MiB of an answer: with seven others before it, at 70 kB/s
_PIECE_BYTES = 2**20
_RECORD_BYTES = 2**14
_RECORDS_PER_TURN = 16
_DISCARDED_BYTES = 2**16
_MIN_DESCRIPTORS = 4096
_BACKLOG = 128
_ACCEPTS_PER_TURN = 32
_POLL_SECONDS = 0.25
_DESCRIPTORS_SECONDS = 0.1  # pause after a connection that finds no free descriptor
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER, on, with 0 seconds: closing resets the connection
_REFUSED = "the request is malformed, unsigned, repeated, too frequent, or for another member"
_NO_DESCRIPTOR = (
    "connections wait, because this process has too many open files: raise the limit of its "
    "machine (ulimit -n)"
)
_FORMER_PROTOCOL = re.compile(rb"..\x41\x09", re.DOTALL)  # first bytes of a link of fedcb2o 0.2
FORMER_RELEASE = "fedcb2o 0.2 or older: 0.3 speaks HTTPS, and all members must update"
_LISTEN_ERRORS = {
    errno.EADDRINUSE: "the port is in use; is another peer running? Stop it first",
    errno.EADDRNOTAVAIL: "no address of this machine; if others reach it by the address of another "
    "machine, say what to bind here: --listen 0.0.0.0:PORT",
    errno.EACCES: "permission denied; take a port above 1023",
}


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files, as far as the machine allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MIN_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_MIN_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_listening_socket(address: str) -> socket.socket:
    """Listen at "HOST:PORT" of this machine."""
    host, _, port = address.rpartition(":")
    try:
        if not host or not 0 < int(port) < 2**16:
            raise ValueError
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (ValueError, socket.gaierror) as error:
        raise ConfigError(
            f"cannot listen on {address!r}: it must be HOST:PORT of this machine, such as "
            "0.0.0.0:7447"
        ) from error
    family, _, _, _, place = infos[0]
    try:
        return socket.create_server(place[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = _LISTEN_ERRORS.get(error.errno or 0, error.strerror or error)
        raise RunError(f"cannot listen on {address}: {reason}") from error


@dataclass(eq=False)
class _Connection:
    """An accepted connection, used by one thread at a time.

    `end` is the monotonic time at which it is closed. `member` is that of its first request. After
    a refusal, at most `surplus` bytes may still arrive.
    """

    sock: socket.socket
    address: str
    end: float
    parser: RequestParser
    is_open: bool = False
    certificate: tuple[Member, float] | None = None
    member: Member | None = None
    surplus: int | None = None

    def __post_init__(self) -> None:
        self.sock.setblocking(False)
        self.descriptor = self.sock.fileno()

    def advance_handshake(self, context: ssl.SSLContext) -> ssl.SSLSocket | None:
        """Continue the handshake with the bytes that have arrived; return the end of TLS."""
        # Before its first bytes a connection costs no memory of OpenSSL.
        if not isinstance(self.sock, ssl.SSLSocket):
            self.sock = start_tls(self.sock, context)
        try:
            self.sock.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        return self.sock

    def read(self) -> bytes:
        """Decrypt bytes that have arrived, up to a bound; ConnectionError at the end."""
        try:
            content = self.sock.recv(_RECORD_BYTES)
        except ssl.SSLWantReadError:
            return b""
        if not content:
            raise ConnectionError("the remote closed the connection")
        return content

    def send(
        self, code: int, headers: Sequence[tuple[str, str]], body: BytesLike, seconds: float
    ) -> bool:
        """Send an answer; each MiB may take `seconds`. Return True if a request may follow."""
        view = memoryview(body)
        head = self.parser.answer_head(code, headers, len(view))
        # A short answer is one record of TLS.
        first = view[: max(0, _RECORD_BYTES - len(head))]
        self.write(b"".join((head, first)), seconds)
        for start in range(len(first), len(view), _PIECE_BYTES):
            self.write(view[start : start + _PIECE_BYTES], seconds)
        return self.parser.end_answer(view)

    def write(self, data: BytesLike, seconds: float) -> None:
        """Encrypt and send bytes."""
        end = time.monotonic() + seconds
        pending = memoryview(data)
        can_write = select.poll()
        can_write.register(self.sock, select.POLLOUT)
        while pending:
            try:
                # The whole piece at once: OpenSSL makes its records without Python's lock.
                pending = pending[self.sock.send(pending) :]
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                # OpenSSL wants the same piece again, so `pending` stays.
                left = end - time.monotonic()
                if left <= 0 or not can_write.poll(1000 * left):
                    raise TimeoutError("the remote does not read") from None

    def shut_down(self, how: int = socket.SHUT_RDWR) -> None:
        """Send nothing more; OSError if the remote is gone."""
        # SSLSocket's own method lets a thread that reads go on without TLS.
        socket.socket.shutdown(self.sock, how)

    def reset(self) -> None:
        """Close the connection without keeping its address in use."""
        with suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.sock.close()


def start_tls(connection: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
    """Return the TLS end of an accepted connection, without waiting for its handshake."""
    with suppress(OSError):
        # A small answer must not wait for the acknowledgement of the one before it.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        # A connection that has ended fails here, before OpenSSL sees it.
        connection.getpeername()
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
    except OSError as error:
        close_wrapped(error)
        raise


@dataclass(eq=False)
class Listener:
    """Listener of one agent, or of a relay.

    `on_request` is called in the listener's thread with each whole request of a member, and a
    function that answers it once, from any thread, by the arguments of `_respond`. It must return
    at once. A request whose function is dropped gets the status 403. A body has at most `max_body`
    bytes.

    A remote must show a member's certificate, if `has_clients`. `authenticate` returns the member
    that signed a request; without it, the certificate alone identifies the remote. `on_presence` is
    called with the name of a member at its first connection, and after its last one. `paces` has
    those of some members by their roots.
    """

    listening: socket.socket
    identity: Identity
    members: Sequence[Member]
    on_request: Callable[[HttpRequest, Responder], None]
    _: KW_ONLY
    max_body: int = 0
    max_connections: int = MAX_CONNECTIONS
    authenticate: Callable[[HttpRequest], Member | None] | None = None
    has_clients: bool = True
    on_presence: Callable[[str, bool], None] = lambda name, is_connected: None
    paces: dict[str, Pace] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._context = server_context(self.identity, self.members, has_clients=self.has_clients)
        self._selector = selectors.DefaultSelector()
        # By descriptor, those that end first come first.
        self._pending: dict[int, _Connection] = {}
        self._idle: dict[int, _Connection] = {}
        self._delayed: list[tuple[float, int, _Connection]] = []
        self._order = itertools.count()
        self._by_root: dict[str, list[_Connection]] = {}
        self._answered = deque[_Connection]()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._logged = set[str]()
        self._wake_out, self._wake_in = socket.socketpair()
        for one in (self.listening, self._wake_out, self._wake_in):
            one.setblocking(False)
        self._selector.register(self.listening, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="fedcb2o-listen", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True while connections are accepted."""
        return self._thread.is_alive() and not self._closed.is_set()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._closed.set()
        self._wake()
        self._thread.join(2)

    def connections(self, members: Iterable[Member]) -> Counter[str]:
        """Return the number of connections of some members by name."""
        with self._lock:
            return Counter({one.name: len(self._by_root.get(one.root, ())) for one in members})

    def _wake(self) -> None:
        with suppress(OSError):  # closed, or full: the thread is awake
            self._wake_in.send(b"\0")

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._turn()
            except Exception:
                # The listener must go on.
                self._log_once("a connection could not be served", logging.ERROR, exc_info=True)
                time.sleep(_DESCRIPTORS_SECONDS)
        waiting = (*self._pending.values(), *self._idle.values(), *self._answered)
        for connection in (*waiting, *(one for _, _, one in self._delayed)):
            self._drop(connection)
        with self._lock:
            busy = [one for several in self._by_root.values() for one in several]
        for connection in busy:
            with suppress(OSError):
                connection.shut_down()
        self._selector.close()
        self.listening.close()
        self._wake_out.close()
        self._wake_in.close()

    def _log_once(self, text: str, level: int = logging.WARNING, **options: Any) -> None:
        if text not in self._logged and len(self._logged) < _MAX_PENDING:
            self._logged.add(text)
            _LOGGER.log(level, "%s", text, **options)

    def _turn(self) -> None:
        """Handle what arrived, connections whose answers were sent, and waiting requests."""
        pause = _POLL_SECONDS
        if self._delayed:
            pause = min(pause, max(0.0, self._delayed[0][0] - time.monotonic()))
        for key, _ in self._selector.select(pause):
            if key.fileobj is self.listening:
                self._accept()
            elif key.fileobj is self._wake_out:
                with suppress(BlockingIOError):
                    self._wake_out.recv(2**12)
            else:
                # An earlier event of this turn may have closed this connection.
                connection = self._pending.get(key.fd) or self._idle.get(key.fd)
                if connection is not None:
                    self._advance(connection)
        while self._answered:
            self._resume(self._answered.popleft())
        while self._delayed and self._delayed[0][0] <= time.monotonic():
            self._hand_over(heapq.heappop(self._delayed)[2])
        now = time.monotonic()
        for table in (self._pending, self._idle):
            while table and now >= next(iter(table.values())).end:
                self._drop(next(iter(table.values())))

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                raw, address = self.listening.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._log_once(_NO_DESCRIPTOR)
                    # Others wait in the kernel's backlog.
                    if self._pending:
                        self._drop(self._oldest_of_most())
                    time.sleep(_DESCRIPTORS_SECONDS)
                return  # otherwise: none waits, or it has ended already
            while len(self._pending) >= _MAX_PENDING:
                self._drop(self._oldest_of_most())
            end = time.monotonic() + HANDSHAKE_SECONDS
            parser = RequestParser(self.max_body)
            self._wait(_Connection(raw, str(address[0]), end, parser), self._pending)

    def _wait(self, connection: _Connection, table: dict[int, _Connection]) -> None:
        table[connection.descriptor] = connection
        self._selector.register(connection.descriptor, selectors.EVENT_READ)

    def _oldest_of_most(self) -> _Connection:
        """Return the oldest pending connection of the address with most of them."""
        counts = Counter(one.address for one in self._pending.values())
        busiest = max(counts, key=lambda address: counts[address])
        return next(one for one in self._pending.values() if one.address == busiest)

    def _advance(self, connection: _Connection) -> None:
        """Continue a handshake or a request with the bytes that have arrived."""
        if connection.surplus is not None:
            self._discard(connection, connection.surplus)
            return
        try:
            if not connection.is_open:
                tls = connection.advance_handshake(self._context)
                if tls is None:
                    return
                connection.is_open = True
                if self.has_clients:
                    member, expires = remote_member(tls, self.members)
                    connection.certificate = member, expires.timestamp()
            self._read_request(connection)
        except RefusedError as error:
            # Without waiting for the remote, and as far as it reads the error at once.
            with suppress(OSError, h11.LocalProtocolError):
                content = problem(error.code, str(error))
                connection.send(error.code, [("connection", "close")], content, 0.0)
            self._end(connection)
        except ssl.SSLError:
            # Unless the remote is gone, it was sent an alert.
            self._end(connection)
        except (OSError, ValueError):
            self._drop(connection)

    def _read_request(self, connection: _Connection) -> None:
        for _ in range(_RECORDS_PER_TURN):
            content = connection.read()
            if not content:
                return
            if not connection.parser.request.method and _FORMER_PROTOCOL.match(content):
                member = connection.certificate
                name = member[0].name if member else connection.address
                self._log_once(f"{name} runs {FORMER_RELEASE}")
                raise RefusedError(400, FORMER_RELEASE)
            if connection.parser.receive(content, partial(self._identify, connection)):
                self._forget(connection)
                self._dispatch(connection)
                return
        # The rest is in OpenSSL's memory, of which the selector does not know.
        self._forget(connection)
        self._answered.append(connection)

    def _identify(self, connection: _Connection, request: HttpRequest) -> Member:
        """Find the member of a request by its head, before its body is read."""
        signer: Member | None = None
        expires = math.inf
        if connection.certificate is not None:
            signer, expires = connection.certificate
        if self.authenticate is not None:
            signer = self.authenticate(request)
        members = [connection.member, connection.certificate and connection.certificate[0]]
        if signer is None or any(one and one.root != signer.root for one in members):
            raise RefusedError(401, "no signature of this member")
        if time.time() >= expires:
            raise ConnectionError("the certificate has expired")
        return signer

    def _dispatch(self, connection: _Connection) -> None:
        """Hand a request over, now or when the pace of its member allows it."""
        member = connection.parser.request.member
        assert member is not None
        if connection.member is None:
            self._admit(connection, member)
        if delay := self.paces.setdefault(member.root, Pace()).delay():
            due = time.monotonic() + delay
            heapq.heappush(self._delayed, (due, next(self._order), connection))
            return
        self._hand_over(connection)

    def _admit(self, connection: _Connection, member: Member) -> None:
        """Count a connection as that of a member; its newest ones replace older ones."""
        connection.member = member
        with self._lock:
            several = self._by_root.setdefault(member.root, [])
            several.append(connection)
            surplus = several[: -self.max_connections]
            is_first = len(several) == 1
        if is_first:
            self.on_presence(member.name, True)
        for old in surplus:
            # Another thread may be sending an answer on it.
            with suppress(OSError):
                old.shut_down()

    def _hand_over(self, connection: _Connection) -> None:
        respond = Responder(partial(self._respond, connection), 403, _REFUSED)
        try:
            self.on_request(connection.parser.request, respond)
        except Exception:
            _LOGGER.exception("a request could not be handled")
            respond(500, "the request could not be handled")

    def _respond(
        self,
        connection: _Connection,
        code: int,
        content: BytesLike | str,
        headers: Sequence[tuple[str, str]] = (),
        seconds: float = _SEND_SECONDS,
    ) -> None:
        """Answer a request, in any thread; a text describes an error, which does not wait."""
        if isinstance(content, str):
            content, seconds = problem(code, content), 0.0
        is_usable = False
        # Otherwise the remote is gone, reads too slowly, or wants no further request.
        with suppress(OSError, ValueError, h11.LocalProtocolError):
            is_usable = connection.send(code, headers, content, seconds)
        if self._closed.is_set() or not is_usable:
            self._release(connection)
        else:
            self._answered.append(connection)
            self._wake()

    def _end(self, connection: _Connection) -> None:
        """Send nothing more, and close a connection after the remote has closed it.

        A socket that is closed with unread bytes is reset, so that a remote which is still sending
        its request may never see why it is refused.
        """
        self._forget(connection)
        try:
            connection.shut_down(socket.SHUT_WR)
        except OSError:  # the remote is gone
            self._release(connection)
            return
        connection.surplus = self.max_body + MAX_HEADER_BYTES
        connection.end = time.monotonic() + HANDSHAKE_SECONDS
        self._wait(connection, self._pending)

    def _discard(self, connection: _Connection, surplus: int) -> None:
        """Read the rest of what a refused remote sends, without decrypting it."""
        size = 0
        with suppress(OSError):
            size = len(socket.socket.recv(connection.sock, _DISCARDED_BYTES))
        connection.surplus = surplus - size
        if not size or connection.surplus < 0:
            self._drop(connection)

    def _resume(self, connection: _Connection) -> None:
        """Wait for the next request of a connection, or for the rest of one."""
        if connection.sock.fileno() < 0:
            return
        table = self._pending
        if connection.member is not None:
            connection.end = time.monotonic() + IDLE_SECONDS
            table = self._idle
        self._wait(connection, table)
        self._advance(connection)

    def _drop(self, connection: _Connection) -> None:
        self._forget(connection)
        self._release(connection)

    def _forget(self, connection: _Connection) -> None:
        """Wait for nothing on a connection."""
        # Its socket may be closed already, and then has no descriptor any more.
        for table in (self._pending, self._idle):
            if table.get(connection.descriptor) is connection:
                del table[connection.descriptor]
                self._selector.unregister(connection.descriptor)

    def _release(self, connection: _Connection) -> None:
        """Close a connection that nothing waits for."""
        if connection.member is None:
            connection.reset()
            return
        several = self._by_root[connection.member.root]
        with self._lock:
            several.remove(connection)
            is_last = not several
        connection.sock.close()
        if is_last:
            self.on_presence(connection.member.name, False)

"""Listener for HTTPS requests: connections of strangers and members within bounds.

One thread accepts connections, completes their handshakes, reads their requests with h11 and sends
the answers. A connection is pending until its first whole request. If too many are pending, the
oldest one of the address with most of them is closed, so that silent connections displace each
other and a member's request, which takes milliseconds, is read. Requests are `GET` or `PUT` in
HTTP/1.1, one at a time, with a header of at most 16 KiB and a length.
"""

import errno
import logging
import math
import re
import resource
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
SEND_SECONDS = 120.0  # time to send each MiB of an answer: with seven others before it, at 70 kB/s
_PIECE_BYTES = 2**20
_SHORT_BYTES = 2**16
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
    # One socket, as of most servers: --listen names another address of the machine.
    family, _, _, _, place = infos[0]
    try:
        return socket.create_server(place[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = _LISTEN_ERRORS.get(error.errno or 0, error.strerror or error)
        raise RunError(f"cannot listen on {address}: {reason}") from error


@dataclass(eq=False)
class _Connection:
    """An accepted connection, which the listener's thread alone uses.

    The selector waits for `event` until the monotonic time `end`; 0 for none, while a request waits
    for its pace or its answer. `member` is that of the first request. `is_asking` is True from a
    request to its answer, and `unsent` the rest of the answer. After a refusal, at most `surplus`
    bytes may still arrive.
    """

    sock: socket.socket
    address: str
    parser: RequestParser
    end: float = math.inf
    event: int = 0
    is_open: bool = False
    is_closed: bool = False
    certificate: tuple[Member, float] | None = None
    member: Member | None = None
    is_asking: bool = False
    may_ask_again: bool = False
    surplus: int | None = None
    unsent: deque[memoryview] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.sock.setblocking(False)
        self.descriptor = self.sock.fileno()
        with suppress(OSError):
            # A small answer must not wait for the acknowledgement of the one before it.
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def advance_handshake(self, context: ssl.SSLContext) -> ssl.SSLSocket | None:
        """Continue the handshake with the bytes that have arrived; return the end of TLS."""
        # Before its first bytes a connection costs no memory of OpenSSL.
        if not isinstance(self.sock, ssl.SSLSocket):
            # A connection that has ended fails here, before OpenSSL sees it.
            self.sock.getpeername()
            try:
                self.sock = context.wrap_socket(
                    self.sock, server_side=True, do_handshake_on_connect=False
                )
            except OSError as error:
                close_wrapped(error)
                raise
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

    def start_answer(self, code: int, headers: Sequence[tuple[str, str]], body: BytesLike) -> None:
        """Put an answer into pieces to send."""
        view = memoryview(body)
        head, self.may_ask_again = self.parser.answer(code, headers, view)
        # A short answer is sent at once.
        first = view[:_SHORT_BYTES]
        self.unsent.append(memoryview(b"".join((head, first))))
        starts = range(len(first), len(view), _PIECE_BYTES)
        self.unsent.extend(view[start : start + _PIECE_BYTES] for start in starts)
        self.is_asking = False

    def send_piece(self) -> bool:
        """Encrypt and send one piece, as far as the remote reads; return True at its end."""
        piece = self.unsent[0]
        # OpenSSL makes the records of a whole piece without Python's lock. If it has to wait, it
        # wants the same piece again.
        with suppress(ssl.SSLWantWriteError, ssl.SSLWantReadError):
            self.unsent[0] = piece = piece[self.sock.send(piece) :]
        if not piece:
            self.unsent.popleft()
        return not piece

    def reset(self) -> None:
        """Close the connection without keeping its address in use."""
        with suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.sock.close()


@dataclass(eq=False)
class Listener:
    """Listener of one agent, or of a relay.

    `on_request` is called in the listener's thread with each whole request of a member, and a
    function that answers it once, from any thread, by the arguments of `_respond`. It must return
    at once. A request whose function is dropped gets the status 403. A body has at most `max_body`
    bytes. Answers are sent on `uploads` connections at once, and on `per_peer` of one member, as
    far as the remotes read.

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
    uploads: int = 8
    per_peer: int = 4
    authenticate: Callable[[HttpRequest], Member | None] | None = None
    has_clients: bool = True
    on_presence: Callable[[str, bool], None] = lambda name, is_connected: None
    paces: dict[str, Pace] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._context = server_context(self.identity, self.members, has_clients=self.has_clients)
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}  # by descriptor, the oldest first
        self._by_root: dict[str, list[_Connection]] = {}
        # Answers of other threads: a connection, and the further arguments of `_respond`.
        self._answers = deque[tuple[_Connection, Any, Any, Any]]()
        self._next_look = 0.0  # monotonic time
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
        for connection in [*self._connections.values()]:
            self._drop(connection)
        self._selector.close()
        self.listening.close()
        self._wake_out.close()
        self._wake_in.close()

    def _log_once(self, text: str, level: int = logging.WARNING, **options: Any) -> None:
        # Texts have names and addresses, of which strangers have many.
        if text not in self._logged and len(self._logged) < _MAX_PENDING:
            self._logged.add(text)
            _LOGGER.log(level, "%s", text, **options)

    def _turn(self) -> None:
        """Handle what arrived, answers of other threads, and waiting requests."""
        readers = list[_Connection]()
        # Of the connections that wait for no event, some have a request that is handed over then.
        delayed = [one for one in self._connections.values() if not one.event]
        pause = min([_POLL_SECONDS, *(one.end - time.monotonic() for one in delayed)])
        for key, _ in self._selector.select(max(0.0, pause)):
            if key.fileobj is self.listening:
                self._accept()
            elif key.fileobj is self._wake_out:
                with suppress(BlockingIOError):
                    self._wake_out.recv(2**12)
            # An earlier event of this turn may have closed this connection.
            elif key.data.event == selectors.EVENT_WRITE:
                readers.append(key.data)
            elif key.data.event == selectors.EVENT_READ:
                self._advance(key.data)
        self._continue_answers(readers)
        while self._answers:
            self._start_answer(*self._answers.popleft())
        now = time.monotonic()
        for connection in delayed:
            if now >= connection.end and not connection.is_closed:
                self._hand_over(connection)
        # Not in each turn, of which a flood causes thousands a second.
        if now >= self._next_look:
            self._next_look = now + _POLL_SECONDS
            for connection in [one for one in self._connections.values() if now >= one.end]:
                if connection.event:
                    self._drop(connection)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                raw, address = self.listening.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._log_once(_NO_DESCRIPTOR)
                    # Others wait in the kernel's backlog.
                    if pending := self._pending():
                        self._drop(_oldest_of_most(pending))
                    time.sleep(_DESCRIPTORS_SECONDS)
                return  # otherwise: none waits, or it has ended already
            # A silent stranger has waited longest; a member needs milliseconds.
            if len(pending := self._pending()) >= _MAX_PENDING:
                self._drop(_oldest_of_most(pending))
            connection = _Connection(raw, str(address[0]), RequestParser(self.max_body))
            self._connections[connection.descriptor] = connection
            self._wait(connection, selectors.EVENT_READ, HANDSHAKE_SECONDS)

    def _pending(self) -> list[_Connection]:
        """Return the connections without a whole request of a member, the oldest first."""
        return [one for one in self._connections.values() if one.member is None]

    def _wait(self, connection: _Connection, event: int, seconds: float = math.inf) -> None:
        """Wait for an event of a connection, or for none."""
        connection.end = time.monotonic() + seconds
        former, connection.event = connection.event, event
        if event and not former:
            self._selector.register(connection.descriptor, event, connection)
        elif former and not event:
            self._selector.unregister(connection.descriptor)
        elif event != former:
            self._selector.modify(connection.descriptor, event, connection)

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
            # As far as the remote reads the error at once.
            with suppress(OSError, h11.LocalProtocolError):
                content = problem(error.code, str(error))
                connection.start_answer(error.code, [("connection", "close")], content)
                connection.send_piece()
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
                connection.is_asking = True
                self._dispatch(connection)
                return

    def _identify(self, connection: _Connection, request: HttpRequest) -> Member:
        """Find the member of a request by its head, before its body is read."""
        signer: Member | None = None
        expires = math.inf
        if connection.certificate is not None:
            signer, expires = connection.certificate
        if self.authenticate is not None:
            signer = self.authenticate(request)
        members = [connection.member, connection.certificate and connection.certificate[0]]
        # One connection is of one member, by certificate and by all signatures on it.
        if signer is None or any(one and one.root != signer.root for one in members):
            raise RefusedError(401, "no signature of this member")
        # TLS looks at the certificate at the start of a connection only.
        if time.time() >= expires:
            raise ConnectionError("the certificate has expired")
        return signer

    def _dispatch(self, connection: _Connection) -> None:
        """Hand a request over, now or when the pace of its member allows it."""
        member = connection.parser.request.member
        assert member is not None
        if connection.member is None:
            self._admit(connection, member)
        # A delay costs the listener nothing, while a refusal would be asked again at once.
        if delay := self.paces.setdefault(member.root, Pace()).delay():
            self._wait(connection, 0, delay)
        else:
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
            self._drop(old)

    def _hand_over(self, connection: _Connection) -> None:
        """Ask for the answer to a request, and wait for it unless it came at once."""
        respond = Responder(partial(self._respond, connection), 403, _REFUSED)
        try:
            self.on_request(connection.parser.request, respond)
        except Exception:
            _LOGGER.exception("a request could not be handled")
            respond(500, "the request could not be handled")
        del respond
        if connection.is_asking:
            self._wait(connection, 0)

    def _respond(
        self,
        connection: _Connection,
        code: int,
        content: BytesLike | str,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Answer a request, in any thread; a text describes an error."""
        if threading.get_ident() == self._thread.ident:
            self._start_answer(connection, code, content, headers)
        else:
            self._answers.append((connection, code, content, headers))
            self._wake()

    def _start_answer(
        self,
        connection: _Connection,
        code: int,
        content: BytesLike | str,
        headers: Sequence[tuple[str, str]],
    ) -> None:
        if connection.is_closed:
            return
        try:
            body = problem(code, content) if isinstance(content, str) else content
            connection.start_answer(code, headers, body)
        except (ValueError, h11.LocalProtocolError):  # the remote sent too much
            self._drop(connection)
        else:
            self._continue_answer(connection)

    def _continue_answers(self, readers: Iterable[_Connection]) -> None:
        """Send pieces to remotes that read, at first where the time is nearly over."""
        counts = Counter[str]()
        for connection in sorted(readers, key=lambda one: one.end):
            root = connection.member.root if connection.member else ""
            may_send = counts.total() < self.uploads and counts[root] < self.per_peer
            if may_send and not connection.is_closed:
                counts[root] += 1
                self._continue_answer(connection)

    def _continue_answer(self, connection: _Connection) -> None:
        try:
            is_sent = connection.send_piece()
        except OSError:  # the remote is gone
            self._drop(connection)
            return
        if connection.unsent:
            if is_sent or connection.event != selectors.EVENT_WRITE:
                self._wait(connection, selectors.EVENT_WRITE, SEND_SECONDS)
        elif connection.may_ask_again:
            self._wait(connection, selectors.EVENT_READ, IDLE_SECONDS)
        else:
            self._drop(connection)

    def _end(self, connection: _Connection) -> None:
        """Send nothing more, and close a connection after the remote has closed it.

        A socket that is closed with unread bytes is reset, so that a remote which is still sending
        its request may never see why it is refused.
        """
        try:
            # Below TLS, which would wait for the remote.
            socket.socket.shutdown(connection.sock, socket.SHUT_WR)
        except OSError:  # the remote is gone
            self._drop(connection)
            return
        connection.surplus = self.max_body + MAX_HEADER_BYTES
        self._wait(connection, selectors.EVENT_READ, HANDSHAKE_SECONDS)

    def _discard(self, connection: _Connection, surplus: int) -> None:
        """Read the rest of what a refused remote sends, without decrypting it."""
        size = 0
        with suppress(OSError):
            size = len(socket.socket.recv(connection.sock, _DISCARDED_BYTES))
        connection.surplus = surplus - size
        if not size or connection.surplus < 0:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        """Close a connection, which may be closed already."""
        if connection.is_closed:
            return
        connection.is_closed = True
        del self._connections[connection.descriptor]
        self._wait(connection, 0)
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


def _oldest_of_most(connections: Sequence[_Connection]) -> _Connection:
    """Return the oldest connection of the address with most of them."""
    counts = Counter(one.address for one in connections)
    busiest = max(counts, key=lambda address: counts[address])
    return next(one for one in connections if one.address == busiest)

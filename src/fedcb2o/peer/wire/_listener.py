"""Listener for the links of members: TLS handshakes of strangers within bounds.

One thread accepts connections and completes their handshakes. If too many are pending, the oldest
one of the address with most of them is closed, so that silent connections displace each other and a
member's handshake, which takes milliseconds, is completed.
"""

import errno
import logging
import os
import resource
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.peer.membership.identity import Identity, Member
from fedcb2o.peer.wire._link import HANDSHAKE_SECONDS, TlsStream
from fedcb2o.peer.wire._tls import remote_member, server_context

_MAX_PENDING = 256
"""Connections that have not shown a member's certificate."""
_MIN_DESCRIPTORS = 4096
_BACKLOG = 128
_ACCEPTS_PER_TURN = 32
_POLL_SECONDS = 0.25
_DESCRIPTORS_SECONDS = 0.1
"""Pause after a connection that finds no free descriptor."""
# Value of SO_LINGER: on, with 0 seconds. Closing the socket then resets its connection.
_RESET = struct.pack("ii", 1, 0)

OnLink = Callable[[TlsStream, Member, float], None]


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
        raise _listen_error(address, error) from error


def _listen_error(address: str, error: OSError) -> RunError:
    if error.errno == errno.EADDRINUSE:
        return RunError(
            f"cannot listen on {address}: the port is in use; is another peer running? "
            "Stop it first"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return RunError(
            f"cannot listen on {address}: no address of this machine; if others reach it by the "
            "address of another machine, say what to bind here: --listen 0.0.0.0:PORT"
        )
    if error.errno == errno.EACCES:
        return RunError(f"cannot listen on {address}: permission denied; take a port above 1023")
    return RunError(f"cannot listen on {address}: {error.strerror or error}")


class Listener:
    """Listener of one agent.

    `on_link` is called in the listener's thread with each stream of a member, the member, and the
    expiry of its certificate. Other streams are closed.
    """

    def __init__(
        self,
        listening: socket.socket,
        identity: Identity,
        members: Sequence[Member],
        on_link: OnLink,
    ) -> None:
        self._listening = listening
        self._context = server_context(identity, members)
        self._members = members
        self._on_link = on_link
        self._selector = selectors.DefaultSelector()
        self._pending: dict[int, _Pending] = {}  # by descriptor, the oldest first
        self._closed = threading.Event()
        self._has_logged = False
        # Without a free descriptor a connection cannot even be refused: `_shed` uses this one.
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="fedcb2o-listen", daemon=True)

    @property
    def is_alive(self) -> bool:
        """True while connections are accepted."""
        return self._thread.is_alive() and not self._closed.is_set()

    def start(self) -> None:
        """Accept connections from now on."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(2)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                events = self._selector.select(_POLL_SECONDS)
                for key, _ in events:
                    if key.fileobj is self._listening:
                        self._accept()
                    elif key.fd in self._pending:
                        # An earlier event of this turn may have closed other connections, hence the
                        # check.
                        self._advance(key.fd)
                self._drop_expired()
            except Exception:
                # The listener must go on.
                if not self._has_logged:
                    self._has_logged = True
                    logging.getLogger(__name__).exception("a connection could not be accepted")
                time.sleep(_DESCRIPTORS_SECONDS)
        for descriptor in list(self._pending):
            self._drop(descriptor)
        self._selector.close()
        self._listening.close()
        self._close_spare()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                connection, address = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._shed()
                return  # otherwise: the connection has ended already
            if len(self._pending) >= _MAX_PENDING:
                self._drop(self._oldest_of_most())
            connection.setblocking(False)
            end = time.monotonic() + HANDSHAKE_SECONDS
            self._pending[connection.fileno()] = _Pending(connection, str(address[0]), end)
            self._selector.register(connection.fileno(), selectors.EVENT_READ)

    def _close_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
        self._spare = None

    def _shed(self) -> None:
        """Refuse one connection with a descriptor that was kept for this."""
        self._close_spare()
        with suppress(OSError):
            _reset(self._listening.accept()[0])
        with suppress(OSError):  # another thread may have taken it
            self._spare = os.open(os.devnull, os.O_RDONLY)
        if not self._has_logged:
            self._has_logged = True
            logging.getLogger(__name__).warning(
                "a connection is refused, because this process has too many open files: raise "
                "the limit of its machine (ulimit -n)"
            )
        time.sleep(_DESCRIPTORS_SECONDS)

    def _oldest_of_most(self) -> int:
        """Return the oldest pending connection of the address with most of them."""
        counts = Counter(one.address for one in self._pending.values())
        busiest = max(counts, key=lambda address: counts[address])
        return next(fd for fd, one in self._pending.items() if one.address == busiest)

    def _advance(self, descriptor: int) -> None:
        """Continue a handshake; pass the stream on after its end."""
        one = self._pending[descriptor]
        try:
            # Before its first bytes a connection costs no memory of OpenSSL.
            if one.stream is None:
                one.stream = TlsStream(one.connection, self._context)
            if not one.stream.advance_handshake():
                return
            member, expires = remote_member(one.stream, self._members)
        except (OSError, ValueError):
            self._drop(descriptor)
            return
        self._forget(descriptor)
        self._on_link(one.stream, member, expires.timestamp())

    def _drop_expired(self) -> None:
        now = time.monotonic()
        while self._pending:
            descriptor, one = next(iter(self._pending.items()))
            if now < one.end:
                return
            self._drop(descriptor)

    def _drop(self, descriptor: int) -> None:
        one = self._forget(descriptor)
        _reset(one.connection if one.stream is None else one.stream.socket)

    def _forget(self, descriptor: int) -> "_Pending":
        self._selector.unregister(descriptor)
        return self._pending.pop(descriptor)


@dataclass
class _Pending:
    """Connection before the end of its handshake.

    The stream takes the socket over after the first bytes have arrived. The connection is closed at
    the time `end`.
    """

    connection: socket.socket
    address: str
    end: float
    stream: TlsStream | None = None


def _reset(connection: socket.socket) -> None:
    """Close a connection without keeping its address in use."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    connection.close()

"""TLS links: one reader thread, writers that take turns, and bounds on what a remote sends.

Strangers reach OpenSSL only. A remote with a certificate reaches `_zenoh_messages`. Everything
that a remote sends beyond what it was asked for is charged to an allowance; a link whose allowance
is used up is closed.
"""

import math
import select
import socket
import ssl
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain

from fedcb2o.peer.wire import _zenoh_messages as messages
from fedcb2o.peer.wire._zenoh_messages import BatchDecoder, BatchEncoder, Message, ZenohError

LEASE_SECONDS = 10.0
"""Time without a sign of life after which a link is down."""
_KEEP_ALIVE_SECONDS = 2.5
HANDSHAKE_SECONDS = 10.0
"""Time for TLS and the first messages of a link."""
SEND_SECONDS = 120.0
"""Time to send an answer: 1 MiB with seven others before it, at 70 kB/s."""
_RECORD_BYTES = 2**14
_RECORDS_PER_TURN = 16
_ALLOWANCE_BYTES = 2**20
"""Bytes that a remote may send unasked at once; each message counts as at least 1 KiB."""
_ALLOWANCE_PER_SECOND = 2**14
_MIN_CHARGE = 2**10


@dataclass
class Allowance:
    """Allowance of unasked bytes of one remote, which grows with time."""

    bytes_left: float = _ALLOWANCE_BYTES
    updated: float = field(default_factory=time.monotonic)

    def charge(self, size: int) -> None:
        """Take a message's bytes from the allowance; ZenohError if it is used up."""
        now = time.monotonic()
        grown = self.bytes_left + (now - self.updated) * _ALLOWANCE_PER_SECOND
        self.bytes_left = min(_ALLOWANCE_BYTES, grown) - max(size, _MIN_CHARGE)
        self.updated = now
        if self.bytes_left < 0:
            raise ZenohError("the remote sends too much that it was not asked for")


def _close_wrapped(error: OSError) -> None:
    """Close the socket that `wrap_socket` made and leaves open where it fails (Python 3.11)."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        wrapped = frame.f_locals.get("self")
        if isinstance(wrapped, ssl.SSLSocket):
            wrapped.close()


class TlsStream:
    """Stream of bytes over TLS, for one reader and several writers.

    The stream takes over the connected socket. Without the `server_hostname` of a dialled host,
    this end listens.
    """

    def __init__(
        self,
        connection: socket.socket,
        context: ssl.SSLContext,
        server_hostname: str | None = None,
    ) -> None:
        connection.setblocking(False)
        with suppress(OSError):
            # A small request must not wait for the acknowledgement of the message before it.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            # A connection that has ended fails here, before OpenSSL sees it.
            connection.getpeername()
            self.socket = context.wrap_socket(
                connection,
                server_side=server_hostname is None,
                do_handshake_on_connect=False,
                server_hostname=server_hostname,
            )
        except OSError as error:  # the peer is gone
            connection.close()
            _close_wrapped(error)
            raise
        self._tls_lock = threading.Lock()  # OpenSSL is not safe in two threads at once
        self._write_lock = threading.Lock()
        self._can_write = select.poll()
        self._can_write.register(self.socket, select.POLLOUT)
        self._can_read = select.poll()
        self._can_read.register(self.socket, select.POLLIN)
        self._record = bytearray(_RECORD_BYTES)
        self._plain = bytearray()

    @property
    def certificate(self) -> bytes:
        """The remote's certificate, after the handshake."""
        return self.socket.getpeercert(True) or b""

    def advance_handshake(self) -> bool:
        """Continue the handshake with the bytes that have arrived, without waiting.

        True is returned if it is complete. An OSError says that it failed, or that the remote ended
        it.
        """
        try:
            self.socket.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        return True

    def handshake(self, end: float) -> None:
        """Complete the handshake, or raise OSError at the time `end` at the latest."""
        while not self.advance_handshake():
            self._wait_readable(end - time.monotonic())

    def read_exactly(self, count: int, end: float) -> bytes:
        """Read `count` bytes, or raise OSError at the time `end` at the latest."""
        while len(self._plain) < count:
            self.receive(end - time.monotonic())
        # The view ends before `del`: a bytearray with views cannot shrink.
        with memoryview(self._plain) as view:
            content = bytes(view[:count])
        del self._plain[:count]
        return content

    def take_batches(self) -> list[memoryview]:
        """Return the contents of the whole batches that were received.

        They are views without the lengths. Each keeps all bytes of its call alive.
        """
        batches = []
        position = 0
        plain = memoryview(self._plain)
        while position + 2 <= len(plain):
            end = position + 2 + int.from_bytes(plain[position : position + 2], "little")
            if end > len(plain):
                break
            batches.append(plain[position + 2 : end])
            position = end
        if batches:
            # A new buffer, because the batches are views of the old one.
            self._plain = bytearray(plain[position:])
        return batches

    def receive(self, seconds: float) -> None:
        """Wait for bytes, and decrypt all that have arrived.

        An OSError says that the stream ended, or that nothing arrived within `seconds`.
        """
        if self._decrypt():
            return
        self._wait_readable(seconds)
        self._decrypt()

    def _decrypt(self) -> bool:
        """Decrypt bytes that have arrived, up to a bound; return True if there were any."""
        has_bytes = False
        record = memoryview(self._record)
        with suppress(ssl.SSLWantReadError):
            for _ in range(_RECORDS_PER_TURN):
                # For one record at a time, because other threads want to write.
                with self._tls_lock:
                    count = self.socket.recv_into(record)
                if not count:
                    raise ConnectionError("the remote closed the connection")
                self._plain += record[:count]
                has_bytes = True
        return has_bytes

    def write(self, data: bytes, seconds: float) -> None:
        """Encrypt and send bytes, after those of other threads.

        The stream cannot be used after an OSError: it is closed, or the remote read too slowly.
        """
        with self._write_lock:
            end = time.monotonic() + seconds
            pending = memoryview(data)
            while pending:
                try:
                    with self._tls_lock:
                        pending = pending[self.socket.send(pending[:_RECORD_BYTES]) :]
                except ssl.SSLWantWriteError:
                    # OpenSSL wants the same record again, so `pending` stays.
                    left = end - time.monotonic()
                    if left <= 0 or not self._can_write.poll(1000 * left):
                        raise TimeoutError("the remote does not read") from None

    def is_writable(self) -> bool:
        """Return True if nothing is being sent and the remote reads."""
        return not self._write_lock.locked() and bool(self._can_write.poll(0))

    def _wait_readable(self, seconds: float) -> None:
        if seconds <= 0 or not self._can_read.poll(1000 * seconds):
            raise TimeoutError("the remote sends nothing")

    def close(self) -> None:
        """End the stream at once, also for threads that read or write."""
        with suppress(OSError):
            # SSLSocket's own method lets a thread that reads go on without TLS
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def release(self) -> None:
        """Give the descriptor back, after the threads that write have ended."""
        self.close()
        with self._write_lock:
            self.socket.close()


class Link:
    """Link to one member.

    The stream must have completed its handshake. Messages of more than `max_bytes` are refused.
    `own_key` is the key of this agent at a listening end, in ASCII. The remote's certificate
    expires at `expires` of the system clock.
    """

    def __init__(
        self, stream: TlsStream, max_bytes: int, own_key: bytes = b"", expires: float = 1e12
    ) -> None:
        self.stream = stream
        self.allowance = Allowance()
        self.expires = expires
        self.closed = threading.Event()
        self._own_key = own_key
        self._decoder = BatchDecoder(max_bytes, own_key)
        self._encoder = BatchEncoder()
        self._order = threading.Lock()  # of sequence numbers
        self._last_sent = math.inf  # nothing is sent by itself before the link is open

    def open(self, seconds: float, *, is_listening: bool) -> None:
        """Exchange the first messages within `seconds`.

        An OSError says that the remote ended the link or is too slow, a ZenohError that it sent
        something else.
        """
        end = time.monotonic() + seconds
        lease = round(LEASE_SECONDS)
        if is_listening:
            init = messages.decode_init(self._read_batch(end), is_answer=False)
            cookie = messages.new_cookie()
            self._encoder = BatchEncoder(init.batch_bytes)
            self._write_batch(messages.encode_init(cookie))
            messages.decode_open(self._read_batch(end), cookie)
            self._write_batch(messages.encode_open(self._encoder.sequence, lease))
        else:
            self._write_batch(messages.encode_init())
            init = messages.decode_init(self._read_batch(end), is_answer=True)
            self._encoder = BatchEncoder(init.batch_bytes)
            self._write_batch(messages.encode_open(self._encoder.sequence, lease, init.cookie))
            messages.decode_open(self._read_batch(end))
        self.send(messages.encode_declarations(self._own_key))

    def _read_batch(self, end: float) -> bytes:
        length = int.from_bytes(self.stream.read_exactly(2, end), "little")
        return self.stream.read_exactly(length, end)

    def _write_batch(self, message: bytes) -> None:
        self.stream.write(messages.with_length(message), HANDSHAKE_SECONDS)

    def send(self, *parts: bytes, seconds: float = SEND_SECONDS) -> None:
        """Send network messages, each in batches of its own.

        An OSError says that the link is closed, also because the remote read too slowly.
        """
        with self._order:
            if self.closed.is_set():
                raise ConnectionError("the link is closed")
            try:
                pieces = chain.from_iterable(map(self._encoder.encode, parts))
                self.stream.write(b"".join(pieces), seconds)
            except (OSError, ValueError) as error:
                self.close()
                raise ConnectionError("the link is closed") from error
            self._last_sent = time.monotonic()

    def keep_alive(self) -> None:
        """Send a sign of life if nothing was sent for a while; close an expired link."""
        if time.time() >= self.expires:
            self.close()
        is_due = time.monotonic() - self._last_sent >= _KEEP_ALIVE_SECONDS
        # A thread that sends shows life itself, and the heartbeat must not wait for it.
        if is_due and not self._order.locked() and self.stream.is_writable():
            try:
                # Without waiting, because one thread keeps all links alive.
                self.stream.write(messages.with_length(messages.KEEP_ALIVE), 0.0)
                self._last_sent = time.monotonic()
            except (OSError, ValueError):
                self.close()

    def run(self, on_message: Callable[[Message], None]) -> bool:
        """Read until the link ends; return whether what the remote sent ended it."""
        is_abusive = False
        try:
            while not self.closed.is_set():
                for batch in self.stream.take_batches():
                    for message in self._decoder.decode(batch):
                        if isinstance(message, messages.Ignored):
                            self.allowance.charge(message.size)
                        else:
                            on_message(message)
                self.stream.receive(LEASE_SECONDS)
        except OSError:
            pass  # lost, or closed by either end
        except ZenohError:
            is_abusive = True
        finally:
            self.close()
            self.stream.release()
        return is_abusive

    def close(self) -> None:
        """Close the link at once."""
        self.closed.set()
        self.stream.close()

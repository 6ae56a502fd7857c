"""Mailboxes between members that cannot reach each other: a folder, or a relay that serves one.

A mailbox stores sealed messages for sessions of members, and a card for each member. Its owner is
not trusted: it can delay or drop messages, and sees senders, receivers and sizes.

Example:
    >>> split_messages(join_messages([b"first", b""]), max_count=10)
    [b'first', b'']
"""

import json
import re
import ssl
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from typing import Any, Protocol

from fedcb2o.peer.membership.federation import MAX_FILE_BYTES
from fedcb2o.peer.membership.identity import Identity, Member
from fedcb2o.peer.wire._link import TlsStream
from fedcb2o.peer.wire._tls import dial

MAX_MESSAGE_BYTES = 2**21 + 2**12
"""Longest message: an answer, sealed."""
MAX_TAKEN_BYTES = 2**23
"""Size of the messages that one call returns, except the last one."""
MAX_REPLY_BYTES = MAX_TAKEN_BYTES + MAX_MESSAGE_BYTES
"""Longest reply of a relay."""
MIN_COUNTED_BYTES = 2**16
"""Size as which a shorter message counts in a box."""
MAX_TAKEN_MESSAGES = 2**10
"""Messages in one reply of a relay; further ones wait in the box."""
_MAX_CARDS = 2**13
"""Cards in one reply of a relay: two of each member."""
_MAX_CARDS_BYTES = 2**21
_MAX_STATUS_BYTES = 2**10
_MAX_FORMER_BYTES = MAX_FILE_BYTES + 2**8
_MAX_VERSION_BYTES = 2**10
_CONNECT_SECONDS = 4.0
_FULL_SECONDS = 0.05
"""Pause before a message is sent to a full box again."""
_MAX_CONNECTIONS = 16
_ALERT_SECONDS = 0.5
"""Time for the alert of a relay that refuses a certificate."""
FORMER = "former"
"""Status of a relay's reply to a former member; the federation's file follows."""
BOX_NAME = re.compile(r"[a-z0-9-]{1,63}/[0-9a-f]{32}")
CARD_NAME = re.compile(r"[a-z0-9-]{1,63}\.(run|check)")


class FormerMemberError(PermissionError):
    """The relay no longer serves this member.

    `file` is what it shows as a later version of federation.toml, unchecked.
    """

    def __init__(self, file: bytes) -> None:
        super().__init__("the relay no longer serves this member")
        self.file = file


class Mailbox(Protocol):
    """Interface of a mailbox; its methods raise OSError if it cannot be reached."""

    def publish_card(self, name: str, card: bytes) -> None:
        """Store this member's card, which replaces an earlier one; an empty one removes it.

        The name is "MEMBER.run" of a node, "MEMBER.check" of a check.
        """
        ...

    def cards(self) -> dict[str, bytes]:
        """Return all cards by name."""
        ...

    def put(self, box: str, message: bytes, seconds: float) -> None:
        """Store a message for a session within `seconds`.

        `box` is "MEMBER/SESSION" of the receiver.
        """
        ...

    def take(self, box: str, seconds: float) -> list[bytes]:
        """Return and remove the messages of a session, the oldest first.

        `box` is "MEMBER/SESSION" of this process. The first message is waited for up to `seconds`.
        """
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


class RelayMailbox:
    """Mailbox of a relay, over TLS connections that this member opens."""

    def __init__(self, relay: Member, identity: Identity) -> None:
        self.relay = relay
        self._identity = identity
        self._idle: list[TlsStream] = []
        self._open: set[TlsStream] = set()
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._closed = False

    def publish_card(self, name: str, card: bytes) -> None:
        self._call(f"card {name}", card, _CONNECT_SECONDS)

    def cards(self) -> dict[str, bytes]:
        reply = self._call("cards", b"", _CONNECT_SECONDS, _MAX_CARDS_BYTES)
        entries = split_messages(reply, 2 * _MAX_CARDS)
        names = [entry.decode("ascii", "replace") for entry in entries[::2]]
        return dict(zip(names, entries[1::2], strict=False))

    def federation(self) -> dict[str, Any]:
        """Ask which version of the federation the relay holds; its answer is not trusted.

        It has the keys "run", "version" and "federation" (the hash of the version), and is empty if
        the relay does not say.
        """
        try:
            reply = self._call("federation", b"", _CONNECT_SECONDS)
            content = json.loads(bytes(reply[:_MAX_VERSION_BYTES]))
        except (OSError, ValueError, RecursionError):
            return {}  # the relay of an earlier release closes the connection
        return content if isinstance(content, dict) else {}

    def put(self, box: str, message: bytes, seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            try:
                self._call(f"put {box}", message, max(0.0, end - time.monotonic()))
                return
            except BlockingIOError:
                # The receiver has not taken earlier messages yet.
                if time.monotonic() + _FULL_SECONDS > end:
                    raise
                time.sleep(_FULL_SECONDS)

    def take(self, box: str, seconds: float) -> list[bytes]:
        head = f"take {box} {seconds:.3f}"
        reply = self._call(head, b"", seconds + _CONNECT_SECONDS, MAX_REPLY_BYTES)
        return split_messages(reply, MAX_TAKEN_MESSAGES)

    def close(self) -> None:
        self._closed = True
        for stream in list(self._open):
            stream.close()
        while self._idle:
            self._release(self._idle.pop())

    def _release(self, stream: TlsStream) -> None:
        self._open.discard(stream)
        stream.release()

    def _call(
        self, head: str, body: bytes, seconds: float, max_bytes: int = _MAX_STATUS_BYTES
    ) -> memoryview:
        """Send one request; try once more if a kept connection was lost."""
        end = time.monotonic() + seconds
        if self._closed:
            raise ConnectionError("the mailbox is closed")
        if not self._free.acquire(timeout=seconds):
            raise TimeoutError("all connections to the relay are busy")
        try:
            if self._idle:
                # A relay closes idle connections, and another thread may take the last one.
                with suppress(ConnectionError, ssl.SSLError, IndexError):
                    return self._exchange(self._idle.pop(), head, body, end, max_bytes)
            if self._closed:
                raise ConnectionError("the mailbox is closed")
            return self._exchange(self._connect(end), head, body, end, max_bytes)
        finally:
            self._free.release()

    def _exchange(
        self, stream: TlsStream, head: str, body: bytes, end: float, max_bytes: int
    ) -> memoryview:
        """Send a request on a connection; the reply to a former member may be longer."""
        try:
            try:
                write_frame(stream, end, head.encode(), b"\n", body)
            except (ConnectionError, ssl.SSLError):
                # In TLS 1.3 a refusal arrives only when something is read.
                _raise_alert(stream)
                raise
            longest = max(max_bytes, _MAX_FORMER_BYTES)
            status, content = split_head(read_frame(stream, longest, end))
        except ValueError as error:
            self._release(stream)
            raise ConnectionAbortedError("the relay sends no frame") from error
        except BaseException:
            self._release(stream)
            raise
        if self._closed or status == FORMER or len(content) > max_bytes:
            self._release(stream)
        else:
            self._idle.append(stream)
        if status == FORMER:
            raise FormerMemberError(bytes(content))
        if len(content) > max_bytes:
            raise ConnectionAbortedError("the reply is too long")
        if status == "full":
            raise BlockingIOError("the box is full")
        if status != "ok":
            raise FileNotFoundError(f"the relay refuses a message: {status[:60]!r}")
        return content

    def _connect(self, end: float) -> TlsStream:
        left = min(_CONNECT_SECONDS, max(0.01, end - time.monotonic()))
        stream, _ = dial(self._identity, self.relay, left)
        self._open.add(stream)
        return stream


def _raise_alert(stream: TlsStream) -> None:
    """Raise the alert of a relay that refused this certificate and closed the connection."""
    try:
        stream.read_exactly(1, time.monotonic() + _ALERT_SECONDS)
    except ssl.SSLError:
        raise
    except OSError:
        return


def write_frame(stream: TlsStream, end: float, *parts: bytes) -> None:
    """Send one frame between a member and a relay, or raise OSError at the time `end`.

    The time is monotonic.
    """
    length = sum(map(len, parts)).to_bytes(4, "little")
    stream.write(b"".join((length, *parts)), max(0.0, end - time.monotonic()))


def split_head(frame: bytes) -> tuple[str, memoryview]:
    """Split a frame after its first line, without a copy.

    A frame without such a line of at most 200 characters of ASCII is a ValueError.
    """
    end = frame.index(b"\n", 0, 201)
    return frame[:end].decode("ascii"), memoryview(frame)[end + 1 :]


def read_frame(stream: TlsStream, max_bytes: int, end: float) -> bytes:
    """Receive one frame.

    An OSError says that the stream ended, that the monotonic time is `end`, or that the frame is
    too long.
    """
    length = int.from_bytes(stream.read_exactly(4, end), "little")
    if length > max_bytes:
        raise ConnectionAbortedError("the frame is too long")
    return stream.read_exactly(length, end)


def join_messages(messages: Iterable[bytes]) -> bytes:
    """Join messages, each with its length before it."""
    pairs = ((len(message).to_bytes(4, "little"), message) for message in messages)
    return b"".join(chain.from_iterable(pairs))


def split_messages(content: bytes | memoryview, max_count: int) -> list[bytes]:
    """Split what `join_messages` made.

    An incomplete end is left out, and messages beyond `max_count`.
    """
    messages = list[bytes]()
    position = 0
    while position + 4 <= len(content) and len(messages) < max_count:
        start = position + 4
        position = start + int.from_bytes(content[position:start], "little")
        if position <= len(content):
            messages.append(bytes(content[start:position]))
    return messages

"""Relay: a server of one mailbox folder, to which members connect.

Members need no open port. The relay's certificate is that of an identity of its own. A connection
needs the certificate of a member; what it may store and take depends on the name in it. A former
member gets the signed versions of the federation, and nothing else.
"""

import json
import logging
import math
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fedcb2o.peer.membership.federation import Federation, file_content
from fedcb2o.peer.membership.identity import Identity, Member
from fedcb2o.peer.wire._folder_mailbox import FolderMailbox
from fedcb2o.peer.wire._link import TlsStream
from fedcb2o.peer.wire._listener import (
    Listener,
    open_listening_socket,
    raise_descriptor_limit,
)
from fedcb2o.peer.wire._mailbox import (
    BOX_NAME,
    CARD_NAME,
    FORMER,
    MAX_MESSAGE_BYTES,
    MAX_TAKEN_MESSAGES,
    MIN_COUNTED_BYTES,
    join_messages,
    read_frame,
    split_head,
    write_frame,
)
from fedcb2o.peer.wire._sealing import CARD_BYTES
from fedcb2o.peer.wire._transport import Pace

_LOGGER = logging.getLogger(__name__)
_MAX_STORED_BYTES = 2**23
"""Size of the messages of one sender that wait in one box; a short one counts as 64 KiB."""
_MAX_BOXES = 4
"""Boxes of one member, one for each of its processes."""
_MAX_WAITING = 4
"""Requests of one member that wait for messages at once; further ones get a reply at once."""
_CARDS_SECONDS = 0.02
"""Age at which cards are read again."""
_MAX_LINKS = 32
"""Connections of one member; the newest remain."""
_MAX_FORMER_LINKS = 4
"""Connections of one former member at once; further ones are closed."""
_MAX_FORMER_REQUEST = 2**10
_FORMER_QUIET_SECONDS = 10.0
"""Time without a connection of a former member, after which the log has a line of the next one."""
_FORMER_SECONDS = 1.0
"""Time that the connection of a former member stays after the reply, so that it asks slowly."""
_IDLE_SECONDS = 120.0
_REPLY_SECONDS = 30.0
_MAX_TAKE_SECONDS = 30.0
_SWEEP_SECONDS = 60.0
_STORE_POLL_SECONDS = 1.0
"""Time between two looks into the folder, in which only the relay writes."""


class Relay:
    """Relay of one federation, whose members may connect.

    The relay's identity is its own, and no member. It listens at "HOST:PORT", by default the
    endpoint of the identity. Its messages are in a folder, by default a temporary one.
    """

    def __init__(
        self,
        federation: Federation,
        identity: Identity,
        *,
        listen: str | None = None,
        folder: Path | None = None,
    ) -> None:
        identity.check_certificate()
        raise_descriptor_limit()
        self._temporary = None if folder else tempfile.TemporaryDirectory(prefix="fedcb2o-relay-")
        place = folder or Path(self._temporary.name if self._temporary else "")
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        names = [member.name for member in federation.members.values()]
        self._mailbox = FolderMailbox(
            place, names, poll_seconds=_STORE_POLL_SECONDS, max_messages=MAX_TAKEN_MESSAGES
        )
        self._links: dict[str, list[TlsStream]] = {
            member.name: [] for member in federation.members.values()
        }
        self._roots = {member.name: member.root for member in federation.members.values()}
        roots = {*self._roots.values()}
        former = [one for _, one in federation.former_members() if one.root not in roots]
        self._former_links = Counter[str]()
        self._former_seen: dict[str, float] = {}
        self._file = file_content(federation)
        self._version = json.dumps(
            {
                "run": federation.run.hex(),
                "version": federation.version,
                "federation": federation.digest.hex(),
            }
        ).encode()
        self._boxes: dict[str, dict[str, None]] = {name: {} for name in self._links}
        self._paces = {name: Pace() for name in self._links}
        self._waiting = Counter[str]()  # requests that wait for messages, by member
        self._stored = _StoredBytes(self._mailbox)
        self._cards = b""
        self._cards_read = -math.inf  # monotonic time
        self._counts = Counter[str]()
        # Senders and receivers, of which the log has a line.
        self._overfilled = set[tuple[str, str]]()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        socket = open_listening_socket(listen or identity.member.endpoint)
        accepted = [*federation.members.values(), *former]
        self._listener = Listener(socket, identity, accepted, self._on_link)
        self._listener.start()

    @property
    def is_listening(self) -> bool:
        """True while connections are accepted."""
        return self._listener.is_alive

    def connections(self) -> dict[str, int]:
        """Return the number of connections of each member by name."""
        with self._lock:
            return {name: len(streams) for name, streams in self._links.items()}

    def counts(self) -> Counter[str]:
        """Return what was passed on so far.

        Messages are "stored", or refused as "full" or for "no box". "bytes" are those of stored
        messages.
        """
        with self._lock:
            return self._counts.copy()

    def run(self, stop: threading.Event) -> None:
        """Serve until an event."""
        while not stop.wait(_SWEEP_SECONDS):
            self._mailbox.sweep()
            self._stored.forget()

    def close(self) -> None:
        """Close all connections and remove a temporary folder."""
        self._closed.set()
        self._listener.close()
        with self._lock:
            streams = [stream for streams in self._links.values() for stream in streams]
        for stream in streams:
            stream.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_link(self, stream: TlsStream, member: Member, expires: float) -> None:
        """Serve a connection of a member; its newest ones replace older ones."""
        if self._closed.is_set():
            stream.release()
            return
        name = member.name
        if member.root != self._roots.get(name):
            self._on_former_link(stream, name)
            return
        streams = self._links[name]
        with self._lock:
            streams.append(stream)
            surplus = streams[:-_MAX_LINKS]
            is_first = len(streams) == 1
        if is_first:
            self._log(logging.INFO, f"{name} is connected", name)
        for old in surplus:
            old.close()
        threading.Thread(
            target=self._serve_link, args=(stream, name, expires), name="relay-link", daemon=True
        ).start()

    def _on_former_link(self, stream: TlsStream, name: str) -> None:
        """Show a former member the versions of the federation."""
        now = time.monotonic()
        with self._lock:
            is_new = now - self._former_seen.get(name, -math.inf) > _FORMER_QUIET_SECONDS
            self._former_seen[name] = now
            has_room = self._former_links[name] < _MAX_FORMER_LINKS
            self._former_links[name] += has_room
        if is_new:
            state = (
                "with a former certificate" if name in self._roots else "and is no member any more"
            )
            text = f"{name} connects {state}: it is shown the signed versions"
            self._log(logging.INFO, text, name)
        if not has_room:
            stream.release()
            return
        threading.Thread(
            target=self._serve_former, args=(stream, name), name="relay-former", daemon=True
        ).start()

    def _serve_former(self, stream: TlsStream, name: str) -> None:
        try:
            end = time.monotonic() + _REPLY_SECONDS
            read_frame(stream, _MAX_FORMER_REQUEST, end)
            write_frame(stream, end, FORMER.encode() + b"\n", self._file)
            self._closed.wait(_FORMER_SECONDS)
        except (OSError, ValueError):
            pass  # lost, silent, or a malformed frame
        finally:
            stream.release()
            with self._lock:
                self._former_links[name] -= 1

    def _serve_link(self, stream: TlsStream, name: str, expires: float) -> None:
        try:
            while time.time() < expires and not self._closed.is_set():
                frame = read_frame(stream, MAX_MESSAGE_BYTES, time.monotonic() + _IDLE_SECONDS)
                self._paces[name].wait(self._closed)
                parts = self._reply(name, frame)
                write_frame(stream, time.monotonic() + _REPLY_SECONDS, *parts)
        except (OSError, ValueError):
            pass  # lost, silent, or a malformed frame
        finally:
            stream.release()
            with self._lock:
                self._links[name].remove(stream)
                is_last = not self._links[name]
            if is_last:
                self._log(logging.INFO, f"{name} has no connection", name)

    def _log(self, level: int, text: str, member: str) -> None:
        _LOGGER.log(level, "relay: %s", text, extra={"data": {"member": member}})

    def _reply(self, name: str, frame: bytes) -> tuple[bytes, ...]:
        """Carry out one request of a member.

        A malformed one, or one for a box of another member, is a ValueError.
        """
        head, body = split_head(frame)
        command, place, seconds = (*head.split(" "), "", "")[:3]
        if command == "cards":
            return b"ok\n", self._all_cards()
        if command == "federation":
            return b"ok\n", self._version
        if command == "put" and BOX_NAME.fullmatch(place):
            return (self._store(name, place, body),)
        is_own_card = CARD_NAME.fullmatch(place) and place.partition(".")[0] == name
        if command == "card" and is_own_card and len(body) in (0, CARD_BYTES):
            self._mailbox.publish_card(place, bytes(body))
            return (b"ok\n",)
        if command == "take" and BOX_NAME.fullmatch(place) and place.partition("/")[0] == name:
            self._keep_box(name, place)
            return b"ok\n", join_messages(self._take(name, place, float(seconds)))
        raise ValueError("no such request, or not of this member")

    def _all_cards(self) -> bytes:
        """Return all cards, which many members ask for at once."""
        now = time.monotonic()
        if now > self._cards_read + _CARDS_SECONDS:
            self._cards = join_messages(self._card_entries())
            self._cards_read = now
        return self._cards

    def _take(self, name: str, box: str, seconds: float) -> list[bytes]:
        """Take the messages of a box; few requests of a member wait for the first one."""
        with self._lock:
            may_wait = self._waiting[name] < _MAX_WAITING
            self._waiting[name] += may_wait
        try:
            wait = min(max(0.0, seconds), _MAX_TAKE_SECONDS) if may_wait else 0.0
            messages = self._mailbox.take(box, wait)
        finally:
            with self._lock:
                self._waiting[name] -= may_wait
        if messages:
            self._stored.forget(box)
        return messages

    def _card_entries(self) -> Iterable[bytes]:
        for name, card in self._mailbox.cards().items():
            yield name.encode()
            yield card

    def _store(self, sender: str, box: str, message: memoryview) -> bytes:
        """Store a message, unless there is no such box or it has too many of this sender."""
        receiver = box.partition("/")[0]
        outcome = "full"
        if box not in self._boxes.get(receiver, {}):
            outcome = "no box"
        else:
            with suppress(OSError):
                if self._stored.put(box, message, sender):
                    outcome = "stored"
        with self._lock:
            self._counts[outcome] += 1
            if outcome == "stored":
                self._counts["bytes"] += len(message)
            is_new = outcome == "full" and (sender, receiver) not in self._overfilled
            if is_new:
                self._overfilled.add((sender, receiver))
        if is_new:
            text = f"the box of {receiver} is full, and messages of {sender} are refused"
            self._log(logging.WARNING, text, receiver)
        return b"ok\n" if outcome == "stored" else f"{outcome}\n".encode()

    def _keep_box(self, name: str, box: str) -> None:
        """Note a member's box; its newest ones replace older ones."""
        with self._lock:
            boxes = self._boxes[name]
            boxes.pop(box, None)
            boxes[box] = None
            surplus = list(boxes)[:-_MAX_BOXES]
            for old in surplus:
                del boxes[old]
        for old in surplus:
            self._mailbox.remove_box(old)
            self._stored.forget(old)


class _StoredBytes:
    """Sizes of stored messages by box and sender, read from the folder once between two takes."""

    def __init__(self, mailbox: FolderMailbox) -> None:
        self._mailbox = mailbox
        self._sizes: dict[str, dict[str, int]] = {}
        self._lock = threading.Lock()
        self._sender_locks = defaultdict[str, threading.Lock](threading.Lock)

    def put(self, box: str, message: memoryview, sender: str) -> bool:
        """Store a message and return True, unless the box has too many of this sender.

        `box` is "MEMBER/SESSION" of the receiver. An OSError says that there is no such box, or
        that the folder cannot be written.
        """
        with self._lock:
            sender_lock = self._sender_locks[sender]
        # One message of a sender at a time: together several could pass the limit.
        with sender_lock:
            with self._lock:
                sizes = self._sizes.setdefault(box, {})
            if sender not in sizes:
                sizes[sender] = self._mailbox.stored_bytes(box, sender)
            size = max(len(message), MIN_COUNTED_BYTES)
            if sizes[sender] + size > _MAX_STORED_BYTES:
                return False
            self._mailbox.put(box, message, 0.0, sender)
            sizes[sender] += size
            return True

    def forget(self, box: str | None = None) -> None:
        """Read the sizes of a box, or of all, again, because messages were removed."""
        with self._lock:
            if box is None:
                self._sizes.clear()
            else:
                self._sizes.pop(box, None)

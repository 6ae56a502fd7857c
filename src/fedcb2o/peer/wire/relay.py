"""Relay: an HTTPS server of one mailbox folder, to which members connect.

Members need no open port. The relay's certificate is that of an identity of its own. Each request
is signed by a member, and needs its certificate too unless the relay is for signatures only. What a
member may store and take depends on its name. A former member gets the signed versions of the
federation, and nothing else.
"""

import ctypes
import logging
import math
import re
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from fedcb2o.peer._closeable import Closeable
from fedcb2o.peer.membership.federation import Federation, file_content
from fedcb2o.peer.membership.identity import Identity, Member
from fedcb2o.peer.wire.folder_mailbox import FolderMailbox
from fedcb2o.peer.wire.http_requests import HttpRequest
from fedcb2o.peer.wire.listener import Listener, open_listening_socket, raise_descriptor_limit
from fedcb2o.peer.wire.mailbox import (
    BOX_NAME,
    CARD_NAME,
    FORMER_MEMBER,
    MAX_MESSAGE_BYTES,
    MAX_TAKEN_MESSAGES,
    MIN_COUNTED_BYTES,
    join_messages,
    read_signed_target,
)
from fedcb2o.peer.wire.pace import Nonces, Pace
from fedcb2o.peer.wire.protocol import BytesLike, Responder
from fedcb2o.peer.wire.sealing import CARD_BYTES
from fedcb2o.peer.wire.transport import federation_state

_LOGGER = logging.getLogger(__name__)
_MAX_STORED_BYTES = 2**23  # of one sender in one box; a short message counts as 64 KiB
_MAX_BOXES = 4  # boxes of one member, one for each of its processes
_MAX_WAITING = 4  # requests of one member; further ones get a reply at once
_CARDS_SECONDS = 0.02  # age at which cards are read again
_MAX_CONNECTIONS = 32  # connections of one member; the newest remain
# A request takes about a millisecond, so that one member takes at most a sixth of a processor.
_BURST, _PER_SECOND = 512, 150.0  # requests of one member: at once, and later
_FORMER_BURST, _FORMER_PER_SECOND = 4, 1.0  # the same of one former member
_FORMER_QUIET_SECONDS = 10.0  # without a connection, before the next one is logged
_MAX_TAKE_SECONDS = 30.0
_SWEEP_SECONDS = 60.0
_STORE_POLL_SECONDS = 1.0  # time between two looks into the folder, in which only the relay writes
_PLACE = re.compile(
    r"/v1/(cards|boxes|federation)(?:/([a-z0-9./-]{1,120}))?(?:\?wait=([0-9.]{1,8}))?"
)

_OUTCOMES: dict[str, tuple[int, bytes | str]] = {
    "stored": (200, b""),
    "full": (429, "the box is full"),
    "no box": (404, "no such box"),
}
_MMAP_THRESHOLD = -3  # parameter of glibc's mallopt
_MAX_KEPT_BYTES = 2**17


def release_freed_memory() -> None:
    """Make glibc return the memory of each freed message to the system.

    Otherwise it raises its threshold with every large message, and each thread keeps some of them.
    """
    with suppress(AttributeError, OSError):  # another library of C
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _MAX_KEPT_BYTES)


class Relay(Closeable):
    """Relay of one federation, whose members may connect.

    The relay's identity is its own, and no member. It listens at "HOST:PORT", by default the
    endpoint of the identity. Its messages are in a folder, by default a temporary one. With
    `signatures_only` it asks for no certificate, so that a proxy may end TLS on the way.
    """

    def __init__(
        self,
        federation: Federation,
        identity: Identity,
        *,
        listen: str | None = None,
        folder: Path | None = None,
        signatures_only: bool = False,
    ) -> None:
        identity.check_certificate()
        raise_descriptor_limit()
        self._temporary = None if folder else tempfile.TemporaryDirectory(prefix="fedcb2o-relay-")
        place = folder or Path(self._temporary.name if self._temporary else "")
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        members = [*federation.members.values()]
        names = [member.name for member in members]
        # On disk, because 8 MiB of each sender in each box would not fit into memory.
        self._mailbox = FolderMailbox(
            place, names, poll_seconds=_STORE_POLL_SECONDS, max_messages=MAX_TAKEN_MESSAGES
        )
        self._key = identity.member.key
        self._members = {member.key: member for member in members}
        self._former = {member.key: member for _, member in federation.former_members()}
        self._former_seen: dict[str, float] = {}
        self._file = file_content(federation)
        self._state = federation_state(federation)
        self._boxes: dict[str, dict[str, None]] = {name: {} for name in names}
        self._nonces = defaultdict[bytes, Nonces](Nonces)
        self._waiting = Counter[str]()  # requests that wait for messages, by member
        # Sizes of stored messages by box and sender, read from the folder between two takes.
        self._sizes: dict[str, dict[str, int]] = {}
        self._sender_locks = {name: threading.Lock() for name in names}
        self._cards = b""
        self._cards_read = -math.inf  # monotonic time
        self._counts = Counter[str]()
        self._overfilled = set[tuple[str, str]]()  # senders and receivers that are in the log
        self._lock = threading.Lock()
        # Each connection has at most one request, so that no member makes others wait.
        accepted = [*members, *self._former.values()]
        self._pool = ThreadPoolExecutor(_MAX_CONNECTIONS * len(accepted), "relay")
        paces = {one.root: Pace(_FORMER_BURST, _FORMER_PER_SECOND) for one in accepted}
        # A former key may have the root of a present member.
        paces |= {one.root: Pace(_BURST, _PER_SECOND) for one in members}
        self._listener = Listener(
            open_listening_socket(listen or identity.member.endpoint),
            identity,
            accepted,
            self._on_request,
            max_body=MAX_MESSAGE_BYTES,
            max_connections=_MAX_CONNECTIONS,
            authenticate=self._signer,
            has_clients=not signatures_only,
            on_presence=self._on_presence,
            paces=paces,
        )

    @property
    def is_listening(self) -> bool:
        """True while connections are accepted."""
        return self._listener.is_alive

    def connections(self) -> Mapping[str, int]:
        """Return the number of connections of each member by name."""
        return self._listener.connections(self._members.values())

    def counts(self) -> Counter[str]:
        """Return the messages "stored" so far, refused as "full" or for "no box", and "bytes"."""
        with self._lock:
            return self._counts.copy()

    def run(self, stop: threading.Event) -> None:
        """Serve until an event."""
        while not stop.wait(_SWEEP_SECONDS):
            self._mailbox.sweep()
            self._sizes.clear()

    def close(self) -> None:
        """Close all connections and remove a temporary folder."""
        self._mailbox.close()
        self._listener.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._temporary is not None:
            self._temporary.cleanup()

    def _signer(self, request: HttpRequest) -> Member | None:
        """Return the member, or former member, that signed a request, once."""
        signed = read_signed_target(request, self._key)
        if signed is None:
            return None
        key, nonce, message, signature = signed
        member = self._members.get(key) or self._former.get(key)
        if member is None or not member.verify(message, signature):
            return None
        return member if self._nonces[key].accept(nonce) else None

    def _on_presence(self, name: str, is_connected: bool) -> None:
        if name in self._boxes:
            text = "is connected" if is_connected else "has no connection"
            self._log(logging.INFO, f"{name} {text}", name)

    def _on_request(self, request: HttpRequest, respond: Responder) -> None:
        """Answer a request in a thread of its own, because it may wait."""
        assert request.member is not None
        if request.member.key in self._former:
            self._note_former(request.member.name)
        self._pool.submit(self._answer, request.member, request, respond)

    def _note_former(self, name: str) -> None:
        now = time.monotonic()
        with self._lock:
            is_new = now - self._former_seen.get(name, -math.inf) > _FORMER_QUIET_SECONDS
            self._former_seen[name] = now
        if is_new:
            state = (
                "with a former certificate" if name in self._boxes else "and is no member any more"
            )
            text = f"{name} connects {state}: it is shown the signed versions"
            self._log(logging.INFO, text, name)

    def _answer(self, member: Member, request: HttpRequest, respond: Responder) -> None:
        if member.key in self._former:
            respond(FORMER_MEMBER, self._file, [("content-type", "application/toml")])
            return
        code: int
        content: bytes | str
        try:
            code, content = self._reply(member.name, request)
        except Exception:
            _LOGGER.exception("a request could not be handled")
            code, content = 500, "the request could not be handled"
        respond(code, content, [("retry-after", "1")] if code == 429 else ())

    def _log(self, level: int, text: str, member: str) -> None:
        _LOGGER.log(level, "relay: %s", text, extra={"data": {"member": member}})

    def _reply(self, name: str, request: HttpRequest) -> tuple[int, bytes | str]:
        """Carry out a member's request; return the status, and the content or an error's text."""
        match = _PLACE.match(request.target)
        resource, place, seconds = match.groups(default="") if match else ("", "", "")
        command = f"{request.method} {resource}"
        if command == "GET cards":
            return 200, self._all_cards()
        if command == "GET federation":
            return 200, self._state
        if command == "PUT boxes" and BOX_NAME.fullmatch(place):
            return self._store(name, place, request.body)
        is_own_card = CARD_NAME.fullmatch(place) and place.partition(".")[0] == name
        if command == "PUT cards" and is_own_card and len(request.body) in (0, CARD_BYTES):
            self._mailbox.publish_card(place, request.body)
            return 200, b""
        if command == "GET boxes" and BOX_NAME.fullmatch(place) and place.startswith(f"{name}/"):
            self._keep_box(name, place)
            with suppress(ValueError):
                return 200, join_messages(self._take(name, place, float(seconds or 0)))
        return 403, "no such request, or not of this member"

    def _all_cards(self) -> bytes:
        """Return all cards, which many members ask for at once."""
        now = time.monotonic()
        if now > self._cards_read + _CARDS_SECONDS:
            cards = self._mailbox.cards().items()
            self._cards = join_messages(
                one for name, card in cards for one in (name.encode(), card)
            )
            self._cards_read = now
        return self._cards

    def _take(self, name: str, box: str, seconds: float) -> list[bytes]:
        """Take the messages of a box; few requests of a member wait for the first one."""
        with self._lock:
            # Each waiting request holds a thread.
            may_wait = self._waiting[name] < _MAX_WAITING
            self._waiting[name] += may_wait
        try:
            wait = min(max(0.0, seconds), _MAX_TAKE_SECONDS) if may_wait else 0.0
            messages = self._mailbox.take(box, wait)
        finally:
            with self._lock:
                self._waiting[name] -= may_wait
        if messages:
            self._sizes.pop(box, None)
        return messages

    def _store(self, sender: str, box: str, message: BytesLike) -> tuple[int, bytes | str]:
        """Store a message, unless there is no such box or it has too many of this sender."""
        receiver = box.partition("/")[0]
        outcome = "no box"
        if box in self._boxes.get(receiver, {}):
            outcome = self._put(sender, box, message)
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
        return _OUTCOMES[outcome]

    def _put(self, sender: str, box: str, message: BytesLike) -> str:
        # One message of a sender at a time: together several could pass the limit.
        with self._sender_locks[sender], suppress(OSError):
            sizes = self._sizes.setdefault(box, {})
            if sender not in sizes:
                sizes[sender] = self._mailbox.stored_bytes(box, sender)
            # Many short messages cost files and time, too.
            size = max(len(message), MIN_COUNTED_BYTES)
            if sizes[sender] + size <= _MAX_STORED_BYTES:
                self._mailbox.put(box, message, 0.0, sender)
                sizes[sender] += size
                return "stored"
        return "full"

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
            self._sizes.pop(old, None)

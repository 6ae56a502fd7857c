"""End-to-end encryption between two members whose messages pass through a relay.

Each process has a session: an ephemeral X25519 key, signed in a card by the member's identity key.
Two sessions derive one ChaCha20-Poly1305 key for each direction. The relay therefore reads nothing
and cannot change, repeat or misaddress a message. It can delay and drop messages.
"""

import hashlib
import heapq
import itertools
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedcb2o.peer.membership.federation import Federation
from fedcb2o.peer.membership.identity import Identity, Member
from fedcb2o.peer.wire.pace import Pace
from fedcb2o.peer.wire.protocol import SIGNATURE_BYTES, BytesLike, MalformedError

_CARD_CONTEXT = b"fedcb2o relay card v1\0"
_KEY_CONTEXT = b"fedcb2o relay keys v1\0"
_MAGIC = b"fedcb2o"
_VERSION = 1
_CARD = struct.Struct("<7sBB 32s I 32s Q")  # magic, version, 4, run, agent, session key, count
_SEALED = struct.Struct("<7sBBB II QQ")  # magic, version, 5, kind, sender, receiver, id, count
CARD_BYTES = _CARD.size + SIGNATURE_BYTES
_HEAD_BYTES = _SEALED.size + CARD_BYTES
SEALED_OVERHEAD = _HEAD_BYTES + 16  # bytes of a sealed message around its content
_MAX_SESSIONS = 64  # of one member, the newest; a forgotten one forgets its replays
_MAX_SHOWN = 4  # sessions of one member that are known by their cards alone; the newest remain
_INTRODUCTIONS = 64  # messages of unknown sessions of one member that are verified at once
_INTRODUCTIONS_PER_SECOND = 4.0
_REPLAY_WINDOW = 1024
_MAX_FORMER_KEYS = 3  # former keys of one member that are recognised; the newest remain


class SealedKind(IntEnum):
    """Content of a sealed message."""

    REQUEST = 0
    ANSWER = 1  # empty for a request without an answer


@dataclass(frozen=True)
class Card:
    """A member's signed session key.

    The key is a public X25519 key. The count grows within a session. A former key is one that a
    later version of the federation removed or replaced.
    """

    agent: int
    key: bytes
    count: int
    identity: bytes
    is_former: bool = False

    @property
    def session(self) -> str:
        """Name of the session's mailbox."""
        return hashlib.sha256(self.key).hexdigest()[:32]


@dataclass(frozen=True)
class Sealed:
    """An opened message with its decrypted content."""

    kind: SealedKind
    card: Card
    id: int
    content: bytes


class Replays:
    """Numbers of received messages, so that a repeated one is recognised."""

    def __init__(self) -> None:
        self._newest: list[int] = []  # a heap of at most `_REPLAY_WINDOW` numbers
        self._known: set[int] = set()
        self._floor = -1

    def accept(self, count: int) -> bool:
        """Remember a number; False for one that was seen, or is older than all remembered ones."""
        if count <= self._floor or count in self._known:
            return False
        self._known.add(count)
        heapq.heappush(self._newest, count)
        if len(self._newest) > _REPLAY_WINDOW:
            self._floor = heapq.heappop(self._newest)
            self._known.remove(self._floor)
        return True


@dataclass
class _Channel:
    """Keys between this session and one session of another member."""

    sending: ChaCha20Poly1305
    receiving: ChaCha20Poly1305
    replays: Replays


class Session:
    """End of all encrypted channels of a process; safe in any thread."""

    def __init__(self, federation: Federation, identity: Identity) -> None:
        self._federation = federation
        self._agent_id = federation.id_of(identity.member)
        self._identity_key = identity.member.key
        former: dict[int, list[Member]] = {}
        for id, member in federation.former_members():
            former.setdefault(id, []).append(member)
        # By agent: its present key first, and the newest former ones.
        self._known = {id: [member] for id, member in federation.members.items()}
        for id, members in former.items():
            self._known[id] = self._known.get(id, []) + members[-_MAX_FORMER_KEYS:]
        self._sign: Callable[[bytes], bytes] = identity.sign
        self._private = X25519PrivateKey.generate()
        self._key = self._private.public_key().public_bytes_raw()
        self._counts = itertools.count()  # of all channels, so that no nonce is used twice
        self._lock = threading.Lock()
        # By identity key, so that former keys displace no session of the present one.
        self._channels: dict[bytes, dict[bytes, tuple[Card, _Channel]]] = {}
        # By agent and session key.
        self._shown: dict[int, dict[bytes, tuple[Card, _Channel]]] = {}
        self._paces = {id: Pace(_INTRODUCTIONS, _INTRODUCTIONS_PER_SECOND) for id in self._known}
        self._own_card = self.card(0)
        self.name = Card(self._agent_id, self._key, 0, self._identity_key).session

    def card(self, count: int) -> bytes:
        """Return this session's signed card."""
        body = _CARD.pack(
            _MAGIC, _VERSION, 4, self._federation.run, self._agent_id, self._key, count
        )
        return body + self._sign(_CARD_CONTEXT + body)

    def read_card(self, data: BytesLike) -> Card:
        """Verify a card of a member or former member of this run."""
        if len(data) != CARD_BYTES:
            raise MalformedError("malformed")
        content = bytes(data)
        magic, version, message, run, agent, key, count = _CARD.unpack_from(content)
        if (magic, version, message) != (_MAGIC, _VERSION, 4):
            raise MalformedError("version" if magic == _MAGIC else "malformed")
        known = self._known.get(agent)
        if known is None or agent == self._agent_id or run != self._federation.run:
            raise MalformedError("member")
        signed, signature = _CARD_CONTEXT + content[: _CARD.size], content[_CARD.size :]
        signer = next((one for one in known if one.verify(signed, signature)), None)
        if signer is None:
            raise MalformedError("signature")
        is_former = signer is not self._federation.members.get(agent)
        return Card(agent, key, count, signer.key, is_former=is_former)

    def introduce(self, card: Card) -> None:
        """Derive the keys of a session from a verified card; MalformedError as in `seal`.

        Its messages need no budget then, which a relay could use up with forged ones.
        """
        channel = self._channel(card)
        with self._lock:
            shown = self._shown.setdefault(card.agent, {})
            shown.setdefault(card.key, (card, channel))
            if len(shown) > _MAX_SHOWN:
                del shown[next(iter(shown))]

    def seal(self, card: Card, kind: SealedKind, id: int, content: BytesLike) -> bytes:
        """Encrypt a message for a session; MalformedError if its key is no valid point."""
        channel = self._keep(card, self._channel(card))
        # It is the nonce, and never repeats, also not in another channel of this key.
        count = next(self._counts)
        head = _SEALED.pack(_MAGIC, _VERSION, 5, kind, self._agent_id, card.agent, id, count)
        head += self._own_card
        return head + channel.sending.encrypt(_nonce(count), content, head)

    def open(self, data: BytesLike) -> Sealed:
        """Verify and decrypt a message to this session; MalformedError for a repeated one."""
        view = memoryview(data)
        if len(view) < SEALED_OVERHEAD:
            raise MalformedError("malformed")
        magic, version, message, kind, sender, receiver, id, count = _SEALED.unpack_from(view)
        if (magic, version, message) != (_MAGIC, _VERSION, 5):
            raise MalformedError("version" if magic == _MAGIC else "malformed")
        if receiver != self._agent_id or kind not in (*SealedKind,):
            raise MalformedError("receiver")
        card, channel = self._sender(sender, bytes(view[_SEALED.size : _HEAD_BYTES]))
        if card.agent != sender:
            raise MalformedError("receiver")
        head = bytes(view[:_HEAD_BYTES])
        try:
            content = channel.receiving.decrypt(_nonce(count), view[_HEAD_BYTES:], head)
        except InvalidTag:
            raise MalformedError("seal") from None
        # A card alone, which anybody may repeat, displaces no session.
        channel = self._keep(card, channel)
        with self._lock:
            if not channel.replays.accept(count):
                raise MalformedError("replay")
        return Sealed(SealedKind(kind), card, id, content)

    def _sender(self, agent: int, content: bytes) -> tuple[Card, _Channel]:
        """Return the session that claims to send a message, and its keys.

        A known session is recognised by its key, because only its owner can seal. Every other card
        costs a verification, and counts against the pace of its member.
        """
        key = _CARD.unpack_from(content)[5]
        shown = self._shown.get(agent, {})
        opened = [self._channels.get(one.key, {}) for one in self._known.get(agent, [])]
        for known in (shown, *opened):
            if key in known:
                return known[key]
        pace = self._paces.get(agent)
        if pace is None or not pace.take():
            raise MalformedError("member" if pace is None else "rate")
        card = self.read_card(content)
        return card, self._channel(card)

    def _channel(self, card: Card) -> _Channel:
        known = self._channels.get(card.identity, {}).get(card.key)
        return known[1] if known else self._new_channel(card)

    def _keep(self, card: Card, channel: _Channel) -> _Channel:
        """Remember a channel; return the one that was remembered first."""
        with self._lock:
            channels = self._channels.setdefault(card.identity, {})
            _, kept = channels.setdefault(card.key, (card, channel))
            if len(channels) > _MAX_SESSIONS:
                del channels[next(iter(channels))]
            return kept

    def _new_channel(self, card: Card) -> _Channel:
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(card.key))
        except ValueError:  # a point of small order
            raise MalformedError("key") from None
        own = self._key + self._identity_key
        remote = card.key + card.identity
        # Both ends derive the same keys, and each finds its own direction.
        first, second = sorted((own, remote))
        derived = HKDF(SHA256(), 64, self._federation.run, _KEY_CONTEXT + first + second)
        keys = derived.derive(shared)
        ciphers = {first: ChaCha20Poly1305(keys[:32]), second: ChaCha20Poly1305(keys[32:])}
        return _Channel(ciphers[own], ciphers[remote], Replays())


def _nonce(count: int) -> bytes:
    return count.to_bytes(12, "little")

"""Bytes on the wire (docs/protocol.md): manifests, requests and answers, little-endian, each with one layout.

A value has exactly one encoding, so that what is signed and what is compared are bytes. Whatever is read is hostile:
sizes are held against the length of the data before anything is made of them, and nothing but `MalformedError` is
raised. What is signed is prefixed by its context, so that a signature for one thing is never valid for another.
"""

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias, TypeVar

from fedcb2o.peer.membership.federation import Federation
from fedcb2o.peer.membership.identity import Member

Bytes: TypeAlias = bytes | bytearray | memoryview
Sign: TypeAlias = Callable[[bytes], bytes]
Seen: TypeAlias = tuple[int, int, bytes]  # an agent, a round, and the digest of its manifest for it

Enumerated = TypeVar("Enumerated", bound=IntEnum)

MAGIC = b"fedcb2o"
VERSION = 1
CHUNK = 2**20
MOST_CHUNKS = 2**14  # of a model: 16 GiB as sent
MOST_SEEN = 64  # digests beside a manifest
MOST_HELLO = 2**20
NONE = bytes(32)  # a digest where there is none
SIGNATURE = 64

SIGNS_MANIFEST = b"fedcb2o manifest v1\0"
SIGNS_REQUEST = b"fedcb2o request v1\0"
SIGNS_HELLO = b"fedcb2o hello v1\0"

_HEAD = struct.Struct("<7sBBB")  # magic, version, what it is, and its encoding, kind or status
_MANIFEST = struct.Struct("<7sBBB 32s II QQ 32s Q 32s I")
_REQUEST = struct.Struct("<7sBBB 32s II II 32s 16s")
_ANSWER = struct.Struct("<7sBBB 16s")
_LENGTH = struct.Struct("<I")
_SEEN = struct.Struct("<II 32s")
REQUEST_LENGTH = _REQUEST.size + SIGNATURE
MOST_MANIFEST = _MANIFEST.size + 32 * MOST_CHUNKS + SIGNATURE
MOST_OFFER = _LENGTH.size + MOST_MANIFEST + MOST_SEEN * _SEEN.size


class Message(IntEnum):
    """What a message is."""

    MANIFEST = 1
    REQUEST = 2
    ANSWER = 3


class Kind(IntEnum):
    """What is asked for."""

    HELLO = 1  # who answers
    MANIFEST = 2  # of its newest model
    CHUNK = 3  # of that model
    WITNESS = 4  # the manifest of another agent, as it was received


class Status(IntEnum):
    """How a request went; all but OK have no body."""

    OK = 0
    NOT_YET = 1  # there is no model yet for the asker's round
    BUSY = 2  # it asks too often
    NOT_HERE = 3  # it is gone, or never was
    ANOTHER_RUN = 4
    ANOTHER_VERSION = 5  # of the protocol, that of this answer

    @property
    def word(self) -> str:
        """What it is counted by, and shown to people."""
        return self.name.lower().replace("_", " ")


class MalformedError(ValueError):
    """Bytes that are none of ours; `reason` is the word under which they are counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What an agent signs of a model that it publishes; sizes and hashes are of the bytes as they are sent."""

    run: bytes
    agent: int
    round: int
    dim: int
    num_samples: int
    encoding: int
    base: bytes
    size: int
    sha256: bytes
    chunks: tuple[bytes, ...]

    @classmethod
    def of(
        cls,
        content: Bytes,
        *,
        run: bytes,
        agent: int,
        round: int,
        dim: int,
        num_samples: int,
        encoding: int,
        base: bytes,
    ) -> "Manifest":
        """The manifest of a model as it is sent."""
        view = memoryview(content).cast("B")
        return cls(
            run=run,
            agent=agent,
            round=round,
            dim=dim,
            num_samples=num_samples,
            encoding=encoding,
            base=base,
            size=len(view),
            sha256=hashlib.sha256(view).digest(),
            chunks=tuple(hashlib.sha256(view[k : k + CHUNK]).digest() for k in range(0, len(view), CHUNK)),
        )

    @property
    def body(self) -> bytes:
        """Its only encoding."""
        head = _MANIFEST.pack(
            MAGIC,
            VERSION,
            Message.MANIFEST,
            self.encoding,
            self.run,
            self.agent,
            self.round,
            self.dim,
            self.num_samples,
            self.base,
            self.size,
            self.sha256,
            len(self.chunks),
        )
        return head + b"".join(self.chunks)

    @property
    def digest(self) -> bytes:
        """SHA-256 of the body: what this manifest is called by."""
        return hashlib.sha256(self.body).digest()

    def signed(self, sign: Sign) -> bytes:
        """The body, and the signature of it in its context."""
        body = self.body
        return body + sign(SIGNS_MANIFEST + body)


def manifest_length(size: int) -> int:
    """How long the signed manifest of a model is that is sent in so many bytes."""
    return _MANIFEST.size + 32 * num_chunks(size) + SIGNATURE


def num_chunks(size: int) -> int:
    """In how many chunks so many bytes are sent."""
    return -(-size // CHUNK)


def read_manifest(data: Bytes, *, longest: int = MOST_MANIFEST) -> tuple[Manifest, bytes, bytes]:
    """A manifest, its body and its signature, of which nothing is checked yet but the layout."""
    encoding = _begin(data, Message.MANIFEST)
    if len(data) > longest:
        raise MalformedError("length")
    count = (len(data) - _MANIFEST.size - SIGNATURE) // 32
    end = _MANIFEST.size + 32 * count
    if count < 0 or len(data) != end + SIGNATURE:
        raise MalformedError("malformed")
    _, _, _, _, run, agent, round, dim, num_samples, base, size, sha256, claimed = _MANIFEST.unpack_from(data)
    if claimed != count:
        raise MalformedError("malformed")
    body = bytes(data[:end])
    manifest = Manifest(
        run=run,
        agent=agent,
        round=round,
        dim=dim,
        num_samples=num_samples,
        encoding=encoding,
        base=base,
        size=size,
        sha256=sha256,
        chunks=tuple(body[k : k + 32] for k in range(_MANIFEST.size, end, 32)),
    )
    return manifest, body, bytes(data[end:])


def signed_by_member(
    data: Bytes, federation: Federation, *, longest: int = MOST_MANIFEST
) -> tuple[str, Manifest | None]:
    """The manifest that a member signed for this run, whoever hands it on, or the reason why it is none."""
    try:
        manifest, body, signature = read_manifest(data, longest=longest)
    except MalformedError as error:
        return error.reason, None
    member = federation.members.get(manifest.agent)
    if member is None:
        return "member", None
    if not member.verify(SIGNS_MANIFEST + body, signature):
        return "signature", None
    return ("", manifest) if manifest.run == federation.run else ("run", None)


def refusal(
    data: Bytes,
    *,
    federation: Federation,
    asked: int,
    n: int,
    least: int,
    dim: int,
    most: int,
    fewest: int = 1,
    encoding: int = 0,
    base: bytes = NONE,
) -> tuple[str, Manifest | None]:
    """Why the manifest that agent `asked` gave in round `n` is not taken, "" where it is, and then the manifest.

    The reasons in their order: malformed, version, length (bytes that cannot be read), member, signature, run, agent,
    round, size, dtype. `least` is the round of the last manifest taken from that agent, `fewest` and `most` the
    bytes that a model is sent in. Time and memory are bounded by `most`, whatever `data` is.
    """
    reason, manifest = signed_by_member(data, federation, longest=min(manifest_length(most), MOST_MANIFEST))
    if manifest is None:
        return reason, None
    first, last = (n, n) if federation.synchronous else (n - federation.lag, federation.rounds - 1)
    if manifest.agent != asked:
        reason = "agent"
    elif not max(first, least) <= manifest.round <= last:
        reason = "round"
    elif (
        manifest.dim != dim or not fewest <= manifest.size <= most or len(manifest.chunks) != num_chunks(manifest.size)
    ):
        reason = "size"
    elif manifest.encoding != encoding or manifest.base != base:
        reason = "dtype"
    return reason, None if reason else manifest


@dataclass(frozen=True, kw_only=True)
class Request:
    """What one agent asks another for, signed, in 170 bytes; `nonce` is 16 random bytes, never used twice.

    | kind     | round          | index          | digest                     |
    |----------|----------------|----------------|----------------------------|
    | HELLO    |                |                | the sender's public key    |
    | MANIFEST | the sender's   |                |                            |
    | CHUNK    |                | from 0         | of the manifest            |
    | WITNESS  | the manifest's | its agent      | of the manifest in doubt   |
    | WITNESS  |                | an agent       | zeros: its newest manifest |
    """

    kind: Kind
    run: bytes
    sender: int
    receiver: int
    nonce: bytes
    round: int = 0
    index: int = 0
    digest: bytes = NONE

    @property
    def body(self) -> bytes:
        """Its only encoding."""
        return _REQUEST.pack(
            MAGIC,
            VERSION,
            Message.REQUEST,
            self.kind,
            self.run,
            self.sender,
            self.receiver,
            self.round,
            self.index,
            self.digest,
            self.nonce,
        )

    def encode(self, sign: Sign) -> bytes:
        """The body, and the signature of it in its context."""
        body = self.body
        return body + sign(SIGNS_REQUEST + body)


def read_request(data: Bytes) -> tuple[Request, bytes, bytes]:
    """A request, its body and its signature, of which nothing is checked yet but the layout."""
    kind = _begin(data, Message.REQUEST)
    if len(data) != REQUEST_LENGTH:
        raise MalformedError("malformed")
    _, _, _, _, run, sender, receiver, round, index, digest, nonce = _REQUEST.unpack_from(data)
    request = Request(
        kind=_one_of(Kind, kind),
        run=run,
        sender=sender,
        receiver=receiver,
        nonce=nonce,
        round=round,
        index=index,
        digest=digest,
    )
    return request, bytes(data[: _REQUEST.size]), bytes(data[_REQUEST.size :])


@dataclass(frozen=True)
class Answer:
    """The answer to the request with that nonce; whoever asked checks what is in it, as it is not signed itself."""

    nonce: bytes
    status: Status
    body: Bytes = b""

    def encode(self) -> bytes:
        """Its only encoding."""
        return b"".join((_ANSWER.pack(MAGIC, VERSION, Message.ANSWER, self.status, self.nonce), self.body))


def read_answer(data: Bytes) -> Answer:
    """An answer; its body is a view of `data`."""
    status = _begin(data, Message.ANSWER)
    if len(data) < _ANSWER.size:
        raise MalformedError("malformed")
    *_, nonce = _ANSWER.unpack_from(data)
    return Answer(nonce, _one_of(Status, status), memoryview(data)[_ANSWER.size :])


def offer(signed: bytes, seen: Iterable[Seen] = ()) -> bytes:
    """What is in the answer to MANIFEST: a signed manifest, and up to 64 digests of others' manifests."""
    return b"".join((_LENGTH.pack(len(signed)), signed, *(_SEEN.pack(*one) for one in seen)))


def read_offer(body: Bytes) -> tuple[bytes, list[Seen]]:
    """The signed manifest in the answer to MANIFEST, and the digests beside it."""
    if not _LENGTH.size <= len(body) <= MOST_OFFER:
        raise MalformedError("malformed")
    (length,) = _LENGTH.unpack_from(body)
    end = _LENGTH.size + length
    if end > len(body) or (len(body) - end) % _SEEN.size or (len(body) - end) // _SEEN.size > MOST_SEEN:
        raise MalformedError("malformed")
    return bytes(body[_LENGTH.size : end]), list(_SEEN.iter_unpack(body[end:]))


def hello(about: Mapping[str, Any], nonce: bytes, sign: Sign) -> bytes:
    """What is in the answer to HELLO: JSON without spaces and in the order of keys, signed for the one who asked."""
    text = json.dumps(about, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    return text + sign(SIGNS_HELLO + nonce + text)


def read_hello(body: Bytes, nonce: bytes, member: Member) -> dict[str, Any]:
    """What a member says of itself in the answer to HELLO; its signature is checked before it is read."""
    if not SIGNATURE < len(body) <= MOST_HELLO:
        raise MalformedError("length")
    text, signature = bytes(body[:-SIGNATURE]), bytes(body[-SIGNATURE:])
    if not member.verify(SIGNS_HELLO + nonce + text, signature):
        raise MalformedError("signature")
    try:
        about = json.loads(text)
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict):
        raise MalformedError("malformed")
    return about


def _begin(data: Bytes, message: Message) -> int:
    """The byte after what all messages begin with. A version that is not ours is told before anything is read."""
    if len(data) <= len(MAGIC) or data[: len(MAGIC)] != MAGIC:
        raise MalformedError("malformed")
    if data[len(MAGIC)] != VERSION:
        raise MalformedError("version")
    if len(data) < _HEAD.size or data[8] != message:
        raise MalformedError("malformed")
    return data[9]


def _one_of(kinds: type[Enumerated], number: int) -> Enumerated:
    try:
        return kinds(number)
    except ValueError:
        raise MalformedError("malformed") from None

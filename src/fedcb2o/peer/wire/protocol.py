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

BytesLike: TypeAlias = bytes | bytearray | memoryview
Signer: TypeAlias = Callable[[bytes], bytes]
ManifestDigest: TypeAlias = tuple[
    int, int, bytes
]  # an agent, a round, and the digest of its manifest for it

_EnumType = TypeVar("_EnumType", bound=IntEnum)

_MAGIC = b"fedcb2o"
_VERSION = 1
CHUNK_BYTES = 2**20
MAX_CHUNKS = 2**14  # of a model: 16 GiB as sent
MAX_DIGESTS = 64  # digests beside a manifest
MAX_HELLO_BYTES = 2**20
ZERO_DIGEST = bytes(32)  # a digest where there is none
SIGNATURE_BYTES = 64

MANIFEST_CONTEXT = b"fedcb2o manifest v1\0"
REQUEST_CONTEXT = b"fedcb2o request v1\0"
HELLO_CONTEXT = b"fedcb2o hello v1\0"

_HEAD = struct.Struct("<7sBBB")  # magic, version, what it is, and its encoding, kind or status
_MANIFEST = struct.Struct("<7sBBB 32s II QQ 32s Q 32s I")
_REQUEST = struct.Struct("<7sBBB 32s II II 32s 16s")
_ANSWER = struct.Struct("<7sBBB 16s")
_LENGTH = struct.Struct("<I")
_DIGEST = struct.Struct("<II 32s")
REQUEST_BYTES = _REQUEST.size + SIGNATURE_BYTES
MAX_MANIFEST_BYTES = _MANIFEST.size + 32 * MAX_CHUNKS + SIGNATURE_BYTES
MAX_OFFER_BYTES = _LENGTH.size + MAX_MANIFEST_BYTES + MAX_DIGESTS * _DIGEST.size


class _MessageType(IntEnum):
    """What a message is."""

    MANIFEST = 1
    REQUEST = 2
    ANSWER = 3


class RequestKind(IntEnum):
    """What is asked for."""

    HELLO = 1  # who answers
    MANIFEST = 2  # of its newest model
    CHUNK = 3  # of that model
    WITNESS = 4  # the manifest of another agent, as it was received


class AnswerStatus(IntEnum):
    """How a request went; all but OK have no body."""

    OK = 0
    NOT_YET = 1  # there is no model yet for the asker's round
    BUSY = 2  # it asks too often
    NOT_HERE = 3  # it is gone, or never was
    ANOTHER_RUN = 4
    ANOTHER_VERSION = 5  # of the protocol, that of this answer

    @property
    def label(self) -> str:
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
    def from_content(
        cls,
        content: BytesLike,
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
            chunks=tuple(
                hashlib.sha256(view[k : k + CHUNK_BYTES]).digest()
                for k in range(0, len(view), CHUNK_BYTES)
            ),
        )

    @property
    def body(self) -> bytes:
        """Its only encoding."""
        head = _MANIFEST.pack(
            _MAGIC,
            _VERSION,
            _MessageType.MANIFEST,
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

    def to_signed_bytes(self, sign: Signer) -> bytes:
        """The body, and the signature of it in its context."""
        body = self.body
        return body + sign(MANIFEST_CONTEXT + body)


def manifest_bytes(size: int) -> int:
    """How long the signed manifest of a model is that is sent in so many bytes."""
    return _MANIFEST.size + 32 * num_chunks(size) + SIGNATURE_BYTES


def num_chunks(size: int) -> int:
    """In how many chunks so many bytes are sent."""
    return -(-size // CHUNK_BYTES)


def decode_manifest(
    data: BytesLike, *, max_bytes: int = MAX_MANIFEST_BYTES
) -> tuple[Manifest, bytes, bytes]:
    """A manifest, its body and its signature, of which nothing is checked yet but the layout."""
    encoding = _decode_header(data, _MessageType.MANIFEST)
    if len(data) > max_bytes:
        raise MalformedError("length")
    count = (len(data) - _MANIFEST.size - SIGNATURE_BYTES) // 32
    end = _MANIFEST.size + 32 * count
    if count < 0 or len(data) != end + SIGNATURE_BYTES:
        raise MalformedError("malformed")
    _, _, _, _, run, agent, round, dim, num_samples, base, size, sha256, claimed = (
        _MANIFEST.unpack_from(data)
    )
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


def verify_member_manifest(
    data: BytesLike, federation: Federation, *, max_bytes: int = MAX_MANIFEST_BYTES
) -> tuple[str, Manifest | None]:
    """The manifest that a member signed for this run, whoever hands it on, or the reason why it is none."""
    try:
        manifest, body, signature = decode_manifest(data, max_bytes=max_bytes)
    except MalformedError as error:
        return error.reason, None
    member = federation.members.get(manifest.agent)
    if member is None:
        return "member", None
    if not member.verify(MANIFEST_CONTEXT + body, signature):
        return "signature", None
    return ("", manifest) if manifest.run == federation.run else ("run", None)


def validate_manifest(
    data: BytesLike,
    *,
    federation: Federation,
    peer: int,
    n: int,
    min_round: int,
    dim: int,
    max_bytes: int,
    min_bytes: int = 1,
    encoding: int = 0,
    base: bytes = ZERO_DIGEST,
) -> tuple[str, Manifest | None]:
    """Why the manifest that agent `asked` gave in round `n` is not taken, "" where it is, and then the manifest.

    The reasons in their order: malformed, version, length (bytes that cannot be read), member, signature, run, agent,
    round, size, dtype. `least` is the round of the last manifest taken from that agent, `fewest` and `most` the
    bytes that a model is sent in. Time and memory are bounded by `most`, whatever `data` is.
    """
    reason, manifest = verify_member_manifest(
        data, federation, max_bytes=min(manifest_bytes(max_bytes), MAX_MANIFEST_BYTES)
    )
    if manifest is None:
        return reason, None
    first, last = (n, n) if federation.synchronous else (n - federation.lag, federation.rounds - 1)
    if manifest.agent != peer:
        reason = "agent"
    elif not max(first, min_round) <= manifest.round <= last:
        reason = "round"
    elif (
        manifest.dim != dim
        or not min_bytes <= manifest.size <= max_bytes
        or len(manifest.chunks) != num_chunks(manifest.size)
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

    kind: RequestKind
    run: bytes
    sender: int
    receiver: int
    nonce: bytes
    round: int = 0
    index: int = 0
    digest: bytes = ZERO_DIGEST

    @property
    def body(self) -> bytes:
        """Its only encoding."""
        return _REQUEST.pack(
            _MAGIC,
            _VERSION,
            _MessageType.REQUEST,
            self.kind,
            self.run,
            self.sender,
            self.receiver,
            self.round,
            self.index,
            self.digest,
            self.nonce,
        )

    def encode(self, sign: Signer) -> bytes:
        """The body, and the signature of it in its context."""
        body = self.body
        return body + sign(REQUEST_CONTEXT + body)


def decode_request(data: BytesLike) -> tuple[Request, bytes, bytes]:
    """A request, its body and its signature, of which nothing is checked yet but the layout."""
    kind = _decode_header(data, _MessageType.REQUEST)
    if len(data) != REQUEST_BYTES:
        raise MalformedError("malformed")
    _, _, _, _, run, sender, receiver, round, index, digest, nonce = _REQUEST.unpack_from(data)
    request = Request(
        kind=_decode_enum(RequestKind, kind),
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
    status: AnswerStatus
    body: BytesLike = b""

    def encode(self) -> bytes:
        """Its only encoding."""
        return b"".join(
            (
                _ANSWER.pack(_MAGIC, _VERSION, _MessageType.ANSWER, self.status, self.nonce),
                self.body,
            )
        )


def decode_answer(data: BytesLike) -> Answer:
    """An answer; its body is a view of `data`."""
    status = _decode_header(data, _MessageType.ANSWER)
    if len(data) < _ANSWER.size:
        raise MalformedError("malformed")
    *_, nonce = _ANSWER.unpack_from(data)
    return Answer(nonce, _decode_enum(AnswerStatus, status), memoryview(data)[_ANSWER.size :])


def encode_offer(signed: bytes, digests: Iterable[ManifestDigest] = ()) -> bytes:
    """What is in the answer to MANIFEST: a signed manifest, and up to 64 digests of others' manifests."""
    return b"".join((_LENGTH.pack(len(signed)), signed, *(_DIGEST.pack(*one) for one in digests)))


def decode_offer(body: BytesLike) -> tuple[bytes, list[ManifestDigest]]:
    """The signed manifest in the answer to MANIFEST, and the digests beside it."""
    if not _LENGTH.size <= len(body) <= MAX_OFFER_BYTES:
        raise MalformedError("malformed")
    (length,) = _LENGTH.unpack_from(body)
    end = _LENGTH.size + length
    if (
        end > len(body)
        or (len(body) - end) % _DIGEST.size
        or (len(body) - end) // _DIGEST.size > MAX_DIGESTS
    ):
        raise MalformedError("malformed")
    return bytes(body[_LENGTH.size : end]), list(_DIGEST.iter_unpack(body[end:]))


def encode_hello(content: Mapping[str, Any], nonce: bytes, sign: Signer) -> bytes:
    """What is in the answer to HELLO: JSON without spaces and in the order of keys, signed for the one who asked."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    return text + sign(HELLO_CONTEXT + nonce + text)


def decode_hello(body: BytesLike, nonce: bytes, member: Member) -> dict[str, Any]:
    """What a member says of itself in the answer to HELLO; its signature is checked before it is read."""
    if not SIGNATURE_BYTES < len(body) <= MAX_HELLO_BYTES:
        raise MalformedError("length")
    text = bytes(body[:-SIGNATURE_BYTES])
    signature = bytes(body[-SIGNATURE_BYTES:])
    if not member.verify(HELLO_CONTEXT + nonce + text, signature):
        raise MalformedError("signature")
    try:
        about = json.loads(text)
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict):
        raise MalformedError("malformed")
    return about


def _decode_header(data: BytesLike, message: _MessageType) -> int:
    """The byte after what all messages begin with. A version that is not ours is told before anything is read."""
    if len(data) <= len(_MAGIC) or data[: len(_MAGIC)] != _MAGIC:
        raise MalformedError("malformed")
    if data[len(_MAGIC)] != _VERSION:
        raise MalformedError("version")
    if len(data) < _HEAD.size or data[8] != message:
        raise MalformedError("malformed")
    return data[9]


def _decode_enum(kinds: type[_EnumType], number: int) -> _EnumType:
    try:
        return kinds(number)
    except ValueError:
        raise MalformedError("malformed") from None

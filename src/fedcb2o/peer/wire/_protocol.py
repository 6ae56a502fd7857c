"""Messages on the wire (docs/protocol.md): manifests, requests and answers, in fixed layouts.

All numbers are little-endian. Each value has exactly one encoding, so that signatures and
comparisons work on bytes. Received bytes are hostile: sizes are compared with the length of the
data before anything is allocated, and only `MalformedError` is raised. A context precedes signed
bytes, so that a signature for one purpose is not valid for another.

Example:
    >>> num_chunks(CHUNK_BYTES + 1)
    2
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
_Signer: TypeAlias = Callable[[bytes], bytes]
ManifestDigest: TypeAlias = tuple[int, int, bytes]  # agent, round, digest of its manifest

_EnumType = TypeVar("_EnumType", bound=IntEnum)

_MAGIC = b"fedcb2o"
_VERSION = 1
MINOR_VERSION = 1
"""Number of compatible additions to this version: 1 adds relays."""
CHUNK_BYTES = 2**20
MAX_CHUNKS = 2**14  # of one model: 16 GiB encoded
MAX_DIGESTS = 64  # next to one manifest
MAX_HELLO_BYTES = 2**20
ZERO_DIGEST = bytes(32)
SIGNATURE_BYTES = 64

MANIFEST_CONTEXT = b"fedcb2o manifest v1\0"
REQUEST_CONTEXT = b"fedcb2o request v1\0"
HELLO_CONTEXT = b"fedcb2o hello v1\0"

_HEAD = struct.Struct("<7sBBB")  # magic, version, message type, and its encoding, kind or status
_MANIFEST = struct.Struct("<7sBBB 32s II QQ 32s Q 32s I")
_REQUEST = struct.Struct("<7sBBB 32s II II 32s 16s")
_ANSWER = struct.Struct("<7sBBB 16s")
_LENGTH = struct.Struct("<I")
_DIGEST = struct.Struct("<II 32s")
REQUEST_BYTES = _REQUEST.size + SIGNATURE_BYTES
MAX_MANIFEST_BYTES = _MANIFEST.size + 32 * MAX_CHUNKS + SIGNATURE_BYTES
MAX_OFFER_BYTES = _LENGTH.size + MAX_MANIFEST_BYTES + MAX_DIGESTS * _DIGEST.size


class _MessageType(IntEnum):
    MANIFEST = 1
    REQUEST = 2
    ANSWER = 3


class RequestKind(IntEnum):
    """Content that a request asks for."""

    HELLO = 1  # the receiver's description of itself
    MANIFEST = 2  # of its newest model
    CHUNK = 3  # of that model
    WITNESS = 4  # the manifest of another agent, as received


class AnswerStatus(IntEnum):
    """Outcome of a request; only an answer with OK has a body."""

    OK = 0
    NOT_YET = 1  # no model for the sender's round exists yet
    BUSY = 2  # the sender asks too often
    NOT_HERE = 3  # not available any more, or never was
    ANOTHER_RUN = 4
    ANOTHER_VERSION = 5  # of the protocol; the answer has the receiver's version

    @property
    def label(self) -> str:
        """Text under which the status is counted and shown."""
        return self.name.lower().replace("_", " ")


class MalformedError(ValueError):
    """Bytes that are no valid message, with the reason under which they are counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Signed description of a published model, by its encoded bytes.

    `round` counts from 0. `base` is the digest of the model that the encoding refers to. `size` and
    `sha256` are those of the encoded bytes.
    """

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
        """Create the manifest of an encoded model; `round` counts from 0."""
        view = memoryview(content).cast("B")
        chunks = (view[k : k + CHUNK_BYTES] for k in range(0, len(view), CHUNK_BYTES))
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
            chunks=tuple(hashlib.sha256(chunk).digest() for chunk in chunks),
        )

    @property
    def body(self) -> bytes:
        """The unsigned encoding."""
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
        """SHA-256 of the body, which identifies the manifest."""
        return hashlib.sha256(self.body).digest()

    def to_signed_bytes(self, sign: _Signer) -> bytes:
        """Return the body, then its signature."""
        body = self.body
        return body + sign(MANIFEST_CONTEXT + body)


def manifest_bytes(size: int) -> int:
    """Return the length of the signed manifest of a model of `size` encoded bytes."""
    return _MANIFEST.size + 32 * num_chunks(size) + SIGNATURE_BYTES


def num_chunks(size: int) -> int:
    """Return the number of chunks of a model of `size` encoded bytes."""
    return -(-size // CHUNK_BYTES)


def decode_manifest(
    data: BytesLike, *, max_bytes: int = MAX_MANIFEST_BYTES
) -> tuple[Manifest, bytes, bytes]:
    """Decode a signed manifest; only its layout is checked.

    Its body and unverified signature are returned too.
    """
    encoding = _decode_header(data, _MessageType.MANIFEST)
    if len(data) > max_bytes:
        raise MalformedError("length")
    count = (len(data) - _MANIFEST.size - SIGNATURE_BYTES) // 32
    end = _MANIFEST.size + 32 * count
    if count < 0 or len(data) != end + SIGNATURE_BYTES:
        raise MalformedError("malformed")

    fields = _MANIFEST.unpack_from(data)
    run, agent, round, dim, num_samples, base, size, sha256, claimed_count = fields[4:]
    if claimed_count != count:
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
    """Decode a manifest from any sender, and verify its signature for this run.

    A rejected one is returned as its reason and None, another one with an empty text.
    """
    try:
        manifest, body, signature = decode_manifest(data, max_bytes=max_bytes)
    except MalformedError as error:
        return error.reason, None
    member = federation.members.get(manifest.agent)
    if member is None:
        return "member", None
    if not member.verify(MANIFEST_CONTEXT + body, signature):
        return "signature", None
    if manifest.run != federation.run:
        return "run", None
    return "", manifest


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
    """Decode a manifest and check that its model can be accepted.

    A rejected one is returned as its reason and None, another one with an empty text. The reasons
    are, in this order: malformed, version, length (bytes that cannot be decoded), member,
    signature, run, agent, round, size, dtype.

    `max_bytes` and `min_bytes` bound an encoded model, and `max_bytes` time and memory. `min_round`
    is the round of the last manifest accepted from the asked agent. `base` is the expected digest
    of the model that the encoding refers to.
    """
    longest = min(manifest_bytes(max_bytes), MAX_MANIFEST_BYTES)
    reason, manifest = verify_member_manifest(data, federation, max_bytes=longest)
    if manifest is None:
        return reason, None

    first, last = n - federation.lag, federation.rounds - 1
    if federation.synchronous:
        first, last = n, n
    has_size = min_bytes <= manifest.size <= max_bytes
    has_chunks = len(manifest.chunks) == num_chunks(manifest.size)

    if manifest.agent != peer:
        return "agent", None
    if not max(first, min_round) <= manifest.round <= last:
        return "round", None
    if manifest.dim != dim or not has_size or not has_chunks:
        return "size", None
    if manifest.encoding != encoding or manifest.base != base:
        return "dtype", None
    return "", manifest


@dataclass(frozen=True, kw_only=True)
class Request:
    """Signed request of one agent to another, 170 bytes.

    | kind     | round          | index          | digest                     |
    |----------|----------------|----------------|----------------------------|
    | HELLO    |                |                | the sender's public key    |
    | MANIFEST | the sender's   |                |                            |
    | CHUNK    |                | from 0         | of the manifest            |
    | WITNESS  | the manifest's | its agent      | of the manifest in doubt   |
    | WITNESS  |                | an agent       | zeros: its newest manifest |

    The nonce has 16 random bytes, which are never used twice.
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
        """The unsigned encoding."""
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

    def encode(self, sign: _Signer) -> bytes:
        """Return the body, then its signature."""
        body = self.body
        return body + sign(REQUEST_CONTEXT + body)


def decode_request(data: BytesLike) -> tuple[Request, bytes, bytes]:
    """Decode a signed request; only its layout is checked.

    Its body and unverified signature are returned too.
    """
    kind = _decode_header(data, _MessageType.REQUEST)
    if len(data) != REQUEST_BYTES:
        raise MalformedError("malformed")
    run, sender, receiver, round, index, digest, nonce = _REQUEST.unpack_from(data)[4:]
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
    """Unsigned answer to the request with the same nonce."""

    nonce: bytes
    status: AnswerStatus
    body: BytesLike = b""

    def encode(self) -> bytes:
        """Encode the answer."""
        head = _ANSWER.pack(_MAGIC, _VERSION, _MessageType.ANSWER, self.status, self.nonce)
        return b"".join((head, self.body))


def decode_answer(data: BytesLike) -> Answer:
    """Decode an answer; its body is a view of `data`."""
    status = _decode_header(data, _MessageType.ANSWER)
    if len(data) < _ANSWER.size:
        raise MalformedError("malformed")
    *_, nonce = _ANSWER.unpack_from(data)
    return Answer(nonce, _decode_enum(AnswerStatus, status), memoryview(data)[_ANSWER.size :])


def encode_offer(signed: bytes, digests: Iterable[ManifestDigest] = ()) -> bytes:
    """Encode the content of an answer to MANIFEST.

    It has at most 64 digests of other agents' manifests.
    """
    packed = (_DIGEST.pack(*digest) for digest in digests)
    return b"".join((_LENGTH.pack(len(signed)), signed, *packed))


def decode_offer(body: BytesLike) -> tuple[bytes, list[ManifestDigest]]:
    """Return the signed manifest in an answer to MANIFEST, and digests of others."""
    if not _LENGTH.size <= len(body) <= MAX_OFFER_BYTES:
        raise MalformedError("malformed")
    (length,) = _LENGTH.unpack_from(body)
    end = _LENGTH.size + length
    num_digests, rest = divmod(len(body) - end, _DIGEST.size)
    if end > len(body) or rest or num_digests > MAX_DIGESTS:
        raise MalformedError("malformed")
    return bytes(body[_LENGTH.size : end]), list(_DIGEST.iter_unpack(body[end:]))


def encode_hello(content: Mapping[str, Any], nonce: bytes, sign: _Signer) -> bytes:
    """Encode and sign the content of an answer to HELLO.

    It is JSON with sorted keys and without spaces, then the signature.
    """
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    # The nonce is signed too, so that an old answer cannot be sent again.
    return text + sign(HELLO_CONTEXT + nonce + text)


def decode_hello(body: BytesLike, nonce: bytes, member: Member) -> dict[str, Any]:
    """Verify and decode the content of an answer to HELLO; it may be false."""
    if not SIGNATURE_BYTES < len(body) <= MAX_HELLO_BYTES:
        raise MalformedError("length")
    text = bytes(body[:-SIGNATURE_BYTES])
    signature = bytes(body[-SIGNATURE_BYTES:])
    if not member.verify(HELLO_CONTEXT + nonce + text, signature):
        raise MalformedError("signature")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise MalformedError("malformed")
    return content


def _decode_header(data: BytesLike, message: _MessageType) -> int:
    """Check the common header, the version first; return the next byte."""
    if len(data) <= len(_MAGIC) or data[: len(_MAGIC)] != _MAGIC:
        raise MalformedError("malformed")
    # Another version may have another header, of which nothing else is read.
    if data[len(_MAGIC)] != _VERSION:
        raise MalformedError("version")
    if len(data) < _HEAD.size or data[8] != message:
        raise MalformedError("malformed")
    return data[9]


def _decode_enum(enum_type: type[_EnumType], number: int) -> _EnumType:
    try:
        return enum_type(number)
    except ValueError:
        raise MalformedError("malformed") from None

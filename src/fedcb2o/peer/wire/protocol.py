"""Messages on the wire (docs/protocol.md): manifests, requests and answers.

A request is the first line and up to two headers of an HTTP request. A manifest has a fixed
layout, little-endian. Each value has exactly one encoding, so that signatures and comparisons work
on bytes. Received bytes are hostile: sizes are compared with the length of the data before anything
is allocated, and only `MalformedError` is raised. A context precedes signed bytes, so that a
signature for one purpose is not valid for another.
"""

import base64
import hashlib
import json
import re
import secrets
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import cached_property, partial
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from fedcb2o.peer.membership.federation import Federation
from fedcb2o.peer.membership.identity import Member

BytesLike: TypeAlias = bytes | bytearray | memoryview
_Signer: TypeAlias = Callable[[bytes], bytes]
ManifestDigest: TypeAlias = tuple[int, int, bytes]  # agent, round, digest of its manifest

_MAGIC = b"fedcb2o"
_VERSION = 1
MINOR_VERSION = 3  # changes within this version: 1 adds relays, 3 is HTTPS
CHUNK_BYTES = 2**20
MAX_CHUNKS = 2**14  # of one model: 16 GiB encoded
MAX_DIGESTS = 64  # next to one manifest
MAX_TRIGGERS_BYTES = 2**19  # next to one manifest, with their signature
MAX_HELLO_BYTES = 2**20
ZERO_DIGEST = bytes(32)
_MANIFEST_TYPE = 1
SIGNATURE_BYTES = 64

MANIFEST_CONTEXT = b"fedcb2o manifest v1\0"
TRIGGERS_CONTEXT = b"fedcb2o triggers v1\0"
REQUEST_CONTEXT = b"fedcb2o request v2\0"
HELLO_CONTEXT = b"fedcb2o hello v1\0"

# Little-endian and without padding: the same bytes on every machine.
_MANIFEST = struct.Struct("<7sBBB 32s II QQ 32s Q 32s I")
_MANIFEST_FIELDS = (
    "encoding", "run", "agent", "round", "dim", "num_samples", "base", "size", "sha256",
)  # fmt: skip
"""Fields in this order, after magic, version and type, and before the number of chunks."""
MAX_REQUEST_BYTES = 2**9
_AUTHORIZATION = b"\nAuthorization: Ed25519 "
_OTHER_VERSION = re.compile(rb"[A-Z]{3,4} /v(?!1/)[0-9]{1,3}/")
MAX_MANIFEST_BYTES = _MANIFEST.size + 32 * MAX_CHUNKS + SIGNATURE_BYTES
MAX_OFFER_BYTES = 4 * (MAX_MANIFEST_BYTES + MAX_TRIGGERS_BYTES) // 3 + 2**14


class RequestKind(StrEnum):
    """Resource that a request asks for."""

    HELLO = "hello"  # the receiver's description of itself
    MANIFEST = "manifest"  # of its newest model
    MODEL = "models"  # the bytes of a model, or a part of them
    WITNESS = "witness"  # the manifest of another agent, as received


class AnswerStatus(IntEnum):
    """Outcome of a request, as a status code of HTTP; only an answer with OK has a body."""

    MALFORMED = 0  # never sent: what arrived is no answer
    OK = 200
    NOT_HERE = 404  # not available any more, or never was
    ANOTHER_VERSION = 409  # of the protocol
    NO_SUCH_PART = 416  # the model ends before it
    ANOTHER_RUN = 421
    BUSY = 429  # the sender asks too often
    NOT_YET = 503  # no model for the sender's round exists yet

    @property
    def label(self) -> str:
        """Text under which the status is counted and shown."""
        return self.name.lower().replace("_", " ")

    @property
    def is_temporary(self) -> bool:
        """True if the same request may be answered later."""
        return self in (AnswerStatus.BUSY, AnswerStatus.NOT_YET)


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
    def from_content(cls, content: BytesLike, **fields: Any) -> "Manifest":
        """Create the manifest of an encoded model from the `fields` that it does not imply.

        By default the content is raw float32, `RawCodec`.
        """
        view = memoryview(content).cast("B")
        chunks = (view[k : k + CHUNK_BYTES] for k in range(0, len(view), CHUNK_BYTES))
        return cls(
            size=len(view),
            sha256=hashlib.sha256(view).digest(),
            chunks=tuple(hashlib.sha256(chunk).digest() for chunk in chunks),
            **{"encoding": 0, "base": ZERO_DIGEST, **fields},
        )

    @property
    def body(self) -> bytes:
        """The unsigned encoding."""
        values = [getattr(self, name) for name in _MANIFEST_FIELDS]
        head = _MANIFEST.pack(_MAGIC, _VERSION, _MANIFEST_TYPE, *values, len(self.chunks))
        return head + b"".join(self.chunks)

    @cached_property
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
    """Decode a manifest by its layout only; return it, its body, and its unverified signature."""
    header = bytes(data[: len(_MAGIC) + 2])
    if len(header) <= len(_MAGIC) or not header.startswith(_MAGIC):
        raise MalformedError("malformed")
    # Another version may have another header, of which nothing else is read.
    if header[len(_MAGIC)] != _VERSION:
        raise MalformedError("version")
    if header[-1] != _MANIFEST_TYPE:
        raise MalformedError("malformed")
    if len(data) > max_bytes:
        raise MalformedError("length")
    count = (len(data) - _MANIFEST.size - SIGNATURE_BYTES) // 32
    end = _MANIFEST.size + 32 * count
    if count < 0 or len(data) != end + SIGNATURE_BYTES:
        raise MalformedError("malformed")

    *values, claimed_count = _MANIFEST.unpack_from(data)[3:]
    if claimed_count != count:
        raise MalformedError("malformed")

    body = bytes(data[:end])
    chunks = tuple(body[k : k + 32] for k in range(_MANIFEST.size, end, 32))
    fields = dict(zip(_MANIFEST_FIELDS, values, strict=True))
    return Manifest(**fields, chunks=chunks), body, bytes(data[end:])


def verify_member_manifest(
    data: BytesLike, federation: Federation, *, max_bytes: int = MAX_MANIFEST_BYTES
) -> tuple[str, Manifest | None]:
    """Return an empty text and a manifest that a member signed for this run, or a reason."""
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
    base: bytes | None = ZERO_DIGEST,
) -> tuple[str, Manifest | None]:
    """Return an empty text and a manifest whose model can be accepted, or a reason and None.

    The reasons are, in this order: malformed, version, length (bytes that cannot be decoded),
    member, signature, run, agent, round, size, dtype.

    `max_bytes` and `min_bytes` bound an encoded model, and `max_bytes` time and memory. `min_round`
    is the round of the last manifest accepted from the asked agent. `base` is the expected digest
    of the model that the encoding refers to; None for any.
    """
    # The list of chunks is bounded before it is decoded.
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
    if manifest.encoding != encoding or base not in (None, manifest.base):
        return "dtype", None
    return "", manifest


@dataclass(frozen=True, kw_only=True)
class Request:
    """Signed request of one agent to another.

    | kind     | round          | index     | digest                     |
    |----------|----------------|-----------|----------------------------|
    | HELLO    |                |           | the sender's public key    |
    | MANIFEST | the sender's   |           |                            |
    | MODEL    |                |           | of the manifest            |
    | WITNESS  | the manifest's | its agent | of the manifest in doubt   |
    | WITNESS  |                | an agent  | zeros: its newest manifest |

    MODEL may ask for the bytes from `first` to `last` (included; None: to the end). The nonce has
    16 random bytes, which are never used twice.
    """

    kind: RequestKind
    run: bytes
    sender: int
    receiver: int
    nonce: bytes = field(default_factory=partial(secrets.token_bytes, 16))
    round: int = 0
    index: int = 0
    digest: bytes = ZERO_DIGEST
    first: int = 0
    last: int | None = None

    @property
    def body(self) -> bytes:
        """The signed encoding: the method and the target, then the range."""
        digest = self.digest.hex()
        query = {
            RequestKind.HELLO: f"?key={digest}&",
            RequestKind.MANIFEST: f"?round={self.round}&",
            RequestKind.MODEL: f"/{digest}?",
            RequestKind.WITNESS: f"?agent={self.index}&round={self.round}&digest={digest}&",
        }[self.kind]
        ends = f"run={self.run.hex()}&from={self.sender}&to={self.receiver}"
        text = f"GET /v1/{self.kind}{query}{ends}&nonce={self.nonce.hex()}"
        if self.first or self.last is not None:
            text += f"\nRange: bytes={self.first}-{'' if self.last is None else self.last}"
        return text.encode()

    def encode(self, sign: _Signer) -> bytes:
        """Return the body, then a line with its signature."""
        body = self.body
        return body + _AUTHORIZATION + base64.b64encode(sign(REQUEST_CONTEXT + body))


def decode_request(data: BytesLike) -> tuple[Request, bytes, bytes]:
    """Decode a request by its form only; return it, its body, and its unverified signature."""
    if len(data) > MAX_REQUEST_BYTES:
        raise MalformedError("malformed")
    body, _, encoded = bytes(data).partition(_AUTHORIZATION)
    try:
        target, _, part = body.decode("ascii").partition("\nRange: bytes=")
        path, _, query = target.removeprefix("GET /v1/").partition("?")
        kind, _, model = path.partition("/")
        fields = dict(pair.split("=") for pair in query.split("&"))
        first, _, last = part.partition("-")
        digest = model or fields.get("key") or fields.get("digest") or ZERO_DIGEST.hex()
        signature = base64.b64decode(encoded)
        request = Request(
            kind=RequestKind(kind),
            run=bytes.fromhex(fields["run"]),
            sender=int(fields["from"]),
            receiver=int(fields["to"]),
            nonce=bytes.fromhex(fields["nonce"]),
            round=int(fields.get("round", 0)),
            index=int(fields.get("agent", 0)),
            digest=bytes.fromhex(digest),
            first=int(first or 0),
            last=int(last) if last else None,
        )
    except (ValueError, KeyError):
        # Another version may have another form, of which nothing else is read.
        reason = "version" if _OTHER_VERSION.match(data) else "malformed"
        raise MalformedError(reason) from None
    # Only one form of each request is valid: that in which it is encoded here.
    is_canonical = request.body == body and base64.b64encode(signature) == encoded
    sizes = [len(one) for one in (request.run, request.nonce, request.digest, signature)]
    numbers = (request.sender, request.receiver, request.round, request.index)
    are_valid = sizes == [32, 16, 32, SIGNATURE_BYTES] and 0 <= min(numbers) <= max(numbers) < 2**32
    is_part = request.kind is RequestKind.MODEL and max(request.first, request.last or 0) < 10**15
    if not (is_canonical and are_valid and (is_part or not part)):
        raise MalformedError("malformed")
    return request, body, signature


class Question:
    """A request that waits for its answer until the monotonic time `end`."""

    def __init__(self, end: float = 0.0) -> None:
        self.end = end
        self._answers = SimpleQueue[Answer | None]()

    def put(self, answer: "Answer | None") -> None:
        """Note the answer, or None if none will come; the first one counts."""
        if self._answers.empty():
            self._answers.put(answer)

    def answer(self) -> "Answer | None":
        """Wait for the answer, once."""
        with suppress(Empty):
            return self._answers.get(timeout=max(0.0, self.end - time.monotonic()))
        return None


class Responder:
    """Function that is called once, with the default arguments if it is dropped before."""

    def __init__(self, respond: Callable[..., None], *default: Any) -> None:
        self._respond: Callable[..., None] | None = respond
        self._default = default

    def __call__(self, *arguments: Any) -> None:
        respond, self._respond = self._respond, None
        if respond is not None:
            respond(*arguments)

    def __del__(self) -> None:
        self(*self._default)


@dataclass(frozen=True)
class Answer:
    """Unsigned answer to a request, with further headers of HTTP."""

    status: AnswerStatus
    body: BytesLike = b""
    headers: tuple[tuple[str, str], ...] = ()

    def encode(self) -> bytes:
        """Encode the answer for a sealed message: three digits, a line break, and the body."""
        return b"".join((b"%d\n" % self.status, self.body))


def decode_answer(data: BytesLike) -> Answer:
    """Decode the answer in a sealed message; its body is a view of `data`."""
    head = bytes(data[:4])
    if not re.fullmatch(rb"[1-9][0-9]{2}\n", head):
        raise MalformedError("malformed")
    status = decode_status(int(head))
    if status != int(head):  # 206 is of HTTP's ranges alone
        raise MalformedError("malformed")
    return Answer(status, memoryview(data)[4:])


def decode_status(code: int) -> AnswerStatus:
    """Return the status of a code of HTTP, as far as this protocol has it."""
    try:
        return AnswerStatus.OK if code == 206 else AnswerStatus(code)
    except ValueError:
        raise MalformedError("malformed") from None


def sign_triggers(triggers: bytes, manifest: Manifest, sign: _Signer) -> bytes:
    """Return triggers, then their signature for a manifest: it holds for this run and round."""
    return triggers + sign(TRIGGERS_CONTEXT + manifest.digest + triggers)


def verify_triggers(data: bytes, manifest: Manifest, member: Member) -> bytes:
    """Return the triggers that a member signed for a manifest, which may be no triggers."""
    triggers, signature = data[:-SIGNATURE_BYTES], data[-SIGNATURE_BYTES:]
    if not member.verify(TRIGGERS_CONTEXT + manifest.digest + triggers, signature):
        raise MalformedError("triggers")
    return triggers


def encode_offer(
    signed: bytes, digests: Iterable[ManifestDigest] = (), triggers: bytes = b""
) -> bytes:
    """Encode the answer to MANIFEST, with at most 64 digests of other agents' manifests."""
    seen = [[agent, n, digest.hex()] for agent, n, digest in digests]
    content = {"manifest": base64.b64encode(signed).decode(), "seen": seen}
    if triggers:
        content["triggers"] = base64.b64encode(triggers).decode()
    return json.dumps(content).encode()


def decode_offer(body: BytesLike) -> tuple[bytes, list[ManifestDigest], bytes]:
    """Return the parts of an answer to MANIFEST.

    They are the signed manifest, digests of others, and the signed triggers, empty without any.
    """
    if len(body) > MAX_OFFER_BYTES:
        raise MalformedError("malformed")
    try:
        content = json.loads(bytes(body))
        signed = base64.b64decode(content["manifest"].encode(), validate=True)
        digests = [(agent, n, bytes.fromhex(digest)) for agent, n, digest in content["seen"]]
        triggers = base64.b64decode(content.get("triggers", "").encode(), validate=True)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise MalformedError("malformed") from None
    # JSON's true is an int in Python, but no number.
    are_valid = all(
        type(agent) is int and type(n) is int and 0 <= min(agent, n) <= max(agent, n) < 2**32
        for agent, n, digest in digests
    )
    have_size = all(len(digest) == len(ZERO_DIGEST) for _, _, digest in digests)
    are_few = len(digests) <= MAX_DIGESTS and len(triggers) <= MAX_TRIGGERS_BYTES
    if not (are_valid and have_size and are_few):
        raise MalformedError("malformed")
    return signed, digests, triggers


def encode_hello(content: Mapping[str, Any], nonce: bytes, sign: _Signer) -> bytes:
    """Encode the answer to HELLO: JSON with sorted keys and without spaces, then a signature."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    # The nonce is signed too, so that an old answer cannot be sent again.
    return text + sign(HELLO_CONTEXT + nonce + text)


def decode_hello(body: BytesLike, nonce: bytes, member: Member) -> dict[str, Any]:
    """Verify and decode the content of an answer to HELLO; it may be false."""
    if not SIGNATURE_BYTES < len(body) <= MAX_HELLO_BYTES:
        raise MalformedError("length")
    text = bytes(body[:-SIGNATURE_BYTES])
    signature = bytes(body[-SIGNATURE_BYTES:])
    # First, so that only bytes of the member reach the parser of JSON.
    if not member.verify(HELLO_CONTEXT + nonce + text, signature):
        raise MalformedError("signature")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise MalformedError("malformed")
    return content

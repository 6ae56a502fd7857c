"""Hostile member with valid keys and a different invalid answer in each round.

`LIES` maps the name of each invalid answer to the reasons for which a peer may refuse it. Peers
must not receive any model of this member. `tests/hostile` attacks processes, without this code.
"""

import contextlib
import json
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from tests.peer import raw

from fedcb2o.nn import parameters
from fedcb2o.peer import Federation, Identity
from fedcb2o.peer.node.agent import build_network
from fedcb2o.peer.wire.protocol import (
    CHUNK_BYTES,
    SIGNATURE_BYTES,
    Answer,
    AnswerStatus,
    BytesLike,
    MalformedError,
    Manifest,
    Request,
    RequestKind,
    decode_manifest,
    decode_offer,
    decode_request,
    encode_offer,
    sign_triggers,
)
from fedcb2o.peer.wire.transport import Reply, Transport

Sent: TypeAlias = Answer | bytes  # bytes take the place of the whole answer of HTTP
Lie: TypeAlias = (
    "Callable[[Liar, Request], Iterable[Sent]]"  # the answers to a request for a manifest
)

LIES: dict[str, tuple[set[str], Lie]] = {}
CHUNKS: dict[str, "Callable[[bytes, int], tuple[AnswerStatus, BytesLike]]"] = {}


class Liar:
    """Member that answers each request for a manifest with one invalid answer."""

    def __init__(
        self, federation: Federation, identity: Identity, lie: str, transport: Transport
    ) -> None:
        self.federation, self.identity, self.lie = federation, identity, lie
        self.agent_id = federation.id_of(identity.member)
        self.dim = len(parameters.flatten(build_network(federation)))
        self.transport = transport
        self.content: dict[
            bytes, tuple[str, bytes]
        ] = {}  # manifest digest -> name and bytes of the invalid content

    def on_request(self, data: bytes, reply: Reply) -> None:
        with contextlib.suppress(MalformedError):
            request, *_ = decode_request(data)
            for answer in [*self.answers(request)][:1]:
                reply(Answer(AnswerStatus.MALFORMED) if isinstance(answer, bytes) else answer)

    def answers(self, request: Request) -> Iterable[Sent]:
        if request.kind is RequestKind.MANIFEST:
            yield from LIES[self.lie][1](self, request)
        elif request.kind is RequestKind.MODEL and request.digest in self.content:
            name, content = self.content[request.digest]
            respond = CHUNKS.get(
                name,
                lambda content, k: (
                    AnswerStatus.OK,
                    content[k * CHUNK_BYTES : (k + 1) * CHUNK_BYTES],
                ),
            )
            yield Answer(*respond(content, request.first // CHUNK_BYTES))
        else:  # HELLO and WITNESS: random bytes
            yield Answer(AnswerStatus.OK, secrets.token_bytes(500))

    def manifest(self, request: Request, content: bytes | None = None, **changes: Any) -> Manifest:
        """Return an honest agent's manifest of a content in this round, with `changes`."""
        content = bytes(4 * self.dim) if content is None else content
        honest = Manifest.from_content(
            content,
            run=self.federation.run,
            agent=self.agent_id,
            round=request.round,
            dim=self.dim,
            num_samples=2**63,
        )
        return replace(honest, **changes)

    def offered(
        self, request: Request, signed: bytes, digests: Sequence[Any] = (), triggers: bytes = b""
    ) -> Answer:
        return Answer(AnswerStatus.OK, encode_offer(signed, digests, triggers))

    def signed(self, request: Request, manifest: Manifest, **options: Any) -> Answer:
        return self.offered(request, manifest.to_signed_bytes(self.identity.sign), **options)

    def others_manifest(self, request: Request) -> bytes:
        """Return the newest manifest of another member, downloaded with a valid request."""
        for other in self.federation.members.keys() - {self.agent_id, request.sender}:
            asked = Request(
                kind=RequestKind.MANIFEST,
                run=self.federation.run,
                sender=self.agent_id,
                receiver=other,
                nonce=secrets.token_bytes(16),
            ).encode(self.identity.sign)
            answer = self.transport.ask(other, asked, 1.0).answer()
            if answer is not None and answer.status is AnswerStatus.OK:
                return decode_offer(answer.body)[0]
        return b""


def lie(name: str, *reasons: str) -> Callable[[Lie], Lie]:
    def named(function: Lie) -> Lie:
        LIES[name] = (set(reasons), function)
        return function

    return named


def answers(name: str, *reasons: str) -> Any:
    """Register an invalid answer that changes the bytes of the answer itself."""

    def named(function: Callable[[Liar, Request, Answer], Iterable[Sent]]) -> Any:
        honest = lambda liar, request: liar.signed(request, liar.manifest(request))  # noqa: E731
        LIES[name] = (
            set(reasons),
            lambda liar, request: function(liar, request, honest(liar, request)),
        )
        return function

    return named


# Malformed and missing answers.

answers("random bytes", "malformed")(
    lambda liar, request, good: [secrets.token_bytes(1000) + b"\r\n\r\n"]
)
answers("a body of random bytes", "malformed")(
    lambda liar, request, good: [Answer(AnswerStatus.OK, secrets.token_bytes(1000))]
)
answers("an empty offer", "malformed")(lambda liar, request, good: [Answer(AnswerStatus.OK, b"")])
answers("a list", "malformed")(lambda liar, request, good: [Answer(AnswerStatus.OK, b"[1, 2]")])
answers("brackets", "malformed")(
    lambda liar, request, good: [Answer(AnswerStatus.OK, b"[" * 10**5)]
)
answers("an unknown status", "malformed")(lambda liar, request, good: [raw.answer(b"", 299)])
answers("a redirection", "malformed")(
    lambda liar, request, good: [b"HTTP/1.1 302 X\r\nLocation: /v1/x\r\nContent-Length: 0\r\n\r\n"]
)
answers("a compressed answer", "malformed")(
    lambda liar, request, good: [
        b"HTTP/1.1 200 X\r\nContent-Encoding: gzip\r\nContent-Length: 20\r\n\r\n" + bytes(20)
    ]
)
answers("a hundred thousand headers", "malformed")(
    lambda liar, request, good: [b"HTTP/1.1 200 X\r\n" + b"a: b\r\n" * 10**5 + b"\r\n"]
)
answers("a run that is over", "another run")(
    lambda liar, request, good: [Answer(AnswerStatus.ANOTHER_RUN)]
)
answers("another protocol", "another version")(
    lambda liar, request, good: [Answer(AnswerStatus.ANOTHER_VERSION)]
)
answers("cut in the manifest", "malformed")(
    lambda liar, request, good: [replace(good, body=good.body[:-100])]
)
answers("a byte too many", "malformed")(
    lambda liar, request, good: [replace(good, body=bytes(good.body) + b"\0")]
)
answers("a thousand answers", "malformed")(
    lambda liar, request, good: [raw.answer(secrets.token_bytes(1000))] * 1000
)
answers("65 digests", "malformed")(
    lambda liar, request, good: [
        Answer(
            AnswerStatus.OK,
            json.dumps(
                {**json.loads(good.body), "seen": [[0, request.round, "00" * 32]] * 65}
            ).encode(),
        )
    ]
)


# Invalid manifests; more of them are in test_protocol.py.


def manifests(name: str, *reasons: str) -> Any:
    """Register an invalid manifest with a valid signature."""

    def named(changes: Callable[[Liar, Request], dict[str, Any]]) -> None:
        lie(name, *reasons)(
            lambda liar, request: [
                liar.signed(request, liar.manifest(request, **changes(liar, request)))
            ]
        )

    return named


manifests("in another's name", "signature")(
    lambda liar, request: {"agent": (liar.agent_id + 1) % 2}
)
manifests("another run", "run")(lambda liar, request: {"run": bytes(32)})
manifests("an old round", "round")(
    lambda liar, request: {"round": request.round - liar.federation.lag - 1}
)
manifests("too small", "size")(lambda liar, request: {"size": 4 * liar.dim - 4})
manifests("another encoding", "dtype")(lambda liar, request: {"encoding": 1})


@lie("unsigned", "signature")
def _(liar: Liar, request: Request) -> Iterable[Sent]:
    signed = liar.manifest(request).to_signed_bytes(liar.identity.sign)
    yield liar.offered(request, signed[:-SIGNATURE_BYTES] + secrets.token_bytes(SIGNATURE_BYTES))


@lie("signed for something else", "signature")
def _(liar: Liar, request: Request) -> Iterable[Sent]:
    body = liar.manifest(request).body
    yield liar.offered(request, body + liar.identity.sign(body))


@lie("another agent's", "agent")
def _(liar: Liar, request: Request) -> Iterable[Sent]:
    yield liar.offered(request, liar.others_manifest(request))


@lie("another agent's, signed again", "signature")
def _(liar: Liar, request: Request) -> Iterable[Sent]:
    yield liar.signed(request, decode_manifest(liar.others_manifest(request))[0])


# Contents that match their manifest but are not valid models.


def contents(name: str, *reasons: str, digests: int = 0) -> Any:
    def named(content: Callable[[int], np.ndarray]) -> None:
        def answer(liar: Liar, request: Request) -> Iterable[Sent]:
            sent = content(liar.dim).tobytes()[: 4 * liar.dim]
            manifest = liar.manifest(request, sent)
            liar.content[manifest.digest] = name, sent
            false_digests = [
                (i, request.round - 1, secrets.token_bytes(32))
                for i in range(3)
                for _ in range(digests)
            ]
            yield liar.signed(request, manifest, digests=false_digests[:64])

        lie(name, *reasons)(answer)

    return named


contents("NaN", "not finite")(lambda dim: np.full(dim, np.nan, "<f4"))
contents("infinite", "not finite")(lambda dim: np.full(dim, np.inf, "<f4"))
contents("one NaN, the last", "not finite")(
    lambda dim: np.where(np.arange(dim) < dim - 1, 0, np.nan).astype("<f4")
)
contents("1e38", "bound")(lambda dim: np.full(dim, 1e38, "<f4"))
contents("-1e38 once", "bound")(lambda dim: np.where(np.arange(dim) > 0, 0, -1e38).astype("<f4"))
contents("float64", "bound", "not finite")(lambda dim: np.random.default_rng(0).normal(size=dim))
contents("big-endian", "bound", "not finite")(
    lambda dim: np.random.default_rng(0).normal(size=dim).astype(">f4")
)
contents("64 false digests", "not finite")(lambda dim: np.full(dim, -np.inf, "<f4"))


# Triggers next to a valid manifest; `triggers` are two of 8 by 8 pixels.


def triggers(name: str, *reasons: str) -> Any:
    def named(change: Callable[[Liar, Manifest, bytes], bytes]) -> None:
        def answer(liar: Liar, request: Request) -> Iterable[Sent]:
            content = bytes(4 * liar.dim)
            manifest = liar.manifest(request, content)
            liar.content[manifest.digest] = name, content
            yield liar.signed(request, manifest, triggers=change(liar, manifest, TWO_TRIGGERS))

        lie(name, *reasons)(answer)

    return named


TWO_TRIGGERS = 2 * (bytes([7, 0, 0b1001]) + bytes(15))

triggers("three triggers", "triggers")(
    lambda liar, manifest, two: sign_triggers(two + two[:18], manifest, liar.identity.sign)
)
triggers("half a trigger", "triggers")(
    lambda liar, manifest, two: sign_triggers(two[:9], manifest, liar.identity.sign)
)
triggers("triggers of random bytes", "triggers")(
    lambda liar, manifest, two: sign_triggers(
        b"\7" + bytes([255] * 17), manifest, liar.identity.sign
    )
)
triggers("triggers to a class that is none", "triggers")(
    lambda liar, manifest, two: sign_triggers(b"\12" + two[1:], manifest, liar.identity.sign)
)
triggers("unsigned triggers", "triggers")(
    lambda liar, manifest, two: two + secrets.token_bytes(SIGNATURE_BYTES)
)
triggers("triggers without a signature", "triggers")(lambda liar, manifest, two: two)
triggers("triggers of another round", "triggers")(
    lambda liar, manifest, two: sign_triggers(
        two, replace(manifest, round=manifest.round - 1), liar.identity.sign
    )
)
triggers("triggers signed for something else", "triggers")(
    lambda liar, manifest, two: two + liar.identity.sign(manifest.digest + two)
)
triggers("a megabyte of triggers", "malformed")(
    lambda liar, manifest, two: sign_triggers(bytes(2**20), manifest, liar.identity.sign)
)


# Chunks that do not match their manifest.


def chunks(name: str, *reasons: str) -> Any:
    def named(chunk: Callable[[bytes, int], tuple[AnswerStatus, BytesLike]]) -> None:
        CHUNKS[name] = chunk
        contents(name, *reasons)(lambda dim: np.zeros(dim, "<f4"))

    return named


chunks("other bytes", "hash")(
    lambda content, k: (
        AnswerStatus.OK,
        secrets.token_bytes(min(CHUNK_BYTES, len(content) - k * CHUNK_BYTES)),
    )
)
chunks("shorter chunks", "hash")(
    lambda content, k: (AnswerStatus.OK, content[k * CHUNK_BYTES : (k + 1) * CHUNK_BYTES - 1])
)
chunks("longer chunks", "hash")(
    lambda content, k: (AnswerStatus.OK, content[k * CHUNK_BYTES : (k + 1) * CHUNK_BYTES] + b"\0")
)
chunks("truncated", "hash")(
    lambda content, k: (AnswerStatus.OK, content[:CHUNK_BYTES] if not k else b"")
)
chunks("no chunks", "not here")(lambda content, k: (AnswerStatus.NOT_HERE, b""))

"""Hostile member with valid keys and a different invalid answer in each round.

It is an agent on any transport, or a process of its own.

`LIES` maps the name of each invalid answer to the reasons for which a peer may refuse it. Peers
must not receive any model of this member.
"""

import contextlib
import io
import json
import os
import secrets
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import numpy as np
from tests.peer import raw

from fedcb2o.nn import parameters
from fedcb2o.peer import Federation, Identity, read_federation
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
    num_chunks,
)
from fedcb2o.peer.wire.transport import Https, Reply, Transport

LATE = "late"  # the reason for a peer without an answer in time
Sent: TypeAlias = Answer | bytes  # bytes take the place of the whole answer of HTTP
Lie: TypeAlias = (
    "Callable[[Liar, Request], Iterable[Sent]]"  # the answers to a request for a manifest
)

LIES: dict[str, tuple[set[str], Lie]] = {}
CHUNKS: dict[str, "Callable[[bytes, int], tuple[AnswerStatus, BytesLike] | None]"] = {}
CONTENTS: list[str] = []
"""Invalid answers with valid manifests. Two of them in one round are an equivocation."""


class Liar:
    """Member that answers every request with an invalid answer.

    It asks other members over `transport`. The log has the receiver of each answer, and the answer.
    """

    def __init__(
        self,
        federation: Federation,
        identity: Identity,
        lies: Sequence[Sequence[str]],
        transport: Transport,
        log: TextIO | None = None,
    ) -> None:
        self.federation, self.identity, self.lies = federation, identity, lies
        self.agent_id = federation.id_of(identity.member)
        self.dim = len(parameters.flatten(build_network(federation)))
        self.transport = transport
        self.content: dict[
            bytes, tuple[str, bytes]
        ] = {}  # manifest digest -> name and bytes of the invalid content
        self.stolen: dict[int, bytes] = {}  # manifests of other members
        self.asked = threading.Event()  # set at the first request for a model
        self.log = log or io.StringIO()

    def respond(self, target: str, headers: Mapping[str, str]) -> Iterable[bytes]:
        """Return the bytes of all answers to a request over HTTPS."""
        lines = [f"GET {target}"]
        if "range" in headers:
            lines.append(f"Range: {headers['range']}")
        lines.append(f"Authorization: {headers['authorization']}")
        with contextlib.suppress(MalformedError):
            request, *_ = decode_request("\n".join(lines).encode())
            for answer in self.answers(request):
                if isinstance(answer, bytes):
                    yield answer
                else:
                    yield raw.answer(bytes(answer.body), answer.status)

    def on_request(self, data: bytes, reply: Reply) -> None:
        with contextlib.suppress(MalformedError):
            request, *_ = decode_request(data)
            answers = [*self.answers(request)][:1]
            for answer in answers:
                reply(Answer(AnswerStatus.MALFORMED) if isinstance(answer, bytes) else answer)
            if not answers:
                reply(None)

    def answers(self, request: Request) -> Iterable[Sent]:
        if request.kind is RequestKind.MANIFEST:
            self.asked.set()
            turn = self.lies[min(request.round, len(self.lies) - 1)]
            name = turn[request.sender % len(turn)]
            self.note(lie=name, to=request.sender, round=request.round)
            yield from LIES[name][1](self, request)
        elif request.kind is RequestKind.MODEL and request.digest in self.content:
            name, content = self.content[request.digest]
            respond = CHUNKS.get(
                name,
                lambda content, k: (
                    AnswerStatus.OK,
                    content[k * CHUNK_BYTES : (k + 1) * CHUNK_BYTES],
                ),
            )
            response = respond(content, request.first // CHUNK_BYTES)
            if response is None:
                time.sleep(60)
            else:
                yield Answer(*response)
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
            encoding=0,
            base=bytes(32),
        )
        return replace(honest, **changes)

    def offered(self, request: Request, signed: bytes, digests: Sequence[Any] = ()) -> Answer:
        return Answer(AnswerStatus.OK, encode_offer(signed, digests))

    def signed(self, request: Request, manifest: Manifest, **options: Any) -> Answer:
        return self.offered(request, manifest.to_signed_bytes(self.identity.sign), **options)

    def others_manifest(self, request: Request) -> bytes:
        """Return the newest manifest of another member, downloaded with a valid request."""
        for other in self.federation.members.keys() - {self.agent_id, request.sender}:
            asked = self.request(RequestKind.MANIFEST, other).encode(self.identity.sign)
            for answer in self.transport.ask(other, asked, 1.0):
                if answer.status is AnswerStatus.OK:
                    self.stolen[other], _ = decode_offer(answer.body)
        return next(
            (signed for other, signed in self.stolen.items() if other != request.sender), b""
        )

    def request(self, kind: RequestKind, peer: int, **changes: Any) -> Request:
        """Return a valid request with `changes`."""
        nonce = secrets.token_bytes(16)
        valid = Request(
            kind=kind, run=self.federation.run, sender=self.agent_id, receiver=peer, nonce=nonce
        )
        return replace(valid, **changes)

    def pester(self, count: int) -> None:
        """Send each invalid request `count` times to all others; log the number of answers."""
        others = range(len(self.lies[0]) - 1)
        while not (self.asked.wait() and {*others} <= self.transport.connected_peers()):
            time.sleep(0.1)
        for name, make_requests in REQUESTS.items():
            for peer in others:
                start_time = time.monotonic()
                pending = [
                    self.transport.ask(peer, data, 2.0) for data in make_requests(self, peer, count)
                ]
                replies = [answer for stream in pending for answer in stream]
                given = sum(answer.status is AnswerStatus.OK for answer in replies)
                self.note(
                    request=name,
                    to=peer,
                    asked=len(pending),
                    answered=len(replies),
                    given=given,
                    seconds=time.monotonic() - start_time,
                )

    def note(self, **fields: Any) -> None:
        print(json.dumps(fields), file=self.log)


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
answers("nothing", LATE)(lambda liar, request, good: [])
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
answers("busy", LATE)(lambda liar, request, good: [Answer(AnswerStatus.BUSY)])
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
answers("a thousand answers", LATE, "malformed")(
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


@answers("after the deadline", LATE)
def _(liar: Liar, request: Request, good: Answer) -> Iterable[Sent]:
    time.sleep(liar.federation.deadline_seconds + 0.5)
    yield good


@answers("never", LATE)
def _(liar: Liar, request: Request, good: Answer) -> Iterable[Sent]:
    time.sleep(60)
    yield from ()


# Invalid manifests.


def manifests(name: str, *reasons: str) -> Any:
    """Register an invalid manifest with a valid signature."""

    def named(changes: Callable[[Liar, Request], dict[str, Any]]) -> None:
        lie(name, *reasons)(
            lambda liar, request: [
                liar.signed(request, liar.manifest(request, **changes(liar, request)))
            ]
        )

    return named


manifests("of no member", "member")(lambda liar, request: {"agent": 2**32 - 1})
manifests("in another's name", "signature")(
    lambda liar, request: {"agent": (liar.agent_id + 1) % 2}
)
manifests("another run", "run")(lambda liar, request: {"run": bytes(32)})
manifests("round 2^32 - 1", "round")(lambda liar, request: {"round": 2**32 - 1})
manifests("after the last round", "round")(lambda liar, request: {"round": liar.federation.rounds})
manifests("an old round", "round")(
    lambda liar, request: {"round": request.round - liar.federation.lag - 1}
)
manifests("too small", "size")(lambda liar, request: {"size": 4 * liar.dim - 4})
manifests("too large", "size")(lambda liar, request: {"size": 4 * liar.dim + 4})
manifests("2^63 bytes", "size")(lambda liar, request: {"size": 2**63})
manifests("2^64 - 1 bytes", "size")(lambda liar, request: {"size": 2**64 - 1})
manifests("no bytes", "size")(lambda liar, request: {"size": 0, "chunks": ()})
manifests("another network", "size")(lambda liar, request: {"dim": liar.dim - 1})
manifests("2^63 parameters", "size")(lambda liar, request: {"dim": 2**63})
manifests("a chunk too few", "size")(
    lambda liar, request: {"chunks": (bytes(32),) * (num_chunks(4 * liar.dim) - 1)}
)
manifests("a chunk too many", "length")(
    lambda liar, request: {"chunks": (bytes(32),) * (num_chunks(4 * liar.dim) + 1)}
)
manifests("2^14 chunks", "length")(
    lambda liar, request: {"size": 2**34, "dim": 2**32, "chunks": (bytes(32),) * 2**14}
)
manifests("another encoding", "dtype")(lambda liar, request: {"encoding": 1})
manifests("an unknown encoding", "dtype")(lambda liar, request: {"encoding": 255})
manifests("another base", "dtype")(lambda liar, request: {"base": secrets.token_bytes(32)})


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
        CONTENTS.append(name)

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


# Chunks that do not match their manifest.


def chunks(name: str, *reasons: str) -> Any:
    def named(chunk: Callable[[bytes, int], tuple[AnswerStatus, BytesLike] | None]) -> None:
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
chunks("chunks never", LATE)(lambda content, k: None)
answers("8 MiB", LATE, "malformed")(lambda liar, request, good: [raw.answer(bytes(2**23))])


@answers("1 GiB", LATE, "malformed")
def _(liar: Liar, request: Request, good: Answer) -> Iterable[Sent]:
    yield b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n"
    for _ in range(2**10):
        yield b"100000\r\n" + bytes(2**20) + b"\r\n"


@lie("equivocation", "not finite", "equivocation")
def _(liar: Liar, request: Request) -> Iterable[Sent]:
    """Offer each receiver a different model. This answer comes last: peers then stop asking."""
    content = np.full(liar.dim, np.nan, "<f4")
    content[0] = request.sender
    manifest = liar.manifest(request, content.tobytes())
    liar.content[manifest.digest] = "equivocation", content.tobytes()
    yield liar.signed(request, manifest)


# Invalid requests by kind, for a receiver and a number. No answer may have content.

REQUESTS: "dict[str, Callable[[Liar, int, int], Iterable[bytes]]]" = {
    "random bytes": lambda liar, peer, count: (
        b"GET /v1/" + secrets.token_hex(80).encode() for _ in range(count)
    ),
    "of any length": lambda liar, peer, count: (
        b"GET /v1/" + b"a" * (k * 4096 // count) for k in range(count)
    ),
    "unsigned": lambda liar, peer, count: (
        liar.request(RequestKind.HELLO, peer).encode(
            lambda body: secrets.token_bytes(SIGNATURE_BYTES)
        )
        for _ in range(count)
    ),
    "to another": lambda liar, peer, count: (
        liar.request(RequestKind.MANIFEST, peer + 1).encode(liar.identity.sign)
        for _ in range(count)
    ),
    "in another's name": lambda liar, peer, count: (
        liar.request(RequestKind.MANIFEST, peer, sender=(peer + 1) % 3).encode(liar.identity.sign)
        for _ in range(count)
    ),
    "of no member": lambda liar, peer, count: (
        liar.request(RequestKind.MANIFEST, peer, sender=2**32 - 1).encode(liar.identity.sign)
        for _ in range(count)
    ),
    "of another run": lambda liar, peer, count: (
        liar.request(RequestKind.MANIFEST, peer, run=bytes(32)).encode(liar.identity.sign)
        for _ in range(count)
    ),
    "no such part": lambda liar, peer, count: (
        liar.request(
            RequestKind.MODEL, peer, first=2**32 - 1, digest=secrets.token_bytes(32)
        ).encode(liar.identity.sign)
        for _ in range(count)
    ),
    "no such witness": lambda liar, peer, count: (
        liar.request(RequestKind.WITNESS, peer, index=2**32 - 1, round=2**32 - 1).encode(
            liar.identity.sign
        )
        for _ in range(count)
    ),
    "replayed": lambda liar, peer, count: (
        [liar.request(RequestKind.MODEL, peer, digest=bytes(32)).encode(liar.identity.sign)] * count
    ),
    "of another protocol": lambda liar, peer, count: [b"GET /v2/manifest"] * count,
}


def run(
    federation: Path, identity: Path, log: Path, lies: Sequence[Sequence[str]], pesters: int = 0
) -> None:
    """Run a hostile member until its process is killed.

    Agent j gets the answer `lies[n][j]` in round n; the last entry repeats. All agents except the
    last one get each invalid request `pesters` times.
    """
    agreement, member = read_federation(federation), Identity.read(identity)
    liar = Liar(
        agreement, member, lies, Https(agreement, member, listen=False), log.open("a", buffering=1)
    )
    if pesters:
        threading.Thread(target=liar.pester, args=(pesters,), daemon=True).start()
    with raw.listening(member, agreement, liar.respond):
        threading.Event().wait()


# Attackers without membership: with invalid keys, or with the TLS keys of a member.


def strangers(path: Path, folder: Path, member: Path, target: int, stop: Any) -> None:
    """Attack one node's port without a membership, until `stop` is set.

    Also send requests over a link with a member's TLS keys, signed by another key.
    """
    federation, rng = read_federation(path), np.random.default_rng(0)
    victim = federation.members[target]
    host, port = victim.endpoint.rsplit(":", 1)
    while not _open(host, int(port)):
        time.sleep(0.1)
    silent_sockets = [
        socket.create_connection((host, int(port))) for _ in range(100)
    ]  # slowloris: half of them send nothing
    for k, connection in enumerate(silent_sockets[:50]):  # the others begin a handshake
        connection.sendall(b"\x16\x03\x01\x02\x00\x01"[: 1 + k % 6])
    outsider = Identity.make(
        folder / "outsider", name=victim.name, endpoint=victim.endpoint
    )  # its certificate chain is valid
    lent = Identity.read(member)
    sender_id = federation.id_of(lent.member)
    counts = Counter[str]()
    while not stop.is_set():
        for connection in silent_sockets[:50:10]:  # an occasional byte keeps the handshake open
            with contextlib.suppress(OSError):
                connection.sendall(b"\0")
        for context in (_no_certificate(victim.root), None):
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                link = stack.enter_context(socket.create_connection((host, int(port)), timeout=1))
                if context:
                    link = stack.enter_context(context.wrap_socket(link, server_hostname=host))
                link.sendall(rng.bytes(4096))
                counts["answered"] += len(link.recv(100)) > 7  # an alert of TLS has 7 bytes
        nonce = secrets.token_bytes(16)
        request = Request(
            kind=RequestKind.MANIFEST,
            run=federation.run,
            sender=sender_id,
            receiver=target,
            nonce=nonce,
        )
        data = request.encode(outsider.sign)
        method, *fields = data.decode().split("\n")
        headers = dict(field.split(": ") for field in fields)
        for name, keys in (("outsider", outsider), ("lent", lent)):
            with contextlib.suppress(OSError), raw.connect(keys, federation, target) as link:
                code, _, _ = raw.exchange(link, raw.get(method.split()[1], **headers))
                counts[f"{name} linked"] += code != 0
                counts[f"{name} told"] += code == 200
        counts["times"] += 1
    (folder / "strangers.json").write_text(json.dumps(counts))
    os._exit(0)


def _open(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def _no_certificate(root: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=root)
    context.check_hostname = False
    return context

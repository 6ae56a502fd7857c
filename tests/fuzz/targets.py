"""Parsers of bytes that others write, each with the property that any input must keep.

A target takes any bytes. It returns if the parser accepts them or refuses them with a documented
exception. It raises if another exception escapes, or if a property fails: what is accepted is
written in the same bytes, or is read equal after it is written. Bytes behind a signature are signed
by the target, because a random signature never passes.
"""

import atexit
import functools
import gzip
import hashlib
import io
import json
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import tomli_w
import torch
import zstandard
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from safetensors.torch import save
from tests.peer.folders import line, write_node
from tests.peer.members import federated, identities

from fedcb2o.data.sets import arrays
from fedcb2o.errors import ConfigError, DataError, RunError
from fedcb2o.federated import trigger_exchange
from fedcb2o.federated.trigger_exchange import Triggers
from fedcb2o.nn import parameters
from fedcb2o.peer import Federation, Identity, _backup, _metrics_server, amend_federation
from fedcb2o.peer.membership import certificates
from fedcb2o.peer.membership import federation as federation_files
from fedcb2o.peer.membership.identity import SIGNED_VERSIONS_FILE, Member, parse_bounded_toml
from fedcb2o.peer.node import agent as agent_module
from fedcb2o.peer.node import preflight
from fedcb2o.peer.report.peer_records import PeerRecords
from fedcb2o.peer.wire import mailbox as mailbox_module
from fedcb2o.peer.wire import protocol, sealing
from fedcb2o.peer.wire import relay as relay_module
from fedcb2o.peer.wire.compression import Int8Codec, RawCodec, TopKCodec
from fedcb2o.peer.wire.equivocation import Ledger, Proof, SigningJournal, verify_proof
from fedcb2o.peer.wire.http_requests import HttpRequest, RefusedError, RequestParser
from fedcb2o.peer.wire.probe import ProbeResult
from fedcb2o.peer.wire.protocol import MalformedError, Manifest
from fedcb2o.simulation.traces import read_traces

VECTORS = Path(__file__).parents[1] / "peer"
CORPUS = Path(__file__).parent / "corpus"
"""Inputs that once broke a property, in one folder per target."""
MAX_SECONDS = 2.0
"""Largest processor time for one input."""
MAX_GROWTH = 2**28
"""Largest growth of the process's peak memory by one input, in bytes."""
MAX_LINE = 4000
"""Longest line that is shown to an operator."""
NONCE = bytes(16)


@dataclass(frozen=True)
class World:
    """Three organisations, two versions of their federation, and a folder for files."""

    folder: Path
    organisations: list[Identity]
    stranger: Member
    first: Federation
    second: Federation
    sessions: list[sealing.Session]

    @property
    def own(self) -> Identity:
        return self.organisations[0]

    @property
    def other(self) -> Identity:
        return self.organisations[1]

    def write(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content)
        return path

    @contextmanager
    def empty_folder(self):
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


@functools.cache
def world() -> World:
    """Return what the targets share. Its folder is removed at the end of this process."""
    folder = Path(tempfile.mkdtemp(prefix="fedcb2o-fuzz-"))
    atexit.register(_remove, folder, os.getpid())
    organisations = identities(folder, 3)
    first = federated(organisations, rounds=20, lag=2, path=folder / "federation.toml")
    second = amend_federation(first, remove=[organisations[2].member.name])
    path = folder / "second.toml"
    federation_files.write_federation(second, path)
    for identity in organisations[:2]:
        second = federation_files.sign_federation(path, identity)
    sessions = [sealing.Session(first, identity) for identity in organisations[:2]]
    stranger = Identity.make(folder / "stranger", name="stranger", endpoint="192.0.2.1:7447")
    return World(folder, organisations, stranger.member, first, second, sessions)


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not in a copy of it
        shutil.rmtree(folder)


def vectors() -> dict[str, bytes]:
    """Return the messages of the protocol's test vectors by name."""
    content = json.loads((VECTORS / "messages.json").read_text())
    requests = {name: text.encode() for name, text in content["requests"].items()}
    names = ("manifest", "manifest-of-two-chunks", "offer", "hello")
    return requests | {f"a {name}": bytes.fromhex(content["vectors"][name]) for name in names}


# --- files of the membership ---------------------------------------------------------------------


def member_file(data: bytes) -> None:
    try:
        member = Member.from_table(parse_bounded_toml(data, 2**16))
    except ValueError:
        return
    path = world().folder / "copy.member.toml"
    member.write(path)
    assert Member.read(path, allow_expired=True) == member


def member_seeds() -> list[bytes]:
    files = [next(one.folder.glob("*.member.toml")) for one in world().organisations]
    return [*(file.read_bytes() for file in files)]


def endpoint(data: bytes) -> None:
    with suppress(ConfigError):
        text = certificates.canonical_endpoint(data.decode("utf-8", "replace"))
        assert certificates.canonical_endpoint(text) == text


def endpoint_seeds() -> list[bytes]:
    return [b"peer.hospital-a.example:7447", b"192.0.2.1:1", b"[2001:db8::1]:65535", b"A_b.:80"]


def federation_file(data: bytes) -> None:
    try:
        read = federation_files.read_federation(world().write("any.toml", data))
    except ConfigError:
        return
    copy = world().write("copy.toml", federation_files.file_content(read))
    again = federation_files.read_federation(copy)
    assert (again, again.digest, again.run) == (read, read.digest, read.run)


def federation_seeds() -> list[bytes]:
    written = [federation_files.file_content(one) for one in (world().first, world().second)]
    return [*written]


def former_notice(data: bytes) -> None:
    notice = federation_files.removal_notice(world().first, world().organisations[2].member, data)
    assert notice.isprintable()
    # a signature of both remaining members is the only way to a removal
    assert not notice or b"[[signatures]]" in data
    assert not federation_files.removal_notice(world().first, world().own.member, data)


def later_version(data: bytes) -> None:
    """Members and other keys of a version 2, which both remaining members sign."""
    first = world().first
    try:
        last = parse_bounded_toml(data, 2**16)
        second = federation_files._with_versions(first, first.versions[0].model_dump(), last)
    except ValueError:
        return
    path = world().folder / "later.toml"
    federation_files.write_federation(second, path)
    with suppress(ConfigError):
        for identity in world().organisations[:2]:
            journal = identity.folder / SIGNED_VERSIONS_FILE
            journal.unlink(missing_ok=True)  # another successor was signed before
            federation_files.sign_federation(path, identity)
        read = federation_files.read_federation(path)
        assert (read.version, read.run) == (2, first.run)
        known = {id: member.name for id, member in first.members.items()}
        for id, member in read.members.items():
            assert known.get(id, member.name) == member.name
            assert id in known or (id >= len(known) and member.name not in known.values())


def later_version_seeds() -> list[bytes]:
    table = world().second.to_table()
    stranger = world().stranger.to_table()
    joined = [*table["members"], {"id": 3, **stranger}]
    versions = [{"members": table["members"]}, {"members": joined}]
    return [tomli_w.dumps(version, multiline_strings=True).encode() for version in versions]


_EXTENSIONS = {
    "basic constraints": x509.BasicConstraints,
    "key usage": x509.KeyUsage,
    "name constraints": x509.NameConstraints,
}


@functools.cache
def _root_key() -> Any:
    return certificates.new_key()


def root_certificate(data: bytes) -> None:
    """A root whose extensions, or all bytes, are the input; its signature is valid if it can be."""
    member = world().own.member
    pems = [data.decode("utf-8", "replace")]
    with suppress(ValueError):
        pems.append(x509.load_der_x509_certificate(data).public_bytes(Encoding.PEM).decode())
    if data[:1] and data[0] < len(_EXTENSIONS):
        pems.append(_root_with(list(_EXTENSIONS)[data[0]], data[1:]))
    for pem in pems:
        with suppress(ConfigError):
            root = certificates.validate_root(pem, member.name, member.endpoint)
            assert root.public_bytes(Encoding.PEM).decode() == pem


def _root_with(replaced: str, content: bytes) -> str:
    """Return a self-signed root with one extension replaced by bytes."""
    root = x509.load_pem_x509_certificate(world().own.member.root.encode())
    builder = x509.CertificateBuilder(
        root.issuer,
        root.subject,
        _root_key().public_key(),
        root.serial_number,
        root.not_valid_before_utc,
        root.not_valid_after_utc,
    )
    for extension in root.extensions:
        value = extension.value
        if isinstance(value, _EXTENSIONS[replaced]):
            value = x509.UnrecognizedExtension(value.oid, content)
        builder = builder.add_extension(value, critical=extension.critical)
    return builder.sign(_root_key(), hashes.SHA256()).public_bytes(Encoding.PEM).decode()


def root_seeds() -> list[bytes]:
    roots = [one.member.root.encode() for one in world().organisations]
    parsed = x509.load_pem_x509_certificate(roots[0])
    kinds = enumerate(_EXTENSIONS.values())
    parts = [
        bytes([number]) + parsed.extensions.get_extension_for_class(kind).value.public_bytes()
        for number, kind in kinds
    ]
    return [*roots, parsed.public_bytes(Encoding.DER), *parts]


# --- messages ------------------------------------------------------------------------------------


def http(data: bytes) -> None:
    """The bytes of a connection, whole or in pieces, to a node and to a relay."""
    for max_body in (0, 2**12):
        for size in (len(data) or 1, 7):
            parser = RequestParser(max_body)
            with suppress(RefusedError):
                if any(parser.receive(data[k : k + size]) for k in range(0, len(data), size)):
                    request = parser.request
                    assert request.method in ("GET", "PUT")
                    assert request.target.startswith("/v")
                    assert "%" not in request.target
                    assert len(request.body) <= max_body
                    assert len(set(request.headers) & {"transfer-encoding", "upgrade"}) == 0


def http_seeds() -> list[bytes]:
    head = b" HTTP/1.1\r\nHost: x\r\n"
    signed = vectors()["model"].decode()
    line, *fields = signed.split("\n")
    request = line.encode() + head + "\r\n".join([*fields, "", ""]).encode()
    return [
        request,
        b"GET /v1/federation" + head + b"Connection: close\r\n\r\n",
        b"PUT /v1/cards/org-0.run" + head + b"Content-Length: 5\r\n\r\nabcde",
        b"PUT /v1/x" + head + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
        b"GET /v1/x" + head + b"Upgrade: h2c\r\nExpect: 100-continue\r\n\r\n",
    ]


def wire_messages(data: bytes) -> None:
    """Manifests, requests, answers and offers: accepted bytes are the only encoding."""
    with suppress(MalformedError):
        manifest, body, signature = protocol.decode_manifest(data)
        assert manifest.to_signed_bytes(lambda signed: signature) == data
        assert manifest.body == body
    with suppress(MalformedError):
        request, _, signature = protocol.decode_request(data)
        assert request.encode(lambda signed: signature) == data
    with suppress(MalformedError):
        assert protocol.decode_answer(data).encode() == data
    with suppress(MalformedError):
        offer = protocol.decode_offer(data)
        assert protocol.decode_offer(protocol.encode_offer(*offer)) == offer


def wire_seeds() -> list[bytes]:
    found = vectors()
    offer = protocol.encode_offer(b"signed", [(1, 2, bytes(32))], bytes(82))
    return [*found.values(), offer, b"200\n" + found["a hello"], b"503\n"]


def hello(data: bytes) -> None:
    """The description that a member signed, and what `peer check` shows of it."""
    member = world().other.member
    signed = data + world().other.sign(protocol.HELLO_CONTEXT + NONCE + data)
    answer = protocol.Answer(protocol.AnswerStatus.OK, signed)
    reply = preflight._decode_reply(answer, NONCE, member, time.time())
    result = preflight._member_result(world().first, member, reply, True, ProbeResult())
    claim = preflight.describe_disagreement(world().first, reply.content or {}, "the relay")
    for shown in (*preflight.format_results([result]), claim):
        assert shown.isprintable()
        assert len(shown) <= MAX_LINE
    preflight._shown_removal(world().first, world().own, [reply])


def hello_seeds() -> list[bytes]:
    content = preflight.hello_content(world().first, world().other, round=3, rounds=20)
    file = federation_files.file_content(world().second).decode()
    claims = [
        content,
        {**content, "run": "0", "version": 2},
        {**content, "version": 2, "file": file},
    ]
    return [json.dumps(claim, sort_keys=True).encode() for claim in claims]


def card(data: bytes) -> None:
    """A card with a valid signature of a member over any content."""
    own, _ = world().sessions
    body = data[: sealing.CARD_BYTES - 64].ljust(sealing.CARD_BYTES - 64, b"\0")
    signed = body + world().other.sign(sealing._CARD_CONTEXT + body)
    for content in (data, signed):
        with suppress(MalformedError):
            assert own.read_card(content).identity == world().other.member.key
        with suppress(MalformedError):
            own.seal(own.read_card(content), sealing.SealedKind.REQUEST, 1, b"question")


def card_seeds() -> list[bytes]:
    return [world().sessions[1].card(7), world().sessions[0].card(7)]


def sealed(data: bytes) -> None:
    own, _ = world().sessions
    with suppress(MalformedError):
        opened = own.open(data)
        assert opened.card.agent == 1
        with suppress(MalformedError):
            own.open(data)
            raise AssertionError("a repeated message is opened")


def sealed_seeds() -> list[bytes]:
    own, other = world().sessions
    to_own = other.read_card(own.card(1))
    kinds = (sealing.SealedKind.REQUEST, sealing.SealedKind.ANSWER)
    return [other.seal(to_own, kind, 3, b"content") for kind in kinds]


# --- relays --------------------------------------------------------------------------------------


class _Replies:
    """Connections to a relay whose reply is any bytes, in place of `Pool`."""

    def __init__(self, code: int, content: bytes) -> None:
        self._reply = code, content

    def exchange(self, method: str, target: str, *, max_bytes: int, **_: Any) -> tuple[int, bytes]:
        if len(self._reply[1]) > max_bytes:
            raise MalformedError("malformed")
        return self._reply


def relay_reply(data: bytes) -> None:
    """The replies of a hostile relay, as a member reads them."""
    mailbox = mailbox_module.RelayMailbox(world().other.member, world().own)
    calls: list[Callable[[], Any]] = [
        mailbox.cards,
        mailbox.federation,
        lambda: mailbox.take("org-0/" + "0" * 32, 0.0),
        lambda: mailbox.put("org-1/" + "0" * 32, b"message", 0.0),
        lambda: mailbox.publish_card("org-0.run", b""),
    ]
    for code in (200, 410, 429, 500):
        mailbox._pool = _Replies(code, data)  # type: ignore[assignment]
        for call in calls:
            with suppress(OSError):
                call()
    mailbox._pool = _Replies(200, data)  # type: ignore[assignment]
    with suppress(OSError):
        parts = mailbox.take("org-0/" + "0" * 32, 0.0)
        assert data.startswith(mailbox_module.join_messages(parts))


def relay_reply_seeds() -> list[bytes]:
    version = json.dumps({"run": "0", "version": 1, "federation": "0"}).encode()
    cards = mailbox_module.join_messages([b"org-1.run", world().sessions[1].card(1)])
    return [version, cards, federation_files.file_content(world().second)]


@functools.cache
def _own_relay() -> relay_module.Relay:
    """Return a relay that does not listen."""
    with (
        mock.patch.object(relay_module, "Listener"),
        mock.patch.object(relay_module, "open_listening_socket"),
    ):
        relay = relay_module.Relay(world().first, world().other, folder=world().folder / "relay")
    relay._keep_box("org-1", "org-1/" + "0" * 32)
    return relay


def relay_request(data: bytes) -> None:
    """A signed request of a member to a relay: its method, its target and its body."""
    head, _, body = data.partition(b"\n")
    method, _, target = head.decode("latin-1").partition(" ")
    headers = {"authorization": "Ed25519 AA=="}
    request = HttpRequest(method, target, headers, bytearray(body))
    assert _own_relay()._signer(request) is None
    with mock.patch.object(relay_module, "_MAX_TAKE_SECONDS", 0.0), suppress(OSError):
        code, content = _own_relay()._reply("org-0", request)
        assert code in (200, 403, 404, 429)
        assert code == 200 or content


def relay_request_seeds() -> list[bytes]:
    box = "0" * 32
    ends = f"key={'0' * 64}&to={'0' * 64}&nonce={'0' * 32}"
    heads = [
        f"GET /v1/cards?{ends}",
        f"GET /v1/federation?{ends}",
        f"GET /v1/boxes/org-0/{box}?wait=1.5&{ends}",
        f"PUT /v1/boxes/org-1/{box}?{ends}",
        f"PUT /v1/cards/org-0.run?{ends}",
    ]
    return [head.encode() + b"\n" + world().sessions[0].card(1) for head in heads]


# --- models and proofs ---------------------------------------------------------------------------

_DIM = 4100  # three blocks


def model(data: bytes) -> None:
    """An encoded model, as received and as the content of a valid zstandard frame."""
    origin = torch.linspace(-1, 1, _DIM)
    into = torch.zeros(_DIM)
    codec = Int8Codec(origin)
    compressor = zstandard.ZstdCompressor(write_content_size=True)
    plain = data[: codec._size].ljust(codec._size, b"\1")
    for content in (data, compressor.compress(plain)):
        if not codec.decode_(content, into):
            assert into.isfinite().all()
    follower = TopKCodec(origin)
    manifest = _manifest(data, base=hashlib.sha256(data[: 4 * _DIM]).digest())
    for count in (1, 3):
        message = data[: count * follower.max_bytes].ljust(count * follower.max_bytes, b"\1")
        assert follower.follow_(1, manifest, message, into) in ("content", "hash")
        assert 1 not in follower._held
    if len(data) == 4 * _DIM:
        assert follower.follow_(1, manifest, data, into) == ""
    RawCodec(len(data) // 4 + 1).decode_(data, torch.zeros(len(data) // 4 + 1))
    raw = torch.zeros(len(data) // 4)
    assert RawCodec(len(raw)).decode_(data, raw) == "" or len(data) % 4
    if not len(data) % 4:
        assert RawCodec(len(raw)).encode(raw) == data


def model_seeds() -> list[bytes]:
    codec = Int8Codec(torch.linspace(-1, 1, _DIM))
    frame = codec.encode(torch.linspace(1, -1, _DIM))
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(2**26))
    plain = zstandard.ZstdDecompressor().decompress(frame)
    top_k = TopKCodec(torch.linspace(-1, 1, _DIM)).encode(torch.linspace(1, -1, _DIM))
    frames = [frame, plain, bomb[:64], bomb, b"\x50\x2a\x4d\x18\4\0\0\0abcd"]
    return [*frames, top_k[: 3 * codec.max_bytes], top_k[-4 * _DIM :]]


def proof(data: bytes) -> None:
    """A file of a proof, and one whose manifests are the input, signed by a member."""
    first, second = data[: len(data) // 2], data[len(data) // 2 :]
    for content in (data, _proof_file(first, second)):
        path = world().write("any.proof.toml", content)
        with suppress(DataError):
            assert verify_proof(path).isprintable()
            read = Proof.read(path)
            with world().empty_folder() as folder:
                read.write(folder)
                assert Proof.read(folder / read.file) == read
        with suppress(DataError):
            assert verify_proof(path, world().first).isprintable()


def _proof_file(*bodies: bytes) -> bytes:
    sign = world().other.sign
    signed = sorted(body + sign(protocol.MANIFEST_CONTEXT + body) for body in bodies)
    agent, round, run = 1, 7, world().first.run
    with suppress(MalformedError):
        found = protocol.decode_manifest(signed[0])[0]
        agent, round, run = found.agent, found.round, found.run
    proof = Proof("org-1", agent, round, run, world().other.member.key, (signed[0], signed[1]))
    with world().empty_folder() as folder:
        proof.write(folder)
        return (folder / proof.file).read_bytes()


def _manifest(content: bytes, **changes: Any) -> Manifest:
    values = {
        "run": world().first.run,
        "agent": 1,
        "round": 7,
        "dim": len(content) // 4,
        "num_samples": 50,
        "encoding": 0,
        "base": bytes(32),
    }
    return Manifest.from_content(content, **{**values, **changes})


def proof_seeds() -> list[bytes]:
    first, second = _manifest(bytes(8)).body, _manifest(bytes(12)).body
    return [_proof_file(first, second), first + second, first + first]


def witnesses(data: bytes) -> None:
    """Digests and manifests from others: without two signatures by one key no member is accused."""
    with world().empty_folder() as folder:
        ledger = Ledger(folder, world().first)
        ledger.record(_manifest(bytes(8)).to_signed_bytes(world().other.sign))
        with suppress(MalformedError):
            signed, digests, _ = protocol.decode_offer(data)
            ledger.record(signed)
            for agent, n, digest in ledger.find_conflicts(digests)[:8]:
                ledger.prove(agent, n, {digest: signed, bytes(32): data})
                ledger.get(agent, n, digest)
        ledger.record(data)
        assert len(ledger.digests()) <= protocol.MAX_DIGESTS
        if b"manifest" in data:  # it may be signed
            return
        assert not ledger.equivocators


def witness_seeds() -> list[bytes]:
    signed = _manifest(bytes(8)).to_signed_bytes(world().other.sign)
    digests = [(1, 7, bytes(32)), (2, 7, bytes(32)), (2, 7, NONCE * 2)]
    return [signed, protocol.encode_offer(signed, digests)]


# --- files of a run, and requests of local programs ----------------------------------------------


def backup(data: bytes) -> None:
    """An archive, as it is and compressed by the target."""
    for content in (data, gzip.compress(data, 1)):
        with world().empty_folder() as folder:
            path = folder / "backup.tar.gz"
            path.write_bytes(content)
            with suppress(ConfigError, RunError):
                _backup.restore(path, folder / "a" / "keys", folder / "a" / "run")
            assert {entry.name for entry in folder.iterdir()} <= {"backup.tar.gz", "a"}
            inside = {entry.name for entry in folder.glob("a/*")}
            assert inside <= {"keys", "run"}
            assert not any(entry.is_symlink() for entry in folder.rglob("*"))


def backup_seeds() -> list[bytes]:
    with world().empty_folder() as folder:
        run = write_node(folder / "run", [line(1, (1, 0.5, 99, 0.5))])
        federation_files.write_federation(world().first, run / "federation.toml")
        _backup.back_up(world().own.folder, run, folder / "out.tar.gz")
        archive = (folder / "out.tar.gz").read_bytes()
    return [archive, gzip.decompress(archive)]


def round_records(data: bytes) -> None:
    """The files of a run folder that a report reads: any of them is the input."""
    for name in ("rounds.jsonl", "agent.json", "proofs/any.proof.toml"):
        with world().empty_folder() as folder:
            write_node(folder, [line(1, (1, 0.5, 99, 0.5))])
            (folder / "proofs").mkdir()
            (folder / name).write_bytes(data)
            with suppress(RunError):
                records = PeerRecords.read(folder)
                records.missing_models(records.peers)
                assert len(records.proofs) == (name.startswith("proofs"))
                assert records.last_fifth or not records.rounds
                assert all(record.duration_seconds >= 0 for record in records.rounds)
                _ = records.mean_gain


def round_record_seeds() -> list[bytes]:
    gain = {"samples": 10, "accuracy": 0.9, "alone": 0.5, "low": 0.1, "high": 0.5}
    rounds = [line(1, (1, 0.5, 99, 0.5), gain=gain), line(2, gain=gain, alone_rounds=2)]
    written = "".join(json.dumps(record) + "\n" for record in rounds).encode()
    with world().empty_folder() as folder:
        agent = (write_node(folder, []) / "agent.json").read_bytes()
    return [written, agent, *proof_seeds()[:1]]


def journal(data: bytes) -> None:
    with world().empty_folder() as folder:
        (folder / "signed.jsonl").write_bytes(data)
        with suppress(RunError):
            signed = SigningJournal(folder)
            last = signed.last_round
            assert not signed.reserve(last, b"another digest")
            assert signed.reserve(max(last, 0) + 1, NONCE)
            assert SigningJournal(folder).last_round == max(last, 0) + 1


def journal_seeds() -> list[bytes]:
    lines = [{"round": n, "digest": "0" * 64} for n in range(3)]
    return ["".join(json.dumps(entry) + "\n" for entry in lines).encode()]


@functools.cache
def _metrics() -> Any:
    server = _metrics_server.MetricsServer(
        0, expires=datetime.now(UTC), health=lambda: {"healthy": True}
    )
    server._server.server_close()  # its handler is called without a connection
    return server


def metrics_request(data: bytes) -> None:
    sent = bytearray()
    connection = SimpleNamespace(
        makefile=lambda *_: io.BytesIO(data),
        settimeout=lambda seconds: None,
        sendall=sent.extend,
    )
    server = _metrics()._server
    server.RequestHandlerClass(connection, ("127.0.0.1", 1), server)
    assert len(sent) < 2**20


def metrics_seeds() -> list[bytes]:
    host = b"Host: 127.0.0.1:9464\r\n\r\n"
    heads = [b"GET /metrics HTTP/1.1\r\n", b"GET /health HTTP/1.0\r\n", b"POST / HTTP/1.1\r\n"]
    return [head + host for head in heads]


@functools.cache
def _network() -> Any:
    return agent_module.build_network(world().first)


def saved_model(data: bytes) -> None:
    """A model.safetensors from elsewhere, next to a valid federation file."""
    world().write("model.safetensors", data)
    with (
        mock.patch.object(agent_module, "build_network", return_value=_network()),
        mock.patch.object(agent_module, "read_federation", return_value=world().first),
        suppress(RunError),
    ):
        agent_module.load_model(world().folder)


def saved_model_seeds() -> list[bytes]:
    return [save(parameters.agent_state(_network())), save({"x": torch.zeros(2)})]


def arrays_file(data: bytes) -> None:
    """An .npz file from elsewhere: nothing in it is unpickled."""
    path = world().write("data.npz", data)
    with suppress(DataError):
        arrays(path=str(path))


def arrays_seeds() -> list[bytes]:
    files = []
    for save_arrays in (np.savez, np.savez_compressed):
        file = io.BytesIO()
        save_arrays(file, x=np.zeros((8, 2), np.float32), y=np.arange(8) % 2)
        files.append(file.getvalue())
    return files


def traces_file(data: bytes) -> None:
    """A CSV file of traces from elsewhere."""
    path = world().write("traces.csv", data)
    with suppress(ConfigError):
        read_traces(path)


def traces_seeds() -> list[bytes]:
    return [b"seconds_per_sample,online\n0.5,0-10 20-30\n2,\n", b"upload,latency\n1e3,0\n"]


def triggers(data: bytes) -> None:
    """Triggers of a peer."""
    with suppress(DataError):
        assert trigger_exchange.from_bytes(data, (3, 9), 5).to_bytes() == data


def trigger_seeds() -> list[bytes]:
    signs = torch.zeros(2, 3, 9, dtype=torch.int8)
    signs[1, 0, :2] = torch.tensor([1, -1])
    return [b"", Triggers(signs, torch.tensor([0, 4])).to_bytes()]


Target = Callable[[bytes], None]
TARGETS: dict[str, tuple[Target, Callable[[], list[bytes]]]] = {
    "arrays": (arrays_file, arrays_seeds),
    "backup": (backup, backup_seeds),
    "card": (card, card_seeds),
    "endpoint": (endpoint, endpoint_seeds),
    "federation": (federation_file, federation_seeds),
    "former": (former_notice, federation_seeds),
    "hello": (hello, hello_seeds),
    "journal": (journal, journal_seeds),
    "http": (http, http_seeds),
    "member": (member_file, member_seeds),
    "metrics": (metrics_request, metrics_seeds),
    "model": (model, model_seeds),
    "proof": (proof, proof_seeds),
    "records": (round_records, round_record_seeds),
    "relay-reply": (relay_reply, relay_reply_seeds),
    "relay-request": (relay_request, relay_request_seeds),
    "root": (root_certificate, root_seeds),
    "saved-model": (saved_model, saved_model_seeds),
    "sealed": (sealed, sealed_seeds),
    "traces": (traces_file, traces_seeds),
    "triggers": (triggers, trigger_seeds),
    "versions": (later_version, later_version_seeds),
    "wire": (wire_messages, wire_seeds),
    "witnesses": (witnesses, witness_seeds),
}
"""Name of each target, with its function and that of its first inputs."""


def check(name: str, data: bytes, *, slowdown: float = 1.0) -> None:
    """Run one input; raise if a property, or a bound of time or memory, does not hold."""
    target, _ = TARGETS[name]
    world()
    started = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with mock.patch.object(os, "fsync"):
        target(data)
    seconds = time.process_time() - started
    growth = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak)
    assert seconds <= slowdown * MAX_SECONDS, f"{name}: {seconds:.1f} s for {len(data)} bytes"
    assert growth <= MAX_GROWTH, f"{name}: {growth} bytes for {len(data)} bytes"


def first_inputs(name: str) -> list[bytes]:
    """Return what the writer of a target's bytes writes, and the inputs that once failed."""
    kept = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
    return [*TARGETS[name][1](), *kept]


def large_inputs(name: str) -> list[bytes]:
    """Return inputs that once took too much time or memory, which are too slow to mutate."""
    if name not in ("federation", "former", "member", "proof", "records"):
        return []
    deep = b".".join([b"a"] * 900)
    keys = b"".join(b"x%d=1\n" % n for n in range(7000))
    return [b".".join([b"a"] * 2**15) + b"=1", b"[" + deep + b"]\n" + keys, b"a={" * 300]

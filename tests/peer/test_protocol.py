"""Messages: accepted, refused with a reason, and as docs/protocol.md specifies."""

import dataclasses
import hashlib
import json
import mmap
import re
import struct
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.peer.members import federated, identities

from fedcb2o.peer.wire import dialer, http_requests, listener, pace, protocol
from fedcb2o.peer.wire.protocol import (
    CHUNK_BYTES,
    ZERO_DIGEST,
    Answer,
    AnswerStatus,
    MalformedError,
    Manifest,
    Request,
    RequestKind,
    decode_answer,
    decode_hello,
    decode_manifest,
    decode_offer,
    decode_request,
    encode_hello,
    encode_offer,
    manifest_bytes,
    validate_manifest,
)

DIM = 300_000
N = 7
NONCE = bytes(range(16))


@pytest.fixture(scope="module")
def orgs(tmp_path_factory):
    return identities(tmp_path_factory.mktemp("who"), 3)


@pytest.fixture(scope="module")
def federation(orgs):
    return federated(orgs, rounds=20, lag=2)


@pytest.fixture(scope="module")
def content():
    return bytes(range(256)) * (4 * DIM // 256) + bytes(4 * DIM % 256)


@pytest.fixture(scope="module")
def manifest(federation, content):
    return Manifest.from_content(
        content, run=federation.run, agent=1, round=N, dim=DIM, num_samples=50
    )


def refusal_reason(data, federation, **changes) -> str:
    settings = {
        "federation": federation,
        "peer": 1,
        "n": N,
        "min_round": 0,
        "dim": DIM,
        "max_bytes": 4 * DIM,
    }
    reason, manifest = validate_manifest(data, **{**settings, **changes})
    assert (manifest is None) == bool(reason)
    return reason


def test_a_manifest_describes_the_sent_model(orgs, federation, manifest, content):
    signed = manifest.to_signed_bytes(orgs[1].sign)
    assert len(signed) == manifest_bytes(len(content)) == 142 + 2 * 32 + 64
    read, body, signature = decode_manifest(signed)
    assert read == manifest
    assert signed == body + signature
    assert read.digest == hashlib.sha256(body).digest()
    assert read.size == len(content)
    assert read.sha256 == hashlib.sha256(content).digest()
    assert read.chunks == (
        hashlib.sha256(content[:CHUNK_BYTES]).digest(),
        hashlib.sha256(content[CHUNK_BYTES:]).digest(),
    )
    assert validate_manifest(
        signed, federation=federation, peer=1, n=N, min_round=N, dim=DIM, max_bytes=4 * DIM
    ) == ("", manifest)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"run": bytes(32)}, "run"),
        ({"agent": 2}, "signature"),
        ({"agent": 3}, "member"),
        ({"agent": 2**32 - 1}, "member"),
        ({"round": N - 3}, "round"),
        ({"round": 20}, "round"),
        ({"round": 2**32 - 1}, "round"),
        ({"dim": DIM - 1}, "size"),
        ({"dim": 2**63}, "size"),
        ({"dim": 2**64 - 1}, "size"),
        ({"size": 0}, "size"),
        ({"size": 0, "chunks": ()}, "size"),
        ({"size": 4 * DIM + 1}, "size"),
        ({"size": CHUNK_BYTES}, "size"),  # one chunk, but the manifest has two
        ({"size": 2**63}, "size"),
        ({"size": 2**64 - 1}, "size"),
        ({"chunks": (ZERO_DIGEST,)}, "size"),
        ({"chunks": (ZERO_DIGEST,) * 3}, "length"),
        ({"encoding": 1}, "dtype"),
        ({"base": bytes(31) + b"1"}, "dtype"),
        ({"num_samples": 2**64 - 1}, ""),  # accepted; the federation limits the claim
        ({"round": N - 2}, ""),
        ({"round": 19}, ""),
    ],
)
def test_a_signed_manifest_with_wrong_values_is_refused_with_a_reason(
    orgs, federation, manifest, changed, reason
):
    assert (
        refusal_reason(
            dataclasses.replace(manifest, **changed).to_signed_bytes(orgs[1].sign), federation
        )
        == reason
    )


def test_the_first_reason_in_documented_order_is_returned(orgs, federation, manifest):
    stranger = dataclasses.replace(
        manifest, agent=9, run=ZERO_DIGEST, round=0, dim=1, size=2**63, encoding=1, base=b"1" * 32
    )
    other = federated(orgs, rounds=20, lag=2, synchronous=True)
    signed = stranger.to_signed_bytes(orgs[1].sign)
    changes = [
        ("malformed", lambda data: data[:6] + b"0" + bytes(10**6)),
        ("version", lambda data: data[:7] + b"\2" + bytes(10**6)),
        ("length", lambda data: data + bytes(10**6)),
        ("malformed", lambda data: data[:-1]),
        ("member", lambda data: data),
    ]
    assert [refusal_reason(change(signed), federation) for _, change in changes] == [
        reason for reason, _ in changes
    ]
    repairs = [
        ("signature", {"agent": 2}, orgs[1].sign, federation),
        ("run", {}, orgs[2].sign, federation),
        ("agent", {"run": federation.run}, orgs[2].sign, federation),
        ("round", {"agent": 1}, orgs[1].sign, federation),
        (
            "round",
            {"round": N + 1, "run": other.run},
            orgs[1].sign,
            other,
        ),  # synchronous: only the current round
        ("size", {"round": N}, orgs[1].sign, other),
        ("dtype", {"dim": DIM, "size": manifest.size}, orgs[1].sign, other),
        ("", {"encoding": 0, "base": ZERO_DIGEST}, orgs[1].sign, other),
    ]
    for reason, change, sign, fed in repairs:
        stranger = dataclasses.replace(stranger, **change)
        assert refusal_reason(stranger.to_signed_bytes(sign), fed) == reason


def test_manifests_older_than_the_minimum_round_or_the_lag_are_refused(orgs, federation, manifest):
    signed = manifest.to_signed_bytes(orgs[1].sign)
    assert refusal_reason(signed, federation, min_round=N) == ""
    assert refusal_reason(signed, federation, min_round=N + 1) == "round"
    assert refusal_reason(signed, federation, n=N + 2) == ""
    assert refusal_reason(signed, federation, n=N + 3) == "round"


def test_a_manifest_of_another_agent_is_refused(orgs, federation, manifest):
    signed = dataclasses.replace(manifest, agent=2).to_signed_bytes(orgs[2].sign)
    assert refusal_reason(signed, federation) == "agent"
    assert refusal_reason(signed, federation, peer=2) == ""


def test_a_signature_is_valid_for_one_context_only(orgs, federation, manifest):
    body = manifest.body
    digest = manifest.digest
    assert protocol.verify_triggers(
        b"ab" + orgs[1].sign(b"fedcb2o triggers v1\0" + digest + b"ab"), manifest, orgs[1].member
    )
    for prefix in (protocol.MANIFEST_CONTEXT, protocol.REQUEST_CONTEXT, protocol.HELLO_CONTEXT):
        with pytest.raises(MalformedError, match="triggers"):
            protocol.verify_triggers(
                b"ab" + orgs[1].sign(prefix + digest + b"ab"), manifest, orgs[1].member
            )
    for prefix in (protocol.REQUEST_CONTEXT, protocol.HELLO_CONTEXT, b""):
        assert refusal_reason(body + orgs[1].sign(prefix + body), federation) == "signature"
    contexts = [
        protocol.MANIFEST_CONTEXT,
        protocol.REQUEST_CONTEXT,
        protocol.HELLO_CONTEXT,
        protocol.TRIGGERS_CONTEXT,
    ]
    assert not any(one != other and one.startswith(other) for one in contexts for other in contexts)


def test_a_gigabyte_is_refused_without_allocating_memory(orgs, federation, manifest):
    signed = manifest.to_signed_bytes(orgs[1].sign)
    with mmap.mmap(-1, 2**30) as memory, memoryview(memory) as huge:
        huge[: len(signed)] = signed
        struct.pack_into("<I", huge, 138, (2**30 - 142 - 64) // 32)
        tracemalloc.start()
        assert refusal_reason(huge, federation) == "length"
        for read in (decode_manifest, decode_request, decode_offer):
            with pytest.raises(MalformedError):
                read(huge)
        assert tracemalloc.get_traced_memory()[1] < 10**5
        tracemalloc.stop()


@pytest.mark.parametrize(
    "data", [b"", b"fedcb2o", b"fedcb2o\1", b"fedcb2o\1\1", b"FEDCB2O\1" + bytes(100)]
)
def test_foreign_or_truncated_bytes_are_malformed(data, federation):
    assert refusal_reason(data, federation) == "malformed"
    for read in (decode_manifest, decode_request, decode_answer):
        with pytest.raises(MalformedError, match="malformed"):
            read(data)


@pytest.mark.parametrize("length", [8, 9, 10, 26, 170, 206, 300])
@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_version_of_a_manifest_is_detected_from_byte_7_only(length, version, federation):
    data = b"fedcb2o" + bytes([version]) + bytes(length - 8)
    assert refusal_reason(data, federation) == "version"
    with pytest.raises(MalformedError, match="version"):
        decode_manifest(data)


@pytest.mark.parametrize("target", ["/v2/manifest?round=3", "/v10/x", "/v0/"])
def test_another_version_of_a_request_is_detected_from_its_path(target):
    with pytest.raises(MalformedError, match="version"):
        decode_request(f"GET {target}\nAuthorization: other".encode())
    with pytest.raises(MalformedError, match="malformed"):
        decode_request(f"GET /v1{target}".encode())


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"kind": RequestKind.HELLO, "digest": b"d" * 32}, f"hello?key={'64' * 32}&"),
        ({"kind": RequestKind.MANIFEST, "round": 3}, "manifest?round=3&"),
        ({"kind": RequestKind.MODEL, "digest": b"d" * 32}, f"models/{'64' * 32}?"),
        ({"kind": RequestKind.MODEL, "digest": b"d" * 32, "first": 2**40, "last": 2**41}, f"models/{'64' * 32}?"),
        ({"kind": RequestKind.MODEL, "digest": b"d" * 32, "first": 5}, f"models/{'64' * 32}?"),
        (
            {"kind": RequestKind.WITNESS, "index": 2**32 - 1, "round": 9, "digest": bytes(32)},
            f"witness?agent=4294967295&round=9&digest={'00' * 32}&",
        ),
    ],
)  # fmt: skip
def test_a_request_is_decoded_and_every_change_breaks_its_signature(fields, text, orgs, federation):
    request = Request(run=federation.run, sender=0, receiver=1, nonce=NONCE, **fields)
    data = request.encode(orgs[0].sign)
    assert data.startswith(
        f"GET /v1/{text}run={federation.run.hex()}&from=0&to=1&nonce={NONCE.hex()}\n".encode()
    )
    assert len(data) <= protocol.MAX_REQUEST_BYTES
    read, body, signature = decode_request(data)
    assert read == request
    assert orgs[0].member.verify(protocol.REQUEST_CONTEXT + body, signature)
    for place in range(0, len(data), 3):
        changed = bytearray(data)
        changed[place] ^= 1
        try:
            _, body, signature = decode_request(changed)
        except MalformedError:
            continue
        assert not orgs[0].member.verify(protocol.REQUEST_CONTEXT + body, signature)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.replace(b"round=3", b"round=03"),
        lambda data: data.replace(b"from=0", b"from=4294967296"),
        lambda data: data.replace(b"nonce=00", b"nonce=0A"),
        lambda data: data.replace(b"GET", b"PUT"),
        lambda data: data.replace(b"&from", b"?from"),
        lambda data: data.replace(b"&run", b"?run"),
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: data.replace(b"\nAuth", b"\nRange: bytes=0-5\nAuth"),
        lambda data: data[:-3] + b"/==",  # other bits after the end of the signature
        lambda data: data + b"\n",
        lambda data: data + b" " * 512,
    ],
)
def test_a_request_has_one_form_only(change, orgs, federation):
    request = Request(
        kind=RequestKind.MANIFEST, run=federation.run, sender=0, receiver=1, nonce=NONCE, round=3
    )
    data = request.encode(orgs[0].sign)
    decode_request(data)
    changed = change(data)
    assert changed != data
    with pytest.raises(MalformedError, match="malformed"):
        decode_request(changed)


@pytest.mark.parametrize(
    ("span", "is_valid"),
    [("0-5", True), ("5-", True), ("7-3", True), ("0-", False), ("05-9", False), ("-5", False),
     ("0-1,3-4", False), ("0-5 ", False), ("0-" + "9" * 16, False)],
)  # fmt: skip
def test_a_range_has_one_form_only(span, is_valid, orgs, federation):
    request = Request(
        kind=RequestKind.MODEL, run=federation.run, sender=0, receiver=1, nonce=NONCE, last=1
    )
    data = request.encode(orgs[0].sign)
    changed = data.replace(b"bytes=0-1", f"bytes={span}".encode())
    if is_valid:
        assert decode_request(changed)[0].first == int(span.partition("-")[0])
    else:
        with pytest.raises(MalformedError, match="malformed"):
            decode_request(changed)


def test_a_sealed_answer_is_decoded_without_a_copy():
    content = bytes(CHUNK_BYTES)
    data = Answer(AnswerStatus.OK, memoryview(content)).encode()
    assert data == b"200\n" + content
    answer = decode_answer(data)
    assert answer.status is AnswerStatus.OK
    assert isinstance(answer.body, memoryview)
    assert answer.body.obj is data
    assert answer.body == content
    for bad in (b"", b"200", b"206\n", b"299\n", b"000\n", b"20\n\n", b"\xff00\n", b" 200\n"):
        with pytest.raises(MalformedError):
            decode_answer(bad)


def test_an_offer_has_a_manifest_and_at_most_64_digests():
    digests = [(k, k + 1, bytes([k]) * 32) for k in range(64)]
    assert decode_offer(encode_offer(b"signed", digests)) == (b"signed", digests, b"")
    assert decode_offer(memoryview(encode_offer(b"signed"))) == (b"signed", [], b"")
    longest = encode_offer(
        bytes(protocol.MAX_MANIFEST_BYTES),
        [(2**32 - 1, 2**32 - 1, bytes(32))] * 64,
        bytes(protocol.MAX_TRIGGERS_BYTES),
    )
    assert len(decode_offer(longest)[0]) == protocol.MAX_MANIFEST_BYTES
    assert len(decode_offer(longest)[2]) == protocol.MAX_TRIGGERS_BYTES

    def offer(**changes: object) -> bytes:
        return json.dumps({"manifest": "YQ==", "seen": [], **changes}).encode()

    for bad in (
        encode_offer(b"signed", [*digests, digests[0]]),
        encode_offer(b"signed", digests)[:-1],
        bytes(protocol.MAX_OFFER_BYTES + 1),
        b"[" * 10**5,
        b"[]",
        b"",
        offer(manifest="a"),
        offer(manifest=7),
        offer(manifest="é"),
        encode_offer(b"signed", [], bytes(protocol.MAX_TRIGGERS_BYTES + 1)),
        offer(triggers="a"),
        offer(triggers=None),
        offer(seen=7),
        offer(seen=[[1, 2]]),
        offer(seen=[[1, 2, "zz" * 32]]),
        offer(seen=[[1, 2, "00" * 31]]),
        offer(seen=[[-1, 2, "00" * 32]]),
        offer(seen=[[1, 2**32, "00" * 32]]),
        offer(seen=[[True, 2, "00" * 32]]),
        offer(seen=[[1.0, 2, "00" * 32]]),
    ):
        with pytest.raises(MalformedError):
            decode_offer(bad)


def test_a_hello_answer_is_valid_for_one_nonce_and_member(orgs):
    hello = {"protocol": 1, "name": "org-1", "keys": {"b": "1", "a": "2"}, "time": 1.5}
    body = encode_hello(hello, NONCE, orgs[1].sign)
    assert json.loads(body[:-64]) == decode_hello(body, NONCE, orgs[1].member) == hello
    assert body.startswith(b'{"keys":{"a":"2","b":"1"},')
    for bad, nonce, member in [
        (body, bytes(16), orgs[1].member),
        (body, NONCE, orgs[0].member),
        (body[1:], NONCE, orgs[1].member),
        (b"", NONCE, orgs[1].member),
        (bytes(2**20 + 1), NONCE, orgs[1].member),
    ]:
        with pytest.raises(MalformedError):
            decode_hello(bad, nonce, member)
    for text in (b"[" * 10**5, b"7", b"\xff", b"{", b"1" * 10**4):
        with pytest.raises(MalformedError, match="malformed"):
            decode_hello(
                text + orgs[1].sign(protocol.HELLO_CONTEXT + NONCE + text), NONCE, orgs[1].member
            )


def test_decoders_raise_only_malformed_errors(orgs, federation, manifest):
    signed = manifest.to_signed_bytes(orgs[1].sign)
    request = Request(
        kind=RequestKind.HELLO, run=federation.run, sender=0, receiver=1, nonce=NONCE
    ).encode(orgs[0].sign)
    answer = Answer(AnswerStatus.OK, encode_offer(signed, [(1, 2, ZERO_DIGEST)])).encode()
    places = st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=9)), max_size=4)

    @settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        st.sampled_from([signed, request, answer, answer[4:]]),
        places,
        st.integers(0, 400),
        st.binary(max_size=400),
    )
    def fuzz(whole, changes, end, noise):
        changed = bytearray(whole)
        for place, piece in changes:
            changed[place : place + len(piece)] = piece
        for data in (bytes(changed), bytes(changed[:end]), noise, b"fedcb2o\1" + noise):
            if data != signed:
                assert refusal_reason(data, federation)
            for read in (decode_manifest, decode_request, decode_answer, decode_offer):
                with suppress(MalformedError):
                    read(data)

    fuzz()


@settings(max_examples=50)
@given(
    st.binary(min_size=32, max_size=32),
    st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=2),
    st.lists(st.integers(0, 2**64 - 1), min_size=3, max_size=3),
    st.integers(0, 255),
    st.lists(st.binary(min_size=32, max_size=32), max_size=5),
)
def test_a_decoded_manifest_encodes_to_the_same_bytes(word, short, long, encoding, chunks):
    """Each value has one encoding, so that comparing bytes compares values."""
    manifest = Manifest(
        run=word,
        agent=short[0],
        round=short[1],
        dim=long[0],
        num_samples=long[1],
        encoding=encoding,
        base=word[::-1],
        size=long[2],
        sha256=word,
        chunks=tuple(chunks),
    )
    read, body, _ = decode_manifest(manifest.body + bytes(64))
    assert read == manifest
    assert body == manifest.body == read.body


# docs/protocol.md

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
ROUNDS, LAG, ROUND = 20, 2, 8


def table(heading: str, first: str) -> list[list[str]]:
    """Return the rows of the table under a heading; `first` is the name of its first column."""
    part = PAGE.partition(f"\n{heading}")[2].partition(f"\n| {first} |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines()[2:]]
    assert rows, heading
    return rows


MESSAGES = json.loads(Path(__file__).with_name("messages.json").read_text())
VECTORS = {name: bytes.fromhex(text) for name, text in MESSAGES["vectors"].items()}


@pytest.fixture(scope="module")
def keys():
    return [Ed25519PrivateKey.from_private_bytes(VECTORS[f"seed-{j}"]) for j in range(2)]


@pytest.fixture(scope="module")
def documented_federation(orgs, keys):
    """The federation of the documented test vectors, with their keys and run id."""
    fed = federated(orgs, rounds=ROUNDS, lag=LAG).model_copy()
    public_keys = [key.public_key().public_bytes_raw() for key in keys]
    assert public_keys == [VECTORS["key-0"], VECTORS["key-1"]]
    members = {j: dataclasses.replace(fed.members[j], key=public_keys[j]) for j in range(2)}
    fed.__dict__.update(_members=(members,), _digests=(VECTORS["run"],))
    assert fed.run == VECTORS["run"]
    return fed


def test_documented_manifests_equal_the_encoded_ones(keys, documented_federation):
    assert hashlib.sha256(b"fedcb2o test vectors").digest() == VECTORS["run"]
    assert struct.unpack("<5f", VECTORS["content"]) == pytest.approx([0, 1, -2.5, 0.1, 1e6])
    two_chunks = bytes(i % 251 for i in range(2**20 + 4))
    layout = re.search(r"`(<7sBBB[^`]*)`", PAGE)[1]
    names = re.search(r"numbers and bytes: ([^.]*)\.", PAGE)[1].replace("\n", " ").split(", ")
    for name, n, content in (("", 7, VECTORS["content"]), ("-of-two-chunks", 8, two_chunks)):
        signed = VECTORS["manifest" + name]
        values = {
            "run": VECTORS["run"],
            "agent": 1,
            "round": n,
            "dim": len(content) // 4,
            "num_samples": 50,
        }
        built = Manifest.from_content(content, **values)
        assert built.to_signed_bytes(keys[1].sign) == signed
        assert built.digest == VECTORS["digest" + name] == hashlib.sha256(signed[:-64]).digest()
        fields = dict(zip(names, struct.unpack_from(layout, signed), strict=True))
        assert (fields.pop("magic"), fields.pop("version"), fields.pop("type")) == (
            b"fedcb2o",
            1,
            1,
        )
        assert fields.pop("count") == len(built.chunks)
        assert fields == {key: getattr(built, key) for key in fields}
        assert signed[struct.calcsize(layout) : -64] == b"".join(built.chunks)
        context = b"fedcb2o manifest v1\0"
        assert f"`{context[:-1].decode()}`" in PAGE
        keys[1].public_key().verify(signed[-64:], context + signed[:-64])


def test_documented_requests_and_answers_equal_the_encoded_ones(keys, documented_federation):
    run, other = VECTORS["run"], hashlib.sha256(b"another manifest").digest()
    fields_by_kind = {
        "hello": {"digest": VECTORS["key-0"]},
        "manifest": {"round": ROUND},
        "model": {
            "digest": VECTORS["digest-of-two-chunks"], "first": 2**20, "last": 2**21 - 1
        },
        "witness": {"round": 6, "index": 2, "digest": other},
    }  # fmt: skip
    texts = MESSAGES["requests"]
    for kind, values in fields_by_kind.items():
        data = texts[kind].encode()
        request, body, signature = decode_request(data)
        assert request == Request(
            kind=RequestKind[kind.upper()], run=run, sender=0, receiver=1, nonce=request.nonce,
            **values,
        )  # fmt: skip
        assert request.encode(keys[0].sign) == data
        keys[0].public_key().verify(signature, b"fedcb2o request v2\0" + body)
    assert decode_offer(VECTORS["offer"]) == (VECTORS["manifest"], [(2, 6, other)], b"")
    assert encode_offer(VECTORS["manifest"], [(2, 6, other)]) == VECTORS["offer"]
    nonce = decode_request(texts["hello"].encode())[0].nonce
    hello = decode_hello(VECTORS["hello"], nonce, documented_federation.members[1])
    assert encode_hello(hello, nonce, keys[1].sign) == VECTORS["hello"]


def test_documented_refusals_match_the_code(keys, documented_federation):
    settings = {
        "federation": documented_federation,
        "peer": 1,
        "n": ROUND,
        "min_round": 0,
        "dim": 5,
        "max_bytes": 20,
    }
    assert refusal_reason(VECTORS["manifest"], **settings) == ""
    for case in MESSAGES["refused"]:
        changed, start = bytearray(VECTORS["manifest"]), case["offset"]
        piece = bytes.fromhex(case["bytes"])
        assert changed[start : start + len(piece)] != piece
        changed[start : start + len(piece)] = piece
        if case["signed_by"] is not None:
            key = keys[case["signed_by"]]
            changed[-64:] = key.sign(protocol.MANIFEST_CONTEXT + bytes(changed[:-64]))
        assert refusal_reason(bytes(changed), **settings) == case["reason"], case
    reasons = [row[0] for row in table("## How a manifest is checked", "reason")]
    assert list(dict.fromkeys(case["reason"] for case in MESSAGES["refused"])) == [
        reason for reason in reasons if reason != "length"
    ]


def power(text: str) -> int:
    base, _, exponent = text.partition("^")
    return int(base) ** int(exponent or 1)


def test_documented_limits_match_the_code():
    statuses = table("## Answers", "status")
    assert {int(row[0].split()[0].strip(",")) for row in statuses} >= {
        status.value for status in AnswerStatus if status.value
    }
    limits = {row[0]: power(row[1].split()[0]) for row in table("## Limits", "what")}
    assert limits == {
        "connections without a request of a member": listener._MAX_PENDING,
        "seconds for TLS and the first request": listener.HANDSHAKE_SECONDS,
        "connections of a member": listener.MAX_CONNECTIONS,
        "bytes of a header": http_requests.MAX_HEADER_BYTES,
        "requests of a member at once": pace.REQUEST_BURST,
        "requests of a member per second, later": pace.REQUESTS_PER_SECOND,
        "bytes of an answer": dialer.MAX_ANSWER_BYTES,
        "chunks of a model": protocol.MAX_CHUNKS,
        "digests next to a manifest": protocol.MAX_DIGESTS,
        "bytes of triggers with their signature": protocol.MAX_TRIGGERS_BYTES,
        "nonces of a member that are remembered": pace.MAX_NONCES,
    }
    for max_bytes in (protocol.MAX_OFFER_BYTES, protocol.MAX_HELLO_BYTES, CHUNK_BYTES):
        assert 4 + max_bytes <= dialer.MAX_ANSWER_BYTES

"""Server: answers within limits, and a member cannot delay others."""

import hashlib
import os
import time

import pytest
from tests.peer.members import federated, identities

from fedcb2o.peer import amend_federation, read_federation, sign_federation, write_federation
from fedcb2o.peer.wire.equivocation import Ledger
from fedcb2o.peer.wire.pace import MAX_NONCES
from fedcb2o.peer.wire.protocol import (
    ZERO_DIGEST,
    Answer,
    AnswerStatus,
    Manifest,
    Request,
    RequestKind,
    decode_hello,
    decode_manifest,
    decode_offer,
)
from fedcb2o.peer.wire.server import MAX_BUSY_ANSWERS, Server, Snapshot

ME = 0


@pytest.fixture(scope="module")
def orgs(tmp_path_factory):
    return identities(tmp_path_factory.mktemp("who"), 5)


@pytest.fixture(scope="module")
def federation(orgs):
    return federated(
        orgs, rounds=100, lag=2, limits={"answers_per_minute": 6000, "uploads": 2, "per_peer": 2}
    )


class Scene:
    """Servers of one agent, requests to them and their answers."""

    def __init__(self, folder, orgs, federation) -> None:
        self.folder, self.orgs, self.federation = folder, orgs, federation

    def server(self, fed=None, **options) -> Server:
        fed = fed or self.federation
        self.ledger = Ledger(self.folder, fed)
        settings = {"hello_content": lambda: {"round": 7, "keys": fed.value_hashes()}, **options}
        return Server(fed, ME, self.orgs[ME], self.ledger, **settings)

    def request(self, kind: RequestKind, sender: int = 1, **fields) -> bytes:
        signer = fields.pop("by", sender)
        settings = {"run": self.federation.run, "receiver": ME, "nonce": os.urandom(16), **fields}
        return Request(kind=kind, sender=sender, **settings).encode(self.orgs[signer].sign)

    def snapshot(self, n: int, text: bytes = b"model", agent: int = ME) -> Snapshot:
        settings = {
            "run": self.federation.run,
            "agent": agent,
            "round": n,
            "dim": len(text),
            "num_samples": 3,
        }
        manifest = Manifest.from_content(text, **settings)
        return Snapshot(manifest.to_signed_bytes(self.orgs[agent].sign), text)

    def ask(self, server: Server, data: bytes) -> Answer | None:
        """Return the answer, or None if the request is turned away without one."""
        answers = []
        server.on_request(data, answers.append)
        return answers[0] if answers else None


@pytest.fixture
def scene(tmp_path, orgs, federation):
    return Scene(tmp_path, orgs, federation)


def test_a_model_is_downloaded_by_its_manifest_and_chunks(scene, federation):
    server = scene.server()
    content = bytes(range(256)) * 10_000  # 2.44 chunks
    server.publish(scene.snapshot(6, b"old"))
    server.publish(scene.snapshot(7, content))
    other = scene.snapshot(7, agent=3).manifest
    scene.ledger.record(other)
    answer = scene.ask(server, scene.request(RequestKind.MANIFEST, round=7))
    assert answer.status is AnswerStatus.OK
    offer_bytes = len(answer.body)
    signed, digests, _ = decode_offer(answer.body)
    manifest = decode_manifest(signed)[0]
    assert (manifest.round, manifest.size) == (7, len(content))
    assert digests == [
        (3, 7, decode_manifest(other)[0].digest)
    ]  # without the server's own manifest
    ask_part = lambda **part: scene.ask(  # noqa: E731
        server, scene.request(RequestKind.MODEL, digest=manifest.digest, **part)
    )
    parts = [ask_part(first=k * 2**20, last=(k + 1) * 2**20 - 1).body for k in range(3)]
    assert [hashlib.sha256(part).digest() for part in parts] == list(manifest.chunks)
    assert b"".join(parts) == content
    for first in (len(content), 2**32 - 1):
        answer = ask_part(first=first)
        assert (answer.status, answer.body) == (AnswerStatus.NO_SUCH_PART, b"")
        assert answer.headers == (("content-range", f"bytes */{len(content)}"),)
    missing = scene.ask(server, scene.request(RequestKind.MODEL, digest=ZERO_DIGEST))
    assert (missing.status, missing.body) == (AnswerStatus.NOT_HERE, b"")
    for digest, status in (
        (digests[0][2], AnswerStatus.OK),
        (ZERO_DIGEST, AnswerStatus.OK),
        (b"?" * 32, AnswerStatus.NOT_HERE),
    ):
        answer = scene.ask(
            server, scene.request(RequestKind.WITNESS, index=3, round=7, digest=digest)
        )
        assert (answer.status, bytes(answer.body)) == (
            status,
            other if status is AnswerStatus.OK else b"",
        )
    assert server.counts.answered == 6
    counts = server.counts
    assert counts.refused == {}
    assert counts.sent == {1: offer_bytes + len(content) + 2 * len(other)}


def test_a_part_of_a_model_has_the_headers_of_a_download_that_is_resumed(scene):
    server = scene.server()
    snapshot = scene.snapshot(7, b"0123456789")
    server.publish(snapshot)
    tag = ("etag", f'"{snapshot.digest.hex()}"')
    for part, text, span in (
        ({}, b"0123456789", None),
        ({"first": 4}, b"456789", "bytes 4-9/10"),
        ({"first": 2, "last": 4}, b"234", "bytes 2-4/10"),
        ({"first": 8, "last": 99}, b"89", "bytes 8-9/10"),
    ):
        answer = scene.ask(server, scene.request(RequestKind.MODEL, digest=snapshot.digest, **part))
        assert bytes(answer.body) == text
        expected = [tag, ("accept-ranges", "bytes")]
        assert list(answer.headers) == expected + [("content-range", span)] * (span is not None)


def test_a_whole_model_counts_as_an_answer_for_each_mebibyte(scene, federation):
    limits = federation.limits.model_copy(update={"answers_per_minute": 5})
    server = scene.server(federation.model_copy(update={"limits": limits}), clock=lambda: 0.0)
    snapshot = scene.snapshot(7, bytes(2 * 2**20 + 1))
    server.publish(snapshot)
    statuses = [
        scene.ask(server, scene.request(RequestKind.MODEL, digest=snapshot.digest)).status
        for _ in range(2)
    ]
    assert statuses == [AnswerStatus.OK, AnswerStatus.BUSY]
    last = scene.request(RequestKind.MODEL, digest=snapshot.digest, first=2 * 2**20)
    assert scene.ask(server, last).status is AnswerStatus.OK


def test_the_last_two_snapshots_are_served(scene):
    server = scene.server()
    snapshots = [scene.snapshot(n, b"%d" % n) for n in range(3)]
    for snapshot in snapshots:
        server.publish(snapshot)
    answers = [
        scene.ask(server, scene.request(RequestKind.MODEL, digest=snapshot.digest))
        for snapshot in snapshots
    ]
    assert [answer.status for answer in answers] == [
        AnswerStatus.NOT_HERE,
        AnswerStatus.OK,
        AnswerStatus.OK,
    ]
    assert [bytes(answer.body) for answer in answers] == [b"", b"1", b"2"]


def test_the_newest_model_is_sent_unless_it_is_too_old(scene):
    server = scene.server()
    assert scene.ask(server, scene.request(RequestKind.MANIFEST)).status is AnswerStatus.NOT_YET
    server.publish(scene.snapshot(4))
    server.publish(scene.snapshot(5))
    for n, status in (
        (0, AnswerStatus.OK),
        (5, AnswerStatus.OK),
        (7, AnswerStatus.OK),
        (8, AnswerStatus.NOT_YET),
        (2**32 - 1, AnswerStatus.NOT_YET),
    ):
        answer = scene.ask(server, scene.request(RequestKind.MANIFEST, round=n))
        assert answer.status is status, n
        if status is AnswerStatus.OK:
            assert decode_manifest(decode_offer(answer.body)[0])[0].round == 5


def test_synchronous_requests_get_the_model_of_their_round(scene, orgs, federation):
    fed = federation.model_copy(update={"synchronous": True})
    server = scene.server(fed)
    server.publish(scene.snapshot(4))
    server.publish(scene.snapshot(5))
    answers = {
        n: scene.ask(server, scene.request(RequestKind.MANIFEST, round=n)) for n in (3, 4, 5, 6)
    }
    assert [answer.status for answer in answers.values()] == [
        AnswerStatus.NOT_HERE,
        AnswerStatus.OK,
        AnswerStatus.OK,
        AnswerStatus.NOT_YET,
    ]
    for n in (4, 5):
        assert decode_manifest(decode_offer(answers[n].body)[0])[0].round == n


def test_overrides_are_served_to_their_members_only(scene):
    server = scene.server()
    server.publish(scene.snapshot(5, b"to all"), overrides={2: scene.snapshot(5, b"to 2")})
    for sender, text in ((1, b"to all"), (2, b"to 2"), (3, b"to all")):
        answer = scene.ask(server, scene.request(RequestKind.MANIFEST, sender, round=5))
        digest = decode_manifest(decode_offer(answer.body)[0])[0].digest
        assert (
            bytes(scene.ask(server, scene.request(RequestKind.MODEL, sender, digest=digest)).body)
            == text
        )
        other = 1 if sender == 2 else 2
        assert scene.ask(server, scene.request(RequestKind.MODEL, other, digest=digest)).status is (
            AnswerStatus.OK if {sender, other} == {1, 3} else AnswerStatus.NOT_HERE
        )


def test_a_simulated_attacker_may_publish_twice_in_a_round(scene):
    """The attacker first publishes no model for its victims, then crafted models."""
    server = scene.server()
    before, first, second = (
        scene.snapshot(n, text) for n, text in ((4, b"4"), (5, b"5"), (5, b"again"))
    )
    server.publish(before)
    server.publish(first, overrides={1: None})
    assert (
        decode_offer(scene.ask(server, scene.request(RequestKind.MANIFEST, 1, round=5)).body)[0]
        == before.manifest
    )
    assert (
        decode_offer(scene.ask(server, scene.request(RequestKind.MANIFEST, 2, round=5)).body)[0]
        == first.manifest
    )
    server.publish(second, overrides={1: scene.snapshot(5, b"crafted")})
    crafted = decode_manifest(
        decode_offer(scene.ask(server, scene.request(RequestKind.MANIFEST, 1, round=5)).body)[0]
    )[0].digest
    for sender, digest, text in (
        (1, crafted, b"crafted"),
        (2, second.digest, b"again"),
        (2, first.digest, b"5"),
    ):
        assert (
            bytes(scene.ask(server, scene.request(RequestKind.MODEL, sender, digest=digest)).body)
            == text
        )
    assert (
        bytes(scene.ask(server, scene.request(RequestKind.MODEL, 1, digest=before.digest)).body)
        == b"4"
    )
    assert scene.ledger.equivocators == frozenset()


def test_a_member_with_another_federation_gets_hello_only(scene, orgs, federation):
    server = scene.server()
    server.publish(scene.snapshot(5))
    nonce = b"n" * 16
    for run, sender in (
        (federation.run, 1),
        (bytes(32), 77),
    ):  # the id may differ: the key identifies the member
        data = scene.request(
            RequestKind.HELLO,
            sender,
            by=1,
            run=run,
            digest=orgs[1].member.key,
            nonce=nonce,
            receiver=ME,
        )
        answer = scene.ask(server, data)
        assert decode_hello(answer.body, nonce, orgs[ME].member) == {
            "round": 7,
            "keys": federation.value_hashes(),
        }
        nonce = b"m" * 16
    for kind in (RequestKind.MANIFEST, RequestKind.MODEL, RequestKind.WITNESS):
        answer = scene.ask(server, scene.request(kind, run=bytes(32)))
        assert (answer.status, answer.body) == (AnswerStatus.ANOTHER_RUN, b"")
    assert server.counts.refused == {"run": 3}


def test_invalid_requests_get_no_answer(scene, orgs, federation):
    server = scene.server()
    server.publish(scene.snapshot(5))
    good = scene.request(RequestKind.MANIFEST)
    cases = [
        ("malformed", b""),
        ("malformed", good[:-1]),
        ("malformed", good + b"0"),
        ("malformed", bytes(10**6)),
        ("malformed", good.replace(b"manifest?round", b"manifests?round")),
        ("malformed", good.replace(b"round=0", b"round=00")),
        ("malformed", good.replace(b"\nAuth", b"\nRange: bytes=0-9\nAuth")),
        ("receiver", scene.request(RequestKind.MANIFEST, receiver=1)),
        ("receiver", scene.request(RequestKind.HELLO, receiver=1, digest=orgs[1].member.key)),
        ("member", scene.request(RequestKind.MANIFEST, 5, by=1)),
        ("member", scene.request(RequestKind.MANIFEST, 2**32 - 1, by=1)),
        ("member", scene.request(RequestKind.MANIFEST, ME)),
        ("member", scene.request(RequestKind.HELLO, digest=ZERO_DIGEST)),
        ("member", scene.request(RequestKind.HELLO, by=ME, digest=orgs[ME].member.key)),
        ("signature", scene.request(RequestKind.MANIFEST, 1, by=2)),
        ("signature", scene.request(RequestKind.MANIFEST, run=ZERO_DIGEST, by=2)),
        ("signature", scene.request(RequestKind.HELLO, 2, by=2, digest=orgs[1].member.key)),
        ("signature", good[:-88] + b"A" * 86 + b"=="),
    ]
    for k, (reason, data) in enumerate(cases):
        assert scene.ask(server, data) is None, k
        assert server.counts.refused[reason] == sum(each == reason for each, _ in cases[: k + 1]), k
    assert scene.ask(server, good).status is AnswerStatus.OK
    assert scene.ask(server, good) is None
    assert server.counts.refused["replay"] == 1
    newer = scene.ask(server, good.replace(b"/v1/", b"/v2/"))
    assert newer.status is AnswerStatus.ANOTHER_VERSION


def test_requests_of_another_run_do_not_use_up_the_quota(scene, orgs, federation):
    """A member of the other run replays them here. Members of this run are answered as before."""
    server = scene.server(clock=lambda: 0.0)
    server.publish(scene.snapshot(5))
    answers = []
    for _ in range(300):
        foreign = scene.request(RequestKind.MANIFEST, run=b"r" * 32, receiver=3)
        server.on_request(foreign, answers.append)
    hello = scene.request(RequestKind.HELLO, run=b"r" * 32, receiver=3, digest=orgs[1].member.key)
    assert scene.ask(server, hello) is None  # 60 a minute
    assert len(answers) >= 16
    assert {answer.status for answer in answers} <= {AnswerStatus.ANOTHER_RUN, AnswerStatus.BUSY}
    refused = server.counts.refused
    assert refused["run"] <= 60
    assert refused["rate"] >= 240
    before = server._quotas[1].pace.left()
    assert before == federation.limits.answers_per_minute
    assert scene.ask(server, scene.request(RequestKind.MANIFEST)).status is AnswerStatus.OK


def test_nonces_are_remembered_and_bounded(scene):
    server = scene.server(clock=lambda: 0.0)
    first = scene.request(RequestKind.MODEL)
    server.on_request(first, lambda answer: None)
    for _ in range(10):
        server.on_request(scene.request(RequestKind.MODEL), lambda answer: None)
    server.on_request(first, lambda answer: None)
    assert server.counts.refused["replay"] == 1
    peer = server._quotas[1]
    assert all(peer.nonces.accept(os.urandom(16)) for _ in range(2 * MAX_NONCES))
    assert len(peer.nonces._seen) == MAX_NONCES


def test_answers_per_minute_are_limited_for_each_member(scene, federation):
    limits = federation.limits.model_copy(update={"answers_per_minute": 6})
    now = [0.0]
    server = scene.server(federation.model_copy(update={"limits": limits}), clock=lambda: now[0])

    def statuses(sender: int, count: int) -> list[AnswerStatus]:
        return [
            scene.ask(server, scene.request(RequestKind.MODEL, sender)).status for _ in range(count)
        ]

    assert statuses(1, 8) == [AnswerStatus.NOT_HERE] * 6 + [AnswerStatus.BUSY] * 2
    assert statuses(2, 6) == [AnswerStatus.NOT_HERE] * 6
    now[0] = 9.9
    assert statuses(1, 1) == [AnswerStatus.BUSY]
    now[0] = 55.0  # the three excess requests count too
    assert statuses(1, 3) == [AnswerStatus.NOT_HERE] * 2 + [AnswerStatus.BUSY]
    assert server.counts.refused == {"rate": 4}


def test_persistent_excess_requests_get_no_answer(scene, federation):
    limits = federation.limits.model_copy(update={"answers_per_minute": 60})
    now = [0.0]
    server = scene.server(federation.model_copy(update={"limits": limits}), clock=lambda: now[0])
    answers = []
    for _ in range(60):
        assert scene.ask(server, scene.request(RequestKind.MODEL)).status is AnswerStatus.NOT_HERE
    for _ in range(MAX_BUSY_ANSWERS):
        assert scene.ask(server, scene.request(RequestKind.MODEL)).status is AnswerStatus.BUSY
    for _ in range(50):
        server.on_request(scene.request(RequestKind.MODEL, by=2), answers.append)
        server.on_request(scene.request(RequestKind.MODEL), answers.append)
    assert server.counts.refused == {
        "rate": MAX_BUSY_ANSWERS + 100
    }  # before the signature is checked
    assert scene.ask(server, scene.request(RequestKind.MODEL, 2)).status is AnswerStatus.NOT_HERE
    assert answers == []
    now[0] = MAX_BUSY_ANSWERS + 1.0
    assert scene.ask(server, scene.request(RequestKind.MODEL)).status is AnswerStatus.NOT_HERE


def test_ten_thousand_requests_are_turned_away_in_bounded_memory(scene, federation):
    limits = federation.limits.model_copy(update={"answers_per_minute": 60})
    server = scene.server(federation.model_copy(update={"limits": limits}), clock=lambda: 0.0)
    answers = []
    forged = scene.request(RequestKind.MODEL, by=2)
    for _ in range(100):
        server.on_request(forged, answers.append)
    for _ in range(100):
        server.on_request(scene.request(RequestKind.MODEL), answers.append)
    for _ in range(9800):
        server.on_request(forged, answers.append)
    assert len(answers) == 60 + MAX_BUSY_ANSWERS
    assert len(server._quotas[1].nonces._seen) == len(answers)
    assert server.counts.refused["signature"] == 100
    assert server.counts.refused["rate"] == 9900 - 60
    assert scene.ask(server, scene.request(RequestKind.MODEL, 2)).status is AnswerStatus.NOT_HERE


def test_a_failure_ends_one_answer_only(scene, orgs):
    def broken():
        raise ValueError("about")

    def lost(answer: Answer | None) -> None:
        raise OSError("the link is lost")

    server = scene.server(hello_content=broken)
    for _ in range(3):
        server.on_request(scene.request(RequestKind.HELLO, digest=orgs[1].member.key), lost)
        server.on_request(scene.request(RequestKind.MODEL), lost)
    assert server.counts.refused == {"failed": 6}
    assert scene.ask(server, scene.request(RequestKind.MODEL)).status is AnswerStatus.NOT_HERE


def test_a_request_is_answered_without_delay(scene):
    server = scene.server()
    requests = [scene.request(RequestKind.MODEL, 1 + k % 4) for k in range(200)]
    seconds = []
    for data in requests:
        started = time.thread_time()
        server.on_request(data, lambda answer: None)
        seconds.append(time.thread_time() - started)
    assert sorted(seconds)[len(seconds) // 2] < 0.005


def test_a_former_member_gets_only_the_signed_versions_in_hello(scene, orgs, federation, tmp_path):
    path = tmp_path / "federation.toml"
    write_federation(amend_federation(federation, remove=["org-3"]), path)
    for signer in orgs[:3]:
        sign_federation(path, signer)
    server = scene.server(read_federation(path), clock=lambda: 0.0)
    server.publish(scene.snapshot(7))

    def hello(**fields) -> bytes:
        return scene.request(RequestKind.HELLO, 3, digest=orgs[3].member.key, **fields)

    nonce = b"n" * 16
    answer = scene.ask(server, hello(nonce=nonce))
    content = decode_hello(answer.body, nonce, orgs[ME].member)
    assert content["file"] == path.read_text()
    assert content["round"] == 7
    assert scene.ask(server, hello(nonce=nonce)) is None  # repeated
    assert scene.ask(server, hello(by=1)) is None  # signed by another member
    assert scene.ask(server, hello(run=b"r" * 32)) is None  # of another run
    assert scene.ask(server, scene.request(RequestKind.MANIFEST, 3, round=7)) is None
    assert scene.ask(server, scene.request(RequestKind.MANIFEST, 1, round=7)) is not None
    assert server.counts.refused == {"replay": 1, "signature": 1, "member": 2}
    member_hello = scene.request(RequestKind.HELLO, 1, digest=orgs[1].member.key, nonce=nonce)
    body = scene.ask(server, member_hello).body
    assert "file" not in decode_hello(body, nonce, orgs[ME].member)

    answers = [scene.ask(server, hello()) for _ in range(62)]
    assert 59 <= sum(answer is not None for answer in answers) <= 61  # 60 a minute
    assert scene.ask(server, scene.request(RequestKind.MANIFEST, 1, round=7)) is not None

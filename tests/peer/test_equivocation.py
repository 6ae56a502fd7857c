"""Proofs of equivocation, and the journal that prevents a second signature."""

import base64
import dataclasses
import json
import os
import tomllib

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.peer.members import federated, identities

from fedcb2o import cli
from fedcb2o.errors import DataError, RunError
from fedcb2o.peer import Identity, amend_federation, write_federation
from fedcb2o.peer.wire import equivocation as room
from fedcb2o.peer.wire.equivocation import Ledger, Proof, SigningJournal, verify_proof
from fedcb2o.peer.wire.protocol import ZERO_DIGEST, Manifest, decode_manifest


@pytest.fixture(scope="module")
def orgs(tmp_path_factory):
    return identities(tmp_path_factory.mktemp("who"), 4)


@pytest.fixture(scope="module")
def federation(orgs):
    return federated(orgs, rounds=1000, lag=2)


@pytest.fixture
def sign(orgs, federation):
    """Return a function that signs the manifest of an agent for a round; `text` is the model."""

    def sign_manifest(
        agent: int,
        n: int,
        text: bytes = b"model",
        *,
        signer: int | None = None,
        run: bytes = federation.run,
    ) -> bytes:
        manifest = Manifest.from_content(text, run=run, agent=agent, round=n, dim=2, num_samples=1)
        return manifest.to_signed_bytes(orgs[agent if signer is None else signer].sign)

    return sign_manifest


def digest(signed: bytes) -> bytes:
    return decode_manifest(signed)[0].digest


def manifest_digest(signed: bytes) -> tuple[int, int, bytes]:
    manifest = decode_manifest(signed)[0]
    return manifest.agent, manifest.round, manifest.digest


def test_two_models_for_one_round_yield_a_publicly_verifiable_proof(tmp_path, federation, sign):
    ledger = Ledger(tmp_path, federation)
    first, second = sign(1, 5, b"to a"), sign(1, 5, b"to b")
    assert ledger.record(first) is None
    assert ledger.record(first) is None
    assert ledger.record(sign(1, 6)) is None
    assert ledger.equivocators == frozenset()
    proof = ledger.record(second)
    assert proof is not None
    assert (proof.name, proof.agent, proof.round) == ("org-1", 1, 5)
    assert ledger.equivocators == {1}
    (path,) = tmp_path.rglob("*.*")
    assert path == tmp_path / "proofs/org-1-5.proof.toml"
    assert Proof.read(path) == proof
    assert verify_proof(path, federation).endswith("signed by org-1, agent 1 of tiny")
    assert base64.b64encode(proof.key).decode() in verify_proof(path)
    assert ledger.record(sign(1, 7, b"a")) is None
    assert ledger.record(sign(1, 7, b"b")) is None
    assert len(list(tmp_path.rglob("*.proof.toml"))) == 1
    assert Ledger(tmp_path, federation).equivocators == {1}


def test_peers_detect_equivocation_by_comparing_digests(tmp_path, federation, sign):
    """Agent 3 sends different models to agents 0 and 1. Agents 0 and 2 prove it from digests."""
    ledgers = [Ledger(tmp_path / str(j), federation) for j in range(3)]
    first, second = sign(3, 8, b"to 0"), sign(3, 8, b"to 1")
    ledgers[0].record(first)
    ledgers[1].record(second)
    ledgers[1].record(sign(0, 8))
    assert ledgers[0].find_conflicts(ledgers[1].digests()) == [manifest_digest(second)]
    assert ledgers[2].find_conflicts(ledgers[1].digests()) == []
    witness = ledgers[1].get(*manifest_digest(second))
    assert witness == second
    assert ledgers[0].prove(3, 8, {digest(second): witness}) is not None
    assert ledgers[0].find_conflicts(ledgers[1].digests()) == []
    conflicts = ledgers[2].find_conflicts(ledgers[0].digests())
    assert sorted(conflicts) == sorted([manifest_digest(first), manifest_digest(second)])
    assert ledgers[0].get(*manifest_digest(first)) == first
    assert ledgers[2].prove(3, 8, {one[2]: ledgers[0].get(*one) for one in conflicts}) is not None
    assert ledgers[2].equivocators == {3}
    files = [(tmp_path / str(j) / "proofs" / "org-3-8.proof.toml").read_bytes() for j in (0, 2)]
    assert files[0] == files[1]


def test_only_manifests_with_a_members_own_signature_count_against_it(
    tmp_path, orgs, federation, sign
):
    ledger = Ledger(tmp_path, federation)
    ledger.record(sign(1, 5))
    forged = sign(1, 5, b"other", signer=2)
    for signed in (
        forged,
        sign(1, 5, b"other", run=bytes(32)),
        sign(1, 1000),
        sign(1, 5)[:-1],
        b"",
        dataclasses.replace(decode_manifest(sign(1, 5))[0], agent=9).to_signed_bytes(orgs[1].sign),
    ):
        assert ledger.record(signed) is None
    assert ledger.equivocators == frozenset()
    assert ledger.digests() == [manifest_digest(sign(1, 5))]
    assert ledger.get(1, 5, digest(forged)) is None
    assert not (tmp_path / "proofs").exists()


def test_the_number_of_stored_manifests_is_bounded(tmp_path, federation, sign, monkeypatch):
    """The manifests of the highest rounds are kept, in whatever order they arrive."""
    monkeypatch.setattr(room, "_HELD_BYTES", 0)
    ledger = Ledger(tmp_path, federation)
    for n in [*range(30, 60), *range(30)]:
        for agent in range(4):
            ledger.record(sign(agent, n))
    kept_rounds = range(50, 60)
    for n in range(60):
        stored = ledger.get(1, n, digest(sign(1, n)))
        assert stored == (sign(1, n) if n in kept_rounds else None)
    assert ledger.get(1, 0, ZERO_DIGEST) == sign(1, 59)
    assert ledger.digests()[0] == manifest_digest(sign(3, 29))
    strangers = [(agent, n, ZERO_DIGEST) for agent in (4, 2**32 - 1) for n in (0, 59, 2**32 - 1)]
    assert (
        ledger.find_conflicts([*strangers, (0, 49, ZERO_DIGEST), (0, 2**32 - 1, ZERO_DIGEST)]) == []
    )
    assert ledger.find_conflicts([(0, 50, ZERO_DIGEST), (0, 59, ZERO_DIGEST)]) == [
        (0, 50, ZERO_DIGEST),
        (0, 59, ZERO_DIGEST),
    ]
    assert len(ledger.find_conflicts([(0, 40, bytes([k]) * 32) for k in range(64)])) == 64


def test_all_small_manifests_of_a_long_run_are_stored(tmp_path, federation, sign):
    ledger = Ledger(tmp_path, federation)
    for n in range(1000):
        ledger.record(sign(1, n))
    assert ledger.get(1, 0, digest(sign(1, 0))) == sign(1, 0)
    assert ledger.record(sign(1, 0, b"another")) is not None


def test_a_witness_must_be_the_requested_manifest(tmp_path, federation, sign):
    """Manifests of another agent, round or digest are not stored.

    A single manifest proves nothing.
    """
    ledger = Ledger(tmp_path, federation)
    ledger.record(sign(1, 5))
    first, second = sign(1, 5, b"a"), sign(1, 6, b"b")
    for witnesses in (
        {digest(first): second},
        {digest(second): second},
        {digest(second): first},
        {digest(sign(2, 5, b"a")): sign(2, 5, b"a")},
        {digest(first): sign(1, 5, b"a", signer=2)},
    ):
        assert ledger.prove(1, 5, witnesses) is None
    assert ledger.prove(2, 5, {digest(sign(2, 5)): sign(2, 5)}) is None
    assert ledger.digests() == [manifest_digest(sign(1, 5))]
    assert ledger.get(2, 5, ZERO_DIGEST) is None
    assert ledger.prove(1, 5, {digest(first): first}) is not None
    pair = {digest(sign(2, 7, text)): sign(2, 7, text) for text in (b"a", b"b")}
    assert ledger.prove(2, 7, pair) is not None
    assert ledger.equivocators == {1, 2}


def test_at_most_64_digests_are_sent_and_proofs_come_first(tmp_path, federation, sign):
    changed_federation = federation.model_copy(update={"lag": 100})
    ledger = Ledger(tmp_path, changed_federation)
    for n in range(90):
        ledger.record(sign(0, n))
    ledger.record(sign(2, 3, b"a"))
    ledger.record(sign(2, 3, b"b"))
    assert len(ledger.digests()) == 64
    assert {one[0] for one in ledger.digests()[:2]} == {2}


def test_agents_far_ahead_do_not_displace_digests_of_others(tmp_path, federation, sign):
    """Two agents fill the ledger with the highest rounds.

    The manifests recorded last come first.
    """
    changed_federation = federation.model_copy(update={"lag": 100})
    ledger = Ledger(tmp_path, changed_federation)
    for n in range(40, 90):
        for agent in (1, 2):
            ledger.record(sign(agent, n))
    for n in range(10):
        ledger.record(sign(0, n))
    assert [(agent, n) for agent, n, _ in ledger.digests()[:10]] == [
        (0, n) for n in range(9, -1, -1)
    ]


def test_a_proof_found_while_the_disk_is_full_is_written_later(
    tmp_path, federation, sign, monkeypatch
):
    ledger = Ledger(tmp_path, federation)
    ledger.record(sign(1, 5, b"a"))

    def fail_without_space(path, content):
        raise RunError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(room.records, "atomic_write", fail_without_space)
        assert ledger.record(sign(1, 5, b"b")) is not None
    assert ledger.equivocators == {1}
    ledger.record(sign(2, 5))
    assert Ledger(tmp_path, federation).equivocators == {1}


def test_proofs_of_other_runs_and_invalid_files_are_ignored(tmp_path, orgs, federation, sign):
    proofs = tmp_path / "proofs"
    other = federated(orgs, rounds=999)
    ledger = Ledger(tmp_path, other)
    ledger.record(sign(1, 5, b"a", run=other.run))
    ledger.record(sign(1, 5, b"b", run=other.run))
    (proofs / "org-2-5.proof.toml").write_text("name = 'org-2'\n")
    (proofs / "org-3-5.proof.toml").write_bytes(b"\0" * 100)
    assert Ledger(tmp_path, other).equivocators == {1}
    assert Ledger(tmp_path, federation).equivocators == frozenset()


@pytest.fixture
def path(tmp_path, federation, sign):
    """Path of a valid proof."""
    ledger = Ledger(tmp_path, federation)
    ledger.record(sign(1, 5, b"a"))
    ledger.record(sign(1, 5, b"b"))
    return tmp_path / "proofs/org-1-5.proof.toml"


def test_the_proof_command_prints_one_line(tmp_path, path, federation, capsys):
    federation_path = tmp_path / "federation.toml"
    write_federation(federation, federation_path)
    cli.peers.proof(path, federation_path)
    expected = "two different models for round 5 of run {} are signed by org-1, agent 1 of tiny\n"
    assert capsys.readouterr().out == expected.format(federation.run.hex()[:16])


def test_a_proof_under_a_replaced_key_does_not_count_against_the_new_key(
    tmp_path, path, orgs, federation
):
    (other,) = identities(tmp_path / "new", 1)
    new = Identity.make(tmp_path / "org-1", name="org-1", endpoint=other.member.endpoint)
    later = amend_federation(federation, replace=[new.member])
    assert later.members[1].key != federation.members[1].key
    assert verify_proof(path, later).endswith("agent 1 of tiny, whose key was replaced since")
    assert Ledger(tmp_path, later).equivocators == frozenset()
    assert Ledger(tmp_path, federation).equivocators == {1}


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def replace_second(table: dict, manifest: str) -> None:
    table["manifests"][1] = manifest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sign, table: table.pop("key"), "must have the keys"),
        (lambda sign, table: table.update(more=1), "must have the keys"),
        (lambda sign, table: table.update(round="5"), "must have the keys"),
        (lambda sign, table: table.update(round=True), "must have the keys"),
        (lambda sign, table: table.update(round=6), "another agent, round or run"),
        (lambda sign, table: table.update(agent=2), "another agent, round or run"),
        (lambda sign, table: table.update(run="00"), "another agent, round or run"),
        (lambda sign, table: table.update(run="x"), "must have the keys"),
        (lambda sign, table: table.update(name="\x1b[31m"), "must have the keys"),
        (lambda sign, table: table.update(name="../../etc"), "must have the keys"),
        (lambda sign, table: table.update(key="§"), "must have the keys"),
        (lambda sign, table: table.update(key=""), "was not signed by its key"),
        (lambda sign, table: table.update(key=encoded(bytes(32))), "was not signed by its key"),
        (lambda sign, table: table["manifests"].pop(), "must have the keys"),
        (lambda sign, table: table.update(manifests=[1, 2]), "must have the keys"),
        (lambda sign, table: table.update(manifests=["", ""]), "cannot be read (malformed)"),
        (lambda sign, table: replace_second(table, table["manifests"][0]), "one and the same"),
        (lambda sign, table: replace_second(table, encoded(sign(1, 6))), "another agent, round or run"),
        (lambda sign, table: replace_second(table, encoded(sign(1, 5, b"c", signer=2))), "not signed by its key"),
    ],
)  # fmt: skip
def test_an_invalid_proof_is_refused_with_a_one_line_error(path, sign, change, message):
    table = tomllib.loads(path.read_text())
    change(sign, table)
    path.write_text(tomli_w.dumps(table))
    with pytest.raises(DataError) as error:
        verify_proof(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert "\x1b" not in str(error.value)


def test_a_proof_is_read_in_any_layout_and_refused_if_it_is_slow_to_parse(path):
    table = tomllib.loads(path.read_text())
    first, second = table["manifests"]
    lines = [f"{key} = {json.dumps(table[key])}" for key in table if key != "manifests"]
    path.write_text("\n".join([*lines, f'manifests = ["{first}", "{second}"]']))
    assert "two different models for round 5" in verify_proof(path)
    path.write_text("\n".join([*lines, ".".join(["a"] * 10**6) + " = 1"]))
    with pytest.raises(DataError, match="is no proof: it has a line of more than 2000 bytes"):
        verify_proof(path)


def test_a_proof_is_verified_against_the_federation(tmp_path, path, orgs, federation, sign):
    with pytest.raises(DataError, match="is of run"):
        verify_proof(path, federated(orgs, rounds=7))
    table = tomllib.loads(path.read_text())
    path.write_text(tomli_w.dumps({**table, "name": "org-2"}))
    assert "the file says org-2" in verify_proof(path)
    with pytest.raises(DataError, match="not of the key of org-2, agent 1"):
        verify_proof(path, federation)
    manifests_of_org_2 = [encoded(sign(1, 5, text, signer=2)) for text in (b"a", b"b")]
    path.write_text(
        tomli_w.dumps(
            {**table, "key": encoded(orgs[2].member.key), "manifests": manifests_of_org_2}
        )
    )
    verify_proof(path)
    with pytest.raises(DataError, match="not of the key of org-1"):
        verify_proof(path, federation)
    with pytest.raises(DataError, match="cannot read"):
        verify_proof(tmp_path / "none.proof.toml")
    path.write_bytes(b"#" * (2**21 + 1))
    with pytest.raises(DataError, match="longer than"):
        verify_proof(path)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 2000), piece=st.binary(min_size=1, max_size=3))
def test_a_changed_proof_raises_only_data_errors(path, place, piece):
    whole = path.read_bytes()
    changed = path.with_name("changed.proof.toml")
    changed.write_bytes(
        whole[: place % len(whole)] + piece + whole[place % len(whole) + len(piece) :]
    )
    try:
        assert Proof.read(changed).manifests == Proof.read(path).manifests
    except DataError as error:
        assert "\n" not in str(error)  # noqa: PT017


def test_a_round_is_signed_once(tmp_path):
    journal = SigningJournal(tmp_path)
    assert journal.reserve(3, b"a" * 32)
    assert journal.reserve(3, b"a" * 32)
    assert not journal.reserve(3, b"b" * 32)
    again = SigningJournal(tmp_path)
    assert again.reserve(3, b"a" * 32)
    assert not again.reserve(3, b"b" * 32)
    assert again.reserve(4, b"b" * 32)
    lines = (tmp_path / "signed.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"round": 3, "digest": (b"a" * 32).hex()},
        {"round": 4, "digest": (b"b" * 32).hex()},
    ]


def test_an_incomplete_last_line_of_the_journal_is_dropped(tmp_path):
    path = tmp_path / "signed.jsonl"
    journal = SigningJournal(tmp_path)
    assert journal.reserve(1, b"a" * 32)
    whole = path.read_bytes()
    assert journal.reserve(2, b"b" * 32)
    full = path.read_bytes()
    for end in range(len(whole), len(full)):
        path.write_bytes(full[:end])
        again = SigningJournal(tmp_path)
        assert not again.reserve(1, b"c" * 32)
        assert again.reserve(2, b"c" * 32)
        assert not SigningJournal(tmp_path).reserve(2, b"b" * 32)
    path.write_bytes(b"?" + full[1:])
    with pytest.raises(RunError, match=r"damaged: line 1.*take for fraud"):
        SigningJournal(tmp_path)


def test_a_round_is_not_signed_if_the_journal_cannot_be_written(tmp_path, monkeypatch):
    journal = SigningJournal(tmp_path)
    assert journal.reserve(1, b"a" * 32)

    def fail_without_space(file, data, offset):
        os.lseek(file, offset, os.SEEK_SET)
        os.write(file, data[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail_without_space)
        with pytest.raises(RunError, match="make room"):
            journal.reserve(2, b"b" * 32)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: fail_without_space(file, b"", 0))
        with pytest.raises(RunError, match="make room"):
            journal.reserve(2, b"b" * 32)
    assert journal.reserve(2, b"c" * 32)
    assert journal.reserve(3, b"d" * 32)
    again = SigningJournal(tmp_path)
    assert [again.reserve(n, letter * 32) for n, letter in ((1, b"a"), (2, b"c"), (3, b"d"))] == [
        True
    ] * 3

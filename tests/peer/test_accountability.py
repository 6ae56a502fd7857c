"""Honest, equivocating and flooding members in random schedules, without a network or threads."""

import secrets
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from tests.peer.members import federated, identities

from fedcb2o.peer.wire.client import PeerClient
from fedcb2o.peer.wire.compression import RawCodec
from fedcb2o.peer.wire.equivocation import Ledger, verify_proof
from fedcb2o.peer.wire.protocol import (
    ZERO_DIGEST,
    Answer,
    AnswerStatus,
    Manifest,
    Question,
    RequestKind,
    decode_manifest,
    decode_offer,
    decode_request,
    encode_offer,
)
from fedcb2o.peer.wire.server import Server, Snapshot

HONEST = (0, 1, 2)
EQUIVOCATOR, FLOODER = 3, 4
ROUNDS = 100


@pytest.fixture(scope="module")
def members(tmp_path_factory):
    organisations = identities(tmp_path_factory.mktemp("who"), 5)
    return organisations, federated(organisations, rounds=ROUNDS, lag=2)


class Members(RuleBasedStateMachine):
    """Five members. In each round every honest member asks all members for their manifests."""

    organisations: list
    federation: object

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.n = -1
        self.signed: list[bytes] = []  # all signed manifests
        self.texts: dict[int, bytes] = {}  # text of the equivocator's model for each receiver
        self.false_digests: list[tuple[int, int, bytes]] = []
        self.flood: list[bytes] = []
        self.down: set[frozenset[int]] = set()
        self.received: dict[int, dict[tuple[int, int], bytes]] = {}  # since the start
        self.servers: dict[int, Server] = {}
        self.clients: dict[int, PeerClient] = {}
        self.starts = 0
        for j in HONEST:
            self._start(j)

    def teardown(self) -> None:
        self.folder.cleanup()

    def _start(self, j: int) -> None:
        self.starts += 1
        folder = Path(self.folder.name) / str(self.starts)
        folder.mkdir()
        ledger = Ledger(folder, self.federation)
        self.received[j] = {}
        self.servers[j] = Server(
            self.federation, j, self.organisations[j], ledger, hello_content=dict
        )
        self.clients[j] = PeerClient(
            self.federation, self.organisations[j], Line(self, j), ledger, RawCodec(2), 2
        )

    def sign(self, agent: int, n: int, text: bytes) -> bytes:
        manifest = Manifest.from_content(
            text.ljust(8, b"\0"),
            run=self.federation.run,
            agent=agent,
            round=n,
            dim=2,
            num_samples=1,
        )
        signed = manifest.to_signed_bytes(self.organisations[agent].sign)
        self.signed.append(signed)
        return signed

    def answer(self, receiver: int, data: bytes) -> Answer:
        request, *_ = decode_request(data)
        if receiver in HONEST:
            answer = self.servers[receiver]._answer(request.sender, request)
        else:
            answer = Answer(AnswerStatus.OK, self._invalid_body(receiver, request))
        if request.kind is RequestKind.MANIFEST and answer.status is AnswerStatus.OK:
            manifest, *_ = decode_manifest(decode_offer(answer.body)[0])
            last = self.clients[request.sender].last_rounds.get(receiver, 0)
            is_valid = max(last, self.n - 2) <= manifest.round < ROUNDS
            if manifest.agent == receiver and is_valid:
                key = receiver, manifest.round
                self.received[request.sender].setdefault(key, manifest.digest)
        return answer

    def _invalid_body(self, attacker: int, request) -> bytes:
        if request.kind is RequestKind.WITNESS:
            return secrets.choice([*self.flood, *self.signed])
        if attacker == FLOODER and self.flood:
            return encode_offer(secrets.choice(self.flood), self.false_digests)
        text = b"one" if attacker == FLOODER else self.texts.get(request.sender, b"same")
        return encode_offer(self.sign(attacker, self.n, text), self.false_digests)

    @rule(
        texts=st.dictionaries(st.sampled_from(HONEST), st.sampled_from([b"a", b"b"])),
        flood=st.lists(st.tuples(st.integers(-3, 60), st.sampled_from([b"x", b"y"])), max_size=4),
        false_offsets=st.lists(st.tuples(st.integers(0, 5), st.integers(-2, 1)), max_size=20),
        down=st.sets(st.sampled_from([frozenset({0, 1}), frozenset({1, 2}), frozenset({0, 2})])),
    )
    def play_round(self, texts, flood, false_offsets, down) -> None:
        if self.n + 1 >= ROUNDS:
            return
        received_before = {j: dict(received) for j, received in self.received.items()}
        self.n += 1
        self.texts, self.down = texts, down
        self.flood = [
            self.sign(FLOODER, max(0, min(ROUNDS - 1, self.n + offset)), text)
            for offset, text in flood
        ]
        self.false_digests = [
            (agent, max(0, self.n + offset), secrets.token_bytes(32))
            for agent, offset in false_offsets
        ]
        for j in HONEST:
            self.servers[j].publish(Snapshot(self.sign(j, self.n, b"honest"), b"\0" * 8))
        for j in HONEST:
            for peer in range(5):
                if peer != j and frozenset({j, peer}) not in down:
                    self.clients[j].compare_digests(self.n, peer)
        self._check_detection(received_before)

    def _check_detection(self, received_before) -> None:
        """Assert that honest members with different models of an agent detect it in a round."""
        for j in HONEST:
            for peer in HONEST:
                if j == peer or frozenset({j, peer}) in self.down:
                    continue
                for (agent, n), digest in received_before[j].items():
                    other = received_before[peer].get((agent, n), digest)
                    if other != digest and n >= self.n - 8:
                        assert agent in self.clients[j].ledger.equivocators

    @rule(j=st.sampled_from(HONEST))
    def restart(self, j) -> None:
        """Restart an honest member without its stored manifests of other members."""
        self._start(j)

    @invariant()
    def no_honest_member_is_accused(self) -> None:
        for j in HONEST:
            assert self.clients[j].ledger.equivocators <= {EQUIVOCATOR, FLOODER}
        for path in Path(self.folder.name).rglob("*.proof.toml"):
            assert "signed by org-3" in verify_proof(path, self.federation) or "org-4" in str(path)

    @invariant()
    def newest_manifests_of_honest_members_are_kept(self) -> None:
        for j in HONEST:
            for peer in set(HONEST) - {j}:
                rounds = [n for agent, n in self.received[j] if agent == peer]
                signed = self.clients[j].ledger.get(peer, 0, ZERO_DIGEST)
                newest = None if signed is None else decode_manifest(signed)[0].round
                assert newest == max(rounds, default=None)


class Line:
    """Transport that calls the other member at once."""

    def __init__(self, members: Members, j: int) -> None:
        self.members, self.j = members, j

    def ask(self, peer: int, request: bytes, timeout: float) -> Question:
        question = Question()
        question.put(self.members.answer(peer, request))
        return question


@pytest.mark.parametrize(
    ("examples", "steps"), [(12, 15), pytest.param(300, 40, marks=pytest.mark.slow)]
)
def test_honest_members_are_never_accused_of_equivocation(members, examples, steps):
    """Two honest members with different models of one agent also detect it in the next round."""
    Members.organisations, Members.federation = members
    options = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Members, settings=options)

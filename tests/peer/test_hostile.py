"""Hostile members and strangers, as real processes, among real nodes."""

import contextlib
import json
import signal
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.peer import hostile, members
from tests.peer.nodes import FORKED, Nodes, nodes
from tests.peer.wire import Wire
from tests.tiny import run_cli

from fedcb2o.nn import parameters
from fedcb2o.peer import read_federation
from fedcb2o.peer.node.agent import build_network
from fedcb2o.peer.wire.client import PeerClient
from fedcb2o.peer.wire.compression import RawCodec
from fedcb2o.peer.wire.equivocation import Ledger, verify_proof
from fedcb2o.peer.wire.protocol import ZERO_DIGEST, Manifest
from fedcb2o.peer.wire.server import Server, Snapshot

STALLS = [["never", "chunks never"], ["busy"] * 2, ["after the deadline", "busy"]]
"""Answers of the last rounds: a member that makes a node wait is suspended for a while."""
EARLY = ["busy", "an old round", "8 MiB"]  # no manifest can be too old in the first rounds
APART = {*EARLY, *STALLS[0], *STALLS[2], "equivocation", "1 GiB"}
CONTENTS = [lie for lie in hostile.CONTENTS if lie not in APART]
OTHERS = [lie for lie in hostile.LIES if lie not in APART and lie not in CONTENTS]
OTHERS = [*OTHERS, *["busy"] * ((len(OTHERS) + len(CONTENTS)) % 2), "an old round", "8 MiB"]
QUIET, LIAR = 2, 3  # the node without invalid answers, and the hostile member


def turns() -> list[list[str]]:
    """Return the answers to nodes 0, 1 and 2 in each round; equivocation comes last.

    It has many rounds, because a node may have suspended the member after its stalls.
    """
    pairs = [*zip(CONTENTS, OTHERS, strict=False)]
    remaining = OTHERS[len(CONTENTS) :]
    pairs += zip(remaining[::2], remaining[1::2], strict=True)
    ordered = [*(pair if n % 2 else pair[::-1] for n, pair in enumerate(pairs)), *STALLS]
    return [[*pair, "busy"] for pair in ordered] + [["equivocation"] * 2 + ["busy"]] * 15


TURNS = turns()
ROUNDS = len(TURNS)
CHANGES = {
    "rounds": ROUNDS,
    "model": {"name": "mlp", "hidden": [4096]},  # sent in two chunks
    "agents": {"benign": 3, "malicious": 1, "budget": 3},
}
TIMES = {"lag": 5, "deadline_seconds": 1.0, "round_seconds": 0.2}
MARGIN = 2**26  # additional bytes of memory that a node may need because of invalid answers


def start_liar(
    peers: Nodes, log: Path, pesters: int = 0, fault_turns: Sequence[Sequence[str]] = TURNS
) -> None:
    """Start the hostile member."""
    work = peers.federation, peers.identities[LIAR], log, fault_turns, pesters
    peers.processes[LIAR] = FORKED.Process(target=hostile.run, args=work, daemon=True)
    peers.processes[LIAR].start()


def outcome(line: dict[str, Any]) -> str:
    """Return the outcome of the hostile member's answer in one round."""
    if LIAR not in line["asked"]:
        return "not asked"
    missing = line["late"] + line["behind"] + line["no_model"]
    return line["refused"].get(str(LIAR), "late" if LIAR in missing else "received")


# Others depend on the state of the links, or wait for a deadline.
IN_TIME = sorted({*CONTENTS, *OTHERS, "an old round"} - {"busy", "8 MiB", "nothing"})


@pytest.fixture(scope="module")
def meeting(tmp_path_factory):
    """Return a federation of four on a wire, where member 1 has a model that others may steal."""
    folder = tmp_path_factory.mktemp("meeting")
    orgs = members.identities(folder, 4)
    federation = members.federated(orgs, changes=CHANGES, lag=5)
    wire = Wire()
    dim = len(parameters.flatten(build_network(federation)))
    server = Server(federation, 1, orgs[1], Ledger(folder, federation), hello_content=dict)
    with contextlib.closing(server):
        content = bytes(4 * dim)
        manifest = Manifest.from_content(
            content, run=federation.run, agent=1, round=9, dim=dim, num_samples=1, encoding=0,
            base=ZERO_DIGEST,
        )  # fmt: skip
        server.publish(Snapshot(manifest.to_signed_bytes(orgs[1].sign), content))
        wire.agent(1).serve(server.on_request)
        yield federation, orgs, wire, dim


@pytest.mark.parametrize("lie", IN_TIME)
def test_each_invalid_answer_is_refused_with_its_reason(lie, meeting, tmp_path):
    federation, orgs, wire, dim = meeting
    transport = wire.agent(LIAR)
    transport.serve(hostile.Liar(federation, orgs[LIAR], [[lie]], transport).on_request)
    ledger = Ledger(tmp_path, federation)
    client = PeerClient(federation, orgs[0], wire.agent(0), ledger, RawCodec(dim), dim)
    arrivals, refused = client.fetch(9, {LIAR: torch.zeros(dim)}, 60.0)
    assert not arrivals
    assert refused[LIAR] in hostile.LIES[lie][0]


@pytest.mark.slow
def test_no_invalid_model_of_a_member_is_received(tmp_path):
    """A member sends invalid answers and requests to two nodes. A third one gets only `busy`."""
    limits = {"answers_per_minute": 600, "uploads": 8, "per_peer": 4}
    with nodes(tmp_path, 4, changes=CHANGES, **TIMES, limits=limits) as peers:
        log = tmp_path / "lies.jsonl"
        start_liar(peers, log, pesters=100)
        peers.start(0, 1, 2, linger=1.0)
        assert peers.wait(0, 1, 2) == [0, 0, 0], [peers.log(j) for j in range(3)]
        assert peers.processes[LIAR].is_alive()
        notes = [json.loads(line) for line in log.read_text().splitlines()]
        sent = {(note["to"], note["round"] + 1): note["lie"] for note in notes if "lie" in note}
        outcomes = defaultdict(set)
        for j in range(3):
            lines = peers.lines(j)
            assert lines[-1]["round"] == ROUNDS
            assert len(lines) > ROUNDS / 2  # on a busy machine a node may skip rounds
            for line in lines:
                outcomes[sent.get((j, line["round"]), "")].add(outcome(line))
            assert sum(len(line["received"]) for line in lines) > ROUNDS
            assert (
                max(line["seconds"]["exchange"] for line in lines) < TIMES["deadline_seconds"] + 1.5
            )
            assert peers.peak(j) < peers.peak(QUIET) + MARGIN
        assert "received" not in set().union(*outcomes.values())
        unseen = {
            lie
            for lie in {lie for turn in TURNS for lie in turn}
            if not outcomes[lie] & hostile.LIES[lie][0]
        }
        assert all(outcomes[lie] <= {"late", "not asked"} for lie in unseen), {
            lie: outcomes[lie] for lie in unseen
        }
        assert len(unseen) < len(hostile.LIES) / 4  # late where a busy machine answers in a second
        asked = [note for note in notes if "request" in note]
        assert {note["request"] for note in asked} == {*hostile.REQUESTS}
        assert not any(note["given"] for note in asked)
        turned_away = sum(
            (Counter(line["turned_away"]) for j in range(3) for line in peers.lines(j)), Counter()
        )
        assert turned_away.keys() >= {
            "malformed",
            "member",
            "receiver",
            "signature",
            "run",
            "replay",
            "version",
        }
        proofs = [path for j in range(3) for path in peers.out(j).glob("proofs/*")]
        assert proofs
        assert all(
            "org-3" in verify_proof(path, read_federation(peers.federation)) for path in proofs
        )


def test_attackers_without_membership_do_not_disturb_a_node(tmp_path):
    """Attacks: wrong root, no certificate, no TLS, no key, and 100 silent connections."""
    changes = {"rounds": 12, "agents": {"benign": 3, "malicious": 0, "budget": 2}}
    with nodes(
        tmp_path, 3, changes=changes, lag=5, deadline_seconds=3.0, round_seconds=0.3
    ) as peers:
        stop = FORKED.Event()
        peers.start(0, gather=3.0, linger=5.0)
        work = peers.federation, tmp_path, peers.identities[2], 0, stop
        peers.processes[2] = FORKED.Process(target=hostile.strangers, args=work, daemon=True)
        peers.processes[2].start()
        time.sleep(1.0)
        peers.start(1, gather=1.0, linger=5.0)
        assert peers.wait(0, 1) == [0, 0], [peers.log(j) for j in range(2)]
        stop.set()
        assert peers.wait(2) == [0]
        counts = json.loads((tmp_path / "strangers.json").read_text())
        assert counts["times"] > 3
        assert not any(
            counts.get(event)
            for event in ("answered", "outsider linked", "outsider told", "lent told")
        )
        for j in range(2):
            lines = peers.lines(j)
            assert [line["round"] for line in lines] == list(range(1, 13))
            assert sum(len(line["received"]) for line in lines) > 3
            assert {model["id"] for line in lines for model in line["received"]} == {1 - j}
        assert any("signature" in line["turned_away"] for line in peers.lines(0))
        assert peers.peak(0) < peers.peak(1) + MARGIN


@pytest.mark.slow
def test_nodes_withstand_11000_requests_and_answers_of_1_gib(tmp_path):
    """Two nodes get 11,000 requests and 1 GiB answers from a member; a third gets none."""
    rounds = 40
    limits = {"answers_per_minute": 600, "uploads": 8, "per_peer": 4}
    times = {**TIMES, "round_seconds": 0.5, "deadline_seconds": 5.0}
    with nodes(tmp_path, 4, changes={**CHANGES, "rounds": rounds}, **times, limits=limits) as peers:
        log = tmp_path / "lies.jsonl"
        start_liar(
            peers,
            log,
            pesters=1000,
            fault_turns=[["busy"] * 3] * 5
            + [["1 GiB", "busy", "busy"], ["busy", "1 GiB", "busy"]] * 99,
        )
        peers.start(0, 1, 2, linger=2.0)
        assert peers.wait(0, 1, 2) == [0, 0, 0], [peers.log(j) for j in range(3)]
        notes = [json.loads(line) for line in log.read_text().splitlines()]
        asked = [note for note in notes if "request" in note]
        assert not any(note["given"] for note in asked)
        missed, seconds = [], []
        for j in range(3):
            lines = peers.lines(j)
            assert [line["round"] for line in lines] == list(range(1, rounds + 1))
            assert not any(outcome(line) == "received" for line in lines)
            assert peers.peak(j) < peers.peak(QUIET) + MARGIN
            missed.append(2 * rounds - sum(len(line["received"]) for line in lines))
            seconds.append(
                statistics.median(model["seconds"] for line in lines for model in line["received"])
            )
        counted = sum(note["asked"] for note in asked)
        huge = [note["lie"] for note in notes if "lie" in note].count("1 GiB")
        with_content = sum(note["given"] for note in asked)
        peaks = [peers.peak(j) >> 20 for j in range(3)]
        print(f"\n{counted} requests, given {with_content}; {huge} times 1 GiB")
        print(f"honest models missed {missed}, median seconds {seconds}, peaks {peaks}")
        print(
            "the longest exchanges",
            [max(line["seconds"]["exchange"] for line in peers.lines(j)) for j in range(3)],
        )


EQUIVOCATOR = {
    "rounds": 8,
    "model": {"name": "mlp", "hidden": [16]},
    "training": {"gamma": 0.1},
    "agents": {
        "benign": 4,
        "malicious": 1,
        "benign_samples": 40,
        "malicious_samples": 40,
        "budget": 4,
    },
}
PACE = {"lag": 5, "deadline_seconds": 3.0, "round_seconds": 0.4}


def disable_detection() -> None:
    """Disable the comparison of manifests in a node."""
    Ledger.record = lambda self, signed: None
    Ledger.find_conflicts = lambda self, digests: []


def detection_rounds(peers: Nodes, attacker: int) -> list[int | None]:
    """Return the first round in which each node stops asking the attacker."""
    first_rounds = []
    for j in range(attacker):
        rounds = (
            line["round"]
            for line in peers.lines(j)
            if "equivocation" in line["refused"].values()
            or (
                list(peers.out(j).glob("proofs/*"))
                and attacker in line["alive"]
                and attacker not in line["asked"]
            )
        )
        first_rounds.append(next(rounds, None))
    return first_rounds


@pytest.mark.slow
def test_an_equivocating_member_is_detected(tmp_path):
    """A real node runs the simulated attack; a restarted node is not accused."""
    changes = {**EQUIVOCATOR, "attack": {"name": "equivocation", "z": 1.5}}
    with nodes(tmp_path, 5, changes=changes, **PACE) as peers:
        peers.start()
        peers.until(1, 3)
        peers.send(1, signal.SIGKILL)
        peers.wait(1)
        peers.start(1, resume=True)
        assert peers.wait() == [0] * 5, [peers.log(j) for j in range(5)]
        federation = read_federation(peers.federation)
        for j in range(4):
            (proof,) = peers.out(j).glob("proofs/*")
            assert federation.members[4].name in verify_proof(proof, federation)
            assert (
                f"agent 4 of {federation.name}"
                in run_cli("peer", "proof", proof, "--federation", peers.federation).out
            )
            assert 4 not in peers.lines(j)[-1]["asked"]
        assert all(n is not None and n <= 6 for n in detection_rounds(peers, 4)), detection_rounds(
            peers, 4
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack", [{"name": "equivocation", "z": 4.0}, {"name": "dissensus", "eps": 2.0}]
)
def test_detection_of_equivocation_improves_accuracy(attack, tmp_path):
    """Compare the accuracy with and without detection; `-s` prints it."""
    accuracy, rounds = defaultdict(list), []
    for seed in range(3):
        for check in (True, False):
            changes = {
                **EQUIVOCATOR,
                "rounds": 12,
                "attack": attack,
                "seeds": [seed],
                "algorithm": {"name": "by_rule", "rule": "mean"},
            }
            with nodes(tmp_path / f"{seed}-{check}", 5, changes=changes, **PACE) as peers:
                peers.start(*range(4), prepare=None if check else disable_detection)
                peers.start(4)
                assert peers.wait() == [0] * 5, [peers.log(j) for j in range(5)]
                accuracy[check] += [peers.lines(j)[-1]["accuracy"] for j in range(4)]
                if check:
                    rounds += detection_rounds(peers, 4)
                assert (
                    not any("equivocation" in line["refused"].values() for line in peers.lines(0))
                    or check
                )
    detection_round, with_detection, without_detection = (
        sum(series) / len(series) for series in (rounds, accuracy[True], accuracy[False])
    )
    print(
        f"\n{attack['name']}: found out in round {detection_round:.1f}; accuracy {with_detection:.1%}, "
        f"unchecked {without_detection:.1%}"
    )
    assert detection_round <= 5
    assert with_detection > without_detection

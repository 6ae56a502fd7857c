"""Pace of nodes among hostile members, skipped rounds, and nodes whose run directory was lost."""

import contextlib
import json
import threading

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.peer import members, pace
from tests.peer.test_node import isolated_node
from tests.peer.wire import Wire

from fedcb2o.peer.node.assessment import BASELINE_FILE
from fedcb2o.peer.node.peer_monitor import PeerMonitor
from fedcb2o.peer.wire.client import PeerClient
from fedcb2o.peer.wire.compression import RawCodec
from fedcb2o.peer.wire.equivocation import Ledger
from fedcb2o.peer.wire.protocol import Manifest
from fedcb2o.peer.wire.server import Server


class Announcements:
    """Client with fixed announcements of the other members."""

    def __init__(self, federation, announced, equivocators=()):
        self.federation, self.agent_id = federation, 0
        self.announced_rounds = announced
        self.ledger = type("Nobody", (), {"equivocators": frozenset(equivocators)})


def monitor_of(folder, n, announced, *, equivocators=(), rounds=40, **options):
    """Return the monitor of agent 0 of `n` members, with a lag of 5."""
    changes = {"rounds": rounds, "agents": {"benign": n, "malicious": 0}}
    federation = members.federated(members.identities(folder, n), changes=changes, lag=5, **options)
    client = Announcements(federation, announced, equivocators)
    return PeerMonitor(Wire().agent(0), client, threading.Event(), pace.Times())


@pytest.mark.parametrize(
    ("n", "announced", "expected"),
    [
        (2, {1: 30}, 0),  # a single member never counts
        (3, {1: 40}, 0),
        (3, {1: 40, 2: 7}, 7),
        (4, {1: 40}, 0),  # silent members count as round 0
        (4, {1: 40, 2: 20}, 20),
        (4, {1: 40, 2: 20, 3: 19}, 20),
        (5, {1: 40, 2: 40, 3: 12, 4: 11}, 12),
        (5, {1: 40, 2: 40}, 0),
        (8, {1: 40, 2: 40, 3: 40, 4: 5, 5: 4, 6: 3, 7: 2}, 5),
        (8, {1: 40, 2: 40, 3: 40, 4: 40}, 40),
    ],
)
def test_the_common_round_is_never_beyond_the_fastest_honest_member(
    n, announced, expected, tmp_path
):
    """Hostile members announce 40. They are at most half of the others, except in the last case."""
    assert monitor_of(tmp_path, n, announced).common_round() == expected


def test_an_agent_two_rounds_behind_most_others_is_late(tmp_path):
    monitor = monitor_of(tmp_path / "a", 4, {1: 40, 2: 7, 3: 0})
    assert [monitor.is_late(n) for n in (0, 5, 6, 7)] == [True, True, False, False]
    synchronous = monitor_of(tmp_path / "b", 4, {1: 40, 2: 7, 3: 0}, synchronous=True)
    assert not synchronous.is_late(0)


def test_the_announcements_of_equivocators_do_not_count(tmp_path):
    announced = {1: 30, 2: 30, 3: 20}
    assert monitor_of(tmp_path, 4, announced, equivocators=[1]).common_round() == 20
    assert monitor_of(tmp_path / "b", 4, announced, equivocators=[1, 2]).common_round() == 0


@pytest.mark.parametrize(
    ("common", "done", "expected"),
    [
        (12, 6, 12),
        (12, 7, 7),  # 5 rounds behind, which the lag allows
        (12, 20, 20),
        (36, 0, 34),  # the last lag + 1 of 40 rounds are never skipped
        (40, 33, 34),
        (40, 34, 34),
        (40, 39, 39),
    ],
)
def test_an_agent_behind_by_more_than_the_lag_skips_to_the_common_round(
    common, done, expected, tmp_path
):
    monitor = monitor_of(tmp_path, 4, {1: common, 2: common, 3: 0})
    assert monitor.next_round(done) == expected
    notes = monitor.observer.notes
    assert len(notes) == (expected > done)
    if expected == done + 1:
        assert f"skips round {expected}: " in notes[0]
    elif notes:
        assert f"skips rounds {done + 1} to {expected}: " in notes[0]


def test_short_and_synchronous_runs_skip_no_round(tmp_path):
    announced = {1: 6, 2: 6}
    assert monitor_of(tmp_path / "a", 3, announced, rounds=7).next_round(0) == 1
    assert monitor_of(tmp_path / "b", 3, announced, rounds=6).next_round(0) == 0
    assert monitor_of(tmp_path / "c", 3, announced, synchronous=True).next_round(0) == 0


@pytest.mark.parametrize(
    ("announced", "known"),
    [(30, {1: 30}), (40, {1: 40}), (41, {}), (-1, {}), (True, {}), ("30", {}), (None, {})],
)
def test_announced_rounds_outside_the_run_are_ignored(announced, known, tmp_path):
    orgs = members.identities(tmp_path, 2)
    changes = {"rounds": 40, "agents": {"benign": 2, "malicious": 0, "budget": 1}}
    federation = members.federated(orgs, changes=changes)
    wire = Wire()
    with serve_members(wire, tmp_path, federation, orgs, {1: announced}):
        ledger = Ledger(tmp_path / "ledger", federation)
        client = PeerClient(federation, orgs[0], wire.agent(0), ledger, RawCodec(1), 1)
        assert client.hello(1, 5.0) == {"round": announced}
        assert client.announced_rounds == known


@contextlib.contextmanager
def serve_members(wire, folder, federation, orgs, announced):
    """Serve members that announce a round and have no model."""
    for j, round in announced.items():
        ledger = Ledger(folder / f"other-{j}", federation)
        content = {"round": round}
        server = Server(
            federation, j, orgs[j], ledger, hello_content=lambda content=content: content
        )
        wire.agent(j).serve(server.on_request)
    yield


def newcomer(folder, announced, *, resume=False, **options):
    """Return agent 0 of three, in 14 rounds with a lag of 2, and the context of the others."""
    folder.mkdir(exist_ok=True)
    orgs = [members.Identity.read(folder / f"org-{j}") for j in range(3)] if resume else None
    orgs = orgs or members.identities(folder, 3)
    changes = {"rounds": 14, "agents": {"benign": 3, "malicious": 0}, "training": {"gamma": 0.1}}
    federation = members.federated(orgs, changes=changes, lag=2, deadline_seconds=5.0)
    wire = Wire()
    options |= {"resume": resume, "observer": pace.Times()}
    node = isolated_node(federation, orgs[0], members.share(0), folder / "out", wire, **options)
    return node, serve_members(wire, folder, federation, orgs, announced)


def rounds_of(folder):
    lines = (folder / "out" / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_newcomer_starts_at_the_common_round_and_resumes_after_a_stop(tmp_path):
    """Records, journal and baseline omit the skipped rounds, also after the restart."""
    node, others = newcomer(tmp_path, {1: 7, 2: 6})
    with others:
        rounds = node.rounds()
        assert [next(rounds)["round"] for _ in range(3)] == [7, 8, 9]
        assert node.rounds_done == 9
        node.stop()
        assert list(rounds) == []
    assert node.observer.notes[-1].startswith("skips rounds 1 to 6: ")

    node, others = newcomer(tmp_path, {1: 7, 2: 6}, resume=True)
    with others:
        node.run()
    lines = rounds_of(tmp_path)
    assert [line["round"] for line in lines] == list(range(7, 15))
    # no member has a model; members that announced 7 and 6 are behind from rounds 10 and 9 on
    missing = [(line["late"], line["behind"], line["no_model"]) for line in lines]
    assert missing[:4] == [([], [], [1, 2])] * 2 + [([], [2], [1]), ([], [1, 2], [])]
    assert set(map(str, missing[4:])) == {str(([], [1, 2], []))}
    assert [line["alone_rounds"] for line in lines] == list(range(1, 9))  # without skipped ones
    signed = (tmp_path / "out" / "signed.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in signed] == list(range(6, 14))
    with safe_open(tmp_path / "out" / BASELINE_FILE, "pt") as file:
        assert file.metadata()["rounds"] == "14"
        baseline = file.get_tensor("theta")
    model = load_file(tmp_path / "out" / "checkpoint.safetensors")["models"][0]
    assert torch.equal(baseline, model[: len(baseline)])  # the node received no model
    assert lines[-1]["accuracy"] > 0.5


@pytest.mark.parametrize("announced", [{1: 14}, {1: 14, 2: 2}])
def test_a_single_announcement_of_the_last_round_skips_no_round(announced, tmp_path):
    node, others = newcomer(tmp_path, announced)
    with others:
        node.run()
    lines = rounds_of(tmp_path)
    assert [line["round"] for line in lines] == list(range(1, 15))
    assert [line["behind"] for line in lines[:3]] == [
        []
    ] * 3  # the other members may just have begun


def test_a_node_stopped_before_its_first_round_writes_no_model(tmp_path):
    node, others = newcomer(tmp_path, {1: 7, 2: 7})
    node.stop()
    with others:
        node.run()
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["claims the last round", "just before the deadline"])
def test_two_hostile_members_of_five_do_not_change_the_pace(strategy):
    """Rounds take longer than the computation and less than the deadline."""
    seconds, models_per_round, notes = pace.measure(5, 2, strategy, rounds=8)
    assert pace.ROUND_SECONDS / 2 < seconds < pace.DEADLINE_SECONDS / 2
    assert models_per_round > 0.5
    assert not any("skips" in note for note in notes)


@pytest.mark.slow
@pytest.mark.parametrize("n", pace.SIZES)
@pytest.mark.parametrize("strategy", pace.STRATEGIES)
def test_one_hostile_member_hardly_changes_the_pace(n, strategy):
    seconds, models_per_round, _ = pace.measure(n, 1, strategy)
    assert pace.ROUND_SECONDS / 2 < seconds < pace.DEADLINE_SECONDS / 2
    assert models_per_round > 0.3


LAST = 4  # last round that the lost directory signed and another member has


@pytest.mark.parametrize(
    ("answering_members", "signed_from"),
    [pytest.param((1, 2), LAST + 3, marks=pytest.mark.slow), ((1,), None)],
)
def test_a_node_with_a_lost_directory_signs_nothing_before_a_majority_answered(
    answering_members, signed_from, tmp_path
):
    """Then it starts `lag` + 2 rounds after its newest model that a member has."""
    orgs = members.identities(tmp_path, 3)
    changes = {"rounds": 12, "agents": {"benign": 3, "malicious": 0}}
    federation = members.federated(orgs, changes=changes, lag=1, deadline_seconds=5.0)
    wire = Wire()
    for j in answering_members:
        ledger = Ledger(tmp_path / f"other-{j}", federation)
        manifest = Manifest.from_content(
            b"lost",
            run=federation.run,
            agent=0,
            round=LAST - j,  # one member has an older model
            dim=1,
            num_samples=1,
        )
        ledger.record(manifest.to_signed_bytes(orgs[0].sign))
        server = Server(federation, j, orgs[j], ledger, hello_content=lambda: {"round": LAST + 1})
        wire.agent(j).serve(server.on_request)
    observer = pace.Times()
    options = {"resume": True, "observer": observer}
    isolated_node(federation, orgs[0], members.share(0), tmp_path / "out", wire, **options).run()
    text = "\n".join(observer.notes)
    if signed_from is None:
        assert not (tmp_path / "out" / "signed.jsonl").exists()
        assert "2 other members must tell what they hold of it, and 1 did" in text
        assert "give it a new key" in text
        return
    lines = (tmp_path / "out" / "signed.jsonl").read_text().splitlines()
    rounds = [json.loads(line)["round"] for line in lines]
    assert rounds == [signed_from - 2, *range(signed_from - 1, 12)]
    assert f"models are offered again after round {signed_from - 1}" in text
    assert text.count(f"no model up to round {signed_from - 1} is offered") == 1

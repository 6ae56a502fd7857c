"""Pace of honest nodes among hostile members, and rounds that a lost directory signed."""

import json
import threading

import pytest
from tests.peer import members, pace
from tests.peer.wire import Wire

import fedcb2o
from fedcb2o.data import digits
from fedcb2o.peer.node import Node, PeerMonitor
from fedcb2o.peer.wire import ZERO_DIGEST, Ledger, Manifest, Server


class Claims:
    """Client that knows what others claim."""

    def __init__(self, federation, claims):
        self.federation, self.agent_id = federation, 0
        self.claimed_rounds = claims
        self.ledger = type("Nobody", (), {"equivocators": frozenset()})


@pytest.mark.parametrize(
    ("n", "ahead", "is_behind"),
    [
        (2, 1, True),
        (3, 1, False),
        (3, 2, True),
        (4, 1, False),
        (4, 2, True),
        (5, 2, False),
        (5, 3, True),
        (8, 3, False),
        (8, 4, True),
    ],
)
def test_only_more_than_half_of_the_others_change_the_pace(n, ahead, is_behind, tmp_path):
    """Members of which nothing is known count as being in round 0."""
    federation = members.federated(
        members.identities(tmp_path, n), round_seconds=1.0, deadline_seconds=5.0
    )
    claims = {1 + i: 9 for i in range(ahead)}
    observer = pace.Times()
    wire = Wire().agent(0)
    monitor = PeerMonitor(wire, Claims(federation, claims), threading.Event(), observer)
    assert monitor._is_majority_ahead(9) == is_behind
    assert monitor._is_majority_ahead(9) == is_behind
    assert len(observer.notes) == is_behind
    assert not monitor._is_majority_ahead(10)


@pytest.mark.parametrize(
    "strategy",
    ["claims the last round", pytest.param("just before the deadline", marks=pytest.mark.slow)],
)
def test_two_hostile_members_of_five_change_nothing(strategy):
    """Rounds keep to the clock: neither the few milliseconds of their work nor the deadline."""
    seconds, heard, notes = pace.measure(5, 2, strategy, rounds=8)
    assert pace.ROUND_SECONDS / 2 < seconds < pace.DEADLINE_SECONDS / 2
    assert heard > 0.5
    assert not any("other members are ahead of round" in note for note in notes)


@pytest.mark.slow
@pytest.mark.parametrize("n", pace.SIZES)
@pytest.mark.parametrize("strategy", pace.STRATEGIES)
def test_one_hostile_member_changes_little(n, strategy):
    seconds, heard, _ = pace.measure(n, 1, strategy)
    assert pace.ROUND_SECONDS / 2 < seconds < pace.DEADLINE_SECONDS / 2
    assert heard > 0.3


LAST = 4  # of the rounds that the lost directory signed and another member holds


@pytest.mark.parametrize(("answering", "signed_from"), [((1, 2), LAST + 3), ((1,), None)])
def test_a_lost_directory_signs_nothing_before_a_majority_has_answered(
    answering, signed_from, tmp_path
):
    """Then it begins `lag` + 2 rounds after the newest model that a member holds."""
    who = members.identities(tmp_path, 3)
    changes = {"rounds": 12, "agents": {"benign": 3, "malicious": 0}}
    federation = members.federated(who, changes=changes, lag=1, deadline_seconds=5.0)
    wire = Wire()
    servers = []
    for j in answering:
        ledger = Ledger(tmp_path / f"other-{j}", federation)
        manifest = Manifest.from_content(
            b"lost",
            run=federation.run,
            agent=0,
            round=LAST - j,  # one member holds an older one
            dim=1,
            num_samples=1,
            encoding=0,
            base=ZERO_DIGEST,
        )
        ledger.record(manifest.to_signed_bytes(who[0].sign))
        server = Server(federation, j, who[j], ledger, hello_content=lambda: {"round": 12})
        wire.agent(j).serve(server.on_request)
        servers.append(server)
    data = digits()
    share = fedcb2o.Dataset(
        fedcb2o.Shard(data.pool.x[::3], data.pool.y[::3]), data.test, data.class_names
    )
    observer = pace.Times()
    node = Node(
        federation,
        who[0],
        share,
        out=tmp_path / "out",
        resume=True,
        connect=lambda federation, identity: wire.agent(0),
        observer=observer,
        gather=0.0,
        linger=0.0,
    )
    node.run()
    for server in servers:
        server.close()
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

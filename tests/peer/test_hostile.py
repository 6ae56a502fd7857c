"""Invalid answers of a hostile member, and equivocation among real nodes, as processes."""

import signal
from functools import partial

import pytest
import torch
from tests.peer import hostile, members
from tests.peer.nodes import Nodes, nodes
from tests.peer.wire import Wire
from tests.tiny import run_cli

from fedcb2o.federated import trigger_exchange
from fedcb2o.nn import parameters
from fedcb2o.peer import read_federation
from fedcb2o.peer.node.agent import build_network
from fedcb2o.peer.node.publisher import ModelPublisher
from fedcb2o.peer.wire.client import PeerClient
from fedcb2o.peer.wire.compression import RawCodec, TopKCodec
from fedcb2o.peer.wire.equivocation import Ledger, SigningJournal, verify_proof
from fedcb2o.peer.wire.protocol import Manifest
from fedcb2o.peer.wire.server import Server, Snapshot

CHANGES = {
    "rounds": 60,
    "model": {"name": "mlp", "hidden": [4096]},  # sent in two chunks
    "agents": {"benign": 3, "malicious": 1, "budget": 3},
}
LIAR = 3  # the hostile member
READ_TRIGGERS = partial(trigger_exchange.from_bytes, shape=(8, 8), num_classes=10)


@pytest.fixture(scope="module")
def meeting(tmp_path_factory):
    """Return a federation of four on a wire, where member 1 has a model that others may steal."""
    folder = tmp_path_factory.mktemp("meeting")
    orgs = members.identities(folder, 4)
    federation = members.federated(orgs, changes=CHANGES, lag=5)
    wire = Wire()
    dim = len(parameters.flatten(build_network(federation)))
    server = Server(federation, 1, orgs[1], Ledger(folder, federation), hello_content=dict)
    content = bytes(4 * dim)
    manifest = Manifest.from_content(
        content, run=federation.run, agent=1, round=9, dim=dim, num_samples=1
    )
    server.publish(Snapshot(manifest.to_signed_bytes(orgs[1].sign), content))
    wire.agent(1).serve(server.on_request)
    return federation, orgs, wire, dim


@pytest.mark.parametrize("lie", sorted(hostile.LIES))
def test_each_invalid_answer_is_refused_with_its_reason(lie, meeting, tmp_path):
    federation, orgs, wire, dim = meeting
    transport = wire.agent(LIAR)
    transport.serve(hostile.Liar(federation, orgs[LIAR], lie, transport).on_request)
    ledger = Ledger(tmp_path, federation)
    client = PeerClient(
        federation, orgs[0], wire.agent(0), ledger, RawCodec(dim), dim, read_triggers=READ_TRIGGERS
    )
    arrivals, refused = client.fetch(9, {LIAR: torch.zeros(dim)}, 60.0)
    assert not arrivals
    assert refused[LIAR] in hostile.LIES[lie][0]


@pytest.mark.parametrize("read", [READ_TRIGGERS, None])
def test_signed_triggers_arrive_with_their_model(read, meeting, tmp_path):
    """Agents without the guard ignore them."""
    federation, orgs, wire, dim = meeting
    server = Server(federation, 2, orgs[2], Ledger(tmp_path / "2", federation), hello_content=dict)
    wire.agent(2).serve(server.on_request)
    journal, codec = SigningJournal(tmp_path), RawCodec(dim)
    publisher = ModelPublisher(federation, orgs[2], codec, journal, server, print)
    ledger = Ledger(tmp_path / "0", federation)
    client = PeerClient(federation, orgs[0], wire.agent(0), ledger, codec, dim, read_triggers=read)
    publisher.publish(9, torch.zeros(dim), 1, hostile.TWO_TRIGGERS)
    found = client.fetch(9, {2: torch.zeros(dim)}, 60.0)[0][2].triggers
    assert (found.to_bytes() if read else found) == (hostile.TWO_TRIGGERS if read else None)
    publisher.publish(10, torch.zeros(dim), 1)
    assert client.fetch(10, {2: torch.zeros(dim)}, 60.0)[0][2].triggers is None


@pytest.fixture
def top_k_pair(meeting, tmp_path):
    """Return a publisher of top-k differences, its server, and a client that asks it."""
    _, orgs, wire, dim = meeting
    federation = members.federated(orgs, changes=CHANGES, lag=60, encoding="top_k")
    server = Server(federation, 1, orgs[1], Ledger(tmp_path / "1", federation), hello_content=dict)
    wire.agent(1).serve(server.on_request)
    codec, ledger = TopKCodec(torch.zeros(dim)), Ledger(tmp_path / "0", federation)
    journal = SigningJournal(tmp_path)
    publisher = ModelPublisher(federation, orgs[1], codec, journal, server, print)
    client = PeerClient(
        federation, orgs[0], wire.agent(0), ledger, TopKCodec(torch.zeros(dim)), dim
    )
    return publisher, server, client, dim


def test_differences_of_a_peer_are_followed_and_crafted_ones_are_refused(top_k_pair):
    publisher, server, client, dim = top_k_pair
    size = publisher.codec.max_bytes
    model = torch.linspace(-1, 1, dim)

    def fetch(n):
        row = torch.zeros(dim)
        arrivals, refused = client.fetch(n, {1: row}, 60.0)
        return arrivals[1].size if arrivals else refused[1], row

    publisher.publish(0, model, 1)
    assert size < fetch(0)[0] < size + 2000
    publisher.publish(1, 2 * model, 1)
    publisher.publish(2, 3 * model, 1)
    received, row = fetch(2)
    assert 2 * size < received < 2 * size + 2000
    assert torch.equal(row, publisher.codec.state()["sent"])

    # The manifest is valid, but no bytes lead to its model; both ways are tried and no more.
    before = client.received_bytes
    publisher.publish(3, 4 * model, 1)
    (snapshot, _), *_ = server._published
    server._published = ()
    server.publish(Snapshot(snapshot.manifest, b"\1" * len(snapshot.content)))
    assert fetch(3)[0] in ("content", "hash")
    assert client.received_bytes - before < size + 4 * dim + 4000
    # A peer that sends less than the ranges hold.
    publisher.publish(4, 5 * model, 1)
    (snapshot, _), *_ = server._published
    server._published = ()
    server.publish(Snapshot(snapshot.manifest, bytes(snapshot.content)[: size // 2]))
    assert fetch(4)[0] in ("hash", "no such part")

    publisher.publish(5, 6 * model, 1)
    received, row = fetch(5)
    assert 3 * size < received < 3 * size + 2000
    assert torch.equal(row, publisher.codec.state()["sent"])


def test_two_different_models_by_differences_for_one_round_are_a_proof(top_k_pair):
    """Also where the differences of the round are the same, and only the models differ."""
    publisher, _, client, dim = top_k_pair
    first = publisher.snapshot(7, torch.zeros(dim), 1)
    second = publisher.snapshot(7, torch.ones(dim), 1)
    assert bytes(first.content)[:1000] == bytes(second.content)[:1000]
    assert client.ledger.record(first.manifest) is None
    assert client.ledger.record(second.manifest) is not None
    assert client.ledger.equivocators == {1}


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

"""Invalid answers of a hostile member, and equivocation among real nodes, as processes."""

import signal

import pytest
import torch
from tests.peer import hostile, members
from tests.peer.nodes import Nodes, nodes
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

CHANGES = {
    "rounds": 60,
    "model": {"name": "mlp", "hidden": [4096]},  # sent in two chunks
    "agents": {"benign": 3, "malicious": 1, "budget": 3},
}
LIAR = 3  # the hostile member


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
        content, run=federation.run, agent=1, round=9, dim=dim, num_samples=1, encoding=0,
        base=ZERO_DIGEST,
    )  # fmt: skip
    server.publish(Snapshot(manifest.to_signed_bytes(orgs[1].sign), content))
    wire.agent(1).serve(server.on_request)
    return federation, orgs, wire, dim


@pytest.mark.parametrize("lie", sorted(hostile.LIES))
def test_each_invalid_answer_is_refused_with_its_reason(lie, meeting, tmp_path):
    federation, orgs, wire, dim = meeting
    transport = wire.agent(LIAR)
    transport.serve(hostile.Liar(federation, orgs[LIAR], lie, transport).on_request)
    ledger = Ledger(tmp_path, federation)
    client = PeerClient(federation, orgs[0], wire.agent(0), ledger, RawCodec(dim), dim)
    arrivals, refused = client.fetch(9, {LIAR: torch.zeros(dim)}, 60.0)
    assert not arrivals
    assert refused[LIAR] in hostile.LIES[lie][0]


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

"""A client written from the protocol page takes part, and receives the bits of the nodes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from tests.peer.nodes import nodes
from tests.tiny import ENVIRONMENT

from fedcb2o.peer import read_federation

CLIENT = Path(__file__).with_name("client.py")


def test_the_client_is_short_and_independent():
    text = CLIENT.read_text()
    assert len([line for line in text.splitlines() if line.strip()]) <= 150
    assert "import fedcb2o" not in text
    assert "from fedcb2o" not in text


def test_the_client_receives_the_bits_of_nodes(tmp_path):
    changes = {
        "rounds": 12,  # a busy machine may miss some
        "model": {"name": "mlp", "hidden": [4096]},  # two chunks
        "agents": {"benign": 3, "malicious": 0, "budget": 2},
    }
    times = {"lag": 5, "deadline_seconds": 5.0, "round_seconds": 0.5}
    with nodes(tmp_path, 3, changes=changes, **times) as peers:
        out = tmp_path / "out.npz"
        command = [sys.executable, CLIENT, peers.federation, peers.identities[2], out]
        with subprocess.Popen([str(part) for part in command], env=ENVIRONMENT) as client:
            peers.start(0, 1, linger=2.0)
            assert peers.wait(0, 1) == [0, 0], [peers.log(j) for j in range(2)]
            assert client.wait(60) == 0
        with np.load(out) as archive:
            models = dict(archive)
        assert bytes(models["run"]) == read_federation(peers.federation).run
        compared = 0
        for j in range(2):
            assert any(
                message["id"] == 2 for line in peers.lines(j) for message in line["received"]
            )
            journal = (peers.out(j) / "signed.jsonl").read_text().splitlines()
            for line in map(json.loads, journal):
                digest = models.get(f"{j}-{line['round']}-digest")
                if (
                    digest is not None
                ):  # the digest of the manifest, which contains the hash of the model
                    assert bytes(digest).hex() == line["digest"]
                    compared += 1
        assert compared > 3

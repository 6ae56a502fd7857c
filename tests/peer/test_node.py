"""Real processes over TLS do what a simulation of the same federation does, bit for bit."""

import itertools

import pytest
import torch
from safetensors.torch import load_file
from tests.peer.nodes import nodes

import fedcb2o

CHANGES = {"rounds": 5, "agents": {"num_clusters": 2, "benign": 2, "malicious": 1, "budget": 3}}


@pytest.mark.parametrize("algorithm", ["fedcb2o"])
def test_synchronous_peers_reproduce_the_simulation(algorithm, tmp_path):
    """Six processes, of which two flip labels and collude, in two clusters that do not know of each other."""
    with nodes(tmp_path, 6, changes=CHANGES, synchronous=True, deadline_seconds=60.0) as peers:
        peers.start()
        assert peers.wait() == [0] * 6, [peers.log(j) for j in range(6)]
        run = fedcb2o.run(peers.simulate, out=tmp_path / "simulation", workers=1, watch=lambda *_: None)
        models = load_file(tmp_path / "simulation/seed-1000/checkpoint.safetensors")["models"]
        for j in range(6):
            mine = peers.model(j)
            assert torch.equal(mine.view(torch.int32), models[j][: len(mine)].view(torch.int32)), j
        pairs = fedcb2o.Run(tmp_path / "simulation").pairs
        for j, n in itertools.product(range(6), range(5)):
            line = peers.lines(j)[n]
            assert line["asked"] == [received["id"] for received in line["received"]]
        assert run.title
        assert len(pairs)

"""Sparse peer graphs: whom they link, and that agents ask their neighbours only."""

import functools
import json

import pytest
import torch
from tests.tiny import tiny

from fedcb2o.errors import ConfigError
from fedcb2o.experiments import load, run
from fedcb2o.federated import topology
from fedcb2o.rng import stream

TEAM = {"benign": 3, "malicious": 2, "benign_samples": 20, "malicious_samples": 30, "budget": 4}


def test_graphs_link_whom_they_say():
    cluster = torch.tensor([0] * 6 + [1] * 6)

    def made(name, **parameters):
        found = topology.neighbours(
            functools.partial(getattr(topology, name), **parameters), cluster, stream(0, "graph")
        )
        assert all(i in found[j].tolist() for i, near in enumerate(found) for j in near.tolist())
        assert all(i not in near.tolist() for i, near in enumerate(found))
        return [len(near) for near in found], found

    assert made("ring")[0] == [2] * 12
    assert made("ring", near=3)[0] == [6] * 12
    assert made("torus")[0] == [4] * 12
    assert made("random_regular", degree=3)[0] == [3] * 12
    assert sum(made("small_world", near=2, p=0.5)[0]) == 12 * 4
    assert made("erdos_renyi", p=1.0)[0] == [11] * 12
    degrees, found = made("same_cluster")
    assert degrees == [5] * 12
    assert found[7].tolist() == [6, 8, 9, 10, 11]


def test_agents_ask_their_neighbours_only(tmp_path):
    ring = tiny(agents={**TEAM, "graph": "ring"}, algorithm={"name": "dfedavgm"})
    run(ring, out=tmp_path, workers=1)
    lines = [
        json.loads(line) for line in (tmp_path / "seed-1000/pairs.jsonl").read_text().splitlines()
    ]
    neighbours = [{i for line in lines for i in line["asked"][j]} for j in range(10)]
    benign = [0, 1, 2, 5, 6, 7]
    assert all(len(neighbours[j]) == 2 for j in benign)
    assert all(j in neighbours[i] for j in benign for i in neighbours[j] if i in benign)
    assert all(len(neighbours[j]) <= 2 for j in (3, 4, 8, 9))  # attackers too
    assert load(ring).settings()["agents"]["graph"] == {"name": "ring", "near": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agents": {**TEAM, "graph": "rnig"}}, "there is no graph `rnig`. Did you mean `ring`?"),
        (
            {"agents": {**TEAM, "graph": {"name": "ring", "near": 5}}},
            "`near` must be between 1 and 4 for 10 agents, got 5",
        ),
        (
            {"agents": {**TEAM, "graph": {"name": "random_regular", "degree": 10}}},
            "`degree` must be between 1 and 9",
        ),
    ],
)
def test_a_graph_that_does_not_fit_is_told(tmp_path, changes, message):
    with pytest.raises(ConfigError) as caught:
        run(tiny(**{"agents": TEAM, **changes}), out=tmp_path, workers=1)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)

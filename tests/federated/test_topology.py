"""Sparse peer graphs: their links, and agents that ask only their neighbours."""

import functools

import pytest
import torch
from tests.tiny import lines_of, tiny

from fedcb2o.errors import ConfigError
from fedcb2o.experiments import load, run
from fedcb2o.federated import topology
from fedcb2o.rng import stream

AGENTS = {"benign": 3, "malicious": 2, "benign_samples": 20, "malicious_samples": 30, "budget": 4}


def test_graphs_have_the_declared_links():
    cluster = torch.tensor([0] * 6 + [1] * 6)

    def degrees_and_lists(name, **parameters):
        lists = topology.neighbours(
            functools.partial(getattr(topology, name), **parameters), cluster, stream(0, "graph")
        )
        assert all(i in lists[j].tolist() for i, near in enumerate(lists) for j in near.tolist())
        assert all(i not in near.tolist() for i, near in enumerate(lists))
        return [len(near) for near in lists], lists

    assert degrees_and_lists("ring")[0] == [2] * 12
    assert degrees_and_lists("ring", near=3)[0] == [6] * 12
    assert degrees_and_lists("torus")[0] == [4] * 12
    assert degrees_and_lists("random_regular", degree=3)[0] == [3] * 12
    assert sum(degrees_and_lists("small_world", near=2, p=0.5)[0]) == 12 * 4
    assert degrees_and_lists("erdos_renyi", p=1.0)[0] == [11] * 12
    degrees, lists = degrees_and_lists("same_cluster")
    assert degrees == [5] * 12
    assert lists[7].tolist() == [6, 8, 9, 10, 11]


def test_a_random_view_is_a_uniform_list_of_others():
    view = functools.partial(topology.random_view, size=3)
    lists = topology.neighbours(view, torch.zeros(400, dtype=torch.int64), stream(0, "graph"))
    known = torch.stack(lists)
    assert known.shape == (400, 3)
    assert (known.diff() > 0).all()
    assert (known != torch.arange(400)[:, None]).all()
    # The number of agents that know one is binomial, with mean 3.
    counts = torch.bincount(known.flatten(), minlength=400).double()
    assert counts.var() == pytest.approx(3, abs=1)
    with pytest.raises(ConfigError, match="between 1 and 11"):
        topology.random_view(torch.zeros(12, dtype=torch.int64), stream(0, "graph"), size=12)


def test_agents_ask_their_neighbours_only(tmp_path):
    ring = tiny(agents={**AGENTS, "graph": "ring"}, algorithm={"name": "dfedavgm"})
    run(ring, out=tmp_path, workers=1)
    lines = lines_of(tmp_path, "pairs")
    neighbours = [{i for line in lines for i in line["asked"][j]} for j in range(10)]
    benign = [0, 1, 2, 5, 6, 7]
    assert all(len(neighbours[j]) == 2 for j in benign)
    assert all(j in neighbours[i] for j in benign for i in neighbours[j] if i in benign)
    assert all(len(neighbours[j]) <= 2 for j in (3, 4, 8, 9))  # attackers too
    assert load(ring).settings()["agents"]["graph"] == {"name": "ring", "near": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agents": {**AGENTS, "graph": "rnig"}}, "there is no graph `rnig`. Did you mean `ring`?"),
        (
            {"agents": {**AGENTS, "graph": {"name": "ring", "near": 5}}},
            "`near` must be between 1 and 4 for 10 agents, got 5",
        ),
        (
            {"agents": {**AGENTS, "graph": {"name": "random_regular", "degree": 10}}},
            "`degree` must be between 1 and 9",
        ),
    ],
)
def test_a_graph_that_does_not_fit_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError) as caught:
        run(tiny(**{"agents": AGENTS, **changes}), out=tmp_path, workers=1)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)

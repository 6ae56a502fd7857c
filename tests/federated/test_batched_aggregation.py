"""Selection of peers for several agents: candidates, ids of sybils, and users' selections."""

import json

import numpy as np
import pytest
import torch
from tests import agents as ours
from tests.agents import CLUSTER
from tests.tiny import lines_of, tiny

import fedcb2o
from fedcb2o import records
from fedcb2o.errors import ConfigError
from fedcb2o.experiments import run
from fedcb2o.federated import algorithms
from fedcb2o.federated.batched_aggregation import SAMPLE, sample_peers
from fedcb2o.federated.contacts import ContactTable
from fedcb2o.parallel._executors import SerialExecutor
from fedcb2o.simulation.adversarial_engine import AdversarialEngine
from fedcb2o.simulation.local_engine import LocalEngine

TEAM = {"benign": 3, "malicious": 2, "benign_samples": 20, "malicious_samples": 30, "budget": 4}


def test_a_users_selection_receives_a_tensor_of_ids(tmp_path):
    candidate_lists = []

    def first(contacts, candidates, budget, draw):
        candidate_lists.append(candidates.tolist())
        return candidates[:budget]

    algorithm = {"name": "fedcb2o", "selection": first, "mixing_factor": 1.0}
    fedcb2o.run(tiny(rounds=1, algorithm=algorithm), out=tmp_path, workers=1)
    assert candidate_lists[0] == [1, 2, 3, 4, 5]


def test_a_users_selection_may_modify_its_candidates(tmp_path):
    def reversed_(contacts, candidates, budget, draw):
        candidates[:] = candidates.flip(0)
        return candidates[:budget]

    algorithm = {
        "name": "fedcb2o",
        "selection": reversed_,
        "own_candidate": True,
        "mixing_factor": 1.0,
    }
    fedcb2o.run(tiny(algorithm=algorithm), out=tmp_path, workers=1)
    pairs = lines_of(tmp_path, "pairs")
    benign = [
        j
        for j, is_malicious in enumerate(
            records.read_json(tmp_path / "seed-1000/agents.json")["malicious"]
        )
        if not is_malicious
    ]
    assert [line["asked"][j] for line in pairs for j in benign] == [[5, 4, 3]] * len(pairs) * len(
        benign
    )


def test_sybils_are_new_peers_in_every_round(tmp_path):
    """Agents ask the sybils first: new peers come first, and all other peers are known."""
    flip = {"name": "label_flip", "source": 9, "target": 4}
    asked = {}
    for sybils in (False, True):
        experiment = tiny(
            rounds=12, agents=TEAM, attack={**flip, "sybils": sybils, "from_round": 6}
        )
        run(experiment, out=tmp_path / str(sybils), workers=1)
        text = (tmp_path / str(sybils) / "seed-1000/pairs.jsonl").read_text()
        asked[sybils] = [json.loads(line)["asked"] for line in text.splitlines()]
    assert asked[True][:6] == asked[False][:6]
    for line in asked[True][6:]:
        assert all(sorted(line[j]) == [3, 4, 8, 9] for j in (0, 1, 2, 5, 6, 7))
    assert asked[True] != asked[False]


def sampled_peers(algorithm, members, n=0, **changes):
    """Peers that these agents, without contacts, ask among nine agents."""
    agent_group = ours.local_engine(algorithm, **changes).group
    active = np.ones(len(CLUSTER), dtype=bool)
    no_contacts = ContactTable.empty(len(members))
    return sample_peers(agent_group, np.array(members), no_contacts, n, active).tolist()


def test_a_users_selection_may_read_the_round_and_its_agent():
    calls = []

    def by_both(contacts, candidates, budget, draw, me, n):
        calls.append((me, n, candidates.tolist(), budget))
        return torch.tensor([(me + n) % len(CLUSTER)])

    def by_round(contacts, candidates, budget, draw, n):
        return candidates[n : n + 1]

    assert sampled_peers(algorithms.fedcb2o(selection=by_both), [0, 2, 6], n=5) == [[5], [7], [2]]
    others = [[i for i in range(len(CLUSTER)) if i != j] for j in (0, 2, 6)]
    assert calls == [(j, 5, ids, ours.BUDGET) for j, ids in zip((0, 2, 6), others, strict=True)]
    assert sampled_peers(algorithms.fedcb2o(selection=by_round), [0, 2, 6], n=5) == [[6], [6], [5]]


def test_a_selection_with_an_unknown_parameter_is_refused():
    def unknown(contacts, candidates, budget, draw, n, clusters):
        return candidates[:budget]

    message = r"reads `clusters`, which is not an input. The inputs are: n, me"
    with pytest.raises(ConfigError, match=message):
        sampled_peers(algorithms.fedcb2o(selection=unknown), [0])


def test_candidates_are_the_neighbours_and_optionally_the_agent():
    neighbour_ids = tuple(
        torch.tensor(sorted({(j - 1) % 9, (j + 2) % 9}, reverse=True)) for j in range(9)
    )
    for own_candidate in (False, True):
        algorithm = algorithms.fedcb2o(selection="everyone", own_candidate=own_candidate)
        expected = [
            sorted({(j - 1) % 9, (j + 2) % 9} | ({j} if own_candidate else set())) for j in (1, 5)
        ]
        assert sampled_peers(algorithm, [1, 5], neighbours=neighbour_ids) == expected


@pytest.mark.parametrize("collude", [True, False])
def test_colluders_ask_their_cluster_and_absent_agents_ask_no_peer(collude):
    members = np.array([8, 0, 4, 1, 3])
    active = np.arange(len(CLUSTER)) != 1
    no_contacts = ContactTable.empty(len(members))
    group = ours.local_engine(algorithms.fedcb2o(), collude=collude).group
    engine = LocalEngine(group, SerialExecutor(group), members=[members])
    (sampled,) = AdversarialEngine(engine).sample_peers(0, [no_contacts], active)
    (benign,) = engine.map_batches(SAMPLE, 0, active, arguments=[[no_contacts]])
    sampled, benign = sampled.tolist(), benign.tolist()
    assert sampled[3] == benign[3] == []
    assert sampled[1] == benign[1]
    if not collude:
        assert sampled == benign
        return
    for k in (0, 2, 4):
        cluster_peers = {j for j, c in enumerate(CLUSTER) if c == CLUSTER[members[k]]}
        assert set(sampled[k]) <= cluster_peers - {int(members[k])}

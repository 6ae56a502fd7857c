"""Who is there to ask, under which names, and what a selection of a user's own gets to see."""

import json

import numpy as np
import pytest
import torch
from tests import agents as ours
from tests.agents import CLUSTER
from tests.tiny import tiny

import fedcb2o
from fedcb2o import records
from fedcb2o.errors import ConfigError
from fedcb2o.experiments import run
from fedcb2o.federated import ContactTable, algorithms
from fedcb2o.federated.batched_aggregation import sample_peers

TEAM = {"benign": 3, "malicious": 2, "benign_samples": 20, "malicious_samples": 30, "budget": 4}


def test_an_own_selection_still_gets_a_tensor_of_ids(tmp_path):
    seen = []

    def first(contacts, candidates, budget, draw):
        seen.append(candidates.tolist())
        return candidates[:budget]

    algorithm = {"name": "fedcb2o", "selection": first, "mixing_factor": 1.0}
    fedcb2o.run(tiny(rounds=1, algorithm=algorithm), out=tmp_path, workers=1)
    assert seen[0] == [1, 2, 3, 4, 5]


def test_an_own_selection_may_change_its_candidates(tmp_path):
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
    pairs = [
        json.loads(line) for line in (tmp_path / "seed-1000/pairs.jsonl").read_text().splitlines()
    ]
    benign = [
        j
        for j, bad in enumerate(records.read_json(tmp_path / "seed-1000/agents.json")["malicious"])
        if not bad
    ]
    assert [line["asked"][j] for line in pairs for j in benign] == [[5, 4, 3]] * len(pairs) * len(
        benign
    )


def test_nobody_has_met_a_sybil(tmp_path):
    """Twelve rounds on, all have been met; who has a new name in every round is asked first by
    everybody."""
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


def asked(algorithm, some, n=0, **changes):
    """Whom agents of nine that met nobody ask."""
    block = ours.together(algorithm, **changes).group
    active = np.ones(len(CLUSTER), dtype=bool)
    nobody = ContactTable.empty(len(some))
    return sample_peers(block, np.array(some), nobody, n, active).tolist()


def test_an_own_selection_may_look_at_the_round_and_at_its_agent():
    seen = []

    def by_both(contacts, candidates, budget, draw, me, n):
        seen.append((me, n, candidates.tolist(), budget))
        return torch.tensor([(me + n) % len(CLUSTER)])

    def by_round(contacts, candidates, budget, draw, n):
        return candidates[n : n + 1]

    assert asked(algorithms.fedcb2o(selection=by_both), [0, 2, 6], n=5) == [[5], [7], [2]]
    others = [[i for i in range(len(CLUSTER)) if i != j] for j in (0, 2, 6)]
    assert seen == [(j, 5, ids, ours.BUDGET) for j, ids in zip((0, 2, 6), others, strict=True)]
    assert asked(algorithms.fedcb2o(selection=by_round), [0, 2, 6], n=5) == [[6], [6], [5]]


def test_a_selection_that_looks_at_what_there_is_not_is_told():
    def unknown(contacts, candidates, budget, draw, n, clusters):
        return candidates[:budget]

    with pytest.raises(ConfigError, match=r"looks at `clusters`. There is: n, me"):
        asked(algorithms.fedcb2o(selection=unknown), [0])


def test_candidates_are_neighbours_and_maybe_oneself():
    near = tuple(torch.tensor(sorted({(j - 1) % 9, (j + 2) % 9}, reverse=True)) for j in range(9))
    for own_candidate in (False, True):
        algorithm = algorithms.fedcb2o(selection="everyone", own_candidate=own_candidate)
        expected = [
            sorted({(j - 1) % 9, (j + 2) % 9} | ({j} if own_candidate else set())) for j in (1, 5)
        ]
        assert asked(algorithm, [1, 5], neighbours=near) == expected


@pytest.mark.parametrize("collude", [True, False])
def test_colluders_ask_their_cluster_and_absent_agents_nobody(collude):
    group = ours.together(algorithms.fedcb2o(), collude=collude).group
    members = np.array([8, 0, 4, 1, 3])
    active = np.arange(len(CLUSTER)) != 1
    nobody = ContactTable.empty(len(members))
    sampled = sample_peers(group, members, nobody, 0, active).tolist()
    honest = ours.together(algorithms.fedcb2o(), collude=False).group
    benign = sample_peers(honest, members, nobody, 0, active).tolist()
    assert sampled[3] == benign[3] == []
    assert sampled[1] == benign[1]
    if not collude:
        assert sampled == benign
        return
    for k in (0, 2, 4):
        fellows = {j for j, c in enumerate(CLUSTER) if c == CLUSTER[members[k]]}
        assert set(sampled[k]) <= fellows - {int(members[k])}

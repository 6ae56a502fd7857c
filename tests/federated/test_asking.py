"""Who is there to ask, under which names, and what a selection of a user's own gets to see."""

import json

from tests.tiny import tiny

import fedcb2o
from fedcb2o import records
from fedcb2o.experiments import run

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

    algorithm = {"name": "fedcb2o", "selection": reversed_, "own_candidate": True, "mixing_factor": 1.0}
    fedcb2o.run(tiny(algorithm=algorithm), out=tmp_path, workers=1)
    pairs = [json.loads(line) for line in (tmp_path / "seed-1000/pairs.jsonl").read_text().splitlines()]
    benign = [j for j, bad in enumerate(records.read_json(tmp_path / "seed-1000/agents.json")["malicious"]) if not bad]
    assert [line["asked"][j] for line in pairs for j in benign] == [[5, 4, 3]] * len(pairs) * len(benign)


def test_nobody_has_met_a_sybil(tmp_path):
    """Twelve rounds on, all have been met; who has a new name in every round is asked first by everybody."""
    flip = {"name": "label_flip", "source": 9, "target": 4}
    asked = {}
    for sybils in (False, True):
        experiment = tiny(rounds=12, agents=TEAM, attack={**flip, "sybils": sybils, "from_round": 6})
        run(experiment, out=tmp_path / str(sybils), workers=1)
        text = (tmp_path / str(sybils) / "seed-1000/pairs.jsonl").read_text()
        asked[sybils] = [json.loads(line)["asked"] for line in text.splitlines()]
    assert asked[True][:6] == asked[False][:6]
    for line in asked[True][6:]:
        assert all(sorted(line[j]) == [3, 4, 8, 9] for j in (0, 1, 2, 5, 6, 7))
    assert asked[True] != asked[False]

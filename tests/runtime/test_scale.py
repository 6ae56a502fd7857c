"""Many agents: what a round looks at grows with their number and no faster."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.tiny import bits, tiny
from torch import nn

import fedcb2o
from fedcb2o import records
from fedcb2o.federated import evaluate, selection
from fedcb2o.federated.lists import Lists
from fedcb2o.federated.peers import Met, Peers
from fedcb2o.federated.selection import remember
from fedcb2o.streams import stream, streams


def points(*, samples: int) -> fedcb2o.Dataset:
    draw = np.random.default_rng(0)
    y = draw.integers(3, size=samples + 30)
    x = draw.normal(size=(3, 4))[y] + draw.normal(size=(len(y), 4))
    return fedcb2o.dataset(x[30:], y[30:], x_test=x[:30], y_test=y[:30])


def many(num: int, **changes):
    """Agents of the smallest model, 3 of 10 malicious."""
    agents = {"num_clusters": 1, "benign": num * 7 // 10, "malicious": num * 3 // 10, "budget": 4}
    agents |= {"benign_samples": 5, "malicious_samples": 4}
    changed = {"data": {"name": points, "samples": 5 * num}, "agents": agents, "rounds": 2, "evaluate_every": 9}
    changed |= {"model": {"name": "logistic"}, "attack": {"name": "label_flip", "source": 1, "target": 2}}
    return tiny(**{**changed, **changes})


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crowd")
    fedcb2o.run(many(2000), out=folder, workers=1)
    return folder


def test_two_processes_find_the_bits_of_one(crowd, tmp_path):
    fedcb2o.run(many(2000), out=tmp_path, workers=2)
    assert bits(tmp_path) == bits(crowd)


def test_a_crowd_goes_on_from_its_checkpoint(crowd, tmp_path):
    fedcb2o.run(many(2000, rounds=1), out=tmp_path, workers=1)
    fedcb2o.run(many(2000), out=tmp_path, workers=1, resume=True)
    found, whole = (load_file(folder / "seed-1000/checkpoint.safetensors") for folder in (tmp_path, crowd))
    assert all(tensor.numpy().tobytes() == whole[name].numpy().tobytes() for name, tensor in found.items())


class Counted(np.ndarray):
    """Ids that remember how many of them were looked at in one go."""

    most = 0

    def __array_ufunc__(self, ufunc, method, *inputs, **keywords):
        plain = [np.asarray(each) for each in inputs]
        Counted.most = max([Counted.most, *(each.size for each in plain)])
        return getattr(ufunc, method)(*plain, **keywords)


@pytest.mark.parametrize("select", [selection.prob_sampling, selection.uniform])
def test_who_is_asked_costs_nothing_for_those_who_are_not(select):
    """Of a million peers only some are looked at, by their place: no pass over all."""
    peers = Peers.of([np.arange(10**6).view(Counted)], np.array([0, 0]), but=np.array([5, 7]))
    met = Met(Lists(np.array([3, 9]), np.array([2, 0])), np.ones(2))
    Counted.most = 0
    asked = select.at_once(met, peers, 4, streams(0, "x", agents=range(2)))
    assert asked.sizes.tolist() == [4, 4]
    assert Counted.most <= 8
    assert not set(asked[0].tolist()) & {5}


SELECTIONS = {name: getattr(selection, name) for name in selection.__all__}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", SELECTIONS)
def test_many_ask_whom_each_asks_alone(name, shared):
    """Agents that met differently many, until each met all: the draws, and the contacts, of one agent alone."""
    select, everybody, count = SELECTIONS[name], np.arange(12), 5
    some = [everybody] if shared else [everybody[everybody % 4 != j % 4] for j in range(count)]
    own = np.arange(count)
    peers = Peers.of(some, np.zeros_like(own) if shared else None, but=own)
    met, rule = Met.nobody(count), {"kappa": 2.0, "zeta": 0.5, "first_contact": "average"}
    for n in range(8):
        draws = [streams(n, "x", agents=own.tolist()) for _ in range(2)]
        asked = select.at_once(met, peers, 3, draws[0])
        there = stream(n, "answers").random(len(asked.values)) < 0.7
        answered = asked.only(there)
        lost = answered.having(stream(n, "losses").random(len(answered.values)))
        after = remember(met, asked, answered, lost.values, **rule)
        for j in own.tolist():
            ids = torch.from_numpy(some[0 if shared else j])
            alone = select(met[j], ids[ids != j], 3, draws[1][j])
            assert alone.tolist() == asked[j].tolist()
            those, one = asked.having(there)[j], met.take(np.array([j]))
            mine = remember(one, Lists.of([alone.numpy()]), Lists.of([alone.numpy()[those]]), lost[j], **rule)
            assert mine[0].ids.equal(after[j].ids)
            assert mine[0].likelihood.view(torch.int64).equal(after[j].likelihood.view(torch.int64))
        met = after


def test_many_collude_as_each_alone():
    everybody, which = np.arange(10), np.array([0, 1, 0])
    fellows, benign = ([everybody[:3], everybody[3:5]], [everybody[5:7], everybody[7:]])
    own = np.array([1, 4, 2])
    for budget in range(1, 6):
        draws = [streams(budget, "x", agents=range(3)) for _ in range(2)]
        many = Peers.of(fellows, which, but=own), Peers.of(benign, which)
        asked = selection.colluding(*many, budget, draws[0])
        for k in range(3):
            near, far = Peers.of([fellows[which[k]]], but=own[k : k + 1]), Peers.of([benign[which[k]]])
            alone = selection.colluding(near, far, budget, draws[1][k : k + 1])
            assert alone[0].tolist() == asked[k].tolist()


def test_an_agent_may_be_among_those_it_asks():
    shared = Peers.of([np.arange(4)], np.zeros(2, np.int64), but=np.array([0, 3]))
    assert [shared.ids(k).tolist() for k in range(2)] == [[1, 2, 3], [0, 1, 2]]
    assert shared.counts.tolist() == [3, 3]
    assert [shared.and_(np.array([0, 3])).ids(k).tolist() for k in range(2)] == [[0, 1, 2, 3]] * 2
    own = Peers.of([np.array([2]), np.zeros(0, np.int64)], but=np.array([1, 7]))
    assert own.counts.tolist() == [1, 0]
    assert [own.and_(np.array([1, 7])).ids(k).tolist() for k in range(2)] == [[1, 2], [7]]


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


def test_large_samples_are_judged_agent_by_agent(monkeypatch):
    """Several agents in one product need their samples once for each model: no more of these than `SEEN`."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    pool, rows = torch.randn(9, 21), torch.randint(9, (5, 4))
    x, y = torch.rand(5, 7, 6), torch.randint(3, (5, 7))
    whole, seen, baddbmm = evaluate.losses_of_each(module, pool, rows, x, y, 3), [], torch.baddbmm
    monkeypatch.setattr(torch, "baddbmm", lambda bias, h, weight: seen.append(len(h)) or baddbmm(bias, h, weight))
    for most, models in ((2 * 4 * 7 * 6, [8, 8, 4]), (1, [4] * 5)):
        seen.clear()
        monkeypatch.setattr(evaluate, "SEEN", most)
        torch.testing.assert_close(evaluate.losses_of_each(module, pool, rows, x, y, 3).by_class, whole.by_class)
        assert seen == models

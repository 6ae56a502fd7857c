"""Many agents: what a round looks at grows with their number and no faster; and models that memory does not hold."""

import functools
import json
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.tiny import bits, here, tiny, write
from torch import nn

import fedcb2o
from fedcb2o import records
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments import memory
from fedcb2o.experiments.assemble import dataset_of
from fedcb2o.experiments.config import load
from fedcb2o.federated import evaluate, selection
from fedcb2o.federated.selection import nobody, remember
from fedcb2o.federated.types import Contacts, Peers
from fedcb2o.runtime import arena, checkpoint
from fedcb2o.streams import stream


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
    shared = np.arange(10**6).view(Counted)
    peers, contacts = Peers(shared, without=5), Contacts(torch.tensor([3, 9]), torch.ones(2).double())
    Counted.most = 0
    asked = select(contacts, peers, 4, stream(0, "x"))
    assert len(asked) == 4
    assert Counted.most <= 4
    assert not set(asked.tolist()) & {5}


@pytest.mark.parametrize("select", [selection.prob_sampling, selection.uniform, selection.everyone])
def test_peers_are_asked_as_if_they_were_a_tensor_of_ids(select):
    everybody, contacts = torch.arange(12), nobody()
    candidates = everybody[everybody != 7]
    for n in range(8):
        ids, peers = (select(contacts, c, 3, stream(n, "x")) for c in (candidates, Peers.but(everybody.numpy(), 7)))
        assert ids.equal(peers)
        losses = torch.linspace(0, 1, len(ids))
        contacts = remember(contacts, ids, ids, losses, kappa=2.0, zeta=0.5, first_contact="average")


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


# Memory


def planned(tmp_path, given, count=1, **changes):
    """The plan of 6 agents with 100,000 parameters each."""
    experiment = load(tiny(**changes))
    return memory.plan(experiment, dataset_of(experiment, None), 100_000, count, given, tmp_path)


def test_models_go_to_memory_or_to_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "PROCESS", 0)
    whole = planned(tmp_path, 10**9)
    assert whole.models == 6 * 4 * 100_000
    assert (whole.folder, whole.columns) == (None, None)
    assert planned(tmp_path, whole.rest + whole.models).folder is None
    on_disk = planned(tmp_path, whole.rest + whole.models - 1)
    assert on_disk.folder == tmp_path
    assert 4 * 6 * on_disk.columns <= whole.models / 2
    assert "in memory" in str(whole)
    assert f"on disk, in {tmp_path}" in str(on_disk)


def test_what_fits_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "PROCESS", 0)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    whole = planned(tmp_path, 10**9)
    with pytest.raises(
        RunError, match=r"^6 agents need .* of memory, or on disk .* that are free: 3 agents would fit$"
    ):
        planned(tmp_path, whole.rest + whole.models // 2)
    with pytest.raises(RunError, match=r": take a smaller model or fewer --workers$"):
        planned(tmp_path, 1000)


def test_what_is_too_small_to_mix_in_is_said(tmp_path, monkeypatch):
    """Neither a disk without end nor models that would fit are a promise where mixing has no room."""
    monkeypatch.setattr(memory, "PROCESS", 0)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**18))
    rest = planned(tmp_path, 10**9).rest
    assert planned(tmp_path, rest + 8 * 6 * memory.WIDE).columns == memory.WIDE
    with pytest.raises(RunError, match=r": 5 agents would fit$"):
        planned(tmp_path, rest + 8 * 6 * memory.WIDE - 1)


def test_all_that_takes_memory_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "PROCESS", 0)
    training = 12 * memory.SMALL  # of small dense networks so many numbers at once
    data = planned(tmp_path, 10**9).rest - training
    assert planned(tmp_path, 10**9, together=50).rest == data + 12 * 6 * 100_000
    assert planned(tmp_path, 10**9, count=2).rest == 2 * (data + training)  # the data as they were read, and shared


def test_a_checkpoint_that_is_there_needs_no_more_room(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "PROCESS", 0)
    whole = planned(tmp_path, 10**9)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2 * whole.models))
    given = whole.rest + whole.models - 1
    with pytest.raises(RunError, match="would fit"):
        planned(tmp_path, given)
    (tmp_path / checkpoint.FILE).touch()
    assert planned(tmp_path, given).folder == tmp_path


@pytest.mark.parametrize(
    ("line", "limit", "used"),
    [
        ("0::/pod/box", "memory.max", "memory.current"),
        ("4:memory:/pod/box", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
@pytest.mark.parametrize("where", [".", "pod", "pod/box"])
def test_control_groups_limit_what_is_free(tmp_path, line, limit, used, where):
    """Those around a process's own too; pages of files do not count, as the system takes them back."""
    group = tmp_path / "sys/fs/cgroup" / line.split(":")[1] / where
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 900 kB\nMemAvailable: 800 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(f"3:cpu:/other\n{line}\n")
    assert memory.free(tmp_path) == 800 * 1024
    (group / "memory.stat").write_text("anon 1\ninactive_file 40\nactive_file 2\n")
    (group / used).write_text("500\n")
    (group / limit).write_text("max\n")
    assert memory.free(tmp_path) == 800 * 1024
    (group / limit).write_text("1000\n")
    assert memory.free(tmp_path) == 542


def test_without_a_word_of_the_system_half_of_the_machine_is_free(tmp_path):
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory.free(tmp_path) == machine // 2


def test_models_that_a_killed_run_left_on_disk_go_before_the_next(tmp_path):
    fedcb2o.run(tiny(rounds=1), out=tmp_path, workers=1)
    left = tmp_path / "seed-1000" / f"{arena.PREFIX}1-0{arena.SUFFIX}"
    left.write_bytes(b"models")
    fedcb2o.run(tiny(rounds=2), out=tmp_path, workers=1, resume=True)
    assert not left.exists()


@pytest.mark.parametrize(("text", "expected"), [("24GiB", 24 * 2**30), ("1.5 MB", 1_500_000), ("7", 7), (7, 7)])
def test_sizes(text, expected):
    assert memory.size(text) == expected


@pytest.mark.parametrize("text", ["24 gigs", "-1GiB", "GiB", ""])
def test_what_is_no_size_is_one_line(tmp_path, text):
    with pytest.raises(ConfigError, match="needs a size such as 24GiB"):
        memory.size(text)
    said = here("run", write(tmp_path / "tiny.toml"), "--out", tmp_path / "run", f"--memory={text}").one_line()
    assert "needs a size such as 24GiB" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("algorithm", [{}, {"name": "by_rule", "rule": "trimmed_mean"}])
def test_models_on_disk_have_the_same_bits(tmp_path, monkeypatch, workers, algorithm):
    changes = {"model": {"hidden": [300]}, "rounds": 2, **({"algorithm": algorithm} if algorithm else {})}
    fedcb2o.run(tiny(**changes), out=tmp_path / "memory", workers=workers)
    chosen = functools.partial(memory.Plan, 0, 0, columns=4100)
    monkeypatch.setattr(sys.modules["fedcb2o.experiments.run"], "plan", lambda *given: chosen(folder=given[-1]))
    made, shared = [], arena.shared
    monkeypatch.setattr(arena, "shared", lambda specs, folder: made.append(folder) or shared(specs, folder))
    fedcb2o.run(tiny(**changes), out=tmp_path / "disk", workers=workers)
    assert made == [tmp_path / "disk/seed-1000"]
    assert not list(tmp_path.rglob("*.arena"))
    assert bits(tmp_path / "disk") == bits(tmp_path / "memory")

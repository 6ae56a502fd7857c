"""Runs with attacks, whole: each of them; who receives what; broken models; the same bits always."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from tests import agents as ours
from tests.agents import BAD, CLUSTER, GOOD, chosen, run_rounds
from tests.tiny import StopError, bits, stop_after, tiny

from fedcb2o import knows
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments import load, run
from fedcb2o.federated import algorithms, attacks, rules
from fedcb2o.federated.choices import Choices, Inbox
from fedcb2o.federated.lists import Lists
from fedcb2o.federated.mixing import mix_, mixture
from fedcb2o.federated.publish import outbox
from fedcb2o.federated.types import Attack
from fedcb2o.streams import stream

FLIP = {"name": "label_flip", "source": 9, "target": 4}
NEEDED = {
    "label_flip": {"source": 9, "target": 4},
    "label_flips": {"pairs": [[9, 4], [4, 9]]},
    "backdoor": {"target": 3},
    "clean_label": {"target": 3},
    "rarest_flip": {"target": 3},
    "spread_flip": {"target": 3},
    "boosting": {"data": FLIP},
    "gap_aware": {"data": FLIP},
    "slow_drift": {"data": FLIP},
}
TEAM = {"benign": 2, "malicious": 2, "benign_samples": 20, "malicious_samples": 30, "budget": 4}
FLIPS = {"label_flip", "label_flips"}
ON_TARGET = {"backdoor", "clean_label", "rarest_flip", "spread_flip"}
ON_DATA = FLIPS | ON_TARGET | {"feature_noise", "random_labels", "shifted_labels"}


def with_attack(name, **changes):
    section = changes.pop("section", {})
    team = {**TEAM, **changes.pop("agents", {})}
    return tiny(agents=team, attack={"name": name, **NEEDED.get(name, {}), **section}, **changes)


@pytest.mark.parametrize("name", attacks.__all__)
def test_each_attack_runs(tmp_path, name):
    done = run(with_attack(name), out=tmp_path, workers=1)
    assert done.complete
    benign = done.records[~done.records.malicious]
    assert benign.accuracy.notna().all()
    flips = name in FLIPS | {"boosting", "gap_aware", "slow_drift"}
    assert benign.source_accuracy.notna().all() == flips
    assert benign.attack_success_rate.notna().all() == (flips or name in ON_TARGET)
    assert ("craft" in done.timing) == (name not in ON_DATA)


VARIANTS = {
    "alie": with_attack("alie", agents={"participation": 0.7}),
    "trash with the average": with_attack("trash", algorithm={"name": "dfedavgm"}),
    "dissensus": with_attack("dissensus"),
    "a boosted backdoor, from round 2 on": with_attack(
        "boosting", section={"from_round": 1, "data": {"name": "backdoor", "target": 3}}
    ),
    "large": with_attack("min_max", rounds=2, model={"hidden": [2000]}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_neither_workers_nor_interruptions_change_a_bit(tmp_path, variant):
    experiment = VARIANTS[variant]
    run(experiment, out=tmp_path / "one", workers=1)
    run(experiment, out=tmp_path / "three", workers=3)
    with pytest.raises(StopError):
        run(experiment, out=tmp_path / "parts", workers=1, watch=stop_after(1))
    run(experiment, out=tmp_path / "parts", workers=2, resume=True)
    assert bits(tmp_path / "three") == bits(tmp_path / "one") == bits(tmp_path / "parts")


def test_what_is_crafted_is_in_no_checkpoint(tmp_path):
    run(with_attack("dissensus"), out=tmp_path, workers=1)
    assert load(with_attack("dissensus")).num_models == 8 + 4 * 4
    assert load(with_attack("alie")).num_models == 8 + 4
    assert load(with_attack("label_flip")).num_models == 8
    clean = tiny(agents={**TEAM, "malicious_role": "clean"}, attack={"name": "alie"})
    assert load(clean).num_models == 8
    from safetensors.torch import load_file

    assert load_file(tmp_path / "seed-1000/checkpoint.safetensors")["models"].shape[0] == 8


def test_a_sleeper_is_honest_until_it_wakes(tmp_path):
    asleep = with_attack("not_finite", section={"from_round": 2, "data": FLIP})
    honest = with_attack("label_flip", agents={**TEAM, "malicious_role": "clean"})
    for name, experiment in (("asleep", asleep), ("honest", honest)):
        run(experiment, out=tmp_path / name, workers=1)
    lines = [(tmp_path / name / "seed-1000/pairs.jsonl").read_text().splitlines() for name in ("asleep", "honest")]
    assert lines[0][:2] == lines[1][:2]
    assert lines[0][2] != lines[1][2]
    for j, ids in enumerate(json.loads(lines[0][2])["ids"]):  # awake: benign agents receive nothing from attackers
        if j in (0, 1, 4, 5):
            assert not set(ids) & {2, 3, 6, 7}
    timing = [json.loads(line) for line in (tmp_path / "asleep/seed-1000/timing.jsonl").read_text().splitlines()]
    assert ["craft" in line for line in timing] == [False, False, True]


# Rounds of a world, seen from inside


def engine_of(attack, algorithm=None):
    return ours.together(algorithm or algorithms.dfedavgm(selection="everyone"), attack=attack)


def test_each_receiver_has_its_own_row_and_fellows_have_the_true_models(monkeypatch):
    seen, received = {}, {}

    @knows("benign", each_receiver=True)
    def numbered(view, draw):
        seen[view.agent] = view.receivers.tolist()
        return torch.stack([torch.full_like(view.own, 100 * view.agent + i) for i in view.receivers.tolist()])

    def by_samples(found, me):  # the rule of colluders, several at once
        whose, k = me.ids.flatten().tolist(), len(found.ids) if found.ids.ndim == 1 else found.ids.shape[1]
        for j, ids, rows in zip(whose, found.ids.view(-1, k), found.rows.view(-1, k), strict=True):
            received[j] = (ids.tolist(), rows.tolist(), engine.block.pool[rows])
        return rules.by_samples(found, me)

    def equal(judged):
        return by_samples(judged.received, judged.me)

    monkeypatch.setattr("fedcb2o.federated.weighing.by_samples", by_samples)
    algorithm = algorithms.by_rule(rule=equal, selection="everyone", judges=False)
    engine = engine_of(Attack(craft=numbered, threat=numbered.threat), algorithm)
    run_rounds(engine)
    assert seen == dict.fromkeys(BAD, GOOD)
    assert sorted(received) == sorted(GOOD + BAD)
    for j, (ids, rows, thetas) in received.items():
        assert j in BAD or set(BAD) < set(ids)
        for i, row, theta in zip(ids, rows, thetas, strict=True):
            deceived = i in BAD and j in GOOD
            assert (row == i) == (not deceived)
            assert (theta.tolist() == [100.0 * i + j] * len(theta)) == deceived


def test_mixing_is_the_plain_loop():
    """Rows beyond the agents': what agent j mixes is by its rows, not by who sent it."""
    attack = Attack(craft=attacks.dissensus, threat=attacks.dissensus.threat)
    block = engine_of(attack, algorithms.fedcb2o(own_model="judged", mixing_factor=0.7)).block
    draw, n = stream(3, "pool"), len(CLUSTER)
    block.pool[:] = torch.from_numpy(draw.normal(size=block.pool.shape)).float()
    ids = Lists.of([draw.permutation(n)[:4] for _ in range(n)])
    rows = outbox(block, 0).rows(ids.values, ids.owners)
    for j, i, row in zip(ids.owners, ids.values, rows, strict=True):
        assert (row >= n) == (j in GOOD and i in BAD)
    weights = draw.dirichlet([1.0] * 5, size=n)
    choices = Choices.none(np.arange(n), Lists.empty(n), Inbox(ids, rows, np.ones(4 * n), np.zeros(4 * n, np.int64)))
    choices.weights[:], choices.own_weight[:], choices.factor[:] = weights[:, :4].flatten(), weights[:, 4], 0.7
    before = block.pool.clone()
    mixed = mixture(choices, block.layout.own)
    assert len(block.pool) == n + len(BAD) * len(GOOD)
    for a in range(0, block.pool.shape[1], 10):  # tiles of ten columns
        mix_(block.pool, mixed, a, min(a + 10, block.pool.shape[1]))
    for j in range(n):
        m = weights[j, 4] * before[j]
        for row, weight in zip(ids.having(rows)[j], weights[j, :4], strict=True):
            m = m + weight * before[row]
        torch.testing.assert_close(block.pool[j], 0.3 * before[j] + 0.7 * m, rtol=1e-5, atol=1e-6)
    assert block.pool[n:].equal(before[n:])


@pytest.mark.parametrize("value", ["nan", "inf", "huge"])
@pytest.mark.parametrize("judges", [True, False])
def test_broken_models_never_arrive(value, judges):
    """Benign models are those of a world in which the attackers' models never arrive: they are NaN from the start."""
    algorithm = algorithms.fedcb2o(mixing_factor=1.0) if judges else None
    models = {}
    for kind in ("crafted", "silent"):
        attack = Attack(craft=lambda view, draw: attacks.not_finite(view, draw, value=value))
        engine = engine_of(attack if kind == "crafted" else Attack(), algorithm)
        models[kind] = ours.models_of(engine)
        if kind == "silent":
            models[kind][BAD] = torch.nan
        for done in run_rounds(engine, 3):
            assert all(not set(chosen(done.choices, j).ids) & set(BAD) for j in GOOD)
    assert models["crafted"][GOOD].equal(models["silent"][GOOD])
    assert models["crafted"][BAD].isfinite().all()


def test_a_benign_agent_that_an_attack_broke_is_no_error_and_spreads_nothing():
    """Without crafted models it is an error: then a setting must be wrong."""
    sizes = []

    @knows("benign")
    def count(view, draw):
        sizes.append(len(view.benign()))
        assert view.benign().isfinite().all()
        return view.own

    attack = Attack(craft=count, threat=count.threat)
    engine = engine_of(attack)
    theta = ours.models_of(engine)
    theta[0] = torch.nan
    for done in run_rounds(engine, 3):
        assert 0 not in done.choices.received.values
        assert not chosen(done.choices, 0).ids
    assert theta[0].isnan().all()
    assert theta[1:].isfinite().all()
    assert sizes == [2, 2, 2, 2] * 3  # of three and of two benign agents; the first of the three is broken
    for silent in (Attack(), dataclasses.replace(attack, from_round=1)):
        engine = engine_of(silent)
        ours.models_of(engine)[0] = torch.nan
        with pytest.raises(RunError, match="training diverged: the model or the loss of benign agent 0 is not finite"):
            run_rounds(engine)


def test_the_view_of_a_round():
    """Own models before and after training, data without poison, losses on them."""
    views = {}

    @knows("fellows", "benign")
    def watch(view, draw):
        views[view.agent] = (view, view.fellows().clone(), view.benign().clone(), float(draw.random()))
        return view.own

    def poison(shard, draw):
        return dataclasses.replace(shard, y=torch.zeros_like(shard.y))

    engine = engine_of(Attack(poison=poison, craft=watch, threat=watch.threat))
    before = ours.models_of(engine).clone()
    run_rounds(engine)
    assert sorted(views) == BAD
    assert len({draw for *_, draw in views.values()}) == len(BAD)
    for j, (view, fellows, benign, _) in views.items():
        team = [i for i in BAD if CLUSTER[i] == CLUSTER[j]]
        assert view.before.equal(before[j])
        assert fellows[team.index(j)].equal(view.own)
        assert not view.own.equal(view.before)
        assert (len(fellows), len(benign)) == (view.num_fellows, view.num_benign) == (2, CLUSTER.count(CLUSTER[j]) - 2)
        assert len(view.data.y.unique()) > 1
        assert view.losses(torch.stack([view.own, view.before])).by_class.shape == (2, 4)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda view: view.own[:-1], r"the attack returned models of shape \(87,\), expected \(88,\)"),
        (lambda view: None, "the attack returned a NoneType, expected a tensor"),
        (lambda view: torch.stack([view.own] * 2), r"of shape \(2, 88\), expected \(88,\)"),
    ],
)
def test_what_is_no_model_is_told(returned, message):
    with pytest.raises(ConfigError, match=message):
        run_rounds(engine_of(Attack(craft=lambda view, draw: returned(view))))


# Configurations


@knows("fellows")
def curious(view, draw):
    return view.benign().mean(0)


def undeclared(view, draw):
    return view.own


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        ({"name": "alie", "zz": 1}, "attack `alie` has no parameter `zz`. Did you mean `z`?"),
        ({"name": "gap_aware"}, "the attack `gap_aware` publishes what was learnt from poisoned data: name an attack"),
        ({"name": "alie", "data": "ipm"}, "`attack.data` takes an attack on data, and `ipm` is one on models"),
        ({"name": "alie", "data": {"name": "label_flip", "source": 1}}, "`label_flip` needs the parameter `target`"),
        ({**FLIP, "data": FLIP}, "`attack.data` goes with an attack on models, and `label_flip` is one on data"),
        ({**FLIP, "from_round": -1}, "`attack.from_round`: input should be greater than or equal to 0, got -1"),
        ({"name": undeclared}, r"undeclared` does not declare what it knows: write @fedcb2o.knows\(\)"),
        ({"name": "boosting", "data": {**FLIP, "source": 11}}, "`attack.source` must be between 0 and 9, got 11"),
        ({"name": "label_flips", "pairs": [[1, 2, 3]]}, "attack `label_flips`: `pairs` = "),
        ({"name": "backdoor", "target": 1, "size": 9}, "a trigger of `size` 9 and `margin` 0 does not fit"),
        ({"name": curious}, r'write @fedcb2o.knows\("benign"\) above it'),
    ],
)
def test_attacks_that_do_not_fit_are_told(tmp_path, attack, message):
    with pytest.raises(ConfigError, match=message):
        run(tiny(attack=attack), out=tmp_path, workers=1)


def test_a_configuration_is_written_whole(tmp_path):
    experiment = load(tiny(attack={"name": "boosting", "factor": 3, "data": FLIP, "from_round": 1}))
    settings = experiment.settings()["attack"]
    assert settings == {"name": "boosting", "factor": 3, "data": FLIP, "from_round": 1}
    assert load({**tiny(), "attack": settings}).settings()["attack"] == settings
    assert load(tiny()).settings()["attack"] == tiny()["attack"]
    changed = load(experiment, {"attack.data.target": 5, "attack.factor": 2.5})
    assert changed.settings()["attack"]["data"]["target"] == 5
    run(experiment, out=tmp_path, workers=1)
    run(tmp_path / "config.toml", out=tmp_path, workers=1, resume=True)

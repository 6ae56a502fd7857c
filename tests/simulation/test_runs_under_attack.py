"""Runs under attack: start rounds, configurations, and equal bits."""

import json

import pytest
from tests.tiny import bits_for_any_workers, first_quick, lines_of, tiny

from fedcb2o import knows
from fedcb2o.errors import ConfigError
from fedcb2o.experiments import load, run
from fedcb2o.federated import attacks

FLIP = {"name": "label_flip", "source": 9, "target": 4}


NEEDED = {
    "label_flip": {"source": 9, "target": 4},
    "label_flips": {"pairs": [[9, 4], [4, 9]]},
    "backdoor": {"target": 3},
    "clean_label": {"target": 3},
    "blended": {"target": 3},
    "signal": {"target": 3},
    "edge_case": {"target": 3},
    "rarest_flip": {"target": 3},
    "spread_flip": {"target": 3},
    "boosting": {"data": FLIP},
    "descent": {"source": 9, "target": 4, "data": FLIP},
    "echo": {"data": FLIP},
    "gap_aware": {"data": FLIP},
    "neurotoxin": {"data": FLIP},
    "slow_drift": {"data": FLIP},
}


TEAM = {"benign": 2, "malicious": 2, "benign_samples": 20, "malicious_samples": 30, "budget": 4}


FLIPS = {"label_flip", "label_flips"}


ON_TARGET = {
    "backdoor",
    "blended",
    "clean_label",
    "edge_case",
    "rarest_flip",
    "signal",
    "spread_flip",
}


ON_DATA = FLIPS | ON_TARGET | {"feature_noise", "random_labels"}
ON_DATA |= {"reversed_labels", "shifted_labels"}


OF_ADAPTERS = {"factor_mixing", "swapped_answers", "topic_poison", "trigger_phrase"}


def with_attack(name, **changes):
    section = changes.pop("section", {})
    team = {**TEAM, **changes.pop("agents", {})}
    return tiny(agents=team, attack={"name": name, **NEEDED.get(name, {}), **section}, **changes)


@pytest.mark.parametrize("name", [name for name in attacks.__all__ if name not in OF_ADAPTERS])
def test_each_attack_runs(tmp_path, name):
    done = run(with_attack(name, rounds=2), out=tmp_path, workers=1)
    assert done.complete
    benign = done.records[~done.records.malicious]
    assert benign.accuracy.notna().all()
    flips = name in FLIPS | {"boosting", "descent", "echo", "gap_aware", "neurotoxin", "slow_drift"}
    assert benign.source_accuracy.notna().all() == flips
    assert benign.attack_success_rate.notna().all() == (flips or name in ON_TARGET)
    assert ("craft" in done.timing) == (name not in ON_DATA)


VARIANTS = {
    "alie": with_attack("alie", agents={"participation": 0.7}),
    "trash with the average": with_attack("random_model", algorithm={"name": "dfedavgm"}),
    "dissensus": with_attack("dissensus"),
    "a boosted backdoor, from round 2 on": with_attack(
        "boosting", section={"from_round": 1, "data": {"name": "backdoor", "target": 3}}
    ),
    "large": with_attack("min_max", rounds=2, model={"hidden": [2000]}),
}


@pytest.mark.parametrize("variant", first_quick(VARIANTS))
def test_neither_workers_nor_interruptions_change_a_bit(tmp_path, variant):
    bits_for_any_workers(tmp_path, VARIANTS[variant])


def test_crafted_models_are_not_in_the_checkpoint(tmp_path):
    run(with_attack("dissensus"), out=tmp_path, workers=1)
    assert load(with_attack("dissensus")).num_models == 8 + 4 * 4
    assert load(with_attack("alie")).num_models == 8 + 4
    assert load(with_attack("label_flip")).num_models == 8
    clean = tiny(agents={**TEAM, "malicious_role": "clean"}, attack={"name": "alie"})
    assert load(clean).num_models == 8
    from safetensors.torch import load_file

    assert load_file(tmp_path / "seed-1000/checkpoint.safetensors")["models"].shape[0] == 8


def test_a_delayed_attacker_is_honest_before_its_start_round(tmp_path):
    delayed = with_attack("not_finite", section={"from_round": 2, "data": FLIP})
    honest = with_attack("label_flip", agents={**TEAM, "malicious_role": "clean"})
    for name, experiment in (("asleep", delayed), ("honest", honest)):
        run(experiment, out=tmp_path / name, workers=1)
    lines = [
        (tmp_path / name / "seed-1000/pairs.jsonl").read_text().splitlines()
        for name in ("asleep", "honest")
    ]
    assert lines[0][:2] == lines[1][:2]
    assert lines[0][2] != lines[1][2]
    for j, ids in enumerate(
        json.loads(lines[0][2])["ids"]
    ):  # active: benign agents receive no models of attackers
        if j in (0, 1, 4, 5):
            assert not set(ids) & {2, 3, 6, 7}
    timing = lines_of(tmp_path / "asleep", "timing")
    assert ["craft" in line for line in timing] == [False, False, True]


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
        (
            {"name": "gap_aware"},
            "the attack `gap_aware` publishes a model trained on poisoned data: name an attack",
        ),
        ({"name": "alie", "data": "ipm"}, "`attack.data` needs an attack on data, and `ipm` is"),
        (
            {"name": "alie", "data": {"name": "label_flip", "source": 1}},
            "`label_flip` needs the parameter `target`",
        ),
        ({**FLIP, "data": FLIP}, "`attack.data` needs an attack on models, and `label_flip` is"),
        (
            {**FLIP, "from_round": -1},
            "`attack.from_round`: input should be greater than or equal to 0, got -1",
        ),
        ({**FLIP, "sybils": "yes"}, "`attack.sybils`"),
        (
            {"name": undeclared},
            r"undeclared` does not declare what it knows: write @fedcb2o.knows\(\)",
        ),
        (
            {"name": "boosting", "data": {**FLIP, "source": 11}},
            "`attack.source` must be between 0 and 9, got 11",
        ),
        ({"name": "label_flips", "pairs": [[1, 2, 3]]}, "attack `label_flips`: `pairs` = "),
        (
            {"name": "backdoor", "target": 1, "size": 9},
            "a trigger of `size` 9 and `margin` 0 does not fit",
        ),
        ({"name": curious}, r'write @fedcb2o.knows\("benign"\) above it'),
    ],
)
def test_invalid_attacks_are_refused(tmp_path, attack, message):
    with pytest.raises(ConfigError, match=message):
        run(tiny(attack=attack), out=tmp_path, workers=1)


def test_a_written_configuration_has_all_attack_settings(tmp_path):
    experiment = load(tiny(attack={"name": "boosting", "factor": 3, "data": FLIP, "from_round": 1}))
    settings = experiment.settings()["attack"]
    assert settings == {"name": "boosting", "factor": 3, "data": FLIP, "from_round": 1}
    assert load({**tiny(), "attack": settings}).settings()["attack"] == settings
    assert load(tiny()).settings()["attack"] == tiny()["attack"]
    changed = load(experiment, {"attack.data.target": 5, "attack.factor": 2.5})
    assert changed.settings()["attack"]["data"]["target"] == 5
    run(experiment, out=tmp_path, workers=1)
    run(tmp_path / "config.toml", out=tmp_path, workers=1, resume=True)


def test_attackers_that_return_the_receivers_model_get_little_weight(tmp_path):
    changes = {"rounds": 6, "seeds": [0], "agents.benign": 7, "agents.malicious": 3}
    weights = {}
    for min_distance in (0.75, 1e-9):
        experiment = load(
            "digits-fedassay",
            {
                **changes,
                "attack": {"name": "dissensus", "eps": 0.1},
                "algorithm.guards.min_distance": min_distance,
                "name": f"near-{min_distance}",
            },
        )
        done = run(experiment, out=tmp_path / f"{min_distance}", workers=1)
        bad = done.agents.set_index(["seed", "agent"]).malicious
        pairs = done.pairs.join(bad, on=["seed", "agent"]).join(
            bad.rename("from_bad"), on=["seed", "peer"]
        )
        weights[min_distance] = pairs[
            ~pairs.malicious.astype(bool) & pairs.from_bad.astype(bool)
        ].weight
        assert len(weights[min_distance]) > 50
    assert (weights[0.75] > 0).mean() < 0.4 < (weights[1e-9] > 0).mean()
    assert weights[0.75].mean() < 0.5 * weights[1e-9].mean()


def test_benign_peers_with_similar_models_exchange_from_the_first_round(tmp_path):
    """Equal samples give similar first steps, which are all near."""
    team = {"agents.num_clusters": 1, "agents.benign": 4, "agents.malicious": 0, "agents.budget": 3}
    experiment = load(
        "digits-fedassay", {**team, "agents.benign_samples": 200, "rounds": 3, "seeds": [0]}
    )
    done = run(experiment, out=tmp_path, workers=1)
    received = done.pairs[done.pairs.agent != done.pairs.peer].groupby("round")
    assert received.size().tolist() == [12, 12, 12]
    assert received.weight.sum().min() > 1.0

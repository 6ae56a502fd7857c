"""Tabular data in one cluster: attacks on labels, on models, and with triggers for images."""

import pytest
from tests.tiny import tiny

import fedcb2o
from fedcb2o.errors import ConfigError

TABLE = {
    "rounds": 10,
    "evaluate_every": 10,
    "evaluate_on": "redrawn",
    "data": {"name": "breast_cancer"},
    "agents": {
        "num_clusters": 1,
        "benign": 7,
        "malicious": 3,
        "benign_samples": 30,
        "malicious_samples": 30,
        "validation": 0.3,
        "split": "stratified",
        "budget": 6,
    },
    "model": {"name": "mlp", "hidden": [16]},
    "training": {"gamma": 0.1, "batch_size": 16, "local_epochs": 2},
}
MEAN = {"algorithm": {"name": "dfedavgm", "selection": "prob_sampling"}}
EXCHANGE = {"name": "fedassay", "guards": {"trigger_exchange": 5}}
TRIGGERED = ("backdoor", "blended", "clean_label", "signal")


def benign_scores(out, **changes):
    """Run an experiment and return the last scores of the benign agents."""
    run = fedcb2o.run(tiny(**{**TABLE, **changes}), out=out, workers=1, watch=lambda *_: None)
    return run.records[
        ~run.records.malicious & (run.records["round"] == run.records["round"].max())
    ]


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0)])
def test_label_flips_harm_dfedavgm_more_than_fedcb2o(tmp_path, source, target):
    flip = {"name": "label_flip", "source": source, "target": target}
    defended, mean = (
        benign_scores(tmp_path / name, attack=flip, **changes)
        for name, changes in (("a", {}), ("b", MEAN))
    )
    assert defended.accuracy.mean() > 0.93  # on 142 test samples
    assert mean.accuracy.mean() < defended.accuracy.mean() - 0.05
    assert defended.attack_success_rate.mean() < mean.attack_success_rate.mean() - 0.05


@pytest.mark.parametrize(
    "attack",
    [{"name": "sign_flip", "scale": 5.0}, {"name": "random_model"}, {"name": "min_max"}],
    ids=str,
)
def test_fedcb2o_stays_accurate_under_attacks_on_models(tmp_path, attack):
    scores = benign_scores(tmp_path / "run", rounds=3, attack=attack)
    assert len(scores) == 7
    assert scores.accuracy.mean() > 0.85


@pytest.mark.parametrize("name", TRIGGERED)
def test_triggers_need_images_and_are_refused_before_the_run(tmp_path, name):
    message = r"a trigger marks images, and the samples have shape \(30,\): take an attack"
    with pytest.raises(ConfigError, match=message):
        benign_scores(tmp_path / "run", attack={"name": name, "target": 1})
    assert not (tmp_path / "run").exists()


def test_an_exchange_of_triggers_needs_images_before_the_run(tmp_path):
    message = r"looks for pixels .* the samples have shape \(30,\): leave it out"
    with pytest.raises(ConfigError, match=message):
        benign_scores(tmp_path / "run", algorithm=EXCHANGE, attack={"name": "random_model"})
    assert not (tmp_path / "run").exists()

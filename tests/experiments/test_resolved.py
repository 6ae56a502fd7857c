"""The functions that an experiment names: resolved once, by every copy that names the same."""

import pickle

import pytest
from tests.tiny import tiny

from fedcb2o import plugins
from fedcb2o.experiments.config.datasets import load_dataset
from fedcb2o.experiments.config.loading import load
from fedcb2o.experiments.config.prepared_seed import prepare_seed

ATTACKED = tiny(
    attack={"name": "alie", "data": {"name": "backdoor", "target": 1, "size": 1}},
    training={"loss": "cross_entropy", "optimiser": "adamw"},
    metrics=["balanced_accuracy"],
)


def test_a_name_becomes_a_function_once_from_the_configuration_to_the_first_round(monkeypatch):
    original = plugins.resolve
    names = []

    def counted(kind, name, namespace):
        names.append((kind, name))
        return original(kind, name, namespace)

    monkeypatch.setattr(plugins, "resolve", counted)
    experiment = load(ATTACKED)
    prepare_seed(experiment, 0, load_dataset(experiment, None))
    experiment.settings()
    experiment.fingerprint(0)
    assert names == list(dict.fromkeys(names))
    assert {kind for kind, _ in names} >= {"attack", "loss", "optimiser", "metric", "model"}


def test_a_copy_that_names_the_same_functions_resolves_none():
    experiment = load(ATTACKED)
    training = experiment.training.model_copy(update={"precision": "bfloat16"})
    copy = experiment.model_copy(update={"seeds": (3,), "linear": "torch", "training": training})
    assert copy.resolved is experiment.resolved


@pytest.mark.parametrize("key", ["attack", "training", "metrics", "agents"])
def test_a_copy_that_names_other_functions_resolves_them(key):
    experiment = load(ATTACKED)
    other = load(ATTACKED, {"agents.graph": "ring"} if key == "agents" else None)
    copy = experiment.model_copy(update={key: getattr(other, key)})
    assert copy.resolved is not experiment.resolved
    assert copy.settings() == other.settings()
    assert copy.local_baseline().resolved.algorithm.needs_losses is False


def test_another_process_resolves_the_names_again():
    experiment = load(ATTACKED)
    again = pickle.loads(pickle.dumps(experiment))
    assert again == experiment
    assert "resolved" not in vars(again)
    assert again.settings() == experiment.settings()


def test_settings_belong_to_the_caller():
    experiment = load(ATTACKED)
    experiment.settings()["attack"]["data"]["target"] = 3
    assert experiment.settings()["attack"]["data"]["target"] == 1

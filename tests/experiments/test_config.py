"""Configurations: valid ones are read as intended, others give a one-line error with a cure."""

import re
import sys
import tomllib
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch
from tests.tiny import TINY, tiny, write

from fedcb2o.data import dataset
from fedcb2o.errors import ConfigError
from fedcb2o.experiments.config.datasets import check_attack_goal, load_for_data
from fedcb2o.experiments.config.loading import load
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.experiments.config.tables import parse_value, presets
from fedcb2o.federated.guards.checks import NO_GUARDS
from fedcb2o.federated.sections import AgentsSection


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_valid_and_has_a_title_and_a_description(name):
    experiment = load(name)
    assert experiment.name == name
    kinds = ("digits", "emnist", "typefaces", "fashion", "diabetes", "smollm")
    owners = ("chem97", "flights", "har", "loans", "movielens", "shakespeare", "stops")
    assert name.split("-")[0] in kinds + owners
    assert experiment.title
    assert presets()[name] == experiment.description
    assert len(experiment.description) > 20
    assert "\n" not in experiment.description


METHODS = {
    "fedassay": {"name": "fedassay", "criterion": "class_loss_excess", "alpha": 1.0, "beta": 0.5},
    "fedcb2o-paper": {
        "name": "fedcb2o",
        "criterion": "class_loss_gap",
        "alpha": 10.0,
        "own_model": "excluded",
        "own_candidate": False,
        "first_contact": "average",
    },
    "fedcb2o-released": {
        "name": "fedcb2o",
        "criterion": {"name": "class_loss_gap", "absent": "zero"},
        "alpha": 2.0,
        "own_model": "trusted",
        "own_candidate": True,
        "first_contact": "whole",
        "own_likelihood": "every_round",
    },
    "fedcbo": {"name": "fedcbo", "alpha": 10.0, "own_model": "judged"},
    "fedcbo-paper": {"name": "fedcbo", "alpha": 10.0, "own_model": "excluded"},
    "fedcbo-released": {
        "name": "fedcbo",
        "criterion": "average_loss",
        "alpha": 10.0,
        "own_model": "judged",
        "own_candidate": True,
        "first_contact": "whole",
        "own_likelihood": "every_round",
    },
}
FACTORS = {"fedcb2o-paper": 0.04, "fedcbo-paper": 0.04}
AGENTS = {  # held out, split, validation loss, colluders count their own models
    "fedassay": (False, "random", "samples", True),
    "fedcbo": (True, "random", "samples", True),
    "paper": (True, "random", "samples", False),
    "released": (True, "released", "batches", True),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("data", ["digits", "emnist-small", "emnist"])
def test_every_method_has_the_same_parameters_on_all_data(data, method):
    experiment = load(f"{data}-{method}")
    settings = experiment.settings()
    expected = {**METHODS[method], "criterion_from_round": 0, "kappa": 2.0, "zeta": 0.5}
    assert {key: settings["algorithm"].get(key) for key in expected} == expected
    algorithm = experiment.algorithm.build()
    factor = algorithm.factor(experiment.training.gamma)
    assert factor == pytest.approx(FACTORS.get(method, 1.0))
    assert (algorithm.guards != NO_GUARDS) == (method == "fedassay")
    hold_out, *agent_settings = AGENTS[method.rpartition("-")[2]]
    agents = experiment.agents
    assert (agents.hold_out, agents.validation == 1) == (hold_out, not hold_out)
    assert [agents.split, agents.validation_loss, agents.colluders_own_model] == agent_settings
    if data != "digits":
        linear = method.endswith("released")
        assert settings["model"]["dense_activation"] == ("none" if linear else "relu")


@pytest.mark.parametrize("data", ["digits", "emnist-small", "emnist"])
def test_backdoor_presets_add_one_criterion_to_the_default(data):
    plain, backdoors = (
        load(f"{data}-fedassay{ending}").settings()["algorithm"] for ending in ("", "-backdoors")
    )
    gap, perturbations = backdoors.pop("criterion")["of"]
    assert gap == plain.pop("criterion")
    assert perturbations["name"] == "perturbation_gap"
    assert perturbations.get("blend") == (None if data == "digits" else 0.5)
    assert backdoors == plain


def test_the_backdoor_preset_of_a_table_adds_the_last_layer():
    plain, backdoors = (
        load(f"har-fedassay{ending}").settings()["algorithm"] for ending in ("", "-backdoors")
    )
    gap, layer = backdoors.pop("criterion")["of"]
    assert gap == plain.pop("criterion")
    assert layer == {"name": "last_layer_excess", "scale": 50.0}
    assert backdoors == plain


def test_the_default_algorithm_is_the_recommended_one():
    table = tiny()
    del table["algorithm"]
    experiment = load(table)
    assert experiment.settings()["algorithm"]["name"] == "fedassay"
    assert (experiment.agents.hold_out, experiment.agents.validation) == (False, 1.0)
    held_out = load(table, {"agents.hold_out": True, "agents.validation": 0.25})
    assert (held_out.agents.hold_out, held_out.agents.validation) == (True, 0.25)
    assert load(tiny()).agents.hold_out


@pytest.mark.parametrize(
    ("preset", "changes", "title"),
    [
        ("digits-fedassay", {}, "FedAssay"),
        ("digits-fedassay", {"rounds": 3}, "FedAssay"),
        ("digits-fedassay", {"algorithm": {"name": "by_rule", "rule": "krum"}}, "krum"),
        ("digits-fedassay", {"algorithm.alpha": 2.0}, "FedAssay (alpha = 2)"),
        ("digits-fedassay", {"algorithm.alpha": 2.0, "title": "Mine"}, "Mine"),
        ("digits-fedassay", {"algorithm.guards": False}, "FedAssay (without guards)"),
        (
            "digits-fedassay",
            {"algorithm.guards.max_distance": False, "algorithm.guards.interpolation": 0.5},
            "FedAssay (max_distance = false)",
        ),
        ("digits-fedcbo", {"agents.budget": 3}, "FedCBO (budget = 3)"),
        ("digits-fedcbo", {"algorithm.alpha": 2.0}, "FedCBO (alpha = 2)"),
        (
            "digits-fedcbo",
            {"algorithm.own_model": "trusted"},
            "FedCBO (text, own_model = trusted, mixing_factor = 1)",
        ),
        (
            "digits-fedassay",
            {"agents.hold_out": True, "agents.validation": 0.5},
            "FedAssay (hold_out = true, validation = 0.5)",
        ),
        ("digits-fedassay", {"data": {"name": "mnist"}}, "FedAssay (data = mnist)"),
        (
            "digits-fedassay",
            {
                "agents.benign": 9,
                "agents.budget": 3,
                "agents.malicious": 1,
                "agents.benign_samples": 9,
            },
            "FedAssay (benign = 9, malicious = 1, ...)",
        ),
        ("digits-fedcbo-released", {"algorithm.name": "fedassay"}, "FedAssay"),
        (
            "digits-fedassay",
            {"algorithm": {"name": "by_rule", "rule": "krum", "guards": True}},
            "krum (with guards)",
        ),
        ("digits-oracle-min", {"agents.malicious_role": "attack"}, "DFedAvgM"),
        (
            "digits-fedcb2o-paper",
            {"agents.hold_out": False, "agents.validation": 1.0},
            "FedCB2O (paper)",
        ),
        (
            "emnist-fedcb2o-released",
            {"algorithm.criterion_from_round": 20, "algorithm.beta": 0.25},
            "FedCB2O (released, T_G = 20, beta = 0.25)",
        ),
    ],
)
def test_titles_follow_the_algorithm(preset, changes, title):
    assert load(preset, changes).title == title


def test_a_share_of_training_samples_that_the_algorithm_changes_is_noted(tmp_path, caplog):
    experiment = tiny(algorithm={"name": "fedassay"})
    load_for_data(experiment, {"algorithm.name": "fedcbo"}, None)
    del experiment["algorithm"]
    load_for_data(experiment, {"algorithm": "fedcbo"}, None)
    base, file = tmp_path / "base.toml", tmp_path / "mine.toml"
    write(base, algorithm={"name": "fedcbo"})
    file.write_text('extends = "base.toml"\n[algorithm]\nname = "fedassay"\n', encoding="utf-8")
    load_for_data(file, None, None)
    assert caplog.messages == [
        "tiny: with this algorithm 80% of an agent's samples train, with that of tiny 100%. To "
        "keep those, set `agents.hold_out` = false and `agents.validation` = 1.",
        "tiny: with this algorithm 80% of an agent's samples train, with the default one 100%. To "
        "keep those, set `agents.hold_out` = false and `agents.validation` = 1.",
        "mine: with this algorithm 100% of an agent's samples train, with that of base.toml 80%. "
        "To keep those, set `agents.hold_out` = true and `agents.validation` = 0.2.",
    ]


def test_a_share_of_training_samples_that_was_set_is_not_noted(tmp_path, caplog):
    load_for_data("digits-fedassay", {"algorithm": "fedcbo"}, None)  # the preset sets it
    held_out = {"agents.hold_out": True, "agents.validation": 0.5}
    load_for_data(tiny(), {"algorithm": "fedassay", **held_out}, None)
    load_for_data(tiny(), {"rounds": 3}, None)
    load_for_data(tiny(algorithm={"name": "fedcbo"}), None, None)
    file = tmp_path / "mine.toml"
    text = 'extends = "digits-fedcbo"\n[agents]\nhold_out = false\nvalidation = 1.0\n'
    file.write_text(text, encoding="utf-8")
    load_for_data(file, None, None)
    assert caplog.messages == []


def test_the_title_of_a_file_with_extends_is_its_own_or_from_the_algorithm():
    table = {"extends": "digits-fedcb2o-released", "name": "mine"}
    assert load(table).title == "FedCB2O (released)"
    assert load({**table, "title": "Mine"}, {"algorithm.alpha": 3.0}).title == "Mine"


@pytest.mark.parametrize(
    "name",
    ["digits-fedassay", "digits-dfedavgm", "emnist-small-fedcb2o-paper", "emnist-oracle-max"],
)
def test_settings_written_to_toml_load_as_the_same_experiment(name):
    experiment = load(name)
    again = load(tomllib.loads(tomli_w.dumps(experiment.settings())))
    assert again.fingerprint(3) == experiment.fingerprint(3)
    assert again.settings() == experiment.settings()


def test_files_mappings_and_experiments_load_equally(tmp_path):
    from_file, from_mapping = load(write(tmp_path / "tiny.toml")), load(tiny())
    assert (
        from_file
        == from_mapping
        == load(from_mapping)
        == Experiment(**from_mapping.model_dump(exclude_unset=True))
    )
    assert from_mapping.title == "tiny"
    assert tiny() == TINY


def test_an_experiment_without_a_name_is_named_after_its_file(tmp_path):
    table = tiny()
    del table["name"]
    (tmp_path / "my-own.toml").write_text(tomli_w.dumps(table))
    assert load(tmp_path / "my-own.toml").name == "my-own"


def test_extends_changes_a_preset_section_by_section(tmp_path):
    (tmp_path / "mine.toml").write_text(
        'extends = "digits-fedassay"\nrounds = 7\n[agents]\nbudget = 3\n[model]\nname = "logistic"\n'
    )
    loaded, preset = load(tmp_path / "mine.toml"), load("digits-fedassay")
    assert (loaded.name, loaded.rounds, loaded.agents.budget) == ("mine", 7, 3)
    assert loaded.agents.model_copy(update={"budget": preset.agents.budget}) == preset.agents
    # another model does not inherit the parameters of the first
    assert loaded.model.parameters == {}
    assert loaded.algorithm == preset.algorithm


def test_a_file_extends_another_beside_it(tmp_path):
    (tmp_path / "base.toml").write_text('extends = "digits-fedassay"\nrounds = 7\ntitle = "Base"\n')
    (tmp_path / "mine.toml").write_text('extends = "base.toml"\n[agents]\nbudget = 3\n')
    loaded = load(tmp_path / "mine.toml")
    assert (loaded.name, loaded.title, loaded.rounds) == ("mine", "FedAssay", 7)
    assert loaded.agents.budget == 3

    (tmp_path / "base.toml").write_text('extends = "mine.toml"\n')
    with pytest.raises(ConfigError, match=r"`extends` = 'base\.toml' leads back to itself"):
        load(tmp_path / "base.toml")
    with pytest.raises(ConfigError, match="names a file, which only a file can extend"):
        load({"name": "x", "extends": "mine.toml"})


def test_changes_apply_at_every_depth():
    changed = load(
        tiny(),
        {
            "rounds": 9,
            "agents.budget": 2,
            "algorithm.criterion": "class_loss_gap",
            "algorithm.criterion.absent": "zero",
            "training": {"local_steps": 3},
        },
    )
    assert (changed.rounds, changed.agents.budget, changed.training.local_steps) == (9, 2, 3)
    assert changed.algorithm.parameters["criterion"] == {"name": "class_loss_gap", "absent": "zero"}
    assert changed.algorithm.parameters["alpha"] == 2.0
    deep = load(
        tiny(), {"algorithm.criterion.name": "class_loss_gap", "algorithm.criterion.absent": "zero"}
    )
    assert deep.algorithm == changed.algorithm
    assert load(tiny(), {"name": "other"}).fingerprint(0) == load(tiny()).fingerprint(0)
    other = load(tiny(), {"algorithm.name": "dfedavgm"})
    assert other.algorithm.parameters == {}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("0.5", 0.5),
        ("1e-3", 0.001),
        ("true", True),
        ("false", False),
        ("[1, 2]", [1, 2]),
        ("'3'", "3"),
        ('"a b"', "a b"),
        ("prob_sampling", "prob_sampling"),
        ("my_module:f", "my_module:f"),
        ("", ""),
        ("1e", "1e"),
        (
            '{name = "class_loss_gap", absent = "zero"}',
            {"name": "class_loss_gap", "absent": "zero"},
        ),
        ("a=b", "a=b"),
    ],
)
def test_values_of_set_are_toml_or_strings(text, value):
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_the_clean_counterpart_differs_only_in_the_role():
    experiment = load(tiny())
    counterpart = experiment.clean_counterpart()
    assert (experiment.attacked, counterpart.attacked) == (True, False)
    assert (counterpart.name, counterpart.agents.malicious_role) == ("tiny-clean", "clean")
    assert "counterpart" in counterpart.title
    restored = counterpart.model_copy(update={"agents": experiment.agents})
    assert restored.fingerprint(0) == experiment.fingerprint(0)


def test_the_fingerprint_depends_only_on_settings_that_change_results():
    base = load(tiny())
    for equivalent in (
        tiny(name="other"),
        tiny(seeds=[1, 2]),
        tiny(rounds=99),
        tiny(checkpoint_every=7),
        tiny(title="x"),
    ):
        assert load(equivalent).fingerprint(5) == base.fingerprint(5)
    changed = [
        tiny(training={"gamma": 0.06}),
        tiny(algorithm={"alpha": 2.5}),
        tiny(agents={"budget": 2}),
    ]
    changed += [
        tiny(evaluate_every=2),
        tiny(model={"name": "logistic"}),
        tiny(attack={"target": 3}),
    ]
    fingerprints = {load(table).fingerprint(5) for table in changed} | {
        base.fingerprint(5),
        base.fingerprint(6),
    }
    assert len(fingerprints) == len(changed) + 2


def test_explicit_defaults_do_not_change_the_fingerprint():
    assert load(tiny(algorithm={"kappa": 2.0})).fingerprint(0) == load(tiny()).fingerprint(0)
    assert load(tiny(agents={"participation": 1.0})).fingerprint(0) == load(tiny()).fingerprint(0)


WRONG = {
    # change: part of the message
    # Unknown keys in every section, with the most similar key.
    "roundz=3": "there is no key `roundz`. Did you mean `rounds`?",
    "training.lr=1": "there is no key `training.lr`. It is `training.gamma` here",
    "attack.name=none": "there is no attack `none`. To have none, leave it out. Built in: ",
    "agents.bening=3": "there is no key `agents.bening`. Did you mean `agents.benign`?",
    "training.gama=1": "there is no key `training.gama`. Did you mean `training.gamma`?",
    "alpha=5": "there is no key `alpha`. Did you mean `algorithm.alpha`?",
    "agents.hiden=5": "there is no key `agents.hiden`. Did you mean `model.hidden`?",
    "agents.seed=5": "there is no key `agents.seed`. Did you mean `seeds`?",
    "algorithm.alfa=1": "algorithm `fedcb2o` has no parameter `alfa`. Did you mean `alpha`?",
    "algorithm={name='fedcbo',alfa=1}": "algorithm `fedcbo` has no parameter `alfa`. Did you mean `alpha`?",
    "algorithm.criterion={name='class_loss_gap',absnt='zero'}": "has no parameter `absnt`. Did you mean `absent`?",
    "algorithm.criterion={nam='class_loss_gap'}": "the criterion has no `name`",
    "model.hiden=3": "model `mlp` has no parameter `hiden`. Did you mean `hidden`?",
    "data.test_per_clas=3": "data set `digits` has no parameter `test_per_clas`. Did you mean `test_per_class`?",
    "attack.sorce=1": "attack `label_flip` has no parameter `sorce`. Did you mean `source`?",
    "agents.benign.x=3": "`agents.benign`",
    "no.such.key=3": "there is no key `no`",
    # Unknown names.
    "data.name=digit": "there is no data set `digit`. Did you mean `digits`?",
    "model.name=cn": "there is no model `cn`. Did you mean `cnn`?",
    "algorithm.name=fedcb2": "there is no algorithm `fedcb2`. Did you mean `fedcb2o`?",
    "algorithm.criterion=class_los_gap": "there is no criterion `class_los_gap`. Did you mean `class_loss_gap`?",
    "algorithm.selection=prob_samplin": "there is no selection `prob_samplin`. Did you mean `prob_sampling`?",
    "algorithm={name='by_rule', rule='median'}": "there is no rule `median`. Did you mean `geometric_median` or `coordinate_median`?",
    "attack.name=label_flop": "there is no attack `label_flop`. Did you mean `label_flip`?",
    "agents.split=randm": "`agents.split`: input should be 'random', 'stratified' or 'released', got 'randm'",
    "agents.malicious_role=bad": "`agents.malicious_role`: input should be 'attack', 'clean', 'benign' or 'removed'",
    "evaluate_on=train": "`evaluate_on`: input should be 'test', 'tuning' or 'redrawn', got 'train'",
    # Wrong types.
    "rounds=3.5": "`rounds`: input should be a valid integer, got 3.5",
    "rounds=many": "`rounds`: input should be a valid integer, got 'many'",
    "rounds='3'": "`rounds`: input should be a valid integer, got '3'",
    "rounds=true": "`rounds`: input should be a valid integer, got True",
    "seeds=3": "`seeds`: input should be a valid list, got 3",
    "seeds=[true]": "`seeds.0`: input should be a valid integer, got True",
    "name=3": "`name`: input should be a valid string, got 3",
    "name='a/b'": "`name` must have letters, digits, `.`, `_` and `-`",
    "agents=3": "`agents` must be a section, with keys of its own, got 3",
    "model=mlp": "`model` must be a section, with keys of its own (a function of your own: ",
    "agents.hold_out='yes'": "`agents.hold_out`: input should be a valid boolean, got 'yes'",
    "training.gamma='small'": "`training.gamma`: input should be a valid number, got 'small'",
    "training.gamma=true": "`training.gamma`: input should be a valid number, got True",
    "algorithm.alpha='large'": "algorithm `fedcb2o`: `alpha` = 'large': Input should be a valid number",
    "algorithm.alpha=true": "algorithm `fedcb2o`: `alpha` = True: Input should be a valid number",
    "algorithm.name=3": "`algorithm.name` must be the name of a function, ",
    "model.hidden=8": "model `mlp`: `hidden` = 8",
    "attack.source='O'": "attack `label_flip`: `source` = 'O': Input should be a valid integer",
    # Values out of range.
    "rounds=0": "`rounds`: input should be greater than or equal to 1, got 0",
    "seeds=[]": "`seeds`: list should have at least 1 item",
    "seeds=[-1]": "`seeds.0`: input should be greater than or equal to 0, got -1",
    "seeds=[1,1]": "`seeds` must differ, got [1, 1]",
    "agents.num_clusters=0": "`agents.num_clusters`: input should be greater than or equal to 1, got 0",
    "agents.benign=[3, 0]": "`agents.benign` must be a number, or a list of whole numbers from 1 on with one for each",
    "agents={num_clusters=2,benign=3,malicious=[1,1,1],budget=3}": (
        "`agents.malicious` has 3 numbers, and `agents.num_clusters` is 2: give one number for each"
    ),
    'agents.cluster_transform="spin"': "there is no cluster transform `spin`",
    "agents.budget=0": "`agents.budget`: input should be greater than or equal to 1, got 0",
    "agents.budget=6": "`agents.budget` must be between 1 and num_agents - 1 = 5, got 6",
    "agents.participation=0": "`agents.participation`: input should be greater than 0, got 0",
    "agents.participation=1.5": "`agents.participation`: input should be less than or equal to 1, got 1.5",
    "agents.validation=1": "`agents.validation` = 1 leaves nothing to train on: take less, or set `agents.hold_out`",
    "agents.validation=1.5": "`agents.validation`: input should be less than or equal to 1, got 1.5",
    "agents.malicious=-1": "`agents.malicious`: input should be greater than or equal to 0, got -1",
    "training.gamma=-0.1": "`training.gamma`: input should be greater than 0, got -0.1",
    "training.gamma=nan": "`training.gamma`: input should be a finite number, got nan",
    "training.gamma=inf": "`training.gamma`: input should be a finite number, got inf",
    "training.momentum=1": "`training.momentum`: input should be less than 1, got 1",
    "algorithm.alpha=nan": "`alpha` = nan: Input should be a finite number",
    "algorithm.alpha=inf": "`alpha` = inf: Input should be a finite number",
    "algorithm.alpha=-1": "`alpha` must be 0 or more, got -1",
    "algorithm.beta=0": "`beta` must be above 0 and at most 1, got 0",
    "algorithm.beta=1.1": "`beta` must be above 0 and at most 1, got 1.1",
    "algorithm.zeta=0": "`zeta` must be above 0 and at most 1, got 0",
    "algorithm.kappa=-1": "`kappa` must be 0 or more, got -1",
    "algorithm.mixing_factor=2": "`mixing_factor` must be above 0 and at most 1, got 2",
    "algorithm.mixing_factor=0": "`mixing_factor` must be above 0 and at most 1, got 0",
    "algorithm.criterion_from_round=-1": "`criterion_from_round` must be 0 or more, got -1",
    # Settings that need another setting.
    "algorithm.name=by_rule": "algorithm `by_rule` needs the parameter `rule`",
    "agents.malicious_role=benign": "hold no validation data",
}


@pytest.mark.parametrize("change", WRONG)
def test_an_error_names_the_setting_and_a_cure(change):
    key, _, value = change.partition("=")
    with pytest.raises(ConfigError, match=re.escape(WRONG[change])) as caught:
        load(tiny(), {key: parse_value(value)})
    assert "\n" not in str(caught.value)


def test_missing_keys_are_named():
    for key in ("rounds", "data", "agents", "model"):
        table = tiny()
        del table[key]
        with pytest.raises(ConfigError, match=f"the key `{key}` is missing"):
            load(table)
    table = tiny()
    del table["model"]["name"]
    with pytest.raises(ConfigError, match=r"the key `model\.name` is missing"):
        load(table)
    table = tiny()
    del table["attack"]
    message = r"malicious agents that attack need an \[attack\] section"
    with pytest.raises(ConfigError, match=message):
        load(table)


def test_a_consensus_step_above_1_is_refused():
    table = tiny(training={"gamma": 0.2}, algorithm={"name": "fedcbo", "lambda1": 10.0})
    message = r"lambda1 \* gamma must be above 0 and at most 1, got 2: choose a smaller"
    with pytest.raises(ConfigError, match=message):
        load(table)


@pytest.mark.parametrize(("gamma", "factor"), [(0.02, 0.2), (0.1, 1.0), (0.2, 1.0)])
def test_a_consensus_step_is_10_gamma_and_at_most_1(gamma, factor):
    table = tiny(training={"gamma": gamma})
    algorithm = load({**table, "algorithm": {"name": "fedcbo"}}).algorithm.build()
    assert algorithm.factor(gamma) == pytest.approx(factor)


def test_modules_are_looked_for_beside_the_file(tmp_path, monkeypatch):
    table = tiny(algorithm={"name": "fedcb2o", "criterion": "lab_part:criterion"})
    for name in ("beside", "elsewhere"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "lab_part.py").write_text(f"def criterion(inputs):\n    '''{name}'''\n")
        (folder / "lab.toml").write_text(tomli_w.dumps(table))
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "lab_part", raising=False)

    load(tmp_path / "beside/lab.toml")
    assert sys.modules["lab_part"].criterion.__doc__ == "beside"
    # The same name in another folder would silently be the function of the first.
    message = "elsewhere/lab_part.py, but this process has imported .*beside/lab_part.py"
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "elsewhere/lab.toml")
    del sys.modules["lab_part"]


def test_a_recorded_configuration_imports_nothing_from_its_folder(tmp_path, monkeypatch):
    table = tiny(algorithm={"name": "fedcb2o", "criterion": "other_part:criterion"})
    (tmp_path / "other_part.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "config.toml").write_text(tomli_w.dumps(table))
    monkeypatch.setattr("sys.path", [*sys.path])
    with pytest.raises(ConfigError, match="No module named 'other_part'"):
        load(tmp_path / "config.toml")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("rounds", np.int64(2), 2),
        ("rounds", np.array(2), 2),
        ("seeds", np.arange(2), (0, 1)),
        ("seeds", list(np.arange(2)), (0, 1)),
        ("seeds", torch.arange(2), (0, 1)),
        ("seeds", (torch.tensor(3), np.uint8(1)), (3, 1)),
        ("seeds", range(2), (0, 1)),
        ("seeds", [2**63 - 1], (2**63 - 1,)),
        ("title", np.str_("t"), "t"),
        ("agents.benign", np.int32(4), 4),
        ("agents.hold_out", np.bool_(False), False),
        ("training.gamma", np.float32(0.5), 0.5),
        ("training.batch_size", torch.tensor(16), 16),
        ("algorithm.alpha", np.float32(2.5), 2.5),
        ("algorithm.beta", torch.tensor(0.5), 0.5),
        ("attack.source", np.int64(3), 3),
        ("attack.from_round", np.array(1), 1),
    ],
)
def test_numpy_and_torch_numbers_are_converted(key, value, expected):
    settings = load("digits-fedassay", {key: value}).settings()
    section, _, name = key.rpartition(".")
    actual = (settings[section] if section else settings)[name]
    converted = list(expected) if isinstance(expected, tuple) else expected
    assert actual == converted
    assert type(actual) is type(converted)


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        ([0, 2**63], "`seeds.1`: input should be less than 9223372036854775808"),
        ([-1], "`seeds.0`: input should be greater than or equal to 0, got -1"),
        ([np.int64(-1)], "`seeds.0`: input should be greater than or equal to 0, got -1"),
        ([1.0], "`seeds.0`: input should be a valid integer, got 1.0"),
        (np.arange(2.0), "`seeds.0`: input should be a valid integer, got 0.0"),
        (np.array([1, 1]), r"`seeds` must differ, got \[1, 1\]"),
        (np.int64(3), "`seeds`: input should be a valid list, got 3"),
        ([Fraction(1)], "`seeds.0`: input should be a valid integer, got a Fraction"),
    ],
)
def test_invalid_seeds_are_refused(seeds, message):
    with pytest.raises(ConfigError, match=message):
        load("digits-fedassay", {"seeds": seeds})


def test_sections_in_python_convert_numpy_and_torch_numbers():
    agents = AgentsSection(benign=np.int64(3), malicious=np.int8(0), budget=torch.tensor(2))
    assert (agents.benign, agents.malicious, agents.budget) == (3, 0, 2)
    assert type(agents.benign) is int


def test_parameters_of_a_user_function_may_be_arrays_and_paths():
    def network(shape, classes, *, widths: np.ndarray, rates: list[float], path: Path, free):
        """Return a network."""

    rates = np.array([0.5, 1.0])
    parameters = {"widths": np.arange(2), "rates": rates, "path": Path("x"), "free": rates}
    experiment = load("digits-fedassay", {"model": {"name": network, **parameters}})
    bound = experiment.resolved.model.keywords
    assert isinstance(bound["widths"], np.ndarray)
    assert bound["rates"] == [0.5, 1.0]
    assert bound["path"] == Path("x")
    assert bound["free"] is rates
    assert experiment.settings()["model"]["path"] == "x"


def test_a_file_name_is_converted_to_a_valid_run_name(tmp_path):
    table = {key: value for key, value in tiny().items() if key != "name"}
    path = tmp_path / "my experiment (2).toml"
    path.write_text(tomli_w.dumps(table))
    experiment = load(path)
    assert (experiment.name, experiment.title) == ("my-experiment-2-", "my experiment (2)")
    (tmp_path / "\u540d.toml").write_text(tomli_w.dumps(table))
    with pytest.raises(ConfigError, match="give the key `name`"):
        load(tmp_path / "\u540d.toml")
    with pytest.raises(ConfigError, match=r"`name` must have letters, digits, .* got 'a b'"):
        load(tiny(name="a b"))


@pytest.mark.parametrize(
    ("labels", "source", "note"),
    [
        (np.arange(1, 11), 9, "`attack.source` = 9 is the class called '10'"),
        (np.array(list("abcdefghij")), 9, ""),
        (np.arange(10), 9, ""),
        (np.array(["4", *"abcdefghi"]), 9, "`attack.target` = 4 is the class called 'd'"),
    ],
)
def test_a_note_names_the_attacked_class_if_its_label_is_another_number(
    caplog, labels, source, note
):
    data = dataset(np.eye(20), np.tile(np.sort(labels), 2))
    check_attack_goal(load("digits-fedassay", {"attack.source": source}), data)
    assert note in caplog.text
    assert bool(caplog.text) == bool(note)


def test_a_label_instead_of_a_class_number_is_refused():
    data = dataset(np.eye(20), np.tile(np.arange(1, 11), 2))
    with pytest.raises(ConfigError, match="got 10: the class called 10 is 9"):
        check_attack_goal(load("digits-fedassay", {"attack.source": 10}), data)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("algorithm.guards.max_distanc", "Did you mean `algorithm.guards.max_distance`"),
        ("algorithm.guards.max_distance", "`algorithm.guards.max_distance`: input should be great"),
        ("algorithm.max_distance", "is a guard: write `algorithm.guards.max_distance`"),
    ],
)
def test_errors_name_a_guard_by_its_key(key, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load("digits-fedassay", {key: -1.0})

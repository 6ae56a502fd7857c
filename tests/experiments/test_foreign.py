"""Files of ByzFL and FLPoison as grids: conversion by hand, unknown names, and a run."""

import copy
import dataclasses
import functools
import json

import numpy as np
import pytest
import torch
from tests.tiny import cells_in_this_process, run_cli

import fedcb2o
from fedcb2o.aggregators.server import ALGORITHM
from fedcb2o.errors import ConfigError
from fedcb2o.experiments.foreign import flpoison, read_grid_table
from fedcb2o.experiments.foreign.parts import network, similarity
from fedcb2o.experiments.grid import load_grid
from fedcb2o.report import read_grid, report_grid
from fedcb2o.report._worst_attack import worst_attack_maps

PARTS = "fedcb2o.experiments.foreign.parts"

# The keys and values of the file that ByzFL 0.0.11 writes where there is none, with fewer entries.
BYZFL = {
    "benchmark_config": {
        "training_algorithm": {"name": "DSGD", "parameters": {}},
        "nb_steps": 800,
        "device": "cuda",
        "training_seed": 3,
        "nb_training_seeds": 2,
        "nb_honest_clients": 10,
        "f": [1, 2],
        "data_distribution_seed": 0,
        "nb_data_distribution_seeds": 1,
        "data_distribution": [
            {"name": "gamma_similarity_niid", "distribution_parameter": [1.0, 0.33]}
        ],
    },
    "model": {
        "name": "cnn_mnist",
        "dataset_name": "mnist",
        "nb_labels": 10,
        "loss": "NLLLoss",
        "learning_rate": 0.1,
        "learning_rate_decay": 0.5,
        "milestones": [100, 200],
    },
    "aggregator": [
        {"name": "GeometricMedian", "parameters": {"nu": 0.1, "T": 3}},
        {"name": "TrMean", "parameters": {}},
    ],
    "pre_aggregators": [
        {"name": "Clipping", "parameters": {}},
        {"name": "NNM", "parameters": {}},
    ],
    "honest_clients": {"momentum": 0.9, "weight_decay": 0.0001, "batch_size": 25},
    "attack": [
        {"name": "SignFlipping", "parameters": {}},
        {"name": "Optimal_ALittleIsEnough", "parameters": {"evals": 5}},
    ],
    "evaluation_and_results": {
        "evaluation_delta": 50,
        "batch_size_evaluation": 128,
        "evaluate_on_test": True,
        "results_directory": "./results",
    },
}

FLPOISON = """
seed: 4
epochs: 60
algorithm: FedSGD
optimizer: SGD
momentum: 0.9
weight_decay: 5.0e-4
num_clients: 20
batch_size: 64
learning_rate: 0.01
model: lenet
dataset: FashionMNIST
distribution: non-iid
dirichlet_alpha: 0.5
num_adv: 0.3
attack: NoAttack
defense: Mean
attacks:
    - attack: NoAttack
    - attack: IPM
      attack_params:
          scaling_factor: 0.5
          attack_start_epoch: 11
    - attack: LabelFlipping
      attack_params: {attack_model: all2one}
    - attack: ModelReplacement
      attack_params: {scaling_factor: 20, alpha: 0.5, target_label: 7}
    - attack: AlterMin
defenses:
    - defense: Mean
    - defense: TrimmedMean
      defense_params: {beta: 0.1}
    - defense: MultiKrum
      defense_params: {avg_percentage: 0.2, enable_check: false}
    - defense: Bucketing
      defense_params: {bucket_size: 2, selected_aggregator: RFA}
    - defense: NormClipping
      defense_params: {weakDP: true}
    - defense: FLAME
"""


def byzfl(tmp_path, **changes):
    """Return the table of ByzFL's file with changes by dotted key."""
    config = copy.deepcopy(BYZFL)
    for key, value in changes.items():
        *path, last = key.split("__")
        functools.reduce(dict.__getitem__, path, config)[last] = value
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return read_grid_table(path)


def test_byzfl_by_hand(tmp_path):
    table = byzfl(tmp_path)
    assert table["seeds"] == [3, 4]
    assert (table["rounds"], table["evaluate_every"]) == (800, 50)
    assert table["training"] == {
        "gamma": 0.1,
        "momentum": 0.0,
        "local_steps": 1,
        "schedule": {"name": "MultiStepLR", "milestones": [100, 200], "gamma": 0.5},
    }
    names = ["f = 1, similarity 1.0", "f = 1, similarity 0.33"]
    names += ["f = 2, similarity 1.0", "f = 2, similarity 0.33"]
    assert list(table["settings"]) == names
    # 80% of 60,000 images for ten clients.
    assert table["settings"]["f = 2, similarity 0.33"] == {
        "agents": {
            "benign": 10,
            "malicious": 2,
            "benign_samples": 4800,
            "malicious_samples": 1,
            "skew": {"name": f"{PARTS}:similarity", "share": 0.33, "agents": 10},
        },
        "algorithm": {"name": ALGORITHM, "f": 2},
    }
    assert table["defences"]["GeometricMedian after Clipping, NNM"] == {
        "algorithm": {
            "name": ALGORITHM,
            "sent": "gradients",
            "aggregator": {"name": "GeometricMedian", "nu": 0.1, "T": 3},
            "pre_aggregators": [{"name": "Clipping"}, {"name": "NNM"}],
            "momentum": 0.9,
            "dampening": 0.9,
            "weight_decay": 0.0001,
        },
        "training": {"gamma": 0.1, "batch_size": 25},
    }
    assert list(table["defences"])[1] == "TrMean after Clipping, NNM"
    # Its deviations are those of gradients, the opposite ones of models.
    search = {"name": "optimal_alie", "rule": "server", "correction": 1}
    search |= {"step": -10.0, "evaluations": 5}
    assert table["attacks"] == {
        "SignFlipping": {"attack": {"name": "ipm", "eps": 1.0}},
        "Optimal_ALittleIsEnough": {"attack": search},
    }
    assert table["description"] == "Converted from ByzFL's config.json."


def test_every_cell_of_a_file_is_checked(tmp_path):
    byzfl(tmp_path)
    grid = load_grid(tmp_path / "config.json", {"rounds": 5})
    # Four settings, two defences, two attacks; a baseline for each setting and defence.
    assert len(grid.cells()) == 4 * 2 * (2 + 1)
    cell = grid.experiment("f = 2, similarity 1.0", "TrMean after Clipping, NNM", "SignFlipping")
    assert cell.rounds == 5
    assert cell.resolved.algorithm.server.momentum == 0.9


def test_byzfl_runs_the_combinations_of_lists(tmp_path):
    table = byzfl(
        tmp_path,
        model__learning_rate=[0.1, 0.2],
        pre_aggregators=[[{"name": "NNM"}], []],
        aggregator={"name": "CenteredClipping", "parameters": {"tau": [1.0, 10.0]}},
        attack={"name": "InnerProductManipulation", "parameters": {"tau": [0.5, 3.0]}},
    )
    assert len(table["defences"]) == 2 * 2 * 2
    name = "CenteredClipping after NNM, tau 10.0, lr 0.2, momentum 0.9, decay 0.0001"
    algorithm = table["defences"][name]["algorithm"]
    assert algorithm["aggregator"] == {"name": "CenteredClipping", "tau": 10.0}
    assert table["defences"][name]["training"]["gamma"] == 0.2
    assert table["attacks"] == {
        "InnerProductManipulation, tau 0.5": {"attack": {"name": "ipm", "eps": 0.5}},
        "InnerProductManipulation, tau 3.0": {"attack": {"name": "ipm", "eps": 3.0}},
    }
    assert "each choice of hyperparameters is a defence" in table["description"]


def test_byzfl_numbers_of_clients(tmp_path):
    table = byzfl(
        tmp_path,
        benchmark_config__tolerated_f=[1, 3],
        benchmark_config__set_honest_clients_as_clients=True,
        benchmark_config__data_distribution=[
            {"name": "dirichlet_niid", "distribution_parameter": 0.5}
        ],
    )
    # ByzFL leaves out settings with more attackers than it tolerates.
    names = ["f = 1, Dirichlet 0.5", "f = 1 of 3, Dirichlet 0.5", "f = 2 of 3, Dirichlet 0.5"]
    assert list(table["settings"]) == names
    last = table["settings"][names[2]]
    assert (last["agents"]["benign"], last["agents"]["malicious"]) == (8, 2)
    assert last["algorithm"]["f"] == 3
    assert last["agents"]["skew"] == {"name": "dirichlet", "concentration": 5.0}


def test_byzfl_averages_models(tmp_path):
    parameters = {"proportion_selected_clients": 0.6, "local_steps_per_client": 5}
    training = {"name": "FedAvg", "parameters": parameters}
    table = byzfl(tmp_path, benchmark_config__training_algorithm=training)
    assert table["training"] == {"gamma": 0.1, "momentum": 0.0, "local_steps": 5}
    assert table["agents"]["participation"] == 0.6
    algorithm = table["defences"]["TrMean after Clipping, NNM"]["algorithm"]
    assert (algorithm["sent"], algorithm["momentum"]) == ("models", 0.0)
    assert algorithm["weight_decay"] == pytest.approx(5e-4)


def test_parts_that_are_not_here_are_listed(tmp_path, caplog):
    table = byzfl(
        tmp_path,
        aggregator=[{"name": "TrMean"}, {"name": "Phocas"}],
        attack=[{"name": "SignFlipping"}, {"name": "Backdoor"}, {"name": "LabelFlipping"}],
    )
    missing = "Not here: attack Backdoor; aggregator Phocas."
    assert missing in table["description"]
    assert missing in caplog.text
    assert "Different: LabelFlipping flips labels of attackers' own samples." in caplog.text
    assert list(table["defences"]) == ["TrMean after Clipping, NNM"]
    assert list(table["attacks"]) == ["SignFlipping", "LabelFlipping"]
    # Attackers that train have samples: 60,000 images for twelve agents.
    assert table["settings"]["f = 2, similarity 1.0"]["agents"]["malicious_samples"] == 4800


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attack": [{"name": "Backdoor"}]}, "nothing is left to run. Not here: attack Backdoor"),
        ({"model__dataset_name": "imagenet"}, "Not here: data set imagenet"),
        ({"benchmark_config": {"nb_steps": 1}}, "as a file of ByzFL: KeyError: 'f'"),
    ],
)
def test_files_with_nothing_to_run(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        byzfl(tmp_path, **changes)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("other.json", '{"a": 1}', "lacks the key `benchmark_config` of ByzFL or `defenses`"),
        ("list.json", "[1]", "lacks the key"),
        ("broken.json", "{", "cannot read .*broken.json: Expecting property name"),
        ("broken.yaml", "a: [", "cannot read .*broken.yaml: while parsing a flow"),
        ("missing.yml", None, "cannot read .*missing.yml"),
    ],
)
def test_other_files(tmp_path, name, text, message):
    pytest.importorskip("yaml")
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_grid(path)


def test_flpoison_by_hand(tmp_path):
    pytest.importorskip("yaml")
    path = tmp_path / "FedSGD_config.yaml"
    path.write_text(FLPOISON)
    table = read_grid_table(path)
    # 30% of 20 clients attack; 60,000 images for 20 clients.
    assert {key: table["agents"][key] for key in ("benign", "malicious", "benign_samples")} == {
        "benign": 14,
        "malicious": 6,
        "benign_samples": 3000,
    }
    assert (table["rounds"], table["evaluate_every"], table["seeds"]) == (60, 2, [4])
    assert table["algorithm"]["sent"] == "updates"
    assert table["algorithm"]["momentum"] == 0.9
    # A decay that the momentum sums up: 1 / (1 - 0.9) times as large.
    assert table["algorithm"]["weight_decay"] == pytest.approx(5e-3)
    backdoor = {"name": "backdoor", "target": 7, "share": 0.32, "size": 5}
    assert table["attacks"] == {
        "NoAttack": {"agents": {"malicious_role": "clean"}},
        "IPM": {"attack": {"name": "ipm", "eps": 0.5, "from_round": 11}},
        "ModelReplacement": {"attack": {"name": "boosting", "factor": 20, "data": backdoor}},
    }
    chosen = {name: entry["algorithm"] for name, entry in table["defences"].items()}
    assert list(chosen) == ["Mean", "TrimmedMean", "MultiKrum", "Bucketing"]
    assert chosen["TrimmedMean"]["f"] == 2
    assert chosen["MultiKrum"]["aggregator"]["selected"] == 4
    assert chosen["Bucketing"]["pre_aggregators"] == [{"name": "Bucketing", "s": 2}]
    assert chosen["Bucketing"]["aggregator"]["name"] == "GeometricMedian"
    listed = (
        "attack LabelFlipping (all2one); parameter of ModelReplacement: alpha; attack AlterMin; "
    )
    listed += "defense NormClipping with noise; defense FLAME."
    assert listed in table["description"]
    # Three attacks; IPM shares the baseline of the backdoor.
    assert len(load_grid(path, {"rounds": 2}).cells()) == 4 * (3 + 1)


def test_flpoison_local_steps_begin_a_new_momentum():
    yaml = pytest.importorskip("yaml")
    config = {**yaml.safe_load(FLPOISON), "algorithm": "FedAvg", "local_epochs": 2}
    table = flpoison.convert(config).table
    assert table["training"]["momentum"] == 0.9
    assert (table["algorithm"]["momentum"], table["algorithm"]["sent"]) == (0.0, "models")
    # Steps of 1 and of 1 + 0.9 gradients.
    assert table["algorithm"]["weight_decay"] == pytest.approx(5e-4 * 2.9)


def test_similarity_by_hand():
    labels = np.array([2, 0, 1, 0, 2, 1, 0, 1, 2, 0])
    sizes = np.array([4, 4, 2])
    agents = similarity(labels, sizes, np.random.default_rng(0), share=0.5, agents=2)
    # Two random samples of each of the first two agents, and both of the third one.
    assert agents[:6].tolist() == [0, 0, 1, 1, 2, 2]
    # The others by label: 0, 0, 1, 2.
    assert agents[6:].tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("kind", "shape", "count"),
    [
        ("cnn_mnist", (1, 28, 28), 20 * 26 + 50 * 501 + 500 * 801 + 10 * 501),
        ("fc_mnist", (1, 28, 28), 100 * 785 + 10 * 101),
        ("lenet", (1, 28, 28), 6 * 26 + 16 * 151 + 120 * 401 + 84 * 121 + 10 * 85),
    ],
)
def test_networks_have_the_numbers_of_the_others(kind, shape, count):
    module = network(shape, 10, kind=kind, mean=[0.5], std=[0.25])
    assert sum(p.numel() for p in module.parameters()) == count
    assert module[0](torch.full((1, *shape), 0.75)).unique().tolist() == [1.0]
    assert module(torch.zeros(2, *shape)).shape == (2, 10)


def test_a_heat_map_of_a_run(tmp_path):
    table = byzfl(
        tmp_path,
        benchmark_config__nb_steps=4,
        benchmark_config__nb_training_seeds=1,
        benchmark_config__nb_honest_clients=3,
        benchmark_config__f=2,
        evaluation_and_results__evaluation_delta=2,
        model__name="fc_mnist",
        model__milestones=[],
        aggregator=[{"name": "Average"}, {"name": "TrMean"}],
    )
    for setting in table["settings"].values():
        setting["agents"]["benign_samples"] = 40
    grid = {**table, "data": {"name": "digits"}}
    with cells_in_this_process():
        done = fedcb2o.bench(grid, out=tmp_path / "grid", jobs=1)
    assert not done.failed
    results = read_grid(done.folder)
    maps = worst_attack_maps(results)
    assert list(maps) == [
        "Average after Clipping, NNM",
        "TrMean after Clipping, NNM",
        "Best defence",
    ]

    curves = results.curves
    assert list(maps[next(iter(maps))].index) == ["similarity 1.0", "similarity 0.33"]
    cell = curves[(curves.setting == "f = 2, similarity 0.33") & (curves.role == "attack")]
    for name in list(maps)[:2]:
        own = cell[cell.defence == name]
        assert sorted(own["round"].unique()) == [2, 4]
        worst = min(own[own.attack == attack].accuracy.max() for attack in table["attacks"])
        assert maps[name].at["similarity 0.33", "f = 2"] == pytest.approx(worst)
    stacked = np.stack([maps[name] for name in list(maps)[:2]])
    assert maps["Best defence"].to_numpy() == pytest.approx(stacked.max(0))

    # An attack that has not finished, and settings that are no table.
    partial = curves[(curves.attack != "SignFlipping") | (curves.setting != cell.setting.iloc[0])]
    unknown = worst_attack_maps(dataclasses.replace(results, curves=partial))
    assert unknown["Best defence"].isna().to_numpy().tolist() == [[False], [True]]
    renamed = {**results.table, "settings": {"one": {}, "two": {}}}
    assert worst_attack_maps(dataclasses.replace(results, table=renamed)) == {}

    paths = report_grid(results, tmp_path / "report")
    written = {path.name for path in paths if path.parent.name == "worst-attack"}
    stems = ("average-after-clipping-nnm", "trmean-after-clipping-nnm", "best-defence")
    assert written == {f"{stem}.{end}" for stem in stems for end in ("png", "pdf", "csv")}


def test_the_command_names_missing_parts(tmp_path):
    byzfl(tmp_path, attack=[{"name": "SignFlipping"}, {"name": "Backdoor"}])
    out = run_cli(
        "bench", tmp_path / "config.json", "--out", tmp_path / "grid", "--data-dir", tmp_path
    )
    # The data set is checked before anything runs.
    assert out.status == 2
    assert "Not here: attack Backdoor." in out.err
    assert "fedcb2o data mnist" in out.err

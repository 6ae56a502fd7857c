"""Whole runs, from the file to the records, compared with plain loops (`tests/whole.py`).

Models are not synchronised between rounds, so that an error in any step affects all later rounds.
Both sides sum in a different order. In a smooth network the difference stays a rounding error. In
a network with ReLU it may grow: plain loops that start 1e-7 apart may differ by 1e-3 after four
rounds. Therefore the tolerance depends on the network.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

import fedcb2o
from tests.whole import RoundResult, WholeRun, turned

SEED = 1000


@dataclass(frozen=True)
class Tolerances:
    """Tolerances of the comparison; records have weights with 6 digits."""

    relative: float  # of losses, likelihoods and models; for models also absolute
    weight: float  # absolute
    margin: float  # logits that are closer may change their order


SMOOTH = Tolerances(relative=3e-6, weight=1e-5, margin=1e-4)
RELU = Tolerances(relative=2e-2, weight=2e-2, margin=5e-2)

BASE: dict[str, Any] = {
    "name": "whole",
    "seeds": [SEED],
    "rounds": 3,
    "data": {"name": "digits"},
    "agents": {
        "benign": 3,
        "malicious": 2,
        "benign_samples": 50,
        "malicious_samples": 75,
        "validation": 0.4,
        "budget": 4,
    },
    "model": {"name": "tests.whole:smooth_mlp"},
    "training": {"gamma": 0.1, "momentum": 0.5, "batch_size": 8, "local_epochs": 1},
    "algorithm": {"name": "fedcb2o"},
    "attack": {"name": "label_flip", "source": 9, "target": 4},
}
PAPER = {"split": "random", "validation_loss": "samples", "colluders_own_model": False}
RELEASED = {"split": "released", "validation_loss": "batches", "colluders_own_model": True}
MIXED = {"own_model": "trusted", "mixing_factor": 1.0}
FEW = {"benign": 2, "malicious": 1, "budget": 3}
CNN = {"name": "tests.whole:smooth_cnn"}
FAST = {"gamma": 0.15, "momentum": 0.7, "batch_size": 8, "local_epochs": 2}

CASES: dict[str, dict[str, Any]] = {
    "FedCB2O as in the paper": {"agents": PAPER},
    "FedCB2O as released": {
        "agents": {**RELEASED, "validation": 0.3},
        "algorithm": {
            **{
                "name": "fedcb2o",
                "criterion": {"name": "class_loss_gap", "absent": "zero"},
                "alpha": 2.0,
            },
            **{
                "own_model": "trusted",
                "own_candidate": True,
                "first_contact": "whole",
                "own_likelihood": "every_round",
                "mixing_factor": 1.0,
            },
        },
    },
    "FedCBO as in the paper": {"agents": PAPER, "algorithm": {"name": "fedcbo", "lambda1": 4.0}},
    "T_G inside the run, sleepers": {
        "rounds": 5,
        "algorithm": {"name": "fedcb2o", "criterion_from_round": 3, "alpha": 2.0, **MIXED},
        "attack": {"name": "label_flip", "source": 9, "target": 4, "from_round": 2},
    },
    "DFedAvgM": {"algorithm": {"name": "dfedavgm"}},
    "Oracle Min": {
        "agents": {"num_clusters": 1, "malicious_role": "removed", "benign": 5},
        "algorithm": {"name": "dfedavgm"},
    },
    "Oracle Max": {
        "agents": {"num_clusters": 1, "malicious_role": "benign"},
        "algorithm": {"name": "dfedavgm"},
    },
    "Oracle Max, nothing held out": {
        "agents": {"num_clusters": 1, "malicious_role": "benign", "hold_out": False},
        "algorithm": {"name": "dfedavgm"},
    },
    "clean twin": {
        "agents": {"malicious_role": "clean"},
        "algorithm": {"name": "fedcb2o", **MIXED},
    },
    "attackers removed from both clusters": {"agents": {"malicious_role": "removed", "benign": 4}},
    "some offline": {"agents": {"participation": 0.6}, "algorithm": {"name": "fedcb2o", **MIXED}},
    "four clusters, stratified, tuning images": {
        "rounds": 5,  # the last one is evaluated too
        "agents": {"num_clusters": 4, "benign": 2, "malicious": 1, "split": "stratified"},
        "evaluate_on": "tuning",
        "evaluate_every": 2,
    },
    "three clusters of unequal size": {
        "agents": {
            **{"num_clusters": 3, "benign": [4, 2, 1], "malicious": [2, 1, 0]},
            "cluster_transform": {"name": "rotation", "angles": [0, 90, 270]},
        },
        "algorithm": {"name": "fedcb2o", **MIXED},
    },
    "clusters of other labels, attackers removed from one": {
        "agents": {
            **{"num_clusters": 3, "benign": [2, 3, 2], "malicious": [0, 2, 1]},
            **{"malicious_role": "removed", "cluster_transform": "permute_labels"},
        },
        "algorithm": {"name": "fedcb2o", **MIXED},
    },
    "test images of its own": {"evaluate_on": "redrawn"},
    "each its own first model, momentum 0.9": {
        "agents": {"initialisation": "independent"},
        "training": {"gamma": 0.05, "batch_size": 8, "local_epochs": 2},
    },
    "CNN, T_G, mixed whole": {
        "model": CNN,
        "agents": FEW,
        "training": FAST,
        "algorithm": {"name": "fedcb2o", "criterion_from_round": 2, **MIXED},
    },
    "guards, with a sub-level set": {
        "rounds": 5,
        "algorithm": {
            "name": "fedcb2o",
            "beta": 0.5,
            "alpha": 2.0,
            "own_model": "judged",
            "mixing_factor": 1.0,
            "guards": {"newcomer_share": 0.3, "interpolation": 0.5, "loss_tolerance": 1.0},
        },
    },
}
BUILT_IN: dict[str, dict[str, Any]] = {
    "MLP": {"model": {"name": "mlp", "hidden": [12]}, "agents": PAPER},
    "CNN, mixed whole": {
        "rounds": 3,
        "model": {"name": "cnn", "hidden": 16, "dense_activation": "none"},
        "agents": FEW,
        "algorithm": {"name": "fedcb2o", **MIXED},
    },
}


def write(path: Path, changes: dict[str, Any]) -> Path:
    """Write the base experiment with changed keys of `agents` and changed sections."""
    table = {**BASE, **changes, "agents": {**BASE["agents"], **changes.get("agents", {})}}
    path.write_text(tomli_w.dumps(table), encoding="utf-8")
    return path


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_a_run_equals_plain_loops_from_the_file_to_its_scores(changes, tmp_path):
    check_run(changes, tmp_path, SMOOTH)


@pytest.mark.parametrize("changes", BUILT_IN.values(), ids=BUILT_IN.keys())
def test_a_run_of_a_built_in_network_equals_plain_loops(changes, tmp_path):
    check_run(changes, tmp_path, RELU)


def check_run(changes: dict[str, Any], tmp_path: Path, tolerances: Tolerances) -> None:
    path = write(tmp_path / "whole.toml", changes)
    folder = fedcb2o.run(path, out=tmp_path / "run", workers=1).folder / f"seed-{SEED}"
    whole = WholeRun(path, SEED, margin=tolerances.margin)
    check_population(whole, json.loads((folder / "agents.json").read_text()))
    records = list(zip(lines(folder, "metrics"), lines(folder, "pairs"), strict=True))
    assert len(records) == whole.settings["rounds"]
    for done, (metrics, pairs) in zip(whole.rounds(), records, strict=True):
        check_decisions(done, pairs, tolerances)
        check_metrics(whole, done, metrics, tolerances)
        check_scores(whole, done, metrics)
    check_state(whole, load_file(folder / "checkpoint.safetensors"), tolerances)


def check_population(whole: WholeRun, about: dict[str, Any]) -> None:
    shares, y = whole.shares, whole.dataset.pool.y
    source, agents = whole.settings["attack"]["source"], whole.settings["agents"]
    K = agents["num_clusters"]
    transform = agents.get("cluster_transform", {"angles": [k * 360 / K for k in range(K)]})
    if transform == "permute_labels":
        assert "angles" not in about
    else:
        assert about["angles"] == transform["angles"]
    assert about["cluster"] == [share.cluster for share in shares]
    assert about["malicious"] == [share.malicious for share in shares]
    assert about["num_samples"] == [len(share.train) for share in shares]
    shift = [share.cluster * (transform == "permute_labels") for share in shares]
    source_counts = [
        sum((int(y[i]) + k) % 10 == source for i in share.validation)
        for share, k in zip(shares, shift, strict=True)
    ]
    expected = [
        None if share.malicious else count
        for share, count in zip(shares, source_counts, strict=True)
    ]
    assert about["source_in_validation"] == expected


def check_decisions(done: RoundResult, pairs: dict[str, Any], tolerances: Tolerances) -> None:
    assert pairs["round"] == done.n + 1
    assert pairs["asked"] == [info.asked for info in done.infos], done.n
    assert pairs["ids"] == [info.received for info in done.infos], done.n
    for j, info in enumerate(done.infos):
        weights = dict.fromkeys(info.weights, 0.0)
        for i, weight in zip(pairs["ids"][j], pairs["weights"][j], strict=True):
            weights[i] += weight
        weights[j] += pairs["own"][j]
        if sum(weights.values()) == 0:  # the agent kept its model
            weights[j] = 1.0
        assert weights == pytest.approx(info.weights, rel=0, abs=tolerances.weight), (done.n, j)


def check_metrics(
    whole: WholeRun, done: RoundResult, metrics: dict[str, Any], tolerances: Tolerances
) -> None:
    expected: dict[str, list[float | None]] = {"validation_loss": [], "malicious_weight": []}
    for j, (agent, info) in enumerate(zip(whole.agents, done.infos, strict=True)):
        expected["validation_loss"].append(info.losses[j].mean if info.losses else None)
        weight = sum(weight for i, weight in info.weights.items() if whole.agents[i].malicious)
        expected["malicious_weight"].append(None if agent.malicious else weight)
    assert metrics["round"] == done.n + 1
    assert metrics["answered"] == [len(info.received) for info in done.infos]
    assert metrics["train_loss"] == pytest.approx(done.train_loss, rel=tolerances.relative), done.n
    for name, allowed in (
        ("validation_loss", {"rel": tolerances.relative}),
        ("malicious_weight", {"rel": 0, "abs": tolerances.weight}),
    ):
        assert numbers(metrics[name]) == pytest.approx(
            numbers(expected[name]), nan_ok=True, **allowed
        ), (done.n, name)


def numbers(values: list[float | None]) -> list[float]:
    """Replace None by NaN, which pytest can compare."""
    return [math.nan if value is None else value for value in values]


def check_scores(whole: WholeRun, done: RoundResult, metrics: dict[str, Any]) -> None:
    for name, uncertainty in (
        ("accuracy", "unsure"),
        ("source_accuracy", "source_unsure"),
        ("attack_success_rate", "source_unsure"),
    ):
        assert (name in metrics) == (done.scores is not None)
        for j in range(len(whole.agents)) if done.scores is not None else ():
            score, value = done.scores.get(j), metrics[name][j]
            if score is None:
                assert value is None
            else:
                allowed = getattr(score, uncertainty) + 1e-12
                assert value == pytest.approx(getattr(score, name), rel=0, abs=allowed), (
                    done.n,
                    name,
                    j,
                )


def check_state(whole: WholeRun, state: dict[str, torch.Tensor], tolerances: Tolerances) -> None:
    start = 0
    for j, agent in enumerate(whole.agents):
        theta = torch.cat([p.detach().flatten() for p in agent.module.parameters()])
        result = state["models"][j, : len(theta)]
        torch.testing.assert_close(
            result, theta, rtol=tolerances.relative, atol=tolerances.relative
        )
        ids, likelihood = (
            state[key][start : start + int(state["met"][j])] for key in ("ids", "likelihood")
        )
        start += len(ids)
        if agent.algorithm.selection == "prob_sampling":
            assert set(ids.tolist()) == agent.met
            answered = {
                i: P for i, P in zip(ids.tolist(), likelihood.tolist(), strict=True) if P == P
            }
            assert answered == pytest.approx(agent.P, rel=tolerances.relative, abs=0)
    assert start == len(state["ids"])


def test_a_rotation_by_hand():
    # counter-clockwise: the right column becomes the top row
    x = torch.tensor([[[[1, 2], [3, 4]]]])
    assert turned(x, 1).tolist() == [[[[2, 4], [1, 3]]]]
    assert turned(x, 2).tolist() == [[[[4, 3], [2, 1]]]]
    assert turned(x, 0) is x

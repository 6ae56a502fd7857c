"""Robustness under noise, and membership inference by method: the tables of docs/privacy.md.

    python benchmarks/privacy.py             # the runs; goes on where privacy.csv stops
    python benchmarks/privacy.py --tables    # prints the tables

Seven agents on digits, two of which flip 9 to 4 where they attack. `rmia` is the stronger attack
(Zarifzadeh et al., 2024, offline): the confidence of the target relative to that of models that
were trained alone, without the sample, in runs of other seeds.
"""

import argparse
import csv
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import fedcb2o
from fedcb2o.data import Shard
from fedcb2o.experiments import load
from fedcb2o.experiments.runs._trained_models import _restore_agents
from fedcb2o.federated.evaluation.membership import (
    attack_auc,
    leakage,
    sample_losses,
    true_positive_rate,
)
from fedcb2o.federated.local_update import local_update_
from fedcb2o.federated.privacy import noise_multiplier
from fedcb2o.records import last_round
from fedcb2o.rng import stream

VALUES = Path(__file__).with_suffix(".csv")
SEEDS = (0, 1, 2)
SHADOW_SEEDS = (100, 101, 102)
EPSILONS = (None, 32.0, 8.0, 2.0)
METHODS: dict[str, dict[str, Any]] = {
    "FedAssay": {"name": "fedassay"},
    "FedCB2O": {"name": "fedcb2o", "mixing_factor": 1.0},
    "DFedAvgM": {"name": "dfedavgm"},
    "Krum": {"name": "by_rule", "rule": "krum"},
    "trimmed mean": {"name": "by_rule", "rule": "trimmed_mean"},
}
LOCAL = {"name": "local_training"}
_SCALE = 0.3  # `a` of offline RMIA
BASE: dict[str, Any] = {
    "name": "privacy",
    "rounds": 12,
    "evaluate_every": 12,
    "checkpoint_every": 12,
    "data": {"name": "digits"},
    "agents": {
        "num_clusters": 1,
        "benign": 5,
        "malicious": 2,
        "benign_samples": 180,
        "malicious_samples": 250,
        "budget": 5,
        "hold_out": True,
        "validation": 0.2,
    },
    "model": {"name": "mlp", "hidden": [64]},
    "training": {"gamma": 0.2, "batch_size": 36, "local_epochs": 2},
    "attack": {"name": "label_flip", "source": 9, "target": 4},
}


def run(algorithm: dict[str, Any], epsilon: float | None, role: str, seed: int, out: Path) -> Any:
    """Run one cell."""
    table = {**BASE, "seeds": [seed], "algorithm": algorithm}
    table["agents"] = {**BASE["agents"], "malicious_role": role}
    if epsilon is not None:
        table["training"] = {**BASE["training"], "privacy": {"epsilon": epsilon, "clip": 1.0}}
    return fedcb2o.run(load(table), out=out, workers=1, watch=lambda *_: None)


def confidence(group: Any, k: int, theta: torch.Tensor, shard: Shard) -> np.ndarray:
    """Return the probability that a model gives to the true class of each sample."""
    return np.exp(-sample_losses(group, k, theta, shard))


def shadow_models(folder: Path) -> list[tuple[torch.Tensor, set[int]]]:
    """Return models that were trained alone in other runs, with the ids of their samples."""
    models = []
    for seed in SHADOW_SEEDS:
        shadow = run(LOCAL, None, "clean", seed, folder / f"shadow-{seed}")
        group, _, _ = _restore_agents(shadow, None, seed, None)
        for k in range(len(group.agents)):
            theta = group.models[int(group.layout.own[k])].clone()
            models.append((theta, set(group.data.train[k].tolist())))
    return models


def rmia(
    group: Any,
    k: int,
    theta: torch.Tensor,
    train: Shard,
    test: Shard,
    shadows: list[tuple[torch.Tensor, set[int]]],
) -> dict[str, float]:
    """Measure offline RMIA against a model; half of the test samples are the population."""
    ids = group.data.train[k].tolist()
    z = Shard(test.x[::2], test.y[::2])
    others = Shard(test.x[1::2], test.y[1::2])
    reference = {}
    for name, shard in (("members", train), ("others", others), ("z", z)):
        values = np.stack([confidence(group, k, shadow, shard) for shadow, _ in shadows])
        if name == "members":
            is_out = np.array([[i not in known for i in ids] for _, known in shadows])
            values = np.where(is_out, values, np.nan)
        out = np.nanmean(values, 0)
        reference[name] = 0.5 * ((1 + _SCALE) * out + 1 - _SCALE)
    ratios = {
        name: confidence(group, k, theta, shard) / reference[name]
        for name, shard in (("members", train), ("others", others), ("z", z))
    }
    scores = {
        name: (ratios[name][:, None] >= ratios["z"][None]).mean(1) for name in ("members", "others")
    }
    return {
        "rmia_auc": attack_auc(scores["members"], scores["others"]),
        "rmia_tpr": true_positive_rate(scores["members"], scores["others"]),
    }


def cell(
    name: str, epsilon: float | None, role: str, seed: int, folder: Path, shadows: list[Any]
) -> dict[str, Any]:
    """Run a cell and measure it, as means over benign agents."""
    algorithm = METHODS.get(name, LOCAL)
    done = run(algorithm, epsilon, role, seed, folder / f"{name}-{epsilon}-{role}-{seed}")
    last = last_round(done.records)
    last = last[~last.malicious]
    values = last[["accuracy", "attack_success_rate", "malicious_weight"]].mean().to_dict()
    group, prepared, rounds = _restore_agents(done, None, seed, None)
    training = prepared.spec.training
    measured = []
    for k in np.flatnonzero(~group.data.malicious).tolist():
        train = group.data.clean_training_data(k)
        _, test = next(group.data.test_sets(np.array([k])))
        kept = group.models[int(group.layout.own[k])]
        sent = kept.clone()
        noise = noise_multiplier(training, len(train), prepared.spec.rounds)
        draw = stream(seed, "batches", rounds, int(group.agents[k]))
        local_update_(sent, prepared.spec.module, train, training, draw, noise)
        row = {}
        for model, theta in (("sent", sent), ("kept", kept)):
            found = {
                **leakage(group, k, theta, train, test),
                **rmia(group, k, theta, train, test, shadows),
            }
            row |= {f"{model}_{key}": value for key, value in found.items()}
        measured.append(row)
    values |= pd.DataFrame(measured).mean().to_dict()
    numbers = {key: f"{100 * value:.2f}" for key, value in values.items()}
    return {"method": name, "epsilon": epsilon or "none", "role": role, "seed": seed, **numbers}


def main() -> None:
    """Run the cells that are missing in the file of values."""
    torch.set_num_threads(1)
    cells: list[tuple[str, float | None, str, int]] = []
    for seed in SEEDS:
        for epsilon in EPSILONS:
            cells += [(name, epsilon, "attack", seed) for name in METHODS]
        cells += [(name, None, "clean", seed) for name in (*METHODS, "training alone")]
        cells += [(name, 8.0, "clean", seed) for name in METHODS]
    known = set()
    if VALUES.exists():
        with VALUES.open() as file:
            known = {
                (r["method"], r["epsilon"], r["role"], r["seed"]) for r in csv.DictReader(file)
            }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shadows = shadow_models(folder)
        for method, epsilon, role, seed in cells:
            if (method, str(epsilon or "none"), role, str(seed)) in known:
                continue
            row = cell(method, epsilon, role, seed, folder, shadows)
            is_new = not VALUES.exists()
            with VALUES.open("a", newline="") as file:
                writer = csv.DictWriter(file, list(row))
                if is_new:
                    writer.writeheader()
                writer.writerow(row)
            print(row, flush=True)


def tables() -> None:
    """Print the tables of the page, means over seeds in percent."""
    values = pd.read_csv(VALUES, keep_default_na=False)
    attacked = values[values.role == "attack"]
    for column in ("attack_success_rate", "accuracy"):
        print(f"\n{column}")
        table = attacked.pivot_table(column, "method", "epsilon", sort=False)
        print(table.round(1).to_string())
    leaks = [f"{m}_{k}" for m in ("sent", "kept") for k in ("auc", "tpr", "rmia_auc", "rmia_tpr")]
    print(values.pivot_table(leaks, ["method", "epsilon"], "role", sort=False).round(1).T)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", action="store_true")
    if parser.parse_args().tables:
        tables()
    else:
        main()

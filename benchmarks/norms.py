"""What mixing the statistics of batch norms opens to attackers: a label flip, and an attack on statistics alone.

    .venv/bin/python benchmarks/norms.py --out runs/norms             # a few minutes a seed on two quiet cores
    .venv/bin/python benchmarks/norms.py --out runs/norms --seeds 0-9

A small network with batch norms whose statistics are local, shared or dropped, and one with group norms, on digits as
in the preset digits-fedcb2o-trusted. Each line is an algorithm and what becomes of statistics; the numbers are means
over seeds, of benign agents after the last round, in percent. The attack on statistics publishes what an attacker
learnt from true labels, with its shared statistics multiplied: where there are none, nothing is attacked.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedcb2o
from fedcb2o.federated.types import View
from fedcb2o.norms import statistics

WIDTHS = (16, 32)
FACTOR = 100.0
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"batch norms, {kind}": {"name": "batch", "buffers": kind} for kind in ("local", "shared", "dropped")},
    "group norms": {"name": "group"},
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "FedCB2O": {},
    "FedCBO": {"name": "fedcbo", "alpha": 2.0},
    "DFedAvgM": {"name": "dfedavgm"},
    "trimmed mean": {"name": "by_rule", "rule": "trimmed_mean"},
    "multi-Krum": {"name": "by_rule", "rule": "multi_krum"},
}


def batch(input_shape: list[int], num_classes: int) -> nn.Module:
    """Two convolutions with batch norms, and a dense layer."""
    return _network(input_shape, num_classes, *map(nn.BatchNorm2d, WIDTHS))


def group(input_shape: list[int], num_classes: int) -> nn.Module:
    """The same with group norms."""
    return _network(input_shape, num_classes, *(nn.GroupNorm(width // 8, width) for width in WIDTHS))


def _network(input_shape: list[int], num_classes: int, *norms: nn.Module) -> nn.Module:
    channels, height, width = input_shape
    first, second = WIDTHS
    return nn.Sequential(
        *(nn.Conv2d(channels, first, 3, padding=1, bias=False), norms[0], nn.ReLU()),
        *(nn.Conv2d(first, second, 3, stride=2, padding=1, bias=False), norms[1], nn.ReLU()),
        *(nn.Flatten(), nn.Linear(second * -(-height // 2) * -(-width // 2), num_classes)),
    )


@fedcb2o.knows()
def poisoned_statistics(view: View, draw: np.random.Generator, *, count: int, factor: float = FACTOR) -> Tensor:
    """The model that the attacker trained, the first `count` numbers of which, its statistics, are multiplied."""
    theta = view.own.clone()
    theta[:count] *= factor
    return theta


def experiment(algorithm: str, setting: str, attack: str, rounds: int) -> dict[str, Any]:
    """A cell of the table."""
    model = SETTINGS[setting]
    module = globals()[model["name"]]
    shared = statistics(module([1, 8, 8], 10), "shared").values() if model.get("buffers") == "shared" else ()
    attacks = {"flip": {}, "statistics": {"name": poisoned_statistics, "count": sum(map(len, shared))}}
    return {
        "extends": "digits-fedcb2o-trusted",
        "name": re.sub(r"\W+", "-", f"{algorithm}-{setting}-{attack}").lower(),
        "rounds": rounds,
        "evaluate_every": rounds,
        "model": {**model, "name": module},
        "training": {"gamma": 0.05},
        "algorithm": ALGORITHMS[algorithm],
        "agents": {"malicious_role": "clean"} if attack == "none" else {},
        "attack": attacks.get(attack, {}),
    }


def scores(run: fedcb2o.Run) -> dict[str, float]:
    """The metrics of benign agents after the last round, over seeds, in percent."""
    last = run.records[~run.records.malicious & (run.records["round"] == run.config["rounds"])]
    found = last[["accuracy", "source_accuracy", "attack_success_rate"]].mean()
    return {name: 100 * float(value) for name, value in found.items()}


def main() -> None:
    """Run every cell, resuming, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/norms"))
    parser.add_argument("--seeds", default="0-2", help="such as 0-2")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    asked = parser.parse_args()
    first, _, last = asked.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    print("| | no attack: accuracy | flip: accuracy | source | success | statistics: accuracy |")
    print("|---|---:|---:|---:|---:|---:|")
    for algorithm in asked.algorithms:
        for setting in SETTINGS:
            found = {}
            for attack in ("none", "flip", "statistics"):
                cell = experiment(algorithm, setting, attack, asked.rounds)
                out = asked.out / cell["name"]
                found[attack] = scores(fedcb2o.run(cell, out=out, seeds=seeds, resume=True, watch=lambda *_: None))
            flip = found["flip"]
            numbers = (
                found["none"]["accuracy"],
                *(flip[name] for name in ("accuracy", "source_accuracy", "attack_success_rate")),
                found["statistics"]["accuracy"],
            )
            print(f"| {algorithm}, {setting} |", " | ".join(f"{each:.1f}" for each in numbers), "|", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

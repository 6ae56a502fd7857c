"""Compare private training with Opacus: epsilon and accuracy of the same runs.

Opacus has an environment of its own, so that the comparison has two steps:

    python benchmarks/dp_opacus.py --data-dir DIR --arrays arrays.npz   # this project's values
    OPACUS/bin/python benchmarks/dp_opacus.py --opacus --arrays arrays.npz

Both train the same network on the same samples from the same initial models, with the noise of
epsilon 8. The second step writes dp_opacus.csv next to this script.
"""

import argparse
import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

DELTA = 1e-5
TARGET = 8.0
VALUES = Path(__file__).with_suffix(".csv")
SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {"batch_size": 64, "epochs": 20, "lr": 0.5, "clip": 1.0, "seeds": 10},
    "emnist": {"batch_size": 512, "epochs": 12, "lr": 0.5, "clip": 1.0, "seeds": 3},
}


def network(features: int, num_classes: int, seed: int) -> nn.Module:
    """Return the network with the initial parameters of a seed."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, num_classes)
    )


def accuracy(module: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the accuracy in percent."""
    module.eval()
    with torch.no_grad():
        return 100 * float((module(x).argmax(1) == y).float().mean())


def ours(data_dir: Path, path: Path) -> None:
    """Train by this project, and write its values and the data."""
    from fedcb2o.data import Shard, digits, features
    from fedcb2o.data.sets import emnist
    from fedcb2o.federated.local_update import local_update_
    from fedcb2o.federated.privacy import noise_multiplier, spent_epsilon
    from fedcb2o.federated.run_spec import Training
    from fedcb2o.federated.sections import Privacy
    from fedcb2o.nn.parameters import bind_, flatten

    arrays: dict[str, np.ndarray] = {}
    rows = []
    sets = {
        "digits": digits(),
        "emnist": emnist(data_dir=data_dir, train_per_class=400, test_per_class=100),
    }
    for name, dataset in sets.items():
        own = SETTINGS[name]
        train = Shard(features(dataset.pool.x), dataset.pool.y)
        test = Shard(features(dataset.test.x), dataset.test.y)
        for part, shard in (("train", train), ("test", test)):
            arrays[f"{name}-{part}-x"] = shard.x.numpy()
            arrays[f"{name}-{part}-y"] = shard.y.numpy()
        training = Training(
            gamma=own["lr"],
            momentum=0.0,
            batch_size=own["batch_size"],
            local_epochs=own["epochs"],
            privacy=Privacy(clip=own["clip"], epsilon=TARGET, delta=DELTA),
        )
        noise = noise_multiplier(training, len(train), 1)
        assert noise is not None
        for seed in range(own["seeds"]):
            module = network(train.x[0].numel(), dataset.num_classes, seed)
            theta = flatten(module)
            bind_(module, theta)
            local_update_(theta, module, train, training, np.random.default_rng(seed), noise)
            rows.append(
                {
                    "data": name,
                    "seed": seed,
                    "noise": noise,
                    "epsilon": spent_epsilon(training, len(train), 1, 1),
                    "accuracy": accuracy(module, test.x, test.y),
                }
            )
            print(rows[-1], flush=True)
    np.savez_compressed(path, rows=np.array(json.dumps(rows)), **arrays)


def opacus(path: Path) -> None:
    """Train by Opacus, and write the values of both."""
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    content = np.load(path)
    rows = json.loads(str(content["rows"]))
    for row in rows:
        name = row["data"]
        own = SETTINGS[name]
        x, y, test_x, test_y = (
            torch.from_numpy(content[f"{name}-{part}"])
            for part in ("train-x", "train-y", "test-x", "test-y")
        )
        module = network(x[0].numel(), int(y.max()) + 1, row["seed"])
        engine = PrivacyEngine(accountant="prv")
        torch.manual_seed(1000 + row["seed"])
        private, optimiser, loader = engine.make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=own["lr"]),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=own["batch_size"]),
            noise_multiplier=row["noise"],
            max_grad_norm=own["clip"],
        )
        for _ in range(own["epochs"]):
            for part, labels in loader:
                optimiser.zero_grad()
                F.cross_entropy(private(part), labels).backward()
                optimiser.step()
        row["opacus_epsilon"] = float(engine.get_epsilon(DELTA))
        row["opacus_accuracy"] = accuracy(private, test_x, test_y)
        print(row, flush=True)

    with VALUES.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(
            {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in r.items()}
            for r in rows
        )
    for name in SETTINGS:
        chosen = [row for row in rows if row["data"] == name]
        means = [np.mean([row[key] for row in chosen]) for key in ("accuracy", "opacus_accuracy")]
        gaps = [row["accuracy"] - row["opacus_accuracy"] for row in chosen]
        error = np.std(gaps, ddof=1) / math.sqrt(len(gaps))
        print(f"{name}: {means[0]:.2f} here, {means[1]:.2f} Opacus, standard error {error:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--opacus", action="store_true")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--arrays", type=Path, default=Path("/tmp/dp-arrays.npz"))
    options = parser.parse_args()
    if options.opacus:
        opacus(options.arrays)
    else:
        ours(options.data_dir, options.arrays)

"""A heat map of ByzFL's benchmark next to the same file run here, on Fashion-MNIST.

    python -m pip install --no-deps --target FOLDER byzfl==0.0.11
    OMP_NUM_THREADS=1 PYTHONPATH=FOLDER python benchmarks/byzfl_heat_map.py --out runs/byzfl

Both sides read `config.json` with the data set "mnist", whose files are those of Fashion-MNIST.
A stand-in of a few lines takes the place of torchvision: it reads these images, and has ByzFL's
transforms of MNIST. ByzFL's value of a cell is its own: the best evaluation of the
mean over seeds, under the worst attack. Both sides have the first 600 training and 200 test images
of each class. `--steps`, `--seeds` and `--momentum` change the file. Both continue what stopped.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import sys
import time
import types
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import fedcb2o
from fedcb2o.data import fashion_mnist
from fedcb2o.experiments import foreign
from fedcb2o.report import read_grid
from fedcb2o.report._worst_attack import worst_attack_maps

DELTA = 20
TRAIN, TEST = 600, 200  # images of each class


def make_config(steps: int, seeds: int, momentum: float) -> dict[str, Any]:
    """Return ByzFL's file: 10 honest clients, 1 or 2 others, 2 distributions."""
    return {
        "benchmark_config": {
            "training_algorithm": {"name": "DSGD", "parameters": {}},
            "nb_steps": steps,
            "device": "cpu",
            "training_seed": 0,
            "nb_training_seeds": seeds,
            "nb_honest_clients": 10,
            "f": [1, 2],
            "data_distribution_seed": 0,
            "nb_data_distribution_seeds": 1,
            "data_distribution": [
                {"name": "gamma_similarity_niid", "distribution_parameter": [1.0, 0.0]}
            ],
        },
        "model": {
            "name": "fc_mnist",
            "dataset_name": "mnist",
            "nb_labels": 10,
            "loss": "NLLLoss",
            "learning_rate": 0.1,
            "learning_rate_decay": 1.0,
            "milestones": [],
        },
        "aggregator": [
            {"name": "GeometricMedian", "parameters": {"nu": 0.1, "T": 3}},
            {"name": "TrMean", "parameters": {}},
        ],
        "pre_aggregators": [{"name": "Clipping", "parameters": {}}, {"name": "NNM"}],
        "honest_clients": {"momentum": momentum, "weight_decay": 0.0001, "batch_size": 25},
        "attack": [
            {"name": "SignFlipping", "parameters": {}},
            {"name": "Optimal_ALittleIsEnough", "parameters": {"evals": 5}},
        ],
        "evaluation_and_results": {
            "evaluation_delta": DELTA,
            "batch_size_evaluation": 500,
            "evaluate_on_test": True,
            "store_per_client_metrics": False,
            "store_models": False,
            "data_folder": "./data",
            "results_directory": "./results",
        },
    }


class FashionMNIST(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Fashion-MNIST with the interface of torchvision's MNIST."""

    def __init__(self, root: str, train: bool, download: bool, transform: Any) -> None:
        folder = Path(os.environ["FEDCB2O_DATA"])
        dataset = fashion_mnist(data_dir=folder, train_per_class=TRAIN, test_per_class=TEST)
        shard = dataset.pool if train else dataset.test
        self.data, self.targets, self.transform = shard.x, shard.y, transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Any:
        return self.transform(self.data[i]), int(self.targets[i])


class Compose:
    """Transforms one after the other."""

    def __init__(self, steps: list[Any]) -> None:
        self.steps = steps

    def __call__(self, image: Any) -> Any:
        """Apply the transforms to an image."""
        for step in self.steps:
            image = step(image)
        return image


def stand_in_for_torchvision() -> None:
    """Put modules in the place of torchvision and, where it is missing, of seaborn."""
    transforms = types.SimpleNamespace(
        Compose=Compose,
        ToTensor=lambda: lambda image: image.float() / 255,
        Normalize=lambda mean, std: lambda x: (x - mean[0]) / std[0],
        RandomHorizontalFlip=mock.MagicMock(),
        RandomCrop=mock.MagicMock(),
    )
    datasets = types.SimpleNamespace(MNIST=FashionMNIST)
    module = types.ModuleType("torchvision")
    module.datasets = datasets  # type: ignore[attr-defined]
    module.transforms = transforms  # type: ignore[attr-defined]
    sys.modules["torchvision"] = module
    if importlib.util.find_spec("seaborn") is None:
        sys.modules["seaborn"] = mock.MagicMock()


def run_byzfl(folder: Path, config: dict[str, Any]) -> dict[tuple[str, str, str], float]:
    """Run ByzFL's benchmark in a folder; return the value of each cell of its heat maps."""
    import byzfl.benchmark

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    os.chdir(folder)
    byzfl.benchmark.run_benchmark(1)
    found: dict[tuple[str, str, str], float] = {}
    for path in Path("results").glob("mnist_*"):
        own = json.loads((path / "config.json").read_text())
        benchmark = own["benchmark_config"]
        share = benchmark["data_distribution"]["distribution_parameter"]
        cell = (own["aggregator"]["name"], f"f = {benchmark['f']}", f"similarity {share}")
        runs = [np.loadtxt(file, delimiter=",") for file in path.glob("test_accuracy*.txt")]
        found[cell] = min(found.get(cell, 1.0), float(np.mean(runs, axis=0).max()))
    return found


def with_fewer_images(table: dict[str, Any]) -> dict[str, Any]:
    """Return the grid with Fashion-MNIST for MNIST, and as many samples per client as ByzFL."""
    for setting in table["settings"].values():
        setting["agents"]["benign_samples"] = int(0.8 * 10 * TRAIN) // 10
    data = {"name": "fashion_mnist", "train_per_class": TRAIN, "test_per_class": TEST}
    return {**table, "data": data}


def main() -> None:
    """Run both; print the table of docs/bench.md: ByzFL's value of each cell, then ours."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--momentum", type=float, default=0.9)
    options = parser.parse_args()
    out = options.out.resolve()
    config = make_config(options.steps, options.seeds, options.momentum)
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    stand_in_for_torchvision()
    start = time.time()
    theirs = run_byzfl(out / "byzfl", config)
    middle = time.time()
    done = fedcb2o.bench(
        with_fewer_images(foreign.read_grid_table(out / "byzfl" / "config.json")),
        out=out / "fedcb2o",
        data_dir=os.environ["FEDCB2O_DATA"],
        jobs=1,
        resume=(out / "fedcb2o").exists(),
    )
    print(f"ByzFL {middle - start:.0f} s, here {time.time() - middle:.0f} s")
    maps = worst_attack_maps(read_grid(done.folder))
    columns = [(f, share) for share in ("1.0", "0.0") for f in ("f = 1", "f = 2")]
    print("| |", *(f"{f}, similarity {float(share):g} |" for f, share in columns))
    print("|---" * (1 + len(columns)) + "|")
    for name in ("GeometricMedian", "TrMean"):
        ours = maps[f"{name} after Clipping, NNM"]
        pairs = [
            (theirs[name, f, f"similarity {share}"], ours.at[f"similarity {share}", f])
            for f, share in columns
        ]
        print(f"| {name} |", *(f"{100 * one:.1f}, {100 * own:.1f} |" for one, own in pairs))


if __name__ == "__main__":
    main()

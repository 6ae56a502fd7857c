"""Share of simulated federations whose interval of the gain covers the true difference.

    python benchmarks/gain_coverage.py

Each federation has four agents with data of their own: four Gaussian classes with skewed labels.
They train and average for some rounds; another model of agent 0 trains alone. The interval of agent
0 is from its own test samples, the true difference from 20,000 others. Values: gain_coverage.csv.
"""

import csv
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedcb2o.data import Shard
from fedcb2o.federated.evaluation.gain import Gain, paired_gain
from fedcb2o.federated.local_update import local_update_
from fedcb2o.federated.run_spec import Training
from fedcb2o.nn.parameters import bind_, flatten
from fedcb2o.rng import stream

VALUES = Path(__file__).with_suffix(".csv")
FEDERATIONS = 200
AGENTS = 4
CLASSES = 4
FEATURES = 8
TRAIN = 30
TRUE_SAMPLES = 20_000
TRAINING = Training(gamma=0.1, momentum=0.9, batch_size=16, local_epochs=2)


def samples(n: int, shares: np.ndarray, centres: np.ndarray, draw: np.random.Generator) -> Shard:
    """Draw n samples with the given shares of classes."""
    y = draw.choice(CLASSES, n, p=shares)
    x = centres[y] + draw.normal(size=(n, FEATURES))
    return Shard(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y))


def correct(module: nn.Module, theta: Tensor, shard: Shard) -> np.ndarray:
    """Return whether a model predicts each sample correctly."""
    bind_(module, theta)
    with torch.no_grad():
        return (module(shard.x).argmax(1) == shard.y).numpy()


def federation(number: int, num_tests: int, rounds: int) -> list[tuple[str, Gain, float]]:
    """Simulate one federation; return kind, gain and true difference of its intervals."""
    draw = stream(number, "federation", num_tests)
    centres = draw.normal(size=(CLASSES, FEATURES)) * 0.7
    shares = draw.dirichlet(np.full(CLASSES, 2.0), AGENTS)
    own = [samples(TRAIN, share, centres, draw) for share in shares]
    module = nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, CLASSES))
    thetas = torch.stack([flatten(module)] * AGENTS)
    alone = thetas[0].clone()
    for n in range(rounds):
        for j, (theta, shard) in enumerate(zip(thetas, own, strict=True)):
            local_update_(theta, module, shard, TRAINING, stream(number, "batches", n, j))
        local_update_(alone, module, own[0], TRAINING, stream(number, "batches", n, 0))
        thetas[:] = thetas.mean(0)

    test = samples(num_tests, shares[0], centres, draw)
    rest = samples(TRUE_SAMPLES, shares[0], centres, draw)
    found = [correct(module, theta, test) for theta in (thetas[0], alone)]
    true = [correct(module, theta, rest) for theta in (thetas[0], alone)]
    results = [("all", paired_gain(*found), float(true[0].mean() - true[1].mean()))]
    for label in range(CLASSES):
        is_class = (test.y == label).numpy()
        is_true = (rest.y == label).numpy()
        if is_class.any() and is_true.sum() > 200:
            difference = float(true[0][is_true].mean() - true[1][is_true].mean())
            gain = paired_gain(found[0][is_class], found[1][is_class])
            results.append(("class", gain, difference))
    return results


def main() -> None:
    """Measure the coverage for several numbers of test samples and rounds."""
    torch.set_num_threads(1)
    rows = []
    for num_tests, rounds in ((30, 5), (60, 5), (200, 5), (60, 1), (60, 20)):
        results = []
        for number in range(FEDERATIONS):
            results += federation(number, num_tests, rounds)
        for kind in ("all", "class"):
            chosen = [(gain, true) for name, gain, true in results if name == kind]
            covered = [gain.low <= true <= gain.high for gain, true in chosen]
            rows.append(
                {
                    "test_samples": num_tests,
                    "rounds": rounds,
                    "kind": kind,
                    "intervals": len(chosen),
                    "covered_percent": f"{100 * np.mean(covered):.1f}",
                    "mean_true_gain": f"{100 * np.mean([true for _, true in chosen]):.1f}",
                    "mean_width": f"{100 * np.mean([g.high - g.low for g, _ in chosen]):.1f}",
                }
            )
            print(rows[-1], flush=True)
    with VALUES.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()

"""FLANDERS on Fashion-MNIST: cells of its published tables, compared with FedCB2O.

    .venv/bin/python -m paper.flanders            # measure the missing cells, then write the page
    .venv/bin/python -m paper.flanders --page     # write the page only

The setting is that of Flower's baseline `flanders` (Gabrielli et al., arXiv 2303.16668): 100
clients with 480 images each, class shares from a Dirichlet distribution with 0.5, a network with
hidden layers of 256, 128 and 64 units and dropout 0.2, and one epoch of Adam a round with learning
rate 0.003 and batches of 32. From round 3 on, other attackers are drawn in every round. The
baseline has 50 rounds; `GROUPS` has the rounds of each cell here. The baseline trains on pixels in
[-1, 1] and evaluates on pixels in [0, 1], and its tables hold the best accuracy of a round. The
last accuracy on the pixels of the training is measured, too.

A finished cell is a row of docs/flanders.csv, so that a stopped run continues.
"""

import argparse
import csv
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedcb2o
from fedcb2o.data import fashion_mnist
from fedcb2o.federated.aggregation import apply, filter_models, multi_krum, replace_rejected
from fedcb2o.nn import parameters
from fedcb2o.rng import stream

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "flanders.csv"
PAGE = ROOT / "docs" / "flanders.md"
MARK = "<!-- table: flanders.csv -->"
CLIENTS = 100
CLIENT_SAMPLES = 480
WARM_UP = 2
SERVER_SAMPLES = 500

# (defence, attack, attackers) -> accuracy in the baseline's README.
PUBLISHED = {
    ("FedAvg", 20): {"GAUSS": 0.25, "LIE": 0.17, "OPT": 0.57, "AGR-MM": 0.11},
    ("FedAvg", 80): {"GAUSS": 0.24, "LIE": 0.10, "OPT": 0.18, "AGR-MM": 0.10},
    ("FLANDERS + FedAvg", 20): {"GAUSS": 0.66, "LIE": 0.67, "OPT": 0.57, "AGR-MM": 0.64},
    ("FLANDERS + FedAvg", 60): {"GAUSS": 0.69, "LIE": 0.67, "OPT": 0.71, "AGR-MM": 0.67},
    ("FLANDERS + FedAvg", 80): {"GAUSS": 0.69, "LIE": 0.70, "OPT": 0.69, "AGR-MM": 0.66},
    ("FLANDERS + MultiKrum", 80): {"GAUSS": 0.68, "LIE": 0.73, "OPT": 0.72, "AGR-MM": 0.70},
}
GROUPS = {  # (defence, attackers) -> rounds, in the order of the measurement
    ("FLANDERS + FedAvg", 80): 50,
    ("FedAvg", 80): 20,
    ("FLANDERS + FedAvg", 20): 20,
    ("FedCB2O", 80): 20,
    ("FedAvg", 20): 20,
    ("FedCB2O", 20): 20,
    ("FLANDERS + FedAvg", 60): 20,
    ("FLANDERS + MultiKrum", 80): 20,
}
FIELDS = [
    "defence", "attack", "attackers", "clients", "rounds", "published", "accuracy",
    "last_accuracy", "same_pixels", "precision", "recall", "seconds",
]  # fmt: skip

FEDCB2O = {
    "name": "fedcb2o",
    "criterion": {"name": "class_loss_gap", "z": 2.0, "against": "majority"},
    "alpha": 1.0,
    "beta": 0.5,
    "own_model": "judged",
    "interpolation": 0.5,
    "loss_tolerance": 2.0,
    "max_distance": 1.3,
    "min_distance": 0.75,
    "mixing_factor": 1.0,
}


def network() -> nn.Sequential:
    """Return the network of the baseline."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((784, 256), (256, 128), (128, 64)):
        layers += [nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def client_samples(labels: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Return the samples of each client: equal numbers, class shares from Dirichlet(0.5)."""
    pools = [list(draw.permutation(np.flatnonzero(labels == c))) for c in range(10)]
    rows = np.empty((CLIENTS, CLIENT_SAMPLES), np.int64)
    for j in range(CLIENTS):
        share = draw.dirichlet([0.5] * 10)
        for k in range(CLIENT_SAMPLES):
            left = share * [bool(pool) for pool in pools]
            if not left.sum():
                left = np.array([float(bool(pool)) for pool in pools])
            rows[j, k] = pools[draw.choice(10, p=left / left.sum())].pop()
    return rows


# Attacks, as the baseline's code has them: (trained models, attackers, global models) -> model.


def gauss(x: Tensor, bad: Tensor, start: Tensor, draw: np.random.Generator) -> Tensor:
    """Add noise of standard deviation 10 to each attacker's model."""
    noise = draw.standard_normal((int(bad.sum()), x.shape[1]), dtype=np.float32)
    return x[bad] + 10 * torch.from_numpy(noise)


def lie(x: Tensor, bad: Tensor, start: Tensor, draw: np.random.Generator) -> Tensor:
    """Subtract z square roots of standard deviations from the mean; z = Phi(share), not Phi^-1."""
    benign = CLIENTS - int(bad.sum())
    supporters = CLIENTS // 2 + 1 - int(bad.sum())
    z = torch.special.ndtr(torch.tensor((benign - supporters) / benign))
    return x.mean(0) - z * x.std(0, correction=0).sqrt()


def opt(x: Tensor, bad: Tensor, start: Tensor, draw: np.random.Generator) -> Tensor:
    """Move `start` against its signs by the largest lambda at which Krum selects an attacker."""
    f = int(bad.sum())
    benign = x[~bad]
    layers = 8.0  # tensors of the network
    closest = max(1, CLIENTS - f - 2)
    distances = torch.cdist(x, x).square().sort(dim=1).values[:, 1 : closest + 1].sum(1)
    scale = (CLIENTS - 2) * (f - 1) * layers**0.5
    farthest = (benign - start).norm(dim=1).square().max()
    size = min(float(distances[~bad].min() / scale + farthest / layers**0.5), 999.0)
    direction = start.sign()
    between = torch.cdist(benign, benign).square().fill_diagonal_(torch.inf)
    while True:
        model = start - size * direction
        to_model = (benign - model).square().sum(1)
        rows = torch.cat([between, to_model[:, None].expand(-1, f)], 1)
        benign_scores = rows.sort(dim=1).values[:, :closest].sum(1)
        attacker_score = torch.cat([torch.zeros(f - 1), to_model]).sort().values[:closest].sum()
        if size <= 1e-5 or attacker_score <= benign_scores.min():
            return model
        size /= 2


def agr_mm(x: Tensor, bad: Tensor, start: Tensor, draw: np.random.Generator) -> Tensor:
    """Subtract as many standard deviations as the largest distance of benign models admits."""
    benign = x[~bad]
    bound = torch.cdist(benign, benign).max()
    direction = x.std(0, correction=0)
    mean = x.mean(0)
    gamma, found, step = 5.0, 6.0, 2.5
    while abs(found - gamma) > 1e-5 and step > 1e-5:
        step /= 2
        if (benign - (mean - gamma * direction)).norm(dim=1).max() < bound:
            found = gamma
            gamma += step
        else:
            gamma -= step
    return mean - found * direction


ATTACKS: dict[str, Callable[..., Tensor]] = {
    "GAUSS": gauss,
    "LIE": lie,
    "OPT": opt,
    "AGR-MM": agr_mm,
}


def measure(
    defence: str, attack: str, attackers: int, rounds: int, seed: int = 33
) -> dict[str, Any]:
    """Run one cell.

    Args:
        defence: A defence of `GROUPS`.
        attack: An attack of `ATTACKS`.
        attackers: Number of attackers in a round.
        rounds: Number of rounds.
        seed: Seed of all draws.

    Returns:
        A row of the results.
    """
    began = time.monotonic()
    data = fashion_mnist()
    pool = data.pool.x.reshape(len(data.pool), -1)
    rows = client_samples(data.pool.y.numpy(), stream(seed, "partition"))
    rest = np.setdiff1d(np.arange(len(pool)), rows)
    held_out = stream(seed, "server").choice(rest, SERVER_SAMPLES, replace=False)
    x = pool.float() / 127.5 - 1
    test = data.test.x.reshape(len(data.test), -1).float() / 255
    torch.manual_seed(seed)
    net = network()
    theta = parameters.flatten(net)
    agent = fedcb2o.Agent(
        network(), validation=(x[held_out], data.pool.y[held_out]), method=FEDCB2O, seed=seed
    )
    draw = stream(seed, "rounds")
    state: dict[str, Any] = {}
    accuracies, same_pixels = [], []
    caught = rejected = 0
    stale = None

    for n in range(1, rounds + 1):
        # 1. Local training and the attack.
        models = torch.stack([train(net, theta, x[j], data.pool.y[j]) for j in rows])
        stale = models[0] if stale is None else stale
        bad = torch.zeros(CLIENTS, dtype=torch.bool)
        if n > WARM_UP:
            bad[draw.choice(CLIENTS, attackers, replace=False)] = True
            models[bad] = ATTACKS[attack](models, bad, stale, draw)

        # 2. Aggregation.
        kept = torch.ones(CLIENTS, dtype=torch.bool)
        if defence.startswith("FLANDERS"):
            ids = torch.arange(CLIENTS)
            state, kept = filter_models(state, ids, models, theta, draw, f=attackers)
        if defence == "FedCB2O":
            parameters.load_state_(agent.network, parameters.tensor_views(agent.network, theta))
            decision = agent.aggregate(dict(enumerate(models)))
            kept = torch.tensor([decision.weights.get(j, 0) > 0 for j in range(CLIENTS)])
            theta = parameters.flatten(agent.network)
        elif defence.endswith("MultiKrum"):
            f = min(int((bad & kept).sum()), (int(kept.sum()) - 3) // 2)
            theta = apply(functools.partial(multi_krum, f=f), models[kept])
        else:
            theta = models[kept].mean(0)
        if defence.startswith("FLANDERS") and n > 1:
            state = replace_rejected(state, ids[~kept], theta[state["columns"]])

        # 3. Evaluation.
        if n > WARM_UP:
            caught += int((bad & ~kept).sum())
            rejected += int((~kept).sum())
            accuracies.append(accuracy(net, theta, test, data.test.y))
            same_pixels.append(accuracy(net, theta, 2 * test - 1, data.test.y))
        print(defence, attack, attackers, n, accuracies[-1:], same_pixels[-1:], flush=True)

    return {
        "defence": defence,
        "attack": attack,
        "attackers": attackers,
        "clients": CLIENTS,
        "rounds": rounds,
        "published": PUBLISHED.get((defence, attackers), {}).get(attack, ""),
        "accuracy": round(max(accuracies), 4),
        "last_accuracy": round(accuracies[-1], 4),
        "same_pixels": round(same_pixels[-1], 4),
        "precision": round(caught / rejected, 3) if rejected else "",
        "recall": round(caught / (attackers * (rounds - WARM_UP)), 3),
        "seconds": round(time.monotonic() - began),
    }


def train(net: nn.Module, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the model after one epoch of Adam in the order of the samples."""
    parameters.load_state_(net, parameters.tensor_views(net, theta))
    optimiser = torch.optim.Adam(net.parameters(), lr=0.003, fused=True)
    net.train()
    for batch, labels in zip(x.split(32), y.split(32), strict=True):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(batch), labels, reduction="sum").backward()
        optimiser.step()
    return parameters.flatten(net)


@torch.no_grad()
def accuracy(net: nn.Module, theta: Tensor, x: Tensor, y: Tensor) -> float:
    """Return the share of the test samples with the right class."""
    parameters.load_state_(net, parameters.tensor_views(net, theta))
    return float((net.eval()(x).argmax(1) == y).float().mean())


def read_results() -> list[dict[str, str]]:
    """Return the measured cells."""
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


def table(rows: list[dict[str, str]]) -> str:
    """Return the results as a Markdown table."""
    titles = [
        "attackers", "defence", "attack", "rounds", "published", "here", "same pixels",
        "precision", "recall",
    ]  # fmt: skip
    lines = ["| " + " | ".join(titles) + " |", "|--:|---|---|" + "--:|" * 6]
    for row in sorted(rows, key=lambda row: (-int(row["attackers"]), row["defence"])):
        shares = [row[key] for key in ("published", "accuracy", "same_pixels")]
        cells = [row["attackers"], row["defence"], row["attack"], row["rounds"]]
        cells += [f"{float(share):.2f}" if share else "" for share in shares]
        cells += [row["precision"], row["recall"]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_page() -> None:
    """Write the table into its page."""
    head, mark, rest = PAGE.read_text().partition(MARK)
    after = rest.lstrip().partition("\n\n")[2]
    PAGE.write_text(f"{head}{mark}\n\n{table(read_results())}\n\n{after}")


def main() -> None:
    """Measure the missing cells, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="store_true", help="write the page only")
    arguments = parser.parse_args()
    done = {(r["defence"], int(r["attackers"]), r["attack"]) for r in read_results()}
    cells = [(*group, attack) for group in GROUPS for attack in ATTACKS]
    for defence, attackers, attack in cells:
        if arguments.page or (defence, attackers, attack) in done:
            continue
        row = measure(defence, attack, attackers, GROUPS[defence, attackers])
        is_new = not RESULTS.exists()
        with RESULTS.open("a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerow(row)
    write_page()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

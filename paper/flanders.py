"""FLANDERS on Fashion-MNIST: cells of its published tables, compared with FedAssay.

    .venv/bin/python -m paper.flanders            # measure the missing cells, then write the page
    .venv/bin/python -m paper.flanders --page     # write the page only

The setting is that of Flower's baseline `flanders` (Gabrielli et al., arXiv 2303.16668): 100
clients with 480 images each, class shares from a Dirichlet distribution with 0.5, a network with
hidden layers of 256, 128 and 64 units and dropout 0.2, and one epoch of Adam a round with learning
rate 0.003 and batches of 32. From round 3 on, other attackers are drawn in every round. The
baseline trains on pixels in [-1, 1] and evaluates on pixels in [0, 1], and its tables hold the best
accuracy of a round. The last accuracy on the pixels of the training is measured, too.

The four attacks on a defence are measured together, with the same attackers and batches, because
equal global models are then trained only once. Every ten rounds they are written to
notes/flanders.csv, which says how many rounds each cell has. A stopped run measures the cells again
that have less than `ROUNDS`.
"""

import argparse
import csv
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
RESULTS = ROOT / "notes" / "flanders.csv"
PAGE = ROOT / "notes" / "flanders.md"
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
GROUPS = [  # (defence, attackers), in the order of the measurement
    ("FedAssay", 80),
    ("FedAssay", 20),
    ("FedAssay", 60),
    ("FLANDERS + FedAvg", 60),
    ("FLANDERS + MultiKrum", 80),
    ("FLANDERS + FedAvg", 20),
    ("FLANDERS + FedAvg", 80),
    ("FedAvg", 80),
    ("FedAvg", 20),
]
ROUNDS = 50
FIELDS = [
    "defence", "attack", "attackers", "clients", "rounds", "published", "accuracy",
    "last_accuracy", "same_pixels", "precision", "recall",
]  # fmt: skip


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
    squared_distances = line_from(start, -start.sign(), benign)
    between = torch.cdist(benign, benign).square().fill_diagonal_(torch.inf)
    while True:
        to_model = squared_distances(size)
        rows = torch.cat([between, to_model[:, None].expand(-1, f)], 1)
        benign_scores = rows.sort(dim=1).values[:, :closest].sum(1)
        attacker_score = torch.cat([torch.zeros(f - 1), to_model]).sort().values[:closest].sum()
        if size <= 1e-5 or attacker_score <= benign_scores.min():
            return start - size * start.sign()
        size /= 2


def agr_mm(x: Tensor, bad: Tensor, start: Tensor, draw: np.random.Generator) -> Tensor:
    """Subtract as many standard deviations as the largest distance of benign models admits."""
    benign = x[~bad]
    bound = torch.cdist(benign, benign).max().square()
    direction = x.std(0, correction=0)
    mean = x.mean(0)
    squared_distances = line_from(mean, -direction, benign)
    gamma, found, step = 5.0, 6.0, 2.5
    while abs(found - gamma) > 1e-5 and step > 1e-5:
        step /= 2
        if squared_distances(gamma).max() < bound:
            found = gamma
            gamma += step
        else:
            gamma -= step
    return mean - found * direction


def line_from(start: Tensor, direction: Tensor, models: Tensor) -> Callable[[float], Tensor]:
    """Return a function from s to the squared distances of models to start + s * direction."""
    offsets = models - start
    squares = offsets.square().sum(1)
    products = offsets @ direction
    length = direction.square().sum()
    return lambda s: squares - 2 * s * products + s**2 * length


ATTACKS: dict[str, Callable[..., Tensor]] = {
    "GAUSS": gauss,
    "LIE": lie,
    "OPT": opt,
    "AGR-MM": agr_mm,
}


@dataclass
class Samples:
    """Images of the clients, of the server and of the test."""

    clients: tuple[Tensor, Tensor]
    server: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @classmethod
    def draw(cls, seed: int) -> "Samples":
        """Draw the images of the clients, and others for the server."""
        data = fashion_mnist()
        x = data.pool.x.reshape(len(data.pool), -1).float() / 127.5 - 1
        y = data.pool.y
        rows = client_samples(y.numpy(), stream(seed, "partition"))
        rest = np.setdiff1d(np.arange(len(x)), rows)
        held_out = stream(seed, "server").choice(rest, SERVER_SAMPLES, replace=False)
        test = data.test.x.reshape(len(data.test), -1).float() / 255
        clients = torch.from_numpy(rows)
        return cls((x[clients], y[clients]), (x[held_out], y[held_out]), (test, data.test.y))


class Cell:
    """A defence under one attack.

    Args:
        defence: A defence of `GROUPS`.
        attack: An attack of `ATTACKS`.
        attackers: Number of attackers in a round.
        samples: Images.
        seed: Seed of all draws.
    """

    def __init__(
        self, defence: str, attack: str, attackers: int, samples: Samples, seed: int
    ) -> None:
        torch.manual_seed(seed)
        self.network = network()
        self.agent = fedcb2o.Agent(
            network(), validation=samples.server, method="fedassay", seed=seed
        )
        self.theta = parameters.flatten(self.network)
        self.defence, self.attack, self.attackers = defence, attack, attackers
        self.samples = samples
        self.noise = stream(seed, "noise")
        self.columns = stream(seed, "columns")
        self.state: Mapping[str, Tensor] = {}
        self.stale: Tensor | None = None
        self.accuracies: list[float] = []
        self.same_pixels = 0.0
        self.caught = self.rejected = self.attacked = 0

    def advance(self, trained: Tensor, bad: Tensor) -> None:
        """Attack, aggregate and evaluate.

        Args:
            trained: Models of the clients after training.
            bad: The attackers of the round; none in the first rounds.
        """
        # 1. The attack.
        models = trained.clone()
        self.stale = models[0] if self.stale is None else self.stale
        if bad.any():
            models[bad] = ATTACKS[self.attack](models, bad, self.stale, self.noise)

        # 2. Aggregation.
        kept = self.aggregate(models, bad)

        # 3. Evaluation.
        if bad.any():
            self.attacked += int(bad.sum())
            self.caught += int((bad & ~kept).sum())
            self.rejected += int((~kept).sum())
            x, y = self.samples.test
            self.accuracies.append(accuracy(self.network, self.theta, x, y))
            self.same_pixels = accuracy(self.network, self.theta, 2 * x - 1, y)

    def aggregate(self, models: Tensor, bad: Tensor) -> Tensor:
        """Set the new model; return whether each client's model counts."""
        kept = torch.ones(CLIENTS, dtype=torch.bool)
        ids = torch.arange(CLIENTS)
        has_past = bool(self.state)
        if self.defence.startswith("FLANDERS"):
            self.state, kept = filter_models(
                self.state, ids, models, self.theta, self.columns, f=self.attackers
            )
        if self.defence == "FedAssay":
            self.agent.theta = self.theta
            decision = self.agent.aggregate(dict(enumerate(models)))
            kept = torch.tensor([decision.weights.get(j, 0) > 0 for j in range(CLIENTS)])
            self.theta = self.agent.theta
        elif self.defence.endswith("MultiKrum"):
            f = min(int((bad & kept).sum()), (int(kept.sum()) - 3) // 2)
            self.theta = apply(functools.partial(multi_krum, f=f), models[kept])
        else:
            self.theta = models[kept].mean(0)
        if has_past:
            aggregate = self.theta[self.state["columns"]]
            self.state = replace_rejected(self.state, ids[~kept], aggregate)
        return kept

    def row(self) -> dict[str, Any]:
        """Return the cell as a row of the results."""
        return {
            "defence": self.defence,
            "attack": self.attack,
            "attackers": self.attackers,
            "clients": CLIENTS,
            "rounds": WARM_UP + len(self.accuracies),
            "published": PUBLISHED.get((self.defence, self.attackers), {}).get(self.attack, ""),
            "accuracy": round(max(self.accuracies), 4),
            "last_accuracy": round(self.accuracies[-1], 4),
            "same_pixels": round(self.same_pixels, 4),
            "precision": round(self.caught / self.rejected, 3) if self.rejected else "",
            "recall": round(self.caught / self.attacked, 3),
        }


def measure(
    defence: str, attackers: int, rounds: int = ROUNDS, seed: int = 33
) -> Iterator[list[Cell]]:
    """Run the cells of a defence under each attack.

    Args:
        defence: A defence of `GROUPS`.
        attackers: Number of attackers in a round.
        rounds: Number of rounds.
        seed: Seed of all draws.

    Yields:
        The cells, after every ten rounds.
    """
    samples = Samples.draw(seed)
    cells = [Cell(defence, attack, attackers, samples, seed) for attack in ATTACKS]
    draw = stream(seed, "rounds")
    for n in range(1, rounds + 1):
        bad = torch.zeros(CLIENTS, dtype=torch.bool)
        if n > WARM_UP:
            bad[draw.choice(CLIENTS, attackers, replace=False)] = True
        trained: dict[bytes, Tensor] = {}
        for cell in cells:
            key = cell.theta.numpy().tobytes()
            if key not in trained:
                torch.manual_seed(1000 * seed + n)
                trained[key] = train_all(cell.network, cell.theta, *samples.clients)
            cell.advance(trained[key], bad)
        print(defence, attackers, n, [cell.accuracies[-1:] for cell in cells], flush=True)
        if n % 10 == 0:
            yield cells


def train_all(net: nn.Module, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the model of each client after its training."""
    return torch.stack([train(net, theta, x[j], y[j]) for j in range(len(x))])


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


def write_results(rows: list[dict[str, Any]]) -> None:
    """Replace the results by others of the same cells, unless these have less rounds."""
    merged = {_cell(row): row for row in read_results()}
    for row in rows:
        known = merged.get(_cell(row))
        if known is None or int(known["rounds"]) <= row["rounds"]:
            merged[_cell(row)] = row
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(merged.values())


def _cell(row: dict[str, Any]) -> tuple[str, int, str]:
    return row["defence"], int(row["attackers"]), row["attack"]


def main() -> None:
    """Measure the missing cells, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="store_true", help="write the page only")
    arguments = parser.parse_args()
    done = {_cell(row) for row in read_results() if int(row["rounds"]) >= ROUNDS}
    for defence, attackers in GROUPS:
        is_done = all((defence, attackers, attack) in done for attack in ATTACKS)
        if arguments.page or is_done:
            continue
        for cells in measure(defence, attackers):
            write_results([cell.row() for cell in cells])
            write_page()
    write_page()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

"""Nine unequal hospitals that read digits: their data, their training, and their rounds.

`python hospitals.py` writes hospitals.csv, from which docs/nvflare.md has its table. The sites of
the NVFlare job (`client.py`) are the same hospitals.
"""

import itertools
import logging
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fedcb2o
from fedcb2o.data import digits, rotate, skews

SHARES = (0.52, 0.18, 0.11, 0.07, 0.05, 0.03, 0.02, 0.013, 0.007)
ATTACKERS = (2, 5)
ROUNDS = 25
METHODS = {
    "mean": {"name": "by_rule", "rule": "by_num_samples"},
    "trimmed-mean": {"name": "by_rule", "rule": {"name": "trimmed_mean", "f": 2}},
    "fedassay": "fedassay",
    "alone": "local_training",
}
CASES = ("alike", "two-scanners", "label-skew")
SEEDS = range(5)
ATTACKS = {
    "none": None,
    "boosting": {"name": "boosting", "factor": 1000.0},
    "flipping": {"name": "label_flips", "pairs": [(k, 9 - k) for k in range(10)]},
}
"""Attacks of two hospitals, as in the section `attack` of a configuration."""


def network(seed: int) -> nn.Module:
    """Return the network that all hospitals begin with."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def partition(seed: int, case: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the samples of each hospital; the last entry is the test set.

    Cases: "alike"; "label-skew", where hospitals have different classes; and "two-scanners", where
    every second hospital sees its images upside down.
    """
    data = digits()
    x, y = data.pool.x.float() / data.pool.x.max(), data.pool.y
    draw = fedcb2o.stream(seed, "hospitals")
    sizes = np.maximum(9, np.round(np.array(SHARES) * len(y))).astype(int)
    sizes[0] -= max(0, sizes.sum() - len(y))
    if case == "label-skew":
        order = draw.permutation(len(y))[: sizes.sum()]
        owner = skews.dirichlet(y.numpy()[order], sizes, draw, concentration=0.3)
        parts = [order[owner == j] for j in range(len(sizes))]
    else:
        parts = np.split(draw.permutation(len(y))[: sizes.sum()], sizes.cumsum()[:-1])
    sites = [(x[part], y[part]) for part in parts]
    if case == "two-scanners":
        sites = [(rotate(sx, j % 2, 2), sy) for j, (sx, sy) in enumerate(sites)]
    return [*sites, (data.test.x.float() / data.pool.x.max(), data.test.y)]


class Hospital:
    """One site: its data, its network and its agent.

    Args:
        site: Number of the site, from 0.
        method: Name in `METHODS`.
        attack: Name in `ATTACKS`.
        case: Case of `partition`.
        seed: Seed of all random numbers.
    """

    def __init__(self, site: int, method: str, attack: str, case: str, seed: int) -> None:
        self.site = site
        self.seed = seed
        self.is_attacker = site in ATTACKERS and attack != "none"
        *sites, test = partition(seed, case)
        self.x, self.y = sites[site]
        self.test = test
        if case == "two-scanners":
            self.test = (rotate(test[0], site % 2, 2), test[1])
        self.network = network(seed)
        self.agent = fedcb2o.Agent(
            self.network,
            validation=(self.x, self.y),
            method=METHODS[method],
            attack=ATTACKS[attack] if self.is_attacker else None,
            seed=seed,
            id=site,
        )

    def train(self) -> None:
        """Train on the hospital's data, two passes."""
        x, y = self.agent.training_data(self.x, self.y)
        optimiser = torch.optim.SGD(self.network.parameters(), lr=0.1, momentum=0.9)
        draw = fedcb2o.stream(self.seed, "batches", self.agent.round, self.site)
        for _ in range(2):
            for batch in torch.from_numpy(draw.permutation(len(x))).split(32):
                optimiser.zero_grad()
                cross_entropy(self.network(x[batch]), y[batch]).backward()
                optimiser.step()

    def decide(self, models: dict[int, dict[str, torch.Tensor]], samples: dict[int, int]) -> None:
        """Take the models of peers."""
        self.agent.aggregate(models, samples)

    def accuracy(self) -> float:
        """Return the accuracy on the test set, in percent."""
        with torch.no_grad():
            hits = self.network(self.test[0]).argmax(1) == self.test[1]
        return 100 * hits.double().mean().item()


def simulate(method: str, attack: str, case: str, seed: int, rounds: int = ROUNDS) -> list[float]:
    """Return the accuracy of each honest hospital after all rounds, in this process."""
    sites = [Hospital(j, method, attack, case, seed) for j in range(len(SHARES))]
    samples = {j: len(site.y) for j, site in enumerate(sites)}
    for _ in range(rounds):
        for site in sites:
            site.train()
        sent = {j: site.agent.publish() for j, site in enumerate(sites)}
        sent = {j: {k: t.clone() for k, t in model.items()} for j, model in sent.items()}
        for j, site in enumerate(sites):
            site.decide({i: model for i, model in sent.items() if i != j}, samples)
    return [site.accuracy() for j, site in enumerate(sites) if j not in ATTACKERS]


def write_table(path: Path) -> None:
    """Write the accuracy of the honest hospitals to a file; finished lines are kept."""
    lines = path.read_text().splitlines() if path.exists() else []
    header = "case,attack,method,seed,mean,worst"
    cells = itertools.product(SEEDS, CASES, ATTACKS, METHODS)
    for seed, case, attack, method in cells:
        if method == "alone" and attack != "none":
            continue  # no attack reaches it
        cell = f"{case},{attack},{method},{seed},"
        if not any(line.startswith(cell) for line in lines):
            accuracy = simulate(method, attack, case, seed)
            lines.append(f"{cell}{np.mean(accuracy):.2f},{min(accuracy):.2f}")
            path.write_text("\n".join([header, *(k for k in lines if k != header)]) + "\n")


if __name__ == "__main__":
    logging.getLogger("fedcb2o").setLevel(logging.ERROR)  # weak sites trust no peer at first
    write_table(Path(__file__).parent / "hospitals.csv")

"""Gain of cooperation on ratings of 96 users of `movielens`, next to central training.

    python benchmarks/ratings.py

Prints the mean over users of the root mean squared error on each user's last ratings: the user's
own mean, central training on the ratings of all 96, training alone, FedAssay of `fedcb2o.Agent`,
and FedAssay where the users' vectors stay at home. Decay is the rate of weight decay.
"""

import copy

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedcb2o
from fedcb2o.data import Shard, movielens
from fedcb2o.nn.architectures import factorisation

NUM_USERS = 96
ROUNDS = 20
BUDGET = 8
Ratings = tuple[Tensor, Tensor]


def of_user(part: Shard, user: int) -> Ratings:
    """Return the samples of a user, and the ratings in a column."""
    rows = part.x[:, 0].long() == user
    return part.x[rows], part.y[rows].reshape(-1, 1)


def owner_error(predictions: list[Tensor], test: list[Ratings]) -> float:
    """Return the mean over users of the root mean squared error."""
    pairs = zip(predictions, test, strict=True)
    return float(np.mean([F.mse_loss(p, y).sqrt().item() for p, (_, y) in pairs]))


def predictions_of(networks: list[nn.Module], test: list[Ratings]) -> list[Tensor]:
    """Return each network's predictions for the test ratings of its user."""
    with torch.no_grad():
        return [network(x) for network, (x, _) in zip(networks, test, strict=True)]


def new_network() -> nn.Module:
    """Return the network of the preset, with the same initial values in each call."""
    torch.manual_seed(0)
    return factorisation([2], 1, sizes=[671, 9066])


def train_centrally(train: list[Ratings], test: list[Ratings], decay: float) -> float:
    """Return the lowest error of Adam over 25 epochs on all ratings, chosen on the test."""
    x, y = (torch.cat(column) for column in zip(*train, strict=True))
    network = new_network()
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3, weight_decay=decay)
    errors = []
    for _ in range(25):
        for rows in torch.randperm(len(x)).split(128):
            optimiser.zero_grad()
            F.mse_loss(network(x[rows]), y[rows]).backward()
            optimiser.step()
        errors.append(owner_error(predictions_of([network] * len(test), test), test))
    return min(errors)


def train_agents(
    train: list[Ratings], test: list[Ratings], *, decay: float, exchange: str
) -> float:
    """Return the error after all rounds; `exchange` is "nothing", "items" or "all" parameters."""
    start = new_network()
    networks = [copy.deepcopy(start) for _ in train]
    agents = [
        fedcb2o.Agent(n, validation=own, loss="squared_error", seed=0, id=j, rounds=ROUNDS)
        for j, (n, own) in enumerate(zip(networks, train, strict=True))
    ]
    for _ in range(ROUNDS):
        for network, (x, y) in zip(networks, train, strict=True):
            optimiser = torch.optim.SGD(
                network.parameters(), lr=0.05, momentum=0.9, weight_decay=decay
            )
            for _ in range(2):
                for rows in torch.randperm(len(x)).split(32):
                    optimiser.zero_grad()
                    F.mse_loss(network(x[rows]), y[rows]).backward()
                    optimiser.step()
        if exchange == "nothing":
            continue
        sent = [agent.publish() for agent in agents]
        for j, agent in enumerate(agents):
            peers = agent.select([i for i in range(len(agents)) if i != j], BUDGET)
            kept = {"users.weight": sent[j]["users.weight"]} if exchange == "items" else {}
            agent.aggregate({i: {**sent[i], **kept} for i in peers})
    return owner_error(predictions_of(networks, test), test)


def main() -> None:
    """Print all errors."""
    data = movielens()
    users = torch.randperm(671, generator=torch.Generator().manual_seed(0))[:NUM_USERS].tolist()
    train, test = ([of_user(part, user) for user in users] for part in (data.pool, data.test))
    means = [own.mean().expand_as(y) for (_, own), (_, y) in zip(train, test, strict=True)]
    print("mean of the user", owner_error(means, test), flush=True)
    for decay in (0.0, 0.001):
        print("central, decay", decay, train_centrally(train, test, decay), flush=True)
    for exchange in ("nothing", "all", "items"):
        for decay in (0.0, 0.01):
            error = train_agents(train, test, decay=decay, exchange=exchange)
            print("agents exchange", exchange, "decay", decay, error, flush=True)


if __name__ == "__main__":
    main()

"""The plain loop that the library is compared with: one round of FedCB2O as a good PyTorch user would write it.

A module and an optimiser per agent, `DataLoader`s, validation of one downloaded model after the other, state dicts
averaged key by key; PyTorch's own defaults everywhere. It imports nothing of the library. With several processes,
the agents are shared out among them, one thread each, and their modules lie in shared memory.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, multiprocessing, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """The paper's network, its layers in the order in which everybody writes them."""

    def __init__(self, num_classes: int, hidden: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.fc1 = nn.Linear(64 * 7 * 7, hidden)
        self.fc2 = nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, num_classes] of images [n, 1, 28, 28]."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the agents do: the same as the library's agents in the same run.

    `train` and `validation` are images in [0, 1] and labels per agent, `validation` None for malicious ones.
    """

    train: list[tuple[Tensor, Tensor]]
    validation: list[tuple[Tensor, Tensor] | None]
    num_classes: int
    hidden: int
    epochs: int
    batch_size: int
    lr: float
    momentum: float
    alpha: float


@dataclass(frozen=True)
class Agents:
    """All agents' models before and after a round's averaging; a round reads one list and writes the other."""

    work: Work
    models: tuple[list[Net], list[Net]]


def make(work: Work) -> Agents:
    """The agents, all with the same initial model."""
    lists = tuple([Net(work.num_classes, work.hidden) for _ in work.train] for _ in range(2))
    for net in (net for nets in lists for net in nets):
        net.load_state_dict(lists[0][0].state_dict())
    return Agents(work, (lists[0], lists[1]))


def train(agents: Agents, j: int, side: int, epochs: int) -> float:
    """LocalUpdate of agent j; the mean of its mini-batch losses."""
    work = agents.work
    net = agents.models[side][j]
    optimiser = optim.SGD(net.parameters(), lr=work.lr, momentum=work.momentum)
    loader = DataLoader(TensorDataset(*work.train[j]), batch_size=work.batch_size, shuffle=True)
    net.train()
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            optimiser.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


def validate(
    net: Net, loader: DataLoader[tuple[Tensor, ...]], num_classes: int
) -> tuple[float, Tensor, Tensor]:
    """The mean loss, the loss of each class, and how many samples of each class there are."""
    total = 0.0
    by_class = torch.zeros(num_classes)
    counts = torch.zeros(num_classes)
    net.eval()
    with torch.no_grad():
        for x, y in loader:
            losses = F.cross_entropy(net(x), y, reduction="none")
            total += losses.sum().item()
            by_class.index_add_(0, y, losses)
            counts.index_add_(0, y, torch.ones_like(losses))
    return total / counts.sum().item(), by_class / counts.clamp(min=1), counts


def aggregate(agents: Agents, j: int, side: int, peers: Sequence[int]) -> None:
    """Agent j judges the models of its peers by the class-loss gap and averages them and its own, key by key.

    A malicious agent averages by the numbers of samples instead.
    """
    work = agents.work
    nets = agents.models[side]
    states = [nets[i].state_dict() for i in peers]
    held = work.validation[j]
    if held is None:
        weights = torch.tensor([len(work.train[i][1]) for i in (*peers, j)]).float()
    else:
        loader = DataLoader(TensorDataset(*held), batch_size=work.batch_size)
        own = validate(nets[j], loader, work.num_classes)
        downloaded = Net(work.num_classes, work.hidden)
        gaps = []
        for state in states:
            downloaded.load_state_dict(state)
            _, by_class, counts = validate(downloaded, loader, work.num_classes)
            gaps.append((by_class - own[1])[counts > 0].max())
        gaps.append(min(gaps))
        weights = torch.exp(-work.alpha * (torch.stack(gaps) - min(gaps)))
    weights = weights / weights.sum()
    states.append(nets[j].state_dict())
    average = {
        key: sum(w * state[key] for w, state in zip(weights, states, strict=True))
        for key in states[0]
    }
    agents.models[1 - side][j].load_state_dict(average)


class Loop:
    """The loop in one process with `threads` threads, or in several processes of one thread each."""

    def __init__(self, agents: Agents, *, processes: int, threads: int) -> None:
        self.agents = agents
        self.threads = threads
        self.side = 0
        self.pool = None
        many = f"{processes} processes"
        few = "1 process"
        self.name = f"{many if processes > 1 else few}, {threads} thread{'s' * (threads > 1)} each"
        if processes > 1:
            for net in (net for nets in agents.models for net in nets):
                net.share_memory()
            self.pool = multiprocessing.get_context("spawn").Pool(processes, _start, (agents,))
            self.pool.map(_ready, range(4 * processes), chunksize=1)

    def round(
        self, chosen: Sequence[int], peers: Sequence[Sequence[int]], epochs: int | None = None
    ) -> dict[str, float]:
        """A round of the `chosen` agents, each with its peers; the seconds of its parts."""
        epochs = self.agents.work.epochs if epochs is None else epochs
        order = sorted(
            chosen, key=lambda j: -len(self.agents.work.train[j][1])
        )  # the dearest first
        seconds = {}
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        start = time.perf_counter()
        self._map(train, [(j, self.side, epochs) for j in order])
        seconds["train"] = time.perf_counter() - start
        self._map(aggregate, [(j, self.side, peers[j]) for j in order])
        seconds["aggregate"] = time.perf_counter() - start - seconds["train"]
        torch.set_num_threads(before)
        self.side = (
            1 - self.side if len(chosen) == len(peers) else self.side
        )  # a part of the agents only tries
        return seconds

    def _map(self, function: Callable[..., Any], tasks: Iterable[tuple[Any, ...]]) -> None:
        if self.pool is None:
            for task in tasks:
                function(self.agents, *task)
        else:
            self.pool.starmap(_work, [(function, *task) for task in tasks], chunksize=1)

    def close(self) -> None:
        """End the processes."""
        if self.pool is not None:
            self.pool.terminate()
            self.pool.join()


_here: list[Agents] = []


def _start(agents: Agents) -> None:
    torch.set_num_threads(1)
    _here.append(agents)


def _ready(number: int) -> int:
    time.sleep(0.05)  # so that no process takes all of them
    return number


def _work(function: Callable[..., Any], *task: Any) -> None:
    function(_here[0], *task)

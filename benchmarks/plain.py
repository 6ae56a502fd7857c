"""Plain PyTorch loop for comparison: a round of FedCB2O as a good PyTorch user would write it.

Each agent has a module and an optimiser, `DataLoader`s, validation of one downloaded model after
the other, and an average of state dicts key by key, with PyTorch's own defaults. The loop does not
import the library. With several processes, the agents are divided among them, one thread each, and
their modules are in shared memory.
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
    """The paper's network, its layers in the usual order."""

    def __init__(self, num_classes: int, hidden: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.fc1 = nn.Linear(64 * 7 * 7, hidden)
        self.fc2 = nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [n, num_classes] of images [n, 1, 28, 28]."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of all agents, the same as in the library.

    Attributes:
        train: Images from 0 to 1 and labels of each agent.
        validation: The same for validation; None for malicious agents.
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
    """Models before and after averaging; a round reads one list and writes the other."""

    work: Work
    models: tuple[list[Net], list[Net]]


def make(work: Work) -> Agents:
    """Return the agents, all with the same initial model."""
    lists = tuple([Net(work.num_classes, work.hidden) for _ in work.train] for _ in range(2))
    for net in (net for nets in lists for net in nets):
        net.load_state_dict(lists[0][0].state_dict())
    return Agents(work, (lists[0], lists[1]))


def train(agents: Agents, j: int, side: int, epochs: int) -> float:
    """Train agent j (LocalUpdate) and return its mean mini-batch loss."""
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
    """Return the mean loss, the loss of each class, and the samples per class."""
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
    """Average models by the class-loss gap; for malicious agents by numbers of samples."""
    work = agents.work
    nets = agents.models[side]
    states = [nets[i].state_dict() for i in peers]
    held_out = work.validation[j]
    if held_out is None:
        weights = torch.tensor([len(work.train[i][1]) for i in (*peers, j)]).float()
    else:
        loader = DataLoader(TensorDataset(*held_out), batch_size=work.batch_size)
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
    """The loop in one process with `threads` threads, or in several processes of one thread."""

    def __init__(self, agents: Agents, *, processes: int, threads: int) -> None:
        self.agents = agents
        self.threads = threads
        self.side = 0
        self.pool = None
        self.name = f"{processes} process{'es' * (processes > 1)}"
        self.name += f", {threads} thread{'s' * (threads > 1)} each"
        if processes > 1:
            for net in (net for nets in agents.models for net in nets):
                net.share_memory()
            self.pool = multiprocessing.get_context("spawn").Pool(processes, _start, (agents,))
            self.pool.map(_ready, range(4 * processes), chunksize=1)

    def round(
        self, chosen: Sequence[int], peers: Sequence[Sequence[int]], epochs: int | None = None
    ) -> dict[str, float]:
        """Run a round of the chosen agents and return the seconds of its phases."""
        work = self.agents.work
        if epochs is None:
            epochs = work.epochs
        order = sorted(chosen, key=lambda j: -len(work.train[j][1]))  # longest task first
        seconds = {}
        num_threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        start = time.perf_counter()
        self._map(train, [(j, self.side, epochs) for j in order])
        seconds["train"] = time.perf_counter() - start
        self._map(aggregate, [(j, self.side, peers[j]) for j in order])
        seconds["aggregate"] = time.perf_counter() - start - seconds["train"]
        torch.set_num_threads(num_threads)
        if len(chosen) == len(peers):  # otherwise a try on a part of the agents
            self.side = 1 - self.side
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


_worker_agents: list[Agents] = []


def _start(agents: Agents) -> None:
    torch.set_num_threads(1)
    _worker_agents.append(agents)


def _ready(number: int) -> int:
    time.sleep(0.05)  # so that every process gets tasks
    return number


def _work(function: Callable[..., Any], *task: Any) -> None:
    function(_worker_agents[0], *task)

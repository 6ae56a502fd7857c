"""A plain PyTorch loop over agents, the reference for random inputs.

It shares only the named random streams with the library. Every agent has its own network, its own
tensors and a new optimiser in each round.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from fedcb2o.rng import stream


@dataclass
class Problem:
    """Numeric data, a network, a loss, an optimiser, and settings as Python numbers."""

    x: np.ndarray
    y: np.ndarray
    make: Callable[[list[int], int], nn.Module]
    mean_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    optimiser: Callable[[Any, float], torch.optim.Optimizer]
    num_outputs: int
    is_regression: bool
    owner: np.ndarray | None = None
    test_x: np.ndarray | None = None
    test_y: np.ndarray | None = None
    standardise: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trained:
    """An agent's model after training, and its scores."""

    theta: torch.Tensor
    loss: float
    accuracy: float
    undecided: float
    test_x: np.ndarray


def held_out(groups: np.ndarray, count: int, share: float) -> np.ndarray:
    """Select the test samples of each class or owner."""
    mask = np.zeros(len(groups), bool)
    draw = stream(0, "dataset", "test")
    for k in range(count):
        members = np.flatnonzero(groups == k)
        size = min(max(round(share * len(members)), 1), len(members) - 1)
        mask[draw.choice(members, size, replace=False)] = True
    return mask


def shares(y: np.ndarray, owner: np.ndarray | None, s: dict[str, Any]) -> list[tuple[int, Any]]:
    """Return the cluster and the training samples of each agent."""
    clusters, agents, seed = s["num_clusters"], s["benign"], s["seed"]
    n = s["benign_samples"]
    agent_samples = []
    for c in range(clusters):
        if owner is None:
            drawn = stream(seed, "partition", "pool").permutation(len(y))
            order = stream(seed, "partition", c).permutation(drawn[: n * agents])
            parts = np.split(order, agents)
        else:
            parts = [np.flatnonzero(owner == j) for j in range(agents)]
        for j, part in enumerate(parts, c * agents):
            mask = np.zeros(len(part), bool)
            order = stream(seed, "split", j).permutation(len(part))
            mask[order[: round(s["validation"] * len(part))]] = True
            kept = part[~mask]
            if not s["hold_out"]:
                kept = np.concatenate([kept, part[mask]])
            agent_samples.append((c, kept))
    return agent_samples


def batches(n: int, s: dict[str, Any], draw: np.random.Generator, needs_two: bool) -> list[Any]:
    """Draw the mini-batches of one round."""
    starts = list(range(0, n, s["batch_size"]))
    if needs_two and len(starts) > 1 and n - starts[-1] == 1:
        starts.pop()  # a batch norm cannot train on one sample
    epochs = s["local_epochs"] if s["local_steps"] is None else -(-s["local_steps"] // len(starts))
    mini_batches = [
        part for _ in range(epochs) for part in np.split(draw.permutation(n), starts[1:])
    ]
    return mini_batches[: s["local_steps"]]


NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


def estimate(network: nn.Module, x: torch.Tensor, mode: str) -> None:
    """Set the statistics of batch norms for evaluation."""
    network.eval()
    norms = [part for part in network.modules() if isinstance(part, NORMS)]
    if mode != "local" or not norms:
        return
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    with torch.no_grad():
        network(x)
    for norm in norms:
        norm.momentum = 0.1
    network.eval()


def model_of(network: nn.Module, mode: str) -> torch.Tensor:
    """Return the numbers that agents exchange: shared statistics, then trained parameters."""
    norms = [part for part in network.modules() if isinstance(part, NORMS) and mode == "shared"]
    tensors = [tensor for norm in norms for tensor in (norm.running_mean, norm.running_var)]
    tensors += [p.detach() for p in network.parameters() if p.requires_grad]
    return torch.cat([tensor.flatten().double() for tensor in tensors])


def run(problem: Problem, nudge: float = 0.0) -> list[Trained]:
    """Train all agents; `nudge` is a relative change of initial parameters and gradients.

    A second run with a nudge shows how far training magnifies rounding. A gradient changes relative
    to the largest of its tensor, because Adam divides by gradients that are only rounding errors.
    """
    s, x, y, owner = problem.settings, problem.x, problem.y, problem.owner
    test_x, test_y, test_owner = problem.test_x, problem.test_y, None
    if test_x is None:
        groups = owner
        if owner is None:
            groups = np.zeros(len(y), int) if problem.is_regression else y
        count = int(groups.max()) + 1
        is_test = held_out(groups, count, s["test_share"])
        test_x, test_y = x[is_test], y[is_test]
        test_owner = None if owner is None else owner[is_test]
        x, y = x[~is_test], y[~is_test]
        owner = None if owner is None else owner[~is_test]
    if problem.standardise:
        std = np.where(x.max(0) > x.min(0), x.std(0), 1.0)
        x, test_x = (x - x.mean(0)) / std, (test_x - x.mean(0)) / std

    rotated = {}
    for c in range(s["num_clusters"]):
        views = [np.rot90(v, c * 4 // s["num_clusters"], (-2, -1)) if c else v for v in (x, test_x)]
        rotated[c] = [torch.from_numpy(v.astype(np.float32)) for v in views]
    kind = np.float32 if problem.is_regression else np.int64
    targets = torch.from_numpy(y.astype(kind))
    test_targets = torch.from_numpy(test_y.astype(kind))

    agents = shares(y, owner, s)

    def initial(*key: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(stream(s["seed"], "model", *key).integers(2**63)))
            return problem.make(list(x.shape[1:]), problem.num_outputs)

    is_independent = s["initialisation"] == "independent"
    networks = [initial(*[j] * is_independent) for j in range(len(agents))]
    for network in networks:
        # Frozen parameters are the same for all agents, even if initial models differ.
        for parameter, common in zip(network.parameters(), initial().parameters(), strict=True):
            source = parameter if parameter.requires_grad else common
            parameter.data = source.data * (1 + nudge * parameter.requires_grad)

    losses = np.zeros(len(agents))
    for n in range(s["rounds"]):
        for j, (c, rows) in enumerate(agents):
            losses[j] = train(networks[j], problem, n, j, rotated[c][0][rows], targets[rows], nudge)
        if s["average"]:
            average(networks, [len(rows) for _, rows in agents])

    results = []
    for j, (c, rows) in enumerate(agents):
        reference = rotated[c][0][rows]
        estimate(networks[j], reference[:: -(-len(rows) // 256)], s["buffers"])
        test_rows = slice(None) if test_owner is None else torch.from_numpy(test_owner == j)
        with torch.no_grad():
            outputs = networks[j](rotated[c][1][test_rows])
        accuracy = undecided = float("nan")
        if not problem.is_regression:
            accuracy = float((outputs.argmax(1) == test_targets[test_rows]).float().mean())
            top = outputs.topk(2, dim=1).values
            close = (top[:, 0] - top[:, 1]) <= 1e-3 * outputs.abs().max()
            undecided = float(close.float().mean())
        theta = model_of(networks[j], s["buffers"])
        results.append(Trained(theta, float(losses[j]), accuracy, undecided, test_x))
    return results


def train(
    network: nn.Module, problem: Problem, n: int, j: int, x: Any, y: Any, nudge: float = 0.0
) -> float:
    """Train one agent's network for one round; return its mean loss."""
    s = problem.settings
    network.train()
    norms = [part for part in network.modules() if isinstance(part, NORMS)]
    for norm in norms:
        norm.train(s["buffers"] != "dropped")
    draw = stream(s["seed"], "batches", n, j)
    order = batches(len(x), s, draw, bool(norms) and s["buffers"] != "dropped")
    trained = [p for p in network.parameters() if p.requires_grad]
    optimiser = problem.optimiser(trained, s["lambda2"] * s["gamma"])
    losses = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(draw.integers(2**63)))
        for batch in order:
            optimiser.zero_grad()
            loss = problem.mean_loss(network(x[batch]), y[batch])
            loss.backward()
            for parameter in trained:
                if parameter.grad is not None:  # a sparse embedding has sparse gradients
                    parameter.grad = parameter.grad.to_dense()
                    parameter.grad += nudge * parameter.grad.abs().max()
            optimiser.step()
            losses.append(loss.item())
    return float(np.mean(losses))


def average(networks: list[nn.Module], counts: list[int]) -> None:
    """Replace every model by the mean of all models, weighted by sample counts."""
    states = [copy.deepcopy(network.state_dict()) for network in networks]
    for network in networks:
        for name, tensor in network.state_dict().items():
            if tensor.is_floating_point():
                mean = sum(w * s[name].double() for w, s in zip(counts, states, strict=True))
                tensor.copy_(mean / sum(counts))

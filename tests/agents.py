"""Nine agents in two clusters, four of them malicious, for tests of the steps of a round."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedcb2o.data import ClusterTransform, Shard, transforms
from fedcb2o.experiments.runs._seed_run import run_algorithm
from fedcb2o.federated import algorithms
from fedcb2o.federated.adversary import Adversary, Attack
from fedcb2o.federated.agent_group import AgentData, AgentGroup, BufferLayout
from fedcb2o.federated.attacks import label_flip
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.decisions import Decisions
from fedcb2o.federated.guards.checks import Guards
from fedcb2o.federated.ragged import Ragged
from fedcb2o.federated.run_spec import RunSpec, Training
from fedcb2o.federated.sections import AgentsSection
from fedcb2o.federated.types import Reduction
from fedcb2o.nn import batch_norm, parameters
from fedcb2o.parallel._executors import SerialExecutor
from fedcb2o.rng import stream
from fedcb2o.simulation.local_engine import LocalEngine
from fedcb2o.simulation.rounds import Engine, Round
from tests import reference
from tests.tiny import empty_models

CLASSES, SEED, BUDGET = 4, 7, 3


TRAINING = Training(gamma=0.05, lambda2=1.0, momentum=0.9, batch_size=8, local_epochs=1)


CLUSTER = [0] * 5 + [1] * 4


MALICIOUS = [False, False, False, True, True, False, False, True, True]


MALICIOUS_IDS = [j for j, bad in enumerate(MALICIOUS) if bad]


BENIGN_IDS = [j for j, bad in enumerate(MALICIOUS) if not bad]


ROTATION = ClusterTransform(functools.partial(transforms.rotation), 2, CLASSES, (0.0, 1.0))


FLIP = Attack(poison=lambda shard, draw: label_flip(shard, draw, source=1, target=2))


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, CLASSES))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(27, CLASSES)
    )


def wide() -> nn.Module:
    """Return a network whose parameters are mixed in several tiles."""
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 700), nn.ReLU(), nn.Linear(700, CLASSES))


def normed(statistics: batch_norm.StatisticsMode = "shared") -> nn.Module:
    """Return a network with batch norm layers, one of them frozen, and a constant buffer."""
    frozen = nn.BatchNorm1d(6)
    frozen.running_var.fill_(2.0)
    module = nn.Sequential(
        *(nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten()),
        *(
            nn.Linear(27, 6),
            frozen.requires_grad_(False),
            nn.BatchNorm1d(6, affine=False, momentum=None),
            nn.ReLU(),
        ),
        nn.Linear(6, CLASSES),
    )
    module.register_buffer("scale", torch.ones(3))
    batch_norm.set_statistics_mode(module, statistics)
    return module


class Adapted(nn.Module):
    """Frozen layers with a trained low-rank adapter, which two of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.again = nn.Linear(9, 9), nn.Linear(9, 9, bias=False)
        for p in self.parameters():
            p.data = torch.linspace(-0.3, 0.3, p.numel()).cos().view(p.shape)
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(9, 2, bias=False), nn.Linear(2, 9, bias=False)
        self.twice, self.head = nn.Linear(9, 2, bias=False), nn.Linear(9, CLASSES)
        self.twice.weight = self.down.weight

    def forward(self, x: Tensor) -> Tensor:
        h = x.flatten(1)
        h = (self.base(h) + self.up(self.down(h))).tanh()
        logits: Tensor = self.head((self.again(h) + self.up(self.twice(h))).relu())
        return logits


@dataclass(frozen=True)
class AgentSamples:
    """Samples, with the indices of each agent's training and validation data."""

    samples: Shard
    train: list[np.ndarray]
    validation: list[np.ndarray]


def agent_samples() -> AgentSamples:
    """Give an attacker 20 samples, and a benign agent 13 for training and 11 for validation."""
    draw = stream(SEED, "data")
    y = torch.from_numpy(draw.integers(CLASSES, size=300))
    x = torch.from_numpy(draw.normal(size=(300, 1, 3, 3))).float() + y.view(-1, 1, 1, 1) / 2
    order = np.split(draw.permutation(300), 10)
    train = [
        indices[:20] if is_malicious else indices[:13]
        for indices, is_malicious in zip(order, MALICIOUS, strict=False)
    ]
    validation = [
        indices[:0] if is_malicious else indices[13:24]
        for indices, is_malicious in zip(order, MALICIOUS, strict=False)
    ]
    return AgentSamples(Shard(x, y), train, validation)


AGENTS = AgentsSection(benign=3, malicious=2, budget=BUDGET)


def run_spec_of(algorithm: algorithms.Algorithm, module: nn.Module, **changes: Any) -> RunSpec:
    keys = {key: changes.pop(key) for key in list(changes) if key in AgentsSection.model_fields}
    settings = {
        "seed": SEED,
        "num_agents": len(CLUSTER),
        "num_classes": CLASSES,
        "rounds": 10,
        "agents": AGENTS.model_copy(update=keys),
        "model": "network",
        "module": module,
        "training": TRAINING,
        "algorithm": algorithm,
        "malicious_share": 0.0,
        "max_samples": 20,
    }
    return RunSpec(**{**settings, **changes})


def adversary_of(
    attack: Attack = FLIP, *, own_model: bool = True, collude: bool = True
) -> Adversary:
    return Adversary(
        attack=attack,
        malicious=np.array(MALICIOUS),
        cluster=np.array(CLUSTER),
        num_clusters=2,
        colludes=collude,
        averages_own_model=own_model,
    )


def agent_group_of(
    spec: RunSpec,
    adversary: Adversary,
    data: AgentSamples | None = None,
    agents: Sequence[int] = range(len(CLUSTER)),
    own: Sequence[int] | None = None,
    inbox: int = 0,
) -> AgentGroup:
    """Return a group of agents with a buffer of zeros.

    Their own models have the rows `own`; the last `inbox` rows are for received models.
    """
    data, ids = data or agent_samples(), np.array(agents)
    agent_data = AgentData(
        agents=ids,
        samples=data.samples,
        test=data.samples,
        train=Ragged.from_arrays([data.train[j] for j in agents]),
        validation=Ragged.from_arrays([data.validation[j] for j in agents]),
        cluster=adversary.cluster[ids],
        view=ROTATION,
        num_classes=CLASSES,
        malicious=adversary.malicious[ids],
        attack=adversary.attack,
        seed=spec.seed,
    )
    rows = np.array(range(len(ids)) if own is None else own)
    clusters = spec.algorithm.clusters
    num_kept = int(rows.max()) + 1 + (0 if clusters is None else clusters.num_rows(len(ids)))
    models_per_attacker = adversary.attack.num_published(1, len(BENIGN_IDS))
    encodes = spec.agents.encoding != "float32"
    layout = BufferLayout.create(
        rows,
        num_kept + encodes * len(ids),
        agent_data.malicious,
        models_per_attacker,
        spec.algorithm.keeps_previous,
    )
    if encodes:
        layout = dataclasses.replace(layout, sent=num_kept + np.arange(len(ids)))
    return AgentGroup(
        spec, agent_data, adversary, layout, empty_models(layout.first_received + inbox, spec.dim)
    )


def initial_models(spec: RunSpec, size: int = len(CLUSTER)) -> Tensor:
    """Return a different model for each agent."""
    theta = torch.from_numpy(stream(SEED, "theta").normal(size=(size, spec.dim)) * 0.3).float()
    count = sum(map(len, batch_norm.statistics(spec.module, "shared").values()))
    theta[:, :count] = 1 + theta[:, :count] ** 2  # variances are positive
    return theta


GUARDS: dict[str, dict[str, float]] = {
    "newcomers": {"newcomer_share": 0.4},
    "far": {"max_distance": 0.9},
    "near": {"min_distance": 1.1},
    "half-way": {"interpolation": 0.5},
    "tolerance": {"loss_tolerance": 1.0},
    "exit test": {"exit_test": 0.5},
}
"""Each guard alone; `ALL_GUARDS` has all of them."""

ALL_GUARDS = {key: value for guard in GUARDS.values() for key, value in guard.items()}


def with_guards(algorithm: algorithms.Algorithm, **guards: Any) -> algorithms.Algorithm:
    """Return the algorithm with these guards."""
    return algorithm.with_guards(Guards(**guards))


def local_engine(
    algorithm: algorithms.Algorithm,
    module: nn.Module | None = None,
    attack: Attack = FLIP,
    *,
    data: AgentSamples | None = None,
    theta: Tensor | None = None,
    own_model: bool = True,
    collude: bool = True,
    **changes: Any,
) -> LocalEngine:
    """Return an engine with all agents in this process."""
    spec = run_spec_of(algorithm, network() if module is None else module, **changes)
    group = agent_group_of(spec, adversary_of(attack, own_model=own_model, collude=collude), data)
    group.models[: len(CLUSTER)] = initial_models(spec) if theta is None else theta
    return LocalEngine(group, SerialExecutor(group))


def models_of(engine: LocalEngine) -> Tensor:
    """Return the models of all agents, a view of the engine's buffer."""
    return engine.group.models[: len(CLUSTER)]


def run_rounds(
    engine: Engine, count: int = 1, memory: AgentState | None = None, start: int = 0
) -> list[Round]:
    """Run `count` rounds from round `start`."""
    state = memory or AgentState.initial(len(CLUSTER))
    return list(run_algorithm(engine, state, start, start + count, 0, lambda n, phase: None))


@dataclass(frozen=True)
class AgentDecisions:
    """Decisions of one agent in a round."""

    asked: list[int]
    ids: list[int]
    rows: list[int]
    weights: list[float]
    own_weight: float
    before: float
    f: float
    reduction: Reduction | None


def decisions_of(decisions: Decisions, j: int) -> AgentDecisions:
    """Return the decisions of agent j."""
    k = decisions.agents.tolist().index(j)
    rows, weights = (
        Ragged(values, decisions.received.sizes)[k].tolist()
        for values in (decisions.rows, decisions.weights)
    )
    own_weight, before, f = (
        float(values[k])
        for values in (decisions.own_weight, decisions.previous_weight, decisions.f)
    )
    received, asked = decisions.received[k].tolist(), decisions.asked[k].tolist()
    return AgentDecisions(
        asked, received, rows, weights, own_weight, before, f, decisions.reductions.get(j)
    )


def oracle_agents(
    engine: LocalEngine,
    make: Callable[[], nn.Module],
    options: reference.Options,
    statistics: batch_norm.StatisticsMode = "shared",
) -> list[reference.Agent]:
    """Return an engine's agents for the oracle.

    Their data are rotated and poisoned here, without the library's code.
    """
    agent_data, agents = engine.group.data, []
    for j, is_malicious in enumerate(MALICIOUS):
        module = make()
        parameters.bind_(module, models_of(engine)[j].clone())
        (x, y), (validation_x, validation_y) = (
            (
                torch.rot90(agent_data.samples.x[indices[j]], 2 * CLUSTER[j], (-2, -1)),
                agent_data.samples.y[indices[j]],
            )
            for indices in (agent_data.train, agent_data.validation)
        )
        if is_malicious and engine.group.adversary.attack.poison is FLIP.poison:
            y = torch.where(y == 1, 2, y)
        own = "judged" if engine.group.adversary.averages_own_model else "excluded"
        colluder = dataclasses.replace(reference.COLLUDER, budget=BUDGET, own_model=own)
        algorithm = colluder if is_malicious else options
        agents.append(
            reference.Agent(
                module,
                x,
                y,
                validation_x,
                validation_y,
                is_malicious,
                CLUSTER[j],
                algorithm,
                statistics=statistics,
            )
        )
    return agents

"""Nine agents in two clusters, four of them malicious, and rounds of theirs, for the tests that look at rounds from
inside."""

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
from fedcb2o.federated import (
    Adversary,
    AgentData,
    AgentGroup,
    AgentState,
    Attack,
    BufferLayout,
    Decisions,
    Ragged,
    Reduction,
    RunSpec,
    Training,
    algorithms,
)
from fedcb2o.federated.attacks import label_flip
from fedcb2o.federated.guards import Guards
from fedcb2o.federated.sections import AgentsSection
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


BAD = [j for j, bad in enumerate(MALICIOUS) if bad]


GOOD = [j for j, bad in enumerate(MALICIOUS) if not bad]


TURNED = ClusterTransform(functools.partial(transforms.rotation), 2, CLASSES, (0.0, 1.0))


FLIP = Attack(poison=lambda shard, draw: label_flip(shard, draw, source=1, target=2))


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, CLASSES))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(27, CLASSES)
    )


def wide() -> nn.Module:
    """So many parameters that they are mixed in several tiles."""
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 700), nn.ReLU(), nn.Linear(700, CLASSES))


def normed(statistics: batch_norm.StatisticsMode = "shared") -> nn.Module:
    """With batch norms, one of which is frozen as a whole, and with a counter and a constant that are no parameters."""
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
    """A frozen layer with a low-rank adapter that is trained, and that two layers share."""

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
        found: Tensor = self.head((self.again(h) + self.up(self.twice(h))).relu())
        return found


@dataclass(frozen=True)
class Held:
    """The samples, and which of them each agent trains and validates on."""

    samples: Shard
    train: list[np.ndarray]
    validation: list[np.ndarray]


def held() -> Held:
    """20 samples for an attacker, 13 and 11 for everybody else."""
    draw = stream(SEED, "data")
    y = torch.from_numpy(draw.integers(CLASSES, size=300))
    x = torch.from_numpy(draw.normal(size=(300, 1, 3, 3))).float() + y.view(-1, 1, 1, 1) / 2
    order = np.split(draw.permutation(300), 10)
    train = [
        chosen[:20] if bad else chosen[:13] for chosen, bad in zip(order, MALICIOUS, strict=False)
    ]
    validation = [
        chosen[:0] if bad else chosen[13:24] for chosen, bad in zip(order, MALICIOUS, strict=False)
    ]
    return Held(Shard(x, y), train, validation)


AGENTS = AgentsSection(benign=3, malicious=2, budget=BUDGET)


def terms_of(algorithm: algorithms.Algorithm, module: nn.Module, **changes: Any) -> RunSpec:
    keys = {key: changes.pop(key) for key in list(changes) if key in AgentsSection.model_fields}
    known = {
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
    return RunSpec(**{**known, **changes})


def attackers_of(
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


def block_of(
    terms: RunSpec,
    attackers: Adversary,
    holds: Held | None = None,
    agents: Sequence[int] = range(len(CLUSTER)),
    own: Sequence[int] | None = None,
    inbox: int = 0,
) -> AgentGroup:
    """Some agents with a pool of zeros, their own models in the rows `own` of it, and room for so many arrivals."""
    holds, ids = holds or held(), np.array(agents)
    holdings = AgentData(
        agents=ids,
        samples=holds.samples,
        test=holds.samples,
        train=Ragged.from_arrays([holds.train[j] for j in agents]),
        validation=Ragged.from_arrays([holds.validation[j] for j in agents]),
        cluster=attackers.cluster[ids],
        view=TURNED,
        num_classes=CLASSES,
        malicious=attackers.malicious[ids],
        attack=attackers.attack,
        seed=terms.seed,
    )
    rows = np.array(range(len(ids)) if own is None else own)
    clusters = terms.algorithm.clusters
    kept = int(rows.max()) + 1 + (0 if clusters is None else clusters.num_rows(len(ids)))
    each = attackers.attack.num_published(1, len(GOOD))
    layout = BufferLayout.create(
        rows, kept, holdings.malicious, each, terms.algorithm.keeps_previous
    )
    return AgentGroup(
        terms, holdings, attackers, layout, empty_models(layout.first_received + inbox, terms.dim)
    )


def first_models(terms: RunSpec, size: int = len(CLUSTER)) -> Tensor:
    """A model for each agent, all different."""
    theta = torch.from_numpy(stream(SEED, "theta").normal(size=(size, terms.dim)) * 0.3).float()
    count = sum(map(len, batch_norm.statistics(terms.module, "shared").values()))
    theta[:, :count] = 1 + theta[:, :count] ** 2  # variances are positive
    return theta


GUARDS: dict[str, dict[str, float]] = {
    "newcomers": {"newcomer_share": 0.4},
    "far": {"max_distance": 0.9},
    "near": {"min_distance": 1.1},
    "half-way": {"interpolation": 0.5},
    "tolerance": {"loss_tolerance": 1.0},
}
"""Every guard alone; `ALL_GUARDS` has all at once."""

ALL_GUARDS = {key: value for guard in GUARDS.values() for key, value in guard.items()}


def guarded(algorithm: algorithms.Algorithm, **guards: Any) -> algorithms.Algorithm:
    """An algorithm with these guards."""
    return algorithm.with_guards(Guards(**guards))


def together(
    algorithm: algorithms.Algorithm,
    module: nn.Module | None = None,
    attack: Attack = FLIP,
    *,
    holds: Held | None = None,
    theta: Tensor | None = None,
    own_model: bool = True,
    collude: bool = True,
    **changes: Any,
) -> LocalEngine:
    """All agents on one machine, in this process."""
    terms = terms_of(algorithm, network() if module is None else module, **changes)
    block = block_of(terms, attackers_of(attack, own_model=own_model, collude=collude), holds)
    block.models[: len(CLUSTER)] = first_models(terms) if theta is None else theta
    return LocalEngine(block, SerialExecutor(block))


def models_of(engine: LocalEngine) -> Tensor:
    """The models of all agents, in the engine's pool."""
    return engine.group.models[: len(CLUSTER)]


def run_rounds(
    engine: Engine, count: int = 1, memory: AgentState | None = None, start: int = 0
) -> list[Round]:
    """Some rounds."""
    state = memory or AgentState.initial(len(CLUSTER))
    return list(run_algorithm(engine, state, start, start + count, 0, lambda n, phase: None))


@dataclass(frozen=True)
class Chosen:
    """What one agent decided."""

    asked: list[int]
    ids: list[int]
    rows: list[int]
    weights: list[float]
    own_weight: float
    before: float
    f: float
    reduction: Reduction | None


def chosen(choices: Decisions, j: int) -> Chosen:
    """What agent j decided."""
    k = choices.agents.tolist().index(j)
    rows, weights = (
        Ragged(each, choices.received.sizes)[k].tolist() for each in (choices.rows, choices.weights)
    )
    own_weight, before, f = (
        float(each[k]) for each in (choices.own_weight, choices.previous_weight, choices.f)
    )
    received, asked = choices.received[k].tolist(), choices.asked[k].tolist()
    return Chosen(asked, received, rows, weights, own_weight, before, f, choices.reductions.get(j))


def oracle_agents(
    engine: LocalEngine,
    make: Callable[[], nn.Module],
    options: reference.Options,
    statistics: batch_norm.StatisticsMode = "shared",
) -> list[reference.Agent]:
    """The agents of an engine, for the oracle: their true data turned by its own hands, poisoned as the engine says."""
    holdings, agents = engine.group.data, []
    for j, bad in enumerate(MALICIOUS):
        module = make()
        parameters.bind_(module, models_of(engine)[j].clone())
        (x, y), (seen, labels) = (
            (
                torch.rot90(holdings.samples.x[held[j]], 2 * CLUSTER[j], (-2, -1)),
                holdings.samples.y[held[j]],
            )
            for held in (holdings.train, holdings.validation)
        )
        if bad and engine.adversary.attack.poison is FLIP.poison:
            y = torch.where(y == 1, 2, y)
        own = "judged" if engine.adversary.averages_own_model else "excluded"
        colluder = dataclasses.replace(reference.COLLUDER, budget=BUDGET, own_model=own)
        algorithm = colluder if bad else options
        agents.append(
            reference.Agent(
                module, x, y, seen, labels, bad, CLUSTER[j], algorithm, statistics=statistics
            )
        )
    return agents

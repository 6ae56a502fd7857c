"""A cluster computes the same bits as one machine."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.agents import (
    ALL_GUARDS,
    CLUSTER,
    TRAINING,
    Adapted,
    adversary_of,
    agent_group_of,
    agent_samples,
    convolutional,
    initial_models,
    network,
    normed,
    run_spec_of,
    wide,
    with_guards,
)
from tests.simulation.test_rounds import POISONED, flip, found_by
from torch import nn

from fedcb2o.errors import RunError
from fedcb2o.federated import algorithms, attacks, topology, trigger_exchange
from fedcb2o.federated.adversary import Attack
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.ragged import Ragged
from fedcb2o.federated.run_spec import KernelConfig
from fedcb2o.federated.trigger_exchange import ExchangeWeighing
from fedcb2o.federated.types import stateful
from fedcb2o.nn.memory_layout import ChannelsLast
from fedcb2o.parallel._executors import SerialExecutor
from fedcb2o.rng import stream
from fedcb2o.simulation.adversarial_engine import AdversarialEngine
from fedcb2o.simulation.local_engine import LocalEngine
from fedcb2o.simulation.rounds import WorkerLostError, run_rounds

pytest.importorskip("ray")

import ray

from fedcb2o.ray_backend import _connect, _placement
from fedcb2o.ray_backend._engine import RayEngine
from fedcb2o.ray_backend._errors import translate_ray_errors
from fedcb2o.ray_backend._placement import shard_agents
from fedcb2o.ray_backend._worker import AgentWorker

ALL_AGENTS = range(len(CLUSTER))
COUNTS = [1, 2, 3]


@pytest.fixture(scope="module")
def cluster():
    """Start Ray on this machine with four actors; a run uses some of them."""
    with (
        _connect.connected(_connect.LOCAL, 200 * 2**20, 5),
        _placement.start_workers(_placement.list_nodes() * 4) as actors,
    ):
        yield actors


@dataclass(frozen=True)
class Scene:
    """Settings of a run, from which each process creates its agents."""

    algorithm: Callable[..., Any]
    attack: Callable[[], Attack]
    network: Callable[[], torch.nn.Module]
    own_model: bool
    changes: dict[str, Any]

    def block(self, tensors: Any = None, agents: Any = ALL_AGENTS) -> AgentGroup:
        run_spec, agent_data = (
            run_spec_of(self.algorithm(), self.network(), **self.changes),
            agent_samples(),
        )
        return agent_group_of(
            run_spec, adversary_of(self.attack(), own_model=self.own_model), agent_data, agents
        )

    def first(self, tensors: Any, theta: torch.Tensor, ids: Any) -> None:
        theta.copy_(initial_models(self.block().spec)[list(ids)])


def flipping(**more: Any) -> Attack:
    return Attack(poison=flip, **more)


def crafting(name: str) -> Attack:
    craft = getattr(attacks, name)
    return Attack(craft=craft, threat=craft.threat, poison=flip if name in POISONED else None)


def cluster_engine(actors, scene: Scene, count: int, nodes: int = 2) -> RayEngine:
    """Create an engine of at most `count` workers on simulated nodes."""
    block = scene.block()
    shares = shard_agents(block.spec, block.data.train.sizes.tolist(), count)
    node_names = [f"node {b % nodes}" for b in range(len(shares))]
    engine = RayEngine(block, shares, actors[: len(shares)], node_names)
    engine.build_groups(scene.block, {})
    engine.init_models(scene.first)
    return engine


def assert_cluster_agrees(
    actors,
    algorithm,
    attack=flipping,
    make=network,
    rounds=2,
    own_model=True,
    counts=COUNTS,
    **changes,
):
    """Run on one machine and on clusters; compare records, decisions and models."""
    settings = {"kernels": KernelConfig(models_per_batch=2), "max_samples": 17, **changes}
    scene = Scene(algorithm, attack, make, own_model, settings)
    group = scene.block()
    num_kept = len(CLUSTER)
    group.models[:num_kept] = initial_models(group.spec)
    if group.layout.sent is not None:
        num_kept *= 2
        group.models[group.layout.sent] = group.models[: len(CLUSTER)]
    local_rounds, models = (
        found_by(LocalEngine(group, SerialExecutor(group)), rounds),
        group.models[:num_kept],
    )
    for count in counts:
        engine = cluster_engine(actors, scene, count)
        for n, (one, other) in enumerate(zip(local_rounds, found_by(engine, rounds), strict=True)):
            assert one[0] == other[0], (count, n)
            assert one[1] == other[1], (count, n)
            assert one[2].keys() == other[2].keys(), (count, n)
        cluster_models = torch.cat(list(engine.persistent_models()))[:, : group.spec.dim]
        assert torch.equal(
            models.view(torch.int32), cluster_models.contiguous().view(torch.int32)
        ), count


ALGORITHMS = {
    "FedCB2O": partial(algorithms.fedcb2o),
    "DFedAvgM": partial(algorithms.dfedavgm),
    "alone": partial(algorithms.local_training),
    "all guards": lambda: with_guards(
        algorithms.fedcb2o(beta=0.6, own_model="judged", mixing_factor=1.0), **ALL_GUARDS
    ),
    "all guards, krum": lambda: with_guards(
        algorithms.by_rule(rule="krum", selection="prob_sampling"), **ALL_GUARDS
    ),
    "everyone": partial(algorithms.fedcb2o, selection="everyone", own_model="judged", beta=0.4),
    "patches": partial(
        algorithms.fedcb2o, criterion={"name": "trigger_sensitivity"}, own_model="judged"
    ),
}


@pytest.mark.quick
def test_cluster_agrees_with_absent_agents(cluster):
    assert_cluster_agrees(cluster, ALGORITHMS["FedCB2O"], participation=0.6, rounds=3)


@pytest.mark.parametrize("attack", [flipping, partial(crafting, "alie")], ids=["flip", "alie"])
def test_cluster_agrees_on_top_k_differences(cluster, attack):
    """Published models are encoded, but those of attackers who craft theirs."""
    assert_cluster_agrees(
        cluster, ALGORITHMS["FedCB2O"], attack, encoding="top_k", participation=0.6, rounds=3
    )


@pytest.mark.parametrize("participation", [1.0, 0.6])
@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_cluster_agrees_with_every_algorithm(cluster, algorithm, participation):
    assert_cluster_agrees(cluster, algorithm, participation=participation, rounds=3)


@pytest.mark.parametrize(
    "make",
    [normed, partial(normed, "local"), partial(normed, "dropped"), Adapted],
    ids=["shared", "local", "dropped", "base"],
)
def test_cluster_agrees_on_batch_statistics_and_frozen_parameters(cluster, make):
    """Two agents train at once, so that several models are computed in one program."""
    training = TRAINING.model_copy(
        update={"batch_size": 11}
    )  # a batch norm refuses a single sample
    assert_cluster_agrees(cluster, algorithms.fedcb2o, make=make, training=training, counts=[3])


RULES = [
    "mean",
    "trimmed_mean",
    "geometric_median",
    "krum",
    "foolsgold",
    "fltrust",
    "monna",
    "flame",
    "sentinel",
]


@pytest.mark.parametrize("rule", RULES)
def test_cluster_agrees_with_rules_under_a_colluding_attack(cluster, rule):
    assert_cluster_agrees(
        cluster,
        partial(algorithms.by_rule, rule=rule, needs_losses=True),
        partial(crafting, "alie"),
        malicious_share=0.4,
    )


@stateful(uses_previous=True)
def steady(state, judged):
    """Weigh peers by their number of messages; keep the model, and read the previous one."""
    assert not judged.models[judged.previous].equal(judged.theta)
    assert not state or not state["theta"].equal(judged.theta)
    seen = state.get("seen", torch.zeros(len(CLUSTER))).clone()
    seen[judged.received.ids] += 1
    weights = seen[judged.received.ids].double()
    return {"seen": seen, "theta": judged.theta.clone()}, weights / weights.sum().clamp(min=1)


def by_steady():
    return algorithms.by_rule(rule=steady, needs_losses=False)


@pytest.mark.quick
def test_cluster_agrees_with_a_stateful_rule(cluster):
    assert_cluster_agrees(cluster, by_steady, rounds=4, participation=0.6)


def test_rule_states_stay_with_the_agents(cluster):
    """Checkpoints fetch the states, and another cluster continues from them."""
    scene = Scene(by_steady, flipping, network, True, {"kernels": KernelConfig(models_per_batch=2)})
    engine, other_engine = (
        cluster_engine(cluster[:2], scene, 2),
        cluster_engine(cluster[2:4], scene, 2),
    )
    *_, third_round = run_rounds(
        AdversarialEngine(engine), AgentState.initial(len(CLUSTER)), 0, 3, 0
    )
    state = engine.persistent_state(third_round.state)
    counts = [int(kept["seen"].sum()) if kept else 0 for kept in state.rule_states]
    assert counts == [9, 9, 9, 0, 0, 9, 9, 0, 0]
    other_engine.load_models_(torch.cat(list(engine.persistent_models())))
    (continued,) = run_rounds(AdversarialEngine(other_engine), state, 3, 4, 0)
    (expected,) = run_rounds(AdversarialEngine(engine), third_round.state, 3, 4, 0)
    pairs = [
        one.persistent_state(done.state)
        for one, done in ((engine, expected), (other_engine, continued))
    ]
    for state_a, state_b in zip(*(each.rule_states for each in pairs), strict=True):
        assert state_a.keys() == state_b.keys()
        assert all(state_a[name].equal(state_b[name]) for name in state_a)


def exchanging():
    algorithm = algorithms.fedcb2o(own_model="judged", mixing_factor=1.0)
    algorithm = with_guards(algorithm, trigger_exchange=2)
    return replace(algorithm, weigh=ExchangeWeighing(algorithm.weigh, 2))


def test_cluster_agrees_with_exchanged_triggers(cluster, monkeypatch):
    counts = []
    write = trigger_exchange.with_received

    def count(state, received):
        counts.append(sum(len(triggers) for triggers in received if triggers is not None))
        return write(state, received)

    monkeypatch.setattr(trigger_exchange, "with_received", count)
    training = TRAINING.model_copy(update={"gamma": 0.5, "local_epochs": 3})
    assert_cluster_agrees(
        cluster, exchanging, backdoor, training=training, participation=0.8, rounds=4, counts=[3]
    )
    half = len(counts) // 2  # of each run, whose batches have another order
    assert sum(counts[:half]) == sum(counts[half:]) > 0


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("count", [2, 3])
def test_only_requested_bytes_are_sent(cluster, count, nodes):
    settings = {"kernels": KernelConfig(models_per_batch=1)}
    engine = cluster_engine(
        cluster, Scene(algorithms.dfedavgm, flipping, wide, True, settings), count, nodes
    )
    homes = {int(j): b for b, agents in enumerate(engine.agents) for j in agents}
    for done in run_rounds(AdversarialEngine(engine), AgentState.initial(len(CLUSTER)), 0, 2, 0):
        received = [(homes[j], int(i)) for j in ALL_AGENTS for i in done.decisions.received[j]]
        between = {(b, i) for b, i in received if homes[i] != b}
        moved = {(b % nodes, i) for b, i in between if homes[i] % nodes != b % nodes}
        assert engine.loaned_bytes == len(between) * 4 * engine.spec.dim
        assert engine.moved_bytes == len(moved) * 4 * engine.spec.dim
        engine.reset_traffic()


def test_an_actor_error_is_not_a_lost_worker(cluster):
    """A repeated attempt would fail too: the row does not exist."""
    engine = cluster_engine(cluster, Scene(algorithms.dfedavgm, flipping, network, True, {}), 2)
    refs = [engine.handles[0].export_rows.remote(np.array([10**6, 10**6 + 1]))]
    message = r"^work on the cluster failed \(.*Error: .*\)$"
    with pytest.raises(RunError, match=message) as raised, translate_ray_errors():
        ray.get(refs)
    none, first = Ragged.empty(0), Ragged.from_arrays([np.zeros(1, np.int64)])
    with pytest.raises(RunError, match=message) as raised_by_call:
        engine.call(AgentWorker.import_rows, [(none,), (first,)], [[], refs])
    assert raised.type is raised_by_call.type is RunError


@ray.remote
def raising(error: Exception) -> None:
    raise error


FULL = ray.exceptions.ObjectStoreFullError("no room")
GONE = ray.exceptions.WorkerCrashedError()


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            FULL,
            RunError,
            r"^Ray's store or disk is full on a node \(ObjectStoreFullError: no room\): take more",
        ),
        (GONE, WorkerLostError, r"^a part of the cluster is lost \(WorkerCrashedError: .*\)$"),
    ],
)
def test_a_full_store_is_a_run_error_and_a_crash_is_a_lost_worker(cluster, error, kind, message):
    """The error is raised in this process, or in a task."""
    with pytest.raises(RunError, match=message) as raised_locally, translate_ray_errors():
        raise error
    with pytest.raises(RunError, match=message) as raised_in_task, translate_ray_errors():
        ray.get(raising.remote(error))
    assert raised_locally.type is raised_in_task.type is kind


@pytest.mark.parametrize(
    "name", ["alie", "dissensus", "equivocation", "mimic", "not_finite", "gap_aware", "slow_drift"]
)
def test_cluster_agrees_under_attacks_on_models(cluster, name):
    """Attacks that read other models, or send each receiver a different one, are included."""
    attack = partial(crafting, name)
    assert_cluster_agrees(
        cluster,
        partial(algorithms.fedcb2o, own_model="judged", mixing_factor=1.0),
        attack,
        rounds=3,
    )


def backdoor() -> Attack:
    return Attack(poison=partial(attacks.backdoor, target=3, size=1))


def sleepers() -> Attack:
    return Attack(craft=attacks.random_model, threat=attacks.random_model.threat, from_round=1)


OTHER_ATTACKS = {
    "sybils": partial(flipping, sybils=True, from_round=1),
    "lies": partial(flipping, claimed_samples=10**9),
    "backdoor": backdoor,
    "sleepers": sleepers,
    "none": Attack,
}


@pytest.mark.parametrize("attack", OTHER_ATTACKS.values(), ids=OTHER_ATTACKS)
def test_cluster_agrees_under_other_attacks(cluster, attack):
    assert_cluster_agrees(
        cluster, partial(algorithms.dfedavgm), attack, own_model=False, rounds=3, counts=[3]
    )


@pytest.mark.parametrize("name", ["ring", "same_cluster", "random_regular"])
def test_cluster_agrees_on_graphs(cluster, name):
    graph = partial(getattr(topology, name), **({"degree": 4} if name == "random_regular" else {}))
    neighbours_of_agents = topology.neighbours(graph, torch.tensor(CLUSTER), stream(0, "graph"))
    assert_cluster_agrees(
        cluster,
        partial(algorithms.fedcb2o, mixing_factor=1.0),
        neighbours=neighbours_of_agents,
        participation=0.8,
    )


def channels_last() -> nn.Module:
    return nn.Sequential(ChannelsLast(), convolutional())


@pytest.mark.parametrize("make", [convolutional, channels_last, wide])
@pytest.mark.parametrize("rule", ["mean", "geometric_median"])
def test_cluster_agrees_with_other_networks(cluster, make, rule):
    assert_cluster_agrees(
        cluster, partial(algorithms.by_rule, rule=rule), partial(crafting, "dissensus"), make
    )

"""A cluster computes the same bits as one machine."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.agents import (
    ALL_GUARDS,
    CLUSTER,
    GUARDS,
    TRAINING,
    Adapted,
    attackers_of,
    block_of,
    convolutional,
    first_models,
    guarded,
    held,
    network,
    normed,
    terms_of,
    wide,
)
from tests.simulation.test_rounds import POISONED, flip, found_by
from torch import nn

from fedcb2o.errors import RunError
from fedcb2o.federated import (
    AgentGroup,
    AgentState,
    Attack,
    KernelConfig,
    algorithms,
    attacks,
    stateful,
    topology,
)
from fedcb2o.nn.memory_layout import ChannelsLast
from fedcb2o.parallel._executors import SerialExecutor
from fedcb2o.rng import stream
from fedcb2o.simulation.local_engine import LocalEngine
from fedcb2o.simulation.rounds import WorkerLostError, run_rounds

pytest.importorskip("ray")

import ray

from fedcb2o.ray_backend import _connect, _placement
from fedcb2o.ray_backend._actors import translate_ray_errors
from fedcb2o.ray_backend._engine import RayEngine
from fedcb2o.ray_backend._sharding import shard_agents
from fedcb2o.ray_backend._worker import AgentWorker

EVERYBODY = range(len(CLUSTER))
COUNTS = [1, 2, 3]


@pytest.fixture(scope="module")
def cluster():
    """Ray on this machine with four actors, of which a run takes some."""
    with (
        _connect.connected(_connect.LOCAL, 200 * 2**20, 5),
        _placement.start_workers(_placement.list_nodes() * 4) as actors,
    ):
        yield actors


@dataclass(frozen=True)
class Scene:
    """What to run, which each process makes for itself."""

    algorithm: Callable[..., Any]
    attack: Callable[[], Attack]
    network: Callable[[], torch.nn.Module]
    own_model: bool
    skewed: bool
    changes: dict[str, Any]

    def block(self, tensors: Any = None, agents: Any = EVERYBODY) -> AgentGroup:
        terms, holds = terms_of(self.algorithm(), self.network(), **self.changes), held()
        if (
            self.skewed
        ):  # nobody has the classes of its own number, and some have many samples and others few
            parts = [
                [
                    each[(holds.samples.y[each] != j % 4).numpy()][: len(each) - j]
                    for j, each in enumerate(lists)
                ]
                for lists in (holds.train, holds.validation)
            ]
            holds = dataclasses.replace(holds, train=parts[0], validation=parts[1])
        return block_of(terms, attackers_of(self.attack(), own_model=self.own_model), holds, agents)

    def first(self, tensors: Any, theta: torch.Tensor, ids: Any) -> None:
        theta.copy_(first_models(self.block().spec)[list(ids)])


def flipped(**more: Any) -> Attack:
    return Attack(poison=flip, **more)


def crafting(name: str) -> Attack:
    craft = getattr(attacks, name)
    return Attack(craft=craft, threat=craft.threat, poison=flip if name in POISONED else None)


def clustered(actors, scene: Scene, count: int, nodes: int = 2) -> RayEngine:
    """Create an engine of at most `count` workers on pretended nodes."""
    block = scene.block()
    shares = shard_agents(block.spec, block.data.train.sizes.tolist(), [1.0] * count)
    on = [f"node {b % nodes}" for b in range(len(shares))]
    engine = RayEngine(block, shares, actors[: len(shares)], on)
    engine.build_groups(scene.block, {}, {})
    engine.init_models(scene.first)
    return engine


def hold_equal(
    actors,
    algorithm,
    attack=flipped,
    make=network,
    rounds=2,
    own_model=True,
    skewed=False,
    counts=COUNTS,
    **changes,
):
    """Run on one machine and on clusters, and hold all that they find equal."""
    known = {"kernels": KernelConfig(models_per_batch=2), "max_samples": 17, **changes}
    scene = Scene(algorithm, attack, make, own_model, skewed, known)
    here = scene.block()
    here.models[: len(CLUSTER)] = first_models(here.spec)
    mine, models = (
        found_by(LocalEngine(here, SerialExecutor(here)), rounds),
        here.models[: len(CLUSTER)],
    )
    for count in counts:
        engine = clustered(actors, scene, count)
        for n, (one, other) in enumerate(zip(mine, found_by(engine, rounds), strict=True)):
            assert one[0] == other[0], (count, n)
            assert one[1] == other[1], (count, n)
            assert one[2].keys() == other[2].keys(), (count, n)
        theirs = torch.cat(list(engine.persistent_models()))[:, : here.spec.dim]
        assert torch.equal(models.view(torch.int32), theirs.contiguous().view(torch.int32)), count


def with_guard(guard: dict[str, float]) -> Any:
    return guarded(algorithms.fedcb2o(beta=0.6, own_model="judged", mixing_factor=1.0), **guard)


ALGORITHMS = {
    "FedCB2O": partial(algorithms.fedcb2o),
    "FedCBO": partial(algorithms.fedcbo),
    "DFedAvgM": partial(algorithms.dfedavgm),
    "alone": partial(algorithms.local_training),
    "FedAssay": algorithms.fedassay,
    "all guards, krum": lambda: guarded(
        algorithms.by_rule(rule="krum", selection="prob_sampling"), **ALL_GUARDS
    ),
    **{name: partial(with_guard, guard) for name, guard in GUARDS.items()},
    "everyone": partial(algorithms.fedcb2o, selection="everyone", own_model="judged", beta=0.4),
    "itself too": partial(
        algorithms.fedcb2o, own_model="judged", own_candidate=True, mixing_factor=1.0
    ),
    "patches": partial(
        algorithms.fedcb2o, criterion={"name": "trigger_sensitivity"}, own_model="judged"
    ),
    "T_G": partial(algorithms.fedcb2o, criterion_from_round=1),
}


@pytest.mark.quick
def test_fedcb2o_with_a_few_absent_agents(cluster):
    hold_equal(cluster, ALGORITHMS["FedCB2O"], participation=0.6, rounds=3)


@pytest.mark.parametrize("participation", [1.0, 0.6])
@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_every_algorithm(cluster, algorithm, participation):
    hold_equal(cluster, algorithm, participation=participation, rounds=3)


@pytest.mark.parametrize("algorithm", [algorithms.fedcb2o, algorithms.fedcbo, algorithms.dfedavgm])
def test_agents_that_lack_classes(cluster, algorithm):
    hold_equal(cluster, partial(algorithm), partial(flipped), skewed=True, counts=[3])


@pytest.mark.parametrize("training", [{"precision": "bfloat16"}, {"local_steps": 3}], ids=str)
def test_training(cluster, training):
    hold_equal(
        cluster,
        partial(algorithms.fedcb2o),
        training=TRAINING.model_copy(update=training),
        counts=[3],
    )


@pytest.mark.parametrize(
    "make",
    [normed, partial(normed, "local"), partial(normed, "dropped"), Adapted],
    ids=["shared", "local", "dropped", "base"],
)
def test_statistics_and_what_is_frozen(cluster, make):
    """Two agents at once, so that those of several models are computed in one program."""
    training = TRAINING.model_copy(
        update={"batch_size": 11}
    )  # a batch norm refuses a single sample
    hold_equal(cluster, algorithms.fedcb2o, make=make, training=training, counts=[3])


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
def test_rules_under_an_attack_that_looks_at_others(cluster, rule):
    hold_equal(
        cluster,
        partial(algorithms.by_rule, rule=rule, needs_losses=True),
        partial(crafting, "alie"),
        malicious_share=0.4,
    )


@pytest.mark.parametrize(("rule", "pre_step"), [("trimmed_mean", "nnm"), ("monna", "bucketing")])
def test_pre_steps(cluster, rule, pre_step):
    algorithm = partial(algorithms.by_rule, rule=rule, pre_step=pre_step, selection="everyone")
    hold_equal(cluster, algorithm, malicious_share=0.4, counts=[3])


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
def test_a_rule_with_memory(cluster):
    hold_equal(cluster, by_steady, rounds=4, participation=0.6)


def test_what_rules_keep_stays_with_the_agents(cluster):
    """Checkpoints fetch the states, and another cluster continues from them."""
    scene = Scene(
        by_steady, flipped, network, True, False, {"kernels": KernelConfig(models_per_batch=2)}
    )
    engine, again = clustered(cluster[:2], scene, 2), clustered(cluster[2:4], scene, 2)
    *_, third = run_rounds(engine, AgentState.initial(len(CLUSTER)), 0, 3, 0)
    state = engine.persistent_state(third.state)
    seen = [int(kept["seen"].sum()) if kept else 0 for kept in state.rule_states]
    assert seen == [9, 9, 9, 0, 0, 9, 9, 0, 0]
    again.load_models_(torch.cat(list(engine.persistent_models())))
    (there,) = run_rounds(again, state, 3, 4, 0)
    (here,) = run_rounds(engine, third.state, 3, 4, 0)
    pairs = [one.persistent_state(done.state) for one, done in ((engine, here), (again, there))]
    for mine, theirs in zip(*(each.rule_states for each in pairs), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(mine[name].equal(theirs[name]) for name in mine)


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("count", [2, 3])
def test_no_byte_goes_that_was_not_asked_for(cluster, count, nodes):
    known = {"kernels": KernelConfig(models_per_batch=1)}
    engine = clustered(
        cluster, Scene(algorithms.dfedavgm, flipped, wide, True, False, known), count, nodes
    )
    homes = {int(j): b for b, agents in enumerate(engine.sharding.agents) for j in agents}
    for done in run_rounds(engine, AgentState.initial(len(CLUSTER)), 0, 2, 0):
        received = [(homes[j], int(i)) for j in EVERYBODY for i in done.decisions.received[j]]
        between = {(b, i) for b, i in received if homes[i] != b}
        moved = {(b % nodes, i) for b, i in between if homes[i] % nodes != b % nodes}
        assert engine.actors.loaned_bytes == len(between) * 4 * engine.spec.dim
        assert engine.actors.moved_bytes == len(moved) * 4 * engine.spec.dim
        engine.actors.loaned_bytes = engine.actors.moved_bytes = 0


def test_an_error_of_an_actor_is_no_loss(cluster):
    """A repeated attempt would fail too: the row does not exist."""
    engine = clustered(cluster, Scene(algorithms.dfedavgm, flipped, network, True, False, {}), 2)
    refs = [engine.actors.handles[0].export_rows.remote(np.array([10**6, 10**6 + 1]))]
    told = r"^work on the cluster failed \(.*Error: .*\)$"
    with pytest.raises(RunError, match=told) as raised:
        engine.actors.get(refs)
    with pytest.raises(RunError, match=told) as there:
        engine.actors.call(
            AgentWorker.import_rows, [None, (0, [np.zeros(1, np.int64)])], [[], refs]
        )
    assert raised.type is there.type is RunError


@ray.remote
def raising(error: Exception) -> None:
    raise error


FULL = ray.exceptions.ObjectStoreFullError("no room")
GONE = ray.exceptions.WorkerCrashedError()


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (
            FULL,
            RunError,
            r"^Ray's store or disk is full on a node \(ObjectStoreFullError: no room\): take more",
        ),
        (GONE, WorkerLostError, r"^a part of the cluster is lost \(WorkerCrashedError: .*\)$"),
    ],
)
def test_a_full_store_is_no_loss_and_what_ray_lost_is_one(cluster, error, kind, told):
    """Here, and where a task or an actor meets it."""
    with pytest.raises(RunError, match=told) as here, translate_ray_errors():
        raise error
    with pytest.raises(RunError, match=told) as there, translate_ray_errors():
        ray.get(raising.remote(error))
    assert here.type is there.type is kind


@pytest.mark.parametrize(
    "name", ["alie", "dissensus", "equivocation", "mimic", "not_finite", "gap_aware", "slow_drift"]
)
def test_attacks_on_models(cluster, name):
    """Also those that look at others' models, and those that send each receiver another."""
    attack = partial(crafting, name)
    hold_equal(
        cluster,
        partial(algorithms.fedcb2o, own_model="judged", mixing_factor=1.0),
        attack,
        rounds=3,
    )


def backdoor() -> Attack:
    return Attack(poison=partial(attacks.backdoor, target=3, size=1))


def sleepers() -> Attack:
    return Attack(craft=attacks.random_model, threat=attacks.random_model.threat, from_round=1)


OTHERS = {
    "sybils": partial(flipped, sybils=True, from_round=1),
    "lies": partial(flipped, claimed_samples=10**9),
    "backdoor": backdoor,
    "sleepers": sleepers,
    "none": Attack,
}


@pytest.mark.parametrize("attack", OTHERS.values(), ids=OTHERS)
def test_other_attacks(cluster, attack):
    hold_equal(cluster, partial(algorithms.dfedavgm), attack, own_model=False, rounds=3, counts=[3])


@pytest.mark.parametrize("name", ["ring", "same_cluster", "random_regular"])
def test_graphs(cluster, name):
    graph = partial(getattr(topology, name), **({"degree": 4} if name == "random_regular" else {}))
    near = topology.neighbours(graph, torch.tensor(CLUSTER), stream(0, "graph"))
    hold_equal(
        cluster, partial(algorithms.fedcb2o, mixing_factor=1.0), neighbours=near, participation=0.8
    )


def channels_last() -> nn.Module:
    return nn.Sequential(ChannelsLast(), convolutional())


@pytest.mark.parametrize("make", [convolutional, channels_last, wide])
@pytest.mark.parametrize("rule", ["mean", "geometric_median"])
def test_other_networks(cluster, make, rule):
    hold_equal(
        cluster, partial(algorithms.by_rule, rule=rule), partial(crafting, "dissensus"), make
    )

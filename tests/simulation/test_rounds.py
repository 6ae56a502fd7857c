"""Two engines compute the same decisions, records and models, bit for bit."""

import functools

import pytest
import torch
from tests import networks
from tests.agents import (
    ALL_GUARDS,
    CLASSES,
    CLUSTER,
    GUARDS,
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
from tests.plain_engine import PlainEngine

from fedcb2o.federated import aggregation, algorithms, attacks, topology
from fedcb2o.federated.adversary import Attack
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.evaluation.metrics import AttackGoal, compute_metrics
from fedcb2o.federated.run_spec import KernelConfig
from fedcb2o.federated.types import stateful
from fedcb2o.parallel._executors import SerialExecutor
from fedcb2o.rng import stream
from fedcb2o.simulation.adversarial_engine import AdversarialEngine, Stage
from fedcb2o.simulation.local_engine import LocalEngine
from fedcb2o.simulation.rounds import run_rounds

ALL_AGENTS = range(len(CLUSTER))


BLOCKS = {
    "each alone": [[j] for j in ALL_AGENTS],
    "three by three": [[0, 4, 8], [1, 2, 5], [3, 6, 7]],
    "all": [list(ALL_AGENTS)],
}


def flip(shard, draw):
    return attacks.label_flip(shard, draw, source=1, target=2)


def found_by(engine: Stage, count: int) -> list[tuple[str, dict, dict]]:
    """Return the scores, the decisions and states as bytes, and the reductions of each round."""
    rounds = []
    played = AdversarialEngine(engine)
    names = ("weights", "own_weight", "factor", "own_loss", "previous_weight", "f")
    for done in run_rounds(played, AgentState.initial(len(CLUSTER)), 0, count, count):
        chosen, state_after = done.decisions, engine.persistent_state(done.state)
        scores = {}
        if done.test_results is not None:
            columns = compute_metrics(done.test_results, AttackGoal((1,), (2,)))
            scores = {name: column.tolist() for name, column in columns.items()}
            scores["agents"] = done.test_results.agents.tolist()
        arrays = {
            "train_loss": done.train_loss,
            "asked": chosen.asked.values,
            "num_asked": chosen.asked.sizes,
            "received": chosen.received.values,
            "num_received": chosen.received.sizes,
            **{name: getattr(chosen, name) for name in names},
            "met": state_after.contacts.ids.values,
            "sizes": state_after.contacts.ids.sizes,
            "likelihood": state_after.contacts.likelihood,
            **{
                f"{j} {name}": array.numpy()
                for j, state in enumerate(state_after.rule_states)
                for name, array in state.items()
            },
        }
        as_bytes = {name: array.tobytes() for name, array in arrays.items()}
        rounds.append((repr(scores), as_bytes, chosen.reductions))
    assert scores
    return rounds


FLIP = Attack(poison=flip)


def assert_engines_agree(
    algorithm,
    attack=FLIP,
    make=network,
    count=2,
    own_model=True,
    choices=("three by three",),
    **changes,
):
    """Run both engines, with each choice of blocks, and compare scores, decisions and models."""
    attackers = adversary_of(attack, own_model=own_model)
    agent_data = agent_samples()
    local_results = {}
    for name in choices:
        blocks = BLOCKS[name]
        batch_size = None if name == "all" else 1  # batched training may change bits
        kernels = KernelConfig(models_per_batch=batch_size)
        make_spec = functools.partial(run_spec_of, algorithm, kernels=kernels, max_samples=17)
        if batch_size not in local_results:
            spec = make_spec(make(), **changes)
            block = agent_group_of(spec, attackers, agent_data)
            block.models[: len(CLUSTER)] = initial_models(spec)
            local_results[batch_size] = (
                found_by(LocalEngine(block, SerialExecutor(block)), count),
                block.models[: len(CLUSTER)],
            )
        posted = PlainEngine(make_spec(make(), **changes), attackers, agent_data, blocks)
        posted_rounds, (local_rounds, models) = found_by(posted, count), local_results[batch_size]
        for n, (one, other) in enumerate(zip(local_rounds, posted_rounds, strict=True)):
            assert one[0] == other[0], (name, n)
            assert one[1] == other[1], (name, n)
            assert one[2].keys() == other[2].keys(), (name, n)
        assert torch.equal(models.view(torch.int32), posted.models.view(torch.int32)), name


ALGORITHMS = {
    "FedCB2O": algorithms.fedcb2o(),
    "FedCB2O, as released": algorithms.fedcb2o(variant="released"),
    "own model judged": algorithms.fedcb2o(
        own_model="judged", own_candidate=True, mixing_factor=1.0
    ),
    "T_G": algorithms.fedcb2o(criterion_from_round=2),
    "exact": algorithms.fedcb2o(
        selection="everyone", own_model="judged", beta=0.4, delta_q=0.01, quantile="averaged"
    ),
    "FedCBO": algorithms.fedcbo(),
    "DFedAvgM": algorithms.dfedavgm(),
    "alone": algorithms.local_training(),
    "largest": algorithms.fedcb2o(
        criterion={"name": "largest", "of": ["class_loss_gap", "distance", "last_layer_excess"]},
        own_model="judged",
        mixing_factor=1.0,
    ),
    "FedAssay": algorithms.fedassay(),
    "all guards": with_guards(
        algorithms.fedcb2o(beta=0.75, own_model="judged", mixing_factor=1.0), **ALL_GUARDS
    ),
    "all guards, patches": with_guards(
        algorithms.fedcb2o(
            criterion={"name": "trigger_sensitivity"}, own_model="judged", mixing_factor=1.0
        ),
        **ALL_GUARDS,
    ),
    "all guards, krum": with_guards(
        algorithms.by_rule(rule="krum", selection="prob_sampling", pre_step="nnm"), **ALL_GUARDS
    ),
    "all guards, DFedAvgM": with_guards(algorithms.dfedavgm(), **ALL_GUARDS),
    "perturbations": algorithms.fedcb2o(
        criterion={
            "name": "perturbation_gap",
            "pixels": 3,
            "steps": 2,
            "z": 0.5,
            "against": "majority",
        },
        beta=0.6,
        own_model="judged",
        mixing_factor=1.0,
    ),
    "patches": algorithms.fedcb2o(
        criterion={"name": "trigger_sensitivity"}, own_model="judged", mixing_factor=1.0
    ),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_engines_agree_with_every_algorithm(algorithm):
    """Agents are absent in each round."""
    choices = ["each alone", "all"]
    assert_engines_agree(algorithm, count=3, participation=0.6, choices=choices)


@pytest.mark.parametrize("guard", GUARDS.values(), ids=GUARDS)
def test_engines_agree_with_every_guard(guard):
    algorithm = algorithms.fedcb2o(beta=0.6, own_model="judged", mixing_factor=1.0)
    assert_engines_agree(with_guards(algorithm, **guard), count=3, participation=0.6)


@pytest.mark.parametrize(
    "make", [normed, functools.partial(normed, "local"), Adapted], ids=["shared", "local", "base"]
)
def test_engines_agree_on_batch_statistics_and_frozen_parameters(make):
    training = TRAINING.model_copy(update={"batch_size": 11})
    assert_engines_agree(algorithms.fedcb2o(own_model="judged"), make=make, training=training)


@pytest.mark.parametrize("name", sorted(set(aggregation.__all__) - {"by_num_samples", "clair"}))
def test_engines_agree_with_every_rule_under_a_colluding_attack(name):
    attack = Attack(craft=functools.partial(attacks.alie, z=0.5), threat=attacks.alie.threat)
    assert_engines_agree(
        algorithms.by_rule(rule=name, needs_losses=True), attack, malicious_share=0.4
    )


@pytest.mark.parametrize("pre_step", ["nnm", "bucketing"])
@pytest.mark.parametrize("name", ["mean", "trimmed_mean", "monna"])
def test_engines_agree_with_pre_steps(name, pre_step):
    assert_engines_agree(
        algorithms.by_rule(rule=name, pre_step=pre_step, selection="everyone"), malicious_share=0.4
    )


POISONED = {"boosting", "descent", "echo", "gap_aware", "neurotoxin", "slow_drift"}
NEEDED = {"descent": {"source": 1, "target": 0}}


ATTACKS_ON_MODELS = [
    name
    for name in attacks.__all__
    if hasattr(getattr(attacks, name), "threat") and name != "factor_mixing"
]


@pytest.mark.parametrize("name", ATTACKS_ON_MODELS)
def test_engines_agree_under_every_attack_on_models(name):
    """Attacks that read other models, or send each receiver a different one, are included."""
    craft = getattr(attacks, name)
    bound = functools.partial(craft, **NEEDED.get(name, {}))
    attack = Attack(craft=bound, threat=craft.threat, poison=flip if name in POISONED else None)
    assert_engines_agree(algorithms.fedcb2o(own_model="judged", mixing_factor=1.0), attack)


@pytest.mark.parametrize(
    "algorithm",
    [
        algorithms.by_rule(rule="clair"),
        algorithms.by_rule(rule="trimmed_mean", space="products"),
        algorithms.tad_lora(switching_interval=1),
    ],
    ids=["clair", "products", "TAD-LoRA"],
)
def test_engines_agree_with_adapters(algorithm):
    craft = attacks.factor_mixing
    assert_engines_agree(
        algorithm,
        Attack(craft=craft, threat=craft.threat),
        make=functools.partial(networks.Adapted, 9, CLASSES),
        malicious_share=0.4,
    )


@pytest.mark.parametrize(
    "attack",
    [
        Attack(poison=lambda shard, draw: attacks.random_labels(shard, draw)),
        Attack(poison=lambda shard, draw: attacks.backdoor(shard, draw, 0, target=3, size=1)),
        Attack(poison=flip, sybils=True, from_round=1),
        Attack(poison=flip, claimed_samples=10**9),
        Attack(craft=attacks.random_model, threat=attacks.random_model.threat, from_round=2),
        Attack(),
    ],
    ids=["random labels", "backdoor", "sybils", "lies", "sleepers", "none"],
)
def test_engines_agree_under_other_attacks(attack):
    assert_engines_agree(
        algorithms.fedcb2o(own_model="trusted", mixing_factor=1.0), attack, count=4
    )
    assert_engines_agree(algorithms.dfedavgm(), attack, own_model=False)


@pytest.mark.parametrize("name", topology.__all__)
def test_engines_agree_on_every_graph(name):
    graph = functools.partial(
        getattr(topology, name), **({"degree": 4} if name == "random_regular" else {})
    )
    neighbours_of_agents = topology.neighbours(graph, torch.tensor(CLUSTER), stream(0, "graph"))
    assert_engines_agree(
        algorithms.fedcb2o(mixing_factor=1.0, own_model="trusted"),
        neighbours=neighbours_of_agents,
        count=3,
        participation=0.8,
    )


@pytest.mark.parametrize("make", [convolutional, wide], ids=["convolutions", "several tiles"])
@pytest.mark.parametrize(
    "algorithm",
    [
        *(algorithms.by_rule(rule=rule) for rule in ("mean", "trimmed_mean", "fltrust")),
        algorithms.fedcb2o(mixing_factor=1.0),
    ],
    ids=["mean", "trimmed_mean", "fltrust", "FedCB2O"],
)
def test_engines_agree_with_other_networks(make, algorithm):
    dissensus = Attack(craft=attacks.dissensus, threat=attacks.dissensus.threat)
    assert_engines_agree(algorithm, dissensus, make)


def test_a_stateful_rule_keeps_its_state_between_rounds():
    @stateful(uses_previous=True)
    def steady(state, judged):
        """Weigh peers by the number of their messages; `previous` is a row of `models`."""
        assert not judged.models[judged.previous].equal(judged.theta)
        counts = state.get("seen", torch.zeros(len(CLUSTER))).clone()
        counts[judged.received.ids] += 1
        weights = counts[judged.received.ids].double()
        return {"seen": counts}, weights / weights.sum().clamp(min=1)

    algorithm = algorithms.by_rule(rule=steady, needs_losses=False)
    assert_engines_agree(algorithm, count=4)
    spec = run_spec_of(algorithm, network())
    block = agent_group_of(spec, adversary_of())
    block.models[: len(CLUSTER)] = initial_models(spec)
    *_, done = run_rounds(
        AdversarialEngine(LocalEngine(block, SerialExecutor(block))),
        AgentState.initial(len(CLUSTER)),
        0,
        4,
        0,
    )
    result = [int(state["seen"].sum()) if state else 0 for state in done.state.rule_states]
    assert result == [12, 12, 12, 0, 0, 12, 12, 0, 0]

"""Two engines compute the same decisions, records and models, bit for bit."""

import functools
import json

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
from tests.posted import Posted

from fedcb2o.experiments.runs._round_records import metrics_record, pairs_record
from fedcb2o.federated import (
    AgentState,
    Attack,
    AttackGoal,
    KernelConfig,
    aggregation,
    algorithms,
    attacks,
    stateful,
    topology,
)
from fedcb2o.parallel._executors import SerialExecutor
from fedcb2o.rng import stream
from fedcb2o.simulation.local_engine import LocalEngine
from fedcb2o.simulation.rounds import Engine, run_rounds

EVERYBODY = range(len(CLUSTER))


BLOCKS = {
    "each alone": [[j] for j in EVERYBODY],
    "three by three": [[0, 4, 8], [1, 2, 5], [3, 6, 7]],
    "all": [list(EVERYBODY)],
}


def flip(shard, draw):
    return attacks.label_flip(shard, draw, source=1, target=2)


def found_by(engine: Engine, count: int) -> list[tuple[str, dict, dict]]:
    """The records of some rounds, what agents chose and remember, to the bit."""
    found = []
    for done in run_rounds(engine, AgentState.initial(len(CLUSTER)), 0, count, count):
        choices, memory = done.decisions, engine.persistent_state(done.state)
        lines = (
            metrics_record(AttackGoal((1,), (2,)), engine.adversary.malicious, done),
            pairs_record(done),
        )
        arrays = {
            "asked": choices.asked.values,
            "received": choices.received.values,
            **{
                name: getattr(choices, name)
                for name in ("weights", "own_weight", "factor", "own_loss", "previous_weight", "f")
            },
            "met": memory.contacts.ids.values,
            "sizes": memory.contacts.ids.sizes,
            "likelihood": memory.contacts.likelihood,
            **{
                f"{j} {name}": each.numpy()
                for j, state in enumerate(memory.rule_states)
                for name, each in state.items()
            },
        }
        found.append(
            (
                json.dumps(lines),
                {name: each.tobytes() for name, each in arrays.items()},
                choices.reductions,
            )
        )
    return found


FLIP = Attack(poison=flip)


def hold_equal(
    algorithm,
    attack=FLIP,
    make=network,
    count=2,
    own_model=True,
    choices=("three by three",),
    **changes,
):
    """Run both engines, with each choice of blocks, and hold all that they find equal."""
    attackers, holds, ours = attackers_of(attack, own_model=own_model), held(), {}
    for name in choices:
        blocks = BLOCKS[name]
        together = None if name == "all" else 1  # who trains in one program may change bits
        terms = functools.partial(
            terms_of, algorithm, kernels=KernelConfig(models_per_batch=together), max_samples=17
        )
        if together not in ours:
            of_shared = terms(make(), **changes)
            block = block_of(of_shared, attackers, holds)
            block.models[: len(CLUSTER)] = first_models(of_shared)
            ours[together] = (
                found_by(LocalEngine(block, SerialExecutor(block)), count),
                block.models[: len(CLUSTER)],
            )
        posted = Posted(terms(make(), **changes), attackers, holds, blocks)
        theirs, (mine, models) = found_by(posted, count), ours[together]
        for n, (one, other) in enumerate(zip(mine, theirs, strict=True)):
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
        criterion={"name": "largest", "of": ["class_loss_gap", "distance"]},
        own_model="judged",
        mixing_factor=1.0,
    ),
    "FedAssay": algorithms.fedassay(),
    "all guards": guarded(
        algorithms.fedcb2o(beta=0.75, own_model="judged", mixing_factor=1.0), **ALL_GUARDS
    ),
    "all guards, patches": guarded(
        algorithms.fedcb2o(
            criterion={"name": "trigger_sensitivity"}, own_model="judged", mixing_factor=1.0
        ),
        **ALL_GUARDS,
    ),
    "all guards, krum": guarded(
        algorithms.by_rule(rule="krum", selection="prob_sampling", pre_step="nnm"), **ALL_GUARDS
    ),
    "all guards, DFedAvgM": guarded(algorithms.dfedavgm(), **ALL_GUARDS),
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
@pytest.mark.parametrize(
    ("participation", "choices"), [(1.0, ["three by three"]), (0.6, BLOCKS)], ids=["all", "absent"]
)
def test_every_algorithm(algorithm, participation, choices):
    hold_equal(algorithm, count=3, participation=participation, choices=choices)


@pytest.mark.parametrize("guard", GUARDS.values(), ids=GUARDS)
def test_every_guard(guard):
    algorithm = algorithms.fedcb2o(beta=0.6, own_model="judged", mixing_factor=1.0)
    hold_equal(guarded(algorithm, **guard), count=3, participation=0.6, choices=BLOCKS)


@pytest.mark.parametrize(
    "make", [normed, functools.partial(normed, "local"), Adapted], ids=["shared", "local", "base"]
)
def test_statistics_and_what_is_frozen(make):
    training = TRAINING.model_copy(update={"batch_size": 11})
    hold_equal(algorithms.fedcb2o(own_model="judged"), make=make, training=training)


@pytest.mark.parametrize("name", sorted(set(aggregation.__all__) - {"by_num_samples", "clair"}))
def test_every_rule_under_an_attack_that_looks_at_others(name):
    attack = Attack(craft=functools.partial(attacks.alie, z=0.5), threat=attacks.alie.threat)
    hold_equal(algorithms.by_rule(rule=name, needs_losses=True), attack, malicious_share=0.4)


@pytest.mark.parametrize("pre_step", ["nnm", "bucketing"])
@pytest.mark.parametrize("name", ["mean", "trimmed_mean", "monna"])
def test_pre_steps(name, pre_step):
    hold_equal(
        algorithms.by_rule(rule=name, pre_step=pre_step, selection="everyone"), malicious_share=0.4
    )


POISONED = {"boosting", "echo", "gap_aware", "neurotoxin", "slow_drift"}


ON_MODELS = [
    name
    for name in attacks.__all__
    if hasattr(getattr(attacks, name), "threat") and name != "factor_mixing"
]


@pytest.mark.parametrize("name", ON_MODELS)
def test_every_attack_on_models(name):
    """Also those that look at others' models, and those that send each receiver another."""
    craft = getattr(attacks, name)
    attack = Attack(craft=craft, threat=craft.threat, poison=flip if name in POISONED else None)
    hold_equal(algorithms.fedcb2o(own_model="judged", mixing_factor=1.0), attack, count=3)


@pytest.mark.parametrize(
    "algorithm",
    [
        algorithms.by_rule(rule="clair"),
        algorithms.by_rule(rule="trimmed_mean", space="products"),
        algorithms.tad_lora(switching_interval=1),
    ],
    ids=["clair", "products", "TAD-LoRA"],
)
def test_adapters(algorithm):
    craft = attacks.factor_mixing
    hold_equal(
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
def test_other_attacks(attack):
    hold_equal(algorithms.fedcb2o(own_model="trusted", mixing_factor=1.0), attack, count=4)
    hold_equal(algorithms.dfedavgm(), attack, own_model=False)


@pytest.mark.parametrize("name", topology.__all__)
def test_every_graph(name):
    graph = functools.partial(
        getattr(topology, name), **({"degree": 4} if name == "random_regular" else {})
    )
    near = topology.neighbours(graph, torch.tensor(CLUSTER), stream(0, "graph"))
    hold_equal(
        algorithms.fedcb2o(mixing_factor=1.0, own_model="trusted"),
        neighbours=near,
        count=3,
        participation=0.8,
    )


@pytest.mark.parametrize("make", [convolutional, wide], ids=["convolutions", "several tiles"])
@pytest.mark.parametrize("rule", ["mean", "trimmed_mean", "geometric_median", "fltrust"])
def test_other_networks(make, rule):
    dissensus = Attack(craft=attacks.dissensus, threat=attacks.dissensus.threat)
    hold_equal(algorithms.by_rule(rule=rule), dissensus, make)
    hold_equal(algorithms.fedcb2o(mixing_factor=1.0), dissensus, make)


def test_a_rule_with_memory_keeps_it_from_round_to_round():
    @stateful(uses_previous=True)
    def steady(state, judged):
        """Whoever was here before counts as often as it was; `before` is a row of the pool."""
        assert not judged.models[judged.previous].equal(judged.theta)
        seen = state.get("seen", torch.zeros(len(CLUSTER))).clone()
        seen[judged.received.ids] += 1
        weights = seen[judged.received.ids].double()
        return {"seen": seen}, weights / weights.sum().clamp(min=1)

    algorithm = algorithms.by_rule(rule=steady, needs_losses=False)
    hold_equal(algorithm, count=4)
    terms = terms_of(algorithm, network())
    block = block_of(terms, attackers_of())
    block.models[: len(CLUSTER)] = first_models(terms)
    *_, done = run_rounds(
        LocalEngine(block, SerialExecutor(block)),
        AgentState.initial(len(CLUSTER)),
        0,
        4,
        0,
    )
    assert [int(state["seen"].sum()) if state else 0 for state in done.state.rule_states] == [
        12,
        12,
        12,
        0,
        0,
        12,
        12,
        0,
        0,
    ]

"""Rounds of IFCA: reference loops, records, and equal bits."""

import copy
import functools
import math

import pytest
import torch
from safetensors.torch import load_file
from tests import agents as ours
from tests import reference
from tests.agents import (
    BENIGN_IDS,
    CLUSTER,
    MALICIOUS_IDS,
    SEED,
    decisions_of,
    network,
    oracle_agents,
    run_rounds,
)
from tests.tiny import bits_for_any_workers, lines_of, tiny
from torch.nn import functional as F

from fedcb2o import knows
from fedcb2o.errors import ConfigError
from fedcb2o.experiments import load, run
from fedcb2o.federated import aggregation, algorithms
from fedcb2o.federated.adversary import Attack
from fedcb2o.federated.aggregation import base
from fedcb2o.federated.contacts import AgentState
from fedcb2o.nn import parameters
from fedcb2o.rng import stream
from fedcb2o.simulation import ifca

PLAIN = reference.Training(gamma=0.05, lambda2=1.0, momentum=0.9, batch_size=8, local_epochs=1)


TEAM = {"benign": 2, "malicious": 2, "benign_samples": 20, "malicious_samples": 30, "budget": 4}


IFCA = {"name": "ifca", "models": 2}


# The reference: plain loops, an `nn.Module` for each agent and each of the K models


def true_data(engine, j):
    samples, indices = engine.group.data.samples, engine.group.data.train[j]
    return torch.rot90(samples.x[indices], 2 * CLUSTER[j], (-2, -1)), samples.y[indices]


def best_of(engine, centres):
    """Return each agent's model of least loss on its training data without poison."""
    best = []
    for j in range(len(CLUSTER)):
        x, y = true_data(engine, j)
        with torch.no_grad():
            losses = [float(F.cross_entropy(centre(x), y)) for centre in centres]
        best.append(losses.index(min(losses)))
    return best


def oracle_round(engine, agents, centres, n, published=lambda j, theta: theta):
    """Run a round of IFCA: train the chosen models, then average those of each cluster.

    Returns the weights of the members of each of the K models.
    """
    best = best_of(engine, centres)
    for agent, k in zip(agents, best, strict=True):
        agent.module = copy.deepcopy(centres[k])
    reference.local_updates(agents, n, seed=SEED, training=PLAIN)
    online = stream(SEED, "online", n).random(len(agents)) < engine.spec.agents.participation
    member_weights = []
    for k, centre in enumerate(centres):
        members = [j for j in range(len(agents)) if best[j] == k and online[j]]
        size = {
            j: len(agents[j].train_y) if engine.spec.algorithm.clusters.by_samples else 1
            for j in members
        }
        weights = {j: size[j] / sum(size.values()) for j in members}
        if members:
            theta = sum(
                weights[j] * published(j, parameters.flatten(agents[j].module)).double()
                for j in members
            )
            parameters.bind_(centre, theta.float())
        member_weights.append(weights)
    return member_weights


def engine_of(num_models, weights="equal", attack=ours.FLIP, settings=None, **changes):
    """Return an engine whose K models are similar, so that agents choose differently."""
    algorithm = algorithms.ifca(models=num_models, weights=weights, **(settings or {}))
    engine = ours.local_engine(algorithm, attack=attack, collude=False, **changes)
    num_stored = len(stored_models_of(engine))
    stored_models_of(engine)[:] = torch.from_numpy(
        stream(SEED, "theta").normal(size=(num_stored, engine.spec.dim)) * 0.3
    ).float()
    centres = centres_of(engine)
    centres.copy_(centres[0].lerp(centres, 0.1))
    return engine


def stored_models_of(engine):
    """Return the models of the agents, followed by those of the coordinator."""
    return engine.group.models[
        : len(CLUSTER) + engine.spec.algorithm.clusters.num_rows(len(CLUSTER))
    ]


def centres_of(engine):
    return stored_models_of(engine)[len(CLUSTER) :]


def modules_of(engine):
    modules = []
    for theta in centres_of(engine):
        modules.append(network())
        parameters.bind_(modules[-1], theta.clone())
    return modules


def lazy_rounds(engine, count):
    """Iterate over the rounds lazily."""
    return ifca.run_rounds(
        engine, AgentState.initial(len(CLUSTER)), 0, count, 0, lambda n, phase: None
    )


def assert_equals_reference(engine, published=lambda j, theta: theta, num_rounds=5):
    """Run both; compare the K models, the agents' models and the weights of every round."""
    centres = modules_of(engine)
    agents = oracle_agents(engine, network, reference.FEDCB2O)
    choices = [best_of(engine, centres)]
    for done in lazy_rounds(engine, num_rounds):
        member_weights = oracle_round(engine, agents, centres, done.n, published)
        for k, centre in enumerate(centres):
            model = centres_of(engine)[k]
            torch.testing.assert_close(model, parameters.flatten(centre), rtol=1e-4, atol=2e-5)
            parameters.bind_(centre, model.clone())  # a ReLU at its kink magnifies rounding
        choices.append(best_of(engine, centres))
        for j, k in enumerate(choices[-1]):
            mixed = decisions_of(done.decisions, j)
            assert ours.models_of(engine)[j].equal(centres_of(engine)[k]), (done.n, j)
            peer_weights = dict(zip(mixed.ids, mixed.weights, strict=True))
            assert j not in peer_weights
            assert mixed.own_weight == pytest.approx(member_weights[k].get(j, 0.0))
            assert peer_weights == pytest.approx(
                {i: w for i, w in member_weights[k].items() if i != j}
            )
            assert len(mixed.asked) == 0
    return choices


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("weights", ["equal", "samples"])
@pytest.mark.parametrize("num_models", [1, 3])
def test_rounds_equal_the_reference_loops(num_models, weights, participation):
    choices = assert_equals_reference(engine_of(num_models, weights, participation=participation))
    assert len(set(choices[0])) == (1 if num_models == 1 else 2)


@pytest.mark.parametrize("each_receiver", [False, True])
def test_crafted_models_are_averaged(each_receiver):
    """The coordinator receives the model crafted for the first benign agent."""

    @knows(each_receiver=each_receiver)
    def numbered(view, draw):
        crafted = [torch.full_like(view.own, view.agent / 10 + i) for i in view.receivers.tolist()]
        return torch.stack(crafted) if each_receiver else crafted[0]

    def published(j, theta):
        return torch.full_like(theta, j / 10) if j in MALICIOUS_IDS else theta

    assert BENIGN_IDS[0] == 0
    engine = engine_of(3, attack=Attack(craft=numbered, threat=numbered.threat))
    assert_equals_reference(engine, published, num_rounds=3)


def test_attackers_choose_by_clean_data_and_train_the_chosen_model():
    starts = {}

    @knows()
    def record(view, draw):
        starts[view.agent] = view.previous.clone()
        return view.own

    engine = engine_of(3, attack=Attack(craft=record, threat=record.threat))
    centres = centres_of(engine).clone()
    expected = best_of(engine, modules_of(engine))
    assert len(set(expected)) == 2
    run_rounds(engine)
    assert sorted(starts) == MALICIOUS_IDS
    assert all(before.equal(centres[expected[j]]) for j, before in starts.items())


def test_non_finite_models_are_not_received():
    broken = Attack(craft=lambda view, draw: torch.full_like(view.own, torch.nan))
    engine = engine_of(3, attack=broken)
    for done in lazy_rounds(engine, 3):
        assert not set(done.decisions.received.values.tolist()) & set(MALICIOUS_IDS)
        assert stored_models_of(engine).isfinite().all()


def test_an_unchosen_model_is_unchanged():
    engine = engine_of(3)
    centres_of(engine)[-1] *= 100
    before = centres_of(engine)[-1].clone()
    choices = assert_equals_reference(engine, num_rounds=3)
    assert all(2 not in best for best in choices)
    assert centres_of(engine)[-1].equal(before)


def test_models_are_unchanged_without_online_agents():
    engine = engine_of(2, participation=1e-9)
    before = centres_of(engine).clone()
    (done,) = run_rounds(engine)
    assert centres_of(engine).equal(before)
    assert len(done.decisions.received.values) == 0
    assert not done.decisions.own_weight.any()


@pytest.mark.parametrize("rule", ["trimmed_mean", "krum", {"name": "trimmed_mean", "f": 1}])
def test_a_robust_rule_replaces_the_average(rule):
    engine = engine_of(3, settings={"rule": rule}, malicious_share=0.4)
    before, best = modules_of(engine), best_of(engine, modules_of(engine))
    agents = oracle_agents(engine, network, reference.FEDCB2O)
    oracle_round(engine, agents, modules_of(engine), 0)
    (done,) = run_rounds(engine)
    assert len(set(best)) == 2
    for k in set(best):
        members = [
            parameters.flatten(agents[j].module) for j in range(len(CLUSTER)) if best[j] == k
        ]
        f = 1 if rule != "trimmed_mean" and rule != "krum" else math.ceil(0.4 * len(members))
        used = getattr(aggregation, rule if isinstance(rule, str) else rule["name"])
        expected = base.apply(functools.partial(used, f=f), torch.stack(members), clip_f=True)
        torch.testing.assert_close(centres_of(engine)[k], expected, rtol=1e-4, atol=2e-5)
        assert not expected.equal(parameters.flatten(before[k]))
    weights = [decisions_of(done.decisions, j).weights for j in BENIGN_IDS]
    assert all(math.isnan(w) for each in weights for w in each) == (rule != "krum")
    assert rule != "krum" or all(max([*each, 0.0]) in (0.0, 1.0) for each in weights)


def test_the_best_of_several_restarts_is_kept():
    restarts = {"restarts": 3, "trial_rounds": 2}
    engine = engine_of(2, settings=restarts)
    centres_of(engine)[2:] *= torch.linspace(1.0, 0.5, 4).unsqueeze(1)  # sets that differ
    sets, losses, ends = centres_of(engine).clone().view(3, 2, -1), [], []
    for centres in sets:
        single = engine_of(2)
        centres_of(single).copy_(centres)
        run_rounds(single, 2)
        modules = modules_of(single)
        best, agent_losses = best_of(single, modules), []
        for j, k in enumerate(best):
            x, y = true_data(single, j)
            with torch.no_grad():
                agent_losses.append(float(F.cross_entropy(modules[k](x), y)))
        losses.append(sum(agent_losses) / len(agent_losses))
        ends.append(centres_of(single).clone())
    best = losses.index(min(losses))
    run_rounds(engine, 2)
    assert centres_of(engine)[:2].equal(ends[best])
    assert centres_of(engine)[2:].equal(sets.flatten(0, 1)[2:])
    assert sorted(losses)[1] - min(losses) > 1e-3


# Runs

VARIANTS = {
    "robust restarts": tiny(
        agents=TEAM, algorithm={**IFCA, "rule": "trimmed_mean", "restarts": 2, "trial_rounds": 1}
    ),
    "few take part": tiny(agents={**TEAM, "participation": 0.6}, algorithm=IFCA),
    "crafted": tiny(agents=TEAM, algorithm={**IFCA, "weights": "samples"}, attack={"name": "alie"}),
    "large": tiny(rounds=2, agents=TEAM, model={"hidden": [2000]}, algorithm={**IFCA, "models": 3}),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_neither_workers_nor_interruptions_change_a_bit(tmp_path, variant):
    bits_for_any_workers(tmp_path, VARIANTS[variant])


def test_a_run_saves_all_models_and_records_weights(tmp_path):
    experiment = tiny(agents=TEAM, algorithm=IFCA)
    assert load(experiment).num_models == 8 + 2
    assert load(tiny(agents=TEAM, algorithm=IFCA, attack={"name": "alie"})).num_models == 8 + 2 + 4
    done = run(experiment, out=tmp_path, workers=1)
    saved = load_file(tmp_path / "seed-1000/checkpoint.safetensors")["models"]
    assert len(saved) == 8 + 2
    assert all(any(theta.equal(centre) for centre in saved[8:]) for theta in saved[:8])
    assert not saved[8].equal(saved[9])
    lines = lines_of(tmp_path, "pairs")
    for line in lines:
        for j, (ids, weights, own) in enumerate(
            zip(line["ids"], line["weights"], line["own"], strict=True)
        ):
            assert j not in ids
            assert sum(weights) + own == pytest.approx(1, abs=1e-4)
    benign = done.records[~done.records.malicious]
    assert benign.malicious_weight.gt(0).any()
    assert benign.accuracy.notna().all()
    assert "choose" in done.timing


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"name": "ifca"}, "algorithm `ifca` needs the parameter `models`"),
        ({"name": "ifca", "models": 0}, "`models` must be 1 or more, got 0"),
        (
            {"name": "ifca", "models": 2.5},
            "algorithm `ifca`: `models` = 2.5: Input should be a valid integer",
        ),
        (
            {"name": "ifca", "models": 2, "weights": "sample"},
            "algorithm `ifca`: `weights` = 'sample': Input should be",
        ),
        ({"name": "ifca", "models": 2, "restarts": 0}, "`restarts` must be 1 or more, got 0"),
        (
            {"name": "ifca", "models": 2, "rule": "fltrust"},
            "the `rule` of ifca must read models alone",
        ),
        (
            {"name": "ifca", "models": 2, "rule": "sageflow"},
            "the `rule` of ifca must read models alone",
        ),
        (
            {"name": "ifca", "models": 2, "rule": "mean", "weights": "samples"},
            '`weights` = "samples" goes without',
        ),
        ({"name": "icfa", "models": 2}, "there is no algorithm `icfa`. Did you mean `ifca`?"),
    ],
)
def test_invalid_settings_are_refused(tmp_path, algorithm, message):
    with pytest.raises(ConfigError) as caught:
        run(tiny(agents=TEAM, algorithm=algorithm), out=tmp_path, workers=1)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)

"""Rounds of DFCA: reference loops, records, and equal bits."""

import copy

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
)
from tests.simulation.test_ifca import PLAIN, TEAM, true_data
from tests.tiny import bits_for_any_workers, first_quick, lines_of, tiny
from torch.nn import functional as F

from fedcb2o import knows
from fedcb2o.errors import ConfigError
from fedcb2o.experiments import load, run
from fedcb2o.federated import algorithms
from fedcb2o.federated.adversary import Attack
from fedcb2o.federated.contacts import AgentState
from fedcb2o.nn import parameters
from fedcb2o.rng import stream
from fedcb2o.simulation import dfca

K = 3
DFCA = {"name": "dfca", "models": 2}


# The reference: plain loops, K networks for each agent


def best_of(engine, agent_modules):
    """Return for each agent its network, 0 to K - 1, of least loss on its training data."""
    best = []
    for j, modules in enumerate(agent_modules):
        x, y = true_data(engine, j)
        with torch.no_grad():
            losses = [float(F.cross_entropy(module(x), y)) for module in modules]
        best.append(losses.index(min(losses)))
    return best


def oracle_round(engine, agents, agent_modules, n, asked, published):
    """Average each of the agents' K networks with the received ones (Eq. 7)."""
    best = best_of(engine, agent_modules)
    for agent, modules, k in zip(agents, agent_modules, best, strict=True):
        agent.module = copy.deepcopy(modules[k])
    reference.local_updates(agents, n, seed=SEED, training=PLAIN)
    online = stream(SEED, "online", n).random(len(agents)) < engine.spec.agents.participation
    trained = [parameters.flatten(agent.module).double() for agent in agents]
    for j, modules in enumerate(agent_modules):
        for k, module in enumerate(modules):
            parts = [trained[j] if best[j] == k else parameters.flatten(module).double()]
            parts += [published(i, j, trained[i]) for i in asked[j] if online[i] and best[i] == k]
            parameters.bind_(module, (sum(parts) / len(parts)).float())
    return best, online


def engine_of(attack=ours.FLIP, **changes):
    """Return an engine whose agents hold K similar models, so that agents choose differently."""
    engine = ours.local_engine(algorithms.dfca(models=K), attack=attack, collude=False, **changes)
    thetas = agent_models_of(engine)
    thetas[:] = torch.from_numpy(
        stream(SEED, "theta").normal(size=(K, engine.spec.dim)) * 0.3
    ).float()
    thetas.copy_(thetas[:, :1].lerp(thetas, 0.1))
    return engine


def agent_models_of(engine):
    """Return the K models of each agent, shape [agents, K, dim]."""
    count = len(CLUSTER)
    return engine.group.models[count : count * (1 + K)].view(count, K, -1)


def assert_equals_reference(engine, published=lambda i, j, theta: theta, num_rounds=4):
    """Run both; compare all models and weights after every round, and return the choices."""
    agent_modules = [[network() for _ in range(K)] for _ in CLUSTER]
    for modules, thetas in zip(agent_modules, agent_models_of(engine), strict=True):
        for module, theta in zip(modules, thetas, strict=True):
            parameters.bind_(module, theta.clone())
    agents, choices = oracle_agents(engine, network, reference.FEDCB2O), []
    for done in dfca.run_rounds(
        engine, AgentState.initial(len(CLUSTER)), 0, num_rounds, 0, lambda n, phase: None
    ):
        asked = [decisions_of(done.decisions, j).asked for j in range(len(CLUSTER))]
        best, online = oracle_round(engine, agents, agent_modules, done.n, asked, published)
        choices.append(best)
        for modules, thetas in zip(agent_modules, agent_models_of(engine), strict=True):
            for module, theta in zip(modules, thetas, strict=True):
                torch.testing.assert_close(theta, parameters.flatten(module), rtol=1e-4, atol=2e-5)
                parameters.bind_(module, theta.clone())  # a ReLU at its kink magnifies rounding
        for j, k in enumerate(best_of(engine, agent_modules)):
            mixed = decisions_of(done.decisions, j)
            assert ours.models_of(engine)[j].equal(agent_models_of(engine)[j, k]), (done.n, j)
            assert len(mixed.asked) == (3 if online[j] else 0)
            assert mixed.ids == [i for i in mixed.asked if online[i]]
            peers = [i for i in mixed.ids if best[i] == k]
            assert mixed.weights == pytest.approx(
                [(i in peers) / (1 + len(peers)) for i in mixed.ids]
            )
            assert mixed.own_weight == pytest.approx(1 / (1 + len(peers)))
    return choices


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_rounds_equal_the_reference_loops(participation):
    choices = assert_equals_reference(engine_of(participation=participation))
    assert len(set(choices[0])) > 1


def test_models_crafted_per_receiver_are_averaged_by_the_receiver():
    @knows(each_receiver=True)
    def numbered(view, draw):
        return torch.stack(
            [torch.full_like(view.own, view.agent / 10 + i) for i in view.receivers.tolist()]
        )

    def published(i, j, theta):
        return (
            torch.full_like(theta, i / 10 + j) if i in MALICIOUS_IDS and j in BENIGN_IDS else theta
        )

    assert_equals_reference(
        engine_of(attack=Attack(craft=numbered, threat=numbered.threat)), published, num_rounds=2
    )


def test_non_finite_models_are_not_received():
    engine = engine_of(attack=Attack(craft=lambda view, draw: torch.full_like(view.own, torch.nan)))
    for done in dfca.run_rounds(
        engine, AgentState.initial(len(CLUSTER)), 0, 3, 0, lambda n, phase: None
    ):
        received = [i for j in BENIGN_IDS for i in decisions_of(done.decisions, j).ids]
        assert received
        assert not set(received) & set(MALICIOUS_IDS)
        assert agent_models_of(engine).isfinite().all()


# Runs

VARIANTS = {
    "few take part": tiny(agents={**TEAM, "participation": 0.6}, algorithm=DFCA),
    "a graph": tiny(agents={**TEAM, "graph": "ring"}, algorithm=DFCA, attack={"name": "alie"}),
}


@pytest.mark.parametrize("variant", first_quick(VARIANTS))
def test_neither_workers_nor_interruptions_change_a_bit(tmp_path, variant):
    bits_for_any_workers(tmp_path, VARIANTS[variant])


@pytest.mark.parametrize("initialisation", ["common", "independent"])
def test_a_run_saves_all_models_and_records_weights(tmp_path, initialisation):
    experiment = tiny(
        rounds=1, agents={**TEAM, "initialisation": initialisation, "budget": 1}, algorithm=DFCA
    )
    assert load(experiment).num_models == 8 + 8 * 2
    done = run(experiment, out=tmp_path, workers=1)
    saved = load_file(tmp_path / "seed-1000/checkpoint.safetensors")["models"]
    assert len(saved) == 8 + 8 * 2
    agent_models = saved[8:].view(8, 2, -1)
    assert all(
        any(theta.equal(model) for model in own)
        for theta, own in zip(saved[:8], agent_models, strict=True)
    )
    assert all(not own[0].equal(own[1]) for own in agent_models)
    # After one round with one peer, most agents still hold an initial model.
    rows = {tuple(theta[:8].tolist()) for theta in agent_models.flatten(0, 1)}
    assert (len(rows) == 16) == (initialisation == "independent")
    (line,) = lines_of(tmp_path, "pairs")
    for weights, own in zip(line["weights"], line["own"], strict=True):
        assert sum(weights) + own == pytest.approx(1, abs=1e-4)
    benign = done.records[~done.records.malicious]
    assert benign.accuracy.notna().all()


def test_an_invalid_number_of_models_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="`models` must be 1 or more, got 0"):
        run(tiny(agents=TEAM, algorithm={"name": "dfca", "models": 0}), out=tmp_path, workers=1)

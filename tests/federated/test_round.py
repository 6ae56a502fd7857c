"""The library's rounds against the oracle, for every option: same streams, equal to float rounding."""

import dataclasses

import pytest
import torch
from tests import agents as ours
from tests import reference
from tests.agents import BUDGET, CLASSES, CLUSTER, MALICIOUS, SEED, TRAINING, chosen, convolutional, held, network

from fedcb2o import models
from fedcb2o.federated import algorithms, judging, publish
from fedcb2o.federated.peers import Memory
from fedcb2o.runtime.engine import rounds


def oracle_agents(engine, make, options):
    """The agents of an engine, for the oracle: their true data turned by its own hands, poisoned as the engine says."""
    holdings, agents = engine.block.holdings, []
    for j, bad in enumerate(MALICIOUS):
        module = make()
        models.bind_(module, ours.models_of(engine)[j].clone())
        (x, y), (seen, labels) = (
            (torch.rot90(holdings.samples.x[held[j]], 2 * CLUSTER[j], (-2, -1)), holdings.samples.y[held[j]])
            for held in (holdings.train, holdings.validation)
        )
        if bad and engine.attackers.attack.poison is ours.FLIP.poison:
            y = torch.where(y == 1, 2, y)
        own = "judged" if engine.attackers.own_model else "excluded"
        colluder = dataclasses.replace(reference.COLLUDER, budget=BUDGET, own_model=own)
        agents.append(reference.Agent(module, x, y, seen, labels, bad, CLUSTER[j], colluder if bad else options))
    return agents


def compare(algorithm, options, *, num_rounds=6, make=network, **changes):
    """Run both, and hold every model, choice, weight and likelihood equal after every round."""
    engine = ours.together(algorithm, make(), **changes)
    terms = engine.terms
    options = dataclasses.replace(options, budget=BUDGET, validation_loss=terms.average)
    agents = oracle_agents(engine, make, options)
    training = reference.Training(
        **{field.name: getattr(terms.training, field.name) for field in dataclasses.fields(reference.Training)}
    )
    for done in rounds(engine, Memory.blank(len(CLUSTER)), 0, num_rounds, lambda n: False):
        infos = reference.run_round(
            agents, done.n, seed=SEED, training=training, num_classes=CLASSES, participation=terms.participation
        )
        for j, (met, info) in enumerate(zip(done.memory.met, infos, strict=True)):
            mixed = chosen(done.choices, j)
            assert mixed.ids == info.received, (done.n, j)
            weights = dict.fromkeys(info.weights, 0.0)
            for i, weight in zip(mixed.ids, mixed.weights, strict=True):
                weights[i] += weight
            weights[j] += mixed.own_weight
            if sum(weights.values()) == 0:
                weights[j] = 1.0
            assert weights == pytest.approx(info.weights, abs=2e-5), (done.n, j)
            known = ~met.likelihood.isnan()
            if not MALICIOUS[j] and options.criterion != "num_samples":
                assert set(met.ids.tolist()) == agents[j].met
                likelihood = dict(zip(met.ids[known].tolist(), met.likelihood[known].tolist(), strict=True))
                assert likelihood == pytest.approx(agents[j].P, rel=2e-5)
            theta = ours.models_of(engine)[j]
            torch.testing.assert_close(theta, models.flatten(agents[j].module), rtol=1e-4, atol=2e-5)
            models.bind_(agents[j].module, theta.clone())  # a ReLU at its kink magnifies rounding


FEDCB2O = {
    "the text": {},
    "FedCBO": {"criterion": "average_loss"},
    "FedCBO, own trusted": {"criterion": "average_loss", "own_model": "trusted", "mixing_factor": 1.0},
    "T_G": {"criterion_from_round": 3},
    "T_G, own trusted": {"criterion_from_round": 3, "own_model": "trusted", "mixing_factor": 1.0},
    "own judged": {"own_model": "judged", "mixing_factor": 1.0},
    "own a candidate": {"own_candidate": True},
    "own a candidate and judged": {"own_candidate": True, "own_model": "judged"},
    "own a candidate and trusted": {"own_candidate": True, "own_model": "trusted", "alpha": 2.0},
    "first contact whole": {"first_contact": "whole", "kappa": 1.0, "zeta": 0.3},
    "lambda1": {"lambda1": 3.0},
    "beta": {"beta": 0.5, "own_model": "judged", "mixing_factor": 0.5},
    "beta, own excluded": {"beta": 0.4},
    "exact consensus": {"selection": "everyone", "beta": 0.34, "own_model": "judged"},
    "delta_q": {"selection": "everyone", "beta": 0.3, "delta_q": 0.15, "own_model": "judged"},
    "averaged level": {"selection": "everyone", "beta": 0.4, "quantile": "averaged", "own_model": "judged"},
    "uniform peers": {"selection": "uniform"},
}


@pytest.mark.parametrize("choice", FEDCB2O.values(), ids=FEDCB2O.keys())
def test_fedcb2o_equals_the_oracle(choice):
    compare(algorithms.fedcb2o(**choice), dataclasses.replace(reference.FEDCB2O, **choice))


def test_defaults_are_the_papers():
    compare(algorithms.fedcb2o(), reference.FEDCB2O)
    compare(algorithms.fedcbo(), reference.FEDCBO)


@pytest.mark.parametrize("absent", ["masked", "zero"])
def test_absent_classes_equal_the_oracle(absent):
    y = held().samples.y.numpy()  # nobody validates on class 1, so that masked and zero differ
    validation = [some[y[some] != 1] for some in held().validation]
    criterion = {"name": "class_loss_gap", "absent": absent}
    compare(
        algorithms.fedcb2o(criterion=criterion),
        dataclasses.replace(reference.FEDCB2O, absent=absent),
        holds=dataclasses.replace(held(), validation=validation),
    )


@pytest.mark.parametrize("own_model", ["judged", "excluded"])
def test_dfedavgm_equals_the_oracle(own_model):
    options = dataclasses.replace(reference.DFEDAVGM, own_model=own_model)
    compare(algorithms.dfedavgm(own_model=own_model), options, own_model=own_model == "judged")


def test_a_rule_without_losses_equals_the_oracle_and_nothing_is_evaluated(monkeypatch):
    for module, name in ((publish, "losses_of"), (judging, "losses_of_each")):
        monkeypatch.setattr(module, name, lambda *judged, **more: pytest.fail("a model was evaluated"))
    compare(algorithms.by_rule(rule="by_num_samples", judges=False), reference.DFEDAVGM)


def test_batch_means_equal_the_oracle():
    compare(algorithms.fedcb2o(), reference.FEDCB2O, average="batches")


def test_steps_instead_of_epochs_equal_the_oracle():
    compare(algorithms.fedcb2o(), reference.FEDCB2O, training=dataclasses.replace(TRAINING, local_steps=4))


@pytest.mark.parametrize("own_model", ["excluded", "trusted"])
def test_offline_agents_equal_the_oracle(own_model):
    choice = {"own_model": own_model, "mixing_factor": 1.0}
    options = dataclasses.replace(reference.FEDCB2O, **choice)
    compare(algorithms.fedcb2o(**choice), options, participation=0.5, num_rounds=10)


def test_a_network_that_is_not_dense_equals_the_oracle():
    compare(algorithms.fedcb2o(), reference.FEDCB2O, make=convolutional)

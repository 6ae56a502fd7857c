"""The library's rounds against the oracle, for every option: same streams, equal to float rounding."""

import dataclasses

import pytest
import torch
from tests import reference
from tests.tiny import empty_models
from torch import nn

from fedcb2o import models
from fedcb2o.data.partition import Population
from fedcb2o.data.shard import Dataset, Shard
from fedcb2o.federated import algorithms
from fedcb2o.federated.attacks import label_flip
from fedcb2o.federated.local_update import Training
from fedcb2o.federated.selection import nobody
from fedcb2o.federated.types import Attack
from fedcb2o.runtime import phases, world
from fedcb2o.runtime.simulate import rounds
from fedcb2o.runtime.workers import Here
from fedcb2o.runtime.world import Setting, World, shard_of
from fedcb2o.streams import stream

CLASSES, SEED, BUDGET = 4, 7, 3
TRAINING = Training(gamma=0.05, lambda2=1.0, momentum=0.9, batch_size=8, local_epochs=2)
CLUSTER = [0] * 5 + [1] * 4
MALICIOUS = [False, False, False, True, True, False, False, True, True]


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, CLASSES))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(27, CLASSES))


def make_setting(algorithm: algorithms.Algorithm, module: nn.Module, **changes: object) -> Setting:
    draw = stream(SEED, "data")
    y = torch.from_numpy(draw.integers(CLASSES, size=300))
    x = torch.from_numpy(draw.normal(size=(300, 1, 3, 3))).float() + y.view(-1, 1, 1, 1) / 2
    order = torch.from_numpy(draw.permutation(300)).split(30)
    train = tuple(chosen[:20] if bad else chosen[:13] for chosen, bad in zip(order, MALICIOUS, strict=False))
    validation = tuple(chosen[:0] if bad else chosen[13:24] for chosen, bad in zip(order, MALICIOUS, strict=False))
    population = Population(
        cluster=torch.tensor(CLUSTER),
        malicious=torch.tensor(MALICIOUS),
        train=train,
        validation=validation,
        tuning=order[-1],
        num_clusters=2,
    )
    shard = Shard(x, y)
    setting = Setting(
        seed=SEED,
        dataset=Dataset(shard, shard, tuple("abcd")),
        test=shard,
        population=population,
        model="network",
        module=module,
        training=TRAINING,
        algorithm=algorithm,
        attack=Attack(poison=lambda shard, draw: label_flip(shard, draw, source=1, target=2)),
        trigger=None,
        colluding=True,
        colluders_own_model=True,
        budget=BUDGET,
        participation=1.0,
        average="samples",
        rounds=10,
        share=0.0,
        neighbours=None,
    )
    return dataclasses.replace(setting, **changes)  # type: ignore[arg-type]


def oracle_agents(
    setting: Setting, theta: torch.Tensor, make: type, options: reference.Options
) -> list[reference.Agent]:
    agents = []
    for j, bad in enumerate(MALICIOUS):
        module = make()
        models.bind_(module, theta[j].clone())
        train = shard_of(setting, j)
        chosen = setting.population.validation[j]
        view = setting.dataset.pool.x[chosen]
        x = torch.rot90(view, 2 * CLUSTER[j], (-2, -1))
        own = "judged" if setting.colluders_own_model else "excluded"
        colluder = dataclasses.replace(reference.COLLUDER, budget=BUDGET, own_model=own)
        agents.append(
            reference.Agent(
                module,
                train.x,
                train.y,
                x,
                setting.dataset.pool.y[chosen],
                bad,
                CLUSTER[j],
                colluder if bad else options,
            )
        )
    return agents


def compare(
    algorithm: algorithms.Algorithm, options: reference.Options, *, num_rounds: int = 6, make=network, **changes
):
    """Run both, and hold every model, choice, weight and likelihood equal after every round."""
    setting = make_setting(algorithm, make(), **changes)
    d = models.dimension(setting.module)
    world = World(setting, empty_models(len(CLUSTER), d))
    world.models[:] = torch.from_numpy(stream(SEED, "theta").normal(size=(len(CLUSTER), d)) * 0.3).float()
    options = dataclasses.replace(options, budget=BUDGET, validation_loss=setting.average)
    agents = oracle_agents(setting, world.models, make, options)
    chosen = {field.name: getattr(setting.training, field.name) for field in dataclasses.fields(reference.Training)}
    training = reference.Training(**chosen)
    contacts = [nobody() for _ in CLUSTER]
    for done in rounds(world, Here(world), contacts, 0, num_rounds, lambda n: False):
        infos = reference.run_round(
            agents, done.n, seed=SEED, training=training, num_classes=CLASSES, participation=setting.participation
        )
        for j, (mixed, info) in enumerate(zip(done.mixed, infos, strict=True)):
            assert mixed.ids.tolist() == info.received, (done.n, j)
            weights = dict.fromkeys(info.weights, 0.0)
            for i, weight in zip(mixed.ids.tolist(), mixed.weights.tolist(), strict=True):
                weights[i] += weight
            weights[j] += mixed.own_weight
            if sum(weights.values()) == 0:
                weights[j] = 1.0
            assert weights == pytest.approx(info.weights, abs=2e-5), (done.n, j)
            theirs = agents[j].P
            met = done.contacts[j]
            known = ~met.likelihood.isnan()
            if not MALICIOUS[j] and options.criterion != "num_samples":
                assert set(met.ids.tolist()) == agents[j].met
                ours = dict(zip(met.ids[known].tolist(), met.likelihood[known].tolist(), strict=True))
                assert ours == pytest.approx(theirs, rel=2e-5)
            expected = models.flatten(agents[j].module)
            torch.testing.assert_close(world.models[j], expected, rtol=1e-4, atol=2e-5)
            models.bind_(agents[j].module, world.models[j].clone())  # a ReLU at its kink magnifies rounding


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
    setting = make_setting(algorithms.fedcb2o(), network())
    y = setting.dataset.pool.y  # nobody validates on class 1, so that masked and zero differ
    held = tuple(chosen[y[chosen] != 1] for chosen in setting.population.validation)
    criterion = {"name": "class_loss_gap", "absent": absent}
    compare(
        algorithms.fedcb2o(criterion=criterion),
        dataclasses.replace(reference.FEDCB2O, absent=absent),
        population=dataclasses.replace(setting.population, validation=held),
    )


@pytest.mark.parametrize("own_model", ["judged", "excluded"])
def test_dfedavgm_equals_the_oracle(own_model):
    options = dataclasses.replace(reference.DFEDAVGM, own_model=own_model)
    compare(algorithms.dfedavgm(own_model=own_model), options, colluders_own_model=own_model == "judged")


def test_a_rule_without_losses_equals_the_oracle_and_nothing_is_evaluated(monkeypatch):
    for module, name in ((world, "losses_of"), (phases, "losses_of_each")):
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

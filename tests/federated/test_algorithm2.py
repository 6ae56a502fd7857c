"""Rounds of the library compared with the oracle for every option, and models that are not finite.

Both draw from the same random streams, so they are equal up to float rounding.
"""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from tests import agents as ours
from tests import reference
from tests.agents import (
    BENIGN_IDS,
    BUDGET,
    CLASSES,
    CLUSTER,
    MALICIOUS,
    MALICIOUS_IDS,
    SEED,
    TRAINING,
    Adapted,
    agent_samples,
    convolutional,
    decisions_of,
    network,
    normed,
    oracle_agents,
    run_rounds,
)

from fedcb2o import knows
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.federated import algorithm2, algorithms, attacks, validation
from fedcb2o.federated.adversary import Attack
from fedcb2o.federated.aggregation.base import rule_signature
from fedcb2o.federated.algorithm2 import RuleWeighing
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.decisions import Decisions
from fedcb2o.federated.types import Reduction, RuleOutput
from fedcb2o.nn import parameters
from fedcb2o.simulation.adversarial_engine import AdversarialEngine
from fedcb2o.simulation.rounds import run_rounds as simulate

# Batches of at least two samples, as batch norm requires.
LARGE = ours.TRAINING.model_copy(update={"batch_size": 11})


def compare(algorithm, options, *, num_rounds=3, make=network, statistics="shared", **changes):
    """Run the library and the oracle; compare models, peers, weights, likelihoods in each round."""
    engine = ours.local_engine(algorithm, make(), **changes)
    run_spec = engine.spec
    options = dataclasses.replace(
        options, budget=BUDGET, validation_loss=run_spec.agents.validation_loss
    )
    agents = oracle_agents(engine, make, options, statistics)
    training = reference.Training(
        **{
            field.name: getattr(run_spec.training, field.name)
            for field in dataclasses.fields(reference.Training)
        }
    )
    for result in simulate(
        AdversarialEngine(engine), AgentState.initial(len(CLUSTER)), 0, num_rounds, 0
    ):
        infos = reference.run_round(
            agents,
            result.n,
            seed=SEED,
            training=training,
            num_classes=CLASSES,
            participation=run_spec.agents.participation,
        )
        for j, (met, info) in enumerate(zip(result.state.contacts, infos, strict=True)):
            mixed = decisions_of(result.decisions, j)
            assert mixed.ids == info.received, (result.n, j)
            weights = dict.fromkeys(info.weights, 0.0)
            for i, weight in zip(mixed.ids, mixed.weights, strict=True):
                weights[i] += weight
            weights[j] += mixed.own_weight
            if sum(weights.values()) == 0:
                weights[j] = 1.0
            assert weights == pytest.approx(info.weights, abs=2e-5), (result.n, j)
            is_known = ~met.likelihood.isnan()
            if not MALICIOUS[j] and options.criterion != "num_samples":
                assert set(met.ids.tolist()) == agents[j].met
                likelihood = dict(
                    zip(met.ids[is_known].tolist(), met.likelihood[is_known].tolist(), strict=True)
                )
                P = {i: value for i, value in agents[j].P.items() if i in agents[j].met}
                assert likelihood == pytest.approx(P, rel=2e-5)
            theta = ours.models_of(engine)[j]
            expected = parameters.flatten(agents[j].module)
            torch.testing.assert_close(theta, expected, rtol=1e-4, atol=2e-5)
            # a ReLU at its kink magnifies rounding
            parameters.bind_(agents[j].module, theta.clone())


FEDCB2O = {
    "the text": {},
    "FedCBO": {"criterion": "average_loss"},
    "FedCBO, own trusted": {
        "criterion": "average_loss",
        "own_model": "trusted",
        "mixing_factor": 1.0,
    },
    "T_G": {"criterion_from_round": 2},
    "T_G, own trusted": {"criterion_from_round": 2, "own_model": "trusted", "mixing_factor": 1.0},
    "own judged": {"own_model": "judged", "mixing_factor": 1.0},
    "own a candidate": {"own_candidate": True},
    "own a candidate and judged": {"own_candidate": True, "own_model": "judged"},
    "own a candidate and trusted": {"own_candidate": True, "own_model": "trusted", "alpha": 2.0},
    "released": {
        "own_candidate": True,
        "own_model": "trusted",
        "alpha": 2.0,
        "first_contact": "whole",
        "own_likelihood": "every_round",
    },
    "first contact whole": {"first_contact": "whole", "kappa": 1.0, "zeta": 0.3},
    "lambda1": {"lambda1": 3.0},
    "beta": {"beta": 0.5, "own_model": "judged", "mixing_factor": 0.5},
    "beta, own excluded": {"beta": 0.4},
    "exact consensus": {"selection": "everyone", "beta": 0.34, "own_model": "judged"},
    "label coverage": {"label_coverage": 1.0, "beta": 0.34, "own_model": "judged"},
    "label coverage, all models": {"label_coverage": 1.0},
    "rank tolerance": {
        **{"rank_tolerance": 0.05, "beta": 0.7, "own_model": "judged", "label_coverage": 0.5},
    },
    "rank tolerance 0": {"rank_tolerance": 0.0, "beta": 0.7, "own_model": "judged"},
    "excess": {"criterion": "class_loss_excess", "own_model": "judged", "alpha": 1.0},
    "excess, own a candidate": {"criterion": "class_loss_excess", "own_candidate": True},
    "excess, T_G, label coverage": {
        **{"criterion": "class_loss_excess", "criterion_from_round": 1, "label_coverage": 1.0},
        **{"own_model": "judged", "beta": 0.5, "alpha": 1.0},
    },
    "last layer": {"criterion": "last_layer_excess", "own_model": "judged", "own_candidate": True},
    "delta_q": {"selection": "everyone", "beta": 0.3, "delta_q": 0.15, "own_model": "judged"},
    "averaged level": {
        "selection": "everyone",
        "beta": 0.4,
        "quantile": "averaged",
        "own_model": "judged",
    },
    "uniform peers": {"selection": "uniform"},
}


@pytest.mark.parametrize("choice", FEDCB2O.values(), ids=FEDCB2O.keys())
def test_fedcb2o_equals_the_oracle(choice):
    compare(algorithms.fedcb2o(**choice), dataclasses.replace(reference.FEDCB2O, **choice))


GUARDS = {**ours.GUARDS, "noise": {"max_sensitivity": 2.0}, "all": ours.ALL_GUARDS}


@pytest.mark.parametrize("guards", GUARDS.values(), ids=GUARDS)
@pytest.mark.parametrize(
    "choice",
    [
        {"beta": 0.6, "own_model": "judged", "mixing_factor": 1.0},
        {"own_candidate": True, "criterion_from_round": 2},
    ],
    ids=["sub-level set", "text, T_G"],
)
def test_guards_equal_the_oracle(choice, guards):
    options = dataclasses.replace(reference.FEDCB2O, **choice, **guards)
    compare(ours.with_guards(algorithms.fedcb2o(**choice), **guards), options)


@pytest.mark.parametrize("guards", ["newcomers", "far", "near", "tolerance", "all"])
def test_guards_of_an_average_equal_the_oracle(guards):
    options = dataclasses.replace(reference.DFEDAVGM, **GUARDS[guards])
    compare(ours.with_guards(algorithms.dfedavgm(), **GUARDS[guards]), options)


@pytest.mark.parametrize("own_model", ["excluded", "judged"])
@pytest.mark.parametrize("statistics", ["shared", "local", "dropped"])
def test_batch_norms_equal_the_oracle(statistics, own_model):
    """Agents mix the statistics, estimate their own, or leave them unchanged."""
    choice = {"own_model": own_model, "mixing_factor": 1.0}
    make = functools.partial(normed, statistics)
    options = dataclasses.replace(reference.FEDCB2O, **choice)
    compare(
        algorithms.fedcb2o(**choice),
        options,
        make=make,
        statistics=statistics,
        training=LARGE,
        num_rounds=3,
    )


def test_adapters_on_a_frozen_base_equal_the_oracle():
    """Agents share one base, which is not part of theta. Tied parameters count once."""
    compare(algorithms.fedcb2o(), reference.FEDCB2O, make=Adapted, num_rounds=3)
    assert ours.local_engine(algorithms.fedcb2o(), Adapted()).spec.dim == 2 * 9 + 9 * 2 + 9 * 4 + 4


def test_fedcbo_has_the_defaults_of_the_paper():
    compare(algorithms.fedcbo(), reference.FEDCBO)


@pytest.mark.parametrize("absent", ["masked", "zero"])
def test_absent_classes_equal_the_oracle(absent):
    # no validation data of class 1, so that masked and zero differ
    y = agent_samples().samples.y.numpy()
    validation = [ids[y[ids] != 1] for ids in agent_samples().validation]
    criterion = {"name": "class_loss_gap", "absent": absent}
    compare(
        algorithms.fedcb2o(criterion=criterion),
        dataclasses.replace(reference.FEDCB2O, absent=absent),
        data=dataclasses.replace(agent_samples(), validation=validation),
    )


@pytest.mark.parametrize("own_model", ["judged", "excluded"])
def test_dfedavgm_equals_the_oracle(own_model):
    options = dataclasses.replace(reference.DFEDAVGM, own_model=own_model)
    compare(algorithms.dfedavgm(own_model=own_model), options, own_model=own_model == "judged")


def test_a_rule_without_losses_equals_the_oracle_and_evaluates_no_model(monkeypatch):
    for name in ("model_losses", "per_agent_losses"):
        monkeypatch.setattr(
            validation, name, lambda *args, **kwargs: pytest.fail("a model was evaluated")
        )
    compare(algorithms.by_rule(rule="by_num_samples", needs_losses=False), reference.DFEDAVGM)


def test_batch_means_equal_the_oracle():
    compare(algorithms.fedcb2o(), reference.FEDCB2O, validation_loss="batches")


def test_steps_instead_of_epochs_equal_the_oracle():
    training = TRAINING.model_copy(update={"local_steps": 4})
    compare(algorithms.fedcb2o(), reference.FEDCB2O, training=training)


@pytest.mark.parametrize("own_model", ["excluded", "trusted"])
def test_offline_agents_equal_the_oracle(own_model):
    choice = {"own_model": own_model, "mixing_factor": 1.0}
    options = dataclasses.replace(reference.FEDCB2O, **choice)
    compare(algorithms.fedcb2o(**choice), options, participation=0.5, num_rounds=8)


def test_a_network_that_is_not_dense_equals_the_oracle():
    compare(algorithms.fedcb2o(), reference.FEDCB2O, make=convolutional)


# Broken models

INF = float("inf")


def engine_of(attack, algorithm=None):
    return ours.local_engine(algorithm or algorithms.dfedavgm(selection="everyone"), attack=attack)


def test_broken_models_are_refused_and_benign_models_stay_finite():
    """The attackers' models are NaN, infinite or huge. All benign models stay finite and change."""
    engine = ours.local_engine(algorithms.fedcb2o(own_model="trusted", mixing_factor=1.0))
    theta = ours.models_of(engine)
    start = theta.clone()
    for j, value in zip(MALICIOUS_IDS, (float("nan"), INF, 1e30, -INF), strict=True):
        theta[j] = value
    for result in ours.run_rounds(engine, 5):
        assert all(
            not set(ours.decisions_of(result.decisions, j).ids) & set(MALICIOUS_IDS)
            for j in BENIGN_IDS
        )
        assert theta[BENIGN_IDS].isfinite().all()
    assert (theta[BENIGN_IDS] != start[BENIGN_IDS]).any(1).all()


@pytest.mark.parametrize("value", ["nan", "inf", "huge"])
@pytest.mark.parametrize("has_criterion", [True, False])
def test_broken_crafted_models_have_no_effect(value, has_criterion):
    """Benign models equal those of a run in which the attackers' models are NaN from the start."""
    algorithm = algorithms.fedcb2o(mixing_factor=1.0) if has_criterion else None
    models = {}
    for kind in ("crafted", "silent"):
        attack = Attack(craft=lambda view, draw: attacks.not_finite(view, draw, value=value))
        engine = engine_of(attack if kind == "crafted" else Attack(), algorithm)
        models[kind] = ours.models_of(engine)
        if kind == "silent":
            models[kind][MALICIOUS_IDS] = torch.nan
        for result in run_rounds(engine, 3):
            assert all(
                not set(decisions_of(result.decisions, j).ids) & set(MALICIOUS_IDS)
                for j in BENIGN_IDS
            )
    assert models["crafted"][BENIGN_IDS].equal(models["silent"][BENIGN_IDS])
    assert models["crafted"][MALICIOUS_IDS].isfinite().all()


def test_a_benign_model_broken_by_an_attack_is_no_error_and_is_not_received():
    """Without crafted models it is an error, because a setting must be wrong."""
    sizes = []

    @knows("benign")
    def count(view, draw):
        sizes.append(len(view.benign()))
        assert view.benign().isfinite().all()
        return view.own

    attack = Attack(craft=count, threat=count.threat)
    engine = engine_of(attack)
    theta = ours.models_of(engine)
    theta[0] = torch.nan
    for result in run_rounds(engine, 3):
        assert 0 not in result.decisions.received.values
        assert not decisions_of(result.decisions, 0).ids
    assert theta[0].isnan().all()
    assert theta[1:].isfinite().all()
    # clusters of three and of two benign agents; the first of the three is broken
    assert sizes == [2, 2, 2, 2] * 3
    for silent in (Attack(), dataclasses.replace(attack, from_round=1)):
        engine = engine_of(silent)
        ours.models_of(engine)[0] = torch.nan
        message = "training diverged: the model or the loss of benign agent 0 is not finite"
        with pytest.raises(RunError, match=message):
            run_rounds(engine)


def test_non_finite_outputs_of_a_rule_and_of_mixing_are_errors():
    """Received models and their weighted means are bounded, but a rule may return any number."""

    def rule(block):
        return torch.full_like(block[0], torch.inf)

    algorithm = algorithms.by_rule(
        rule=rule_signature("columns")(rule), selection="everyone", needs_losses=False
    )
    message = "the rule `.*rule` returned numbers that are not finite, of models that are"
    for attack in (
        Attack(),
        Attack(craft=lambda view, draw: view.own),
    ):  # the rule is at fault, with and without crafted models
        with pytest.raises(ConfigError, match=message):
            ours.run_rounds(ours.local_engine(algorithm, attack=attack))

    def weigh(judged):
        return RuleOutput(Reduction(judged.received.rows, rule))

    algorithm = dataclasses.replace(algorithm, weigh=RuleWeighing(weigh))
    reason = "the model of benign agent 0 is not finite after mixing finite models in round 1"
    with pytest.raises(RunError, match=reason):
        ours.run_rounds(ours.local_engine(algorithm, attack=Attack()))


def test_a_criterion_sees_tolerated_and_weighed_models_apart():
    views = []

    def criterion(inputs):
        views.append(inputs)
        return inputs.losses.mean

    def see(tolerance):
        views.clear()
        algorithm = algorithms.fedcb2o(criterion=criterion, beta=0.3)
        run_rounds(ours.local_engine(ours.with_guards(algorithm, **tolerance)))
        return list(views)

    for view in see({}):
        assert view.tolerated is None
        assert view.in_sublevel_set.any()
    seen = see({"loss_tolerance": 0.5})
    assert all((view.in_sublevel_set >= view.tolerated).all() for view in seen)
    assert any((view.in_sublevel_set != view.tolerated).any() for view in seen)


def test_a_rule_gets_the_tolerated_models_alone():
    counts = []

    def rule(inputs):
        counts.append(len(inputs.received.ids))
        assert inputs.tolerated is None
        assert inputs.in_sublevel_set is None
        return torch.full((counts[-1],), 1 / max(1, counts[-1]))

    for guards in ({}, {"loss_tolerance": 0.0}):
        run_rounds(ours.local_engine(ours.with_guards(algorithms.by_rule(rule=rule), **guards)))
    without_guard, with_guard = np.split(np.array(counts), 2)
    assert (with_guard <= without_guard).all()
    assert with_guard.sum() < without_guard.sum()


# Single and batched aggregation


class ComparingEngine(AdversarialEngine):
    """Engine that also runs Algorithm 2 for each benign agent alone and compares every bit."""

    def aggregate_(self, n, states, active, deadline, on_step):
        before = self.engine.group.models.clone()
        state = AgentState.concatenate(states).take(np.concatenate(self.batches).argsort())
        alone = {j: self.alone(j, n, state, before.clone()) for j in BENIGN_IDS}
        states, decisions, finite = super().aggregate_(n, states, active, deadline, on_step)
        after = AgentState.concatenate(states).take(np.concatenate(self.batches).argsort())
        for j, (theta, own, decided) in alone.items():
            assert theta.equal(ours.models_of(self.engine)[j])
            assert own.contacts[0].ids.equal(after.contacts[j].ids)
            bits = [x.contacts[k].likelihood.view(torch.int64) for x, k in ((own, 0), (after, j))]
            assert bits[0].equal(bits[1])
            assert own.rule_states[0].keys() == after.rule_states[j].keys()
            single = decisions_of(decided, j)
            batched = decisions_of(Decisions.concatenate(decisions), j)
            assert single.asked == batched.asked
            assert single.ids == batched.ids
            np.testing.assert_equal(single.weights, batched.weights)
            np.testing.assert_equal(single.own_weight, batched.own_weight)
        return states, decisions, finite

    def alone(self, j, n, state, models):
        data, layout, me = self.engine.group.data, self.engine.group.layout, np.array([j])
        agent = dataclasses.replace(
            self.engine.group,
            data=dataclasses.replace(
                data,
                agents=me,
                train=data.train.take(me),
                validation=data.validation.take(me),
                cluster=data.cluster[me],
                malicious=data.malicious[me],
            ),
            layout=dataclasses.replace(
                layout,
                own=layout.own[me],
                first_crafted=layout.first_crafted[me],
                previous=None if layout.previous is None else layout.previous[me],
            ),
            models=models,
        )

        def download(ids):
            return self.engine.receive(n, ids, me)

        own, decided = algorithm2.local_aggregation_(agent, n, state.take(me), download)
        return models[j].clone(), own, decided


@pytest.mark.parametrize(
    "algorithm",
    [
        algorithms.fedcb2o(),
        algorithms.fedcb2o(own_candidate=True, own_likelihood="every_round"),
        algorithms.fedassay(),
        ours.with_guards(
            algorithms.fedcb2o(criterion="distance", own_candidate=True),
            min_distance=1.1,
            max_sensitivity=2.0,
            loss_tolerance=1.0,
            newcomer_share=0.4,
        ),
        ours.with_guards(algorithms.by_rule(rule="krum"), max_distance=0.9, loss_tolerance=1.0),
        algorithms.dfedavgm(),
        algorithms.by_rule(rule="krum", pre_step="nnm"),
        algorithms.by_rule(rule="coordinate_median", selection="prob_sampling"),
        algorithms.by_rule(rule="foolsgold"),
    ],
    ids=lambda algorithm: "",
)
def test_single_and_batched_aggregation_are_equal_to_the_bit(algorithm):
    engine = ours.local_engine(algorithm)
    for _ in simulate(ComparingEngine(engine), AgentState.initial(len(CLUSTER)), 0, 5, 0):
        pass

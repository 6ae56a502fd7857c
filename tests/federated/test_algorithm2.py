"""The library's rounds against the oracle, for every option: same streams, equal to float rounding;
and what becomes of models that break."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from tests import agents as ours
from tests import reference
from tests.agents import (
    BAD,
    BUDGET,
    CLASSES,
    CLUSTER,
    GOOD,
    MALICIOUS,
    SEED,
    TRAINING,
    Adapted,
    chosen,
    convolutional,
    held,
    network,
    normed,
    oracle_agents,
    run_rounds,
)

from fedcb2o import knows
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.federated import (
    AgentState,
    Attack,
    Decisions,
    Reduction,
    RuleOutput,
    algorithm2,
    algorithms,
    attacks,
    validation,
)
from fedcb2o.federated.aggregation.base import rule_signature
from fedcb2o.nn import parameters
from fedcb2o.simulation.local_engine import LocalEngine
from fedcb2o.simulation.rounds import run_rounds as simulate

# No batch has a single sample, which a batch norm refuses.
LARGE = ours.TRAINING.model_copy(update={"batch_size": 11})


def compare(algorithm, options, *, num_rounds=6, make=network, statistics="shared", **changes):
    """Run both, and hold every model, choice, weight and likelihood equal after every round."""
    engine = ours.together(algorithm, make(), **changes)
    terms = engine.spec
    options = dataclasses.replace(
        options, budget=BUDGET, validation_loss=terms.agents.validation_loss
    )
    agents = oracle_agents(engine, make, options, statistics)
    training = reference.Training(
        **{
            field.name: getattr(terms.training, field.name)
            for field in dataclasses.fields(reference.Training)
        }
    )
    for done in simulate(engine, AgentState.initial(len(CLUSTER)), 0, num_rounds, 0):
        infos = reference.run_round(
            agents,
            done.n,
            seed=SEED,
            training=training,
            num_classes=CLASSES,
            participation=terms.agents.participation,
        )
        for j, (met, info) in enumerate(zip(done.state.contacts, infos, strict=True)):
            mixed = chosen(done.decisions, j)
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
                likelihood = dict(
                    zip(met.ids[known].tolist(), met.likelihood[known].tolist(), strict=True)
                )
                P = {i: value for i, value in agents[j].P.items() if i in agents[j].met}
                assert likelihood == pytest.approx(P, rel=2e-5)
            theta = ours.models_of(engine)[j]
            torch.testing.assert_close(
                theta, parameters.flatten(agents[j].module), rtol=1e-4, atol=2e-5
            )
            parameters.bind_(
                agents[j].module, theta.clone()
            )  # a ReLU at its kink magnifies rounding


FEDCB2O = {
    "the text": {},
    "FedCBO": {"criterion": "average_loss"},
    "FedCBO, own trusted": {
        "criterion": "average_loss",
        "own_model": "trusted",
        "mixing_factor": 1.0,
    },
    "T_G": {"criterion_from_round": 3},
    "T_G, own trusted": {"criterion_from_round": 3, "own_model": "trusted", "mixing_factor": 1.0},
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
    compare(ours.guarded(algorithms.fedcb2o(**choice), **guards), options)


@pytest.mark.parametrize("guards", ["newcomers", "far", "near", "tolerance", "all"])
def test_guards_of_an_average_equal_the_oracle(guards):
    options = dataclasses.replace(reference.DFEDAVGM, **GUARDS[guards])
    compare(ours.guarded(algorithms.dfedavgm(), **GUARDS[guards]), options)


@pytest.mark.parametrize("own_model", ["excluded", "judged"])
@pytest.mark.parametrize("statistics", ["shared", "local", "dropped"])
def test_batch_norms_equal_the_oracle(statistics, own_model):
    """Agents who mix them, who estimate their own, and who leave them as they were."""
    choice, make = (
        {"own_model": own_model, "mixing_factor": 1.0},
        functools.partial(normed, statistics),
    )
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
    """The base is the same for all, and no part of theta; what is tied counts once."""
    compare(algorithms.fedcb2o(), reference.FEDCB2O, make=Adapted, num_rounds=3)
    assert ours.together(algorithms.fedcb2o(), Adapted()).spec.dim == 2 * 9 + 9 * 2 + 9 * 4 + 4


def test_defaults_of_fedcbo_are_the_papers():
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
    for name in ("model_losses", "per_agent_losses"):
        monkeypatch.setattr(
            validation, name, lambda *judged, **more: pytest.fail("a model was evaluated")
        )
    compare(algorithms.by_rule(rule="by_num_samples", needs_losses=False), reference.DFEDAVGM)


def test_batch_means_equal_the_oracle():
    compare(algorithms.fedcb2o(), reference.FEDCB2O, validation_loss="batches")


def test_steps_instead_of_epochs_equal_the_oracle():
    compare(
        algorithms.fedcb2o(),
        reference.FEDCB2O,
        training=TRAINING.model_copy(update={"local_steps": 4}),
    )


@pytest.mark.parametrize("own_model", ["excluded", "trusted"])
def test_offline_agents_equal_the_oracle(own_model):
    choice = {"own_model": own_model, "mixing_factor": 1.0}
    options = dataclasses.replace(reference.FEDCB2O, **choice)
    compare(algorithms.fedcb2o(**choice), options, participation=0.5, num_rounds=10)


def test_a_network_that_is_not_dense_equals_the_oracle():
    compare(algorithms.fedcb2o(), reference.FEDCB2O, make=convolutional)


# Broken models

INF = float("inf")


def engine_of(attack, algorithm=None):
    return ours.together(algorithm or algorithms.dfedavgm(selection="everyone"), attack=attack)


def test_broken_models_are_dropped_and_the_rest_carry_on():
    """Attackers whose models are NaN, infinite or garbage: no benign model becomes one, and all of
    them move."""
    engine = ours.together(algorithms.fedcb2o(own_model="trusted", mixing_factor=1.0))
    theta = ours.models_of(engine)
    start = theta.clone()
    for j, value in zip(BAD, (float("nan"), INF, 1e30, -INF), strict=True):
        theta[j] = value
    for done in ours.run_rounds(engine, 5):
        assert all(not set(ours.chosen(done.decisions, j).ids) & set(BAD) for j in GOOD)
        assert theta[GOOD].isfinite().all()
    assert (theta[GOOD] != start[GOOD]).any(1).all()


@pytest.mark.parametrize("value", ["nan", "inf", "huge"])
@pytest.mark.parametrize("judges", [True, False])
def test_broken_models_never_arrive(value, judges):
    """Benign models are those of a world in which the attackers' models never arrive: they are NaN
    from the start."""
    algorithm = algorithms.fedcb2o(mixing_factor=1.0) if judges else None
    models = {}
    for kind in ("crafted", "silent"):
        attack = Attack(craft=lambda view, draw: attacks.not_finite(view, draw, value=value))
        engine = engine_of(attack if kind == "crafted" else Attack(), algorithm)
        models[kind] = ours.models_of(engine)
        if kind == "silent":
            models[kind][BAD] = torch.nan
        for done in run_rounds(engine, 3):
            assert all(not set(chosen(done.decisions, j).ids) & set(BAD) for j in GOOD)
    assert models["crafted"][GOOD].equal(models["silent"][GOOD])
    assert models["crafted"][BAD].isfinite().all()


def test_a_benign_agent_that_an_attack_broke_is_no_error_and_spreads_nothing():
    """Without crafted models it is an error: then a setting must be wrong."""
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
    for done in run_rounds(engine, 3):
        assert 0 not in done.decisions.received.values
        assert not chosen(done.decisions, 0).ids
    assert theta[0].isnan().all()
    assert theta[1:].isfinite().all()
    assert (
        sizes == [2, 2, 2, 2] * 3
    )  # of three and of two benign agents; the first of the three is broken
    for silent in (Attack(), dataclasses.replace(attack, from_round=1)):
        engine = engine_of(silent)
        ours.models_of(engine)[0] = torch.nan
        with pytest.raises(
            RunError,
            match="training diverged: the model or the loss of benign agent 0 is not finite",
        ):
            run_rounds(engine)


def test_a_benign_model_that_overflows_where_it_mixes_is_told():
    """What arrives is bounded, and so is what weights make of it: a rule on columns can still make
    anything."""

    def rule(block):
        return torch.full_like(block[0], torch.inf)

    algorithm = algorithms.by_rule(
        rule=rule_signature("columns")(rule), selection="everyone", needs_losses=False
    )
    told = "the rule `.*rule` returned numbers that are not finite, of models that are"
    for attack in (
        Attack(),
        Attack(craft=lambda view, draw: view.own),
    ):  # whoever attacks, that is the rule's fault
        with pytest.raises(ConfigError, match=told):
            ours.run_rounds(ours.together(algorithm, attack=attack))

    def weigh(judged):
        return RuleOutput(Reduction(judged.received.rows, rule))

    algorithm = dataclasses.replace(algorithm, rule=weigh)
    with pytest.raises(
        RunError,
        match="the model of benign agent 0 is not finite after mixing finite models in round 1",
    ):
        ours.run_rounds(ours.together(algorithm, attack=Attack()))


# One agent and many


class Compared(LocalEngine):
    """An engine that runs Algorithm 2 for each benign agent alone, too, and compares every bit."""

    def aggregate_(self, n, states, active, deadline, on_step):
        before = self.group.models.clone()
        state = AgentState.concatenate(states).take(np.concatenate(self.batches).argsort())
        alone = {j: self.alone(j, n, state, before.clone()) for j in GOOD}
        states, decisions, finite = super().aggregate_(n, states, active, deadline, on_step)
        after = AgentState.concatenate(states).take(np.concatenate(self.batches).argsort())
        for j, (theta, own, decided) in alone.items():
            assert theta.equal(ours.models_of(self)[j])
            assert own.contacts[0].ids.equal(after.contacts[j].ids)
            bits = [x.contacts[k].likelihood.view(torch.int64) for x, k in ((own, 0), (after, j))]
            assert bits[0].equal(bits[1])
            assert own.rule_states[0].keys() == after.rule_states[j].keys()
            mine, theirs = chosen(decided, j), chosen(Decisions.concatenate(decisions), j)
            assert mine.asked == theirs.asked
            assert mine.ids == theirs.ids
            np.testing.assert_equal(mine.weights, theirs.weights)
            np.testing.assert_equal(mine.own_weight, theirs.own_weight)
        return states, decisions, finite

    def alone(self, j, n, state, models):
        data, layout, me = self.group.data, self.group.layout, np.array([j])
        agent = dataclasses.replace(
            self.group,
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
            return self.receive(n, ids, me)

        own, decided = algorithm2.local_aggregation_(agent, n, state.take(me), download)
        return models[j].clone(), own, decided


@pytest.mark.parametrize(
    "algorithm",
    [
        algorithms.fedcb2o(),
        algorithms.fedcb2o(own_candidate=True, own_likelihood="every_round"),
        algorithms.fedassay(),
        ours.guarded(
            algorithms.fedcb2o(criterion="distance", own_candidate=True),
            min_distance=1.1,
            max_sensitivity=2.0,
            loss_tolerance=1.0,
            newcomer_share=0.4,
        ),
        ours.guarded(algorithms.by_rule(rule="krum"), max_distance=0.9, loss_tolerance=1.0),
        algorithms.dfedavgm(),
        algorithms.by_rule(rule="krum", pre_step="nnm"),
        algorithms.by_rule(rule="coordinate_median", selection="prob_sampling"),
        algorithms.by_rule(rule="foolsgold"),
    ],
    ids=lambda algorithm: "",
)
def test_one_agent_aggregates_as_many_do_to_the_bit(algorithm):
    engine = ours.together(algorithm)
    run_rounds(Compared(engine.group, engine.executor), 5)

"""Rounds with robust rules: new models are the rule of the received models; equal bits."""

import functools
import math

import pytest
import torch
from tests import agents as ours
from tests.agents import BENIGN_IDS, SEED, agent_samples, decisions_of, run_rounds
from tests.tiny import (
    StopError,
    bits,
    bits_for_any_workers,
    first_quick,
    lines_of,
    stop_after,
    tiny,
)

from fedcb2o.errors import ConfigError
from fedcb2o.experiments import run
from fedcb2o.federated import aggregation, algorithms
from fedcb2o.federated.adversary import Attack
from fedcb2o.federated.aggregation import preaggregation, robust_rule
from fedcb2o.federated.aggregation.base import RULE_SIGNATURE, apply, signature_of
from fedcb2o.federated.types import Received, RuleOutput, batched, stateful
from fedcb2o.federated.validation import ValidationOracle
from fedcb2o.rng import stream

ROBUST = [
    name
    for name in aggregation.__all__
    if RULE_SIGNATURE.get(getattr(aggregation, name)) is not None
]


TEAM = {"benign": 3, "malicious": 2, "benign_samples": 20, "malicious_samples": 30, "budget": 4}


SHARE = 0.4


def by_rule(name, **more):
    return {"name": "by_rule", "rule": name, **more}


def one_round(algorithm, attack=None, **changes):
    """Return the models before the round and after LocalUpdate, the engine and the choices."""
    engines = [
        ours.local_engine(algorithm, attack=attack or Attack(), malicious_share=SHARE, **changes)
        for _ in range(2)
    ]
    before = ours.models_of(engines[0]).clone()
    engines[0].train_(0)
    (done,) = run_rounds(engines[1])
    mixed = [decisions_of(done.decisions, j) for j in range(len(before))]
    return before, ours.models_of(engines[0]).clone(), engines[1], mixed


@pytest.mark.parametrize("own_model", ["judged", "excluded"])
@pytest.mark.parametrize("name", ROBUST)
def test_the_new_model_is_the_rule_of_the_received_models(name, own_model):
    rule = getattr(aggregation, name)
    signature = signature_of(rule)
    algorithm = algorithms.by_rule(
        rule=name, own_model=own_model, mixing_factor=0.75, needs_losses=True
    )
    before, trained, engine, mixed = one_round(algorithm)
    for j in BENIGN_IDS:
        f = math.ceil(SHARE * len(mixed[j].ids))
        extra_rows = list(signature.own_rows)
        rows = [trained[i] for i in mixed[j].ids]
        if own_model == "judged" or "own" in extra_rows:
            rows.append(trained[j])
        rows += [before[j] for row in extra_rows if row == "before"]
        x = torch.stack(rows)
        senders = mixed[j].ids + [j] * (len(x) - len(mixed[j].ids) - ("before" in extra_rows))
        sender_ids = torch.tensor(senders)
        engine.group.models[: len(trained)], after = trained, ours.models_of(engine).clone()
        losses = ValidationOracle(engine.group, j).losses(
            Received(sender_ids, sender_ids, torch.ones(len(sender_ids)).double(), sender_ids), None
        )
        ours.models_of(engine).copy_(after)
        values = {
            "losses": losses.mean,
            "entropies": losses.entropy,
            "num_samples": torch.tensor([float(len(agent_samples().train[i])) for i in senders]),
            "progress": 0.0,
            "draw": stream(SEED, "rule", 0, j),
            "heads": torch.cat([x[:, -28:-4].view(len(x), 4, 6), x[:, -4:].view(len(x), 4, 1)], -1),
        }
        bound = functools.partial(rule, f=f) if signature.max_byzantine else functools.partial(rule)
        try:
            inputs = [values[one] for one in robust_rule.extra_inputs(bound)]
            expected = apply(bound, x, None, *inputs, clip_f=True)
        except ConfigError:  # the rule trusts no model, so the agent keeps its own
            assert name == "sageflow"
            expected = trained[j]
        torch.testing.assert_close(after[j], trained[j].lerp(expected, 0.75), rtol=1e-5, atol=1e-6)
        assert mixed[j].f == pytest.approx(
            math.nan
            if signature.max_byzantine is None
            else min(f, signature.max_byzantine(len(x))),
            nan_ok=True,
        )


@pytest.mark.parametrize("pre_step", ["nnm", {"name": "bucketing", "size": 2}])
@pytest.mark.parametrize("name", ["mean", "krum", "trimmed_mean", "bulyan", "monna"])
def test_a_pre_step_is_applied_before_the_rule(name, pre_step):
    algorithm = algorithms.by_rule(rule=name, pre_step=pre_step, selection="everyone")
    _, trained, engine, mixed = one_round(algorithm)
    rule = getattr(aggregation, name)
    for j in BENIGN_IDS:
        f = math.ceil(SHARE * len(mixed[j].ids))
        x = torch.cat([trained[mixed[j].ids], trained[j : j + 1]])
        own = len(signature_of(rule).own_rows)
        mixing = functools.partial(preaggregation.nnm, f=f)
        if pre_step != "nnm":
            mixing = preaggregation.bucketing(len(x) - own, stream(SEED, "rule", 0, j), size=2)
        bound = functools.partial(rule, f=f) if signature_of(rule).max_byzantine else rule
        expected = apply(bound, x, mixing=mixing, clip_f=True)
        torch.testing.assert_close(ours.models_of(engine)[j], expected, rtol=1e-5, atol=1e-6)


def test_the_trimmed_mean_without_trimming_equals_the_mean():
    trimmed = algorithms.by_rule(rule={"name": "trimmed_mean", "f": 0})
    _, _, a, mixed = one_round(trimmed)
    _, _, b, mixed_by_mean = one_round(algorithms.by_rule(rule="mean"))
    torch.testing.assert_close(ours.models_of(a), ours.models_of(b), rtol=1e-5, atol=1e-6)
    assert [one.f for one in mixed if not math.isnan(one.f)] == [0] * len(BENIGN_IDS)
    assert all(math.isnan(weight) for j in BENIGN_IDS for weight in mixed[j].weights)
    assert all(len(set(one.weights)) == 1 for one in (mixed_by_mean[j] for j in BENIGN_IDS))


def test_a_weighted_reduction_records_its_weights():
    sentinel = {"name": "sentinel", "similarity": 0.0}  # initial models differ
    _, trained, engine, mixed = one_round(algorithms.by_rule(rule=sentinel))
    for j in BENIGN_IDS:
        assert sum(mixed[j].weights) + mixed[j].own_weight == pytest.approx(1)
        assert mixed[j].own_weight > 0
        assert not torch.equal(ours.models_of(engine)[j], trained[j])
    before, trained, engine, mixed = one_round(
        algorithms.by_rule(rule={"name": "flame", "noise": 0.0})
    )
    for j in BENIGN_IDS:  # the rest is the weight of the model before the round
        rest = 1 - sum(mixed[j].weights) - mixed[j].own_weight
        average = sum(w * trained[i] for w, i in zip(mixed[j].weights, mixed[j].ids, strict=True))
        average += mixed[j].own_weight * trained[j] + rest * before[j]
        torch.testing.assert_close(ours.models_of(engine)[j], average, rtol=1e-5, atol=1e-6)
        assert 0 < rest < 1


def test_local_training_keeps_the_trained_model():
    _, trained, engine, mixed = one_round(algorithms.local_training())
    assert torch.equal(ours.models_of(engine)[BENIGN_IDS], trained[BENIGN_IDS])
    assert all(len(mixed[j].asked) == 0 for j in BENIGN_IDS)


VARIANTS = {
    "trimmed_mean": tiny(
        agents=TEAM, algorithm=by_rule("trimmed_mean", pre_step="nnm", selection="prob_sampling")
    ),
    "bulyan": tiny(agents={**TEAM, "participation": 0.6}, algorithm=by_rule("bulyan")),
    "fltrust": tiny(agents=TEAM, algorithm=by_rule("fltrust"), attack={"name": "alie"}),
    "lfighter": tiny(agents=TEAM, algorithm=by_rule("lfighter")),
    "flame": tiny(
        agents=TEAM, model={"hidden": [400]}, algorithm=by_rule({"name": "flame", "noise": 0.01})
    ),
    "sentinel": tiny(
        agents=TEAM,
        model={"hidden": [400]},
        algorithm=by_rule("sentinel", selection="prob_sampling"),
    ),
    "wfagg": tiny(
        agents=TEAM, algorithm=by_rule({"name": "wfagg", "transient": 0}), attack={"name": "alie"}
    ),
    "lightyear": tiny(agents=TEAM, algorithm=by_rule("lightyear"), attack={"name": "alie"}),
    "a graph and sybils": tiny(
        agents={**TEAM, "graph": {"name": "small_world", "near": 2, "p": 0.3}},
        attack={"name": "label_flip", "source": 9, "target": 4, "sybils": True},
    ),
    "several tiles": tiny(
        rounds=2, agents=TEAM, model={"hidden": [2000]}, algorithm=by_rule("meamed")
    ),
}


@pytest.mark.parametrize("variant", first_quick(VARIANTS))
def test_neither_workers_nor_interruptions_change_a_bit(tmp_path, variant):
    bits_for_any_workers(tmp_path, VARIANTS[variant])


def test_records_contain_f_and_the_weights_of_a_rule(tmp_path):
    done = run(tiny(agents=TEAM, algorithm=by_rule("trimmed_mean")), out=tmp_path, workers=1)
    lines = lines_of(tmp_path, "pairs")
    # 2 = ceil(0.4 * 4) of 5 models
    assert [line["f"] for line in lines] == [[2, 2, 2, None, None] * 2] * 3
    benign = done.records[~done.records.malicious]
    assert benign.malicious_weight.isna().all()  # a coordinate-wise rule has no weights
    assert benign.accuracy.notna().all()
    pairs = done.pairs[done.pairs.agent.isin([0, 1, 2])]
    assert pairs.weight.isna().all()
    krum = run(tiny(agents=TEAM, algorithm=by_rule("krum")), out=tmp_path / "krum", workers=1)
    assert krum.records[~krum.records.malicious].malicious_weight.notna().all()


# Invalid input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": by_rule("kurm")}, "there is no rule `kurm`. Did you mean `krum`?"),
        (
            {"algorithm": by_rule({"name": "krum", "f": 3})},
            "`f` = 3 attackers are more than krum admits among 5 models",
        ),
        (
            {"algorithm": by_rule({"name": "krum", "f": -1})},
            "`f`, the number of attackers to assume, must be a whole",
        ),
        (
            {"algorithm": by_rule("mean", pre_step={"name": "nnm", "f": 3})},
            "`f` = 3 attackers are more than nnm admits",
        ),
        (
            {"algorithm": by_rule("sageflow", pre_step="nnm")},
            "a `pre_step` mixes models, and the rule reads entropies",
        ),
        (
            {"algorithm": by_rule("by_num_samples", pre_step="nnm")},
            "`own_model`, `pre_step` and `space` go with robust rules",
        ),
        ({"algorithm": by_rule("mean", pre_step="krum")}, "there is no pre-step `krum`"),
    ],
)
def test_invalid_rules_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError) as caught:
        run(tiny(**{"agents": TEAM, **changes}), out=tmp_path, workers=1)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# Rules with memory


@stateful(uses_previous=True)
def momentum(state, judged):
    """Weigh peers by the distance to the last model; the state holds a view of `models`."""
    models = judged.models[judged.received.rows]
    distances = (models - state.get("last", judged.models[judged.previous])).norm(dim=1)
    return {"zeta": judged.theta[:1], "last": judged.theta, "alpha": distances}, torch.softmax(
        -distances.double(), 0
    )


@stateful()
def shrinking(state, judged):
    weights = torch.full((len(judged.received.ids),), 0.7 / max(1, len(judged.received.ids)))
    return {}, RuleOutput(weights, previous_weight=0.3)


@stateful()
@batched
def stateful_and_batched(state, judged):
    return state, torch.zeros(judged.received.ids.shape)


def test_rule_states_are_copied_for_any_workers_and_interruptions(tmp_path):
    experiment = tiny(
        agents=TEAM, algorithm={"name": "by_rule", "rule": momentum, "needs_losses": False}
    )
    run(experiment, out=tmp_path / "one", workers=1)
    run(experiment, out=tmp_path / "two", workers=2)
    with pytest.raises(StopError):
        run(experiment, out=tmp_path / "parts", workers=1, watch=stop_after(1))
    run(experiment, out=tmp_path / "parts", workers=1, resume=True)
    assert bits(tmp_path / "one") == bits(tmp_path / "two") == bits(tmp_path / "parts")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            shrinking,
            "the rule gave weight to the model before the round, and did not declare to use it",
        ),
        (stateful_and_batched, "a rule with memory is evaluated for one agent at a time"),
    ],
)
def test_invalid_stateful_rules_are_refused(tmp_path, rule, message):
    with pytest.raises(ConfigError, match=message):
        run(
            tiny(agents=TEAM, algorithm={"name": "by_rule", "rule": rule, "needs_losses": False}),
            out=tmp_path,
            workers=1,
        )

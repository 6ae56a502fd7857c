"""The trial of training alone: its test, the held-out samples, and agents that leave."""

import numpy as np
import pytest
import torch
from tests import agents as ours
from tests.agents import BENIGN_IDS
from tests.tiny import StopError, lines_of, stop_after, tiny

import fedcb2o
from fedcb2o.errors import ConfigError
from fedcb2o.federated import algorithms, trial
from fedcb2o.federated.local_update import held_out, training_samples, trial_rounds

ON = {"exit_test": 0.2}


def test_the_p_value_is_the_share_of_sign_flips_that_reach_the_sum():
    draw = np.random.default_rng(0)
    # Of four sign flips of (1, 1), one reaches 2; all reach -2. With (3, -1), + + and + - reach 2.
    assert trial.sign_flip(np.array([1.0, 1.0]), draw) == pytest.approx(0.25, abs=0.04)
    assert trial.sign_flip(np.array([-1.0, -1.0]), draw) == 1.0
    assert trial.sign_flip(np.array([3.0, -1.0]), draw) == pytest.approx(0.5, abs=0.04)
    assert trial.sign_flip(np.zeros(0), draw) == 1.0


@pytest.mark.parametrize("error_rate", [0.05, 0.2])
def test_agents_without_harm_by_cooperation_leave_at_most_at_the_error_rate(error_rate):
    draw = np.random.default_rng(1)
    p = np.array([trial.sign_flip(draw.laplace(size=12), draw) for _ in range(1000)])
    three_errors = 3 * (error_rate * (1 - error_rate) / len(p)) ** 0.5
    assert (p <= error_rate).mean() <= error_rate + three_errors
    # Where cooperation is worth a standard deviation per sample, agents stay.
    gains = [trial.sign_flip(draw.laplace(-1.4, size=12), draw) for _ in range(200)]
    assert np.mean(np.array(gains) <= error_rate) < 0.01
    # Harm of as much is noticed.
    harms = [trial.sign_flip(draw.laplace(1.4, size=12), draw) for _ in range(200)]
    assert np.mean(np.array(harms) <= error_rate) > 0.8


def engine_of(algorithm, **guards):
    return ours.local_engine(ours.with_guards(algorithm, **guards))


def test_held_out_samples_are_not_trained_on_until_the_trial_ends():
    group = engine_of(algorithms.fedassay(), **ON).group
    assert trial_rounds(group.spec) == 2
    for k, count in enumerate(group.data.train.sizes.tolist()):
        members = np.array([k])
        held, others = held_out(group.spec, int(group.agents[k]), count)
        assert len(held) == len(others) == int(0.3 * count)
        assert not set(held) & set(others)
        x, _ = group.data.training_data(members, 0)
        trained, _ = training_samples(group, members, 1)
        assert trained[0, held].equal(x[0, others])
        assert training_samples(group, members, 2)[0].equal(x)


def test_an_agent_that_leaves_has_the_model_that_trained_alone(monkeypatch):
    monkeypatch.setattr(trial, "sign_flip", lambda differences, draw: 0.0)
    models = []
    for algorithm in (algorithms.fedassay(), algorithms.local_training()):
        engine = engine_of(algorithm, **ON)
        rounds = ours.run_rounds(engine, 4)
        models.append(ours.models_of(engine)[BENIGN_IDS])
        assert not any(
            part.startswith("trial_m") for s in rounds[-1].state.rule_states for part in s
        )
    torch.testing.assert_close(*models, rtol=1e-4, atol=1e-5)


def test_a_resumed_trial_has_the_same_bits(tmp_path):
    experiment = tiny(rounds=9, algorithm={"name": "fedassay", "guards": {"exit_test": 0.5}})
    fedcb2o.run(experiment, out=tmp_path / "whole", workers=1)
    stopped = {**experiment, "checkpoint_every": 1}
    with pytest.raises(StopError):
        fedcb2o.run(stopped, out=tmp_path / "stopped", workers=1, watch=stop_after(2))
    fedcb2o.run(stopped, out=tmp_path / "stopped", workers=1, resume=True)
    for name in ("metrics", "pairs"):
        assert lines_of(tmp_path / "whole", name) == lines_of(tmp_path / "stopped", name)


def test_a_trial_does_not_go_with_rules_that_keep_a_state():
    rule = {"name": "by_rule", "rule": "foolsgold", "guards": ON}
    with pytest.raises(ConfigError, match="does not go with a rule that keeps a state"):
        fedcb2o.load(tiny(algorithm=rule))

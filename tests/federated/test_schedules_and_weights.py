"""Learning rates by round, weights of training samples, and groups of validation samples."""

import functools
import os

import numpy as np
import pandas as pd
import pytest
import torch
from tests.tiny import tiny
from tests.type_checks import VARIABLE
from torch import nn
from torch.nn import functional as F

import fedcb2o
from fedcb2o.data import Shard
from fedcb2o.errors import ConfigError
from fedcb2o.experiments import load
from fedcb2o.federated import loss_groups, sample_weights, schedules
from fedcb2o.federated.local_update import batched_local_update_, local_update_
from fedcb2o.federated.run_spec import Training
from fedcb2o.nn import parameters

DRAW = np.random.default_rng(0)
X = torch.from_numpy(DRAW.normal(size=(24, 3)).astype(np.float32))
Y = torch.from_numpy((DRAW.random(24) < 0.2).astype(np.int64))


def halving(n, rounds, *, every: int = 1):
    return 0.5 ** (n // every) if n < rounds else 0.0


def later_samples(x, y, *, least: float = 0.0):
    return torch.arange(len(y)) + least


def thirds(x, y, *, bins: int = 3):
    return torch.arange(len(y)) % bins


def first_group(x, y):
    return torch.zeros(len(y))


def call(**settings):
    return fedcb2o.run(tiny(rounds=2, **settings), watch=lambda *_: None, workers=1)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# --- learning rates


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("StepLR", {"step_size": 2, "gamma": 0.5}),
        ("CosineAnnealingLR", {"T_max": 6, "eta_min": 0.01}),
        ("MultiStepLR", {"milestones": [1, 3]}),
        ("OneCycleLR", {"max_lr": 0.4, "total_steps": 8}),
    ],
)
def test_a_schedule_is_that_of_pytorch_by_round(name, options):
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.2)
    scheduler = getattr(torch.optim.lr_scheduler, name)(optimiser, **options)
    expected = []
    for _ in range(8):
        expected.append(optimiser.param_groups[0]["lr"] / 0.2)
        optimiser.step()
        scheduler.step()
    schedule = functools.partial(getattr(schedules, name), **options)
    assert schedules.rates(schedule, 0.2, 8) == pytest.approx(expected)


def test_a_run_takes_the_rate_of_the_round():
    """A rate of 0 from round 2 on keeps the models of agents that train alone."""
    alone = {"algorithm": {"name": "local_training"}, "attack": None}
    alone = {**alone, "agents": {**tiny()["agents"], "malicious": 0}}
    stopped = call(training={"schedule": {"name": "StepLR", "step_size": 1, "gamma": 0.0}}, **alone)
    once = fedcb2o.run(tiny(rounds=1, **alone), out="once", watch=lambda *_: None, workers=1)
    last = stopped.records[stopped.records["round"] == 2].accuracy
    assert last.tolist() == once.records.accuracy.tolist()
    for mine, other in zip(stopped.model(0).parameters(), once.model(0).parameters(), strict=True):
        assert mine.equal(other)
    own = {"schedule": {"name": halving, "every": 2}}
    table = load(tiny(training=own)).settings()["training"]["schedule"]
    assert table == {"name": f"{__name__}:halving", "every": 2}


def test_training_settings_of_a_round():
    training = Training(gamma=0.4, rates=(1.0, 0.25))
    assert [training.in_round(n).gamma for n in (0, 1, 7)] == [0.4, 0.1, 0.1]
    assert Training().in_round(3) == Training()


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"schedule": "StepLr"}, "there is no schedule `StepLr`. Did you mean `StepLR`?"),
        ({"schedule": "StepLR"}, "schedule `StepLR` needs the parameter `step_size`"),
        ({"schedule": {"name": "StepLR", "stepsize": 2}}, "Did you mean `step_size`"),
        ({"schedule": "ReduceLROnPlateau"}, "there is no schedule `ReduceLROnPlateau`"),
        (
            {"schedule": {"name": "StepLR", "step_size": "x"}},
            "`training.schedule` = `StepLR`: TypeE",
        ),
        ({"weights": "balance"}, "there is no weights `balance`. Did you mean `balanced`?"),
        ({"weights": {"name": "by_class", "weights": [1.0]}}, "and there is a class"),
        ({"weights": {"name": "by_class", "weights": [-1.0]}}, "`weights` = "),
        ({"weights": {"name": later_samples, "least": -3.0}}, "must return a finite number from 0"),
        (
            {"weights": "balanced", "privacy": {"noise": 1.0}},
            "`training.weights` of single samples",
        ),
    ],
)
def test_faults_are_named_before_a_run(training, message):
    with pytest.raises(ConfigError, match=message):
        call(training=training, agents={**tiny()["agents"], "hold_out": True})


# --- weights


@pytest.mark.skipif(VARIABLE in os.environ, reason="type checks refuse it first")
def test_weights_are_checked_and_have_mean_one():
    counts = torch.bincount(Y)
    weights = sample_weights.relative_weights(sample_weights.balanced, X, Y)
    assert weights.mean().item() == pytest.approx(1.0)
    sums = torch.zeros(2).scatter_add_(0, Y, weights)
    assert sums[0].item() == pytest.approx(sums[1].item())
    given = sample_weights.by_class(X, Y, weights=[1.0, 3.0])
    assert given.sum().item() == counts[0] + 3 * counts[1]
    with pytest.raises(ConfigError, match="the data have numbers as targets"):
        sample_weights.balanced(X, X[:, 0])


@pytest.mark.parametrize("count", [24, 20])
def test_weighted_training_is_the_step_by_hand_alone_and_together(count):
    weigh = functools.partial(later_samples)
    training = Training(gamma=0.1, momentum=0.0, batch_size=24, local_epochs=1, weights=weigh)
    module = nn.Sequential(nn.Flatten(), nn.Linear(3, 2))
    theta = parameters.flatten(module)
    by_hand = nn.Linear(3, 2)
    by_hand.load_state_dict(module[1].state_dict())
    weights = torch.arange(count).float()
    losses = F.cross_entropy(by_hand(X[:count]), Y[:count], reduction="none")
    ((weights / weights.mean()) * losses).mean().backward()
    expected = torch.cat([(p - 0.1 * p.grad).detach().ravel() for p in by_hand.parameters()])

    one = theta.clone()
    local_update_(one, module, Shard(X[:count], Y[:count]), training, np.random.default_rng(1))
    torch.testing.assert_close(one, expected)
    both = theta.repeat(2, 1)
    draws = [np.random.default_rng(k) for k in range(2)]
    stacked = X.expand(2, 24, 3), Y.expand(2, 24)
    batched_local_update_(both, module, *stacked, training, draws, [24, count])
    torch.testing.assert_close(both[1], expected)


def test_weights_help_a_rare_class():
    draw = np.random.default_rng(5)
    x = np.concatenate([draw.normal(0, 1, (1200, 2)), draw.normal(1, 1, (80, 2))])
    y = np.repeat([0, 1], [1200, 80])
    runs = {
        weights: fedcb2o.run(
            data=(x, y), model="logistic", rounds=4, weights=weights, metrics=["balanced_accuracy"],
            watch=lambda *_: None, workers=1, gamma=0.02, batch_size=32, benign=4,
        )
        for weights in (None, "balanced")
    }  # fmt: skip
    scores = {name: run.summary().balanced_accuracy.item() for name, run in runs.items()}
    assert scores["balanced"] > scores[None] + 0.1


# --- groups of validation samples


def test_groups_of_quantiles_by_hand():
    y = torch.tensor([5.0, 1.0, 2.0, 2.0, 9.0, 7.0, 8.0, 2.0])
    assert loss_groups.target_quantiles(X[:8], y, bins=2).tolist() == [1, 0, 0, 0, 1, 1, 1, 0]
    assert loss_groups.target_quantiles(X[:8], torch.ones(8, 1)).tolist() == [0] * 8
    columns = torch.stack([y, -y], 1)
    first = loss_groups.feature_quantiles(columns, y, feature=1, bins=4)
    assert first.tolist() == [1, 3, 2, 2, 0, 1, 0, 2]
    with pytest.raises(ConfigError, match=r"`feature` .* must be below 2, got 2"):
        loss_groups.feature_quantiles(columns, y, feature=2)


WIDE = DRAW.normal(size=(160, 3))
NUMBERS = {
    "data": (WIDE, WIDE.sum(1)),
    "numbers": True,
    "rounds": 2,
    "gamma": 0.01,
    "benign": 3,
    "attack": "reversed_labels",
    "watch": lambda *_: None,
    "workers": 1,
}


def test_criteria_by_class_read_groups_of_targets():
    plain, grouped, own = (
        fedcb2o.run(**NUMBERS, loss_groups=groups)
        for groups in (None, "target_quantiles", {"name": thirds, "bins": 3})
    )
    assert grouped.config["agents"]["loss_groups"] == {"name": "target_quantiles", "bins": 4}
    keys = ["round", "agent", "peer"]
    weights = [run.pairs.set_index(keys).weight for run in (plain, grouped, own)]
    assert not weights[0].equals(weights[1])
    assert not weights[1].equals(weights[2])
    # The groups change the criterion alone: losses stay those of all samples.
    first = [run.records[run.records["round"] == 1].validation_loss for run in (plain, grouped)]
    pd.testing.assert_series_equal(*first)


def test_faults_of_groups_are_named():
    with pytest.raises(ConfigError, match="need a parameter `bins`, the number of groups"):
        fedcb2o.run(**NUMBERS, loss_groups=first_group)
    with pytest.raises(ConfigError, match="must return a whole number from 0 to 2 for each of"):
        loss_groups.grouped(functools.partial(half_groups), X[None], Y[None])


def half_groups(x, y, *, bins: int = 3):
    return torch.full((len(y),), 0.5)

"""Membership inference with planted canaries, and the gain by class."""

import numpy as np
import torch
from tests.agents import adversary_of, agent_group_of, run_spec_of
from tests.tiny import tiny
from torch import nn

import fedcb2o
from fedcb2o.data import Shard, digits
from fedcb2o.federated import algorithms
from fedcb2o.federated.evaluation.membership import attack_auc, leakage, sample_losses
from fedcb2o.federated.local_update import local_update_
from fedcb2o.federated.run_spec import Training
from fedcb2o.nn.parameters import flatten
from fedcb2o.report._membership import class_gain_table


def test_planted_canaries_are_recognised():
    """Training samples with a wrong label have a low loss only in the model that saw them."""
    draw = np.random.default_rng(0)
    data = digits()
    indices = torch.from_numpy(draw.permutation(len(data.pool))[:120])
    x, y = data.pool.x[indices], data.pool.y[indices].clone()
    y[:40] = (y[:40] + torch.from_numpy(draw.integers(1, 10, 40))) % 10  # 20 planted, 20 not
    training_set = Shard(torch.cat([x[:20], x[40:]]), torch.cat([y[:20], y[40:]]))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    group = agent_group_of(
        run_spec_of(algorithms.fedcb2o(), module, num_classes=10), adversary_of()
    )
    theta = flatten(module)
    before = theta.clone()
    training = Training(gamma=0.1, batch_size=20, local_epochs=60)
    local_update_(theta, module, training_set, training, np.random.default_rng(1))

    planted, unseen = Shard(x[:20], y[:20]), Shard(x[20:40], y[20:40])
    trained = leakage(group, 0, theta, planted, unseen)
    assert trained["auc"] >= 0.9
    assert trained["tpr"] >= 0.9
    losses = [sample_losses(group, 0, theta, shard) for shard in (planted, unseen)]
    assert trained["auc"] == attack_auc(-losses[0], -losses[1])
    untrained = leakage(group, 0, before, planted, unseen)
    assert 0.3 < untrained["auc"] < 0.7


def test_a_run_measures_membership_of_sent_and_kept_models(tmp_path):
    run = fedcb2o.run(tiny(rounds=1), out=tmp_path / "run", workers=1, watch=lambda *_: None)
    table = run.membership()
    assert set(table.model) == {"sent", "kept"}
    assert len(table) == 2 * (~run.agents.malicious).sum()
    assert table.auc.between(0, 1).all()
    repeated = fedcb2o.Run(run.folder).membership(seed=run.seeds[0])
    assert repeated.equals(table)


def test_the_gain_by_class_is_over_the_samples_of_all_benign_agents(tmp_path):
    experiment = fedcb2o.load(tiny(rounds=1))
    options = {"workers": 1, "watch": lambda *_: None}
    run = fedcb2o.run(experiment, out=tmp_path / "run", **options)
    baseline = fedcb2o.run(experiment.local_baseline(), out=tmp_path / "run-local", **options)
    table = class_gain_table([run])
    accuracies = []
    for finished in (run, baseline):
        matrices = [
            finished.confusion(agent) for agent in np.flatnonzero(~finished.agents.malicious)
        ]
        total = sum(matrices)
        assert finished.confusion().equals(total)
        accuracies.append(100 * np.diag(total) / total.sum(axis=1))
    federated, local = accuracies
    for column, values in zip(table, (federated, local, federated - local), strict=True):
        assert table[column].tolist() == [f"{value:.1f}" for value in values]

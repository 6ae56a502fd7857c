"""Tables from trained models: membership inference with planted canaries, and gain by class."""

import numpy as np
import torch
from tests.agents import attackers_of, block_of, terms_of
from tests.tiny import tiny
from torch import nn

import fedcb2o
from fedcb2o.data import Shard, digits
from fedcb2o.federated import Training, algorithms, local_update_
from fedcb2o.federated.membership import attack_auc, leakage, sample_losses
from fedcb2o.nn.parameters import flatten
from fedcb2o.report._membership import class_gain_table


def test_planted_canaries_are_recognised():
    """Training samples with a wrong label have a low loss only in the model that saw them."""
    draw = np.random.default_rng(0)
    data = digits()
    chosen = torch.from_numpy(draw.permutation(len(data.pool))[:120])
    x, y = data.pool.x[chosen], data.pool.y[chosen].clone()
    y[:40] = (y[:40] + torch.from_numpy(draw.integers(1, 10, 40))) % 10  # 20 planted, 20 not
    own = Shard(torch.cat([x[:20], x[40:]]), torch.cat([y[:20], y[40:]]))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    group = block_of(terms_of(algorithms.fedcb2o(), module, num_classes=10), attackers_of())
    theta = flatten(module)
    before = theta.clone()
    training = Training(gamma=0.1, batch_size=20, local_epochs=60)
    local_update_(theta, module, own, training, np.random.default_rng(1))

    planted, others = Shard(x[:20], y[:20]), Shard(x[20:40], y[20:40])
    found = leakage(group, 0, theta, planted, others)
    assert found["auc"] >= 0.9
    assert found["tpr"] >= 0.9
    losses = [sample_losses(group, 0, theta, shard) for shard in (planted, others)]
    assert found["auc"] == attack_auc(-losses[0], -losses[1])
    untrained = leakage(group, 0, before, planted, others)
    assert 0.3 < untrained["auc"] < 0.7


def test_a_run_measures_what_its_agents_send_and_keep(tmp_path):
    run = fedcb2o.run(tiny(rounds=1), out=tmp_path / "run", workers=1, watch=lambda *_: None)
    table = run.membership()
    assert set(table.model) == {"sent", "kept"}
    assert len(table) == 2 * (~run.agents.malicious).sum()
    assert table.auc.between(0, 1).all()
    again = fedcb2o.Run(run.folder).membership(seed=run.seeds[0])
    assert again.equals(table)


def test_the_gain_by_class_is_over_the_samples_of_all_benign_agents(tmp_path):
    experiment = fedcb2o.load(tiny(rounds=1))
    options = {"workers": 1, "watch": lambda *_: None}
    run = fedcb2o.run(experiment, out=tmp_path / "run", **options)
    baseline = fedcb2o.run(experiment.local_baseline(), out=tmp_path / "run-local", **options)
    table = class_gain_table([run])
    accuracies = []
    for one in (run, baseline):
        matrices = [one.confusion(agent) for agent in np.flatnonzero(~one.agents.malicious)]
        total = sum(matrices)
        assert one.confusion().equals(total)
        accuracies.append(100 * np.diag(total) / total.sum(axis=1))
    own, alone = accuracies
    for column, values in zip(table, (own, alone, own - alone), strict=True):
        assert table[column].tolist() == [f"{value:.1f}" for value in values]

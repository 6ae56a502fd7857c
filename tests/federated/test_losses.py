"""Losses of samples, by hand; and that agents train and judge by the one that is named."""

import math

import pytest
import torch
from torch import nn

from fedcb2o.data import Shard
from fedcb2o.errors import ConfigError
from fedcb2o.federated import (
    Training,
    batched_local_update_,
    inference,
    local_update_,
    losses,
    measure_samples,
    model_losses,
    sample_loss,
)
from fedcb2o.nn import parameters
from fedcb2o.rng import agent_streams, stream

OUTPUTS, TARGETS = torch.tensor([[1.0, 2.0], [0.0, 4.0]]), torch.tensor([[0.0, 0.0], [0.0, 1.0]])
LINE = Shard(torch.linspace(-1, 1, 12).unsqueeze(1), 3 * torch.linspace(-1, 1, 12) + 1)
TRAINING = Training(
    gamma=0.1, lambda2=1.0, momentum=0.0, batch_size=4, local_epochs=1, loss=losses.squared_error
)


def test_by_hand():
    assert losses.squared_error(OUTPUTS, TARGETS).tolist() == [2.5, 4.5]
    assert losses.absolute_error(OUTPUTS, TARGETS).tolist() == [1.5, 1.5]
    assert losses.huber(OUTPUTS, TARGETS).tolist() == [(0.5 + 1.5) / 2, 2.5 / 2]
    assert losses.squared_error(OUTPUTS[:, :1], torch.tensor([3.0, 1.0])).tolist() == [4.0, 1.0]
    assert torch.allclose(
        losses.cross_entropy(torch.zeros(3, 4), torch.tensor([0, 1, 2])), torch.tensor(math.log(4))
    )


def network():
    torch.manual_seed(0)
    return nn.Linear(1, 1)


def test_agents_train_by_it():
    """A line is found, as by plain gradient descent; alone, and in a team."""
    module = network()
    theta, plain = parameters.flatten(module), network()
    draw = stream(0, "x")
    order = stream(0, "x").permutation(12)
    loss = local_update_(theta, module, LINE, TRAINING, draw)
    seen = []
    for chosen in order.reshape(3, 4):
        each = (plain(LINE.x[chosen]).squeeze(1) - LINE.y[chosen]).square().mean()
        seen.append(each.item())
        gradients = torch.autograd.grad(each, list(plain.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    assert torch.allclose(theta, parameters.flatten(plain), atol=1e-6)
    assert loss == pytest.approx(sum(seen) / 3)
    thetas = torch.stack([parameters.flatten(network())] * 2)
    both = [torch.stack([each, each]) for each in (LINE.x, LINE.y)]
    batched_local_update_(thetas, network(), *both, TRAINING, agent_streams(0, agents=[1, 2]))
    assert thetas.isfinite().all()


def test_models_are_judged_by_it():
    """All samples are of one kind where there are no classes, so that the gap of class losses is that of losses."""
    pool = torch.tensor([[3.0, 1.0], [3.0, 2.0], [0.0, math.nan]])  # slope and bias
    found = model_losses(network(), pool, torch.arange(3), LINE, 1, loss=losses.squared_error)
    assert found.mean[:2].tolist() == pytest.approx([0.0, 1.0], abs=1e-6)
    assert found.mean[2] == math.inf
    assert torch.equal(found.by_class, found.mean.unsqueeze(1))
    assert found.present.tolist() == [True]
    assert found.entropy.isnan().all()
    measure = sample_loss(losses.absolute_error)
    tested = measure_samples(network(), pool, torch.arange(3), LINE, measure).mean(1)
    assert tested.tolist() == pytest.approx([0.0, 1.0, math.inf], abs=1e-6)


def test_classes_keep_theirs_under_another_loss():
    pool, y = torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.tensor([0, 1, 1])
    module, data = nn.Linear(1, 2), Shard(torch.zeros(3, 1), y)
    found = model_losses(
        module, pool, torch.arange(1), data, 2, loss=lambda outputs, y: 1.0 + y.float()
    )
    assert found.by_class.tolist() == [[1.0, 2.0]]
    assert float(found.entropy[0]) == pytest.approx(math.log(2))


def test_one_number_for_each_sample():
    def mean(outputs, targets):
        return (outputs - targets).square().mean()

    with pytest.raises(
        ConfigError, match=r"the loss returned shape \(\) for 2 samples, expected a number for each"
    ):
        inference.per_sample_losses(mean, OUTPUTS, TARGETS, 1)

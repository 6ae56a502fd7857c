"""Losses of samples by hand, and training and evaluation by a chosen loss."""

import math

import pytest
import torch
from torch import nn

from fedcb2o.data import Shard
from fedcb2o.errors import ConfigError
from fedcb2o.federated import inference, losses
from fedcb2o.federated.evaluation.models import measure_samples, sample_loss
from fedcb2o.federated.inference import model_losses
from fedcb2o.federated.local_update import batched_local_update_, local_update_
from fedcb2o.federated.run_spec import Training
from fedcb2o.nn import parameters
from fedcb2o.rng import agent_streams, stream

OUTPUTS, TARGETS = torch.tensor([[1.0, 2.0], [0.0, 4.0]]), torch.tensor([[0.0, 0.0], [0.0, 1.0]])
LINE = Shard(torch.linspace(-1, 1, 12).unsqueeze(1), 3 * torch.linspace(-1, 1, 12) + 1)
TRAINING = Training(
    gamma=0.1, lambda2=1.0, momentum=0.0, batch_size=4, local_epochs=1, loss=losses.squared_error
)


def test_losses_by_hand():
    assert losses.squared_error(OUTPUTS, TARGETS).tolist() == [2.5, 4.5]
    assert losses.absolute_error(OUTPUTS, TARGETS).tolist() == [1.5, 1.5]
    assert losses.huber(OUTPUTS, TARGETS).tolist() == [(0.5 + 1.5) / 2, 2.5 / 2]
    assert losses.squared_error(OUTPUTS[:, :1], torch.tensor([3.0, 1.0])).tolist() == [4.0, 1.0]
    result = losses.cross_entropy(torch.zeros(3, 4), torch.tensor([0, 1, 2]))
    assert torch.allclose(result, torch.tensor(math.log(4)))


def network():
    torch.manual_seed(0)
    return nn.Linear(1, 1)


def test_agents_train_by_the_chosen_loss():
    """One agent follows plain gradient descent; two agents in a batch train like each one alone."""
    module = network()
    theta, plain = parameters.flatten(module), network()
    draw = stream(0, "x")
    order = stream(0, "x").permutation(12)
    mean_loss = local_update_(theta, module, LINE, TRAINING, draw)
    batch_losses = []
    for batch in order.reshape(3, 4):
        value = (plain(LINE.x[batch]).squeeze(1) - LINE.y[batch]).square().mean()
        batch_losses.append(value.item())
        gradients = torch.autograd.grad(value, list(plain.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    assert torch.allclose(theta, parameters.flatten(plain), atol=1e-6)
    assert mean_loss == pytest.approx(sum(batch_losses) / 3)
    thetas = torch.stack([parameters.flatten(network())] * 2)
    expected = thetas.clone()
    for k, draw in enumerate(agent_streams(0, agents=[1, 2])):
        local_update_(expected[k], network(), LINE, TRAINING, draw)
    stacked = [torch.stack([value, value]) for value in (LINE.x, LINE.y)]
    batched_local_update_(thetas, network(), *stacked, TRAINING, agent_streams(0, agents=[1, 2]))
    torch.testing.assert_close(thetas, expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(thetas[0], thetas[1])


def test_models_are_evaluated_by_the_chosen_loss():
    """Without classes, all samples count as one class, whose loss is the mean loss."""
    models = torch.tensor([[3.0, 1.0], [3.0, 2.0], [0.0, math.nan]])  # slope and bias
    result = model_losses(network(), models, torch.arange(3), LINE, 1, loss=losses.squared_error)
    assert result.mean[:2].tolist() == pytest.approx([0.0, 1.0], abs=1e-6)
    assert result.mean[2] == math.inf
    assert torch.equal(result.by_class, result.mean.unsqueeze(1))
    assert result.present.tolist() == [True]
    assert result.entropy.isnan().all()
    measure = sample_loss(losses.absolute_error)
    absolute_errors = measure_samples(network(), models, torch.arange(3), LINE, measure).mean(1)
    assert absolute_errors.tolist() == pytest.approx([0.0, 1.0, math.inf], abs=1e-6)


def test_another_loss_changes_class_losses_but_not_entropy():
    models, y = torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.tensor([0, 1, 1])
    module, data = nn.Linear(1, 2), Shard(torch.zeros(3, 1), y)
    result = model_losses(
        module, models, torch.arange(1), data, 2, loss=lambda outputs, y: 1.0 + y.float()
    )
    assert result.by_class.tolist() == [[1.0, 2.0]]
    assert float(result.entropy[0]) == pytest.approx(math.log(2))


def test_a_loss_with_one_number_for_all_samples_is_refused():
    def mean(outputs, targets):
        return (outputs - targets).square().mean()

    message = r"the loss returned shape \(\) for 2 samples, expected a number for each"
    with pytest.raises(ConfigError, match=message):
        inference.per_sample_losses(mean, OUTPUTS, TARGETS, 1)

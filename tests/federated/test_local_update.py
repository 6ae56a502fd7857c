"""LocalUpdate: one step by hand, mini-batches, and training of theta in place."""

import functools
import math

import pytest
import torch
from tests.tiny import empty_models
from torch import nn

from fedcb2o.data import Shard
from fedcb2o.federated import optimisers
from fedcb2o.federated.local_update import batched_mini_batches, local_update_
from fedcb2o.federated.run_spec import Training
from fedcb2o.nn import architectures, parameters
from fedcb2o.rng import stream

TRAINING = Training(gamma=0.5, lambda2=2.0, momentum=0.9, batch_size=4, local_epochs=3)


def test_one_step_by_hand():
    """Two classes of one weight each and input 1: the softmax is (1/2, 1/2), the gradient p - y."""
    module = nn.Linear(1, 2, bias=False)
    theta = torch.zeros(1, 2)[0]
    one_epoch = Training(gamma=0.5, lambda2=2.0, momentum=0.9, batch_size=4, local_epochs=1)
    loss = local_update_(
        theta,
        module,
        Shard(torch.ones(4, 1), torch.tensor([0, 0, 0, 1])),
        one_epoch,
        stream(0, "x"),
    )
    # theta <- 0 - 1 * mean gradient; class 0: 1/2 - 3/4, class 1: 1/2 - 1/4.
    assert theta.tolist() == pytest.approx([0.25, -0.25])
    assert loss == pytest.approx(math.log(2))


def test_momentum_is_not_carried_over():
    shard = Shard(torch.ones(4, 1), torch.tensor([0, 0, 0, 1]))
    module, theta = nn.Linear(1, 2, bias=False), torch.zeros(2)
    one_epoch = Training(gamma=0.5, lambda2=2.0, momentum=0.9, batch_size=4, local_epochs=1)
    local_update_(theta, module, shard, one_epoch, stream(0, "a"))
    local_update_(theta, module, shard, one_epoch, stream(0, "b"))
    p = 1 / (1 + math.exp(-0.5))  # the softmax at (0.25, -0.25)
    assert theta[0].item() == pytest.approx(0.25 - (p - 0.75), abs=1e-6)


def mini_batches(n, training):
    batches = batched_mini_batches([n], training, [stream(0, "x")], torch.device("cpu"))
    return [batch[0].tolist() for batch in batches]


def sizes(n, training):
    return [len(batch) for batch in mini_batches(n, training)]


def test_batches_cover_every_epoch_and_steps_cycle():
    assert sizes(10, TRAINING) == [4, 4, 2] * 3
    first = [i for batch in mini_batches(10, TRAINING)[:3] for i in batch]
    assert sorted(first) == list(range(10))
    steps = Training(
        gamma=0.5, lambda2=1.0, momentum=0.0, batch_size=4, local_epochs=3, local_steps=7
    )
    assert sizes(10, steps) == [4, 4, 2, 4, 4, 2, 4]


def test_a_single_last_sample_joins_the_previous_batch_for_batch_norms():
    joined = TRAINING.model_copy(update={"accepts_single_sample": False})
    assert sizes(9, TRAINING)[:3] == [4, 4, 1]
    assert sizes(9, joined)[:3] == [4, 5, 4]
    assert sizes(10, joined)[:3] == [4, 4, 2]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_training_changes_only_its_row_in_place(precision):
    module = architectures.cnn((1, 8, 8), 3, hidden=5)
    d = parameters.dimension(module)
    rows = empty_models(3, d)
    rows[:] = parameters.flatten(module)
    before = rows.clone()
    draw = stream(1, "data")
    shard = Shard(
        torch.from_numpy(draw.random((20, 1, 8, 8))).float(),
        torch.from_numpy(draw.integers(3, size=20)),
    )
    training = Training(
        gamma=0.05, lambda2=1.0, momentum=0.9, batch_size=8, local_epochs=1, precision=precision
    )
    local_update_(rows[1], module, shard, training, stream(1, "x"))
    assert parameters.is_bound(module, rows[1])
    assert rows[0].equal(before[0])
    assert rows[2].equal(before[2])
    assert not rows[1].equal(before[1])


def test_training_with_dropout_is_reproducible():
    """Dropout uses the agent's stream. PyTorch's global generator does not change."""
    make = lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))  # noqa: E731
    module = make()
    start = parameters.flatten(module)
    shard = Shard(torch.rand(12, 4), torch.arange(12) % 2)
    results = []
    for _ in range(2):
        theta = start.clone()
        torch.rand(1)
        state = torch.random.get_rng_state()
        local_update_(theta, module, shard, TRAINING, stream(3, "x"))
        assert state.equal(torch.random.get_rng_state())
        results.append(theta)
    assert results[0].equal(results[1])


def test_sgd_adds_the_decay_to_the_gradient_by_hand():
    theta = torch.tensor([2.0, -1.0], requires_grad=True)
    decayed = functools.partial(optimisers.sgd, weight_decay=0.5)
    step = optimisers.make_step(decayed, [theta], 0.1)
    step([torch.tensor([1.0, 0.0])])  # directions 1 + 1 and -0.5
    torch.testing.assert_close(theta.detach(), torch.tensor([1.8, -0.95]))
    step([torch.zeros(2)])  # 0.9 * 2 + 0.9 and 0.9 * -0.5 - 0.475
    torch.testing.assert_close(theta.detach(), torch.tensor([1.53, -0.8575]))

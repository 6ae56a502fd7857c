"""Batched training equals training one model at a time, up to rounding.

The batches depend only on the population.
"""

import pytest
import torch
from tests.networks import NETWORKS, different, fresh, shards
from tests.tiny import empty_models
from torch import nn

from fedcb2o.data import Shard
from fedcb2o.federated import losses
from fedcb2o.federated.local_update import batched_local_update_, local_update_, training_batches
from fedcb2o.federated.run_spec import Training
from fedcb2o.nn import architectures, parameters
from fedcb2o.rng import stream

# With AVX2 alone more is rounded, and batch norms of four samples amplify it.
WIDE = torch.backends.cpu.get_cpu_capability() != "AVX2"
TRAINING = Training(gamma=0.05, lambda2=0.5, momentum=0.9, batch_size=4, local_epochs=2)


def stacked(data):
    return torch.stack([shard.x for shard in data]), torch.stack([shard.y for shard in data])


CHANGES = [
    {},
    {"local_steps": 5},
    {"momentum": 0.0},
    {"batch_size": 100},
    {"lambda2": 0.2, "local_epochs": 3},
]


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("name", NETWORKS)
def test_batched_training_equals_training_alone(name, changes):
    module, training = fresh(name), Training(**{**TRAINING.__dict__, **changes})
    thetas, data = different(module, 7), shards(7, 11)
    alone = thetas.clone()
    single_losses = [
        local_update_(alone[j], module, data[j], training, stream(5, "batches", j))
        for j in range(7)
    ]
    batched_losses = batched_local_update_(
        thetas, module, *stacked(data), training, [stream(5, "batches", j) for j in range(7)]
    )
    torch.testing.assert_close(thetas, alone, rtol=1e-5, atol=1e-6 if WIDE else 1e-5)
    assert batched_losses == pytest.approx(single_losses, rel=1e-5)


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in {"norm", "local"}])
def test_batched_training_with_unequal_sample_counts_equals_training_alone(name, changes):
    module, training = fresh(name), Training(**{**TRAINING.__dict__, **changes})
    counts = [12, 9, 12, 10]  # three batches of 4 per epoch
    thetas, data = different(module, 4), shards(4, 12)
    alone = thetas.clone()
    truncated = [
        Shard(shard.x[:count], shard.y[:count]) for shard, count in zip(data, counts, strict=True)
    ]
    single_losses = [
        local_update_(alone[j], module, truncated[j], training, stream(5, "batches", j))
        for j in range(4)
    ]
    for shard, count in zip(data, counts, strict=True):
        shard.x[count:], shard.y[count:] = 7.0, 0  # padding, which is never read
    draws = [stream(5, "batches", j) for j in range(4)]
    batched_losses = batched_local_update_(thetas, module, *stacked(data), training, draws, counts)
    torch.testing.assert_close(thetas, alone, rtol=1e-5, atol=1e-6)
    assert batched_losses == pytest.approx(single_losses, rel=1e-5)


def test_batched_training_with_vector_targets_equals_training_alone():
    module, counts = nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), [3, 6, 5]
    training = Training(**{**TRAINING.__dict__, "loss": losses.squared_error, "batch_size": 10})
    thetas, draw = different(module, 3), torch.Generator().manual_seed(2)
    alone = thetas.clone()
    x = torch.rand(3, 6, 1, 4, 4, generator=draw)
    y = torch.rand(3, 6, 2, generator=draw)
    for j, n in enumerate(counts):
        local_update_(
            alone[j], module, Shard(x[j, :n], y[j, :n]), training, stream(5, "batches", j)
        )
    batched_local_update_(
        thetas, module, x, y, training, [stream(5, "batches", j) for j in range(3)], counts
    )
    torch.testing.assert_close(thetas, alone, rtol=1e-5, atol=1e-6)


def test_composition_of_training_batches():
    small = fresh("mlp")
    d = parameters.dimension(small)
    assert training_batches(small, d, [35, 35, 205, 35]) == [[0, 1, 3], [2]]
    assert sorted(map(len, training_batches(small, d, [8] * 150))) == [22, 64, 64]
    assert set(map(len, training_batches(small, d, [8] * 3200))) == {200}  # 16 batches
    assert set(map(len, training_batches(small, d, [8] * 20480))) == {512}
    assert training_batches(architectures.mlp([1, 28, 28], 10, hidden=[1000]), 10**6, [8, 8]) == [
        [0],
        [1],
    ]  # too large to be faster in a batch
    other = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 4))
    assert training_batches(other, parameters.dimension(other), [8, 8]) == [[0], [1]]
    assert training_batches(
        other, parameters.dimension(other), [8, 8, 9, 8], models_per_batch=2
    ) == [[0, 1], [3], [2]]
    assert training_batches(small, d, [8, 8, 8], models_per_batch=1) == [[0], [1], [2]]
    result = training_batches(small, d, [8, 5, 9, 6], models_per_batch=3, batch_size=4)
    assert result == [[0, 1, 3], [2]]
    result = training_batches(small, d, [8, 5, 8, 5], models_per_batch=2, batch_size=4)
    assert result == [[1, 3], [0, 2]]


@pytest.mark.parametrize("name", NETWORKS)
def test_bfloat16_changes_products_only(name):
    module, data = fresh(name), shards(3, 8)
    thetas = different(module, 3)
    exact, alone = thetas.clone(), thetas.clone()
    for rows, precision in ((thetas, "bfloat16"), (exact, "float32")):
        training = Training(**{**TRAINING.__dict__, "precision": precision})
        batched_local_update_(
            rows, module, *stacked(data), training, [stream(5, "batches", j) for j in range(3)]
        )
    training = Training(**{**TRAINING.__dict__, "precision": "bfloat16"})
    for j in range(3):
        local_update_(alone[j], module, data[j], training, stream(5, "batches", j))
    assert thetas.dtype == torch.float32
    assert 0 < (thetas - exact).abs().max() < 0.05
    assert (thetas - alone).abs().max() < 0.05


def test_dropout_differs_between_agents_and_is_reproducible():
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    start, data = different(module, 1).expand(3, -1), shards(1, 8) * 3
    results = []
    for _ in range(2):
        thetas = empty_models(3, parameters.dimension(module))
        thetas[:] = start
        before = torch.random.get_rng_state()
        batched_local_update_(
            thetas, module, *stacked(data), TRAINING, [stream(5, "batches", 0) for _ in range(3)]
        )
        assert torch.equal(torch.random.get_rng_state(), before)
        results.append(thetas)
    assert torch.equal(results[0], results[1])
    assert not torch.allclose(results[0][0], results[0][1])

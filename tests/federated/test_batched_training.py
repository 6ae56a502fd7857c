"""Models trained together: the same as one by one, to rounding, and teams that the population alone decides."""

import pytest
import torch
from tests.networks import NETWORKS, different, fresh, shards
from tests.tiny import empty_models
from torch import nn

from fedcb2o.data import Shard
from fedcb2o.federated import (
    Training,
    batched_local_update_,
    local_update_,
    losses,
    training_batches,
)
from fedcb2o.nn import architectures, parameters
from fedcb2o.rng import stream

# With AVX2 alone more is rounded, and batch norms of four samples amplify it.
WIDE = torch.backends.cpu.get_cpu_capability() != "AVX2"
TRAINING = Training(gamma=0.05, lambda2=0.5, momentum=0.9, batch_size=4, local_epochs=2)


def stacked(data):
    return torch.stack([shard.x for shard in data]), torch.stack([shard.y for shard in data])


class Centred(nn.Module):
    """Samples less their mean."""

    def forward(self, x):
        return x - x.mean(0)


CHANGES = [
    {},
    {"local_steps": 5},
    {"momentum": 0.0},
    {"batch_size": 100},
    {"lambda2": 0.2, "local_epochs": 3},
]


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_team_learns_what_each_learns_alone(name, changes):
    module, training = fresh(name), Training(**{**TRAINING.__dict__, **changes})
    mine, data = different(module, 7), shards(7, 11)
    alone = mine.clone()
    one_by_one = [
        local_update_(alone[j], module, data[j], training, stream(5, "batches", j))
        for j in range(7)
    ]
    found = batched_local_update_(
        mine, module, *stacked(data), training, [stream(5, "batches", j) for j in range(7)]
    )
    torch.testing.assert_close(mine, alone, rtol=1e-5, atol=1e-6 if WIDE else 1e-5)
    assert found == pytest.approx(one_by_one, rel=1e-5)


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in {"norm", "local"}])
def test_so_does_a_team_of_unlike_numbers_of_samples(name, changes):
    module, training = fresh(name), Training(**{**TRAINING.__dict__, **changes})
    counts = [12, 9, 12, 10]  # three batches of 4 an epoch
    mine, data = different(module, 4), shards(4, 12)
    alone = mine.clone()
    held = [
        Shard(shard.x[:count], shard.y[:count]) for shard, count in zip(data, counts, strict=True)
    ]
    one_by_one = [
        local_update_(alone[j], module, held[j], training, stream(5, "batches", j))
        for j in range(4)
    ]
    for shard, count in zip(data, counts, strict=True):
        shard.x[count:], shard.y[count:] = 7.0, 0  # nobody reads them
    draws = [stream(5, "batches", j) for j in range(4)]
    found = batched_local_update_(mine, module, *stacked(data), training, draws, counts)
    torch.testing.assert_close(mine, alone, rtol=1e-5, atol=1e-6)
    assert found == pytest.approx(one_by_one, rel=1e-5)


def test_targets_of_several_numbers_do_not_change_that():
    module, counts = nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), [3, 6, 5]
    training = Training(**{**TRAINING.__dict__, "loss": losses.squared_error, "batch_size": 10})
    mine, draw = different(module, 3), torch.Generator().manual_seed(2)
    alone, x, y = (
        mine.clone(),
        torch.rand(3, 6, 1, 4, 4, generator=draw),
        torch.rand(3, 6, 2, generator=draw),
    )
    for j, n in enumerate(counts):
        local_update_(
            alone[j], module, Shard(x[j, :n], y[j, :n]), training, stream(5, "batches", j)
        )
    batched_local_update_(
        mine, module, x, y, training, [stream(5, "batches", j) for j in range(3)], counts
    )
    torch.testing.assert_close(mine, alone, rtol=1e-5, atol=1e-6)


def test_who_trains_together():
    small = fresh("mlp")
    d = parameters.dimension(small)
    assert training_batches(small, d, [35, 35, 205, 35]) == [[0, 1, 3], [2]]
    assert sorted(map(len, training_batches(small, d, [8] * 150))) == [22, 64, 64]
    assert training_batches(architectures.mlp([1, 28, 28], 10, hidden=[1000]), 10**6, [8, 8]) == [
        [0],
        [1],
    ]  # too large to gain by it
    other = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 4))
    assert training_batches(other, parameters.dimension(other), [8, 8]) == [[0], [1]]
    assert training_batches(
        other, parameters.dimension(other), [8, 8, 9, 8], models_per_batch=2
    ) == [[0, 1], [3], [2]]
    assert training_batches(small, d, [8, 8, 8], models_per_batch=1) == [[0], [1], [2]]
    assert training_batches(small, d, [8, 5, 9, 6], models_per_batch=3, batch_size=4) == [
        [0, 1, 3],
        [2],
    ]
    assert training_batches(small, d, [8, 5, 8, 5], models_per_batch=2, batch_size=4) == [
        [1, 3],
        [0, 2],
    ]


@pytest.mark.parametrize("name", NETWORKS)
def test_bfloat16_changes_products_only(name):
    module, data = fresh(name), shards(3, 8)
    thetas = different(module, 3)
    exact, alone = thetas.clone(), thetas.clone()
    for mine, precision in ((thetas, "bfloat16"), (exact, "float32")):
        training = Training(**{**TRAINING.__dict__, "precision": precision})
        batched_local_update_(
            mine, module, *stacked(data), training, [stream(5, "batches", j) for j in range(3)]
        )
    training = Training(**{**TRAINING.__dict__, "precision": "bfloat16"})
    for j in range(3):
        local_update_(alone[j], module, data[j], training, stream(5, "batches", j))
    assert thetas.dtype == torch.float32
    assert 0 < (thetas - exact).abs().max() < 0.05
    assert (thetas - alone).abs().max() < 0.05


def test_a_network_that_draws_draws_for_each_agent_and_again_alike():
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    begun, data = different(module, 1).expand(3, -1), shards(1, 8) * 3
    found = []
    for _ in range(2):
        mine = empty_models(3, parameters.dimension(module))
        mine[:] = begun
        before = torch.random.get_rng_state()
        batched_local_update_(
            mine, module, *stacked(data), TRAINING, [stream(5, "batches", 0) for _ in range(3)]
        )
        assert torch.equal(torch.random.get_rng_state(), before)
        found.append(mine)
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0][0], found[0][1])

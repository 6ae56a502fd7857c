"""SGD with momentum in one pass, and training with copies in bfloat16 that autocast leaves alone."""

import os
import sys
import types

import pytest
import torch
from tests.networks import different, fresh, shards
from torch import nn

from fedcb2o.federated import Training, batched_local_update_, local_update
from fedcb2o.kernels import dispatch
from fedcb2o.nn.mixed_precision import autocast_positions
from fedcb2o.rng import stream


def momentum_step_(parameter, momentum, gradient, low, lr, factor):
    """The same update by PyTorch's operations."""
    momentum.mul_(factor).add_(gradient)
    parameter.add_(momentum, alpha=-lr)
    if low is not None:
        low.copy_(parameter)


# Autocast on a CPU knows convolutions of several networks in the unfolded form alone.
@pytest.mark.parametrize(("name", "convolution"), [("mlp", "grouped"), ("cnn", "unfolded")])
def test_training_with_copies_has_the_bits_of_autocast(monkeypatch, name, convolution):
    stand_in = types.SimpleNamespace(momentum_step_=momentum_step_)
    monkeypatch.setitem(sys.modules, "fedcb2o.nn.fused_momentum", stand_in)
    module, data = fresh(name), shards(3, 11)
    x = torch.stack([shard.x for shard in data])
    y = torch.stack([shard.y for shard in data])
    training = Training(
        gamma=0.05,
        lambda2=0.5,
        momentum=0.9,
        batch_size=4,
        local_epochs=2,
        precision="bfloat16",
    )
    trained = []
    for has_triton in (False, True):
        monkeypatch.setattr(local_update, "has_triton", lambda device, value=has_triton: value)
        models = different(module, 3)
        draws = [stream(5, "batches", j) for j in range(3)]
        with dispatch.use_kernels("batched", convolution):
            losses = batched_local_update_(models, module, x, y, training, draws)
        trained.append((models, losses))
    (models, losses), (others, other_losses) = trained
    assert not torch.equal(models, different(module, 3))
    assert losses == other_losses
    assert torch.equal(models, others)


def test_tensors_that_other_layers_read_stay_in_float32():
    tied = nn.Linear(4, 6)
    embedding = nn.Embedding(6, 4)
    embedding.weight = tied.weight
    module = nn.Sequential(embedding, nn.GroupNorm(1, 4), nn.Conv1d(4, 4, 1), tied)
    assert autocast_positions(module) == [5]  # the bias of the dense layer


needs_triton = pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a GPU, or TRITON_INTERPRET=1",
)


@needs_triton
@pytest.mark.parametrize("has_copy", [False, True])
def test_one_pass_by_triton_agrees(has_copy):
    pytest.importorskip("triton")
    from fedcb2o.nn import fused_momentum

    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = torch.bfloat16 if device == "cuda" else torch.float32  # the interpreter lacks it
    draw = torch.Generator().manual_seed(0)
    theta, m, g = (torch.randn(3, 1001, generator=draw).to(device) for _ in range(3))
    g = g.to(kind)
    expected = [theta.clone(), m.clone(), theta.to(kind) if has_copy else None]
    found = [tensor if tensor is None else tensor.clone() for tensor in expected]
    momentum_step_(expected[0], expected[1], g, expected[2], 0.1, 0.9)
    fused_momentum.momentum_step_(found[0], found[1], g, found[2], 0.1, 0.9)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)

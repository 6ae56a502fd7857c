"""SGD with momentum in one pass, and training with bfloat16 copies that autocast keeps."""

import os
import sys
import types

import pytest
import torch
from tests.networks import different, fresh, shards
from torch import nn

from fedcb2o.federated import local_update
from fedcb2o.federated.local_update import batched_local_update_
from fedcb2o.federated.run_spec import Training
from fedcb2o.kernels import dispatch
from fedcb2o.nn.mixed_precision import autocast_positions
from fedcb2o.rng import stream


def momentum_step_(parameter, momentum, gradient, low, lr, factor):
    """Apply the same update with PyTorch's operations."""
    momentum.mul_(factor).add_(gradient)
    parameter.add_(momentum, alpha=-lr)
    if low is not None:
        low.copy_(parameter)


# On a CPU autocast supports convolutions of several networks only in the unfolded form.
@pytest.mark.parametrize(("name", "convolution"), [("mlp", "grouped"), ("cnn", "unfolded")])
def test_training_with_copies_has_the_bits_of_autocast(monkeypatch, name, convolution):
    stand_in = types.SimpleNamespace(momentum_step_=momentum_step_)
    monkeypatch.setitem(sys.modules, "fedcb2o.nn.fused_momentum", stand_in)
    module, data = fresh(name), shards(3, 11)
    x = torch.stack([shard.x for shard in data])
    y = torch.stack([shard.y for shard in data])
    training = Training(
        gamma=0.05, lambda2=0.5, momentum=0.9, batch_size=4, local_epochs=2, precision="bfloat16"
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
def test_the_triton_kernel_agrees_with_pytorch(has_copy):
    pytest.importorskip("triton")
    from fedcb2o.nn import fused_momentum

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # the interpreter lacks bfloat16
    draw = torch.Generator().manual_seed(0)
    theta, m, g = (torch.randn(3, 1001, generator=draw).to(device) for _ in range(3))
    g = g.to(dtype)
    expected = [theta.clone(), m.clone(), theta.to(dtype) if has_copy else None]
    result = [tensor if tensor is None else tensor.clone() for tensor in expected]
    momentum_step_(expected[0], expected[1], g, expected[2], 0.1, 0.9)
    fused_momentum.momentum_step_(result[0], result[1], g, result[2], 0.1, 0.9)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)

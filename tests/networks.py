"""Networks of every kind, with models and samples, for the tests of batched computation."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedcb2o.data import Shard
from fedcb2o.nn import architectures, batch_norm, parameters
from fedcb2o.rng import stream
from tests.tiny import empty_models

needs_onednn = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this PyTorch has no oneDNN"
)


class CountConvolutions(TorchDispatchMode):
    """Context that counts the calls of PyTorch's convolution in `convolutions`."""

    convolutions = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.convolutions += func is torch.ops.aten.convolution.default
        return func(*args, **(kwargs or {}))


class Tied(nn.Module):
    """A network with a layer used twice, a weight shared by two layers, and an unused parameter."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 8)
        self.twice = nn.Linear(8, 8)
        self.idle = nn.Parameter(torch.ones(3))
        self.again, self.alike, self.last = self.twice, nn.Linear(8, 8), nn.Linear(8, 4)
        self.alike.weight = self.twice.weight

    def forward(self, x):
        return self.last(self.alike(self.again(self.twice(self.first(x.flatten(1))).tanh())).relu())


def with_norms(input_shape, num_classes):
    """Return a network for the digits with batch norm layers and a constant buffer."""
    module = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, stride=2, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(36, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, num_classes)),
    )
    module.register_buffer("constant", torch.ones(5))
    return module


with torch.random.fork_rng():
    torch.manual_seed(3)
    NETWORKS = {
        "mlp": architectures.mlp([1, 4, 4], 4, hidden=[5, 6]),
        "logistic": architectures.logistic([1, 4, 4], 4),
        "cnn": architectures.cnn([1, 4, 4], 4, hidden=8),
        "resnet": architectures.resnet([1, 4, 4], 4, width=8),
        "tied": Tied(),
        "norm": nn.Sequential(
            *(
                nn.Conv2d(1, 3, 3, padding=1),
                nn.BatchNorm2d(3),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(48, 4),
            )
        ),
        "local": nn.Sequential(
            *(
                nn.Conv2d(1, 3, 3, padding=1),
                nn.BatchNorm2d(3),
                nn.Flatten(),
                nn.Linear(48, 6),
                nn.BatchNorm1d(6),
            ),
            *(nn.ReLU(), nn.Linear(6, 4)),
        ),
        "frozen": nn.Sequential(
            nn.Flatten(), nn.Linear(16, 8).requires_grad_(False), nn.Tanh(), nn.Linear(8, 4)
        ),
    }

    batch_norm.set_statistics_mode(NETWORKS["local"], "local")


def fresh(name):
    """Return a copy of a network; training and evaluation bind its parameters to a buffer."""
    return copy.deepcopy(NETWORKS[name])


def shards(count, n):
    draw = stream(5, "shards")
    x = torch.from_numpy(draw.normal(size=(count, n, 1, 4, 4))).float()
    return [Shard(x[j], torch.from_numpy(draw.integers(4, size=n))) for j in range(count)]


def different(module, count):
    """Return `count` different models near the parameters of a network."""
    thetas = empty_models(count, parameters.dimension(module))
    thetas[:] = (
        parameters.flatten(module)
        + 0.1 * torch.from_numpy(stream(5, "theta").normal(size=thetas.shape)).float()
    )
    return thetas


class Adapted(nn.Module):
    """A dense layer with a bias, whose weight is a product of PEFT's factors."""

    def __init__(self, inputs: int = 3, outputs: int = 4, rank: int = 2) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, outputs, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lora_B["default"](self.lora_A["default"](x.flatten(1))) + self.bias

"""Networks of every kind, models of theirs that differ, and samples, for the tests that compute several at once."""

import copy

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedcb2o.data import Shard
from fedcb2o.nn import architectures, batch_norm, parameters
from fedcb2o.rng import stream
from tests.tiny import empty_models


class Seen(TorchDispatchMode):
    """Within it `convolutions` counts those that PyTorch computes as such."""

    convolutions = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.convolutions += func is torch.ops.aten.convolution.default
        return func(*args, **(kwargs or {}))


class Tied(nn.Module):
    """A network with a layer that is used twice, a weight that two layers share, and a parameter that is not used."""

    def __init__(self):
        super().__init__()
        self.first, self.twice, self.idle = (
            nn.Linear(16, 8),
            nn.Linear(8, 8),
            nn.Parameter(torch.ones(3)),
        )
        self.again, self.alike, self.last = self.twice, nn.Linear(8, 8), nn.Linear(8, 4)
        self.alike.weight = self.twice.weight

    def forward(self, x):
        return self.last(self.alike(self.again(self.twice(self.first(x.flatten(1))).tanh())).relu())


def with_norms(input_shape, num_classes):
    """With batch norms and a constant, for the digits."""
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
            ),
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
    """A network as it was made: whoever trains or judges leaves its parameters in rows of a pool."""
    return copy.deepcopy(NETWORKS[name])


def shards(count, n):
    draw = stream(5, "shards")
    x = torch.from_numpy(draw.normal(size=(count, n, 1, 4, 4))).float()
    return [Shard(x[j], torch.from_numpy(draw.integers(4, size=n))) for j in range(count)]


def different(module, count):
    """Models of the size that networks begin with, each its own."""
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

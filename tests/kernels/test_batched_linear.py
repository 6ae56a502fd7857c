"""Dense layers of several networks as one batched product."""

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn import functional as F

from fedcb2o.kernels import dispatch


def random_tensor(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_outputs_and_gradients_equal_the_single_networks():
    tensors = [
        random_tensor(3, 4, 5, seed=0),
        random_tensor(3, 7, 5, seed=1),
        random_tensor(3, 7, seed=2),
    ]
    inputs = [tensor.clone().requires_grad_() for tensor in tensors]
    with dispatch.use_kernels("batched"):
        y = vmap(F.linear)(*inputs)
    g = random_tensor(3, 4, 7, seed=3)
    gradients = torch.autograd.grad(y, inputs, g)
    for i in range(3):
        single = [tensor[i].clone().requires_grad_() for tensor in tensors]
        expected = F.linear(*single)
        torch.testing.assert_close(y[i], expected)
        target = list(torch.autograd.grad(expected, single, g[i]))
        torch.testing.assert_close([gradient[i] for gradient in gradients], target)


def test_the_gradient_has_the_memory_order_of_the_weights():
    inputs = [
        random_tensor(3, 4, 5, seed=0),
        random_tensor(3, 7, 5, seed=1).requires_grad_(),
        random_tensor(3, 7, seed=2),
    ]
    gradients = {}
    for linear in ("torch", "batched"):
        with dispatch.use_kernels(linear):
            y = vmap(F.linear)(*inputs)
        (gradients[linear],) = torch.autograd.grad(y.sum(), [inputs[1]])
    assert not gradients["torch"].is_contiguous()
    assert gradients["batched"].is_contiguous()


@pytest.mark.parametrize(
    ("layer", "shape", "in_dims"),
    [
        pytest.param(nn.Linear(5, 7), (4, 5), None, id="shared by all networks"),
        pytest.param(nn.Linear(5, 7, bias=False), (3, 4, 5), 0, id="without a bias"),
        pytest.param(nn.Linear(5, 7), (3, 4, 2, 5), 0, id="tokens"),
    ],
)
def test_other_layers_are_left_to_pytorch(layer, shape, in_dims):
    layer = layer.double()
    x = random_tensor(*shape, seed=4)
    stacked = {name: p.detach().expand(3, *p.shape) for name, p in layer.named_parameters()}

    def outputs(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,))

    with dispatch.use_kernels("batched"):
        y = vmap(outputs, in_dims=(0, in_dims))(stacked, x)
    torch.testing.assert_close(y, layer(x).detach().expand(3, *y.shape[1:]))

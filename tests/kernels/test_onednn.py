"""Large dense layers by oneDNN: the same numbers to rounding for any network."""

import pytest
import torch
from tests.networks import needs_onednn
from torch import nn
from torch.nn import functional as F

from fedcb2o.federated.inference import batched_forward, dense_layers
from fedcb2o.kernels import dispatch
from fedcb2o.nn import parameters

pytestmark = needs_onednn
WIDE = (1100, 1000)


def gradients(inputs, linear):
    with dispatch.use_kernels(linear):
        y = F.linear(*inputs)
    needed = [t for t in inputs if t is not None and t.requires_grad]
    g = torch.linspace(-1, 1, y.shape[1]).expand(y.shape)  # without memory of its own
    return y, torch.autograd.grad(y, needed, g)


LAYOUTS = {
    "rows": lambda x: x,
    "columns": lambda x: x.T.contiguous().T,
    "a slice": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "one sample again and again": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_and_its_gradients_agree_to_rounding(layout, bias):
    draw = torch.Generator().manual_seed(0)
    x = LAYOUTS[layout](torch.randn(6, WIDE[0], generator=draw)).requires_grad_()
    weight = torch.randn(WIDE[1], WIDE[0], generator=draw).requires_grad_()
    inputs = x, weight, torch.randn(WIDE[1], generator=draw).requires_grad_() if bias else None
    y, result = gradients(inputs, "onednn")
    assert "_LinearFunction" in type(y.grad_fn).__name__
    assert y.is_contiguous()
    expected_y, expected = gradients(inputs, "torch")
    torch.testing.assert_close(y, expected_y, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-3)


def test_small_layers_and_other_types_or_shapes_use_pytorch():
    x, weight = torch.randn(6, WIDE[0]), torch.randn(*WIDE[::-1], requires_grad=True)
    with dispatch.use_kernels("onednn"):
        outputs = [
            F.linear(x[:, :8], weight[:8, :8]),
            F.linear(x.double(), weight.double()),
            F.linear(x[None], weight),
            F.linear(input=x[0], weight=weight),
        ]
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(F.linear(x, weight))
    assert all("_LinearFunction" not in type(y.grad_fn).__name__ for y in outputs)
    assert outputs[-1].dtype == torch.bfloat16


def test_a_layer_used_twice_has_the_right_gradients():
    layer = nn.Linear(1100, 1100)
    x = torch.randn(4, 1100, generator=torch.Generator().manual_seed(0))
    results = []
    for linear in ("torch", "onednn"):
        with dispatch.use_kernels(linear):
            y = layer(layer(x).relu())
        results.append(torch.autograd.grad(y.square().sum(), list(layer.parameters())))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_second_derivatives_agree(layout):
    """Differentiate the gradient of a layer by its input, as score networks do."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(6, WIDE[0], generator=draw)
    weight = torch.randn(WIDE[1], WIDE[0], generator=draw) / 30
    results = []
    for linear in ("torch", "onednn"):
        inputs = [t.clone().requires_grad_() for t in (x, weight, torch.zeros(WIDE[1]))]
        with dispatch.use_kernels(linear):
            arranged = LAYOUTS[layout](inputs[0])
            energy = F.linear(arranged, *inputs[1:]).tanh().sum()
            slope, *_ = torch.autograd.grad(energy, inputs[0], create_graph=True)
            results.append(torch.autograd.grad(slope.square().sum(), inputs))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-3)
    assert all(g.abs().max() > 0.1 for g in results[0])


def test_several_networks_at_once_use_pytorch():
    module = nn.Sequential(nn.Linear(1100, 1000), nn.Tanh(), nn.Linear(1000, 2))
    thetas = torch.stack([parameters.flatten(module)] * 2)
    x = torch.randn(1, 3, 1100, generator=torch.Generator().manual_seed(0))
    results = []
    for linear in ("torch", "onednn"):
        with dispatch.use_kernels(linear):
            leaves = [p.requires_grad_() for p in parameters.unstack_views(module, thetas)]
            y = batched_forward(module, dense_layers(module, thetas.shape[1]))(leaves, x)
        results.append(torch.autograd.grad(y.sum(), leaves))
    assert all(map(torch.equal, *results))

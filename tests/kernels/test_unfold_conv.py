"""Convolutions of several networks as batched products, equal to rounding."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.networks import CountConvolutions
from torch import nn
from torch.func import vmap
from torch.nn import functional as F

from fedcb2o.federated.inference import batched_forward, dense_layers
from fedcb2o.kernels import dispatch
from fedcb2o.nn import architectures, parameters
from fedcb2o.rng import stream


def random_tensor(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def batched_outputs(convolve, x, parameters):
    """Return outputs and gradients of several networks, and the number of PyTorch convolutions."""
    inputs = [t.clone().requires_grad_() for t in (x, *parameters)]
    with CountConvolutions() as counter, dispatch.use_kernels(convolution="unfolded"):
        y = vmap(convolve)(*inputs)
    return (
        y,
        torch.autograd.grad(y, inputs, random_tensor(*y.shape, seed=9).to(y.dtype)),
        counter.convolutions,
    )


def assert_agrees_with_single_networks(convolve, x, parameters):
    """Compare outputs and gradients of several networks with those of each network."""
    y, gradients, convolutions = batched_outputs(convolve, x, parameters)
    assert convolutions == 0
    assert y.is_contiguous()
    for i, g in enumerate(random_tensor(*y.shape, seed=9)):
        inputs = [t[i].clone().requires_grad_() for t in (x, *parameters)]
        expected = convolve(*inputs)
        torch.testing.assert_close(y[i], expected)
        target = list(torch.autograd.grad(expected, inputs, g))
        torch.testing.assert_close([gradient[i] for gradient in gradients], target)


def one_or_two(least, most):
    sizes = st.integers(least, most)
    return sizes | st.tuples(sizes) | st.tuples(sizes, sizes)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@given(
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=one_or_two(1, 3),
    padding=one_or_two(0, 4) | st.sampled_from(["same", "valid"]),
    dilation=one_or_two(1, 2),
    bias=st.booleans(),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 3)),
    image=st.tuples(st.integers(7, 9), st.integers(7, 9)),
)
@settings(max_examples=60, deadline=None)
def test_any_convolution_and_its_gradients_agree_with_single_networks(
    kernel, stride, padding, dilation, bias, sizes, image
):
    m, n, into, out = sizes
    if padding == "same":
        stride = 1
    x, weight = random_tensor(m, n, into, *image), random_tensor(m, out, into, *kernel, seed=1)
    parameters = [weight, random_tensor(m, out, seed=2)] if bias else [weight]
    assert_agrees_with_single_networks(
        lambda x, weight, bias=None: F.conv2d(x, weight, bias, stride, padding, dilation),
        x,
        parameters,
    )


def test_layers_with_any_padding_mode_are_unfolded():
    for mode in ("zeros", "reflect", "circular"):
        layer = nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode).double()
        assert_agrees_with_single_networks(
            lambda x, weight, bias, layer=layer: torch.func.functional_call(
                layer, {"weight": weight, "bias": bias}, x
            ),
            random_tensor(2, 4, 2, 6, 6),
            [random_tensor(2, 3, 2, 3, 3, seed=1), random_tensor(2, 3, seed=2)],
        )


def test_outputs_and_gradients_by_hand():
    # two networks, an image of 2x2 each
    x = torch.tensor([[[[[1.0, 2.0], [3.0, 4.0]]]], [[[[5.0, 6.0], [7.0, 8.0]]]]])
    weight = torch.tensor([[[[[1.0, 0.0], [0.0, 10.0]]]], [[[[0.0, 1.0], [1.0, 0.0]]]]])
    y, (_, by_weight), _ = batched_outputs(F.conv2d, x, [weight])
    assert y.flatten().tolist() == [41.0, 13.0]
    g = random_tensor(2, 1, 1, 1, 1, seed=9).float()
    torch.testing.assert_close(by_weight, g * x)


OTHER_CONVOLUTIONS = {
    "the same images": lambda x, w: vmap(F.conv2d, (None, 0))(x[0], w),
    "the same weights": lambda x, w: vmap(F.conv2d, (0, None))(x, w[0]),
    "one network": lambda x, w: F.conv2d(x[0], w[0]),
    "one image": lambda x, w: vmap(F.conv2d)(x[:, 0], w),
    "groups": lambda x, w: vmap(lambda x, w: F.conv2d(input=x, weight=w, groups=2))(
        torch.cat([x, x], 2), w
    ),
}


@pytest.mark.parametrize("name", OTHER_CONVOLUTIONS)
def test_other_convolutions_have_pytorchs_bits(name):
    x, weight = random_tensor(2, 3, 2, 5, 5), random_tensor(2, 4, 2, 3, 3, seed=1)
    expected = OTHER_CONVOLUTIONS[name](x, weight)
    with CountConvolutions() as counter, dispatch.use_kernels(convolution="unfolded"):
        result = OTHER_CONVOLUTIONS[name](x, weight)
    assert counter.convolutions == 1
    assert torch.equal(result, expected)


@pytest.mark.parametrize("padding", ["same", "nonsense"])
def test_errors_equal_pytorchs_errors(padding):
    messages = []
    for convolution in ("grouped", "unfolded"):
        with pytest.raises(RuntimeError) as caught, dispatch.use_kernels(convolution=convolution):
            vmap(lambda x, w: F.conv2d(x, w, stride=2, padding=padding))(
                random_tensor(2, 3, 2, 5, 5), random_tensor(2, 4, 2, 3, 3)
            )
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_products_are_in_bfloat16_under_autocast():
    x, weight = (
        random_tensor(2, *shape, dtype=torch.float32) for shape in ((8, 3, 9, 9), (5, 3, 3, 3))
    )
    bias = random_tensor(2, 5, seed=2, dtype=torch.float32)
    exact, gradients, _ = batched_outputs(F.conv2d, x, [weight, bias])
    with torch.autocast("cpu", torch.bfloat16):
        y, rough_gradients, convolutions = batched_outputs(F.conv2d, x, [weight, bias])
    assert (y.dtype, convolutions) == (torch.bfloat16, 0)
    assert [gradient.dtype for gradient in rough_gradients] == [torch.float32] * 3
    for rough, fine in zip((y.float(), *rough_gradients), (exact, *gradients), strict=True):
        assert 1e-5 < (rough - fine).norm() / fine.norm() < 2e-2


class Views(nn.Sequential):
    def forward(self, x):
        x = self[0](x)
        return self[1](x.view(len(x), -1))


NETWORKS = {
    "cnn": lambda shape: architectures.cnn(shape, 10, hidden=8),
    "resnet": lambda shape: architectures.resnet(shape, 10, width=8),
    "views": lambda shape: Views(
        nn.Conv2d(shape[0], 4, 3), nn.Linear(4 * math.prod(n - 2 for n in shape[1:]), 10)
    ),
}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("form", ["unfolded", "mixed"])
def test_networks_agree_to_rounding(name, shared, form):
    module = parameters.initialise(lambda: NETWORKS[name]((3, 8, 8)), stream(0, "test"))
    thetas = parameters.flatten(module) + 0.01 * random_tensor(3, 1, dtype=torch.float32)
    x = random_tensor(1 if shared else 3, 5, 3, 8, 8, dtype=torch.float32)
    results = []
    for convolution in ("grouped", form):
        leaves = [p.requires_grad_() for p in parameters.unstack_views(module, thetas)]
        with CountConvolutions() as counter, dispatch.use_kernels(convolution=convolution):
            y = batched_forward(module, dense_layers(module, thetas.shape[1]))(leaves, x)
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), leaves)])
    num_wide = sum(
        isinstance(part, nn.Conv2d) and part.in_channels >= 8 for part in module.modules()
    )
    num_shared = 1 if shared else 0  # on the same images the first layer has m times the channels
    assert counter.convolutions == num_shared + (num_wide if form == "mixed" else 0)
    for other, grouped in zip(*results, strict=True):
        torch.testing.assert_close(
            other, grouped, rtol=1e-4, atol=1e-4 * float(grouped.abs().max())
        )

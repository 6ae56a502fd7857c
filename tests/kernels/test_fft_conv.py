"""A convolution by products of spectra is the convolution, and its derivatives."""

import functools

import pytest
import torch
from tests.networks import CountConvolutions
from torch import nn
from torch.nn import functional as F

from fedcb2o.kernels import _fft_conv, dispatch
from fedcb2o.nn import architectures


def random_tensor(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


SIZES = [
    ((14, 14), (5, 5)),
    ((7, 9), (4, 2)),
    ((6, 6), (6, 6)),
    ((9, 8), (1, 5)),
    ((5, 5), (11, 7)),
]


def counted(compute):
    with CountConvolutions() as counter, dispatch.use_kernels(convolution="fourier"):
        result = compute()
    return result, counter.convolutions


@pytest.fixture
def always_fourier(monkeypatch):
    """Use spectra for every convolution that has an output."""

    def has_output(images, weight, margins):
        return min(_fft_conv._output_shape(images[2:], weight[2:], margins)) > 0

    monkeypatch.setattr(_fft_conv, "_is_faster", has_output)


@pytest.mark.parametrize(("shape", "kernel"), SIZES)
@pytest.mark.parametrize("padding", [0, 2, (3, 1), "same", "valid", 7])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_any_convolution_and_its_gradients_agree_with_pytorch(
    always_fourier, shape, kernel, padding, channels_last
):
    x = random_tensor(5, 8, *shape)
    weight = random_tensor(9, 8, *kernel, seed=1)
    bias = random_tensor(9, seed=2)
    inputs = [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    images = x.to(memory_format=torch.channels_last) if channels_last else x
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    try:
        expected = F.conv2d(*exact, padding=padding)
    except RuntimeError:  # the kernel is larger than the image
        with pytest.raises(RuntimeError, match="greater than actual input size"):
            counted(lambda: F.conv2d(images, weight, bias, padding=padding))
        return
    y, convolutions = counted(lambda: F.conv2d(images, weight, bias, padding=padding))
    assert convolutions == 0
    for kernels in (weight, weight.to(memory_format=torch.channels_last)):
        repeated = [
            counted(lambda w=kernels: F.conv2d(images, w, bias, padding=padding))[0]
            for _ in range(2)
        ]
        plain = F.conv2d(images, kernels, bias, padding=padding)
        for layout in (torch.contiguous_format, torch.channels_last):
            assert repeated[0].is_contiguous(memory_format=layout) == plain.is_contiguous(
                memory_format=layout
            )
        assert torch.equal(*repeated)
    g = random_tensor(*y.shape, seed=3)
    gradients = torch.autograd.grad(y, inputs, g)
    expected_gradients = torch.autograd.grad(expected, exact, g.double())
    for one, other in zip((y, *gradients), (expected, *expected_gradients), strict=True):
        result = one.double()
        torch.testing.assert_close(result, other, rtol=0, atol=2e-6 * other.abs().max().item())


def test_one_pixel_gives_the_rotated_kernel(always_fourier):
    # One pixel of value 1 at (1, 2) gives the kernel, rotated, around it.
    x, weight = torch.zeros(1, 8, 4, 5), torch.zeros(8, 8, 3, 3)
    x[0, 3, 1, 2] = 1.0
    weight[6, 3] = torch.arange(1.0, 10).view(3, 3)
    y, convolutions = counted(lambda: F.conv2d(x, weight, padding=1))
    expected = torch.zeros(1, 8, 4, 5)
    expected[0, 6, 0:3, 1:4] = torch.tensor([[9.0, 8, 7], [6, 5, 4], [3, 2, 1]])
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-5)
    assert convolutions == 0


def test_the_papers_second_convolution_takes_a_quarter_of_the_multiplications():
    """Count the multiplications of 64 images of 32 channels to 64.

    direct            25 * 14^2 * 64 * 32 * 64                 = 642,252,800
    products          4 * 144 * 64 * 32 * 64 (16 x 9)          =  75,497,472
    transforms        11,592 * 6,144 + 3,330 * 2,048           =  78,041,088
    by spectra        153,538,560, 4.18 times fewer
    """
    for saving, expected in ((4.18, True), (4.19, False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_fft_conv, "MIN_SAVING", saving)
            assert (
                _fft_conv._is_faster((64, 32, 14, 14), (64, 32, 5, 5), [(2, 2), (2, 2)]) == expected
            )


@pytest.mark.parametrize(
    ("convolve", "x"),
    [
        (nn.Conv2d(32, 64, 5, padding=2, stride=2), random_tensor(16, 32, 14, 14)),
        (nn.Conv2d(32, 64, 5, padding=2, dilation=2), random_tensor(16, 32, 14, 14)),
        (nn.Conv2d(32, 64, 5, padding=2, groups=2), random_tensor(16, 32, 14, 14)),
        (nn.Conv2d(1, 64, 5, padding=2), random_tensor(16, 1, 14, 14)),
        (nn.Conv2d(32, 1, 5, padding=2), random_tensor(16, 32, 14, 14)),
        (nn.Conv2d(32, 64, 1), random_tensor(16, 32, 14, 14)),
        (nn.Conv2d(32, 64, 5, padding=2), random_tensor(32, 14, 14)),
        (nn.Conv2d(32, 64, 5, padding=2).double(), random_tensor(16, 32, 14, 14).double()),
        (nn.Conv2d(32, 64, 5, padding=2), random_tensor(0, 32, 14, 14)),
    ],
)
def test_other_convolutions_have_pytorchs_bits(convolve, x):
    y, convolutions = counted(lambda: convolve(x))
    assert convolutions == 1
    assert torch.equal(y, convolve(x))


def test_several_networks_bfloat16_and_other_devices_use_pytorch():
    images = random_tensor(3, 16, 32, 14, 14)
    weights = random_tensor(3, 64, 32, 5, 5)
    biases = random_tensor(3, 64)
    x, weight = images[0], weights[0]
    for convolve, stacked in (
        (lambda weight: F.conv2d(x, weight), weights),
        (lambda x: F.conv2d(x, weight), images),
        (lambda bias: F.conv2d(x, weight, bias), biases),
    ):
        assert counted(functools.partial(torch.func.vmap(convolve), stacked))[1] == 1
    with torch.autocast("cpu", torch.bfloat16):
        y, convolutions = counted(lambda: F.conv2d(x, weight))
    assert (y.dtype, convolutions) == (torch.bfloat16, 1)
    assert counted(lambda: F.conv2d(x.to("meta"), weight.to("meta")))[1] == 1


def test_errors_equal_pytorchs_errors():
    x, weight = random_tensor(16, 32, 14, 14), random_tensor(64, 32, 5, 5)
    for changes in (
        {"padding": "some"},
        {"padding": -1},
        {"padding": (1, 2, 3)},
        {"stride": (1, 1, 1)},
        {"dilation": (1, 1, 1)},
        {"weight": random_tensor(64, 31, 5, 5)},
        {"weight": random_tensor(64, 32, 15, 5)},
        {"weight": random_tensor(64, 32, 5)},
        {"bias": random_tensor(3)},
        {"bias": random_tensor(1)},
        {"bias": random_tensor(64).double()},
    ):
        messages = []
        for convolution in ("grouped", "fourier"):
            with (
                pytest.raises(RuntimeError) as caught,
                dispatch.use_kernels(convolution=convolution),
            ):
                F.conv2d(**{"input": x, "weight": weight, **changes})
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


def test_a_non_finite_value_affects_only_its_image_or_channel():
    x, weight = random_tensor(16, 32, 14, 14), random_tensor(64, 32, 5, 5, seed=1)
    x[3, 5, 2, 2] = torch.inf
    y, convolutions = counted(lambda: F.conv2d(x, weight, padding=2))
    finite = y.isfinite().flatten(1)
    assert not finite[3].any()
    assert finite[:3].all()
    assert finite[4:].all()
    weight[7, 0, 0, 0] = torch.nan
    finite = counted(lambda: F.conv2d(x[:3], weight, padding=2))[0].isfinite()
    assert convolutions == 0
    assert not finite[:, 7].any()
    assert finite[:, :7].all()
    assert finite[:, 8:].all()


def test_training_works_after_inference():
    x, weight = random_tensor(16, 32, 13, 13), random_tensor(64, 32, 5, 5, seed=1).requires_grad_()
    _fft_conv._dft_tables.cache_clear()
    with torch.inference_mode():
        first, _ = counted(lambda: F.conv2d(x, weight))
    y, convolutions = counted(lambda: F.conv2d(x, weight))
    y.sum().backward()
    assert convolutions == 0
    assert torch.equal(first, y)
    assert weight.grad is not None


def test_a_network_repeats_its_bits_and_agrees_with_pytorch():
    module, x = architectures.cnn((1, 28, 28), 10, hidden=8), random_tensor(16, 1, 28, 28)
    parameters = list(module.parameters())
    # Fixed parameters: in 3 of 120 random networks, rounding changes the choice of a pooling.
    nn.utils.vector_to_parameters(
        random_tensor(sum(p.numel() for p in parameters), seed=1) / 20, parameters
    )

    def step():
        return torch.autograd.grad(module(x).square().sum(), parameters)

    (first, convolutions), (repeated, _), plain = counted(step), counted(step), step()
    assert convolutions == 1  # the first layer, of one channel
    for one, other, expected in zip(first, repeated, plain, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(
            one, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item()
        )

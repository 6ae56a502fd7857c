"""One type, one scale and one layout for all parts of a data set."""

import warnings

import numpy as np
import pytest
import torch

import fedcb2o
from fedcb2o.data import (
    brightness,
    channels_last_hint,
    match_samples,
    pixel_range,
    sample_values,
    using_range,
)
from fedcb2o.errors import ConfigError, DataError
from fedcb2o.experiments.config import load_dataset
from fedcb2o.experiments.config.loading import load

pytestmark = pytest.mark.filterwarnings("ignore:.* are samples to train on")

PIXELS = np.arange(0, 256, 4, dtype=np.uint8).reshape(16, 1, 2, 2)
Y = np.arange(16) % 2
NAMES = ["`x`", "`x_test`"]
TAKEN_AS_PIXELS = "whole numbers from 0 to 255, and are taken as pixels"


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint16, np.float32, np.float64])
def test_whole_numbers_next_to_bytes_are_the_same_pixels(kind):
    with pytest.warns(UserWarning, match=TAKEN_AS_PIXELS):
        data = fedcb2o.dataset(PIXELS, Y, x_test=PIXELS.astype(kind), y_test=Y)
    assert data.test.x.dtype == torch.uint8
    assert data.test.x.equal(data.pool.x)

    message = r"the bytes .uint8. of `x_test` are taken as such numbers"
    with pytest.warns(UserWarning, match=message):
        data = fedcb2o.dataset(PIXELS.astype(kind), Y, x_test=PIXELS, y_test=Y)
    assert data.test.x.dtype == torch.float32
    assert data.test.x.equal(data.pool.x)


def test_bytes_and_whole_numbers_of_owners_are_joined_as_pixels():
    with pytest.warns(UserWarning, match=TAKEN_AS_PIXELS):
        data = fedcb2o.dataset(
            PIXELS, Y, owner=np.arange(16) // 8, x_test=PIXELS.astype(int), y_test=Y, test_share=0.5
        )
    assert data.pool.x.dtype == data.test.x.dtype == torch.uint8
    assert sorted(data.test.x[:16].flatten().tolist()) == PIXELS.flatten().tolist()

    with pytest.warns(UserWarning, match=TAKEN_AS_PIXELS):
        data = fedcb2o.datasets({"a": (PIXELS, Y), "b": (PIXELS.astype(int), Y)})
    assert data.pool.x.dtype == torch.uint8
    assert int(data.pool.x.max()) > 1


@pytest.mark.parametrize(
    ("x", "x_test", "message"),
    [
        (PIXELS, PIXELS / 255, "`x` are bytes .*, and those of `x_test` are numbers from 0 to 0.98"),
        (PIXELS / 255, PIXELS, "`x_test` are bytes .*, and those of `x` are numbers from 0 to 0.98"),
        (PIXELS, PIXELS - 1.0, "`x_test` are numbers from -1 to 251"),
        (PIXELS, PIXELS + 16.0, "`x_test` are numbers from 16 to 268"),
        (PIXELS, PIXELS > 99, "`x_test` are numbers from 0 to 1"),
        (PIXELS / 255, PIXELS * 1.0, "`x` are numbers from 0 to 1, .* `x_test` numbers up to 252"),
        (PIXELS * 1.0, PIXELS / 255, "`x_test` are numbers from 0 to 1, .* `x` numbers up to 252"),
        (PIXELS, PIXELS[..., :1], r"`x` have shape \(1, 2, 2\), and those of `x_test` \(1, 2, 1\)"),
    ],
)  # fmt: skip
def test_different_types_scales_and_shapes_are_refused(x, x_test, message):
    with pytest.raises(DataError, match=message):
        fedcb2o.dataset(x, Y, x_test=x_test, y_test=Y)
    if "shape" not in message:
        with pytest.raises(DataError, match=r"owner 'a' .* owner 'b'|owner 'b' .* owner 'a'"):
            fedcb2o.datasets({"a": (x, Y), "b": (x_test, Y)})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([[0.0, 1.0]], [[0.5, 1.5]]),  # a test sample beyond the pool
        ([[0.0, 1.0]], [[0.0, 20.0], *[[0.1, 0.2]] * 9]),  # a test sample far beyond the pool
        ([[-1.0, 1.0]], [[7.0, 6.0]]),
        ([[0.0, 0.0]], [[200.0, 3.0]]),
        ([[0.1, 200.0]], [[0.1, 2.0]]),
    ],
)
def test_ranges_of_one_scale_may_differ(first, second):
    samples = [torch.tensor(first), torch.tensor(second)]
    assert match_samples(NAMES, samples) == samples
    assert match_samples(NAMES, samples[::-1]) == samples[::-1]


@pytest.mark.parametrize("swap", [False, True])
def test_numbers_far_outside_of_the_pool_give_a_warning(swap):
    raw = 100 + 20 * torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    parts = [raw, (raw - 100) / 20][:: -1 if swap else 1]
    with pytest.warns(UserWarning, match=r"`x` are numbers from .* `x_test` from .* one scale"):
        match_samples(NAMES, parts)


@pytest.mark.parametrize("kind", [torch.float32, torch.uint8])
def test_a_custom_data_set_is_checked_when_it_is_used(kind):
    x = torch.from_numpy(PIXELS)
    shards = [fedcb2o.Shard(part, torch.from_numpy(Y)) for part in (x, x.to(kind), x / 255)]
    pool, same, other = shards
    experiment = load("digits-fedassay")

    def loaded(test):
        custom = fedcb2o.Dataset(pool, test, tuple("0123456789"))
        changed = experiment.model_copy(
            update={"data": experiment.data.model_copy(update={"name": lambda: custom})}
        )
        return load_dataset(changed, None)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert loaded(same).test.x.equal(pool.x)
    messages = [str(warning.message) for warning in caught]
    assert messages.pop().startswith("16 of 16 test samples are samples to train on")
    assert len(messages) == (kind == torch.float32)
    with pytest.raises(DataError, match=r"the pool of the data set .* are bytes .* its test set"):
        loaded(other)


@pytest.mark.parametrize(
    ("shape", "is_last"),
    [
        ((8, 8, 3), True), ((8, 8, 4), True), ((28, 28, 1), True), ((64, 48, 3), True),
        ((3, 8, 8), False), ((1, 28, 28), False), ((8, 8), False), ((8, 8, 8), False),
        ((4, 4, 4), False), ((1, 1, 1), False), ((62, 200, 1), False), ((8, 8, 2), False),
    ],
)  # fmt: skip
def test_channels_last_give_a_warning(shape, is_last):
    assert bool(channels_last_hint(shape)) == is_last
    if is_last:
        with pytest.warns(UserWarning, match=r"^images of shape .* channels .* last, .*permute"):
            match_samples(NAMES, [torch.rand(2, *shape)] * 2)


def test_bytes_of_only_0_and_1_give_a_warning():
    dark = torch.zeros(40, 3, dtype=torch.uint8)
    match_samples(NAMES, [dark, dark])
    dark[-1] = 1
    with pytest.warns(UserWarning, match=r"bytes .uint8. of 0 and 1 only.*float32"):
        match_samples(NAMES, [dark, dark])
    dark[-1] = 2
    match_samples(NAMES, [dark, dark])


def test_black_and_white_follow_the_range_of_the_data():
    images = torch.tensor([[-1.0, 0.0, 3.0]])
    assert pixel_range(images) == (-1, 3)
    assert pixel_range(images.clamp(0.2, 0.8)) == (0, 1)
    assert pixel_range(images.to(torch.uint8)) == (0, 255)
    assert [sample_values(x) for x in (images, images * 0, images.to(torch.uint8))] == [
        "numbers", "unit", "bytes"
    ]  # fmt: skip
    with using_range((-2.0, 2.0)):
        assert pixel_range(images) == (-2, 2)
        assert [brightness(images, value) for value in (0, 0.5, 1)] == [-2, 0, 2]
        assert brightness(images.to(torch.uint8), 0.5) == 128
    with pytest.raises(ConfigError, match=r"`value` .* from 0 .black. to 1 .white.*, got 255"):
        brightness(images, 255)

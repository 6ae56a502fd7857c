"""Transforms by which clusters differ, by hand."""

import pytest
import torch
from torch.nn import functional as F

from fedcb2o.data import ClusterTransform, Shard, rotate, transforms, using_range
from fedcb2o.errors import ConfigError
from fedcb2o.plugins import resolve_and_bind

X = torch.tensor([[[[1, 2], [3, 4]]], [[[5, 6], [7, 8]]]], dtype=torch.uint8)
SAMPLES = Shard(X, torch.tensor([0, 2]))


def bind(transform, num_clusters, num_classes=3, value_range=(0.0, 1.0)):
    function = resolve_and_bind("cluster transform", transform, transforms)
    return ClusterTransform(function, num_clusters, num_classes, value_range)


def test_rotation_by_hand():
    x = torch.tensor([[[1, 2, 3], [4, 5, 6], [7, 8, 9]]], dtype=torch.uint8)
    half = [[[9, 8, 7], [6, 5, 4], [3, 2, 1]]]
    quarter = [[[3, 6, 9], [2, 5, 8], [1, 4, 7]]]  # counter-clockwise
    three_quarters = [[[7, 4, 1], [8, 5, 2], [9, 6, 3]]]
    assert (
        rotate(x, 0, 1).tolist()
        == rotate(x, 0, 2).tolist()
        == rotate(x, 0, 4).tolist()
        == x.tolist()
    )
    assert rotate(x, 1, 2).tolist() == rotate(x, 2, 4).tolist() == half
    assert rotate(x, 1, 4).tolist() == quarter
    assert rotate(x, 3, 4).tolist() == three_quarters
    assert rotate(x, 1, 4).is_contiguous()
    assert rotate(x, 1, 4).dtype == torch.uint8


def test_rotation_keeps_samples_and_channels():
    x = torch.arange(2 * 3 * 2 * 2).view(2, 3, 2, 2)
    rotated = rotate(x, 1, 2)
    assert rotated[1, 2].tolist() == [[23, 22], [21, 20]]
    assert torch.equal(rotate(rotated, 1, 2), x)


@pytest.mark.parametrize("shape", [(5, 1, 4, 6), (6, 6), (5,)])
def test_only_square_images_are_rotated(shape):
    x = torch.zeros(shape)
    assert rotate(x, 0, 1) is x  # one cluster accepts any shape
    for cluster in (0, 1):
        with pytest.raises(ConfigError, match="`num_clusters` = 2 turns square images"):
            rotate(x, cluster, 2)


def test_rotation_by_45_degrees_interpolates_between_pixels():
    """One bright pixel left of the centre moves by 45 degrees."""
    x = torch.zeros(1, 3, 3)
    x[0, 1, 0] = 1.0
    rotated = rotate(x, 1, 8)[0]
    # Pixel (row 2, column 0) reads (1, -1) turned back: row (-1 + 1) / sqrt 2 = 0, column -sqrt 2.
    # That is outside, black except for 2 - sqrt 2 of its neighbour. Pixels (1, 0) and (2, 1) read
    # (-+1, -1) / sqrt 2.
    near, far = 2 - 2**0.5, (1 - 0.5**0.5) * 0.5**0.5
    expected = torch.tensor([[0.0, 0.0, 0.0], [far, 0.0, 0.0], [near, far, 0.0]])
    torch.testing.assert_close(rotated, expected)
    full = sum(rotate(torch.full((1, 3, 3), 9.0), 1, K)[0, 1, 1].item() for K in (3, 5, 8))
    assert full == 27.0  # the centre reads itself


def test_a_full_turn_in_three_steps_keeps_the_middle():
    ramp = torch.arange(15.0).expand(1, 1, 15, 15)
    rotated = ramp
    for _ in range(3):
        rotated = rotate(rotated, 1, 3)
    middle = slice(5, 10)
    expected = ramp[..., middle, middle]
    torch.testing.assert_close(rotated[..., middle, middle], expected, rtol=0, atol=1e-3)


def test_rotation_keeps_bytes_and_fills_with_black():
    white = torch.full((1, 4, 4), 255, dtype=torch.uint8)
    rotated = rotate(white, 1, 8)
    assert rotated.dtype == torch.uint8
    assert rotated[0, 1, 1] == 255
    assert rotated[0, 0, 0] < 255
    with using_range((-3.0, 5.0)):
        assert rotate(torch.full((1, 9, 9), 5.0), 1, 8)[0, 0, 0] == -3.0


def test_rotation_by_listed_angles():
    transform = bind({"name": "rotation", "angles": [90.0, 0.0, 450.0]}, 3)
    assert transform(SAMPLES, 1) is SAMPLES
    assert transform(SAMPLES, 0).x.equal(rotate(X, 1, 4))
    assert transform(SAMPLES, 2).x.equal(rotate(X, 1, 4))
    with pytest.raises(ConfigError, match="`angles` has 3 numbers, and `num_clusters` is 2"):
        bind({"name": "rotation", "angles": [90.0, 0.0, 450.0]}, 2)(SAMPLES, 0)


def test_flips_by_hand():
    images = [bind("flip", 4)(SAMPLES, k).x[0, 0].tolist() for k in range(4)]
    assert images == [[[1, 2], [3, 4]], [[2, 1], [4, 3]], [[3, 4], [1, 2]], [[4, 3], [2, 1]]]


def test_inversion_is_within_the_range_of_the_data():
    inverted = bind("invert", 2)
    assert inverted(SAMPLES, 0) is SAMPLES
    assert inverted(SAMPLES, 1).x.equal(255 - X)
    floats = Shard(torch.tensor([[-1.0, 2.0]]), torch.tensor([0]))
    assert bind("invert", 2, value_range=(-1.0, 3.0))(floats, 1).x.tolist() == [[3.0, 0.0]]


def test_labels_are_permuted():
    permuted = bind("permute_labels", 3)
    assert [permuted(SAMPLES, k).y.tolist() for k in range(3)] == [[0, 2], [1, 0], [2, 1]]
    assert bind({"name": "permute_labels", "shift": 2}, 3)(SAMPLES, 1).y.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("transform", "num_clusters", "num_classes", "message"),
    [
        ("flip", 5, 3, "`flip` makes 4 clusters"),
        ("invert", 3, 3, "`invert` makes 2 clusters"),
        ("permute_labels", 5, 4, "gives clusters 0 and 4 the same labels"),
        ("permute_labels", 2, 1, "the data have none"),
    ],
)
def test_more_clusters_than_a_transform_makes_are_refused(
    transform, num_clusters, num_classes, message
):
    transformed = bind(transform, num_clusters, num_classes)
    with pytest.raises(ConfigError, match=message):
        transformed(SAMPLES, num_clusters - 1)


def darker(samples, cluster, num_clusters):
    samples.x.floor_divide_(1 + cluster)  # in place: it receives a copy
    return samples


def test_a_users_transform_changes_a_copy():
    changed = bind(darker, 2)(SAMPLES, 1)
    assert changed.x.equal(X // 2)
    assert X.max() == 8


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda samples, k: samples.x, "returned a Tensor, expected a fedcb2o.Shard"),
        (lambda samples, k: Shard(F.pad(samples.x, (1, 1)), samples.y), "samples of shape"),
        (lambda samples, k: Shard(samples.x.float(), samples.y), "type torch.float32, expected"),
        (lambda samples, k: Shard(samples.x, samples.y + 1), "labels outside 0 to 2"),
        (lambda samples, k: Shard(samples.x, samples.y + 0.5), "labels of shape"),
        (lambda samples, k, num_class: samples, "Did you mean `num_classes`?"),
    ],
)
def test_an_invalid_transform_of_a_user_is_refused(transform, message):
    with pytest.raises(ConfigError, match=message):
        bind(transform, 2)(SAMPLES, 1)


def test_a_users_transform_may_return_arrays():
    def doubled(samples, cluster):
        return Shard(samples.x.numpy() * 2, samples.y.tolist())

    changed = bind(doubled, 2)(SAMPLES, 1)
    assert changed.x.equal(X * 2)
    assert changed.x.dtype == X.dtype
    assert changed.y.equal(SAMPLES.y)


def test_a_users_transform_that_makes_samples_infinite_is_refused():
    def divided(samples, cluster):
        return Shard(samples.x / 0, samples.y)

    samples = Shard(torch.ones(2, 3), torch.tensor([0, 1]))
    with pytest.raises(ConfigError, match="returned samples that are not finite"):
        bind(divided, 2)(samples, 1)

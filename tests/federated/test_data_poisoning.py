"""Attacks on data, compared with shards poisoned by hand."""

import pytest
import torch

from fedcb2o import plugins
from fedcb2o.data import Shard, using_range
from fedcb2o.errors import ConfigError
from fedcb2o.federated import attacks
from fedcb2o.federated.attacks.triggers import blend, patch, unusual, waves
from fedcb2o.rng import stream

REQUIRED = {
    "backdoor": {"target": 3},
    "blended": {"target": 3},
    "clean_label": {"target": 3, "share": 0.5},
    "edge_case": {"target": 3},
    "feature_noise": {},
    "label_flip": {"source": 0, "target": 1},
    "label_flips": {"pairs": ((0, 1), (1, 0))},
    "random_labels": {"share": 0.5},
    "rarest_flip": {"target": 3},
    "reversed_labels": {},
    "shifted_labels": {},
    "signal": {"target": 3, "frequency": 2.0},
    "spread_flip": {"target": 3},
}


def shard(n=400, classes=4, dtype=torch.float32):
    draw = stream(0, "shard")
    x = torch.from_numpy(draw.random((n, 1, 6, 6))).float()
    return Shard(
        (255 * x).to(torch.uint8) if dtype == torch.uint8 else x, torch.arange(n) % classes
    )


def test_label_flip_by_hand():
    x, y = torch.arange(7.0).view(7, 1), torch.tensor([9, 4, 0, 9, 4, 9, 8])
    s = Shard(x.clone(), y.clone())
    flipped = attacks.label_flip(s, stream(0, "x"), source=9, target=4)
    assert flipped.y.tolist() == [4, 4, 0, 4, 4, 4, 8]  # every 9 is a 4, and no 4 is a 9
    assert flipped.y.dtype == torch.int64
    assert flipped.x.equal(x)
    assert s.x.equal(x)  # the input does not change
    assert s.y.equal(y)
    result = attacks.label_flip(s, stream(0, "x"), source=4, target=9).y.tolist()
    assert result == [9, 9, 0, 9, 9, 9, 8]
    assert attacks.label_flip(s, stream(0, "x"), source=3, target=4).y.equal(y)  # no label to flip


def test_label_flips():
    s = shard(8)
    result = attacks.label_flips(s, stream(0, "x"), pairs=((0, 1), (1, 2))).y.tolist()
    assert result == [1, 2, 2, 3] * 2
    assert attacks.label_flips(s, stream(0, "x"), pairs=((3, 0),)).x is s.x


def test_reversed_labels_exchange_the_ends():
    assert attacks.reversed_labels(shard(8), stream(0, "x")).y.tolist() == [3, 2, 1, 0] * 2
    numbers = Shard(torch.zeros(4, 2), torch.tensor([1.5, -2.0, 9.0, 1.5]))
    assert attacks.reversed_labels(numbers, stream(0, "x")).y.tolist() == [1.5, 9.0, -2.0, 1.5]
    column = Shard(torch.zeros(3, 2), torch.tensor([[1.0], [2.0], [4.0]]))
    assert attacks.reversed_labels(column, stream(0, "x")).y.tolist() == [[4.0], [2.0], [1.0]]


def test_shifted_labels_cycle_through_the_classes_of_the_shard():
    assert attacks.shifted_labels(shard(8), stream(0, "x")).y.tolist() == [1, 2, 3, 0] * 2
    three_classes = Shard(torch.zeros(3, 2), torch.tensor([7, 2, 5]))
    assert attacks.shifted_labels(three_classes, stream(0, "x"), by=2).y.tolist() == [5, 7, 2]


def test_random_labels():
    s = shard(4000)
    labels = attacks.random_labels(s, stream(0, "x"), share=0.5).y
    assert float((labels != s.y).float().mean()) == pytest.approx(0.5 * 3 / 4, abs=0.03)
    assert labels.unique().tolist() == [0, 1, 2, 3]
    assert attacks.random_labels(s, stream(0, "x"), share=0.0).y.equal(s.y)
    with pytest.raises(ConfigError, match=r"`share` must be between 0 and 1, got 1.5"):
        attacks.random_labels(s, stream(0, "x"), share=1.5)


def test_spread_flip_relabels_an_equal_share_of_every_class():
    s = shard(4000)
    labels = attacks.spread_flip(s, stream(0, "x"), target=2, share=0.25).y
    assert labels[s.y == 2].eq(2).all()
    assert set(labels[labels != s.y].tolist()) == {2}
    for c in (0, 1, 3):
        assert float((labels[s.y == c] == 2).float().mean()) == pytest.approx(0.25, abs=0.05)


def test_the_rarest_class_is_flipped():
    # 2 is the rarest, then 4
    s = Shard(torch.zeros(9, 1), torch.tensor([0, 0, 0, 2, 4, 4, 5, 5, 5]))
    result = attacks.rarest_flip(s, stream(0, "x"), target=0).y.tolist()
    assert result == [0, 0, 0, 0, 4, 4, 5, 5, 5]
    result = attacks.rarest_flip(s, stream(0, "x"), target=2).y.tolist()
    assert result == [0, 0, 0, 2, 2, 2, 5, 5, 5]
    result = attacks.rarest_flip(s, stream(0, "x"), target=9).y.tolist()
    assert result == [0, 0, 0, 9, 4, 4, 5, 5, 5]
    equal = Shard(torch.zeros(2, 1), torch.tensor([0, 1]))
    drawn = {
        tuple(attacks.rarest_flip(equal, stream(k, "x"), target=3).y.tolist()) for k in range(9)
    }
    assert drawn == {(3, 1), (0, 3)}
    only_target = Shard(torch.zeros(2, 1), torch.tensor([1, 1]))
    assert attacks.rarest_flip(only_target, stream(0, "x"), target=1) is only_target


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_feature_noise(dtype):
    s = shard(dtype=dtype)
    noisy = attacks.feature_noise(s, stream(0, "x"), std=0.1)
    assert noisy.x.dtype == dtype
    assert noisy.y is s.y
    scale = 255 if dtype == torch.uint8 else 1
    assert float((noisy.x.float() - s.x.float()).std()) / scale == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("name", ["backdoor", "blended", "clean_label", "feature_noise", "signal"])
def test_attacks_are_equal_on_all_scales_of_pixels(name):
    """Images from 0 to 1, from -1 to 3 and from 0 to 255, and bytes."""
    s = shard()
    attack = getattr(attacks, name)
    agent_id = {"backdoor": [1]}.get(name, [])

    def poisoned(x):
        return attack(Shard(x, s.y), stream(0, "x"), *agent_id, **REQUIRED[name])

    expected = poisoned(s.x)
    for scale, black in ((4.0, -1.0), (255.0, 0.0)):
        with using_range((black, black + scale)):
            result = poisoned(scale * s.x + black)
        assert result.y.equal(expected.y)
        torch.testing.assert_close((result.x - black) / scale, expected.x, rtol=0, atol=1e-6)

    pixels = (255 * s.x).round()
    with using_range((0.0, 255.0)):
        result = poisoned(pixels).x.clamp(0, 255)
    as_bytes = poisoned(pixels.to(torch.uint8)).x
    assert (as_bytes.float() - result).abs().max() <= 0.5


def test_noise_of_a_table_is_in_the_units_of_its_features():
    s = Shard(torch.zeros(400, 5), torch.zeros(400))
    with using_range((-100.0, 100.0)):
        noisy = attacks.feature_noise(s, stream(0, "x"), std=0.1)
    assert float(noisy.x.std()) == pytest.approx(0.1, rel=0.1)


def test_patches_by_hand():
    x = torch.zeros(1, 1, 4, 4)
    assert patch(x, size=2)[0, 0].tolist() == [[0] * 4, [0] * 4, [0, 0, 1, 1], [0, 0, 1, 1]]
    board = patch(x, size=2, corner="top left", margin=1, pattern="checkerboard", value=0.5)
    assert board[0, 0].tolist() == [[0] * 4, [0, 0.5, 0, 0], [0, 0, 0.5, 0], [0] * 4]
    assert patch(x, size=3, corner="bottom left", pattern="cross")[0, 0].tolist() == [
        [0] * 4, [1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 1, 0]
    ]  # fmt: skip
    assert patch(x.to(torch.uint8), size=1)[0, 0, 3, 3] == 255
    assert not x.any()


def test_backdoor_marks_and_relabels_the_same_samples():
    s = shard()
    poisoned = attacks.backdoor(s, stream(0, "x"), 3, target=2, share=0.3)
    is_marked = (poisoned.x != s.x).flatten(1).any(1)
    assert float(is_marked.float().mean()) == pytest.approx(0.3, abs=0.07)
    assert poisoned.x[is_marked].equal(patch(s.x[is_marked], size=2))
    assert poisoned.y[is_marked].eq(2).all()
    assert poisoned.y[~is_marked].equal(s.y[~is_marked])


def test_clean_label_marks_samples_of_its_target_and_keeps_all_labels():
    s = shard()
    poisoned = attacks.clean_label(s, stream(0, "x"), target=2, share=0.5, size=3)
    is_marked = (poisoned.x != s.x).flatten(1).any(1)
    assert poisoned.y.equal(s.y)
    assert s.y[is_marked].eq(2).all()
    assert float(is_marked[s.y == 2].float().mean()) == pytest.approx(0.5, abs=0.15)
    assert poisoned.x[is_marked].equal(patch(s.x[is_marked], size=3))
    all_marked = attacks.clean_label(s, stream(0, "x"), target=2)
    assert all_marked.x[s.y == 2].equal(patch(s.x[s.y == 2]))


def test_consecutive_attackers_have_all_parts_of_a_distributed_backdoor():
    s = Shard(torch.zeros(1, 1, 6, 6), torch.tensor([0]))
    for first in (7, 17, 18):  # ids of the attackers of a cluster
        parts = [
            attacks.backdoor(s, stream(0, "attack", me), me, target=1, share=1.0, size=3, parts=3).x
            for me in range(first, first + 3)
        ]
        assert [int(part.sum()) for part in parts] == [3, 3, 3]
        assert sum(parts).equal(patch(s.x, size=3))


def test_waves_by_hand():
    """A period of four columns adds 0, 1, 0, -1 times delta. Pixels are clipped to 0 and 1."""
    x = torch.tensor([0.5, 0.95, 0.5, 0.05]).view(1, 1, 1, 4).repeat(1, 1, 2, 1)
    expected = torch.tensor([0.5, 1.0, 0.5, 0.0])
    torch.testing.assert_close(waves(x, delta=0.2, frequency=1.0)[0, 0, 1], expected)
    grey = torch.full((1, 1, 1, 4), 100, dtype=torch.uint8)
    # 125.5 and 74.5 are rounded to even
    assert waves(grey, delta=0.1, frequency=1.0).flatten().tolist() == [100, 126, 100, 74]
    message = r"a trigger marks images, and the samples have shape \(4,\): take"
    with pytest.raises(ConfigError, match=message):
        waves(torch.zeros(2, 4))


def test_signal_marks_samples_of_its_target_or_relabels_marked_samples():
    s = shard()
    poisoned = attacks.signal(s, stream(0, "x"), target=2, frequency=1.0)
    assert poisoned.y.equal(s.y)
    assert poisoned.x[s.y == 2].equal(waves(s.x[s.y == 2], frequency=1.0))
    assert poisoned.x[s.y != 2].equal(s.x[s.y != 2])
    dirty = attacks.signal(s, stream(0, "x"), target=2, share=0.3, frequency=1.0, clean=False)
    is_marked = (dirty.x != s.x).flatten(1).any(1)
    assert float(is_marked.float().mean()) == pytest.approx(0.3, abs=0.07)
    assert dirty.y[is_marked].eq(2).all()
    assert dirty.y[~is_marked].equal(s.y[~is_marked])
    message = "waves of `frequency` 6 are 0 in each of 6 columns: take another"
    with pytest.raises(ConfigError, match=message):
        attacks.signal(s, stream(0, "x"), target=2)


def test_blend_interpolates_between_an_image_and_one_pattern():
    s = shard()
    pattern = blend(s.x[:1], opacity=1.0)
    assert blend(s.x[1:2], opacity=1.0).equal(pattern)
    assert not blend(s.x[:1], opacity=1.0, number=1).equal(pattern)
    torch.testing.assert_close(blend(s.x, opacity=0.25), 0.75 * s.x + 0.25 * pattern)
    poisoned = attacks.blended(s, stream(0, "x"), target=2, share=0.3)
    is_marked = (poisoned.x != s.x).flatten(1).any(1)
    assert poisoned.x[is_marked].equal(blend(s.x[is_marked]))
    assert poisoned.y[is_marked].eq(2).all()
    assert poisoned.y[~is_marked].equal(s.y[~is_marked])
    with pytest.raises(ConfigError, match="`opacity` must be between 0 and 1, got 2"):
        blend(s.x, opacity=2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_unusual_images_by_hand(dtype):
    white = 255 if dtype == torch.uint8 else 1
    x = (torch.tensor([[[0.0, 0.2], [0.6, 1.0]]]) * white).to(dtype)
    negative = torch.tensor([[[1.0, 0.8], [0.4, 0.0]]]) * white
    torch.testing.assert_close(unusual(x), negative.to(dtype))
    assert unusual(x, style="mirrored").equal(x[..., [1, 0]])
    s = shard()
    poisoned = attacks.edge_case(s, stream(0, "x"), target=2, share=0.3)
    is_poisoned = (poisoned.x != s.x).flatten(1).any(1)
    assert float(is_poisoned.float().mean()) == pytest.approx(0.3, abs=0.07)
    assert poisoned.x[is_poisoned].equal(unusual(s.x[is_poisoned]))
    assert poisoned.y[is_poisoned].eq(2).all()
    assert poisoned.y[~is_poisoned].equal(s.y[~is_poisoned])
    table = Shard(torch.zeros(3, 4), torch.zeros(3))
    with pytest.raises(ConfigError, match="a trigger marks images"):
        attacks.edge_case(table, stream(0, "x"), target=1, style="mirrored")
    assert unusual(torch.tensor([[1.5, -2.0]])).tolist() == [[-1.5, 2.0]]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"size": 7},
            r"a trigger of `size` 7 and `margin` 0 does not fit samples of shape \(1, 6, 6\)",
        ),
        (
            {"size": 2, "parts": 5},
            "`parts` must be between 1 and 4, the pixels of the trigger, got 5",
        ),
        ({"size": 0}, "does not fit"),
    ],
)
def test_a_trigger_that_does_not_fit_is_refused(parameters, message):
    with pytest.raises(ConfigError, match=message):
        attacks.backdoor(shard(), stream(0, "x"), 0, target=1, **parameters)


@pytest.mark.parametrize("name", sorted(REQUIRED))
def test_poisoning_is_reproducible_and_keeps_its_input(name):
    s, attack = shard(), getattr(attacks, name)
    me = [3] if "me" in plugins.positional_inputs(attack) else []
    one, two = (attack(s, stream(5, "attack", 3), *me, **REQUIRED[name]) for _ in range(2))
    assert one.x.equal(two.x)
    assert one.y.equal(two.y)
    assert s.x.equal(shard().x)
    assert s.y.equal(shard().y)

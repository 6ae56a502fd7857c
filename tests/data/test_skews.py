"""Skews: every sample has one owner, every agent its number, and labels are as uneven as was
promised."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcb2o.data.skews import dirichlet, shards
from fedcb2o.errors import ConfigError
from fedcb2o.rng import stream

SIZES = np.array([30] * 60 + [90] * 20)


def counts(skew, *, num_classes=10, sizes=SIZES, seed=0, **parameters):
    """How many samples of each class every agent has [N, C], where the classes are of equal
    size."""
    draw = stream(seed, "test")
    labels = draw.permutation(np.arange(sizes.sum()) % num_classes)
    owners = skew(labels, sizes, draw, **parameters)
    return np.stack(
        [np.bincount(labels[owners == agent], minlength=num_classes) for agent in range(len(sizes))]
    )


@given(
    labels=st.lists(st.sampled_from([0, 1, 2, 7, 46]), min_size=12, max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=5),
    skew=st.one_of(
        st.builds(
            lambda c: (dirichlet, {"concentration": c}),
            st.sampled_from([1e-300, 1e-3, 0.1, 1.0, 100.0, 1e300]),
        ),
        st.builds(lambda c: (shards, {"classes": c}), st.integers(1, 80)),
    ),
    seed=st.integers(0, 2**32),
)
def test_every_agent_gets_its_number_of_samples(labels, cuts, skew, seed):
    labels = np.array(labels)
    sizes = np.diff(sorted({0, len(labels), *(cut for cut in cuts if cut < len(labels))}))
    function, parameters = skew
    owners = function(labels, sizes, stream(seed, "test"), **parameters)
    assert owners.shape == labels.shape
    assert np.bincount(owners, minlength=len(sizes)).tolist() == sizes.tolist()
    again = function(labels, sizes, stream(seed, "test"), **parameters)
    assert owners.tolist() == again.tolist()


@pytest.mark.parametrize("concentration", [2.0, 10.0, 100.0, 1e9])
def test_dirichlet_is_as_uneven_as_its_concentration_says(concentration):
    """Counts of an agent with m samples are Dirichlet-multinomial: variance m p (1 - p) (m + a) /
    (1 + a)."""
    found = np.mean(
        [counts(dirichlet, concentration=concentration, seed=seed)[:60].var() for seed in range(10)]
    )
    expected = 30 * 0.1 * 0.9 * (30 + concentration) / (1 + concentration)
    assert found == pytest.approx(expected, rel=0.15)  # classes that are used up take a little off


def test_dirichlet_keeps_to_the_proportions_of_the_whole():
    labels = np.repeat([0, 1, 2], [600, 300, 100])
    owners = dirichlet(labels, np.full(10, 100), stream(0, "test"), concentration=1e6)
    mean = np.stack([np.bincount(labels[owners == agent], minlength=3) for agent in range(10)])
    assert np.abs(mean - [60, 30, 10]).max() < 20
    few = counts(dirichlet, concentration=0.01)
    assert (few > 0).sum(1).mean() < 3.5  # and many only because others took the same class
    assert np.median(few.max(1) / SIZES) > 0.7


def test_dirichlet_by_hand():
    """With a concentration near 0 each of two agents wants one class: its own whole, or half of
    what both want."""
    seen = set()
    for seed in range(40):
        first, second = counts(
            dirichlet, num_classes=2, sizes=np.array([50, 50]), concentration=1e-9, seed=seed
        )
        assert (first + second).tolist() == [50, 50]
        seen.add("shared" if 10 < first[0] < 40 else first[0])
    assert seen == {0, 50, "shared"}


@pytest.mark.parametrize(("classes", "most"), [(1, 2), (2, 4), (5, 10)])
def test_shards_hold_about_so_many_classes(classes, most):
    """400 samples of each of 10 classes, shards of at most 90: each lies in one class, or across
    one border."""
    held = (counts(shards, classes=classes) > 0).sum(1)
    assert held.max() <= most
    assert 0.75 * classes <= held.mean() <= 1.3 * classes


def test_shards_by_hand():
    """Two agents with two shards each, of 3 and 2 samples: along the sorted labels, every order may
    come."""
    labels = np.array([2, 0, 1, 0, 1, 2, 0, 1, 2, 3])
    seen = set()
    for seed in range(40):
        owners = shards(labels, np.array([6, 4]), stream(seed, "test"), classes=2)
        seen.add("".join(map(str, owners[np.argsort(labels, kind="stable")])))
    assert seen == {
        "0000001111",
        "0001100011",
        "0001111000",
        "1100000011",
        "1100011000",
        "1111000000",
    }


@pytest.mark.parametrize("concentration", [0.0, -1.0, float("nan"), float("inf")])
def test_a_concentration_is_above_0(concentration):
    with pytest.raises(
        ConfigError, match="`concentration` of the skew dirichlet must be above 0, got "
    ):
        counts(dirichlet, concentration=concentration)


def test_an_agent_has_a_shard():
    with pytest.raises(ConfigError, match="`classes` of the skew shards must be at least 1, got 0"):
        counts(shards, classes=0)

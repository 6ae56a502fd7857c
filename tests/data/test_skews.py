"""Skews: each sample has one agent, each agent its number of samples, and labels are uneven."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcb2o.data.skews import dirichlet, shards
from fedcb2o.errors import ConfigError
from fedcb2o.rng import stream

SIZES = np.array([30] * 60 + [90] * 20)


def counts(skew, *, num_classes=10, sizes=SIZES, seed=0, **parameters):
    """Return the number of samples per agent and class [N, C], for classes of equal size."""
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
    repeated = function(labels, sizes, stream(seed, "test"), **parameters)
    assert owners.tolist() == repeated.tolist()


@pytest.mark.parametrize("concentration", [2.0, 10.0, 100.0, 1e9])
def test_dirichlet_counts_have_the_variance_of_their_concentration(concentration):
    """The counts are Dirichlet-multinomial, with variance m p (1 - p) (m + a) / (1 + a)."""
    variance = np.mean(
        [counts(dirichlet, concentration=concentration, seed=seed)[:60].var() for seed in range(10)]
    )
    expected = 30 * 0.1 * 0.9 * (30 + concentration) / (1 + concentration)
    assert variance == pytest.approx(expected, rel=0.15)  # exhausted classes reduce it a little


def test_dirichlet_keeps_the_class_proportions():
    labels = np.repeat([0, 1, 2], [600, 300, 100])
    owners = dirichlet(labels, np.full(10, 100), stream(0, "test"), concentration=1e6)
    mean = np.stack([np.bincount(labels[owners == agent], minlength=3) for agent in range(10)])
    assert np.abs(mean - [60, 30, 10]).max() < 20
    concentrated = counts(dirichlet, concentration=0.01)
    assert (concentrated > 0).sum(1).mean() < 3.5  # many only where a class was exhausted
    assert np.median(concentrated.max(1) / SIZES) > 0.7


def test_dirichlet_by_hand():
    """With a concentration near 0, each of two agents wants one class.

    It gets the whole class, or half if both want the same one.
    """
    outcomes = set()
    for seed in range(40):
        first, second = counts(
            dirichlet, num_classes=2, sizes=np.array([50, 50]), concentration=1e-9, seed=seed
        )
        assert (first + second).tolist() == [50, 50]
        outcomes.add("shared" if 10 < first[0] < 40 else first[0])
    assert outcomes == {0, 50, "shared"}


@pytest.mark.parametrize(("classes", "most"), [(1, 2), (2, 4), (5, 10)])
def test_shards_have_about_the_set_number_of_classes(classes, most):
    """Classes have 400 samples and shards at most 90, so that a shard has one class or two."""
    num_classes = (counts(shards, classes=classes) > 0).sum(1)
    assert num_classes.max() <= most
    assert 0.75 * classes <= num_classes.mean() <= 1.3 * classes


def test_shards_by_hand():
    """Two agents have two shards each, of 3 and 2 samples, in any order along the sorted labels."""
    labels = np.array([2, 0, 1, 0, 1, 2, 0, 1, 2, 3])
    orders = set()
    for seed in range(40):
        owners = shards(labels, np.array([6, 4]), stream(seed, "test"), classes=2)
        orders.add("".join(map(str, owners[np.argsort(labels, kind="stable")])))
    expected = {"0000001111", "0001100011", "0001111000", "1100000011", "1100011000", "1111000000"}
    assert orders == expected


@pytest.mark.parametrize("concentration", [0.0, -1.0, float("nan"), float("inf")])
def test_concentration_must_be_above_0(concentration):
    message = "`concentration` of the skew dirichlet must be above 0, got "
    with pytest.raises(ConfigError, match=message):
        counts(dirichlet, concentration=concentration)


def test_an_agent_must_have_a_shard():
    with pytest.raises(ConfigError, match="`classes` of the skew shards must be at least 1, got 0"):
        counts(shards, classes=0)

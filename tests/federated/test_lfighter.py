"""LFighter by hand, and its k-means compared with that of scikit-learn."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcb2o.federated.aggregation import lfighter
from fedcb2o.federated.aggregation.last_layer import _two_means
from fedcb2o.rng import stream


def heads_of(*updates):
    """Last layers, [C, h], of models with these updates, then the layer before the round."""
    before = torch.ones(3, 3, dtype=torch.float64)
    return torch.stack(
        [before + torch.tensor(update, dtype=torch.float64) for update in updates] + [before]
    )


def test_lfighter_keeps_the_larger_and_less_similar_cluster():
    """Three different benign models stay, two equal label flippers do not.

    Class 2 changes least and is not read.
    """
    benign = [[[1, a, 0], [-1, 0, 0], [0, 0, 9e-3]] for a in (0.5, 0.0, -0.5)]
    flipped = [[[-1, 0, 0], [1, 0, 0], [0, 0, -9e-3]]] * 2
    third = 1 / 3
    assert lfighter(heads_of(*benign, *flipped)).tolist() == pytest.approx([third] * 3 + [0, 0, 0])
    assert lfighter(heads_of(*flipped, *benign)).tolist() == pytest.approx(
        [0, 0] + [third] * 3 + [0]
    )


def test_lfighter_keeps_a_single_model_and_equal_models():
    update = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert lfighter(heads_of(update)).tolist() == [1, 0]
    assert lfighter(heads_of(update, update, update)).tolist() == pytest.approx([1 / 3] * 3 + [0])


@settings(max_examples=30)
@given(m=st.integers(2, 12), seed=st.integers(0, 10**6))
def test_two_means_are_at_least_as_good_as_scikit_learn(m, seed):
    from sklearn.cluster import KMeans

    points = torch.from_numpy(stream(seed, "points").normal(size=(m, 3)))
    first = _two_means(points)
    inertia = sum(
        float((points[members] - points[members].mean(0)).square().sum())
        for members in (first, ~first)
        if members.any()
    )
    assert inertia <= KMeans(n_clusters=2, n_init=5, random_state=0).fit(
        points.numpy()
    ).inertia_ * (1 + 1e-9)

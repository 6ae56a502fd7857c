"""FLAME: clusters compared with HDBSCAN, clipping by hand, and noise in any blocks of columns."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.views import models

from fedcb2o.errors import ConfigError
from fedcb2o.federated.aggregation import flame
from fedcb2o.federated.aggregation.base import apply
from fedcb2o.federated.aggregation.gram_matrix import gram
from fedcb2o.rng import stream


def hdbscan_majority(distances):
    from sklearn.cluster import HDBSCAN

    clusters = HDBSCAN(
        min_cluster_size=len(distances) // 2 + 1,
        min_samples=1,
        allow_single_cluster=True,
        metric="precomputed",
        copy=True,
    )
    return clusters.fit_predict(distances.numpy()) == 0


def majority(updates):
    """Return the models that pass the filter of FLAME, without the model before the round."""
    buffer = torch.cat([updates, torch.zeros_like(updates[:1])])
    return flame(gram(buffer), stream(0, "noise"), noise=0.0).rows.tolist()[:-1]


@settings(max_examples=60)
@given(m=st.integers(2, 15), seed=st.integers(0, 10**6), num_near=st.integers(0, 8))
def test_the_majority_is_the_cluster_of_hdbscan(m, seed, num_near):
    x = models(m, 3, seed)
    x[:num_near] = x[0] + 0.1 * x[:num_near]
    unit = torch.nn.functional.normalize(x, dim=1)
    distances = (1 - unit @ unit.T).clamp(min=0).fill_diagonal_(0.0)
    assert majority(x) == np.flatnonzero(hdbscan_majority((distances + distances.T) / 2)).tolist()


def at_angles(*angles):
    angles = torch.tensor(angles, dtype=torch.float64)
    return torch.stack([angles.cos(), angles.sin()], 1)


def test_the_majority_by_hand():
    assert majority(at_angles(0.0, 0.1, 0.21, 0.5, 0.9)) == [0, 1, 2]
    # The fourth is as near as the third: both are members.
    assert majority(at_angles(-0.05, 0.05, 0.2, -0.2, 0.9)) == [0, 1, 2, 3]
    assert majority(at_angles(0.3)) == [0]
    assert majority(at_angles(0.3, 0.3)) == [0, 1]


def test_outliers_are_removed_and_updates_are_clipped_to_the_median_norm():
    # Updates from (10, 0) have the norms 1, 2 and 3 to the right, and 8 in another direction.
    x = torch.tensor([[11.0, 0.0], [12.0, 0.0], [13.0, 0.0], [10.0, 8.0], [10.0, 0.0]])
    output = flame(gram(x), stream(0, "noise"), noise=0.0)
    assert output.rows.tolist() == [0, 1, 2, 4]
    factors = [1 / 3, 1 / 3, 2.5 / 3 / 3]  # the median of 1, 2, 3 and 8 is 2.5
    assert output.weights.tolist() == pytest.approx([*factors, 1 - sum(factors)])
    assert apply(lambda g: flame(g, stream(0, "noise"), noise=0.0), x).tolist() == pytest.approx(
        [10 + 5.5 / 3, 0.0]
    )


def test_noise_has_its_size_and_does_not_depend_on_blocks():
    x = models(5, 30_000, dtype=torch.float32)
    output = flame(gram(x), stream(0, "noise"), noise=0.5)
    noiseless = flame(gram(x), stream(0, "noise"), noise=0.0)
    full = output.apply_to_buffer(x, 0)
    size = float((x[:4] - x[4]).double().norm(dim=1).quantile(0.5)) * 0.5
    added = full - noiseless.apply_to_buffer(x, 0)
    assert float(added.std()) == pytest.approx(size, rel=0.02)
    assert abs(float(added.mean())) < 4 * size / 30_000**0.5
    parts = [output.apply_to_buffer(x[:, a : a + 7_001], a) for a in range(0, 30_000, 7_001)]
    torch.testing.assert_close(torch.cat(parts), full, rtol=0, atol=1e-3)
    other = flame(gram(x), stream(1, "noise"), noise=0.5).apply_to_buffer(x, 0)
    assert abs(float(np.corrcoef(added, other - noiseless.apply_to_buffer(x, 0))[0, 1])) < 0.03


def test_negative_noise_is_refused():
    with pytest.raises(ConfigError, match="`noise` must be 0 or more, got -1"):
        flame(gram(models(3, 4)), stream(0, "noise"), noise=-1.0)

"""Rules that read losses, and DnC: by hand, and compared with plain loops."""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cluster import KMeans

from fedcb2o.errors import ConfigError
from fedcb2o.federated import algorithms
from fedcb2o.federated.aggregation import apply, dnc, gram, loss_clustering, lpe_tsr

INF, NAN = math.inf, math.nan


def test_softmax_weights_by_hand():
    losses = torch.tensor([math.log(2.0), math.log(6.0), NAN, INF])
    assert lpe_tsr(losses).tolist() == pytest.approx([3 / 4, 1 / 4, 0, 0])
    assert lpe_tsr(losses, temperature=0.5).tolist() == pytest.approx([9 / 10, 1 / 10, 0, 0])
    assert lpe_tsr(losses[2:]).tolist() == [0, 0]
    assert lpe_tsr(torch.tensor([1e6, 2e6])).tolist() == [1, 0]
    with pytest.raises(ConfigError, match="`temperature` must be above 0, got 0"):
        lpe_tsr(losses, temperature=0.0)


@pytest.mark.parametrize(
    ("losses", "members"),
    [
        ([0.1, 0.3, 2.0, 0.2], [1, 1, 0, 1]),
        ([5.0], [1]),
        ([2.0, 2.0, 2.0], [1, 1, 1]),
        ([0.0, 2.0, 1.0], [1, 0, 1]),  # a tie: the middle loss is in the lower cluster
        ([1.0, INF, 1.2, NAN, 9.0], [1, 0, 1, 0, 0]),
        ([INF, NAN], [0, 0]),
        # From centres 0 and 10: {0, 1, 4} and {6, 10}; from 5/3 and 8 the 4 stays.
        ([0.0, 1.0, 4.0, 6.0, 10.0], [1, 1, 1, 0, 0]),
    ],
)
def test_clusters_of_losses_by_hand(losses, members):
    expected = [member / max(1, sum(members)) for member in members]
    assert loss_clustering(torch.tensor(losses)).tolist() == pytest.approx(expected)


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=12, unique=True))
def test_clusters_of_losses_equal_the_k_means_of_scikit_learn(losses):
    """The authors' code uses scikit-learn. Integers make ties exact."""
    x = np.array(losses, float)[:, None]
    clusters = KMeans(2, init=np.array([x.min(0), x.max(0)]), n_init=1, tol=0).fit(x)
    distances = np.abs(x - clusters.cluster_centers_.T)
    if np.isclose(distances[:, 0], distances[:, 1], rtol=1e-9).any():
        return  # a tie: both clusters are correct
    expected = (clusters.labels_ == 0) / (clusters.labels_ == 0).sum()
    weights = loss_clustering(torch.tensor(losses, dtype=torch.float64))
    assert weights.tolist() == pytest.approx(expected.tolist())


def test_dnc_by_hand():
    # The centred models vary most along the axis (1, 0).
    x = torch.tensor([[0.0, 0.0], [1.0, 0.5], [2.0, -0.5], [21.0, 0.0]])
    assert dnc(gram(x), f=1).tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    # The mean is 6: 21 is the farthest, then 0.
    assert dnc(gram(x), f=2).tolist() == pytest.approx([0, 1 / 2, 1 / 2, 0])
    assert dnc(gram(x), f=1, removed=2.0).tolist() == dnc(gram(x), f=2).tolist()
    assert dnc(gram(x), f=3, removed=9.0).sum() == 1
    assert dnc(gram(x), f=0).tolist() == [0.25] * 4
    with pytest.raises(ConfigError, match="`removed` must be above 0"):
        dnc(gram(x), f=1, removed=0.0)


def test_dnc_equals_plain_loops():
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.normal(size=(9, 40)))
    x[:3] += 2 * torch.from_numpy(draw.normal(size=40))
    centred = x - x.mean(0)
    direction = torch.linalg.svd(centred).Vh[0]
    scores = {i: float((centred[i] @ direction) ** 2) for i in range(9)}
    kept = sorted(sorted(scores, key=lambda i: scores[i])[:6])
    mean = sum(x[i] for i in kept) / 6
    torch.testing.assert_close(apply(functools.partial(dnc, f=3), x), mean)


def test_lpe_tsr_has_the_weights_of_fedcbo():
    fedcbo = algorithms.fedcbo(alpha=2.0, selection="everyone", own_model="judged")
    losses = torch.rand(5, dtype=torch.float64)
    expected = torch.softmax(-fedcbo.weigh.alpha * losses, 0)
    torch.testing.assert_close(lpe_tsr(losses, temperature=0.5), expected)

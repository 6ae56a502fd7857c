"""scikit-learn's digits: shapes, counts, and a fixed, balanced test set."""

import pytest
import torch

from fedcb2o.data import digits
from fedcb2o.errors import ConfigError


def test_shapes_types_and_counts():
    data = digits()
    assert data.class_names == tuple("0123456789")
    assert data.num_classes == 10
    assert len(data.pool) + len(data.test) == 1797
    assert data.test.x.shape == (240, 1, 8, 8)
    assert data.pool.x.shape == (1557, 1, 8, 8)
    assert data.pool.x.dtype == data.test.x.dtype == torch.float32
    assert data.pool.y.dtype == torch.int64
    assert data.pool.x.min() == 0
    assert data.pool.x.max() == 1
    # scikit-learn's counts, less 24 each
    counts = torch.tensor([178, 182, 177, 183, 181, 182, 181, 179, 174, 180])
    assert torch.bincount(data.test.y).tolist() == [24] * 10
    assert torch.equal(torch.bincount(data.pool.y), counts - 24)


def test_pool_and_test_set_make_up_the_whole():
    data = digits(test_per_class=3)
    everything = torch.cat([data.pool.x, data.test.x]).flatten(1)
    from sklearn.datasets import load_digits

    original = torch.from_numpy(load_digits().data).float() / 16
    rows = sorted(map(tuple, everything.tolist()))
    assert rows == sorted(map(tuple, original.tolist()))


def test_labels_match_their_images():
    """The nearest mean image predicts most labels; it would not with shuffled labels."""
    data = digits()
    means = torch.stack([data.pool.x[data.pool.y == c].mean(0) for c in range(10)]).flatten(1)
    predicted = torch.cdist(data.test.x.flatten(1), means).argmin(1)
    assert (predicted == data.test.y).float().mean() > 0.85


@pytest.mark.parametrize("wrong", [0, -1, 174])
def test_an_invalid_test_size_is_refused(wrong):
    message = rf"`test_per_class` of digits must be between 1 and 173, got {wrong}"
    with pytest.raises(ConfigError, match=message):
        digits(test_per_class=wrong)

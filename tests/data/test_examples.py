"""Example data sets: data of owners, and numbers in place of classes."""

import pytest
import torch
from tests.data.image_files import contents, write

from fedcb2o.data import diabetes, fashion_shops, typefaces
from fedcb2o.errors import ConfigError


def test_typefaces_are_owners_with_their_own_sizes():
    data = typefaces(fewest=20, most=40)
    owners = data.owners
    assert len(owners.names) == 16
    assert data.pool.x.shape[1:] == (1, 12, 12)
    assert 0 <= data.pool.x.min() < data.pool.x.max() <= 1
    sizes = torch.bincount(owners.pool) + torch.bincount(owners.test[owners.test >= 0])
    assert 20 <= sizes.min() < sizes.max() <= 40
    assert (owners.test < 0).sum() == 4 * 60
    assert torch.equal(typefaces(fewest=20, most=40).pool.x, data.pool.x)
    assert data.class_names == tuple("0123456789")


def test_mean_digits_of_the_owners_classify_other_typefaces():
    """The nearest mean image is right for over 40% of the digits of typefaces without an owner."""
    data = typefaces()
    means = torch.stack([data.pool.x[data.pool.y == digit].mean(0) for digit in range(10)]).flatten(
        1
    )
    without_owner = data.owners.test < 0
    nearest = torch.cdist(data.test.x[without_owner].flatten(1), means).argmin(1)
    assert (nearest == data.test.y[without_owner]).float().mean() > 0.4


def test_fashion_shops_are_owners_with_different_assortments(tmp_path):
    write(tmp_path, contents(train=30, test=4))
    data = fashion_shops(data_dir=tmp_path, shops=10, fewest=10, most=40, test_per_class=3)
    owners = data.owners
    assert owners.names == tuple(f"shop-{k}" for k in range(10))
    assert (owners.test < 0).sum() == 30
    sizes = torch.bincount(owners.pool) + torch.bincount(owners.test[owners.test >= 0])
    assert 10 <= sizes.min() < sizes.max() <= 40
    assert data.pool.x.dtype == torch.uint8
    classes = [
        torch.bincount(data.pool.y[owners.pool == k], minlength=10) / (owners.pool == k).sum()
        for k in range(10)
    ]
    # assortments differ
    assert max((one - other).abs().sum() for one in classes for other in classes) > 0.5
    images = torch.cat([data.pool.x, data.test.x[owners.test >= 0]]).flatten(1)
    assert len(images.unique(dim=0)) == len(images)  # no photograph is in two shops


def test_diabetes_has_standardised_targets():
    data = diabetes()
    assert (data.class_names, data.num_outputs, len(data.pool), len(data.test)) == ((), 1, 332, 110)
    targets = torch.cat([data.pool.y, data.test.y])
    assert targets.mean().item() == pytest.approx(0, abs=1e-6)
    assert targets.std(correction=0).item() == pytest.approx(1, abs=1e-6)
    assert torch.allclose(data.pool.x.mean(0), torch.zeros(10), atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: typefaces(fewest=5), "`fewest` of typefaces must be at least 20"),
        (lambda folder: typefaces(fewest=50, most=40), "and `most` no less, got 50 and 40"),
        (lambda folder: fashion_shops(data_dir=folder, shops=1), "needs 2 `shops` or more"),
        (lambda folder: fashion_shops(data_dir=folder, test_per_class=2), "photographs are too many: there are 30"),
    ],
)  # fmt: skip
def test_invalid_parameters_are_refused(tmp_path, make, message):
    write(tmp_path, contents())
    with pytest.raises(ConfigError, match=message):
        make(tmp_path)

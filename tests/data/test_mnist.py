"""MNIST from tiny files. Its download and errors are those of other sets."""

import os
from pathlib import Path

import pytest
import torch
from tests.data.image_files import contents, write

from fedcb2o.data import mnist

REAL = os.environ.get("FEDCB2O_MNIST")


@pytest.mark.parametrize("zipped", [True, False])
def test_both_sets_are_read_plain_and_gzip(tmp_path, zipped):
    data = mnist(data_dir=write(tmp_path, contents(), zipped))
    assert data.class_names == tuple("0123456789")
    assert data.pool.x.shape == (30, 1, 28, 28)
    assert data.test.x.shape == (20, 1, 28, 28)
    assert data.pool.x.dtype == torch.uint8
    assert torch.equal(data.pool.x[:, 0, 1, 2], data.pool.y)  # as stored: row 1, column 2
    assert torch.equal(data.test.x[:, 0, 1, 2], data.test.y)


@pytest.mark.skipif(not REAL, reason="FEDCB2O_MNIST does not name a folder with MNIST's files")
def test_the_real_files_have_the_published_counts():
    data = mnist(data_dir=Path(str(REAL)))
    result = torch.bincount(data.pool.y).tolist()
    assert result == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    result = torch.bincount(data.test.y).tolist()
    assert result == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]

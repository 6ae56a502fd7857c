"""MNIST from tiny files, and its download. Errors of the reader are in test_emnist."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.data.image_files import at, contents, names, served, write

from fedcb2o.data import mnist
from fedcb2o.data.downloads import download, import_files
from fedcb2o.data.sets._mnist import MNIST as RELEASE
from fedcb2o.errors import DataError

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


def test_download(tmp_path, capsys):
    bodies = contents()
    with served(bodies) as address:
        release = at(RELEASE, address, bodies)
        files = download(release, tmp_path / "mnist")
        download(replace(release, url="http://127.0.0.1:1"), tmp_path / "mnist")  # all files exist
    assert sorted(path.name for path in files) == names(tmp_path / "mnist") == sorted(bodies)
    assert len(mnist(data_dir=tmp_path / "mnist").test) == 20
    output = capsys.readouterr().err
    assert all(f"MNIST {name}" in output for name in bodies)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"t10k-labels-idx1-ubyte.gz": b"another"},
            "/t10k-labels-idx1-ubyte.gz is damaged or another file: its MD5",
        ),
        (
            {"t10k-labels-idx1-ubyte.gz": None},
            "MNIST cannot be fetched from .*/t10k-labels-idx1-ubyte.gz .404",
        ),
    ],
    ids=["another", "missing"],
)
def test_a_failed_download_leaves_no_files(tmp_path, change, message):
    bodies = contents()
    with served(
        {name: body for name, body in {**bodies, **change}.items() if body is not None}
    ) as address:
        with pytest.raises(DataError, match=message) as caught:
            download(at(RELEASE, address, bodies), tmp_path, progress=False)
        assert f"or fetch {', '.join(bodies)} from {address} in another way and run" in str(
            caught.value
        )
    assert names(tmp_path) == []


def test_a_download_without_samples_leaves_no_files(tmp_path):
    bodies = contents(test=0)
    with (
        served(bodies) as address,
        pytest.raises(DataError, match=f"in what came from {address}: .* has 0 samples"),
    ):
        download(at(RELEASE, address, bodies), tmp_path, progress=False)
    assert names(tmp_path) == []


@pytest.mark.parametrize("zipped", [True, False])
def test_import_of_a_folder(tmp_path, zipped):
    source = write(tmp_path / "source", contents(), zipped)
    # another data set in the same folder
    (source / "emnist-balanced-train-images-idx3-ubyte").write_bytes(b"")
    files = import_files(RELEASE, source, tmp_path / "target")
    assert [path.name for path in files] == [
        f"{part}{'.gz' if zipped else ''}" for part in RELEASE.file_names
    ]
    assert len(mnist(data_dir=tmp_path / "target").pool) == 30


def test_import_from_an_empty_folder_is_refused(tmp_path):
    needed = "DIR in `fedcb2o data mnist --from DIR` must hold these files, plain or .gz: train-images-idx3-ubyte, "
    with pytest.raises(DataError, match=needed):
        import_files(RELEASE, tmp_path, tmp_path / "target")


@pytest.mark.skipif(not REAL, reason="FEDCB2O_MNIST does not name a folder with MNIST's files")
def test_the_real_files_have_the_published_counts():
    data = mnist(data_dir=Path(str(REAL)))
    result = torch.bincount(data.pool.y).tolist()
    assert result == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    result = torch.bincount(data.test.y).tolist()
    assert result == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]

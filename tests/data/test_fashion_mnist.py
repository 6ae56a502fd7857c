"""Fashion-MNIST, whose files have MNIST's names: tiny files, a system package, the real files.

The reader and downloads are tested further in test_mnist.
"""

import gzip
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.data.image_files import at, contents, md5, names, served, write
from tests.tiny import run_cli

from fedcb2o.data import fashion_mnist, mnist
from fedcb2o.data.downloads import download, import_files
from fedcb2o.data.release import Release
from fedcb2o.data.sets._mnist import FASHION_MNIST as RELEASE
from fedcb2o.data.sets._mnist import MNIST
from fedcb2o.errors import DataError

PACKAGED = RELEASE.system_folder or Path()
LABELS = "t10k-labels-idx1-ubyte.gz"
MODULE = sys.modules["fedcb2o.data.sets._mnist"]  # the package has a function of this name
HEADER = 10  # bytes of a gzip file without a name


def labelled(release: Release) -> dict[str, bytes]:
    """Return files whose first test labels `release` recognises as another data set's."""
    files = contents(test=3)
    plain = bytearray(gzip.decompress(files[LABELS]))
    plain[8:18] = release.lookalikes[0][1]
    return {**files, LABELS: gzip.compress(bytes(plain))}


@pytest.mark.parametrize(
    ("read", "release", "message"),
    [
        (fashion_mnist, RELEASE, r"labels-idx1-ubyte.gz is MNIST's, not Fashion-MNIST's; .*`--data-dir`"),
        (mnist, MNIST, r"labels-idx1-ubyte.gz is Fashion-MNIST's, not MNIST's; .*`--data-dir`"),
    ],
)  # fmt: skip
def test_mnist_and_fashion_mnist_are_not_confused_or_overwritten(tmp_path, read, release, message):
    other_folder = write(tmp_path / "theirs", labelled(release))
    source = write(tmp_path / "mine", contents())
    before = {path.name: path.read_bytes() for path in other_folder.iterdir()}
    with pytest.raises(DataError, match=message):
        read(data_dir=other_folder)
    other_name = release.lookalikes[0][0]
    with (
        served(contents()) as address,
        pytest.raises(DataError, match=f"theirs holds {other_name}'s files, which have"),
    ):
        download(at(release, address, contents()), other_folder, progress=False)
    reason = f"theirs holds {other_name}'s files, which have the same names; name another"
    with pytest.raises(DataError, match=reason):
        import_files(release, source, other_folder)
    assert {path.name: path.read_bytes() for path in other_folder.iterdir()} == before
    (other_folder / LABELS).write_bytes(b"damaged")
    assert len(import_files(release, source, other_folder)) == 4


def test_files_of_a_package_are_read_unless_own_files_exist(tmp_path, monkeypatch):
    packaged, own_folder = write(tmp_path / "packaged", contents(train=2)), tmp_path / "own"
    monkeypatch.setenv("FEDCB2O_DATA", str(own_folder))
    monkeypatch.setattr(MODULE, "FASHION_MNIST", replace(RELEASE, system_folder=packaged))
    assert len(fashion_mnist().pool) == 20
    assert f"4 files in {packaged}" in run_cli("data", "fashion_mnist").out  # nothing is fetched
    assert (
        f"4 files in {own_folder}"
        in run_cli("data", "fashion_mnist", "--from", write(tmp_path / "mine", contents())).out
    )
    assert len(fashion_mnist().pool) == 30
    (own_folder / LABELS).unlink()
    message = f"no file t10k-labels-idx1-ubyte, plain or .gz, in {own_folder}"
    with pytest.raises(DataError, match=message):
        fashion_mnist()  # the package does not supply the missing file
    for path in own_folder.iterdir():
        path.unlink()
    (packaged / LABELS).unlink()
    message = f"no file train-images-idx3-ubyte, plain or .gz, in {own_folder}"
    with pytest.raises(DataError, match=message):
        fashion_mnist()


def test_download(tmp_path, monkeypatch):
    bodies = contents()
    monkeypatch.setenv("FEDCB2O_DATA", str(tmp_path))
    with served(bodies) as address:
        monkeypatch.setattr(
            MODULE, "FASHION_MNIST", at(replace(RELEASE, system_folder=None), address, bodies)
        )
        result = run_cli("data", "fashion_mnist")
    assert result.status == 0
    assert f"4 files in {tmp_path}" in result.out
    assert "fedcb2o run digits-fedassay --set data.name=fashion_mnist" in result.out
    assert names(tmp_path) == sorted(bodies)
    assert len(fashion_mnist().pool) == 30


@pytest.mark.skipif(
    not PACKAGED.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed"
)
def test_the_files_of_the_package_are_balanced_and_upright():
    data = fashion_mnist(data_dir=PACKAGED)
    assert torch.bincount(data.pool.y).tolist() == [6000] * 10
    assert torch.bincount(data.test.y).tolist() == [1000] * 10
    assert data.test.y[:4].tolist() == [9, 2, 1, 1]  # an ankle boot, a pullover, two trousers
    boot = data.test.x[0, 0].float()
    assert boot[14:].mean() > 5 * boot[:7].mean()  # upright: the sole is below


@pytest.mark.skipif(
    not PACKAGED.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed"
)
def test_files_of_the_package_equal_the_release():
    """With the gzip headers of the release, the files have its MD5 sums."""
    for part, date in (("train", 1504176606), ("t10k", 1504176627)):
        for name in (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"):
            header = (
                b"\x1f\x8b\x08\x08"
                + date.to_bytes(4, "little")
                + b"\x00\x03"
                + name.encode()
                + b"\x00"
            )
            packed = (PACKAGED / f"{name}.gz").read_bytes()[HEADER:]
            assert md5(header + packed) == RELEASE.md5[f"{name}.gz"]

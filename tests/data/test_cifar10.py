"""CIFAR-10 from tiny binary files, and its archive."""

import gzip
import importlib
import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.data.image_files import at, names, served

from fedcb2o.data import cifar10
from fedcb2o.data.downloads import download, import_files
from fedcb2o.data.sets._cifar10 import RELEASE
from fedcb2o.errors import ConfigError, DataError

REAL = os.environ.get("FEDCB2O_CIFAR10")
ARCHIVE = "cifar-10-binary.tar.gz"
FOLDER = "cifar-10-batches-bin"


def contents(seed: int = 0) -> dict[str, bytes]:
    """Return six files of 20 shuffled images, two per class.

    Green at [row 1, column 2] is the label, red at [0, 0] the position in the file.
    """
    draw, files = np.random.default_rng(seed), {}
    for name in RELEASE.file_names:
        labels = draw.permutation(np.repeat(np.arange(10), 2))
        images = draw.integers(0, 256, (20, 3, 32, 32))
        images[:, 1, 1, 2], images[:, 0, 0, 0] = labels, np.arange(20)
        files[name] = np.column_stack([labels, images.reshape(20, -1)]).astype(np.uint8).tobytes()
    return files


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, body in files.items():
        (folder / name).write_bytes(body)
    return folder


def archive(files: dict[str, bytes]) -> bytes:
    """Return a tar file like the official one, with other files and some malicious ones in it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archived:
        for name, body in {
            **files,
            "readme.html": b"",
            "../evil.bin": b"out of the folder",
        }.items():
            member = tarfile.TarInfo(f"{FOLDER}/{name}")
            member.size = len(body)
            archived.addfile(member, io.BytesIO(body))
        link = tarfile.TarInfo(f"{FOLDER}/linked/test_batch.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archived.addfile(link)
    return buffer.getvalue()


# --- reading


@pytest.mark.parametrize("subfolder", ["", FOLDER])
def test_all_files_are_read(tmp_path, subfolder):
    write(tmp_path / subfolder, contents())
    data = cifar10(data_dir=tmp_path)
    assert data.class_names[3] == "cat"
    assert data.pool.x.shape == (100, 3, 32, 32)
    assert data.test.x.shape == (20, 3, 32, 32)
    assert data.pool.x.dtype == torch.uint8
    assert data.pool.y.dtype == torch.int64
    assert torch.equal(data.pool.x[:, 1, 1, 2], data.pool.y)
    assert torch.equal(data.test.x[:, 1, 1, 2], data.test.y)
    assert data.pool.x[:, 0, 0, 0].tolist() == list(range(20)) * 5  # the files one after the other


def test_gzip_files_longer_than_a_block_are_read(tmp_path, monkeypatch):
    expected = cifar10(data_dir=write(tmp_path / "plain", contents())).pool
    monkeypatch.setattr(
        importlib.import_module("fedcb2o.data.sets._cifar10"), "IMAGES_PER_BLOCK", 7
    )
    zipped = {f"{name}.gz": gzip.compress(body, 1) for name, body in contents().items()}
    assert torch.equal(cifar10(data_dir=write(tmp_path / "gzip", zipped)).pool.x, expected.x)


DAMAGES = {
    "cut": (
        lambda body: body[:-1],
        r"data_batch_2.bin is truncated or of another format: .* records of 3073",
    ),
    "label": (
        lambda body: b"\x0a" + body[1:],
        r"data_batch_\*.bin: labels must be between 0 and 9, but there is a 10",
    ),
    "one class": (
        lambda body: b"",
        r"data_batch_\*.bin: class 'airplane' has 8 samples, fewer than `train_per_class`",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_give_a_one_line_error(tmp_path, damage):
    change, message = DAMAGES[damage]
    files = contents()
    files["data_batch_2.bin"] = change(files["data_batch_2.bin"])
    with pytest.raises(DataError, match=message) as caught:
        cifar10(data_dir=write(tmp_path, files), train_per_class=10)
    assert "\n" not in str(caught.value)


def test_missing_and_duplicate_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="`test_per_class` of cifar10 must be at least 1, got -1"):
        cifar10(data_dir=tmp_path, test_per_class=-1)
    message = f"no file data_batch_1.bin or {FOLDER}/data_batch_1.bin, plain or .gz, in "
    with pytest.raises(DataError, match=message):
        cifar10(data_dir=tmp_path)
    write(tmp_path, contents())
    write(tmp_path / FOLDER, contents(1))
    message = rf"two sets of CIFAR-10 files \(see data_batch_1.bin and {FOLDER}/data_b"
    with pytest.raises(DataError, match=message):
        cifar10(data_dir=tmp_path)


def test_the_pickled_version_is_not_read(tmp_path):
    (tmp_path / "data_batch_1").write_bytes(b"cos\nsystem\n(S'touch pickled'\ntR.")
    with pytest.raises(DataError, match=r"no file data_batch_1.bin"):
        cifar10(data_dir=tmp_path)


# --- download and import


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"no archive", "cifar-10-binary.tar.gz is not a tar archive, or a damaged one"),
        (archive(contents())[:-20_000], "cifar-10-binary.tar.gz is not a tar archive, or a damaged one"),
        (gzip.compress(b"no archive"), "cifar-10-binary.tar.gz is not a tar archive, or a damaged one"),
        (
            archive({"test_batch.bin": b""}),
            "in what came from .*cifar-10-binary.tar.gz: CIFAR-10: no file data_batch_1",
        ),
    ],
    ids=["no gzip", "cut", "no tar", "without files"],
)  # fmt: skip
def test_a_failed_download_leaves_no_files(tmp_path, body, message):
    with served({ARCHIVE: body}) as address, pytest.raises(DataError, match=message) as caught:
        download(at(RELEASE, address, {ARCHIVE: body}), tmp_path, progress=False)
    assert (
        f"fetch {ARCHIVE} from {address} in another way and run `fedcb2o data cifar10 --from DIR`"
        in str(caught.value)
    )
    assert names(tmp_path) == []


@pytest.mark.parametrize("kind", ["archive", "folder with an archive", "folder", "subfolder"])
def test_import_of_an_archive_or_a_folder(tmp_path, kind):
    source = write(tmp_path / "source", {})
    if "archive" in kind:
        (source / ARCHIVE).write_bytes(archive(contents()))
    else:
        write(source / FOLDER if kind == "subfolder" else source, contents())
    files = import_files(
        RELEASE, source / ARCHIVE if kind == "archive" else source, tmp_path / "target"
    )
    assert (
        names(tmp_path / "target")
        == sorted(RELEASE.file_names)
        == sorted(path.name for path in files)
    )
    assert len(cifar10(data_dir=tmp_path / "target").pool) == 100


@pytest.mark.skipif(
    not REAL, reason="FEDCB2O_CIFAR10 does not name a folder with CIFAR-10's binary files"
)
def test_the_real_files_have_balanced_classes():
    data = cifar10(data_dir=Path(str(REAL)))
    assert torch.bincount(data.pool.y).tolist() == [5000] * 10
    assert torch.bincount(data.test.y).tolist() == [1000] * 10

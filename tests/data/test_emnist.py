"""EMNIST from tiny files, its download from a local server, and the real files if present."""

import gzip
import importlib
import io
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.data.image_files import at, idx, md5, names, served

from fedcb2o.data import emnist, rotate
from fedcb2o.data.downloads import download, import_files
from fedcb2o.data.release import default_folder
from fedcb2o.data.sets._mnist import EMNIST as RELEASE
from fedcb2o.errors import ConfigError, DataError

REAL = os.environ.get("FEDCB2O_EMNIST")
PARTS = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "test-images-idx3-ubyte",
    "test-labels-idx1-ubyte",
)


def contents(train: int = 3, test: int = 2, images_seed: int = 0) -> dict[str, bytes]:
    """Return shuffled files with `train` and `test` images per class.

    Pixel [row 1, column 2] of an upright image is the label.
    """
    draw = np.random.default_rng(images_seed)
    files = {}
    for part, per_class in (("train", train), ("test", test)):
        labels = draw.permutation(np.repeat(np.arange(47), per_class))
        upright = draw.integers(0, 256, (len(labels), 28, 28))
        upright[:, 1, 2] = labels
        upright[:, 0, 0] = np.arange(len(labels)) % 256  # the position in the file
        files[f"{part}-images-idx3-ubyte"] = idx(upright.swapaxes(1, 2))
        files[f"{part}-labels-idx1-ubyte"] = idx(labels)
    return files


def write(
    folder: Path, files: dict[str, bytes], name: str = "emnist-balanced", zipped: bool = True
) -> Path:
    folder.mkdir(exist_ok=True)
    for part, data in files.items():
        if zipped:
            (folder / f"{name}-{part}.gz").write_bytes(gzip.compress(data, 1))
        else:
            (folder / f"{name}-{part}").write_bytes(data)
    return folder


def archive(files: dict[str, bytes]) -> bytes:
    """Return a zip like the official one: in a folder, with other splits, and with the mapping."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archived:
        for part, data in files.items():
            archived.writestr(f"gzip/emnist-balanced-{part}.gz", gzip.compress(data, 1))
            archived.writestr(f"gzip/emnist-letters-{part}.gz", b"another split")
        archived.writestr("gzip/emnist-balanced-mapping.txt", "0 48\n")
        archived.writestr("../emnist-balanced-mapping.txt.evil", "out of the folder")
    return buffer.getvalue()


# --- reading


@pytest.mark.parametrize("name", ["emnist-balanced", "emnist47"])
@pytest.mark.parametrize("zipped", [True, False])
def test_both_sets_are_read_plain_and_gzip(tmp_path, name, zipped):
    data_dir = write(tmp_path, contents(), name, zipped)
    data = emnist(data_dir=data_dir, train_per_class=None, test_per_class=None)
    assert data.pool.x.shape == (141, 1, 28, 28)
    assert data.test.x.shape == (94, 1, 28, 28)
    assert data.pool.x.dtype == torch.uint8
    assert data.pool.x.is_contiguous()
    assert data.pool.y.dtype == torch.int64
    assert torch.equal(data.pool.x[:, 0, 1, 2], data.pool.y)  # upright: row 1, column 2
    assert torch.equal(data.test.x[:, 0, 1, 2], data.test.y)
    assert data.pool.x[:, 0, 0, 0].tolist() == list(range(141))  # all of them, in the files' order


def test_the_first_images_of_each_class_are_kept_in_file_order(tmp_path):
    folder = write(tmp_path, contents())
    everything = emnist(data_dir=folder, train_per_class=None, test_per_class=None).pool
    data = emnist(data_dir=folder, train_per_class=2, test_per_class=1)
    counts: dict[int, int] = {}
    expected = []
    for i, y in enumerate(everything.y.tolist()):
        counts[y] = counts.get(y, 0) + 1
        if counts[y] <= 2:
            expected.append(i)
    assert torch.equal(data.pool.x, everything.x[expected])
    assert torch.equal(data.pool.y, everything.y[expected])
    assert torch.bincount(data.test.y).tolist() == [1] * 47


def test_letters_are_the_classes_after_the_ten_digits(tmp_path):
    folder = write(tmp_path, contents())
    all_classes = emnist(data_dir=folder, train_per_class=2, test_per_class=1)
    data = emnist(data_dir=folder, train_per_class=2, test_per_class=1, letters=True)
    assert data.class_names[:2] + data.class_names[-1:] == ("A", "B", "t")
    assert torch.bincount(data.pool.y).tolist() == [2] * 37
    assert torch.equal(data.pool.x, all_classes.pool.x[all_classes.pool.y >= 10])
    assert torch.equal(data.test.y, all_classes.test.y[all_classes.test.y >= 10] - 10)


def test_files_longer_than_a_block_are_read(tmp_path, monkeypatch):
    folder = write(tmp_path, contents())
    expected = emnist(data_dir=folder, train_per_class=2, test_per_class=1)
    monkeypatch.setattr(importlib.import_module("fedcb2o.data.sets._mnist"), "IMAGES_PER_BLOCK", 10)
    blocks = emnist(data_dir=folder, train_per_class=2, test_per_class=1)
    assert torch.equal(blocks.pool.x, expected.pool.x)
    assert torch.equal(blocks.test.x, expected.test.x)


def test_default_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCB2O_DATA", str(write(tmp_path, contents())))
    assert len(emnist(train_per_class=1, test_per_class=1).pool) == 47
    monkeypatch.delenv("FEDCB2O_DATA")
    assert default_folder(RELEASE).name == "emnist"
    assert "fedcb2o" in str(default_folder(RELEASE))


# --- damaged files


def change(part: str, edit: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Return a function that edits the decompressed values of one file."""

    def apply(folder: Path) -> None:
        path = folder / f"emnist-balanced-{part}.gz"
        path.write_bytes(gzip.compress(edit(gzip.decompress(path.read_bytes())), 1))

    return apply


def change_raw(part: str, edit: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Return a function that edits the bytes of one file on disk."""

    def apply(folder: Path) -> None:
        path = folder / f"emnist-balanced-{part}.gz"
        path.write_bytes(edit(path.read_bytes()))

    return apply


def relabel(old: int, new: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:8] + bytes(new if y == old else y for y in data[8:])


DAMAGES = {
    "truncated": (
        change("train-images-idx3-ubyte", lambda data: data[:-1]),
        r"train-images-idx3-ubyte.gz is truncated: 141 rows announced, 140 there",
    ),
    "truncated header": (
        change("test-labels-idx1-ubyte", lambda data: data[:6]),
        r"test-labels-idx1-ubyte.gz is truncated in its header",
    ),
    "empty": (
        change("test-labels-idx1-ubyte", lambda data: b""),
        r"test-labels-idx1-ubyte.gz is not an IDX file of bytes in 1 dimensions: it starts with nothing",
    ),
    "too long": (
        change("train-images-idx3-ubyte", lambda data: data + b"x"),
        r"train-images-idx3-ubyte.gz goes on after the 141 rows",
    ),
    "wrong magic": (
        change("train-labels-idx1-ubyte", lambda data: b"\0\0\x0c\1" + data[4:]),
        r"train-labels-idx1-ubyte.gz is not an IDX file .* starts with 00000c01, not 00000801",
    ),
    "labels where images belong": (
        lambda folder: (
            (folder / "emnist-balanced-test-labels-idx1-ubyte.gz").replace(
                folder / "emnist-balanced-test-images-idx3-ubyte.gz"
            )
            and write(folder, {"test-labels-idx1-ubyte": contents()["test-labels-idx1-ubyte"]})
        ),
        r"test-images-idx3-ubyte.gz is not an IDX file of bytes in 3 dimensions",
    ),
    "another size": (
        change(
            "test-images-idx3-ubyte",
            lambda data: data[:8] + bytes((0, 0, 0, 14, 0, 0, 0, 56)) + data[16:],
        ),
        r"test-images-idx3-ubyte.gz holds rows of shape \(14, 56\), not \(28, 28\)",
    ),
    "fewer labels": (
        change("train-labels-idx1-ubyte", lambda data: idx(np.frombuffer(data[8:-1], np.uint8))),
        r"train-images-idx3-ubyte.gz holds 141 images, but .*train-labels-idx1-ubyte.gz 140 labels",
    ),
    "more labels": (
        change(
            "test-labels-idx1-ubyte", lambda data: idx(np.frombuffer(data[8:] + b"\1", np.uint8))
        ),
        r"test-images-idx3-ubyte.gz holds 94 images, but .*test-labels-idx1-ubyte.gz 95 labels",
    ),
    "no such label": (
        change("train-labels-idx1-ubyte", relabel(46, 47)),
        r"train-labels-idx1-ubyte.gz: labels must be between 0 and 46, but there is a 47",
    ),
    "class too small": (
        change("train-labels-idx1-ubyte", lambda data: relabel(26, 27)(data[:100]) + data[100:]),
        r"train-labels-idx1-ubyte.gz: class 'Q' has [12] samples, fewer than `train_per_class` = 3; set it to at most",
    ),
    "class without samples": (
        change("test-labels-idx1-ubyte", relabel(24, 0)),
        r"test-labels-idx1-ubyte.gz: class 'O' has 0 samples, fewer than 1",
    ),
    "not gzip": (
        change_raw("test-labels-idx1-ubyte", lambda data: b"<html>not found</html>"),
        r"test-labels-idx1-ubyte.gz is not a gzip file",
    ),
    "gzip cut": (
        change_raw("train-images-idx3-ubyte", lambda data: data[: len(data) // 2]),
        r"train-images-idx3-ubyte.gz is a truncated or damaged gzip file",
    ),
    "gzip checksum": (
        change_raw("test-labels-idx1-ubyte", lambda data: data[:-8] + b"\0\0\0\0" + data[-4:]),
        r"test-labels-idx1-ubyte.gz is not a gzip file, or a damaged one",
    ),
    "gzip body": (
        change_raw("test-images-idx3-ubyte", lambda data: data[:200] + b"\xff" * 200 + data[400:]),
        r"test-images-idx3-ubyte.gz is ",
    ),
    "missing": (
        lambda folder: (folder / "emnist-balanced-test-labels-idx1-ubyte.gz").unlink(),
        r"no file emnist-balanced-test-labels-idx1-ubyte, plain or .gz, in .*`fedcb2o data emnist`.*`--data-dir`",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_give_a_one_line_error(tmp_path, damage):
    apply_damage, message = DAMAGES[damage]
    apply_damage(write(tmp_path, contents()))
    with pytest.raises(DataError, match=message) as caught:
        emnist(data_dir=tmp_path, train_per_class=3, test_per_class=2)
    assert "\n" not in str(caught.value)


def test_a_folder_without_files_is_refused(tmp_path):
    names_both = r"no file emnist-balanced-train-images-idx3-ubyte or emnist47-train-images-idx3-ubyte, plain or .gz"
    with pytest.raises(DataError, match=names_both):
        emnist(data_dir=tmp_path)
    with pytest.raises(DataError, match="there is no such folder"):
        emnist(data_dir=tmp_path / "nowhere")


def test_two_sets_in_one_folder_are_refused(tmp_path):
    write(write(tmp_path, contents()), contents(), "emnist47")
    message = r"holds two sets of EMNIST files \(see emnist-balanced-train-.* and emnist47-"
    with pytest.raises(DataError, match=message):
        emnist(data_dir=tmp_path)


@pytest.mark.parametrize("name", ["train_per_class", "test_per_class"])
def test_zero_samples_per_class_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=f"`{name}` of emnist must be at least 1, got 0"):
        emnist(data_dir=tmp_path, **{name: 0})


# --- download


FOUR_AND_MAPPING = sorted(
    [*(f"emnist-balanced-{part}.gz" for part in PARTS), "emnist-balanced-mapping.txt"]
)


@pytest.fixture
def published():
    """Release with a tiny archive in place of the official one."""
    body = archive(contents())
    with served({"gzip.zip": body}) as address:
        yield at(RELEASE, address, {"gzip.zip": body})


def test_download(tmp_path, published, capsys):
    target = tmp_path / "cache" / "emnist"
    files = download(published, target)
    assert names(tmp_path) == sorted(["cache", "emnist", *FOUR_AND_MAPPING])  # without the archive
    assert sorted(path.name for path in files) == FOUR_AND_MAPPING
    assert all(path.is_file() for path in files)
    assert len(emnist(data_dir=target, train_per_class=3, test_per_class=2).pool) == 141
    output = capsys.readouterr()
    assert "EMNIST gzip.zip" in output.err
    assert not output.out


def test_download_happens_once(tmp_path, published, capsys):
    first = download(published, tmp_path, progress=False)
    repeated = download(
        replace(published, url="http://127.0.0.1:1/nobody"), tmp_path, progress=False
    )
    assert set(repeated) <= set(first)
    assert len(repeated) == 4
    assert capsys.readouterr().err == ""


def test_download_replaces_damaged_files(tmp_path, published):
    write(tmp_path, contents(), zipped=False)
    (tmp_path / "emnist-balanced-test-images-idx3-ubyte").write_bytes(b"damaged")
    download(published, tmp_path, progress=False)
    assert names(tmp_path) == FOUR_AND_MAPPING
    emnist(data_dir=tmp_path, train_per_class=3, test_per_class=2)


WITHOUT_LABELS = archive({k: v for k, v in contents().items() if k != "test-labels-idx1-ubyte"})
CUT = archive(contents() | {"train-images-idx3-ubyte": contents()["train-images-idx3-ubyte"][:-5]})


@pytest.mark.parametrize(
    ("body", "path", "checksum", "message"),
    [
        (b"other", "", "0" * 32, f"its MD5 is {md5(b'other')}, not 0000"),
        (b"x" * 999, "/half", "", "EMNIST cannot be fetched from .*/half/gzip.zip"),
        (None, "", "", "EMNIST cannot be fetched from .*404"),
        (b"no zip", "", "", "is not a zip archive"),
        (WITHOUT_LABELS, "", "", "no file emnist-balanced-test-labels-idx1-ubyte"),
        (CUT, "", "", "in what came from .*/gzip.zip: emnist-balanced-train-images-idx3-ubyte.gz is truncated"),
    ],
    ids=["another", "half", "missing", "no zip", "without a file", "with a damaged file"],
)  # fmt: skip
def test_a_failed_download_leaves_no_files(tmp_path, body, path, checksum, message):
    with served({} if body is None else {"gzip.zip": body}) as address:
        release = replace(
            RELEASE, url=address + path, md5={"gzip.zip": checksum or md5(body or b"")}
        )
        with pytest.raises(DataError, match=message) as caught:
            download(release, tmp_path / "cache", progress=False)
    assert f"{address}{path}/gzip.zip" in str(caught.value)
    assert "`fedcb2o data emnist --from DIR`" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["cache"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "no address"])
def test_download_from_an_unreachable_address_is_refused(tmp_path, url):
    with pytest.raises(DataError, match=f"EMNIST cannot be fetched from {url}/gzip.zip"):
        download(replace(RELEASE, url=url), tmp_path, progress=False)
    assert names(tmp_path) == []


def test_an_interrupted_download_leaves_no_files(tmp_path, monkeypatch):
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedcb2o.data.downloads._fetch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        download(RELEASE, tmp_path, progress=False)
    assert names(tmp_path) == []


def test_a_target_that_cannot_be_written_is_refused(tmp_path):
    write(tmp_path / "source", contents())
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="EMNIST's files cannot be put into"):
        import_files(RELEASE, tmp_path / "source", tmp_path / "file" / "emnist")


# --- import of local files


@pytest.mark.parametrize("name", ["emnist-balanced", "emnist47"])
@pytest.mark.parametrize("zipped", [True, False])
def test_import_of_a_folder(tmp_path, name, zipped):
    source = write(tmp_path / "source", contents(), name, zipped)
    (source / "something-else.txt").write_text("")
    files = import_files(RELEASE, source, tmp_path / "target")
    assert names(tmp_path / "target") == sorted(
        f"{name}-{part}{'.gz' if zipped else ''}" for part in PARTS
    )
    assert sorted(files) == sorted((tmp_path / "target").iterdir())
    assert (
        len(emnist(data_dir=tmp_path / "target", train_per_class=3, test_per_class=2).pool) == 141
    )
    assert len(names(source)) == 5


@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_import_of_the_archive(tmp_path, kind):
    (tmp_path / "gzip.zip").write_bytes(archive(contents()))
    import_files(
        RELEASE, tmp_path if kind == "folder" else tmp_path / "gzip.zip", tmp_path / "target"
    )
    assert names(tmp_path / "target") == FOUR_AND_MAPPING


def test_import_into_the_source_folder_checks_the_files(tmp_path):
    write(tmp_path, contents())
    before = names(tmp_path)
    assert len(import_files(RELEASE, tmp_path, tmp_path)) == 4
    assert names(tmp_path) == before


@pytest.mark.parametrize("damage", ["missing", "no such label"])
def test_import_checks_before_it_copies(tmp_path, damage):
    apply_damage, message = DAMAGES[damage]
    apply_damage(write(tmp_path / "source", contents()))
    if damage == "missing":  # the cure must not be the command that failed
        message = r"no file emnist-balanced-test-labels-idx1-ubyte, .* in .*source; DIR in .* must hold gzip\.zip, or these"
    with pytest.raises(DataError, match=message):
        import_files(RELEASE, tmp_path / "source", tmp_path / "target")
    assert names(tmp_path / "target") == []


def test_import_next_to_another_set_is_refused(tmp_path):
    source = write(tmp_path / "source", contents())
    target = write(tmp_path / "target", contents(), "emnist47")
    before = names(target)
    with pytest.raises(DataError, match=r"target holds another set of EMNIST files \(emnist47-"):
        import_files(RELEASE, source, target)
    assert names(target) == before


KILLED_DOWNLOAD = """
import os, signal, sys
from pathlib import Path
from fedcb2o.data import downloads
from fedcb2o.data.sets._mnist import EMNIST as RELEASE

with downloads._staging(RELEASE, Path(sys.argv[1])) as folder:
    (folder / "gzip.zip").write_bytes(bytes(1000))
    print("half", flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_files_of_a_killed_download_are_removed_by_the_next_one(tmp_path):
    source, target = write(tmp_path / "source", contents()), tmp_path / "target"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_DOWNLOAD, target],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == "half\n"
    import_files(RELEASE, source, target)
    partial_files = [path.name for path in target.glob(".*/*")]
    process.communicate()
    assert (partial_files, process.returncode) == (["gzip.zip"], -signal.SIGKILL)
    assert list(target.glob(".*/*"))
    files = import_files(RELEASE, source, target)
    assert sorted(target.iterdir()) == sorted(files)


# --- the real files


@pytest.mark.skipif(not REAL, reason="FEDCB2O_EMNIST does not name a folder with EMNIST's files")
def test_the_real_files_are_balanced_and_upright():
    data = emnist(data_dir=Path(str(REAL)))
    assert data.pool.x.shape == (42_300, 1, 28, 28)
    assert data.test.x.shape == (13_912, 1, 28, 28)
    assert torch.bincount(data.pool.y).tolist() == [900] * 47
    assert torch.bincount(data.test.y).tolist() == [296] * 47
    # An upright T has its bar on top, an L its foot at the bottom; half a turn moves them.
    ink = {
        c: data.test.x[data.test.y == RELEASE.class_names.index(c)].float().mean((0, 1))
        for c in "TL"
    }
    assert ink["T"][4:12].sum() > 1.3 * ink["T"][16:24].sum()
    assert ink["L"][14:].sum() > 1.3 * ink["L"][:14].sum()
    turned = rotate(ink["T"].expand(1, 28, 28), 1, 2)[0]
    assert turned[16:24].sum() > 1.3 * turned[4:12].sum()

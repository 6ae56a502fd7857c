"""EMNIST, 47 balanced classes of handwritten digits and letters, read from its IDX files.

Cohen, Afshar, Tapson and van Schaik, "EMNIST: an extension of MNIST to handwritten letters" (2017). The official
"balanced" release and files of the same format under the name emnist47 are read alike, plain or gzip.
"""

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedcb2o.data.shard import Dataset, Shard
from fedcb2o.errors import ConfigError, DataError

__all__ = ["emnist"]

CLASS_NAMES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt")
SETS = ("emnist-balanced", "emnist47")
PARTS = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "test-images-idx3-ubyte", "test-labels-idx1-ubyte")
SIDE = 28
BLOCK = 4096  # rows in memory beside those that are kept: 3 MiB of images
CURE = "get the files with `fedcb2o data emnist`, or name the folder that holds them with `--data-dir`"


def emnist(
    *, data_dir: Path | None = None, train_per_class: int | None = 900, test_per_class: int | None = 296
) -> Dataset:
    """EMNIST with the first `train_per_class` and `test_per_class` images of each class; None keeps all.

    Images are uint8 [n, 1, 28, 28], upright, in the order of the files. The defaults give exactly balanced classes
    with either set of files. The files lie in `data_dir`, or else in `default_folder()`. Raises DataError if one is
    missing, damaged or of another format, or if a class has too few images.
    """
    for name, value in (("train_per_class", train_per_class), ("test_per_class", test_per_class)):
        if value is not None and value < 1:
            raise ConfigError(f"`{name}` of emnist must be at least 1, got {value}")
    train_images, train_labels, test_images, test_labels = find(default_folder() if data_dir is None else data_dir)
    test = _read(test_images, test_labels, "test_per_class", test_per_class)
    pool = _read(train_images, train_labels, "train_per_class", train_per_class)
    return Dataset(pool=pool, test=test, class_names=CLASS_NAMES)


def default_folder() -> Path:
    """Where EMNIST's files lie if no folder is named: $FEDCB2O_DATA, or a folder in the user's cache."""
    import pooch  # type: ignore[import-untyped]

    named = os.environ.get("FEDCB2O_DATA")
    return Path(named) if named else Path(pooch.os_cache("fedcb2o")) / "emnist"


def find(folder: Path) -> tuple[Path, Path, Path, Path]:
    """The files in `folder`, in the order of `PARTS`: those of the one set that is complete there.

    Raises DataError that says which file is missing, or that two sets lie there.
    """
    folder = folder.expanduser()
    found = {name: [_plain_or_gzip(folder, f"{name}-{part}") for part in PARTS] for name in SETS}
    match [name for name in SETS if None not in found[name]]:
        case [name]:
            images, labels, test_images, test_labels = (path for path in found[name] if path is not None)
            return images, labels, test_images, test_labels
        case [_, *_]:
            # Which images were used must never depend on an order of preference that nobody sees.
            raise DataError(f"{folder} holds two sets of EMNIST files, {' and '.join(SETS)}; keep one of them there")
    started = [name for name in SETS if any(found[name])]
    missing = [f"{name}-{PARTS[found[name].index(None)]}" for name in started or SETS]
    here = "" if folder.is_dir() else " (there is no such folder)"
    raise DataError(f"EMNIST: no file {' or '.join(missing)}, plain or .gz, in {folder}{here}; {CURE}")


def _plain_or_gzip(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _read(images: Path, labels: Path, parameter: str, per_class: int | None) -> Shard:
    y = np.concatenate([np.empty(0, np.uint8), *_blocks(labels, ())])
    if len(y) and y.max() >= len(CLASS_NAMES):
        raise DataError(f"{labels}: labels must be between 0 and {len(CLASS_NAMES) - 1}, but there is a {y.max()}")
    counts = np.bincount(y, minlength=len(CLASS_NAMES))
    by_class = np.argsort(y, kind="stable")
    rank = np.arange(len(y)) - (counts.cumsum() - counts)[y[by_class]]  # of a sample within its class
    keep = np.sort(by_class[rank < (per_class or len(y))])
    x = np.empty((len(keep), SIDE, SIDE), np.uint8)
    count = 0
    for block in _blocks(images, (SIDE, SIDE)):
        lo, hi = np.searchsorted(keep, (count, count + len(block)))
        x[lo:hi] = block[keep[lo:hi] - count].swapaxes(1, 2)  # EMNIST stores its images transposed
        count += len(block)
    if count != len(y):
        raise DataError(f"{images} holds {count} images, but {labels.name} {len(y)} labels; {CURE}")
    fewest = int(counts.argmin())
    if counts[fewest] < (per_class or 1):
        short = f"{labels}: class {CLASS_NAMES[fewest]!r} has {counts[fewest]} samples, fewer than"
        at_most = f"`{parameter}` = {per_class}; set it to at most {counts[fewest]}"
        raise DataError(f"{short} {at_most if counts[fewest] else f'1; {CURE}'}")
    return Shard(torch.from_numpy(x).unsqueeze(1), torch.from_numpy(y[keep]).long())


def _blocks(path: Path, row: tuple[int, ...]) -> Iterator[NDArray[np.uint8]]:
    """The array of unsigned bytes in an IDX file, some rows at a time, each of shape `row`; then that nothing follows.

    An IDX file is 0, 0, the type (8: unsigned byte), the number of dimensions, their sizes as big-endian 32-bit
    integers, and the values.
    """
    magic, width = bytes((0, 0, 8, 1 + len(row))), int(np.prod(row))
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            start = file.read(4)
            if start != magic:
                raise DataError(
                    f"{path} is not an IDX file of bytes in {1 + len(row)} dimensions: it starts with"
                    f" {start.hex() or 'nothing'}, not {magic.hex()}; {CURE}"
                )
            sizes = file.read(4 * (1 + len(row)))
            if len(sizes) < 4 * (1 + len(row)):
                raise DataError(f"{path} is truncated in its header; {CURE}")
            count, *shape = np.frombuffer(sizes, ">u4").tolist()
            if tuple(shape) != row:
                raise DataError(f"{path} holds rows of shape {tuple(shape)}, not {row}; {CURE}")
            for done in range(0, count, BLOCK):
                some = min(BLOCK, count - done)
                values = file.read(some * width)
                if len(values) < some * width:
                    raise DataError(
                        f"{path} is truncated: {count} rows announced, {done + len(values) // width} there; {CURE}"
                    )
                yield np.frombuffer(values, np.uint8).reshape(some, *row)
            if file.read(1):  # also makes gzip check its checksum
                raise DataError(f"{path} goes on after the {count} rows that it announces; {CURE}")
    except gzip.BadGzipFile as error:
        raise DataError(f"{path} is not a gzip file, or a damaged one ({error}); {CURE}") from error
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path} is a truncated or damaged gzip file ({error}); {CURE}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); {CURE}") from error

"""CIFAR-10, 60,000 colour photographs of animals and vehicles, read from the files of its binary version.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009). (The Python version of the files is pickled,
which runs whatever code is in them: it is not read.)
"""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcb2o.data._dataset import Dataset, Shard
from fedcb2o.data.release import (
    IMAGES_PER_BLOCK,
    Release,
    check_per_class,
    find_files,
    open_plain_or_gzip,
    select_per_class,
)
from fedcb2o.errors import DataError

__all__ = ["cifar10"]

RELEASE = Release(
    name="cifar10",
    title="CIFAR-10",
    class_names=(
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    ),
    shape=(3, 32, 32),
    prefixes=("", "cifar-10-batches-bin/"),
    file_names=(*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
    url="https://www.cs.toronto.edu/~kriz",
    md5={"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
)
RECORD_BYTES = 1 + math.prod(RELEASE.shape)


def cifar10(
    *,
    data_dir: Path | None = None,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
) -> Dataset:
    """CIFAR-10: 5000 images of each class in the pool and 1000 in the test set, or the first so many.

    Images are uint8 [n, 3, 32, 32], red, green and blue, in the order of the files. The files lie in `data_dir` or in
    cifar-10-batches-bin in it, or else in `default_folder(RELEASE)`. Raises DataError if one is missing, damaged or of
    another format, or if a class has too few images.
    """
    check_per_class(RELEASE, train_per_class=train_per_class, test_per_class=test_per_class)
    *batches, test_batch = find_files(RELEASE, data_dir)
    test = _read([test_batch], test_batch, "test_per_class", test_per_class)
    pool = _read(
        batches, batches[0].with_name("data_batch_*.bin"), "train_per_class", train_per_class
    )
    return Dataset(pool=pool, test=test, class_names=RELEASE.class_names)


def _read(paths: list[Path], named: Path, parameter: str, per_class: int | None) -> Shard:
    y = np.concatenate(
        [np.empty(0, np.uint8), *(block[:, 0] for path in paths for block in _read_blocks(path))]
    )
    images = (block[:, 1:] for path in paths for block in _read_blocks(path))
    return select_per_class(
        RELEASE, y, images, per_class=per_class, parameter=parameter, labels=named, images=named
    )


def _read_blocks(path: Path) -> Iterator[NDArray[np.uint8]]:
    """The records of a file, some at a time: the label, then the image, a byte a value."""
    with open_plain_or_gzip(path, RELEASE.advice) as file:
        while values := file.read(IMAGES_PER_BLOCK * RECORD_BYTES):
            if len(values) % RECORD_BYTES:
                raise DataError(
                    f"{path} is truncated or of another format: it is no whole number of records of {RECORD_BYTES} bytes;"
                    f" {RELEASE.advice}"
                )
            yield np.frombuffer(values, np.uint8).reshape(-1, RECORD_BYTES)

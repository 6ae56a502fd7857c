"""CIFAR-10: 60,000 colour photographs of animals and vehicles, from its binary files.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009). The pickled Python
version of the files is not read, because unpickling runs code from the file.
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

_CLASSES = "airplane,automobile,bird,cat,deer,dog,frog,horse,ship,truck"
RELEASE = Release(
    name="cifar10",
    title="CIFAR-10",
    class_names=tuple(_CLASSES.split(",")),
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
    """Read CIFAR-10: 5000 training and 1000 test images of each class.

    Args:
        data_dir: Folder of the files, or of their folder cifar-10-batches-bin; None for
            `default_folder(RELEASE)`.

    Returns:
        The data set; images are uint8 [n, 3, 32, 32], red, green and blue, in the order of the
        files.
    """
    check_per_class(RELEASE, train_per_class=train_per_class, test_per_class=test_per_class)
    *batches, test_batch = find_files(RELEASE, data_dir)
    test = _read([test_batch], test_batch, "test_per_class", test_per_class)
    batch_names = batches[0].with_name("data_batch_*.bin")
    pool = _read(batches, batch_names, "train_per_class", train_per_class)
    return Dataset(pool=pool, test=test, class_names=RELEASE.class_names)


def _read(paths: list[Path], name: Path, parameter: str, per_class: int | None) -> Shard:
    labels = [block[:, 0] for path in paths for block in _read_blocks(path)]
    y = np.concatenate([np.empty(0, np.uint8), *labels])
    images = (block[:, 1:] for path in paths for block in _read_blocks(path))
    return select_per_class(
        RELEASE, y, images, per_class=per_class, parameter=parameter, labels=name, images=name
    )


def _read_blocks(path: Path) -> Iterator[NDArray[np.uint8]]:
    """Yield blocks of a file's records, bytes of the label and the image."""
    with open_plain_or_gzip(path, RELEASE.advice) as file:
        while values := file.read(IMAGES_PER_BLOCK * RECORD_BYTES):
            if len(values) % RECORD_BYTES:
                raise DataError(
                    f"{path} is truncated or of another format: it is no whole number of records of"
                    f" {RECORD_BYTES} bytes; {RELEASE.advice}"
                )
            yield np.frombuffer(values, np.uint8).reshape(-1, RECORD_BYTES)

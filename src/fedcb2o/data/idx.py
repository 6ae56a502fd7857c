"""IDX files, the format of MNIST: arrays of images and of labels.

An IDX file holds two zero bytes, the type (8: unsigned byte), the number of dimensions, their sizes
as big-endian 32-bit integers, and the values.
"""

from collections.abc import Iterator
from contextlib import suppress
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


def file_names(*parts: str) -> tuple[str, ...]:
    """Return the names of the images and labels of each part of a release."""
    kinds = ("images-idx3", "labels-idx1")
    return tuple(f"{part}-{kind}-ubyte" for part in parts for kind in kinds)


def read_dataset(
    release: Release,
    data_dir: Path | None,
    *,
    train_per_class: int | None,
    test_per_class: int | None,
    transposed: bool = False,
) -> Dataset:
    """Read the first images of each class from a release's four files.

    With None as their number, all images are read. `transposed` files store images by columns.
    DataError is raised if a file is missing, damaged or of another format, or a class has too few
    images.
    """
    check_per_class(release, train_per_class=train_per_class, test_per_class=test_per_class)
    train_images, train_labels, test_images, test_labels = find_files(release, data_dir)
    other = identify_lookalike(release, test_labels)
    if other is not None:
        raise DataError(f"{test_labels} is {other}'s, not {release.title}'s; {release.advice}")

    def read(images: Path, labels: Path, parameter: str, per_class: int | None) -> Shard:
        y = np.concatenate([np.empty(0, np.uint8), *_read_blocks(labels, (), release.advice)])
        blocks = _read_blocks(images, release.shape[1:], release.advice)
        if transposed:
            blocks = (block.swapaxes(1, 2) for block in blocks)
        return select_per_class(
            release,
            y,
            blocks,
            per_class=per_class,
            parameter=parameter,
            labels=labels,
            images=images,
        )

    test = read(test_images, test_labels, "test_per_class", test_per_class)
    pool = read(train_images, train_labels, "train_per_class", train_per_class)
    return Dataset(pool=pool, test=test, class_names=release.class_names)


def identify_lookalike(release: Release, test_labels: Path) -> str | None:
    """Return the title of another data set whose test labels these are, or None."""
    # Data sets in this format have files of the same names.
    with suppress(DataError), open_plain_or_gzip(test_labels, release.advice) as file:
        start = file.read(64)[8:]  # after the header
        for title, labels in release.lookalikes:
            if start.startswith(labels):
                return title
    return None


def _read_blocks(path: Path, row: tuple[int, ...], advice: str) -> Iterator[NDArray[np.uint8]]:
    """Yield the unsigned bytes of an IDX file in blocks of rows.

    Refuses a file with further bytes.
    """
    magic = bytes((0, 0, 8, 1 + len(row)))
    width = int(np.prod(row))
    with open_plain_or_gzip(path, advice) as file:
        # 1. The header.
        start = file.read(4)
        if start != magic:
            raise DataError(
                f"{path} is not an IDX file of bytes in {1 + len(row)} dimensions: it starts with"
                f" {start.hex() or 'nothing'}, not {magic.hex()}; {advice}"
            )
        sizes = file.read(4 * (1 + len(row)))
        if len(sizes) < 4 * (1 + len(row)):
            raise DataError(f"{path} is truncated in its header; {advice}")
        count, *shape = np.frombuffer(sizes, ">u4").tolist()
        if tuple(shape) != row:
            raise DataError(f"{path} holds rows of shape {tuple(shape)}, not {row}; {advice}")

        # 2. The values.
        for done in range(0, count, IMAGES_PER_BLOCK):
            num_rows = min(IMAGES_PER_BLOCK, count - done)
            values = file.read(num_rows * width)
            if len(values) < num_rows * width:
                raise DataError(
                    f"{path} is truncated: {count} rows announced, {done + len(values) // width}"
                    f" there; {advice}"
                )
            yield np.frombuffer(values, np.uint8).reshape(num_rows, *row)

        # 3. The end; reading it also makes gzip check its checksum.
        if file.read(1):
            raise DataError(f"{path} goes on after the {count} rows that it announces; {advice}")

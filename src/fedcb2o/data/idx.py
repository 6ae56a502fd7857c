"""IDX files, the format of MNIST and its kin: an array of images and one of labels, for training and for testing.

An IDX file is 0, 0, the type (8: unsigned byte), the number of dimensions, their sizes as big-endian 32-bit integers,
and the values.
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


def read_dataset(
    release: Release,
    data_dir: Path | None,
    *,
    train_per_class: int | None,
    test_per_class: int | None,
    transposed: bool = False,
) -> Dataset:
    """The first images of each class in the four files of a release: training images and labels, test images and
    labels. `transposed` says that the files store images by columns.

    Raises DataError if a file is missing, damaged or of another format, or if a class has too few images.
    """
    check_per_class(release, train_per_class=train_per_class, test_per_class=test_per_class)
    train_images, train_labels, test_images, test_labels = find_files(release, data_dir)
    if (other := identify_lookalike(release, test_labels)) is not None:
        raise DataError(f"{test_labels} is {other}'s, not {release.title}'s; {release.advice}")

    def shard(images: Path, labels: Path, parameter: str, per_class: int | None) -> Shard:
        y = np.concatenate([np.empty(0, np.uint8), *_read_blocks(labels, (), release.advice)])
        blocks = _read_blocks(images, release.shape[1:], release.advice)
        upright = (block.swapaxes(1, 2) for block in blocks) if transposed else blocks
        return select_per_class(
            release,
            y,
            upright,
            per_class=per_class,
            parameter=parameter,
            labels=labels,
            images=images,
        )

    test = shard(test_images, test_labels, "test_per_class", test_per_class)
    pool = shard(train_images, train_labels, "train_per_class", train_per_class)
    return Dataset(pool=pool, test=test, class_names=release.class_names)


def identify_lookalike(release: Release, test_labels: Path) -> str | None:
    """The data set that a file of labels is of, if it is another one whose files have the same names; or None."""
    with suppress(DataError), open_plain_or_gzip(test_labels, release.advice) as file:
        start = file.read(64)[8:]  # after the header
        return next(
            (title for title, labels in release.lookalikes if start.startswith(labels)), None
        )
    return None


def _read_blocks(path: Path, row: tuple[int, ...], cure: str) -> Iterator[NDArray[np.uint8]]:
    """The unsigned bytes in an IDX file, some rows at a time, each of shape `row`; and that nothing follows them."""
    magic = bytes((0, 0, 8, 1 + len(row)))
    width = int(np.prod(row))
    with open_plain_or_gzip(path, cure) as file:
        start = file.read(4)
        if start != magic:
            raise DataError(
                f"{path} is not an IDX file of bytes in {1 + len(row)} dimensions: it starts with"
                f" {start.hex() or 'nothing'}, not {magic.hex()}; {cure}"
            )
        sizes = file.read(4 * (1 + len(row)))
        if len(sizes) < 4 * (1 + len(row)):
            raise DataError(f"{path} is truncated in its header; {cure}")
        count, *shape = np.frombuffer(sizes, ">u4").tolist()
        if tuple(shape) != row:
            raise DataError(f"{path} holds rows of shape {tuple(shape)}, not {row}; {cure}")
        for done in range(0, count, IMAGES_PER_BLOCK):
            some = min(IMAGES_PER_BLOCK, count - done)
            values = file.read(some * width)
            if len(values) < some * width:
                raise DataError(
                    f"{path} is truncated: {count} rows announced, {done + len(values) // width} there; {cure}"
                )
            yield np.frombuffer(values, np.uint8).reshape(some, *row)
        if file.read(1):  # also makes gzip check its checksum
            raise DataError(f"{path} goes on after the {count} rows that it announces; {cure}")

"""MNIST, Fashion-MNIST and EMNIST: 28x28 images in IDX files, plain or gzip.

An IDX file holds two zero bytes, the type (8: unsigned byte), the number of dimensions, their sizes
as big-endian 32-bit integers, and the values.

- MNIST: LeCun, Bottou, Bengio and Haffner, "Gradient-Based Learning Applied to Document
  Recognition" (1998).
- Fashion-MNIST: Xiao, Rasul and Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking
  Machine Learning Algorithms" (2017). Debian's package dataset-fashion-mnist has the same files.
- EMNIST: Cohen, Afshar, Tapson and van Schaik, "EMNIST: an extension of MNIST to handwritten
  letters" (2017). The official "balanced" release and files of the same format with the name
  emnist47 are both read.
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


def _file_names(*parts: str) -> tuple[str, ...]:
    """Return the names of the images and labels of each part of a release."""
    kinds = ("images-idx3", "labels-idx1")
    return tuple(f"{part}-{kind}-ubyte" for part in parts for kind in kinds)


MNIST = Release(
    name="mnist",
    title="MNIST",
    class_names=tuple("0123456789"),
    shape=(1, 28, 28),
    prefixes=("",),
    file_names=_file_names("train", "t10k"),
    url="https://ossci-datasets.s3.amazonaws.com/mnist",  # PyTorch's copy of the four files
    md5={
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    },
    lookalikes=(("Fashion-MNIST", bytes((9, 2, 1, 1, 6, 1, 4, 6, 5, 7))),),
)
_CLOTHES = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"
FASHION_MNIST = Release(
    name="fashion_mnist",
    title="Fashion-MNIST",
    class_names=tuple(_CLOTHES.split(",")),
    shape=(1, 28, 28),
    prefixes=("",),
    file_names=_file_names("train", "t10k"),
    url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    md5={
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    },
    system_folder=Path("/usr/share/datasets/fashion-mnist"),
    lookalikes=(("MNIST", bytes((7, 2, 1, 0, 4, 1, 4, 9, 5, 9))),),
)
EMNIST = Release(
    name="emnist",
    title="EMNIST",
    class_names=tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt"),
    shape=(1, 28, 28),
    prefixes=("emnist-balanced-", "emnist47-"),
    file_names=_file_names("train", "test"),
    optional_files=("emnist-balanced-mapping.txt",),
    url="https://biometrics.nist.gov/cs_links/EMNIST",
    md5={"gzip.zip": "58c8d27c78d21e728a6bc7b3cc06412e"},
)
_NUM_DIGITS = 10


def mnist(
    *,
    data_dir: Path | None = None,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
) -> Dataset:
    """Read MNIST: 60,000 training and 10,000 test images.

    Every class has at least 5421 training and 892 test images.

    Returns:
        The data set; images are uint8 [n, 1, 28, 28] in the order of the files.
    """
    return _read_dataset(
        MNIST, data_dir, train_per_class=train_per_class, test_per_class=test_per_class
    )


def fashion_mnist(
    *,
    data_dir: Path | None = None,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
) -> Dataset:
    """Read Fashion-MNIST: 6000 training and 1000 test images of each class.

    Returns:
        The data set; images are uint8 [n, 1, 28, 28] in the order of the files.
    """
    return _read_dataset(
        FASHION_MNIST, data_dir, train_per_class=train_per_class, test_per_class=test_per_class
    )


def emnist(
    *,
    data_dir: Path | None = None,
    train_per_class: int | None = 900,
    test_per_class: int | None = 296,
    letters: bool = False,
) -> Dataset:
    """Read EMNIST.

    The default numbers give exactly balanced classes with both sets of files.

    Args:
        letters: Whether to keep the 37 letters alone, as the classes 0 to 36.

    Returns:
        The data set; images are uint8 [n, 1, 28, 28], upright, in the order of the files.
    """
    dataset = _read_dataset(
        EMNIST,
        data_dir,
        train_per_class=train_per_class,
        test_per_class=test_per_class,
        transposed=True,
    )
    if not letters:
        return dataset
    return Dataset(
        pool=_letters(dataset.pool),
        test=_letters(dataset.test),
        class_names=dataset.class_names[_NUM_DIGITS:],
    )


def _letters(shard: Shard) -> Shard:
    is_letter = shard.y >= _NUM_DIGITS
    return Shard(shard.x[is_letter], shard.y[is_letter] - _NUM_DIGITS)


def _read_dataset(
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

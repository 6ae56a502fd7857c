"""MNIST, 70,000 handwritten digits, read from its IDX files.

LeCun, Bottou, Bengio and Haffner, "Gradient-Based Learning Applied to Document Recognition" (1998).
"""

from pathlib import Path

from fedcb2o.data import idx
from fedcb2o.data._dataset import Dataset
from fedcb2o.data.release import Release

__all__ = ["mnist"]

RELEASE = Release(
    name="mnist",
    title="MNIST",
    class_names=tuple("0123456789"),
    shape=(1, 28, 28),
    prefixes=("",),
    file_names=(
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    ),
    url="https://ossci-datasets.s3.amazonaws.com/mnist",  # PyTorch's copy of the four files
    md5={
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    },
    lookalikes=(("Fashion-MNIST", bytes((9, 2, 1, 1, 6, 1, 4, 6, 5, 7))),),
)


def mnist(
    *,
    data_dir: Path | None = None,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
) -> Dataset:
    """MNIST: 60,000 images in the pool and 10,000 in the test set, or the first so many of each class.

    Images are uint8 [n, 1, 28, 28] in the order of the files; there are at least 5421 of a class in the pool and 892
    in the test set. The files lie in `data_dir`, or else in `default_folder(RELEASE)`. Raises DataError if one is
    missing, damaged or of another format, or if a class has too few images.
    """
    return idx.read_dataset(
        RELEASE, data_dir, train_per_class=train_per_class, test_per_class=test_per_class
    )

"""MNIST: 70,000 handwritten digits, from IDX files.

LeCun, Bottou, Bengio and Haffner, "Gradient-Based Learning Applied to Document Recognition" (1998).
"""

from pathlib import Path

from fedcb2o.data import idx
from fedcb2o.data._dataset import Dataset
from fedcb2o.data.release import Release

RELEASE = Release(
    name="mnist",
    title="MNIST",
    class_names=tuple("0123456789"),
    shape=(1, 28, 28),
    prefixes=("",),
    file_names=idx.file_names("train", "t10k"),
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
    """Read MNIST: 60,000 training and 10,000 test images.

    Every class has at least 5421 training and 892 test images.

    Args:
        data_dir: Folder of the files; None for `default_folder(RELEASE)`.
        train_per_class: First training images of each class; None for all.
        test_per_class: First test images of each class; None for all.

    Returns:
        The data set; images are uint8 [n, 1, 28, 28] in the order of the files.

    Raises:
        DataError: A file is missing, damaged or of another format, or a class has too few images.
    """
    return idx.read_dataset(
        RELEASE, data_dir, train_per_class=train_per_class, test_per_class=test_per_class
    )

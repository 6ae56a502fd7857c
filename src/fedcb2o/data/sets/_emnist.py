"""EMNIST: 47 balanced classes of handwritten digits and letters, from IDX files.

Cohen, Afshar, Tapson and van Schaik, "EMNIST: an extension of MNIST to handwritten letters" (2017).
The official "balanced" release and files of the same format with the name emnist47 are both read,
plain or gzip.
"""

from pathlib import Path

from fedcb2o.data import idx
from fedcb2o.data._dataset import Dataset
from fedcb2o.data.release import Release

RELEASE = Release(
    name="emnist",
    title="EMNIST",
    class_names=tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt"),
    shape=(1, 28, 28),
    prefixes=("emnist-balanced-", "emnist47-"),
    file_names=(
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "test-images-idx3-ubyte",
        "test-labels-idx1-ubyte",
    ),
    optional_files=("emnist-balanced-mapping.txt",),
    url="https://biometrics.nist.gov/cs_links/EMNIST",
    md5={"gzip.zip": "58c8d27c78d21e728a6bc7b3cc06412e"},
)


def emnist(
    *,
    data_dir: Path | None = None,
    train_per_class: int | None = 900,
    test_per_class: int | None = 296,
) -> Dataset:
    """Read EMNIST.

    The default numbers give exactly balanced classes with both sets of files.

    Args:
        data_dir: Folder of the files; None for `default_folder(RELEASE)`.
        train_per_class: First training images of each class; None for all.
        test_per_class: First test images of each class; None for all.

    Returns:
        The data set; images are uint8 [n, 1, 28, 28], upright, in the order of the files.

    Raises:
        DataError: A file is missing, damaged or of another format, or a class has too few images.
    """
    return idx.read_dataset(
        RELEASE,
        data_dir,
        train_per_class=train_per_class,
        test_per_class=test_per_class,
        transposed=True,
    )

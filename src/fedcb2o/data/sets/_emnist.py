"""EMNIST, 47 balanced classes of handwritten digits and letters, read from its IDX files.

Cohen, Afshar, Tapson and van Schaik, "EMNIST: an extension of MNIST to handwritten letters" (2017). The official
"balanced" release and files of the same format under the name emnist47 are read alike, plain or gzip.
"""

from pathlib import Path

from fedcb2o.data import idx
from fedcb2o.data._dataset import Dataset
from fedcb2o.data.release import Release

__all__ = ["emnist"]

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
    """EMNIST with the first `train_per_class` and `test_per_class` images of each class; None keeps all.

    Images are uint8 [n, 1, 28, 28], upright, in the order of the files. The defaults give exactly balanced classes
    with either set of files. The files lie in `data_dir`, or else in `default_folder(RELEASE)`. Raises DataError if
    one is missing, damaged or of another format, or if a class has too few images.
    """
    return idx.read_dataset(
        RELEASE,
        data_dir,
        train_per_class=train_per_class,
        test_per_class=test_per_class,
        transposed=True,
    )

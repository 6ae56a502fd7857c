"""EMNIST: 47 balanced classes of handwritten digits and letters, from IDX files.

Cohen, Afshar, Tapson and van Schaik, "EMNIST: an extension of MNIST to handwritten letters" (2017).
The official "balanced" release and files of the same format with the name emnist47 are both read,
plain or gzip.
"""

from pathlib import Path

from fedcb2o.data import idx
from fedcb2o.data._dataset import Dataset, Shard
from fedcb2o.data.release import Release

RELEASE = Release(
    name="emnist",
    title="EMNIST",
    class_names=tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt"),
    shape=(1, 28, 28),
    prefixes=("emnist-balanced-", "emnist47-"),
    file_names=idx.file_names("train", "test"),
    optional_files=("emnist-balanced-mapping.txt",),
    url="https://biometrics.nist.gov/cs_links/EMNIST",
    md5={"gzip.zip": "58c8d27c78d21e728a6bc7b3cc06412e"},
)
_NUM_DIGITS = 10


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
        data_dir: Folder of the files; None for `default_folder(RELEASE)`.
        train_per_class: First training images of each class; None for all.
        test_per_class: First test images of each class; None for all.
        letters: Whether to keep the 37 letters alone, as the classes 0 to 36.

    Returns:
        The data set; images are uint8 [n, 1, 28, 28], upright, in the order of the files.

    Raises:
        DataError: A file is missing, damaged or of another format, or a class has too few images.
    """
    dataset = idx.read_dataset(
        RELEASE,
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

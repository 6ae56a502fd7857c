"""Fashion-MNIST: 70,000 photographs of clothing in the format of MNIST, from IDX files.

Xiao, Rasul and Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
Algorithms" (2017). Debian's package dataset-fashion-mnist has the same files.
"""

from pathlib import Path

from fedcb2o.data import idx
from fedcb2o.data._dataset import Dataset
from fedcb2o.data.release import Release

RELEASE = Release(
    name="fashion_mnist",
    title="Fashion-MNIST",
    class_names=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    shape=(1, 28, 28),
    prefixes=("",),
    file_names=idx.file_names("train", "t10k"),
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


def fashion_mnist(
    *,
    data_dir: Path | None = None,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
) -> Dataset:
    """Read Fashion-MNIST: 6000 training and 1000 test images of each class.

    Args:
        data_dir: Folder of the files; None for `default_folder(RELEASE)`.
        train_per_class: First training images of each class; None for all.
        test_per_class: First test images of each class; None for all.

    Returns:
        The data set; images are uint8 [n, 1, 28, 28] in the order of the files.

    Raises:
        DataError: A file is missing, damaged, MNIST's or of another format, or a class has too few
            images.
    """
    return idx.read_dataset(
        RELEASE, data_dir, train_per_class=train_per_class, test_per_class=test_per_class
    )

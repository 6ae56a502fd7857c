"""The commands for data sets: emnist, mnist, fashion_mnist, cifar10."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

if TYPE_CHECKING:
    from fedcb2o.data import Release

_SourceOption = Annotated[
    Path | None,
    Option(
        "--from",
        metavar="DIR",
        help="Folder with the files, or with the official archive, instead of a download.",
    ),
]
_DataDirOption = Annotated[
    Path | None, Option("--data-dir", help="Folder for the files. Default: the user's cache.")
]


def emnist(source: _SourceOption = None, data_dir: _DataDirOption = None) -> Path:
    """Get EMNIST (Cohen et al. 2017): a download, IDX files or gzip.zip."""
    from fedcb2o.data.sets._mnist import EMNIST

    return _get(EMNIST, source, data_dir, "emnist-small-fedassay")


def mnist(source: _SourceOption = None, data_dir: _DataDirOption = None) -> Path:
    """Get MNIST (LeCun et al. 1998): a download or IDX files."""
    from fedcb2o.data.sets._mnist import MNIST

    return _get(MNIST, source, data_dir, "digits-fedassay --set data.name=mnist")


def fashion_mnist(source: _SourceOption = None, data_dir: _DataDirOption = None) -> Path:
    """Get Fashion-MNIST (Xiao et al. 2017): a download or IDX files."""
    from fedcb2o.data.sets._mnist import FASHION_MNIST

    return _get(FASHION_MNIST, source, data_dir, "digits-fedassay --set data.name=fashion_mnist")


def cifar10(source: _SourceOption = None, data_dir: _DataDirOption = None) -> Path:
    """Get CIFAR-10 (Krizhevsky 2009): a download of its binary version or files."""
    from fedcb2o.data.sets._cifar10 import RELEASE

    example = "digits-fedassay --set data.name=cifar10 --set model.name=resnet"
    return _get(RELEASE, source, data_dir, example)


def _get(release: "Release", source: Path | None, data_dir: Path | None, example: str) -> Path:
    from fedcb2o.data.downloads import download, import_files
    from fedcb2o.data.release import default_folder, user_folder

    if source is None:
        target = data_dir or default_folder(release)
        files = download(release, target)
    else:
        target = data_dir or user_folder(release)
        files = import_files(release, source, target)
    print(f"{len(files)} files in {target}")
    if data_dir is not None:
        example += f" --data-dir {target}"
    print(f"Example of use: fedcb2o run {example}")
    return target

"""The commands for data sets: emnist, mnist, fashion_mnist, cifar10."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fedcb2o.data.release import Release

_SourceOption = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="DIR",
        help="Take files at hand: the folder of them, or of the official archive.",
    ),
]
_DataDirOption = Annotated[
    Path | None, typer.Option("--data-dir", help="Where to put them. Default: the user's cache.")
]


def emnist(source: _SourceOption = None, data_dir: _DataDirOption = None) -> Path:
    """Get EMNIST (Cohen et al. 2017): download it, checked by its checksum, or take IDX files or gzip.zip at hand."""
    from fedcb2o.data.sets._emnist import RELEASE

    return _get(RELEASE, source, data_dir, "emnist-small-fedcb2o")


def mnist(source: _SourceOption = None, data_dir: _DataDirOption = None) -> Path:
    """Get MNIST (LeCun et al. 1998): download it, checked by its checksums, or take IDX files at hand."""
    from fedcb2o.data.sets._mnist import RELEASE

    return _get(RELEASE, source, data_dir, "digits-fedcb2o --set data.name=mnist")


def fashion_mnist(source: _SourceOption = None, data_dir: _DataDirOption = None) -> Path:
    """Get Fashion-MNIST (Xiao et al. 2017): download it, checked by its checksums, or take IDX files at hand."""
    from fedcb2o.data.sets._fashion_mnist import RELEASE

    return _get(RELEASE, source, data_dir, "digits-fedcb2o --set data.name=fashion_mnist")


def cifar10(source: _SourceOption = None, data_dir: _DataDirOption = None) -> Path:
    """Get CIFAR-10 (Krizhevsky 2009): download its binary version, checked by its checksum, or take it at hand."""
    from fedcb2o.data.sets._cifar10 import RELEASE

    return _get(
        RELEASE, source, data_dir, "digits-fedcb2o --set data.name=cifar10 --set model.name=resnet"
    )


def _get(release: "Release", source: Path | None, data_dir: Path | None, example: str) -> Path:
    from fedcb2o.data.downloads import download, import_files
    from fedcb2o.data.release import default_folder, user_folder

    target = data_dir or (default_folder(release) if source is None else user_folder(release))
    written = download(release, target) if source is None else import_files(release, source, target)
    print(f"{len(written)} files in {target}")
    where = "" if data_dir is None else f" --data-dir {target}"
    print(f"Use them so: fedcb2o run {example}{where}")
    return target

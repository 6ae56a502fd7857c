"""Data sets in files: their official release, their folder, and selection of images.

Readers keep the first images of each class, in the order of the files. Only these images and one
block of a file are in memory.
"""

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedcb2o.data._dataset import Shard
from fedcb2o.errors import ConfigError, DataError

IMAGES_PER_BLOCK = 4096
"""Images in memory in addition to those that are kept: 3 MiB of 28x28 pixels."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """The files of a data set of images.

    Attributes:
        name: Name of the data set's function, of `fedcb2o data NAME` and of its folder.
        title: Name in messages.
        shape: Shape of an image, [channels, height, width].
        prefixes: Beginnings of file names, one per set of files. A folder holds one set.
        file_names: Ends of file names. Files are plain or gzip.
        optional_files: Further files of the release.
        md5: Checksum of each file at `url`: the files themselves, or an archive of them.
        system_folder: Folder of the operating system's package, if there is one.
        lookalikes: Data sets with the same file names: their titles, and the beginning of their
            test labels.
    """

    name: str
    title: str
    class_names: tuple[str, ...]
    shape: tuple[int, int, int]
    prefixes: tuple[str, ...]
    file_names: tuple[str, ...]
    optional_files: tuple[str, ...] = ()
    url: str
    md5: Mapping[str, str]
    system_folder: Path | None = None
    lookalikes: tuple[tuple[str, bytes], ...] = ()

    @property
    def archive(self) -> str | None:
        """Name of the archive that holds the files; None if `url` offers the files themselves."""
        return next((name for name in self.md5 if name.endswith((".zip", ".tar.gz"))), None)

    @property
    def advice(self) -> str:
        """Cure for files that are missing or damaged, at the end of an error message."""
        return (
            f"get the files with `fedcb2o data {self.name}`, or name the folder that holds them"
            " with `--data-dir`"
        )


def user_folder(release: Release) -> Path:
    """Return the folder for downloaded files: $FEDCB2O_DATA, or the user's cache.

    It need not exist.
    """
    import pooch  # type: ignore[import-untyped]

    named = os.environ.get("FEDCB2O_DATA")
    if named:
        return Path(named)
    return Path(pooch.os_cache("fedcb2o")) / release.name


def default_folder(release: Release) -> Path:
    """Return the folder that is read by default.

    It is `user_folder`, or the system's folder where only that one holds files.
    """
    folder = user_folder(release)
    system = release.system_folder
    if system is None or any(any(files) for files in _files_by_prefix(release, folder).values()):
        return folder
    is_complete = any(all(files) for files in _files_by_prefix(release, system).values())
    return system if is_complete else folder


def find_files(release: Release, folder: Path | None) -> tuple[Path, ...]:
    """Return the files of the one complete set in a folder, in the order of `file_names`.

    The folder is `default_folder` for None. DataError is raised if a file is missing, or the folder
    holds two complete sets.
    """
    if folder is None:
        folder = default_folder(release)
    folder = folder.expanduser()
    files = _files_by_prefix(release, folder)
    complete = [prefix for prefix in release.prefixes if None not in files[prefix]]
    if len(complete) > 1:
        # No hidden order of preference may decide which images are used.
        examples = " and ".join(f"{prefix}{release.file_names[0]}" for prefix in complete)
        raise DataError(
            f"{folder} holds two sets of {release.title} files (see {examples}); keep one of them"
            " there"
        )
    if complete:
        return tuple(path for path in files[complete[0]] if path is not None)

    incomplete = [prefix for prefix in release.prefixes if any(files[prefix])]
    missing = [
        prefix + release.file_names[files[prefix].index(None)]
        for prefix in incomplete or release.prefixes
    ]
    hint = "" if folder.is_dir() else " (there is no such folder)"
    raise DataError(
        f"{release.title}: no file {' or '.join(missing)}, plain or .gz, in {folder}{hint};"
        f" {release.advice}"
    )


def _files_by_prefix(release: Release, folder: Path) -> dict[str, list[Path | None]]:
    """Return the files of each set in a folder, None for each missing file."""
    return {
        prefix: [find_plain_or_gzip(folder, prefix + name) for name in release.file_names]
        for prefix in release.prefixes
    }


def find_plain_or_gzip(folder: Path, name: str) -> Path | None:
    """Return a file, given by its plain name, or its gzip form; None without either."""
    candidates = (folder / name, folder / f"{name}.gz")
    return next((path for path in candidates if path.is_file()), None)


@contextmanager
def open_plain_or_gzip(path: Path, advice: str) -> Iterator[gzip.GzipFile | BufferedReader]:
    """Open a plain or gzip file for reading, uncompressed.

    `advice` is the cure in messages. DataError is raised if the file cannot be read, is damaged or
    is truncated.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield file
    except gzip.BadGzipFile as error:
        raise DataError(
            f"{path} is not a gzip file, or a damaged one ({error}); {advice}"
        ) from error
    except (EOFError, zlib.error) as error:
        raise DataError(
            f"{path} is a truncated or damaged gzip file ({error}); {advice}"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); {advice}") from error


def check_per_class(release: Release, **counts: int | None) -> None:
    """Refuse a number of images per class below 1; None is all images."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"`{name}` of {release.name} must be at least 1, got {value}")


def select_per_class(
    release: Release,
    y: NDArray[np.uint8],
    blocks: Iterable[NDArray[np.uint8]],
    *,
    per_class: int | None,
    parameter: str,
    labels: Path,
    images: Path,
) -> Shard:
    """Read the first `per_class` images of each class, in the order of the files; None for all.

    `blocks` are blocks of images, in the order of the labels `y` of all images. The other arguments
    are for messages. DataError is raised if a label is not a class, the number of images differs
    from that of labels, or a class has too few images.
    """
    names = release.class_names
    if len(y) and y.max() >= len(names):
        raise DataError(
            f"{labels}: labels must be between 0 and {len(names) - 1}, but there is a {y.max()}"
        )

    # 1. Select the samples by their rank within their class.
    counts = np.bincount(y, minlength=len(names))
    by_class = np.argsort(y, kind="stable")
    rank = np.arange(len(y)) - (counts.cumsum() - counts)[y[by_class]]
    selected = np.sort(by_class[rank < (per_class or len(y))])

    # 2. Copy their images, block by block.
    x = np.empty((len(selected), *release.shape), np.uint8)
    count = 0
    for block in blocks:
        start, stop = np.searchsorted(selected, (count, count + len(block)))
        x[start:stop] = block[selected[start:stop] - count].reshape(-1, *release.shape)
        count += len(block)
    if count != len(y):
        raise DataError(
            f"{images} holds {count} images, but {labels.name} {len(y)} labels; {release.advice}"
        )

    # 3. Refuse too few images.
    smallest = int(counts.argmin())
    if counts[smallest] < (per_class or 1):
        limit = f"1; {release.advice}"
        if counts[smallest]:
            limit = f"`{parameter}` = {per_class}; set it to at most {counts[smallest]}"
        raise DataError(
            f"{labels}: class {names[smallest]!r} has {counts[smallest]} samples, fewer than"
            f" {limit}"
        )
    return Shard(torch.from_numpy(x), torch.from_numpy(y[selected]).long())

"""Data sets that lie in files: what these are called, where they are, where they come from, and how images are read.

Of every class the first so many images are kept, in the order of the files; no more than these and one block of a file
are in memory.
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

IMAGES_PER_BLOCK = 4096  # images in memory beside those that are kept: 3 MiB of 28 x 28 pixels


@dataclass(frozen=True, kw_only=True)
class Release:
    """The files of a data set of images.

    `name` is that of its function, of `fedcb2o data NAME` and of its folder. A file is one of `parts` after one of
    `sets`, which a folder holds one of, plain or gzip; `beside` may lie there too. `md5` are the checksums of what
    `url` serves: the files themselves, or the archive that they are in. `shape` is that of an image. `packaged` is
    where a package of the operating system puts the files. `lookalikes` are data sets whose files have the same names:
    their titles, and how their test labels begin.
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
        """The archive that the files are published in, if they are."""
        return next((name for name in self.md5 if name.endswith((".zip", ".tar.gz"))), None)

    @property
    def advice(self) -> str:
        """What to do about files that are missing or damaged."""
        return f"get the files with `fedcb2o data {self.name}`, or name the folder that holds them with `--data-dir`"


def user_folder(release: Release) -> Path:
    """Where a data set's files are put if no folder is named: $FEDCB2O_DATA, or a folder in the user's cache."""
    import pooch  # type: ignore[import-untyped]

    named = os.environ.get("FEDCB2O_DATA")
    return Path(named) if named else Path(pooch.os_cache("fedcb2o")) / release.name


def default_folder(release: Release) -> Path:
    """Where a data set's files lie if no folder is named: `own_folder`, or where they are packaged if none is there."""
    own = user_folder(release)
    packaged = release.system_folder
    if packaged is None or any(any(files) for files in _files_by_prefix(release, own).values()):
        return own
    return (
        packaged
        if any(all(files) for files in _files_by_prefix(release, packaged).values())
        else own
    )


def find_files(release: Release, folder: Path | None) -> tuple[Path, ...]:
    """The files in `folder`, or in `default_folder`, in the order of `parts`: those of the one set complete there.

    Raises DataError that says which file is missing, or that two sets lie there.
    """
    folder = default_folder(release) if folder is None else folder.expanduser()
    found = _files_by_prefix(release, folder)
    whole = [name for name in release.prefixes if None not in found[name]]
    if len(whole) > 1:
        # Which images were used must never depend on an order of preference that nobody sees.
        first = " and ".join(f"{name}{release.file_names[0]}" for name in whole)
        raise DataError(
            f"{folder} holds two sets of {release.title} files (see {first}); keep one of them there"
        )
    if whole:
        return tuple(path for path in found[whole[0]] if path is not None)
    started = [name for name in release.prefixes if any(found[name])]
    missing = [
        name + release.file_names[found[name].index(None)] for name in started or release.prefixes
    ]
    here = "" if folder.is_dir() else " (there is no such folder)"
    raise DataError(
        f"{release.title}: no file {' or '.join(missing)}, plain or .gz, in {folder}{here}; {release.advice}"
    )


def _files_by_prefix(release: Release, folder: Path) -> dict[str, list[Path | None]]:
    """The files of each set in a folder, in the order of `parts`; None for each that is not there."""
    return {
        name: [find_plain_or_gzip(folder, name + part) for part in release.file_names]
        for name in release.prefixes
    }


def find_plain_or_gzip(folder: Path, name: str) -> Path | None:
    """The file of that name in `folder`, plain or else gzip; None if there is neither."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


@contextmanager
def open_plain_or_gzip(path: Path, advice: str) -> Iterator[gzip.GzipFile | BufferedReader]:
    """The content of a file, plain or gzip; raises DataError where it cannot be read."""
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


def check_per_class(release: Release, **given: int | None) -> None:
    """Raises ConfigError for a number of images of each class that is not None and below 1."""
    for name, value in given.items():
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
    """The first `per_class` images of each class out of those in `blocks`, whose labels are y; None keeps all.

    Messages name the `parameter` that `per_class` comes from, and the files. Raises DataError if labels are no classes,
    are not as many as the images, or are too few of a class.
    """
    names = release.class_names
    if len(y) and y.max() >= len(names):
        raise DataError(
            f"{labels}: labels must be between 0 and {len(names) - 1}, but there is a {y.max()}"
        )
    counts = np.bincount(y, minlength=len(names))
    by_class = np.argsort(y, kind="stable")
    rank = (
        np.arange(len(y)) - (counts.cumsum() - counts)[y[by_class]]
    )  # of a sample within its class
    keep = np.sort(by_class[rank < (per_class or len(y))])
    x = np.empty((len(keep), *release.shape), np.uint8)
    count = 0
    for block in blocks:
        lo, hi = np.searchsorted(keep, (count, count + len(block)))
        x[lo:hi] = block[keep[lo:hi] - count].reshape(-1, *release.shape)
        count += len(block)
    if count != len(y):
        raise DataError(
            f"{images} holds {count} images, but {labels.name} {len(y)} labels; {release.advice}"
        )
    fewest = int(counts.argmin())
    if counts[fewest] < (per_class or 1):
        short = f"{labels}: class {names[fewest]!r} has {counts[fewest]} samples, fewer than"
        at_most = f"`{parameter}` = {per_class}; set it to at most {counts[fewest]}"
        raise DataError(f"{short} {at_most if counts[fewest] else f'1; {release.advice}'}")
    return Shard(torch.from_numpy(x), torch.from_numpy(y[keep]).long())

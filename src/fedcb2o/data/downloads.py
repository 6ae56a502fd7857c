"""How the files of a data set get to where they are read: from their official release, or from files at hand.

Files are written beside their place, read through there, and only then renamed into it: what is half written never
counts as present.
"""

import fcntl
import gzip
import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO

import pooch  # type: ignore[import-untyped]
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from fedcb2o.data import cifar10, emnist, fashion_mnist, mnist
from fedcb2o.data.idx import identify_lookalike
from fedcb2o.data.release import Release, find_files, find_plain_or_gzip
from fedcb2o.errors import DataError
from fedcb2o.safe_stdio import safe_streams

_STAGING_PREFIX = (
    ".incoming-"  # how the names of folders begin whose files are not yet known to be whole
)
_READERS = {"cifar10": cifar10, "emnist": emnist, "fashion_mnist": fashion_mnist, "mnist": mnist}
_ARCHIVE_ERRORS = (
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
)


@safe_streams()
def download(release: Release, target: Path, *, progress: bool = True) -> list[Path]:
    """The files of a data set, fetched into the folder `target` unless a whole set lies there already.

    What is fetched is checked by its MD5; an archive is not kept. `progress` shows bars on standard error. Raises
    DataError, and leaves nothing behind, if something cannot be fetched, checked or unpacked.
    """
    target = target.expanduser()
    try:
        return _verify_files(release, target)
    except DataError:
        _require_single_set(release, target, release.prefixes[0])
    cure = (
        f"fetch {', '.join(release.md5)} from {release.url} in another way and run"
        f" `fedcb2o data {release.name} --from DIR`, DIR being the folder that holds what you fetched"
    )
    with _staging(release, target) as staging:
        for name, md5 in release.md5.items():
            url = f"{release.url}/{name}"
            _fetch(release, url, staging / name, progress, cure)
            got = pooch.file_hash(str(staging / name), alg="md5")
            if got != md5:
                raise DataError(
                    f"{url} is damaged or another file: its MD5 is {got}, not {md5}; try again, or {cure}"
                )
        if release.archive is None:
            return _install(release, _verify_source(release, staging, release.url, cure), target)
        name = f"{release.url}/{release.archive}"
        return _install(
            release,
            _unpack(release, staging / release.archive, staging / "files", name, cure),
            target,
        )


def import_files(release: Release, source: Path, target: Path) -> list[Path]:
    """The files of a data set at hand, read through and copied into the folder `target`.

    `source` is a folder with the files of one set, plain or gzip, or with the archive of the release, or that archive.
    Raises DataError, and leaves nothing behind, if files are missing or damaged.
    """
    source = source.expanduser()
    target = target.expanduser()
    with _staging(release, target) as staging:
        if release.archive is not None:
            archive = source if source.is_file() else source / release.archive
            if archive.is_file():
                cure = f"fetch it again from {release.url}, or run `fedcb2o data {release.name}`"
                return _install(
                    release,
                    _unpack(release, archive, staging / "files", str(archive), cure),
                    target,
                )
        try:
            find_files(release, source)
        except DataError as error:
            raise DataError(str(error).replace(release.advice, _required_files(release))) from error
        files = _verify_files(release, source)
        if source.resolve() == target.resolve():
            return files
        files += _optional_files(release, files[0].parent)
        return _install(
            release, [shutil.copyfile(path, staging / path.name) for path in files], target
        )


def _required_files(release: Release) -> str:
    """What `--from` needs to find."""
    archive = "" if release.archive is None else f"{release.archive}, or "
    files = ", ".join(release.prefixes[0] + part for part in release.file_names)
    return f"DIR in `fedcb2o data {release.name} --from DIR` must hold {archive}these files, plain or .gz: {files}"


def _verify_files(release: Release, folder: Path) -> list[Path]:
    """The files of the set in `folder`, every one read to its end; raises DataError if one is missing or damaged."""
    _READERS[release.name](data_dir=folder, train_per_class=1, test_per_class=1)
    return list(find_files(release, folder))


def _optional_files(release: Release, folder: Path) -> list[Path]:
    return [folder / name for name in release.optional_files if (folder / name).is_file()]


@contextmanager
def _staging(release: Release, target: Path) -> Iterator[Path]:
    """A folder in `target`, so that a rename moves files out of it, which is removed whatever happens: after a kill
    by the next one."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            with _folder_lock(target):  # so that nobody sweeps what was made and is not yet locked
                for left in target.glob(f"{_STAGING_PREFIX}*"):
                    with (
                        suppress(BlockingIOError, FileNotFoundError),
                        _folder_lock(left, fcntl.LOCK_NB),
                    ):
                        shutil.rmtree(left)
                folder = Path(
                    stack.enter_context(
                        tempfile.TemporaryDirectory(prefix=_STAGING_PREFIX, dir=target)
                    )
                )
                stack.enter_context(_folder_lock(folder))
            yield folder
    except OSError as error:
        raise DataError(
            f"{release.title}'s files cannot be put into {target}: {error.strerror or error}"
        ) from error


@contextmanager
def _folder_lock(folder: Path, how: int = 0) -> Iterator[None]:
    """Keep others from locking a folder; by LOCK_NB raises BlockingIOError where one has it, else waits for it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | how)
        yield
    finally:
        os.close(descriptor)


def _require_single_set(release: Release, target: Path, name: str) -> None:
    """Raises DataError if files of another set than `name` lie in `target`, or of another data set under the same
    names: a folder holds one set."""
    for other in (
        each + part for each in release.prefixes if each != name for part in release.file_names
    ):
        if (path := find_plain_or_gzip(target, other)) is not None:
            raise DataError(
                f"{target} holds another set of {release.title} files ({path.relative_to(target)}); remove it or name"
                " another folder"
            )
    labels = find_plain_or_gzip(target, name + release.file_names[-1])
    if labels is not None and (owner := identify_lookalike(release, labels)) is not None:
        raise DataError(
            f"{target} holds {owner}'s files, which have the same names; name another folder"
        )


def _fetch(release: Release, url: str, path: Path, progress: bool, cure: str) -> None:
    what = TextColumn(f"{release.title} {path.name}")
    columns = (what, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not progress) as bars:
        try:
            pooch.HTTPDownloader(progressbar=_ProgressBar(bars))(url, str(path), None)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk; requests' own errors carry no number
            if (answer := getattr(error, "response", None)) is not None:
                answer.close()  # pooch leaves it open
            raise DataError(
                f"{release.title} cannot be fetched from {url} ({error}); try again, or {cure}"
            ) from error


class _ProgressBar:
    """What pooch asks of a progress bar, over a task of rich."""

    def __init__(self, bars: Progress) -> None:
        self.total = 0
        self._bars, self._task = bars, bars.add_task("", total=None)

    def update(self, step: int) -> None:
        self._bars.update(self._task, total=self.total or None, advance=step)

    def reset(self) -> None:
        self._bars.reset(self._task)

    def close(self) -> None:
        self._bars.stop_task(self._task)


def _unpack(release: Release, archive: Path, folder: Path, name: str, cure: str) -> list[Path]:
    """The files of a data set out of the archive that the user knows as `name`, written into `folder`."""
    files = [release.prefixes[0] + part for part in release.file_names]
    wanted = {*files, *(f"{file}.gz" for file in files), *release.optional_files}
    kind, members = (
        ("zip", _zip_members) if str(release.archive).endswith(".zip") else ("tar", _tar_members)
    )
    folder.mkdir()
    try:
        for base, packed in members(archive, wanted):
            with packed, (folder / base).open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 2**20)
    except _ARCHIVE_ERRORS as error:
        raise DataError(
            f"{name} is not a {kind} archive, or a damaged one ({error}); {cure}"
        ) from error
    return _verify_source(release, folder, name, cure)


# The files in an archive that are wanted, by their last names: never by the path that an archive asks for.


def _zip_members(archive: Path, wanted: Collection[str]) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(archive) as archived:
        for member in archived.infolist():
            if (base := PurePosixPath(member.filename).name) in wanted:
                yield base, archived.open(member)


def _tar_members(archive: Path, wanted: Collection[str]) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(archive) as archived:
        for member in archived:
            base = PurePosixPath(member.name).name
            packed = archived.extractfile(member) if member.isfile() else None
            if base in wanted and packed is not None:
                yield base, packed


def _verify_source(release: Release, folder: Path, name: str, cure: str) -> list[Path]:
    """The files in `folder`, and what may lie beside them, which came from `name`; raises DataError if not whole."""
    try:
        files = _verify_files(release, folder)
    except DataError as error:
        told = str(error).replace(f"{folder}/", "").replace(release.advice, cure)
        raise DataError(f"in what came from {name}: {told}") from error
    return files + _optional_files(release, folder)


def _install(release: Release, files: Iterable[Path], target: Path) -> list[Path]:
    """Moves whole files into `target`, in place of earlier ones, and gives their paths there."""
    files = list(files)
    _require_single_set(
        release, target, next(name for name in release.prefixes if files[0].name.startswith(name))
    )
    for path in files:
        path.replace(target / path.name)
        # The plain form of a file and the gzip one are one file: what is not replaced is removed.
        (target / (path.stem if path.suffix == ".gz" else f"{path.name}.gz")).unlink(
            missing_ok=True
        )
    return [target / path.name for path in files]

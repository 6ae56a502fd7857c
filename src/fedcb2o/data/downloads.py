"""Download and import of data sets' files.

Files are written to a staging folder, read completely there, and then renamed to their place. A
partly written file never counts as present.
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

from fedcb2o.data.release import Release, find_files, find_plain_or_gzip
from fedcb2o.data.sets import cifar10, emnist, fashion_mnist, mnist
from fedcb2o.data.sets._mnist import identify_lookalike
from fedcb2o.errors import DataError
from fedcb2o.safe_files import is_own_folder
from fedcb2o.safe_stdio import safe_streams

_STAGING_PREFIX = ".incoming-"  # beginning of the names of staging folders
_READERS = {"cifar10": cifar10, "emnist": emnist, "fashion_mnist": fashion_mnist, "mnist": mnist}
_MAX_FILE_BYTES = 2**31  # of a file in an archive; the longest of EMNIST has 2**29
_ARCHIVE_ERRORS = (
    FileExistsError,
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
    """Download the files of a data set, unless the folder holds a complete set.

    Downloads are checked by their MD5. Archives are not kept. Progress bars are on standard error.
    DataError is raised if a download, its check or its unpacking failed; no new files are left.
    """
    target = target.expanduser()
    try:
        return _verify_files(release, target)
    except DataError:
        # Damaged files are replaced, but never those of another set.
        _require_single_set(release, target, release.prefixes[0])

    advice = (
        f"fetch {', '.join(release.md5)} from {release.url} in another way and run"
        f" `fedcb2o data {release.name} --from DIR`, DIR being the folder that holds the files"
    )
    with _staging(release, target) as staging:
        for name, md5 in release.md5.items():
            url = f"{release.url}/{name}"
            _fetch(release, url, staging / name, progress, advice)
            actual = pooch.file_hash(str(staging / name), alg="md5")
            if actual != md5:
                raise DataError(
                    f"{url} is damaged or another file: its MD5 is {actual}, not {md5}; try again,"
                    f" or {advice}"
                )

        if release.archive is None:
            files = _verify_source(release, staging, release.url, advice)
        else:
            url = f"{release.url}/{release.archive}"
            archive = staging / release.archive
            files = _unpack(release, archive, staging / "files", url, advice)
        return _install(release, files, target)


def import_files(release: Release, source: Path, target: Path) -> list[Path]:
    """Read through local files of a data set and copy them into a folder.

    `source` is the release's archive, or a folder that holds it or the files, plain or gzip.
    DataError is raised if files are missing or damaged; no new files are left.
    """
    source = source.expanduser()
    target = target.expanduser()
    with _staging(release, target) as staging:
        if release.archive is not None:
            archive = source if source.is_file() else source / release.archive
            if archive.is_file():
                advice = f"fetch it again from {release.url}, or run `fedcb2o data {release.name}`"
                files = _unpack(release, archive, staging / "files", str(archive), advice)
                return _install(release, files, target)

        try:
            # Looked for first, so that the error names the files that `--from` needs.
            find_files(release, source)
        except DataError as error:
            message = str(error).replace(release.advice, _required_files(release))
            raise DataError(message) from error
        files = _verify_files(release, source)
        if source.resolve() == target.resolve():
            return files
        files += _optional_files(release, files[0].parent)
        copies = [shutil.copyfile(path, staging / path.name) for path in files]
        return _install(release, copies, target)


def _required_files(release: Release) -> str:
    """Describe the files that `--from` needs."""
    archive = "" if release.archive is None else f"{release.archive}, or "
    files = ", ".join(release.prefixes[0] + name for name in release.file_names)
    return (
        f"DIR in `fedcb2o data {release.name} --from DIR` must hold {archive}these files, plain or"
        f" .gz: {files}"
    )


def _verify_files(release: Release, folder: Path) -> list[Path]:
    """Read every file of a set to its end; refuses missing or damaged ones."""
    _READERS[release.name](data_dir=folder, train_per_class=1, test_per_class=1)
    return list(find_files(release, folder))


def _optional_files(release: Release, folder: Path) -> list[Path]:
    return [folder / name for name in release.optional_files if (folder / name).is_file()]


@contextmanager
def _staging(release: Release, target: Path) -> Iterator[Path]:
    """Create a temporary folder inside `target`, for renames out of it.

    After a kill, the user's next call removes it.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            # The lock on `target` protects a new folder until it has its own lock.
            with _folder_lock(target):
                for abandoned in filter(is_own_folder, target.glob(f"{_STAGING_PREFIX}*")):
                    with (
                        suppress(BlockingIOError, FileNotFoundError),
                        _folder_lock(abandoned, fcntl.LOCK_NB),
                    ):
                        shutil.rmtree(abandoned)
                temporary = tempfile.TemporaryDirectory(prefix=_STAGING_PREFIX, dir=target)
                folder = Path(stack.enter_context(temporary))
                stack.enter_context(_folder_lock(folder))
            yield folder
    except OSError as error:
        raise DataError(
            f"{release.title}'s files cannot be put into {target}: {error.strerror or error}"
        ) from error


@contextmanager
def _folder_lock(folder: Path, flags: int = 0) -> Iterator[None]:
    """Lock a folder; with LOCK_NB, raises BlockingIOError where another process has the lock."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
        yield
    finally:
        os.close(descriptor)


def _require_single_set(release: Release, target: Path, prefix: str) -> None:
    """Refuse a folder with files of another set or data set."""
    others = [other for other in release.prefixes if other != prefix]
    for other in others:
        for name in release.file_names:
            path = find_plain_or_gzip(target, other + name)
            if path is not None:
                raise DataError(
                    f"{target} holds another set of {release.title} files"
                    f" ({path.relative_to(target)}); remove it or name another folder"
                )

    labels = find_plain_or_gzip(target, prefix + release.file_names[-1])
    if labels is None:
        return
    lookalike = identify_lookalike(release, labels)
    if lookalike is not None:
        raise DataError(
            f"{target} holds {lookalike}'s files, which have the same names; name another folder"
        )


def _fetch(release: Release, url: str, path: Path, progress: bool, advice: str) -> None:
    columns = (
        TextColumn(f"{release.title} {path.name}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not progress) as bars:
        try:
            pooch.HTTPDownloader(progressbar=_ProgressBar(bars))(url, str(path), None)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # a disk error; errors of requests have no number
            response = getattr(error, "response", None)
            if response is not None:
                response.close()  # pooch leaves it open
            raise DataError(
                f"{release.title} cannot be fetched from {url} ({error}); try again, or {advice}"
            ) from error


class _ProgressBar:
    """The interface of a pooch progress bar for a task of rich."""

    def __init__(self, bars: Progress) -> None:
        self.total = 0
        self._bars = bars
        self._task = bars.add_task("", total=None)

    def update(self, step: int) -> None:
        self._bars.update(self._task, total=self.total or None, advance=step)

    def reset(self) -> None:
        self._bars.reset(self._task)

    def close(self) -> None:
        self._bars.stop_task(self._task)


def _unpack(release: Release, archive: Path, folder: Path, name: str, advice: str) -> list[Path]:
    """Unpack the files of a data set from an archive, called `name` in messages."""
    # Only regular files with expected names are unpacked, never to a path from the archive. (On
    # Python 3.11 pooch's `Untar` follows the paths and links of an archive.)
    files = [release.prefixes[0] + file_name for file_name in release.file_names]
    wanted = {*files, *(f"{file}.gz" for file in files), *release.optional_files}
    is_zip = str(release.archive).endswith(".zip")
    members = _zip_members if is_zip else _tar_members
    folder.mkdir()
    try:
        for base, packed in members(archive, wanted):
            with packed, (folder / base).open("xb") as unpacked:
                size = 0
                while block := packed.read(2**20):
                    size += len(block)
                    if size > _MAX_FILE_BYTES:
                        raise DataError(
                            f"{base} in {name} is longer than {_MAX_FILE_BYTES} bytes; {advice}"
                        )
                    unpacked.write(block)
    except _ARCHIVE_ERRORS as error:
        kind = "zip" if is_zip else "tar"
        raise DataError(
            f"{name} is not a {kind} archive, or a damaged one ({error}); {advice}"
        ) from error
    return _verify_source(release, folder, name, advice)


def _zip_members(archive: Path, wanted: Collection[str]) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(archive) as opened:
        for member in opened.infolist():
            base = PurePosixPath(member.filename).name
            if base in wanted:
                yield base, opened.open(member)


def _tar_members(archive: Path, wanted: Collection[str]) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(archive) as opened:
        for member in opened:
            base = PurePosixPath(member.name).name
            if base not in wanted or not member.isfile():
                continue
            packed = opened.extractfile(member)
            if packed is not None:
                yield base, packed


def _verify_source(release: Release, folder: Path, name: str, advice: str) -> list[Path]:
    """Verify the files in `folder`, which came from `name`, and add the optional files."""
    try:
        files = _verify_files(release, folder)
    except DataError as error:
        message = str(error).replace(f"{folder}/", "").replace(release.advice, advice)
        raise DataError(f"in what came from {name}: {message}") from error
    return files + _optional_files(release, folder)


def _install(release: Release, files: Iterable[Path], target: Path) -> list[Path]:
    """Move verified files into `target`, in place of earlier ones."""
    files = list(files)
    prefixes = [prefix for prefix in release.prefixes if files[0].name.startswith(prefix)]
    _require_single_set(release, target, prefixes[0])
    for path in files:
        path.replace(target / path.name)
        # The plain and the gzip form are one file: the other form is removed.
        other_form = path.stem if path.suffix == ".gz" else f"{path.name}.gz"
        (target / other_form).unlink(missing_ok=True)
    return [target / path.name for path in files]

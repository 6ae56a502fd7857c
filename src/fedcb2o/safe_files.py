"""Access to files in places that others can write to.

Another user of such a place can put a link, a FIFO, a device or a huge file under any name. These
functions open regular files only. They never wait for a writer, and they read within a bound.

Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "link").symlink_to("/etc/passwd")
    >>> try:
    ...     read_regular(folder / "link", 100)
    ... except OSError as error:
    ...     print(error.strerror)
    it is a link, not a regular file
"""

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
}
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_APPEND = (
    os.O_WRONLY
    | os.O_CREAT
    | os.O_APPEND
    | os.O_NOFOLLOW
    | os.O_NONBLOCK
    | os.O_NOCTTY
    | os.O_CLOEXEC
)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def describe_kind(mode: int) -> str:
    """Return the kind of a directory entry by its `st_mode`, such as "a FIFO"."""
    return _KINDS.get(stat.S_IFMT(mode), "a regular file")


def open_regular(
    path: Path | str, *, follow_links: bool = False, folder: int | None = None
) -> BinaryIO:
    """Open a regular file for reading, without waiting.

    With `follow_links`, for a path that the user named, a link to a regular file is accepted.
    `folder` is the descriptor of an open folder, to which `path` is relative. `strerror` of an
    OSError says which check failed.
    """
    _check_regular(os.stat(path, dir_fd=folder, follow_symlinks=follow_links), path)
    descriptor = os.open(path, _READ | (0 if follow_links else os.O_NOFOLLOW), dir_fd=folder)
    try:
        _check_regular(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(path: Path | str, *, follow_links: bool = False) -> None:
    """Raise OSError unless a file is regular, before a library opens it by its name."""
    _check_regular(Path(path).stat(follow_symlinks=follow_links), path)


def read_regular(
    path: Path | str, max_bytes: int, *, follow_links: bool = False, folder: int | None = None
) -> bytes:
    """Read a regular file as `open_regular` opens it; OSError beyond `max_bytes`."""
    with open_regular(path, follow_links=follow_links, folder=folder) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is longer than {max_bytes} bytes", str(path))
    return content


def create_exclusive(path: Path | str, mode: int = 0o600, *, folder: int | None = None) -> int:
    """Create a file and open it for writing; any entry of this name is an error."""
    return os.open(path, _CREATE, mode, dir_fd=folder)


def open_append(path: Path | str, mode: int = 0o600) -> int:
    """Open or create a regular file for appending; one with a second name is refused."""
    try:
        descriptor = os.open(path, _APPEND, mode)
    except OSError:
        if os.path.lexists(path):
            check_regular(path)  # the better message
        raise
    try:
        status = os.fstat(descriptor)
        _check_regular(status, path)
        if status.st_nlink > 1:
            raise OSError(errno.EMLINK, "it has another name too (a hard link)", str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def owner_of_new_files(folder: Path | str) -> int | None:
    """Return the user that owns new files in a folder; None for the superuser.

    It is this process's user; a network mount may store another one.
    """
    user = os.geteuid()
    if user == 0:
        return None
    if Path(folder).stat().st_uid == user:
        return user
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_uid


def is_own_folder(path: Path | str) -> bool:
    """Return True for a real folder of this user that others cannot change."""
    try:
        status = Path(path).lstat()
    except OSError:
        return False
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return is_own and not status.st_mode & 0o022


def open_folder(path: Path | str, *, follow_links: bool = False, folder: int | None = None) -> int:
    """Open a folder, as the base of relative paths that no exchanged link can redirect."""
    status = os.stat(path, dir_fd=folder, follow_symlinks=follow_links)
    if not stat.S_ISDIR(status.st_mode):
        kind = describe_kind(status.st_mode)
        raise OSError(errno.ENOTDIR, f"it is {kind}, not a folder", str(path))
    flags = _READ | os.O_DIRECTORY | (0 if follow_links else os.O_NOFOLLOW)
    return os.open(path, flags, dir_fd=folder)


def _check_regular(status: os.stat_result, path: Path | str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = describe_kind(status.st_mode)
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))

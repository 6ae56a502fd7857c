"""User functions on other machines: the files of their modules travel with the work.

Ray sends files for a whole connection only, and one connection may have several runs. So a process
of the cluster unpacks them into a folder named by their checksum, first on its `sys.path`.

>>> pack_modules([])
b''
"""

import hashlib
import io
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedcb2o.errors import RunError
from fedcb2o.safe_files import is_own_folder

MAX_ARCHIVE_BYTES = 2**28

_INSTALLED_FOLDERS = [
    Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib", "platlib")
]
_FOLDER_PREFIX = "fedcb2o-code-"
_SHIPPED_PATH = re.compile(rf"[^\s'\"(]*/{_FOLDER_PREFIX}\w+/([^\s'\":,)]+)")
_SKIPPED_FOLDERS = {"__pycache__", ".git", ".venv"}


def pack_modules(names: Iterable[str]) -> bytes:
    """Pack the modules that user functions need into a ZIP archive.

    These are the loaded modules next to those of the functions, unless they are installed.
    Functions are given as "module:function". The archive is empty bytes if there is nothing to
    send. RunError is raised if the modules cannot be read, or are too large.
    """
    folders = set()
    for module in _loaded_modules(names):
        folders |= {path.parent for path in _module_paths(module.partition(".")[0])}
    # multiprocessing gives the main module a second name, and its file may be "<stdin>".
    main = sys.modules["__main__"]
    modules = list(sys.modules.items())
    tops = [name for name, module in modules if name.isidentifier() and module is not main]
    paths = {path for name in tops for path in _module_paths(name) if path.parent in folders}
    if not paths:
        return b""

    try:
        archive = _zip(sorted(paths))
        if len(archive) > MAX_ARCHIVE_BYTES:
            raise ValueError(f"{len(archive)} bytes are more than {MAX_ARCHIVE_BYTES}")
    except (OSError, ValueError) as error:
        raise RunError(
            f"the modules of user functions cannot be sent to the cluster ({error}): "
            f"{', '.join(map(str, sorted(paths)))}"
        ) from error
    return archive


def runtime_environment(archive: bytes) -> dict[str, Any]:
    """Return the options of Ray that give an archive's code processes of its own."""
    # A process that has imported a module keeps it, whatever a later archive contains. Ray shares
    # processes only between tasks with equal variables.
    if not archive:
        return {}
    return {"runtime_env": {"env_vars": {"FEDCB2O_CODE": _digest(archive)}}}


def user_modules(names: Iterable[str]) -> list[str]:
    """Return the modules of user functions that nodes must be able to import."""
    # Functions that `__main__` defines travel by value.
    return sorted(_loaded_modules(names) - {"__main__"})


def extend_sys_path(path: Sequence[str], archive: bytes) -> None:
    """Import modules from an archive, then as the process that sent the work does.

    `path` is `sys.path` of that process.
    """
    unpacked = [str(_unpack(archive))] if archive else []
    own = [entry for entry in sys.path if entry not in (*path, *unpacked)]
    sys.path[:] = [*unpacked, *own, *path]


def localize_paths(text: str) -> str:
    """Replace paths of unpacked files in an error by the paths of their originals here."""

    def localize(match: re.Match[str]) -> str:
        paths = [Path(folder, match[1]).absolute() for folder in sys.path]
        return next((str(path) for path in paths if path.is_file()), match[1])

    return _SHIPPED_PATH.sub(localize, text)


def _digest(archive: bytes) -> str:
    return hashlib.sha256(archive).hexdigest()[:16]


def _zip(paths: Iterable[Path]) -> bytes:
    """Pack files and folders; equal content gives equal bytes."""
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in paths:
                for member in [path] if path.is_file() else sorted(path.rglob("*")):
                    name = member.relative_to(path.parent)
                    if member.is_file() and not _SKIPPED_FOLDERS & set(name.parts[1:]):
                        # Without a date, the time of a checkout does not change the checksum.
                        info = zipfile.ZipInfo(name.as_posix(), date_time=(1980, 1, 1, 0, 0, 0))
                        archive.writestr(info, member.read_bytes())
        return file.getvalue()


def _unpack(archive: bytes) -> Path:
    """Unpack an archive once for each node and user; return its folder."""
    folder = Path(tempfile.gettempdir(), f"{_FOLDER_PREFIX}{os.getuid()}_{_digest(archive)}")
    if not folder.exists():
        partial = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
        with zipfile.ZipFile(io.BytesIO(archive)) as file:
            file.extractall(partial)
        try:
            partial.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(partial)
    # Another user could have put other code there: its name is no secret.
    if not is_own_folder(folder):
        raise PermissionError(
            f"{folder} is no folder of this user, or others may write to it: remove it, or set "
            "TMPDIR to a folder of your own"
        )
    return folder


def _loaded_modules(names: Iterable[str]) -> set[str]:
    return {name.partition(":")[0] for name in names} & sys.modules.keys()


def _module_paths(name: str) -> Iterator[Path]:
    """Yield the file of a top-level module, or the folders of a package, unless installed."""
    module = sys.modules.get(name)
    if module is None or name == "fedcb2o":
        return
    file = getattr(module, "__file__", None)
    if not file and name == "__main__":
        file = "-"  # a notebook's code is in its working directory
    files = getattr(module, "__path__", None) or ([file] if file else [])
    for path in map(Path.absolute, map(Path, files)):
        in_packages = {"site-packages", "dist-packages"} & set(path.parts)
        is_installed = in_packages or any(map(path.is_relative_to, _INSTALLED_FOLDERS))
        if path.suffix in ("", ".py") and not is_installed:
            yield path

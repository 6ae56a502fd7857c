"""Users' own functions on other machines: the files of their modules travel with the work."""

import logging
import re
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ray._private.runtime_env.py_modules import upload_py_modules_if_needed

from fedcb2o.errors import RunError

_INSTALLED_FOLDERS = [
    Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib", "platlib")
]
"""Where modules lie that nodes have of their own, or are told to install."""
_SHIPPED_PATH = re.compile(
    r"[^\s'\"(]*/py_modules_files/_ray_pkg_\w+/([^\s'\":,)]+)"
)  # a file there that came with the work


def runtime_environment(names: Iterable[str]) -> dict[str, Any]:
    """The options by which Ray's tasks and actors find own functions, named "module:function": with them go the modules
    loaded here that lie beside theirs and are not installed. Without such there is nothing to say.

    It is asked for whenever work is given out: Ray keeps what it got once, but forgets what nothing needed for a while.
    Raises RunError where it is too much to be sent.
    """
    folders = {
        place.parent
        for module in _loaded_modules(names)
        for place in _module_paths(module.partition(".")[0])
    }
    main = sys.modules[
        "__main__"
    ]  # which multiprocessing gives another name too, and whose file may be "<stdin>"
    tops = [
        name
        for name, module in list(sys.modules.items())
        if name.isidentifier() and module is not main
    ]
    beside = sorted(
        {str(place) for name in tops for place in _module_paths(name) if place.parent in folders}
    )
    if not beside:
        return {}
    try:
        with tempfile.TemporaryDirectory(prefix="fedcb2o-parts-") as scratch:
            sent = upload_py_modules_if_needed(
                {"py_modules": beside},
                include_gitignore=True,
                scratch_dir=scratch,
                logger=logging.getLogger("ray"),
            )
    except Exception as error:
        told = " ".join(str(error).split())
        raise RunError(
            f"the modules of own parts cannot be sent to the cluster ({told}): {', '.join(beside)}"
        ) from error
    return {"runtime_env": sent}


def user_modules(names: Iterable[str]) -> list[str]:
    """The modules of own functions that nodes must be able to import: what `__main__` defines goes by value."""
    return sorted(_loaded_modules(names) - {"__main__"})


def extend_sys_path(path: Sequence[str]) -> None:
    """In a process of the cluster: modules are looked for in what came with the work, then as where that was begun."""
    sys.path[:] = [*(each for each in sys.path if each not in path), *path]


def localize_paths(text: str) -> str:
    """What was told in a process of the cluster, with those files that came with the work called as they are here."""

    def here(found: re.Match[str]) -> str:
        places = (Path(folder, found[1]).absolute() for folder in sys.path)
        return str(next(filter(Path.is_file, places), found[1]))

    return _SHIPPED_PATH.sub(here, text)


def _loaded_modules(names: Iterable[str]) -> set[str]:
    return {name.partition(":")[0] for name in names} & sys.modules.keys()


def _module_paths(name: str) -> Iterator[Path]:
    """The file of a module at the top, or the folders of a package; none of what is installed, or of this package."""
    module = sys.modules.get(name)
    if module is None or name == "fedcb2o":
        return
    file = getattr(module, "__file__", None) or (
        "-" if name == "__main__" else ""
    )  # a notebook lies where it runs
    for place in map(
        Path.absolute, map(Path, getattr(module, "__path__", None) or [file] * bool(file))
    ):
        if place.suffix in ("", ".py") and not _is_installed(place):
            yield place


def _is_installed(place: Path) -> bool:
    return bool({"site-packages", "dist-packages"} & set(place.parts)) or any(
        map(place.is_relative_to, _INSTALLED_FOLDERS)
    )

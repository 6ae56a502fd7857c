"""User functions on other machines, which import them from the same folders as this one."""

import hashlib
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def user_modules(names: Iterable[str]) -> list[str]:
    """Return the modules of functions "module:function" that nodes must be able to import."""
    # Functions that `__main__` defines travel by value.
    loaded = {name.partition(":")[0] for name in names} & sys.modules.keys()
    return sorted(loaded - {"__main__"})


def import_path() -> list[str]:
    """Return `sys.path`; processes of the cluster have another current folder."""
    return [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100 ("" is a folder, too)


def extend_sys_path(path: Sequence[str]) -> None:
    """Import modules also as the process does that sent the work."""
    sys.path.extend(entry for entry in path if entry not in sys.path)


def runtime_environment(names: Iterable[str]) -> dict[str, Any]:
    """Return the options of Ray that give the present code of user functions new processes."""
    # A process that has imported a module keeps it. Ray shares processes only between tasks with
    # equal variables.
    modules = [sys.modules[name] for name in user_modules(names)]
    folders = {Path(module.__file__).parent for module in modules if module.__file__}
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    digest = hashlib.sha256()
    for path in sorted(Path(file) for file in files if file):
        if path.parent in folders and path.exists():
            digest.update(path.read_bytes())
    if not folders:
        return {}
    return {"runtime_env": {"env_vars": {"FEDCB2O_CODE": digest.hexdigest()[:16]}}}

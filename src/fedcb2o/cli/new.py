"""The command `new`: a small experiment to start from."""

import os
from importlib import resources
from pathlib import Path
from typing import Annotated

from typer import Argument

from fedcb2o.errors import ConfigError

_FILES = ("mine.py", "mine.toml", "compare.toml")


def new(folder: Annotated[Path, Argument(metavar="DIR", help="Folder of the files.")]) -> Path:
    """Write an experiment of your own, and a grid that compares it with rivals. Both run.

    Example: fedcb2o new lab && cd lab && fedcb2o run mine.toml
    """
    for name in _FILES:
        if os.path.lexists(folder / name):
            raise ConfigError(f"{folder / name} exists: choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    templates = resources.files("fedcb2o") / "cli" / "templates"
    for name in _FILES:
        # Mode "x" refuses a file that appeared after the check.
        with (folder / name).open("x", encoding="utf-8") as file:
            file.write((templates / f"{name}.txt").read_text("utf-8"))
    print(f"Wrote {', '.join(str(folder / name) for name in _FILES)}. Next:")
    print(f"cd {folder} && fedcb2o run mine.toml && fedcb2o report runs/mine")
    print("To compare: fedcb2o bench compare.toml && fedcb2o report runs/compare")
    return folder

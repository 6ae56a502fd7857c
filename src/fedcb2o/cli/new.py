"""The command `new`: the files of an experiment of your own."""

import os
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedcb2o.errors import ConfigError


class _Template(StrEnum):
    """Kind of data, or real peers."""

    tables = "tables"
    images = "images"
    text = "text"
    peers = "peers"


def new(
    folder: Annotated[Path, Argument(metavar="DIR", help="Folder of the files.")],
    template: Annotated[_Template, Option(help="Kind of data, or real peers.")] = _Template.tables,
) -> Path:
    """Write an experiment of your own, and a grid that compares it with rivals. Both run.

    Example: fedcb2o new lab && cd lab && fedcb2o run mine.toml
    """
    names = ["mine.py", "mine.toml"]
    if template is not _Template.peers:
        names.append("compare.toml")
    for name in names:
        if os.path.lexists(folder / name):
            raise ConfigError(f"{folder / name} exists: choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    templates = resources.files("fedcb2o") / "cli" / "templates"
    for name in names:
        own = templates / template.value / f"{name}.txt"
        text = (own if own.is_file() else templates / f"{name}.txt").read_text("utf-8")
        if template is _Template.images:  # of ten classes, and not of three
            text = text.replace("benign_samples = 16", "benign_samples = 60")
        # Mode "x" refuses a file that appeared after the check.
        with (folder / name).open("x", encoding="utf-8") as file:
            file.write(text)
    print(f"Wrote {', '.join(str(folder / name) for name in names)}. Next:")
    if template is _Template.peers:
        print(f"cd {folder} && fedcb2o peer demo mine.toml")
        return folder
    print(f"cd {folder} && fedcb2o run mine.toml && fedcb2o report runs/mine")
    print("To compare: fedcb2o bench compare.toml && fedcb2o report runs/compare")
    return folder

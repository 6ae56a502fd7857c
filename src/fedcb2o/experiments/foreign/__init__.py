"""Experiments of other libraries as grids: ByzFL's config.json and FLPoison's YAML files.

A converter returns a grid with a server (`aggregators.server`) and two lists: the parts that do not
exist here, which the grid leaves out, and the differences of the others.
"""

import importlib
import json
import logging
import re
from pathlib import Path
from typing import Any

from fedcb2o.errors import ConfigError
from fedcb2o.experiments.foreign import byzfl, flpoison
from fedcb2o.safe_files import read_regular

SUFFIXES = (".json", ".yaml", ".yml")
"""Ends of the names of other libraries' files."""

_LOG = logging.getLogger(__name__)
_MAX_BYTES = 2**20
# A key that the files of one library have, its name, and its converter.
_LIBRARIES = (
    ("benchmark_config", "ByzFL", byzfl.convert),
    ("defenses", "FLPoison", flpoison.convert),
)


def read_grid_table(path: Path) -> dict[str, Any]:
    """Return the table of a grid for another library's file; log what is not here."""
    config = _read(path)
    known = [(library, convert) for key, library, convert in _LIBRARIES if key in config]
    if not known:
        keys = " or ".join(f"`{key}` of {library}" for key, library, _ in _LIBRARIES)
        raise ConfigError(f"{path} lacks the key {keys}: a grid of this project ends in .toml")
    ((library, convert),) = known
    try:
        found = convert(config)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        what = error if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}, as a file of {library}: {what}") from error
    lists = {"Not here": found.missing, "Different": found.differences}
    notes = [f"{title}: {'; '.join(items)}." for title, items in lists.items() if items]
    for note in notes:
        _LOG.warning("%s: %s", path, note)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-") or "grid"
    description = " ".join([f"Converted from {library}'s {path.name}.", *notes])
    return {"name": name, "description": description, **found.table}


def _read(path: Path) -> Any:
    try:
        text = read_regular(path, _MAX_BYTES, follow_links=True).decode()
        if path.suffix == ".json":
            config = json.loads(text)
        else:
            config = importlib.import_module("yaml").safe_load(text)
    except ImportError as error:
        raise ConfigError("files in YAML need PyYAML: pip install pyyaml") from error
    except Exception as error:  # of the file system or of a parser
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    return config if isinstance(config, dict) else {}

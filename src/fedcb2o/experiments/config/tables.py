"""Configurations as tables before their validation: presets, TOML files and changes.

>>> from fedcb2o.experiments.config.tables import merge
>>> merge({"name": "sgd", "lr": 1.0}, {"lr": 2.0})
{'name': 'sgd', 'lr': 2.0}
>>> merge({"name": "sgd", "lr": 1.0}, {"name": "adam"})
{'name': 'adam'}
"""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from fedcb2o import plugins, records
from fedcb2o.errors import ConfigError

_RECORDED_FILES = ("config.toml", "grid.toml")
_MAX_KEY_DEPTH = 20  # the longest key of an experiment has 4 parts


def presets() -> dict[str, str]:
    """Return the presets.

    Returns:
        The description of each preset, by its name.
    """
    folder = resources.files("fedcb2o.experiments") / "presets"
    files = [path.name for path in folder.iterdir() if path.name.endswith(".toml")]
    names = sorted(name.removesuffix(".toml") for name in files)
    return {name: str(preset(name).get("description", "")) for name in names}


def preset(name: str) -> dict[str, Any]:
    """Return the table of a preset; the preset that it extends is worked in."""
    folder = resources.files("fedcb2o.experiments") / "presets"
    path = folder / f"{name}.toml"
    if path.is_file():
        return resolve_extends({"name": name, **records.parse_toml(path.read_bytes())})

    config = Path(name) / "config.toml"
    if config.is_file():
        raise ConfigError(
            f"{name} is a run's folder: `fedcb2o run {config} --out {name} --resume` continues the "
            "run; without --resume and with another --out it starts again"
        )
    raise_if_grid_folder(name)
    names = [file.name.removesuffix(".toml") for file in folder.iterdir()]
    recommended = f"{name}-fedassay"
    # The name of a data set alone is the most frequent error, and FedAssay the method to begin
    # with.
    hint = plugins.did_you_mean(recommended if recommended in names else name, sorted(names))
    raise ConfigError(
        f"there is no preset `{name}`.{hint} `fedcb2o presets` lists them; a file's name ends in "
        ".toml"
    )


def raise_if_grid_folder(name: str) -> None:
    """Refuse the folder of a grid, given in place of a configuration."""
    grid = Path(name) / "grid.toml"
    if grid.is_file():
        raise ConfigError(
            f"{name} is a grid's folder: `fedcb2o bench {grid} --out {name} --resume` continues "
            f"the grid, and `fedcb2o report {name}` shows it"
        )


def read_table(path: Path, extending: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a TOML file, and work in the preset or the file that it extends.

    `extending` are the files that extend it.
    """
    try:
        table = records.read_toml(path, follow_links=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read {path}: {reason}") from error
    # A run or a grid of an earlier version has original names of plug-ins and parameters. Its
    # folder may be another person's, so that no other file in it is read.
    if path.name in _RECORDED_FILES:
        return resolve_extends({**_names_of_file(path), **records.current_settings(table)})
    plugins.find_modules_beside(path)
    if "name" not in table:
        table = {**_names_of_file(path), **table}
    return resolve_extends(table, (*extending, path))


def _names_of_file(path: Path) -> dict[str, str]:
    """Return the name and the title of a file's experiment, where the file does not give them."""
    stem = path.stem
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip("._-")
    if name == stem:
        return {"name": stem}
    if not name:
        raise ConfigError(
            f"no name of a run can be made of the file's name, {path}: give the key `name`, with "
            "letters, digits, `.`, `_` and `-`"
        )
    return {"name": name, "title": os.fsencode(stem).decode(errors="replace")}


def resolve_extends(table: dict[str, Any], files: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Merge a table over the preset or file that its key `extends` names, section by section.

    The key is removed from `table`. Without a title in `table` it is that of a preset with the
    same algorithm, or empty: the algorithm decides it. A file is looked for in the folder of the
    last of `files`, from which the table was read.
    """
    name = table.pop("extends", None)
    if name is None:
        return table
    base = _extended_table(str(name), files)
    title = base.pop("title", "")
    for key in ("name", "description"):
        base.pop(key, None)
    if (
        str(name).endswith(".toml")
        or "algorithm" in table
        or "malicious_role" in table.get("agents", {})
    ):
        title = ""
    merged = {key: merge(base.get(key), value) for key, value in table.items()}
    return {**base, "title": title, **merged}


def _extended_table(name: str, files: tuple[Path, ...]) -> dict[str, Any]:
    """Return the table of a preset, or of a file in the folder of the last of `files`."""
    if not name.endswith(".toml"):
        return preset(name)
    if not files:
        raise ConfigError(
            f"`extends` = {name!r} names a file, which only a file can extend: give a preset"
        )
    path = files[-1].parent / name
    if any(path.resolve() == file.resolve() for file in files):
        raise ConfigError(f"{files[-1]}: `extends` = {name!r} leads back to itself")
    return read_table(path, files)


def read_origin(source: str | Path | Mapping[str, Any]) -> tuple[str, dict[str, Any], list[str]]:
    """Return the preset or file from which an experiment comes: its name and table.

    It is the one that a mapping or a file extends, and else the source itself. The keys of
    `agents` that the source changes are the last value.
    """
    files: tuple[Path, ...] = ()
    if isinstance(source, Mapping):
        name, own = str(source.get("name", "")), dict(source)
    elif str(source).endswith(".toml"):
        path = Path(source)
        files = (path,)
        name, own = path.name, records.read_toml(path, follow_links=True)
    else:
        return str(source), preset(str(source)), []
    if "extends" not in own:
        return name, own, []
    name = str(own["extends"])
    return name, _extended_table(name, files), list(own.get("agents", {}))


def merge(base: Any, value: Any) -> Any:
    """Merge tables of one function, key by key; any other value replaces `base`."""
    if not (isinstance(base, Mapping) and isinstance(value, Mapping)):
        return value
    # Parameters of one function would be unknown to another.
    if "name" in value and value["name"] != base.get("name"):
        return value
    return {**base, **{key: merge(base.get(key), item) for key, item in value.items()}}


def apply_changes(table: dict[str, Any], changes: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a table with new values by dotted key, such as {"algorithm.alpha": 2}."""
    for key, value in changes.items():
        path = key.split(".")
        if len(path) > _MAX_KEY_DEPTH:
            raise ConfigError(f"{where}: there is no key of {len(path)} parts")
        table = with_value(table, path, value)
    return table


def with_value(table: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a table with a new value at a path; a function's name there becomes a table."""
    head, *rest = path
    if not rest:
        return {**table, head: value}
    inner = table.get(head)
    if isinstance(inner, str) or callable(inner):  # "x" is short for {name = "x"}
        inner = {"name": inner}
    elif not isinstance(inner, Mapping):
        inner = {}
    if len(rest) > 1:
        return {**table, head: with_value(inner, rest, value)}
    return {**table, head: merge(inner, {rest[0]: value})}


def parse_value(text: str) -> Any:
    """Parse the value of `--set key=value`; text that is no TOML value is a string."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except (ValueError, RecursionError) as error:  # thousands of digits, or of nested lists
        raise ConfigError(f"--set cannot read the value {text[:40]} ...: {error}") from error
    # The text had a line break and further keys, so it is no single value.
    return text if len(table) > 1 else table["value"]

"""Configurations as tables, before they are checked: presets, TOML files, and what goes over what."""

import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from fedcb2o import plugins, records
from fedcb2o.errors import ConfigError

_MAX_KEY_DEPTH = 20  # parts of a key, of which the longest has 4


def to_plain(value: Any) -> Any:
    """A value as TOML has it: functions by their import path, tensors and arrays as lists."""
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return (
        plugins.label(value)
        if callable(value)
        else value.tolist()
        if hasattr(value, "tolist")
        else value
    )


def presets() -> dict[str, str]:
    """The presets' names and what each is, a line each."""
    folder = resources.files("fedcb2o.experiments") / "presets"
    names = sorted(
        path.name.removesuffix(".toml") for path in folder.iterdir() if path.name.endswith(".toml")
    )
    return {name: str(preset(name).get("description", "")) for name in names}


def preset(name: str) -> dict[str, Any]:
    """The table of a preset; raises ConfigError that names the nearest where there is none."""
    folder = resources.files("fedcb2o.experiments") / "presets"
    path = folder / f"{name}.toml"
    if not path.is_file():
        if (Path(name) / "config.toml").is_file():
            raise ConfigError(
                f"{name} is a run's folder: `fedcb2o run {Path(name) / 'config.toml'} --out {name} --resume` goes on "
                "with it, and without --resume and with another --out it is run anew"
            )
        if (Path(name) / "grid.toml").is_file():
            raise ConfigError(
                f"{name} is a grid's folder: `fedcb2o bench {Path(name) / 'grid.toml'} --out {name} --resume` goes on "
                f"with it, and `fedcb2o report {name}` shows it"
            )
        names = [p.name.removesuffix(".toml") for p in folder.iterdir()]
        raise ConfigError(
            f"there is no preset `{name}`.{plugins.did_you_mean(name, names)} `fedcb2o presets` lists them; "
            "a file's name ends in .toml"
        )
    return resolve_extends({"name": name, **records.parse_toml(path.read_bytes())})


def read_table(path: Path) -> dict[str, Any]:
    """The table in a TOML file; raises ConfigError where it cannot be read or is none."""
    try:
        table = records.read_toml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}"
        ) from error
    return resolve_extends({"name": path.stem, **table})


def resolve_extends(table: dict[str, Any]) -> dict[str, Any]:
    """A table over the preset that it `extends`, section by section; what the preset is called is not taken over."""
    name = table.pop("extends", None)
    if name is None:
        return table
    base = {
        key: value
        for key, value in preset(str(name)).items()
        if key not in ("name", "title", "description")
    }
    return {**base, **{key: merge(base.get(key), value) for key, value in table.items()}}


def merge(base: Any, value: Any) -> Any:
    """A value over another: tables are merged, but one that names another function starts anew."""
    if not (isinstance(base, Mapping) and isinstance(value, Mapping)):
        return value
    if "name" in value and value["name"] != base.get("name"):
        return value
    return {**base, **{key: merge(base.get(key), item) for key, item in value.items()}}


def apply_changes(table: dict[str, Any], changes: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A table with some keys changed ("algorithm.alpha": 2); raises ConfigError for one that no table has."""
    for key, value in changes.items():
        path = key.split(".")
        if len(path) > _MAX_KEY_DEPTH:
            raise ConfigError(f"{where}: there is no key of {len(path)} parts")
        table = with_value(table, path, value)
    return table


def with_value(table: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """A table with another value at a path of keys."""
    head, *rest = path
    inner = table.get(head)
    if rest:
        named = isinstance(inner, str) or callable(inner)  # "x" is short for {name = "x"}
        inner = {"name": inner} if named else inner if isinstance(inner, Mapping) else {}
        value = with_value(inner, rest, value) if len(rest) > 1 else merge(inner, {rest[0]: value})
    return {**table, head: value}


def parse_value(text: str) -> Any:
    """The value in `--set key=value`: as in TOML, or a plain word as a string."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except (
        ValueError,
        RecursionError,
    ) as error:  # a number of thousands of digits, lists in lists in lists
        raise ConfigError(f"--set cannot read the value {text[:40]} ...: {error}") from error
    return table["value"] if len(table) == 1 else text

"""Files that are replaced whole."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w
from safetensors import SafetensorError

from fedcb2o.errors import RunError

_TEMPORARY_SUFFIX = ".tmp"
FILE_SUFFIXES = (".json", ".jsonl", ".safetensors", ".toml")
"""How the names of a run's files end."""


def atomic_write(path: Path, content: bytes | Callable[[Path], None]) -> None:
    """Replace `path` whole: by bytes, or by what `content(temporary_path)` writes.

    At any moment, a power cut included, `path` holds the old or the new content. Raises RunError if it cannot be
    written; what was there then stays.
    """
    temporary = path.with_name(path.name + _TEMPORARY_SUFFIX)
    try:
        if isinstance(content, bytes):
            temporary.write_bytes(content)
        else:
            content(temporary)
        fsync(temporary)
        temporary.replace(path)
        fsync(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError | SafetensorError):
            raise write_error(path, error) from error
        raise


def remove_temporaries(folder: Path) -> None:
    """Remove the temporary files that killed processes left in a run's folder or a seed's, to which nobody writes now.

    A file that another program named so stays, unless it has the ending of a run's files too.
    """
    for kind in FILE_SUFFIXES:
        for path in folder.glob(f"*{kind}{_TEMPORARY_SUFFIX}"):
            path.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Replace `path` by `content` as JSON, atomically; NaN and infinities become null."""
    atomic_write(path, to_json(content))


def to_json(content: Mapping[str, object]) -> bytes:
    """`content` as JSON; NaN and infinities become null."""
    return (json.dumps(to_plain(content), indent=1, allow_nan=False) + "\n").encode()


def write_toml(path: Path, content: Mapping[str, object]) -> None:
    """Replace `path` by `content` as TOML, atomically; keys whose value is None are left out, as TOML has no null."""
    atomic_write(path, to_toml(content).encode())


def to_toml(content: Mapping[str, object]) -> str:
    """`content` as TOML; keys whose value is None are left out, as TOML has no null."""
    return tomli_w.dumps(drop_none(content))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises RunError where it cannot be read, DamagedError where it holds none."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise damaged_error(path, "it is gone") from error
    except OSError as error:
        raise read_error(path, error) from error
    except (ValueError, RecursionError) as error:
        raise damaged_error(path, str(error)) from error
    if not isinstance(content, dict):
        raise damaged_error(path, "it holds no object")
    return content


def to_plain(value: object) -> Any:
    """Lists, numbers and text for JSON, from arrays and tensors too; what is not finite becomes None."""
    kind = type(value)  # most are plain numbers in lists, and asked for first
    if kind is float:
        return value if math.isfinite(value) else None  # type: ignore[arg-type]
    if kind is int or kind is str:
        return value
    if kind is list:
        return [to_plain(inner) for inner in value]  # type: ignore[attr-defined]
    if isinstance(value, Mapping):
        return {str(key): to_plain(inner) for key, inner in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [to_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def drop_none(value: Any) -> Any:
    """A table without the keys whose value is None, in whatever depth."""
    if isinstance(value, Mapping):
        return {key: drop_none(inner) for key, inner in value.items() if inner is not None}
    return [drop_none(inner) for inner in value] if isinstance(value, list | tuple) else value


def fsync(path: Path) -> None:
    """Force a file, or a folder's list of files, to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_error(path: Path, error: Exception) -> RunError:
    """What to raise where a file cannot be written."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return RunError(
        f"cannot write {path}: {reason}; nothing already written is lost: "
        "make room (or mend the folder) and give the command again, that of a run with --resume"
    )


_REBUILD_ADVICE = "`fedcb2o run` of the experiment with this --out and --resume makes it again"
_RERUN_ADVICE = "restore it, or move {seed} away: --resume then runs it again, with the same bits"
_REMEDIES = {
    "agents.json": _REBUILD_ADVICE,
    "cells.json": "`fedcb2o bench` of the grid with this --out and --resume makes it again",
    "checkpoint.safetensors": f"records and figures do without it; {_RERUN_ADVICE}",
    "environment.json": f"figures do without it; {_RERUN_ADVICE}",
    "metrics.jsonl": _RERUN_ADVICE,
    "pairs.jsonl": f"`compare` does without it; {_RERUN_ADVICE}",
    "samples.safetensors": _REBUILD_ADVICE,
    "summary.json": _REBUILD_ADVICE,
    "sums.json": f"{_REBUILD_ADVICE}, if the other files fit together",
    "tuning.json": "restore it, or remove it: `fedcb2o bench` with --resume then chooses again, by the same runs",
    "timing.jsonl": "restore it, or remove it to do without its seconds",
}
"""What to do about a damaged file of a seed or a grid, such that nothing else is lost by it."""


def rerun_advice(folder: Path) -> str:
    """What to do where a seed is to be run again."""
    return _RERUN_ADVICE.format(seed=folder.name)


class DamagedError(RunError):
    """A file that does not hold what was written. One that merely cannot be read now is none."""


def damaged_error(path: Path, reason: str) -> DamagedError:
    """What to raise where a file does not hold what was written."""
    cure = _REMEDIES.get(path.name, "restore it").format(seed=path.parent.name)
    return DamagedError(f"{path} is damaged: {reason}; {cure}")


def read_error(path: Path, error: OSError) -> RunError:
    """What to raise where a file that is there cannot be read."""
    return RunError(f"cannot read {path}: {error.strerror or error}")

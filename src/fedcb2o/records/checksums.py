"""What the files of a seed hold, by SHA-256: sums.json, written when the seed begins and when it ends.

Whoever reads a file asks it first, so that a truncated, changed or exchanged one is refused by its name. What grows
meanwhile has its sums in the header of each checkpoint, of what it held then, so that the two cannot part.
"""

import hashlib
import json
import math
import zlib
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fedcb2o.records.files import (
    atomic_write,
    damaged_error,
    drop_none,
    read_error,
    read_json,
    to_json,
    to_plain,
)

MANIFEST_FILE = "sums.json"
NON_RESULT_SETTINGS = ("name", "title", "description", "seeds", "checkpoint_every")
"""The settings that no number of a round depends on."""

Checksum = tuple[int, str]
"""The bytes of a file, or of its beginning, and their SHA-256."""


@dataclass(frozen=True)
class Manifest:
    """The sums of one seed: of which settings, how many rounds it has surely done, whether these are all, and files."""

    seed: int
    settings: str
    rounds: int
    complete: bool
    files: Mapping[str, Checksum]

    @classmethod
    def create(
        cls, folder: Path, seed: int, settings: Mapping[str, Any], rounds: int
    ) -> "Manifest":
        """Of a seed that goes on after `rounds` rounds: of the files that lie there from its beginning. Writes it."""
        return cls(
            seed, settings_digest(settings), rounds, False, _checksum_files(folder, INITIAL_FILES)
        )._write(folder)

    def record_checkpoint(self, folder: Path, rounds: int) -> "Manifest":
        """Of a seed with a checkpoint after `rounds` rounds. Writes that it has one, the first time."""
        return self if self.rounds else replace(self, rounds=rounds)._write(folder)

    def finish(self, folder: Path, rounds: int, lines: Mapping[str, Checksum]) -> "Manifest":
        """Of a seed that has run to its end: each of its files, of those that grew by their sums. Writes it."""
        files = {**self.files, **lines, **_checksum_files(folder, _FINAL_FILES)}
        return replace(self, rounds=rounds, complete=True, files=files)._write(folder)

    def _write(self, folder: Path) -> "Manifest":
        write_json_with_checksum(folder / MANIFEST_FILE, vars(self))
        return self

    @staticmethod
    def remove(folder: Path) -> None:
        """Remove sums.json, since what it knows is written anew."""
        (folder / MANIFEST_FILE).unlink(missing_ok=True)

    @classmethod
    def read(cls, folder: Path) -> "Manifest | None":
        """What sums.json says, or None where there is none; raises DamagedError for another content."""
        path = folder / MANIFEST_FILE
        if not path.exists():
            return None
        found = read_json_with_checksum(path, require_checksum=True)
        try:
            return cls(
                found["seed"],
                found["settings"],
                found["rounds"],
                found["complete"],
                _parse_checksums(found["files"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise damaged_error(path, "it holds no sums") from error

    def has_finished(self, rounds: int) -> bool:
        """Whether the seed has run so many rounds to its end."""
        return self.complete and self.rounds >= rounds

    def matches(self, settings: Mapping[str, Any]) -> bool:
        """Whether the seed is of a run with these settings."""
        return self.settings == settings_digest(settings)

    def can_resume(self, settings: Mapping[str, Any]) -> bool:
        """Whether a run with these settings may have come so far."""
        return self.matches(settings) and self.rounds <= settings.get("rounds", self.rounds)

    def verify(self, folder: Path, name: str) -> Path:
        """The path of a file that holds what was written or, if it still grows, begins with what it held at the last
        checkpoint.

        Raises DamagedError where it does not.
        """
        path = folder / name
        grows = name in LOG_FILES and not self.complete
        expected = (log_checksums(folder) if grows else self.files).get(name)
        if expected is None:
            if path.exists() and not grows:
                raise damaged_error(path, f"it is no file of this seed, by its {MANIFEST_FILE}")
        elif not path.exists():
            if expected[0] and name not in _OPTIONAL_FILES:
                raise damaged_error(path, "it is gone")
        elif checksum_file(path, expected[0]) != expected or (
            not grows and path.stat().st_size != expected[0]
        ):
            raise damaged_error(path, "it does not hold what was written, by its SHA-256")
        return path

    def verify_all(self, folder: Path, *, exclude: Container[str] = ()) -> None:
        """Raises DamagedError unless every file, `but` some, holds what was written."""
        for name in (*self.files, *LOG_FILES):
            if name not in exclude:
                self.verify(folder, name)


INITIAL_FILES = ("environment.json", "agents.json", "samples.safetensors")
"""The files that are written when a seed begins."""
LOG_FILES = ("metrics.jsonl", "pairs.jsonl", "timing.jsonl")
"""The files that grow."""
CHECKPOINT_FILE = "checkpoint.safetensors"
_FINAL_FILES = ("summary.json", CHECKPOINT_FILE)
"""The files that are there, and change no more, when a seed has run to its end."""
_OPTIONAL_FILES = ("timing.jsonl", "samples.safetensors")
"""The files that nothing else depends on: one may do without them."""


def read_checkpoint_header(path: Path) -> dict[str, str]:
    """What a checkpoint's header says; raises DamagedError where it does not add up.

    Its sums have one of the header itself, which older ones lack.
    """
    try:
        with safe_open(path, framework="np") as file:
            header = file.metadata() or {}
        if json.loads(header["sums"]).get("header", total := header_crc(header)) != total:
            raise ValueError("its header does not add up")
    except OSError as error:
        raise read_error(path, error) from error
    except (SafetensorError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise damaged_error(path, str(error)) from error
    return header


def header_crc(header: Mapping[str, str]) -> int:
    """The CRC-32 of a checkpoint's header, without its sums."""
    return zlib.crc32(
        json.dumps({name: header[name] for name in sorted(header) if name != "sums"}).encode()
    )


def log_checksums(folder: Path) -> dict[str, Checksum]:
    """What the files that grow held at the last checkpoint, if there is one that knows."""
    path = folder / CHECKPOINT_FILE
    return (
        _parse_checksums(json.loads(read_checkpoint_header(path).get("lines", "{}")))
        if path.exists()
        else {}
    )


def _parse_checksums(found: Mapping[str, Any]) -> dict[str, Checksum]:
    return {name: (size, total) for name, (size, total) in found.items()}


def _checksum_files(folder: Path, names: Iterable[str]) -> dict[str, Checksum]:
    return {name: checksum_file(folder / name) for name in names if (folder / name).exists()}


def checksum_bytes(content: bytes) -> Checksum:
    """The sum of a file that holds this."""
    return len(content), hashlib.sha256(content).hexdigest()


def checksum_file(path: Path, size: int | None = None) -> Checksum:
    """The sum of a file's first `size` bytes, by default of all."""
    total = hashlib.sha256()
    known = 0
    wanted = math.inf if size is None else size
    with path.open("rb") as file:
        while part := file.read(int(min(wanted - known, 2**20))):
            total.update(part)
            known += len(part)
    return known, total.hexdigest()


def result_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a run's numbers depend on: those that may not differ where it is resumed."""
    return {
        key: value for key, value in settings.items() if key not in (*NON_RESULT_SETTINGS, "rounds")
    }


def canonical_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings such that equal ones are the same, however they were written: 2 and 2.0, a list and a tuple, a key that
    is missing and one without a value."""
    found: dict[str, Any] = _canonical_value(drop_none(settings))
    return found


def _canonical_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _canonical_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical_value(inner) for inner in value]
    if isinstance(value, float):
        return (
            int(value) if value.is_integer() else str(value) if not math.isfinite(value) else value
        )
    return value if isinstance(value, str | bool | int | None) else str(value)


def settings_digest(settings: Mapping[str, Any]) -> str:
    """The SHA-256 of the `identity` of settings, the same before they are written as TOML and after."""
    return hashlib.sha256(
        json.dumps(canonical_settings(result_settings(settings)), sort_keys=True).encode()
    ).hexdigest()


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A table of tables as one, with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= (
            flatten(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return found


def write_json_with_checksum(path: Path, content: Mapping[str, object]) -> None:
    """Replace `path` by `content` as JSON with a sum of its own, atomically; NaN and infinities become null."""
    inner = to_plain(content)
    atomic_write(path, to_json({**inner, "sha256": _content_digest(inner)}))


def read_json_with_checksum(path: Path, *, require_checksum: bool = False) -> dict[str, Any]:
    """The object in a JSON file that `write_sealed` wrote; raises DamagedError where it holds another.

    A file without a sum was written before there were any and is taken as it is, unless there `always` was one.
    """
    content = read_json(path)
    if content.pop("sha256", None) not in (
        (_content_digest(content),) if require_checksum else (None, _content_digest(content))
    ):
        raise damaged_error(path, "it does not hold what was written, whose SHA-256 is in it")
    return content


def read_cells(path: Path) -> list[dict[str, Any]]:
    """The lines of a grid's cells.json, one a run; raises DamagedError where it holds something else."""
    cells = read_json_with_checksum(path).get("cells")
    keys = {"folder", "kind", "setting", "defence", "attack", "floor", "rounds", "seconds", "error"}
    if not isinstance(cells, list) or not all(
        isinstance(cell, dict) and keys <= cell.keys() for cell in cells
    ):
        raise damaged_error(path, "it holds no list of runs")
    return cells


def _content_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

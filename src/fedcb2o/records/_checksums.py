"""Checksums of the files of a seed, in its sums.json.

A reader verifies a file before it uses it, so that a truncated, changed or exchanged file is
refused by name. A growing log has its checksum in the header of each checkpoint, which is the
content at that time.
"""

import hashlib
import json
import math
import zlib
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError, safe_open

from fedcb2o.records._files import (
    atomic_write,
    damaged_error,
    drop_none,
    read_error,
    read_json,
    to_json,
    to_plain,
)
from fedcb2o.records._former_settings import original_settings
from fedcb2o.records._parquet import log_files
from fedcb2o.safe_files import check_regular, open_regular

MANIFEST_FILE = "sums.json"
CHECKPOINT_FILE = "checkpoint.safetensors"
INITIAL_FILES = ("environment.json", "agents.json", "samples.safetensors")
"""Files that are written when a seed begins."""
BEST_FILE = "best.safetensors"
"""Models of the rounds with the lowest validation losses."""
LOG_FILES = (
    *("metrics.jsonl", "pairs.jsonl", "timing.jsonl"),
    *("metrics.parquet", "pairs.parquet"),
)
"""Files, or folders of files, that grow with every round."""
# Files that exist, and change no more, when a seed has finished.
_FINAL_FILES = ("summary.json", CHECKPOINT_FILE)
# Files that may be missing, because nothing else depends on them.
_OPTIONAL_FILES = ("timing.jsonl", "samples.safetensors")
NON_RESULT_SETTINGS = (
    *("name", "title", "description", "seeds"),
    *("checkpoint_every", "keep_best", "records"),
)
"""Settings that no number of a round depends on."""

Checksum = tuple[int, str]
"""Size in bytes of a file, or of its beginning, and the SHA-256 of these bytes."""


@dataclass(frozen=True)
class Manifest:
    """The checksums of one seed."""

    seed: int
    # Digest of the settings that determine the results.
    settings: str
    # Number of rounds that are certainly finished.
    rounds: int
    # True for a seed that has finished all its rounds.
    complete: bool
    files: Mapping[str, Checksum]

    @classmethod
    def create(
        cls, folder: Path, seed: int, settings: Mapping[str, Any], rounds: int
    ) -> "Manifest":
        """Write the manifest of a seed that starts or continues, after its initial files."""
        files = _checksum_files(folder, INITIAL_FILES)
        return cls(seed, settings_digest(settings), rounds, False, files)._write(folder)

    def record_checkpoint(self, folder: Path, rounds: int) -> "Manifest":
        """Record the first checkpoint of the seed."""
        # Later checkpoints change no checksum of a file, and the first one shows that rounds are
        # done.
        return self if self.rounds else replace(self, rounds=rounds)._write(folder)

    def finish(self, folder: Path, rounds: int, logs: Mapping[str, Checksum]) -> "Manifest":
        """Write the manifest of a seed that has finished all its rounds."""
        files = {**self.files, **logs, **_checksum_files(folder, _FINAL_FILES)}
        return replace(self, rounds=rounds, complete=True, files=files)._write(folder)

    def _write(self, folder: Path) -> "Manifest":
        write_json_with_checksum(folder / MANIFEST_FILE, vars(self))
        return self

    @staticmethod
    def remove(folder: Path) -> None:
        """Remove sums.json before its files are written anew."""
        (folder / MANIFEST_FILE).unlink(missing_ok=True)

    @classmethod
    def read(cls, folder: Path) -> "Manifest | None":
        """Read sums.json; None if it does not exist."""
        path = folder / MANIFEST_FILE
        if not path.exists():
            return None
        content = read_json_with_checksum(path, require_checksum=True)
        try:
            return cls(
                content["seed"],
                content["settings"],
                content["rounds"],
                content["complete"],
                _parse_checksums(content["files"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise damaged_error(path, "it holds no sums") from error

    def has_finished(self, rounds: int) -> bool:
        """Return True if the seed has finished a number of rounds."""
        return self.complete and self.rounds >= rounds

    def matches(self, settings: Mapping[str, Any]) -> bool:
        """Return True if the seed belongs to a run with these settings."""
        return self.settings == settings_digest(settings)

    def can_resume(self, settings: Mapping[str, Any]) -> bool:
        """Return True if a run with these settings may continue."""
        return self.matches(settings) and self.rounds <= settings.get("rounds", self.rounds)

    def verify(self, folder: Path, name: str) -> Path:
        """Verify a file; a log that grows must begin with its content at the last checkpoint."""
        path = folder / name
        # A log grows without new checksums. The checkpoint has those of its beginning.
        is_growing = name in LOG_FILES and not self.complete
        checksums = log_checksums(folder) if is_growing else self.files
        expected = checksums.get(name)
        if expected is None:
            if path.exists() and not is_growing:
                raise damaged_error(path, f"it is no file of this seed, by its {MANIFEST_FILE}")
            columns = path.with_suffix(".parquet")
            if path.suffix == ".jsonl" and columns.name in checksums and not columns.exists():
                raise damaged_error(columns, "it is gone")
            return path

        size, _ = expected
        if not path.exists():
            # An empty log and a missing one have the same lines.
            if size and name not in _OPTIONAL_FILES:
                raise damaged_error(path, "it is gone")
            return path

        try:
            for file in log_files(path):
                check_regular(file)
        except OSError as error:
            raise read_error(path, error) from error
        # The size is compared first, because a large file takes long to read.
        found = sum(file.stat().st_size for file in log_files(path))
        has_other_size = not is_growing and found != size
        if has_other_size or checksum_file(path, size) != expected:
            raise damaged_error(path, "it does not hold what was written, by its SHA-256")
        return path

    def verify_all(self, folder: Path, *, exclude: Container[str] = ()) -> None:
        """Verify every file of the seed."""
        for name in (*self.files, *LOG_FILES):
            if name not in exclude:
                self.verify(folder, name)


def read_checkpoint_header(path: Path) -> dict[str, str]:
    """Read a checkpoint's header and verify its CRC-32, which old checkpoints lack."""
    try:
        check_regular(path)
        with safe_open(path, framework="np") as file:
            header = file.metadata() or {}
        crc = header_crc(header)
        if json.loads(header["sums"]).get("header", crc) != crc:
            raise ValueError("its header does not add up")
    except OSError as error:
        raise read_error(path, error) from error
    except (SafetensorError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise damaged_error(path, str(error)) from error
    return header


def header_crc(header: Mapping[str, str]) -> int:
    """Compute the CRC-32 of the header of a checkpoint, without its `sums`."""
    # safetensors keeps no order of the metadata.
    content = {name: header[name] for name in sorted(header) if name != "sums"}
    return zlib.crc32(json.dumps(content).encode())


def log_checksums(folder: Path) -> dict[str, Checksum]:
    """Return the checksums of the logs at the last checkpoint; empty without any."""
    path = folder / CHECKPOINT_FILE
    if not path.exists():
        return {}
    return _parse_checksums(json.loads(read_checkpoint_header(path).get("lines", "{}")))


def _parse_checksums(content: Mapping[str, Any]) -> dict[str, Checksum]:
    return {name: (size, digest) for name, (size, digest) in content.items()}


def _checksum_files(folder: Path, names: Iterable[str]) -> dict[str, Checksum]:
    return {name: checksum_file(folder / name) for name in names if (folder / name).exists()}


def checksum_file(path: Path, size: int | None = None) -> Checksum:
    """Compute the checksum of a file, or a log of several, or of its first `size` bytes."""
    digest = hashlib.sha256()
    count = 0
    limit = math.inf if size is None else size
    for name in log_files(path):
        try:
            file = open_regular(name)
        except OSError as error:
            raise read_error(name, error) from error
        with file:
            while part := file.read(int(min(limit - count, 2**20))):
                digest.update(part)
                count += len(part)
    return count, digest.hexdigest()


def result_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Select the settings that a resume requires, under their original names.

    The number of rounds is one of them where a target epsilon decides the noise.
    """
    excluded = list(NON_RESULT_SETTINGS)
    privacy = settings.get("training", {}).get("privacy", {})
    if "epsilon" not in privacy:  # whose noise depends on the number of rounds
        excluded.append("rounds")
    selected = {key: value for key, value in settings.items() if key not in excluded}
    return original_settings(selected)


def canonical_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings to one form for equal values, such as 2 and 2.0, or a list and a tuple."""
    converted: dict[str, Any] = _canonical_value(drop_none(settings))
    return converted


def _canonical_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _canonical_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical_value(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    # bool is an int in Python, so that it passes here and stays true or false.
    if isinstance(value, str | bool | int | None):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return str(value)


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Compute the SHA-256 of the settings of the results; it is the same before and after TOML."""
    return _content_digest(canonical_settings(result_settings(settings)))


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Convert nested tables to one table with dotted keys, such as `agents.budget`."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def write_json_with_checksum(path: Path, content: Mapping[str, object]) -> None:
    """Replace a file by JSON with its own checksum, atomically; NaN becomes null."""
    plain = to_plain(content)
    atomic_write(path, to_json({**plain, "sha256": _content_digest(plain)}))


def read_json_with_checksum(path: Path, *, require_checksum: bool = False) -> dict[str, Any]:
    """Read JSON and verify its checksum, which old versions did not write."""
    content = read_json(path)
    checksum = content.pop("sha256", None)
    if checksum is None and not require_checksum:
        return content
    if checksum != _content_digest(content):
        raise damaged_error(path, "it does not hold what was written, whose SHA-256 is in it")
    return content


def read_cells(path: Path) -> list[dict[str, Any]]:
    """Read the cells.json of a grid: one dict per run."""
    cells = read_json_with_checksum(path).get("cells")
    keys = {"folder", "kind", "setting", "defence", "attack", "floor", "rounds", "seconds", "error"}
    if not isinstance(cells, list) or not all(
        isinstance(cell, dict) and keys <= cell.keys() and is_inside(cell["folder"])
        for cell in cells
    ):
        raise damaged_error(path, "it holds no list of runs in this folder")
    return cells


def is_inside(name: object) -> bool:
    """Return True for a relative path that does not lead out of its folder."""
    if not isinstance(name, str) or "\0" in name:
        return False
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _content_digest(content: Mapping[str, Any]) -> str:
    # The order of keys is no content.
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

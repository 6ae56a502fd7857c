"""Logs of a seed: one JSON line per round, or one Parquet file."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedcb2o.records import _parquet
from fedcb2o.records._checksums import Checksum
from fedcb2o.records._files import (
    atomic_write,
    damaged_error,
    fsync,
    make_folder,
    open_private,
    read_error,
    to_plain,
    write_error,
)
from fedcb2o.safe_files import open_regular, read_regular

_MAX_LINE_BYTES = 2**28
LOG_NAMES = ("metrics", "pairs", "timing")
REPRODUCIBLE_LOGS = ("metrics", "pairs")
"""Logs that the seed and the settings determine, with one line for every round."""


class RoundLog:
    """The growing logs of one seed, by default metrics, pairs and timing.

    Those that are named by `columns` are in Parquet.
    """

    def __init__(
        self, folder: Path, names: Sequence[str] = LOG_NAMES, columns: Sequence[str] = ()
    ) -> None:
        if columns:
            _parquet.require_pyarrow()
        self.folder = folder
        self._columns = columns
        self._hashes = {name: (0, hashlib.sha256()) for name in names}

    def path(self, name: str) -> Path:
        """Return the path of one log."""
        return self.folder / f"{name}.{'parquet' if name in self._columns else 'jsonl'}"

    def append(self, name: str, line: Mapping[str, Any]) -> None:
        """Append one line, as a whole or not at all; NaN and infinities become null."""
        path = self.path(name)
        if name in self._columns:
            content = _parquet.encode(line)
            make_folder(path)
            atomic_write(_parquet.round_file(path, line["round"]), content)
            self._update_hash(name, content)
            return
        try:
            text = json.dumps(line, allow_nan=False)
        except (TypeError, ValueError):  # arrays, or numbers that are not finite
            text = json.dumps(to_plain(line), allow_nan=False)
        content = f"{text}\n".encode()
        rest = memoryview(content)
        try:
            with open(path, "ab", buffering=0, opener=open_private) as file:
                size = file.tell()
                try:
                    # An unbuffered write may be short, as on a disk that is nearly full.
                    while rest:
                        rest = rest[file.write(rest) :]
                except BaseException:
                    # Half a line would be followed by the next one after a resume.
                    with suppress(OSError):
                        file.truncate(size)
                    raise
        except OSError as error:
            raise write_error(path, error) from error
        self._update_hash(name, content)

    def _update_hash(self, name: str, content: bytes) -> None:
        size, digest = self._hashes[name]
        digest.update(content)
        self._hashes[name] = (size + len(content), digest)

    def checksums(self, names: Sequence[str] | None = None) -> dict[str, Checksum]:
        """Return the checksums of logs as written so far, by default of all."""
        selected = self._hashes if names is None else names
        checksums = {}
        for name in selected:
            size, digest = self._hashes[name]
            checksums[self.path(name).name] = (size, digest.hexdigest())
        return checksums

    def sync(self) -> None:
        """Force all lines to the disk, before a checkpoint that contains their rounds."""
        for path in filter(Path.exists, map(self.path, self._hashes)):
            try:
                fsync(path)
            except OSError as error:
                raise write_error(path, error) from error

    def truncate(self, rounds: int) -> None:
        """Keep the lines up to a round, for a resume; a missing one is a RunError."""
        for name in self._hashes:
            path = self.path(name)
            if rounds == 0:  # a start in the other format may have been killed
                shutil.rmtree(self.folder / f"{name}.parquet", ignore_errors=True)
                if name in self._columns:
                    path.with_suffix(".jsonl").unlink(missing_ok=True)
            if name in self._columns:
                self._truncate_columns(name, rounds)
                continue
            texts: list[bytes] = []
            line_rounds = []
            for text, line in read_lines(path, stop_at_damage=True):
                if line["round"] <= rounds:
                    texts.append(text)
                    line_rounds.append(line["round"])

            # timing.jsonl may lack the last round: its line has the time of the checkpoint too.
            if name in REPRODUCIBLE_LOGS and line_rounds != list(range(1, rounds + 1)):
                reason = (
                    f"it lacks rounds before the checkpoint's round {rounds}, or has some twice"
                )
                raise damaged_error(path, f"{reason} ({len(line_rounds)} lines)")

            content = b"".join(texts)
            # A rewrite of equal logs would cost the disk, and risk them, without need.
            if path.exists() and path.stat().st_size != len(content):
                atomic_write(path, content)
            self._hashes[name] = (0, hashlib.sha256())
            self._update_hash(name, content)

    def _truncate_columns(self, name: str, rounds: int) -> None:
        path = self.path(name)
        self._hashes[name] = (0, hashlib.sha256())
        for n in range(1, rounds + 1):
            file = _parquet.round_file(path, n)
            try:
                self._update_hash(name, read_regular(file, _parquet.MAX_FILE_BYTES))
            except OSError as error:
                raise damaged_error(path, f"{file.name}: {error.strerror}") from error
        for file in _parquet.log_files(path)[rounds:] if rounds else ():
            file.unlink()


def log_path(folder: Path, name: str) -> Path:
    """Return the path of a log of a seed: a folder of Parquet files, else a .jsonl file."""
    columns = folder / f"{name}.parquet"
    return columns if columns.exists() else folder / f"{name}.jsonl"


def read_lines(
    path: Path, *, skip: int = 0, stop_at_damage: bool = False
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Read the finished lines of a log with their bytes; none if it is missing.

    A last line without a line end was never finished. `stop_at_damage` treats a damaged line as the
    end of the file; otherwise it is a RunError.
    """
    if not path.exists():
        return
    if path.suffix == ".parquet":
        yield from _parquet.read_rounds(path, skip=skip, stop_at_damage=stop_at_damage)
        return
    try:
        file = open_regular(path)
    except OSError as error:
        raise read_error(path, error) from error
    with file:
        for number, text in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES), b""), start=1):
            if not text.endswith(b"\n"):
                if len(text) < _MAX_LINE_BYTES or stop_at_damage:
                    return
                reason = f"line {number} is longer than {_MAX_LINE_BYTES} bytes"
                raise damaged_error(path, reason)
            if number <= skip:
                continue
            try:
                line = json.loads(text)
                if not isinstance(line["round"], int):
                    raise TypeError("`round` is not an integer")
            except (ValueError, KeyError, TypeError) as error:
                if stop_at_damage:
                    return
                raise damaged_error(path, f"line {number} is no record of a round") from error
            yield text, line

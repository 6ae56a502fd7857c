"""Logs of a seed with one JSON line per round."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedcb2o.records._checksums import Checksum
from fedcb2o.records._files import (
    atomic_write,
    damaged_error,
    fsync,
    open_private,
    read_error,
    to_plain,
    write_error,
)
from fedcb2o.safe_files import open_regular

_MAX_LINE_BYTES = 2**28
LOG_NAMES = ("metrics", "pairs", "timing")
REPRODUCIBLE_LOGS = ("metrics", "pairs")
"""Logs that the seed and the settings determine, with one line for every round."""


class RoundLog:
    """The growing logs of one seed, by default metrics, pairs and timing."""

    def __init__(self, folder: Path, names: Sequence[str] = LOG_NAMES) -> None:
        self.folder = folder
        self._hashes = {name: (0, hashlib.sha256()) for name in names}

    def path(self, name: str) -> Path:
        """Return the path of one log."""
        return self.folder / f"{name}.jsonl"

    def append(self, name: str, line: Mapping[str, object]) -> None:
        """Append one line, as a whole or not at all; NaN and infinities become null."""
        path = self.path(name)
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


def read_lines(
    path: Path, *, skip: int = 0, stop_at_damage: bool = False
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Read the finished lines of a .jsonl file; none if it is missing.

    A last line without a line end was never finished. `stop_at_damage` treats a damaged line as the
    end of the file; otherwise it is a RunError.
    """
    if not path.exists():
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

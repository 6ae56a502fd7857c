"""The lines of a seed, one for each round: appended whole, cut back for a resume, and read."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedcb2o.records.checksums import Checksum
from fedcb2o.records.files import atomic_write, damaged_error, fsync, to_plain, write_error

LOG_NAMES = ("metrics", "pairs", "timing")
REPRODUCIBLE_LOGS = ("metrics", "pairs")
"""Those that the seed and the settings determine."""


class RoundLog:
    """The growing records of one seed, by default metrics.jsonl, pairs.jsonl and timing.jsonl in its folder; those that
    are `whole` have a line for every round."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str] = LOG_NAMES,
        complete_names: Sequence[str] = REPRODUCIBLE_LOGS,
    ) -> None:
        self.folder = folder
        self.complete_names = complete_names
        self._hashes = {name: (0, hashlib.sha256()) for name in names}

    def path(self, name: str) -> Path:
        """Where the lines of one kind are kept."""
        return self.folder / f"{name}.jsonl"

    def append(self, name: str, line: Mapping[str, object]) -> None:
        """Append one line, whole or not at all; NaN and infinities become null. RunError if it cannot be written."""
        path = self.path(name)
        try:
            text = json.dumps(line, allow_nan=False)
        except (TypeError, ValueError):  # arrays, or what is not finite
            text = json.dumps(to_plain(line), allow_nan=False)
        whole = f"{text}\n".encode()
        data = memoryview(whole)
        try:
            with path.open("ab", buffering=0) as file:
                size = file.tell()
                try:
                    while data:
                        data = data[file.write(data) :]
                except BaseException:
                    with suppress(OSError):
                        file.truncate(size)
                    raise
        except OSError as error:
            raise write_error(path, error) from error
        self._update_hash(name, whole)

    def _update_hash(self, name: str, content: bytes) -> None:
        size, total = self._hashes[name]
        total.update(content)
        self._hashes[name] = size + len(content), total

    def checksums(self, names: Sequence[str] | None = None) -> dict[str, Checksum]:
        """What the files hold: of each its bytes and their SHA-256."""
        totals = {
            self.path(name).name: self._hashes[name]
            for name in (self._hashes if names is None else names)
        }
        return {name: (size, total.hexdigest()) for name, (size, total) in totals.items()}

    def sync(self) -> None:
        """Force all lines to the disk: before a checkpoint, so that it never knows more rounds than the records."""
        for path in filter(Path.exists, map(self.path, self._hashes)):
            try:
                fsync(path)
            except OSError as error:
                raise write_error(path, error) from error

    def truncate(self, rounds: int) -> None:
        """Cut every file back to the lines with round <= `rounds`, as a resume from that checkpoint needs.

        Raises RunError if the metrics or pairs of a round up to `rounds` are missing or damaged.
        """
        for name in self._hashes:
            path = self.path(name)
            kept: list[bytes] = []
            found = []
            for text, line in read_lines(path, stop_at_damage=True):
                if line["round"] <= rounds:
                    kept.append(text)
                    found.append(line["round"])
            # timing.jsonl may lack the last round: its line also tells how long that checkpoint took.
            if name in self.complete_names and found != list(range(1, rounds + 1)):
                what = f"it lacks rounds before the checkpoint's round {rounds}, or has some twice"
                raise damaged_error(path, f"{what} ({len(found)} lines)")
            content = b"".join(kept)
            if path.exists() and path.stat().st_size != len(content):
                atomic_write(path, content)
            self._hashes[name] = 0, hashlib.sha256()
            self._update_hash(name, content)


def read_lines(
    path: Path, *, skip: int = 0, stop_at_damage: bool = False
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The whole lines of a .jsonl file and what they say; a last one without its line end was never finished.

    The first `after` lines are passed over. A damaged line raises RunError or, with `damaged_ends`, counts as the end
    of the file.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if not text.endswith(b"\n"):
                return
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

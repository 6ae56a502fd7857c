"""What the files of a seed hold, by SHA-256: sums.json, written with every checkpoint and at the end.

Whoever reads a file asks it first, so that a truncated, changed or exchanged one is refused by its name. Files that
are written once have one sum; those that grow have one at each checkpoint that a resume may find, of what they held
then. An entry comes before its checkpoint and goes after the next one, so that a kill between them costs nothing.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedcb2o.records.files import atomic_write, damaged, json_of, plain, read_json, without_none

FILE = "sums.json"
FREE = ("name", "title", "description", "seeds", "checkpoint_every")
"""The settings that no number of a round depends on."""

Sum = tuple[int, str]
"""The bytes of a file, or of its beginning, and their SHA-256."""


@dataclass(frozen=True)
class Sums:
    """The sums of one seed: of which settings, whether it has run to its end, and what its files hold."""

    seed: int
    settings: str
    complete: bool
    files: Mapping[str, Sum]
    lines: Mapping[int, Mapping[str, Sum]]  # by the rounds of a checkpoint

    @property
    def rounds(self) -> int:
        """The rounds of the newest checkpoint."""
        return max(self.lines)

    @classmethod
    def begin(
        cls, folder: Path, seed: int, settings: Mapping[str, Any], rounds: int, lines: Mapping[str, Sum]
    ) -> "Sums":
        """The sums of a seed that runs on from the checkpoint after `rounds` rounds, or from the start: of the files
        written once that lie in its folder, and of its `lines` so far."""
        return cls(seed, digest(settings), False, _of_files(folder, DESCRIBED), {rounds: lines})

    def after(self, rounds: int, lines: Mapping[str, Sum]) -> "Sums":
        """With an entry for the checkpoint after `rounds` rounds, beside that of the one before."""
        return replace(self, lines={self.rounds: self.lines[self.rounds], rounds: lines})

    def back(self, folder: Path, rounds: int) -> "Sums":
        """Of a seed that goes on from the checkpoint after `rounds` rounds.

        Raises RunError where that is none of its checkpoints, or its lines up to there are not what was written.
        """
        if rounds not in self.lines:
            known = " or ".join(map(str, self.lines))
            raise damaged(folder / ENDED[1], f"it is of round {rounds}, and the last one was of round {known}")
        for name in self.lines[rounds]:
            self.check(folder, name, rounds)
        files = {name: each for name, each in self.files.items() if name in DESCRIBED}
        return replace(self, complete=False, files=files, lines={rounds: self.lines[rounds]})

    def end(self, folder: Path, lines: Mapping[str, Sum]) -> "Sums":
        """Of a seed that has run to its end: each of its files."""
        return replace(
            self, complete=True, files={**self.files, **_of_files(folder, ENDED)}, lines={self.rounds: lines}
        )

    @staticmethod
    def forget(folder: Path) -> None:
        """Remove sums.json, since what it knows is written anew."""
        (folder / FILE).unlink(missing_ok=True)

    def write(self, folder: Path) -> None:
        """Replace sums.json; raises RunError where that fails."""
        write_sealed(folder / FILE, vars(self))

    @classmethod
    def read(cls, folder: Path) -> "Sums | None":
        """What sums.json says, or None where there is none; raises RunError where it is damaged."""
        path = folder / FILE
        if not path.exists():
            return None
        found = read_sealed(path)
        try:
            lines = {int(rounds): _sums(each) for rounds, each in found["lines"].items()}
            return cls(found["seed"], found["settings"], found["complete"], _sums(found["files"]), lines)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise damaged(path, "it holds no sums") from error

    def fits(self, settings: Mapping[str, Any]) -> bool:
        """Whether a run with these settings may have come so far."""
        return self.settings == digest(settings) and self.rounds <= settings.get("rounds", self.rounds)

    def check(self, folder: Path, name: str, rounds: int | None = None) -> Path:
        """The path of a file that holds what was written or, if it grows, that begins with what was written up to the
        checkpoint after `rounds` rounds, by default the newest.

        Raises RunError where it does not.
        """
        path, grown = folder / name, self.lines[self.rounds if rounds is None else rounds]
        expected = grown.get(name) or self.files.get(name)
        if expected is None:
            if path.exists():
                raise damaged(path, f"it is no file of this seed, by its {FILE}")
        elif not path.exists():
            if expected[0] and name not in SPARE:
                raise damaged(path, "it is gone")
        elif sum_of(path, expected[0]) != expected or (self.complete and path.stat().st_size != expected[0]):
            raise damaged(path, f"it does not hold what was written, whose SHA-256 is in {FILE}")
        return path

    def check_all(self, folder: Path) -> None:
        """Raises RunError unless every file holds what was written."""
        for name in {**self.files, **self.lines[self.rounds]}:
            self.check(folder, name)


DESCRIBED = ("environment.json", "agents.json", "samples.safetensors")
"""The files that are written when a seed begins."""
ENDED = ("summary.json", "checkpoint.safetensors")
"""The files that are there, and change no more, when it has run to its end."""
SPARE = ("timing.jsonl", "samples.safetensors")
"""The files that nothing else depends on: one may do without them."""


def _sums(found: Mapping[str, Any]) -> dict[str, Sum]:
    return {name: (size, total) for name, (size, total) in found.items()}


def _of_files(folder: Path, names: Iterable[str]) -> dict[str, Sum]:
    return {name: sum_of(folder / name) for name in names if (folder / name).exists()}


def sum_of(path: Path, size: int | None = None) -> Sum:
    """The sum of a file's first `size` bytes, by default of all."""
    total, known, wanted = hashlib.sha256(), 0, math.inf if size is None else size
    with path.open("rb") as file:
        while part := file.read(int(min(wanted - known, 2**20))):
            total.update(part)
            known += len(part)
    return known, total.hexdigest()


def identity(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a run's numbers depend on: those that may not differ where it is resumed."""
    return {key: value for key, value in settings.items() if key not in (*FREE, "rounds")}


def digest(settings: Mapping[str, Any]) -> str:
    """The SHA-256 of the `identity` of settings, the same before they are written as TOML and after."""
    text = json.dumps(plain(without_none(identity(settings))), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def write_sealed(path: Path, content: Mapping[str, object]) -> None:
    """Replace `path` by `content` as JSON with a sum of its own, atomically; NaN and infinities become null."""
    inner = plain(content)
    atomic_write(path, json_of({**inner, "sha256": _seal(inner)}))


def read_sealed(path: Path) -> dict[str, Any]:
    """The object in a JSON file that `write_sealed` wrote; raises RunError where it holds another.

    A file without a sum was written before there were any, and is taken as it is.
    """
    content = read_json(path)
    if content.pop("sha256", None) not in (None, _seal(content)):
        raise damaged(path, "it does not hold what was written, whose SHA-256 is in it")
    return content


def read_cells(path: Path) -> list[dict[str, Any]]:
    """The lines of a grid's cells.json, one a run; raises RunError where it holds something else."""
    cells, keys = read_sealed(path).get("cells"), {"folder", "kind", "setting", "defence", "attack", "floor", "rounds"}
    if not isinstance(cells, list) or not all(isinstance(cell, dict) and keys <= cell.keys() for cell in cells):
        raise damaged(path, "it holds no list of runs")
    return cells


def _seal(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

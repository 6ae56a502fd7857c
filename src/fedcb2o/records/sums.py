"""What the files of a seed hold, by SHA-256: sums.json, written when the seed begins and when it ends.

Whoever reads a file asks it first, so that a truncated, changed or exchanged one is refused by its name. What grows
meanwhile has its sums in the header of each checkpoint, of what it held then, so that the two cannot part.
"""

import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fedcb2o.records.files import atomic_write, damaged, json_of, plain, read_json, without_none

FILE = "sums.json"
FREE = ("name", "title", "description", "seeds", "checkpoint_every")
"""The settings that no number of a round depends on."""

Sum = tuple[int, str]
"""The bytes of a file, or of its beginning, and their SHA-256."""


@dataclass(frozen=True)
class Sums:
    """The sums of one seed: of which settings, how many rounds it has surely done, whether these are all, and files."""

    seed: int
    settings: str
    rounds: int
    complete: bool
    files: Mapping[str, Sum]

    @classmethod
    def begin(cls, folder: Path, seed: int, settings: Mapping[str, Any], rounds: int) -> "Sums":
        """Of a seed that goes on after `rounds` rounds: of the files that lie there from its beginning. Writes it."""
        return cls(seed, digest(settings), rounds, False, _of_files(folder, DESCRIBED))._written(folder)

    def reached(self, folder: Path, rounds: int) -> "Sums":
        """Of a seed with a checkpoint after `rounds` rounds. Writes that it has one, the first time."""
        return self if self.rounds else replace(self, rounds=rounds)._written(folder)

    def end(self, folder: Path, rounds: int, lines: Mapping[str, Sum]) -> "Sums":
        """Of a seed that has run to its end: each of its files, of those that grew by their sums. Writes it."""
        files = {**self.files, **lines, **_of_files(folder, ENDED)}
        return replace(self, rounds=rounds, complete=True, files=files)._written(folder)

    def _written(self, folder: Path) -> "Sums":
        write_sealed(folder / FILE, vars(self))
        return self

    @staticmethod
    def forget(folder: Path) -> None:
        """Remove sums.json, since what it knows is written anew."""
        (folder / FILE).unlink(missing_ok=True)

    @classmethod
    def read(cls, folder: Path) -> "Sums | None":
        """What sums.json says, or None where there is none; raises RunError where it is damaged."""
        path = folder / FILE
        if not path.exists():
            return None
        found = read_sealed(path)
        try:
            return cls(found["seed"], found["settings"], found["rounds"], found["complete"], _sums(found["files"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise damaged(path, "it holds no sums") from error

    def fits(self, settings: Mapping[str, Any]) -> bool:
        """Whether a run with these settings may have come so far."""
        return self.settings == digest(settings) and self.rounds <= settings.get("rounds", self.rounds)

    def check(self, folder: Path, name: str) -> Path:
        """The path of a file that holds what was written or, if it still grows, begins with what it held at the last
        checkpoint.

        Raises RunError where it does not.
        """
        path, grows = folder / name, name in LINES and not self.complete
        expected = (lines_of(folder) if grows else self.files).get(name)
        if expected is None:
            if path.exists() and not grows:
                raise damaged(path, f"it is no file of this seed, by its {FILE}")
        elif not path.exists():
            if expected[0] and name not in SPARE:
                raise damaged(path, "it is gone")
        elif sum_of(path, expected[0]) != expected or (not grows and path.stat().st_size != expected[0]):
            raise damaged(path, "it does not hold what was written, by its SHA-256")
        return path

    def check_all(self, folder: Path) -> None:
        """Raises RunError unless every file holds what was written."""
        for name in (*self.files, *LINES):
            self.check(folder, name)


DESCRIBED = ("environment.json", "agents.json", "samples.safetensors")
"""The files that are written when a seed begins."""
LINES = ("metrics.jsonl", "pairs.jsonl", "timing.jsonl")
"""The files that grow."""
ENDED = ("summary.json", "checkpoint.safetensors")
"""The files that are there, and change no more, when a seed has run to its end."""
SPARE = ("timing.jsonl", "samples.safetensors")
"""The files that nothing else depends on: one may do without them."""


def header_of(path: Path) -> dict[str, str]:
    """What a checkpoint's header says; raises RunError where it does not add up.

    Its sums have one of the header itself, which older ones lack.
    """
    try:
        with safe_open(path, framework="np") as file:
            header = file.metadata() or {}
        if json.loads(header["sums"]).get("header", total := header_sum(header)) != total:
            raise ValueError("its header does not add up")
    except (SafetensorError, OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise damaged(path, str(error)) from error
    return header


def header_sum(header: Mapping[str, str]) -> int:
    """The CRC-32 of a checkpoint's header, without its sums."""
    return zlib.crc32(json.dumps({name: header[name] for name in sorted(header) if name != "sums"}).encode())


def lines_of(folder: Path) -> dict[str, Sum]:
    """What the files that grow held at the last checkpoint, if there is one that knows."""
    path = folder / ENDED[1]
    return _sums(json.loads(header_of(path).get("lines", "{}"))) if path.exists() else {}


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

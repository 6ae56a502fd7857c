"""What a run writes and how it is read: one folder a run, in it one a seed; it knows nothing of how a round is made.

A record is lost only with the round it belongs to: lines are appended whole, other files replaced whole, and a
failed write leaves what was there. `docs/runs.md` describes every file and every name in it.
"""

import json
import math
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import tomli_w
from jaxtyping import UInt8
from safetensors import SafetensorError
from safetensors.numpy import load_file

from fedcb2o.errors import RunError

Name = Literal["metrics", "pairs", "timing"]
NAMES: tuple[Name, ...] = ("metrics", "pairs", "timing")
AGENTS = ("cluster", "malicious", "num_samples", "source_in_validation")
METRICS = ("train_loss", "validation_loss", "malicious_weight", "answered")
EVALUATED = ("accuracy", "source_accuracy", "attack_success_rate")
FREE = ("name", "title", "description", "seeds", "checkpoint_every")
"""The settings that no number of a round depends on."""


# Writing


def atomic_write(path: Path, content: bytes | Callable[[Path], None]) -> None:
    """Replace `path` whole: by bytes, or by what `content(temporary_path)` writes.

    At any moment, a power cut included, `path` holds the old or the new content. Raises RunError if it cannot be
    written; what was there then stays.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        if isinstance(content, bytes):
            temporary.write_bytes(content)
        else:
            content(temporary)
        _fsync(temporary)
        temporary.replace(path)
        _fsync(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError | SafetensorError):
            raise _unwritable(path, error) from error
        raise


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Replace `path` by `content` as JSON, atomically; NaN and infinities become null."""
    atomic_write(path, (json.dumps(_plain(content), indent=1, allow_nan=False) + "\n").encode())


def write_toml(path: Path, content: Mapping[str, object]) -> None:
    """Replace `path` by `content` as TOML, atomically; keys whose value is None are left out, as TOML has no null."""
    atomic_write(path, tomli_w.dumps(_without_none(content)).encode())


class Records:
    """The growing records of one seed: metrics.jsonl, pairs.jsonl and timing.jsonl in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: Name) -> Path:
        """Where the lines of one kind are kept."""
        return self.folder / f"{name}.jsonl"

    def append(self, name: Name, line: Mapping[str, object]) -> None:
        """Append one line, whole or not at all; NaN and infinities become null. RunError if it cannot be written."""
        path = self.path(name)
        try:
            text = json.dumps(line, allow_nan=False)
        except (TypeError, ValueError):  # arrays, or what is not finite
            text = json.dumps(_plain(line), allow_nan=False)
        data = memoryview(f"{text}\n".encode())
        try:
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                size = os.fstat(file).st_size
                try:
                    while data:
                        data = data[os.write(file, data) :]
                except BaseException:
                    with suppress(OSError):
                        os.ftruncate(file, size)
                    raise
            finally:
                os.close(file)
        except OSError as error:
            raise _unwritable(path, error) from error

    def sync(self) -> None:
        """Force all lines to the disk: before a checkpoint, so that it never knows more rounds than the records."""
        for path in filter(Path.exists, map(self.path, NAMES)):
            try:
                _fsync(path)
            except OSError as error:
                raise _unwritable(path, error) from error

    def cut(self, rounds: int) -> None:
        """Cut every file back to the lines with round <= `rounds`, as a resume from that checkpoint needs.

        Raises RunError if the metrics or pairs of a round up to `rounds` are missing or damaged.
        """
        for name in NAMES:
            path = self.path(name)
            kept: list[bytes] = []
            found = []
            for text, line in _lines(path, damaged_ends=True):
                if line["round"] <= rounds:
                    kept.append(text)
                    found.append(line["round"])
            # timing.jsonl may lack the last round: its line also tells how long that checkpoint took.
            if name != "timing" and found != list(range(1, rounds + 1)):
                raise RunError(
                    f"{path} lacks rounds before the checkpoint's round {rounds} or holds them twice (it has "
                    f"{len(found)}), so the run cannot be resumed: remove {self.folder} and run this seed again"
                )
            content = b"".join(kept)
            if path.exists() and path.stat().st_size != len(content):
                atomic_write(path, content)


# Reading


@dataclass(frozen=True, init=False)
class Run:
    """What a run has written so far, read from its folder; raises RunError if that is no run's folder.

    A table is read when it is first asked for and then kept: open the folder anew to see a running run's progress.
    """

    folder: Path

    def __init__(self, folder: str | Path) -> None:
        object.__setattr__(self, "folder", Path(folder))
        if not self.folder.is_dir():
            raise RunError(f"there is no run in {self.folder}: give the folder that `fedcb2o run --out` wrote")
        if not (self.folder / "config.toml").is_file():
            inside = sorted(path.parent.name for path in self.folder.glob("*/config.toml"))
            cure = f"it holds the runs {', '.join(inside)}: name those" if inside else "give a folder written by it"
            raise RunError(f"{self.folder} was not written by `fedcb2o run` (it holds no config.toml); {cure}")
        _ = self.config, self.seeds

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved experiment, config.toml."""
        path = self.folder / "config.toml"
        try:
            return tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(f"{path} cannot be read ({error}): restore it, or run the experiment again") from error

    @property
    def name(self) -> str:
        """The experiment's name, or the folder's where it has none."""
        return str(self.config.get("name") or self.folder.name)

    @property
    def title(self) -> str:
        """What tables and legends call this run."""
        return str(self.config.get("title") or self.name)

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that have begun, in ascending order."""
        found = (path.parent.name.removeprefix("seed-") for path in self.folder.glob("seed-*/agents.json"))
        return tuple(sorted(int(seed) for seed in found if seed.isdecimal()))

    @property
    def complete(self) -> bool:
        """Whether every seed of the configuration has run to its end."""
        wanted = {int(seed) for seed in self.config.get("seeds", self.seeds)} | set(self.seeds)
        rounds = int(self.config.get("rounds", 0))

        def ended(seed: int) -> bool:
            path = self._seed(seed) / "summary.json"
            return path.exists() and int(read_json(path).get("rounds", 0)) >= rounds

        return bool(wanted) and all(ended(seed) for seed in wanted)

    @cached_property
    def records(self) -> pd.DataFrame:
        """A row for each seed, round and agent: who it is and its metrics, NaN where there is none.

        Accuracies and rates are fractions of 1, there only in rounds that were evaluated, for benign agents only.
        """
        names = ["seed", "round", "agent", *AGENTS, *METRICS, *EVALUATED]
        tables = [self.records_of(seed) for seed in self.seeds]
        return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=names)

    def records_of(self, seed: int) -> pd.DataFrame:
        """The records of one seed, read anew."""
        agents = self._agents_of(seed)
        rounds: list[int] = []
        columns: dict[str, list[float | None]] = {key: [] for key in METRICS + EVALUATED}
        path = self._seed(seed) / "metrics.jsonl"
        for _, line in _lines(path):
            rounds.append(line["round"])
            for key, values in columns.items():
                found = line.get(key) or [None] * len(agents)
                if len(found) != len(agents):
                    raise _damaged(path, f"round {line['round']} has {len(found)} values of {key}", len(agents))
                values.extend(found)
        table = agents.iloc[np.tile(np.arange(len(agents)), len(rounds))].reset_index(drop=True)
        table.insert(1, "round", np.repeat(np.array(rounds, dtype=np.int64), len(agents)))
        return table.assign(**{key: np.array(values, dtype=float) for key, values in columns.items()})

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """A row for each seed, round, agent and peer whose model the agent received: its weight in m_j.

        The agent's own weight is the row where `peer` equals `agent`, so that an agent's rows of a round sum to 1.
        """
        columns: dict[str, list[Any]] = {key: [] for key in ("seed", "round", "agent", "peer", "weight")}
        for seed in self.seeds:
            path = self._seed(seed) / "pairs.jsonl"
            for _, line in _lines(path):
                try:
                    rows = zip(line["ids"], line["weights"], line["own"], strict=True)
                    for agent, (ids, weights, own) in enumerate(rows):
                        columns["seed"] += [seed] * (len(ids) + 1)
                        columns["round"] += [line["round"]] * (len(ids) + 1)
                        columns["agent"] += [agent] * (len(ids) + 1)
                        columns["peer"] += [*ids, agent]
                        columns["weight"] += [*weights, own]
                except (KeyError, TypeError, ValueError) as error:
                    raise _damaged(path, f"round {line['round']} is no list of peers and weights") from error
            if len(columns["peer"]) != len(columns["weight"]):
                raise _damaged(path, "a round has not as many weights as peers")
        kinds = {key: float if key == "weight" else np.int64 for key in columns}
        return pd.DataFrame({key: np.array(values, dtype=kinds[key]) for key, values in columns.items()})

    @cached_property
    def agents(self) -> pd.DataFrame:
        """A row for each seed and agent: cluster, malicious or not, training samples, source samples in validation."""
        tables = [self._agents_of(seed) for seed in self.seeds]
        return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=["seed", "agent", *AGENTS])

    def _agents_of(self, seed: int) -> pd.DataFrame:
        about = self.about(seed)
        try:
            table = pd.DataFrame({key: about[key] for key in AGENTS})
            table.insert(0, "agent", np.arange(len(table)))
            table.insert(0, "seed", seed)
            return table.astype({"malicious": bool, "source_in_validation": float})
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(self._seed(seed) / "agents.json", f"it lacks a value for an agent: {error}") from error

    @cached_property
    def timing(self) -> pd.DataFrame:
        """A row for each seed and round: the seconds that each phase took."""
        lines = [{"seed": seed, **line} for seed in self.seeds for _, line in _lines(self._seed(seed) / "timing.jsonl")]
        return pd.DataFrame(lines) if lines else pd.DataFrame(columns=["seed", "round"])

    def about(self, seed: int) -> dict[str, Any]:
        """agents.json of one seed: class names, clusters, angles, dimension, and a list over agents for each fact."""
        return read_json(self._seed(seed) / "agents.json")

    def samples(self, seed: int) -> UInt8[np.ndarray, "K images H W"] | None:
        """A few images as each cluster sees them, uint8 [K, 10, H, W]; None where the data are no images."""
        path = self._seed(seed) / "samples.safetensors"
        try:
            return load_file(path)["images"] if path.exists() else None
        except (OSError, KeyError, SafetensorError) as error:
            raise _damaged(path, str(error)) from error

    def _seed(self, seed: object) -> Path:
        return self.folder / f"seed-{seed}"

    def __repr__(self) -> str:
        done = "complete" if self.complete else f"incomplete, seeds so far {list(self.seeds)}"
        seeds = len(self.seeds)
        return f"Run({str(self.folder)!r}: {self.title}, {seeds} seed{'s' * (seeds != 1)}, {done})"


# Summing up


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """One row a seed of `Run.records` at its last evaluated round: each metric over benign agents.

    The worst agent has the lowest accuracy, or the highest attack success rate; the worst tenth is the mean of the
    ceil(n / 10) worst agents. `malicious_weight` is the weight that benign agents gave to malicious peers, averaged
    over the last fifth of the rounds, since in a single one few peers are met. Columns: seed, round, rounds (those
    done), accuracy, accuracy_worst, accuracy_worst_tenth, and so on.
    """
    rows = []
    for seed, last in last_round(table).groupby("seed"):
        mine = table[table.seed == seed]
        row: dict[str, Any] = {"seed": seed, "round": last["round"].iloc[0], "rounds": mine["round"].max()}
        for metric in EVALUATED:
            values = np.sort(last[metric].dropna().to_numpy())
            worst_first = values[::-1] if metric == "attack_success_rate" else values
            tenth = worst_first[: math.ceil(len(values) / 10)]
            row[metric] = values.mean() if len(values) else math.nan
            row[f"{metric}_worst"] = worst_first[0] if len(values) else math.nan
            row[f"{metric}_worst_tenth"] = tenth.mean() if len(values) else math.nan
        row["malicious_weight"] = last_fifth(mine[~mine.malicious]).malicious_weight.mean()
        rows.append(row)
    columns = ["seed", "round", "rounds", *(m + end for m in EVALUATED for end in ("", "_worst", "_worst_tenth"))]
    return pd.DataFrame(rows, columns=[*columns, "malicious_weight"])


def last_round(table: pd.DataFrame) -> pd.DataFrame:
    """The records of benign agents at each seed's last evaluated round; empty if there is none yet."""
    evaluated = table[~table.malicious.astype(bool) & table.accuracy.notna()]
    return evaluated[evaluated["round"] == evaluated.groupby("seed")["round"].transform("max")]


def last_fifth(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the last fifth of each seed's rounds, of at least one round."""
    last: pd.Series[Any] = table.groupby("seed")["round"].transform("max")
    late: pd.DataFrame = table[table["round"] > last - np.ceil(last / 5)]
    return late


def _lines(path: Path, *, damaged_ends: bool = False) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The whole lines of a .jsonl file and what they say; a last one without its line end was never finished.

    A damaged line raises RunError or, with `damaged_ends`, counts as the end of the file.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if not text.endswith(b"\n"):
                return
            try:
                line = json.loads(text)
                if not isinstance(line["round"], int):
                    raise TypeError("`round` is not an integer")
            except (ValueError, KeyError, TypeError) as error:
                if damaged_ends:
                    return
                raise _damaged(path, f"line {number} is no record of a round") from error
            yield text, line


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises RunError where it holds none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(content, dict):
        raise _damaged(path, "it holds no object")
    return content


def _plain(value: object) -> Any:
    """Lists, numbers and text for JSON, from arrays and tensors too; what is not finite becomes None."""
    kind = type(value)  # most are plain numbers in lists, and asked for first
    if kind is float:
        return value if math.isfinite(value) else None  # type: ignore[arg-type]
    if kind is int or kind is str:
        return value
    if kind is list:
        return [_plain(inner) for inner in value]  # type: ignore[attr-defined]
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list | tuple) else value


def _fsync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _unwritable(path: Path, error: Exception) -> RunError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return RunError(
        f"cannot write {path}: {reason}; nothing already written is lost: "
        "make room (or mend the folder) and go on with --resume"
    )


def _damaged(path: Path, what: str, agents: int | None = None) -> RunError:
    of = f" for {agents} agents" if agents is not None else ""
    return RunError(f"{path} is damaged: {what}{of}; remove {path.parent} and run this seed again")

"""What a run has written so far, read from its folder."""

import importlib
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import UInt8
from safetensors import SafetensorError
from safetensors.numpy import load_file

from fedcb2o.errors import RunError
from fedcb2o.records.checksums import FILE as SUMS
from fedcb2o.records.checksums import Sums
from fedcb2o.records.files import DamagedError, damaged, read_json, run_again, unreadable
from fedcb2o.records.jsonl import read_lines
from fedcb2o.records.toml import read_toml

AGENTS = ("cluster", "malicious", "num_samples", "source_in_validation")
METRICS = ("train_loss", "validation_loss", "malicious_weight", "answered")
KINDS = {"name": str, "title": str, "description": str, "rounds": int, "seeds": list, "agents": dict}
MENDED = "`fedcb2o run` of the experiment with this --out and --resume writes it anew"
EVALUATED = ("accuracy", "source_accuracy", "attack_success_rate")
SOMETIMES = ("test_loss", "global_accuracy", "global_loss")
"""What is evaluated where an experiment names a loss, or where agents have test samples of their own and others that
test everybody: columns that are there only then."""
RESERVED = ("seed", "round", "agent", *AGENTS, *METRICS, *EVALUATED, *SOMETIMES)
"""The columns of runs' records, which no metric of an experiment's own is called by."""


def metric_name(label: str) -> str:
    """What a metric of an experiment's own is called in its records: by its function, without the module."""
    return label.rpartition(":")[2].rpartition(".")[2]


@dataclass(frozen=True, init=False)
class Run:
    """What a run has written so far, read from its folder; raises RunError if that is no run's folder.

    A table is read when it is first asked for and then kept: open the folder anew to see a running run's progress.
    Each file is held against its sum in sums.json before it is read; RunError names one that is damaged, and the cure.
    """

    folder: Path

    def __init__(self, folder: str | Path) -> None:
        if not isinstance(folder, str | PathLike):
            raise RunError(f"a run is read from its folder's path, got a {type(folder).__name__}")
        object.__setattr__(self, "folder", Path(folder))
        if not self.folder.is_dir():
            raise RunError(f"there is no run in {self.folder}: give the folder that `fedcb2o run --out` wrote")
        if not (self.folder / "config.toml").is_file() and not seeds_in(self.folder):
            inside = sorted(path.parent.name for path in self.folder.glob("*/config.toml"))
            cure = f"it holds the runs {', '.join(inside)}: name those" if inside else "give a folder written by it"
            if (self.folder / "grid.toml").is_file():
                cure = f"it is that of a grid: `fedcb2o report {self.folder}` shows it, and its runs lie in its cells/"
            raise RunError(f"{self.folder} was not written by `fedcb2o run` (it holds no config.toml); {cure}")
        _ = self.config, self.seeds

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved experiment, config.toml."""
        return read_config(self.folder / "config.toml")

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
        return tuple(seeds_in(self.folder))

    @property
    def complete(self) -> bool:
        """Whether every seed of the configuration has run to its end."""
        wanted, rounds = {*self.config.get("seeds", ()), *self.seeds}, self.config.get("rounds", 0)
        return bool(wanted) and all((self.summary_of(seed) or {"rounds": -1})["rounds"] >= rounds for seed in wanted)

    def summary_of(self, seed: int) -> dict[str, Any] | None:
        """summary.json of a seed that ran to its end, or None: its results, as `summary` has them."""
        sums = self._sums(seed)
        if sums is not None and not sums.complete:  # it goes on, and the file is of the rounds before
            return None
        path = self._file(seed, "summary.json")
        found = read_json(path) if path.exists() else None
        if found is not None and not isinstance(found.get("rounds"), int | float):
            raise damaged(path, "`rounds` is no number")
        return found

    @property
    def unchecked(self) -> tuple[int, ...]:
        """The seeds without sums.json, whose files are taken as they are."""
        return tuple(seed for seed in self.seeds if self._sums(seed) is None)

    def check(self) -> None:
        """Hold every file of every seed, checkpoints too, against its sum; raises RunError where one is damaged."""
        for seed in self.seeds:
            if (sums := self._sums(seed)) is not None:
                sums.check_all(self._seed(seed))

    def _sums(self, seed: int) -> Sums | None:
        """The sums of one seed, where it has any; raises RunError where they are of another seed or experiment."""
        sums = Sums.read(self._seed(seed))
        if sums is None:
            return None
        if sums.seed != seed:
            raise DamagedError(
                f"{self._seed(seed)} holds seed {sums.seed}, by its sums.json: put back what was there, or "
                f"{run_again(self._seed(seed)).removeprefix('restore it, or ')}"
            )
        path = self.folder / "config.toml"
        if not (sums.fits(self.config) or sums.fits(read_config(path))):  # the run may have been made longer meanwhile
            raise RunError(
                f"{self._seed(seed)} was run with other settings than those in {path}: one of them was changed or "
                f"comes from another run; put it back, or {MENDED}"
            )
        return sums

    def _file(self, seed: int, name: str) -> Path:
        """The path of a file of a seed, held against its sum."""
        sums, folder = self._sums(seed), self._seed(seed)
        if sums is None:
            return folder / name
        try:
            return sums.check(folder, name)
        except DamagedError:
            if Sums.read(folder) == sums:
                raise
            return self._file(seed, name)  # the run went on meanwhile

    @cached_property
    def records(self) -> pd.DataFrame:
        """A row for each seed, round and agent: who it is and its metrics, NaN where there is none.

        Accuracies and rates are fractions of 1, there only in rounds that were evaluated, for benign agents only.
        `test_loss`, `global_accuracy` and `global_loss` are columns where they are measured.
        """
        names = [*(name for name in RESERVED if name not in SOMETIMES), *self._own_metrics]
        tables = [self.records_of(seed) for seed in self.seeds]
        return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=names)

    @property
    def _own_metrics(self) -> list[str]:
        return [metric_name(str(each.get("name"))) for each in self.config.get("metrics", [])]

    def records_of(self, seed: int) -> pd.DataFrame:
        """The records of one seed, read anew."""
        agents = self._agents_of(seed)
        rounds: list[int] = []
        columns: dict[str, list[float | None]] = {key: [] for key in (*METRICS, *EVALUATED, *self._own_metrics)}
        path = self._file(seed, "metrics.jsonl")
        for _, line in read_lines(path):
            for key in SOMETIMES:
                if key in line and key not in columns:
                    columns[key] = [None] * (len(rounds) * len(agents))
            rounds.append(line["round"])
            for key, values in columns.items():
                found = line.get(key) or [None] * len(agents)
                if len(found) != len(agents):
                    what = f"round {line['round']} has {len(found)} values of {key} for {len(agents)} agents"
                    raise damaged(path, what)
                values.extend(found)
        table = agents.iloc[np.tile(np.arange(len(agents)), len(rounds))].reset_index(drop=True)
        table.insert(1, "round", np.repeat(np.array(rounds, dtype=np.int64), len(agents)))
        return table.assign(**{key: np.array(values, dtype=float) for key, values in columns.items()})

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """A row for each seed, round, agent and peer whose model the agent received: its weight in m_j.

        The agent's own weight is the row where `peer` equals `agent`, so that an agent's rows of a round sum to 1. `f`
        is the number of attackers that its rule assumed, NaN where it assumes none.
        """
        columns: dict[str, list[Any]] = {key: [] for key in ("seed", "round", "agent", "peer", "weight", "f")}
        for seed in self.seeds:
            path = self._file(seed, "pairs.jsonl")
            for _, line in read_lines(path):
                try:
                    rows = zip(line["ids"], line["weights"], line["own"], strict=True)
                    assumed = line.get("f") or [None] * len(line["ids"])
                    for agent, (ids, weights, own) in enumerate(rows):
                        columns["seed"] += [seed] * (len(ids) + 1)
                        columns["round"] += [line["round"]] * (len(ids) + 1)
                        columns["agent"] += [agent] * (len(ids) + 1)
                        columns["peer"] += [*ids, agent]
                        columns["weight"] += [*weights, own]
                        columns["f"] += [assumed[agent]] * (len(ids) + 1)
                except (KeyError, IndexError, TypeError, ValueError) as error:
                    raise damaged(path, f"round {line['round']} is no list of peers and weights") from error
            if len(columns["peer"]) != len(columns["weight"]):
                raise damaged(path, "a round has not as many weights as peers")
        kinds = {key: float if key in ("weight", "f") else np.int64 for key in columns}
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
            raise damaged(self._seed(seed) / "agents.json", f"it lacks a value for an agent: {error}") from error

    @cached_property
    def timing(self) -> pd.DataFrame:
        """A row for each seed and round: the seconds that each phase took."""
        lines = [
            {"seed": seed, **line} for seed in self.seeds for _, line in read_lines(self._file(seed, "timing.jsonl"))
        ]
        return pd.DataFrame(lines) if lines else pd.DataFrame(columns=["seed", "round"])

    def model(self, agent: int, *, seed: int | None = None, data_dir: str | PathLike[str] | None = None) -> Any:
        """The model of an agent at the last checkpoint of a seed (by default the first), as the `nn.Module` that the
        configuration names, in evaluation mode.

        It reads samples as the agent's cluster sees them. The data set is made anew, from `data_dir` where it needs
        one. Raises RunError where there is no checkpoint or no such agent.
        """
        return self._learned().model(self, agent, seed, data_dir)

    def confusion(
        self, agent: int, *, seed: int | None = None, data_dir: str | PathLike[str] | None = None
    ) -> pd.DataFrame:
        """How often that model takes a test sample of a class (row) for another (column): the confusion matrix, by the
        names of the classes."""
        found: pd.DataFrame = self._learned().confusion(self, agent, seed, data_dir)
        return found

    @staticmethod
    def _learned() -> Any:
        """What makes models of records: it knows how a round is made, which whoever reads records need not import."""
        return importlib.import_module("fedcb2o.experiments.runs.trained_models")

    def about(self, seed: int) -> dict[str, Any]:
        """agents.json of one seed: class names, clusters, angles, dimension, and a list over agents for each fact."""
        return read_json(self._file(seed, "agents.json"))

    def samples(self, seed: int) -> UInt8[np.ndarray, "K images H W"] | None:
        """A few images as each cluster sees them, uint8 [K, 10, H, W]; None where the data are no images."""
        path = self._file(seed, "samples.safetensors")
        try:
            return load_file(path)["images"] if path.exists() else None
        except OSError as error:
            raise unreadable(path, error) from error
        except (KeyError, SafetensorError) as error:
            raise damaged(path, str(error)) from error

    def _seed(self, seed: object) -> Path:
        return self.folder / f"seed-{seed}"

    def __repr__(self) -> str:
        seeds, done = len(self.seeds), "damaged"
        with suppress(RunError):
            done = "complete" if self.complete else f"incomplete, seeds so far {list(self.seeds)}"
        return f"Run({str(self.folder)!r}: {self.title}, {seeds} seed{'s' * (seeds != 1)}, {done})"


def seeds_in(folder: Path) -> dict[int, Path]:
    """The seeds of a run that have begun, in ascending order, and their folders."""
    begun = (path.parent for name in ("agents.json", SUMS) for path in folder.glob(f"seed-*/{name}"))
    found = {path.name.removeprefix("seed-"): path for path in begun}
    return {int(seed): found[seed] for seed in sorted(filter(str.isdecimal, found), key=int)}


def read_config(path: Path) -> dict[str, Any]:
    """What a run's config.toml holds; raises DamagedError where that is no run's settings."""
    try:
        found = read_toml(path)
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is gone; {MENDED}") from error
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise DamagedError(f"{path} cannot be read ({error}); {MENDED}") from error
    for key, kind in KINDS.items():
        if not isinstance(found.get(key, kind()), kind):
            raise DamagedError(f"{path} is damaged: `{key}` is {found[key]!r}; {MENDED}")
    if not all(type(seed) is int for seed in found.get("seeds", ())):
        raise DamagedError(f"{path} is damaged: `seeds` is {found['seeds']!r}; {MENDED}")
    return found

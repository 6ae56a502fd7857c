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
from fedcb2o.records.checksums import MANIFEST_FILE as SUMS
from fedcb2o.records.checksums import Manifest
from fedcb2o.records.files import DamagedError, damaged_error, read_error, read_json, rerun_advice
from fedcb2o.records.jsonl import read_lines
from fedcb2o.records.toml import read_toml

AGENT_COLUMNS = ("cluster", "malicious", "num_samples", "source_in_validation")
_ROUND_METRICS = ("train_loss", "validation_loss", "malicious_weight", "answered")
_CONFIG_TYPES = {
    "name": str,
    "title": str,
    "description": str,
    "rounds": int,
    "seeds": list,
    "agents": dict,
}
_REWRITE_ADVICE = "`fedcb2o run` of the experiment with this --out and --resume writes it anew"
EVALUATED_METRICS = ("accuracy", "source_accuracy", "attack_success_rate")
OPTIONAL_METRICS = ("test_loss", "global_accuracy", "global_loss")
"""What is evaluated where an experiment names a loss, or where agents have test samples of their own and others that
test everybody: columns that are there only then."""
RESERVED_COLUMNS = (
    "seed",
    "round",
    "agent",
    *AGENT_COLUMNS,
    *_ROUND_METRICS,
    *EVALUATED_METRICS,
    *OPTIONAL_METRICS,
)
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
            raise RunError(
                f"there is no run in {self.folder}: give the folder that `fedcb2o run --out` wrote"
            )
        if not (self.folder / "config.toml").is_file() and not find_seeds(self.folder):
            inside = sorted(path.parent.name for path in self.folder.glob("*/config.toml"))
            cure = (
                f"it holds the runs {', '.join(inside)}: name those"
                if inside
                else "give a folder written by it"
            )
            if (self.folder / "grid.toml").is_file():
                cure = f"it is that of a grid: `fedcb2o report {self.folder}` shows it, and its runs lie in its cells/"
            raise RunError(
                f"{self.folder} was not written by `fedcb2o run` (it holds no config.toml); {cure}"
            )
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
        return tuple(find_seeds(self.folder))

    @property
    def complete(self) -> bool:
        """Whether every seed of the configuration has run to its end."""
        wanted = {*self.config.get("seeds", ()), *self.seeds}
        rounds = self.config.get("rounds", 0)
        return bool(wanted) and all(
            (self.summary_of(seed) or {"rounds": -1})["rounds"] >= rounds for seed in wanted
        )

    def summary_of(self, seed: int) -> dict[str, Any] | None:
        """summary.json of a seed that ran to its end, or None: its results, as `summary` has them."""
        sums = self._manifest(seed)
        if (
            sums is not None and not sums.complete
        ):  # it goes on, and the file is of the rounds before
            return None
        path = self._verified_path(seed, "summary.json")
        found = read_json(path) if path.exists() else None
        if found is not None and not isinstance(found.get("rounds"), int | float):
            raise damaged_error(path, "`rounds` is no number")
        return found

    @property
    def unchecked(self) -> tuple[int, ...]:
        """The seeds without sums.json, whose files are taken as they are."""
        return tuple(seed for seed in self.seeds if self._manifest(seed) is None)

    def check(self) -> None:
        """Hold every file of every seed, checkpoints too, against its sum; raises RunError where one is damaged."""
        for seed in self.seeds:
            if (sums := self._manifest(seed)) is not None:
                sums.verify_all(self._seed_directory(seed))

    def _manifest(self, seed: int) -> Manifest | None:
        """The sums of one seed, where it has any; raises RunError where they are of another seed or experiment."""
        sums = Manifest.read(self._seed_directory(seed))
        if sums is None:
            return None
        if sums.seed != seed:
            raise DamagedError(
                f"{self._seed_directory(seed)} holds seed {sums.seed}, by its sums.json: put back what was there, or "
                f"{rerun_advice(self._seed_directory(seed)).removeprefix('restore it, or ')}"
            )
        path = self.folder / "config.toml"
        if not (
            sums.can_resume(self.config) or sums.can_resume(read_config(path))
        ):  # the run may have been made longer meanwhile
            raise RunError(
                f"{self._seed_directory(seed)} was run with other settings than those in {path}: one of them was changed or "
                f"comes from another run; put it back, or {_REWRITE_ADVICE}"
            )
        return sums

    def _verified_path(self, seed: int, name: str) -> Path:
        """The path of a file of a seed, held against its sum."""
        sums = self._manifest(seed)
        folder = self._seed_directory(seed)
        if sums is None:
            return folder / name
        try:
            return sums.verify(folder, name)
        except DamagedError:
            if Manifest.read(folder) == sums:
                raise
            return self._verified_path(seed, name)  # the run went on meanwhile

    @cached_property
    def records(self) -> pd.DataFrame:
        """A row for each seed, round and agent: who it is and its metrics, NaN where there is none.

        Accuracies and rates are fractions of 1, there only in rounds that were evaluated, for benign agents only.
        `test_loss`, `global_accuracy` and `global_loss` are columns where they are measured.
        """
        names = [
            *(name for name in RESERVED_COLUMNS if name not in OPTIONAL_METRICS),
            *self._custom_metrics,
        ]
        tables = [self.records_of(seed) for seed in self.seeds]
        return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=names)

    @property
    def _custom_metrics(self) -> list[str]:
        return [metric_name(str(each.get("name"))) for each in self.config.get("metrics", [])]

    def records_of(self, seed: int) -> pd.DataFrame:
        """The records of one seed, read anew."""
        agents = self._agent_table(seed)
        rounds: list[int] = []
        columns: dict[str, list[float | None]] = {
            key: [] for key in (*_ROUND_METRICS, *EVALUATED_METRICS, *self._custom_metrics)
        }
        path = self._verified_path(seed, "metrics.jsonl")
        for _, line in read_lines(path):
            for key in OPTIONAL_METRICS:
                if key in line and key not in columns:
                    columns[key] = [None] * (len(rounds) * len(agents))
            rounds.append(line["round"])
            for key, values in columns.items():
                found = line.get(key) or [None] * len(agents)
                if len(found) != len(agents):
                    what = f"round {line['round']} has {len(found)} values of {key} for {len(agents)} agents"
                    raise damaged_error(path, what)
                values.extend(found)
        table = agents.iloc[np.tile(np.arange(len(agents)), len(rounds))].reset_index(drop=True)
        table.insert(1, "round", np.repeat(np.array(rounds, dtype=np.int64), len(agents)))
        return table.assign(
            **{key: np.array(values, dtype=float) for key, values in columns.items()}
        )

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """A row for each seed, round, agent and peer whose model the agent received: its weight in m_j.

        The agent's own weight is the row where `peer` equals `agent`, so that an agent's rows of a round sum to 1. `f`
        is the number of attackers that its rule assumed, NaN where it assumes none.
        """
        columns: dict[str, list[Any]] = {
            key: [] for key in ("seed", "round", "agent", "peer", "weight", "f")
        }
        for seed in self.seeds:
            path = self._verified_path(seed, "pairs.jsonl")
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
                    raise damaged_error(
                        path, f"round {line['round']} is no list of peers and weights"
                    ) from error
            if len(columns["peer"]) != len(columns["weight"]):
                raise damaged_error(path, "a round has not as many weights as peers")
        kinds = {key: float if key in ("weight", "f") else np.int64 for key in columns}
        return pd.DataFrame(
            {key: np.array(values, dtype=kinds[key]) for key, values in columns.items()}
        )

    @cached_property
    def agents(self) -> pd.DataFrame:
        """A row for each seed and agent: cluster, malicious or not, training samples, source samples in validation."""
        tables = [self._agent_table(seed) for seed in self.seeds]
        return (
            pd.concat(tables, ignore_index=True)
            if tables
            else pd.DataFrame(columns=["seed", "agent", *AGENT_COLUMNS])
        )

    def _agent_table(self, seed: int) -> pd.DataFrame:
        about = self.about(seed)
        try:
            table = pd.DataFrame({key: about[key] for key in AGENT_COLUMNS})
            table.insert(0, "agent", np.arange(len(table)))
            table.insert(0, "seed", seed)
            return table.astype({"malicious": bool, "source_in_validation": float})
        except (KeyError, TypeError, ValueError) as error:
            raise damaged_error(
                self._seed_directory(seed) / "agents.json",
                f"it lacks a value for an agent: {error}",
            ) from error

    @cached_property
    def timing(self) -> pd.DataFrame:
        """A row for each seed and round: the seconds that each phase took."""
        lines = [
            {"seed": seed, **line}
            for seed in self.seeds
            for _, line in read_lines(self._verified_path(seed, "timing.jsonl"))
        ]
        return pd.DataFrame(lines) if lines else pd.DataFrame(columns=["seed", "round"])

    def model(
        self, agent: int, *, seed: int | None = None, data_dir: str | PathLike[str] | None = None
    ) -> Any:
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
        return read_json(self._verified_path(seed, "agents.json"))

    def samples(self, seed: int) -> UInt8[np.ndarray, "K images H W"] | None:
        """A few images as each cluster sees them, uint8 [K, 10, H, W]; None where the data are no images."""
        path = self._verified_path(seed, "samples.safetensors")
        try:
            return load_file(path)["images"] if path.exists() else None
        except OSError as error:
            raise read_error(path, error) from error
        except (KeyError, SafetensorError) as error:
            raise damaged_error(path, str(error)) from error

    def _seed_directory(self, seed: object) -> Path:
        return self.folder / f"seed-{seed}"

    def __repr__(self) -> str:
        seeds = len(self.seeds)
        done = "damaged"
        with suppress(RunError):
            done = "complete" if self.complete else f"incomplete, seeds so far {list(self.seeds)}"
        return f"Run({str(self.folder)!r}: {self.title}, {seeds} seed{'s' * (seeds != 1)}, {done})"


def find_seeds(folder: Path) -> dict[int, Path]:
    """The seeds of a run that have begun, in ascending order, and their folders."""
    begun = (
        path.parent for name in ("agents.json", SUMS) for path in folder.glob(f"seed-*/{name}")
    )
    found = {path.name.removeprefix("seed-"): path for path in begun}
    return {int(seed): found[seed] for seed in sorted(filter(str.isdecimal, found), key=int)}


def read_config(path: Path) -> dict[str, Any]:
    """What a run's config.toml holds; raises DamagedError where that is no run's settings."""
    try:
        found = read_toml(path)
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is gone; {_REWRITE_ADVICE}") from error
    except OSError as error:
        raise read_error(path, error) from error
    except ValueError as error:
        raise DamagedError(f"{path} cannot be read ({error}); {_REWRITE_ADVICE}") from error
    for key, kind in _CONFIG_TYPES.items():
        if not isinstance(found.get(key, kind()), kind):
            raise DamagedError(f"{path} is damaged: `{key}` is {found[key]!r}; {_REWRITE_ADVICE}")
    if not all(type(seed) is int for seed in found.get("seeds", ())):
        raise DamagedError(f"{path} is damaged: `seeds` is {found['seeds']!r}; {_REWRITE_ADVICE}")
    return found

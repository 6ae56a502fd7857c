"""What a run has written so far, read from its folder."""

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
from fedcb2o.records.files import damaged, read_json
from fedcb2o.records.lines import read_lines
from fedcb2o.records.toml import read_toml

AGENTS = ("cluster", "malicious", "num_samples", "source_in_validation")
METRICS = ("train_loss", "validation_loss", "malicious_weight", "answered")
EVALUATED = ("accuracy", "source_accuracy", "attack_success_rate")
FREE = ("name", "title", "description", "seeds", "checkpoint_every")
"""The settings that no number of a round depends on."""


@dataclass(frozen=True, init=False)
class Run:
    """What a run has written so far, read from its folder; raises RunError if that is no run's folder.

    A table is read when it is first asked for and then kept: open the folder anew to see a running run's progress.
    """

    folder: Path

    def __init__(self, folder: str | Path) -> None:
        if not isinstance(folder, str | PathLike):
            raise RunError(f"a run is read from its folder's path, got a {type(folder).__name__}")
        object.__setattr__(self, "folder", Path(folder))
        if not self.folder.is_dir():
            raise RunError(f"there is no run in {self.folder}: give the folder that `fedcb2o run --out` wrote")
        if not (self.folder / "config.toml").is_file():
            inside = sorted(path.parent.name for path in self.folder.glob("*/config.toml"))
            cure = f"it holds the runs {', '.join(inside)}: name those" if inside else "give a folder written by it"
            if (self.folder / "grid.toml").is_file():
                cure = f"it is that of a grid: `fedcb2o report {self.folder}` shows it, and its runs lie in its cells/"
            raise RunError(f"{self.folder} was not written by `fedcb2o run` (it holds no config.toml); {cure}")
        _ = self.config, self.seeds

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved experiment, config.toml."""
        path = self.folder / "config.toml"
        try:
            return read_toml(path)
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
        for _, line in read_lines(path):
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

        The agent's own weight is the row where `peer` equals `agent`, so that an agent's rows of a round sum to 1.
        """
        columns: dict[str, list[Any]] = {key: [] for key in ("seed", "round", "agent", "peer", "weight")}
        for seed in self.seeds:
            path = self._seed(seed) / "pairs.jsonl"
            for _, line in read_lines(path):
                try:
                    rows = zip(line["ids"], line["weights"], line["own"], strict=True)
                    for agent, (ids, weights, own) in enumerate(rows):
                        columns["seed"] += [seed] * (len(ids) + 1)
                        columns["round"] += [line["round"]] * (len(ids) + 1)
                        columns["agent"] += [agent] * (len(ids) + 1)
                        columns["peer"] += [*ids, agent]
                        columns["weight"] += [*weights, own]
                except (KeyError, TypeError, ValueError) as error:
                    raise damaged(path, f"round {line['round']} is no list of peers and weights") from error
            if len(columns["peer"]) != len(columns["weight"]):
                raise damaged(path, "a round has not as many weights as peers")
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
            raise damaged(self._seed(seed) / "agents.json", f"it lacks a value for an agent: {error}") from error

    @cached_property
    def timing(self) -> pd.DataFrame:
        """A row for each seed and round: the seconds that each phase took."""
        lines = [
            {"seed": seed, **line} for seed in self.seeds for _, line in read_lines(self._seed(seed) / "timing.jsonl")
        ]
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
            raise damaged(path, str(error)) from error

    def _seed(self, seed: object) -> Path:
        return self.folder / f"seed-{seed}"

    def __repr__(self) -> str:
        done = "complete" if self.complete else f"incomplete, seeds so far {list(self.seeds)}"
        seeds = len(self.seeds)
        return f"Run({str(self.folder)!r}: {self.title}, {seeds} seed{'s' * (seeds != 1)}, {done})"

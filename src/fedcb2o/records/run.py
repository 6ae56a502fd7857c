"""The records of a run, read from its folder."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import UInt8
from safetensors import SafetensorError
from safetensors.numpy import load_file

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.printable import one_line
from fedcb2o.records._checksums import (
    BEST_FILE,
    CHECKPOINT_FILE,
    MANIFEST_FILE,
    Manifest,
    read_checkpoint_header,
)
from fedcb2o.records._files import DamagedError, damaged_error, read_error, read_json, rerun_advice
from fedcb2o.records._jsonl import log_path, read_lines
from fedcb2o.records._summary import summary
from fedcb2o.records.metrics import (
    CLOCK_COLUMNS,
    OPTIONAL_METRICS,
    STANDARD_METRICS,
    Metric,
    chosen_metrics,
)
from fedcb2o.records.toml import read_toml
from fedcb2o.safe_files import check_regular

AGENT_COLUMNS = ("cluster", "malicious", "num_samples", "source_in_validation")
_ROUND_METRICS = ("train_loss", "validation_loss", "malicious_weight", "answered")
RESERVED_COLUMNS = (
    "seed",
    "round",
    "agent",
    *AGENT_COLUMNS,
    *_ROUND_METRICS,
    *STANDARD_METRICS,
    *OPTIONAL_METRICS,
    *CLOCK_COLUMNS,
)
"""Columns of the records, which are no names for the metrics of an experiment."""
_CONFIG_TYPES = {
    "name": str,
    "title": str,
    "description": str,
    "rounds": int,
    "seeds": list,
    "agents": dict,
}
_SEED = re.compile("[0-9]{1,20}")
_DATA_CHECKSUM = re.compile("[0-9a-f]{8}(-[0-9a-f]{8})*")
_MAX_SEEDS = 10_000
_MAX_ROWS = 2**26  # rounds times agents; a line of a few bytes has a value for each agent
_MAX_NAMES = 20
_model_readers: list[Callable[[], Any]] = []
_REMEDY = "restore it, or run the experiment again with another --out"


def set_model_reader(loader: Callable[[], Any]) -> None:
    """Set the reader of trained models behind `Run.model` and its like.

    Reading models needs the code that builds an experiment, which records do not import. The loader
    returns an object with `load_model`, `confusion_matrix`, `generated_texts` and `membership`.
    """
    _model_readers[:] = [loader]


@contextmanager
def refuse_models(message: str) -> Iterator[None]:
    """Let `Run.model` and its like raise ConfigError, because they would run code of others."""
    previous = list(_model_readers)

    def refuse() -> None:
        raise ConfigError(message)

    _model_readers[:] = [refuse]
    try:
        yield
    finally:
        _model_readers[:] = previous


@dataclass(frozen=True, init=False)
class Run:
    """The records of a run, read from its folder.

    A table is read at the first access and then kept. Open the folder again to see the progress of
    a run. Each file is verified by its checksum in sums.json before it is read. RunError names a
    damaged file and the remedy.

    Args:
        folder: Folder that `fedcb2o run --out` wrote.

    Raises:
        RunError: The folder does not contain a run.
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
            raise self._no_run_error()
        _ = self.config, self.seeds

    def _no_run_error(self) -> RunError:
        found = self.folder.glob("*/config.toml")
        names = sorted(path.parent.name for path in islice(found, _MAX_NAMES))
        remedy = "give a folder written by it"
        if (self.folder / "grid.toml").is_file():
            remedy = (
                f"it is that of a grid: `fedcb2o report {self.folder}` shows it, and its runs are "
                "in its cells/"
            )
        elif names:
            remedy = f"it holds the runs {', '.join(names)}: name those"
        return RunError(
            f"{self.folder} was not written by `fedcb2o run` (it holds no config.toml); {remedy}"
        )

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved experiment, config.toml, as nested tables with defaults."""
        return read_config(self.folder / "config.toml")

    @property
    def name(self) -> str:
        """The name of the experiment, or of the folder without one."""
        return str(self.config.get("name") or self.folder.name)

    @property
    def title(self) -> str:
        """The title of this run in tables and legends; by default its name."""
        return one_line(str(self.config.get("title", ""))) or self.name

    @property
    def criterion_from_round(self) -> int:
        """The round T_G from which the run uses its criterion; 0 for one that does not switch."""
        return int(self.config.get("algorithm", {}).get("criterion_from_round") or 0)

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that have begun, finished or not, in ascending order."""
        return tuple(find_seeds(self.folder))

    @property
    def complete(self) -> bool:
        """True if every seed of the configuration has finished; False without a seed."""
        wanted = {*self.config.get("seeds", ()), *self.seeds}
        rounds = self.config.get("rounds", 0)
        for seed in wanted:
            summary = self.summary_of(seed)
            if (-1 if summary is None else summary["rounds"]) < rounds:
                return False
        return bool(wanted)

    def summary_of(self, seed: int) -> dict[str, Any] | None:
        """Read summary.json of a seed; None for one that has not finished."""
        manifest = self._manifest(seed)
        if manifest is not None and not manifest.complete:  # the file has the rounds before
            return None
        path = self._verified_path(seed, "summary.json")
        if not path.exists():
            return None
        content = read_json(path)
        if not isinstance(content.get("rounds"), int | float):
            raise damaged_error(path, "`rounds` is no number")
        return content

    @property
    def unchecked(self) -> tuple[int, ...]:
        """The seeds without sums.json, whose files are not verified, in ascending order."""
        return tuple(seed for seed in self.seeds if self._manifest(seed) is None)

    def check(self) -> None:
        """Verify every file of every seed, checkpoints included.

        Raises:
            RunError: A file is damaged.
        """
        for seed in self.seeds:
            manifest = self._manifest(seed)
            if manifest is not None:
                manifest.verify_all(self._seed_directory(seed))

    def _manifest(self, seed: int) -> Manifest | None:
        """Read the checksums of one seed, and verify seed and settings."""
        folder = self._seed_directory(seed)
        manifest = Manifest.read(folder)
        if manifest is None:
            return None
        if manifest.seed != seed:
            raise DamagedError(
                f"{folder} holds seed {manifest.seed}, by its sums.json: put back what was there, "
                f"or {rerun_advice(folder).removeprefix('restore it, or ')}"
            )
        path = self.folder / "config.toml"
        # The second look: the run may have been extended since the folder was opened.
        if not (manifest.can_resume(self.config) or manifest.can_resume(read_config(path))):
            raise RunError(
                f"{folder} was run with other settings than those in {path}: one of them was "
                "changed or comes from another run; put it back"
            )
        return manifest

    def _verified_path(self, seed: int, name: str) -> Path:
        """Return the path of a file of a seed after its verification."""
        manifest = self._manifest(seed)
        folder = self._seed_directory(seed)
        if manifest is None:
            return folder / name
        try:
            return manifest.verify(folder, name)
        except DamagedError:
            # A run that continues replaces files while they are read. Only a stable manifest proves
            # damage.
            if Manifest.read(folder) == manifest:
                raise
            return self._verified_path(seed, name)  # the run has continued in the meantime

    def _verified_log(self, seed: int, name: str) -> Path:
        return self._verified_path(seed, log_path(self._seed_directory(seed), name).name)

    @cached_property
    def records(self) -> pd.DataFrame:
        """One row per seed, round and agent: description and metrics.

        Columns are seed, round, agent, cluster, malicious, num_samples, source_in_validation and
        one per metric; with a clock also hours, bytes, undelivered and trained. Accuracies and
        rates are fractions of 1. They exist in evaluated rounds and for benign agents; what was not
        measured is NaN.
        """
        tables = [self.records_of(seed) for seed in self.seeds]
        if tables:
            return pd.concat(tables, ignore_index=True)
        optional = (*OPTIONAL_METRICS, *CLOCK_COLUMNS)
        names = [name for name in RESERVED_COLUMNS if name not in optional]
        return pd.DataFrame(columns=[*names, *self.custom_metrics])

    @cached_property
    def custom_metrics(self) -> dict[str, Metric]:
        """The metrics that the configuration chose by its key `metrics`, by column."""
        return chosen_metrics(self.config.get("metrics", []))

    def summary(self) -> pd.DataFrame:
        """Summarise the results of each seed over the benign agents at its last evaluated round.

        Returns:
            One row per seed: each metric as mean over the agents, of the worst agent and of the
            worst tenth; of a metric of the key `metrics` also the number of agents without a value.
        """
        return summary(self.records, self.custom_metrics)

    @cached_property
    def data_checksums(self) -> dict[int, str]:
        """Checksums of the data of each seed, of which the last checkpoint has a record."""
        found = {}
        for seed in self.seeds:
            path = self._seed_directory(seed) / CHECKPOINT_FILE
            header: dict[str, str] = {}
            # Models are not read, so that a damaged checkpoint does not matter here.
            with suppress(RunError):
                header = read_checkpoint_header(path) if path.exists() else {}
            data = header.get("fingerprint", "").rpartition(" data ")[2]
            if _DATA_CHECKSUM.fullmatch(data):
                found[seed] = data
        return found

    def records_of(self, seed: int) -> pd.DataFrame:
        """Read the rows of `records` for one seed from its files."""
        agents = self._agent_table(seed)
        count = len(agents)
        rounds: list[int] = []
        names = (*_ROUND_METRICS, *STANDARD_METRICS, *self.custom_metrics)
        columns: dict[str, list[float | None]] = {name: [] for name in names}

        path = self._verified_log(seed, "metrics")
        for _, line in read_lines(path):
            if "hours" in line:
                line |= {name: [line.get(name)] * count for name in CLOCK_COLUMNS}
            for name in (*OPTIONAL_METRICS, *CLOCK_COLUMNS):
                # A metric may begin in a later round of a run that was continued with it.
                if name in line and name not in columns:
                    columns[name] = [None] * (len(rounds) * count)
            rounds.append(line["round"])
            if len(rounds) * count > _MAX_ROWS:
                raise RunError(
                    f"{path} has more than {_MAX_ROWS} values of each metric, which do not fit "
                    "into a table"
                )
            for name, column in columns.items():
                values = line.get(name) or [None] * count
                if len(values) != count:
                    raise damaged_error(
                        path,
                        f"round {line['round']} has {len(values)} values of {name} for {count} "
                        "agents",
                    )
                column.extend(values)

        table = agents.iloc[np.tile(np.arange(count), len(rounds))].reset_index(drop=True)
        table.insert(1, "round", np.repeat(np.array(rounds, dtype=np.int64), count))
        return table.assign(
            **{name: np.array(column, dtype=float) for name, column in columns.items()}
        )

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """One row per received model: its weight in m_j.

        Columns are seed, round, agent, peer, weight and f, the number of attackers that the rule
        assumes (NaN without one). The weight of the agent's own model is in the row where `peer`
        equals `agent`, so that the rows of an agent and round sum to 1. Of more than 10,000 agents
        it has 10,000, at equal distances.
        """
        columns: dict[str, list[Any]] = {
            name: [] for name in ("seed", "round", "agent", "peer", "weight", "f")
        }
        for seed in self.seeds:
            path = self._verified_log(seed, "pairs")
            for _, line in read_lines(path):
                try:
                    _append_pairs(columns, seed, line)
                except (KeyError, IndexError, TypeError, ValueError) as error:
                    reason = f"round {line['round']} is no list of peers and weights"
                    raise damaged_error(path, reason) from error
            if len(columns["peer"]) != len(columns["weight"]):
                raise damaged_error(path, "a round has not as many weights as peers")

        arrays: dict[str, np.ndarray] = {}
        for name, values in columns.items():
            dtype = float if name in ("weight", "f") else np.int64
            arrays[name] = np.array(values, dtype=dtype)
        return pd.DataFrame(arrays)

    @cached_property
    def agents(self) -> pd.DataFrame:
        """One row per seed and agent: cluster, role, numbers of samples."""
        tables = [self._agent_table(seed) for seed in self.seeds]
        if tables:
            return pd.concat(tables, ignore_index=True)
        return pd.DataFrame(columns=["seed", "agent", *AGENT_COLUMNS])

    def _agent_table(self, seed: int) -> pd.DataFrame:
        metadata = self.about(seed)
        try:
            table = pd.DataFrame({name: metadata[name] for name in AGENT_COLUMNS})
            table.insert(0, "agent", np.arange(len(table)))
            table.insert(0, "seed", seed)
            return table.astype({"malicious": bool, "source_in_validation": float})
        except (KeyError, TypeError, ValueError) as error:
            path = self._seed_directory(seed) / "agents.json"
            raise damaged_error(path, f"it lacks a value for an agent: {error}") from error

    @cached_property
    def timing(self) -> pd.DataFrame:
        """One row per seed and round: the seconds of each phase; none without timing.jsonl."""
        lines = []
        for seed in self.seeds:
            path = self._verified_log(seed, "timing")
            lines += [{"seed": seed, **line} for _, line in read_lines(path)]
        return pd.DataFrame(lines) if lines else pd.DataFrame(columns=["seed", "round"])

    def best_rounds(self) -> pd.DataFrame:
        """Return the round of each agent with its lowest validation loss (the key `keep_best`).

        Returns:
            Columns seed, agent, round and validation_loss, of agents with validation samples. The
            results of these rounds are in `records`.

        Raises:
            RunError: The run kept no best models, or a file is damaged.
        """
        tables = []
        for seed in self.seeds:
            best = self.best_models(seed)
            columns = {"round": best["rounds"], "validation_loss": best["losses"]}
            table = pd.DataFrame(columns).rename_axis("agent").reset_index()
            tables.append(table[table["round"] > 0].assign(seed=seed))
        return pd.concat(tables, ignore_index=True)[["seed", "agent", "round", "validation_loss"]]

    def best_models(self, seed: int) -> dict[str, np.ndarray]:
        """Read best.safetensors of one seed.

        Args:
            seed: Seed of the run.

        Returns:
            "models" [N, d], "rounds" [N], 0 for agents without validation samples, and "losses".

        Raises:
            RunError: The run kept no best models, or the file is damaged.
        """
        path = self._seed_directory(seed) / BEST_FILE
        if not path.exists():
            raise RunError(f"there is no {path}: run it with `keep_best` = true")
        try:
            check_regular(path)
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise damaged_error(path, str(error)) from error

    def model(
        self,
        agent: int,
        *,
        seed: int | None = None,
        data_dir: str | PathLike[str] | None = None,
        best: bool = False,
    ) -> Any:
        """Load the model of an agent at the last checkpoint, or after its best round.

        The model expects samples in the form that the cluster of the agent sees.

        Args:
            agent: Id of the agent, from 0.
            seed: Seed of the run; by default the first.
            data_dir: Folder of the data set, which is built again.
            best: Whether to take the round with the lowest validation loss (`keep_best`).

        Returns:
            The `nn.Module` that the configuration names, in evaluation mode.

        Raises:
            RunError: There is no checkpoint or no such agent.
        """
        return self._model_reader().load_model(self, agent, seed, data_dir, best)

    def confusion(
        self,
        agent: int | None = None,
        *,
        seed: int | None = None,
        data_dir: str | PathLike[str] | None = None,
    ) -> pd.DataFrame:
        """Compute the confusion matrix of an agent on its test samples.

        Args:
            agent: Id of the agent, from 0; by default the sum over the benign agents.
            seed: Seed of the run; by default the first.
            data_dir: Folder of the data set, which is built again.

        Returns:
            Number of samples by true class (row) and predicted class (column).

        Raises:
            RunError: There is no checkpoint, no such agent, or the data have no classes.
        """
        matrix: pd.DataFrame = self._model_reader().confusion_matrix(self, agent, seed, data_dir)
        return matrix

    def membership(
        self, *, seed: int | None = None, data_dir: str | PathLike[str] | None = None
    ) -> pd.DataFrame:
        """Measure membership inference by a loss threshold against the benign agents.

        Args:
            seed: Seed of the run; by default the first.
            data_dir: Folder of the data set, which is built again.

        Returns:
            Columns agent, model ("sent" to others, or "kept" after averaging), auc, and tpr, the
            true positive rate at 1% false positives.

        Raises:
            RunError: There is no checkpoint.
        """
        table: pd.DataFrame = self._model_reader().membership(self, seed, data_dir)
        return table

    def texts(
        self,
        agent: int = 0,
        *,
        seed: int | None = None,
        data_dir: str | PathLike[str] | None = None,
    ) -> pd.DataFrame:
        """Let the language model of an agent answer held-out prompts, at the last checkpoint.

        Args:
            agent: Id of the agent, from 0.
            seed: Seed of the run; by default the first.
            data_dir: Folder of the data set, which is built again.

        Returns:
            Columns prompt, attacked (an attack on text is about this prompt), expected (the answer
            of the data, or the attacker's), base and model (answers before and after training).

        Raises:
            RunError: There is no checkpoint, no such agent, or no language model.
        """
        table: pd.DataFrame = self._model_reader().generated_texts(self, agent, seed, data_dir)
        return table

    @staticmethod
    def _model_reader() -> Any:
        if not _model_readers:
            raise RunError("models are read by fedcb2o.experiments: import it first")
        return _model_readers[0]()

    def about(self, seed: int) -> dict[str, Any]:
        """Read agents.json of one seed.

        Args:
            seed: Seed of the run.

        Returns:
            Class names, clusters, angles, dimension, and lists over agents.

        Raises:
            RunError: The file is damaged or cannot be read.
        """
        return read_json(self._verified_path(seed, "agents.json"))

    def samples(self, seed: int) -> UInt8[np.ndarray, "K images H W"] | None:
        """Read a few images in the form that each cluster sees.

        Args:
            seed: Seed of the run.

        Returns:
            Images of dtype uint8, shape [K, 10, H, W]; None for data other than images.

        Raises:
            RunError: The file is damaged or cannot be read.
        """
        path = self._verified_path(seed, "samples.safetensors")
        if not path.exists():
            return None
        try:
            check_regular(path)
            return load_file(path)["images"]
        except OSError as error:
            raise read_error(path, error) from error
        except (KeyError, SafetensorError) as error:
            raise damaged_error(path, str(error)) from error

    def _seed_directory(self, seed: object) -> Path:
        return self.folder / f"seed-{seed}"

    def __repr__(self) -> str:
        state = "damaged"
        with suppress(RunError):
            is_complete = self.complete
            state = "complete" if is_complete else f"incomplete, seeds so far {list(self.seeds)}"
        seeds = f"{len(self.seeds)} seed{'s' * (len(self.seeds) != 1)}"
        return f"Run({str(self.folder)!r}: {self.title}, {seeds}, {state})"


def _append_pairs(columns: dict[str, list[Any]], seed: int, line: dict[str, Any]) -> None:
    """Append the rows of one round of pairs.jsonl."""
    count = len(line["ids"])
    agents = line.get("agents") or range(count)
    assumed = line.get("f") or [None] * count
    rows = zip(agents, line["ids"], line["weights"], line["own"], assumed, strict=True)
    for agent, ids, weights, own_weight, f in rows:
        count = len(ids) + 1
        columns["seed"] += [seed] * count
        columns["round"] += [line["round"]] * count
        columns["agent"] += [agent] * count
        columns["peer"] += [*ids, agent]
        columns["weight"] += [*weights, own_weight]
        columns["f"] += [f] * count


def find_seeds(folder: Path) -> dict[int, Path]:
    """Find the folders of the seeds that have begun, in ascending order; refuse links."""
    folders: dict[int, Path] = {}
    for path in folder.glob("seed-*"):
        seed = path.name.removeprefix("seed-")
        if not _SEED.fullmatch(seed):
            continue
        if path.is_symlink():
            raise RunError(
                f"{path} is a link, and the files of a run are in its own folder: put in its place "
                "the folder that it refers to"
            )
        if any((path / name).is_file() for name in ("agents.json", MANIFEST_FILE)):
            folders[int(seed)] = path
        if len(folders) > _MAX_SEEDS:
            raise RunError(f"{folder} holds more than {_MAX_SEEDS} seeds: read them in parts")
    return dict(sorted(folders.items()))


def read_config(path: Path) -> dict[str, Any]:
    """Read the config.toml of a run; DamagedError if it is missing or has other types."""
    try:
        config = read_toml(path)
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is gone; {_REMEDY}") from error
    except OSError as error:
        raise read_error(path, error) from error
    except ValueError as error:
        raise DamagedError(f"{path} cannot be read ({error}); {_REMEDY}") from error
    for key, kind in _CONFIG_TYPES.items():
        if not isinstance(config.get(key, kind()), kind):
            raise DamagedError(f"{path} is damaged: `{key}` is {config[key]!r}; {_REMEDY}")
    if not all(type(seed) is int for seed in config.get("seeds", ())):
        raise DamagedError(f"{path} is damaged: `seeds` is {config['seeds']!r}; {_REMEDY}")
    return config

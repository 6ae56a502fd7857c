"""A grid: every defence against every attack in every setting, over one experiment.

A grid file holds the keys that all cells share, as an experiment does, and axes, whose entries are
changes: `[attacks.NAME]`, `[defences.NAME]` and, if there are several, `[settings.NAME]`. Each
attacked cell has two baselines, the same run without the attack.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from fedcb2o import plugins
from fedcb2o.data import Dataset
from fedcb2o.errors import ConfigError
from fedcb2o.experiments.config import tables
from fedcb2o.experiments.config.datasets import load_for_data
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.experiments.grid._baseline import (
    BASELINE_ROLES,
    BaselineRole,
    Changes,
    baseline_table,
)
from fedcb2o.federated.sections import Component, NonNegativeInt, Section, Seed
from fedcb2o.records import METRICS, chosen_metrics, result_settings, slug

_NO_CHANGES = ("name", "title", "description", "seeds")
CELL_KEYS = [key for key in Experiment.model_fields if key not in _NO_CHANGES]
"""The keys that an entry of an axis may change. Seeds are shared, so that cells are paired."""

StrengthKey = tuple[str, str, str]
"""The setting, the defence and the attack that a strength is chosen for."""

AXIS_KEYS = {"defences": ("tune", "seeds"), "attacks": ("strengths",)}
"""Further keys of an axis: lists of changes of which one is chosen, and the only seeds to run."""


class TuningSection(Section):
    """The comparison of the candidates of `tune`, on tuning images and seeds of its own."""

    seeds: Annotated[
        tuple[Seed, ...],
        Field(min_length=1, strict=False, description="Seeds, none of them the grid's."),
    ]
    attacks: Annotated[
        tuple[str | Changes, ...],
        Field(
            min_length=1,
            strict=False,
            description="Attacks of the grid by name, or tables of changes.",
        ),
    ]
    setting: Annotated[
        str | None, Field(description="The grid's setting of the comparison; the first by default.")
    ] = None
    score: Annotated[
        Literal["mean", "worst_regret"],
        Field(
            description="Score of a candidate: its mean over the attacks, or its worst regret over "
            "them, relative to the best candidate of any defence."
        ),
    ] = "mean"
    widen: Annotated[
        NonNegativeInt,
        Field(
            description="Number of candidates that may be added where the best one is at an end."
        ),
    ] = 0


class AdversarySection(Section):
    """The comparison of the `strengths` of attacks, on tuning images and seeds of its own."""

    seeds: Annotated[
        tuple[Seed, ...],
        Field(min_length=1, strict=False, description="Seeds, none of them the grid's."),
    ]
    setting: Annotated[
        str | None, Field(description="The grid's setting of the comparison; each by default.")
    ] = None


class Grid(Section):
    """A grid, with the keys of its experiment in `shared`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    title: str = ""
    description: str = ""
    reference: str | None = None
    rank_by: str | None = None
    set_aside: Annotated[tuple[str, ...], Field(strict=False)] = ()
    baselines: Annotated[tuple[BaselineRole, ...], Field(min_length=1, strict=False)] = (
        BASELINE_ROLES
    )
    settings: dict[str, Changes] = Field(default_factory=dict)
    defences: Annotated[dict[str, Changes], Field(min_length=1)]
    attacks: Annotated[dict[str, Changes], Field(min_length=1)]
    tuning: TuningSection | None = None
    adversary: AdversarySection | None = None
    # The keys that all cells share.
    shared: Changes
    # Candidates by defence, added to those of the file.
    added_candidates: dict[str, list[Changes]] = Field(default_factory=dict)
    _cache: dict[str, Experiment] = PrivateAttr(default_factory=dict)
    # For cells without `agents.benign`: the folder of data, the number of owners by the settings of
    # data, and the data sets that were read for these numbers.
    _data_dir: Path | None = PrivateAttr(None)
    _num_owners: dict[str, int] = PrivateAttr(default_factory=dict)
    _datasets: list[tuple[Component, Dataset]] = PrivateAttr(default_factory=list)

    def take_datasets(self) -> list[tuple[Component, Dataset]]:
        """Return the data sets that were read to count their owners, and forget them."""
        taken, self._datasets = self._datasets, []
        return taken

    def to_table(self) -> dict[str, Any]:
        """Return the grid as plain values for `grid.toml`, its preset worked in."""
        table = self.model_dump(
            exclude={"shared", "added_candidates"}, exclude_none=True, exclude_defaults=True
        )
        merged = {**table, **self.shared, "seeds": self.seeds}
        return plugins.to_plain(merged)  # type: ignore[no-any-return]

    def score(self, summary: Mapping[str, Any]) -> float:
        """Return the score of a run by its summary.json, the higher the better.

        It is the metric `rank_by`, or the accuracy minus the attack success rate if there is one,
        or minus the test loss.
        """
        if self.rank_by is None:
            if summary["accuracy"] is None:
                return -float(summary["test_loss"])
            return float(summary["accuracy"] - (summary["attack_success_rate"] or 0.0))
        value = summary.get(self.rank_by)
        if value is None:
            raise ConfigError(
                f"`rank_by` names `{self.rank_by}`, and no benign agent has a value of it in seed "
                f"{summary['seed']:g}: take another metric"
            )
        infos = {**METRICS, **chosen_metrics(self.shared.get("metrics", []))}
        return float(value if infos[self.rank_by].worse_direction == "low" else -value)

    @property
    def seeds(self) -> list[int]:
        """The seeds of every cell, by default those of an experiment."""
        return list(self.shared.get("seeds", Experiment.model_fields["seeds"].default))

    def seeds_of(self, defence: str) -> list[int]:
        """Return the seeds of a defence: its own where a few are enough, else those of the grid."""
        return list(self.defences[defence].get("seeds", self.seeds))

    @property
    def candidates(self) -> dict[str, list[Changes]]:
        """The candidates of tuned defences by number: those of the file, then the added ones."""
        found = {}
        for name, entry in self.defences.items():
            if "tune" in entry:
                found[name] = [*entry["tune"], *self.added_candidates.get(name, [])]
        return found

    @property
    def strengths(self) -> dict[str, list[Changes]]:
        """The strengths of each attack that has several, by number."""
        attacks = self.attacks.items()
        return {name: entry["strengths"] for name, entry in attacks if "strengths" in entry}

    def cells(
        self,
        candidates: Mapping[str, int] | None = None,
        strengths: Mapping[StrengthKey, int] | None = None,
    ) -> list["Cell"]:
        """Return every cell and, before the first that needs them, its baselines.

        Cells share baselines where they differ only in the attack, and the attacks have equal
        goals, or one has none. No folder depends on the strength, and that of a baseline not on the
        candidate.
        """
        found: dict[str, Cell] = {}
        for setting, defence in product(self.settings or [""], self.defences):
            baselines = self._clean_baselines(setting, defence)
            for attack in self.attacks:
                key = CellKey(setting, defence, attack)
                candidate = (candidates or {}).get(defence)
                strength = (strengths or {}).get(self.strength_key(key))
                experiment = self.experiment(setting, defence, attack, candidate, strength)
                name = None
                if experiment.attacked:
                    name = _digest(self._load(baselines[attack]))
                    goal = baselines[attack].get("attack")
                    for cell in self._baselines(key, experiment, goal, name):
                        found.setdefault(cell.folder, cell)
                folder = "/".join(["cells", *key.slugs])
                found[folder] = Cell("cell", key, folder, experiment, name)
        return list(found.values())

    def _clean_baselines(self, setting: str, defence: str) -> dict[str, Changes]:
        """Return the clean baseline of each attack, without candidates and strengths.

        An attack without a goal has the baseline of one with a goal: the training is the same.
        """
        tables = {}
        for attack in self.attacks:
            experiment = self.experiment(setting, defence, attack)
            if experiment.attacked:
                tables[attack] = baseline_table(experiment, "clean")
        for attack, table in tables.items():
            if "attack" not in table:
                alike = (
                    other
                    for other in tables.values()
                    if other == {**table, "attack": other.get("attack")}
                )
                tables[attack] = next(alike, table)
        return tables

    def _baselines(
        self, key: "CellKey", experiment: Experiment, goal: Changes | None, name: str
    ) -> list["Cell"]:
        """Return the baselines of a cell, which measure the success of a goal."""
        cells = []
        for role in self.baselines:
            below = CellKey(key.setting, key.defence, None, baseline_of=f"{key.attack}, {role}")
            folder = "/".join([role, *below.slugs[:-1], name])
            table = baseline_table(experiment, role) | ({"attack": goal} if goal else {})
            cells.append(Cell(role, below, folder, _with_name(self._load(table), below)))
        return cells

    def trials(self) -> list["Cell"]:
        """Return a run per defence, candidate and attack for the choice among candidates."""
        cells = []
        attacks = self.tuning_attacks
        final: Changes = {"seeds": self.tuning and self.tuning.seeds, "evaluate_on": "tuning"}
        for defence, candidates in self.candidates.items():
            for number, attack in product(range(len(candidates)), attacks):
                key = CellKey(self.tuning_setting, defence, attack, number)
                layers = self._layers(key, attacks)
                experiment = _with_name(self._merge_layers(layers, final), key)
                cells.append(Cell("tuning", key, "/".join(["tuning", *key.slugs]), experiment))
        return cells

    def probes(self, candidates: Mapping[str, int] | None = None) -> list["Cell"]:
        """Return the runs for the choice of strengths, by the chosen `candidates` (from 0)."""
        if self.adversary is None:
            return []
        final: Changes = {"seeds": self.adversary.seeds, "evaluate_on": "tuning"}
        own_setting = self.adversary.setting
        # One setting may choose the strengths for all, which saves runs.
        settings = [own_setting] if own_setting else self.settings or [""]
        cells = []
        for setting, defence, attack in product(settings, self.defences, self.strengths):
            for number in range(len(self.strengths[attack])):
                key = CellKey(setting, defence, attack, strength=number)
                candidate = (candidates or {}).get(defence)
                layers = self._layers(replace(key, candidate=candidate), self.attacks)
                experiment = _with_name(self._merge_layers(layers, final), key)
                folder = "/".join(["strengths", *key.slugs])
                cells.append(Cell("tuning", key, folder, experiment))
        return cells

    def strength_key(self, key: "CellKey") -> StrengthKey:
        """Return the key under which the strength of a cell's attack is chosen."""
        setting = key.setting
        if self.adversary is not None and self.adversary.setting:
            setting = self.adversary.setting
        return setting, key.defence, str(key.attack)

    @property
    def tuning_setting(self) -> str:
        """The setting of the comparison, by default the first one of the grid, or ""."""
        if self.tuning is not None and self.tuning.setting:
            return self.tuning.setting
        return next(iter(self.settings), "")

    @property
    def tuning_attacks(self) -> dict[str, Changes]:
        """The attacks that candidates are compared against; one without a name is numbered."""
        found: dict[str, Changes] = {}
        if self.tuning is None:
            return found
        for number, attack in enumerate(self.tuning.attacks, start=1):
            if isinstance(attack, str):
                found[attack] = self.attacks[attack]
            else:
                name = str(attack.get("name", f"tuning attack {number}"))
                found[name] = {key: value for key, value in attack.items() if key != "name"}
        return found

    def experiment(
        self,
        setting: str,
        defence: str,
        attack: str,
        candidate: int | None = None,
        strength: int | None = None,
    ) -> Experiment:
        """Return the experiment of one cell; candidates and strengths count from 0."""
        key = CellKey(setting, defence, attack, candidate, strength)
        final = {"seeds": self.seeds_of(defence)}
        experiment = self._merge_layers(self._layers(key, self.attacks), final)
        return _with_name(experiment, CellKey(setting, defence, attack))

    def _layers(self, key: "CellKey", attacks: Mapping[str, Changes]) -> dict[str, Changes]:
        """Return the changes of a run in their order, by the names that messages use."""
        defence = key.defence
        attack = str(key.attack)
        layers = {}
        if key.setting:
            layers[f"setting `{key.setting}`"] = self.settings[key.setting]
        layers[f"defence `{defence}`"] = _changes_of_entry("defences", self.defences[defence])
        if key.candidate is not None:
            name = f"candidate {key.candidate + 1} of `{defence}`"
            layers[name] = self.candidates[defence][key.candidate]
        layers[f"attack `{attack}`"] = _changes_of_entry("attacks", attacks[attack])
        if key.strength is not None:
            name = f"strength {key.strength + 1} of `{attack}`"
            layers[name] = self.strengths[attack][key.strength]
        return layers

    def _merge_layers(self, layers: Mapping[str, Changes], final: Changes) -> Experiment:
        """Return the experiment of layers. Name those that are to blame for an error."""
        # Names of cells come last, so that equal experiments share one entry of the cache.
        base = {"name": "cell", **self.shared}

        def merged(without: str | None = None) -> Changes:
            changes = [layer for name, layer in layers.items() if name != without]
            return functools.reduce(_merge_changes, [*changes, final], base)

        def problem(without: str | None = None) -> str:
            try:
                self._load(merged(without))
            except ConfigError as error:
                return str(error).removeprefix("the experiment: ")
            return ""

        message = problem()
        if not message:
            return self._load(merged())
        # A layer is to blame if there is no error without it, or else another one.
        rest = {name: problem(name) for name in layers}
        blamed = [name for name in layers if not rest[name]]
        blamed = blamed or [name for name in layers if rest[name] != message]
        raise ConfigError(f"{' and '.join(blamed) or 'the keys that all cells share'}: {message}")

    def _load(self, table: Changes) -> Experiment:
        key = repr(table)  # a grid's arrays are lists
        if key not in self._cache:
            data = repr(table.get("data"))
            experiment, dataset = load_for_data(
                table, None, self._data_dir, self._num_owners.get(data)
            )
            if dataset is not None:
                self._num_owners[data] = len(dataset.names.owners)
                self._datasets.append((experiment.data, dataset))
            self._cache[key] = experiment
        return self._cache[key]


def _changes_of_entry(axis: str, entry: Changes) -> Changes:
    return {key: value for key, value in entry.items() if key not in AXIS_KEYS[axis]}


@dataclass(frozen=True)
class CellKey:
    """The position of a run in a grid."""

    setting: str
    defence: str
    # Name of the attack; None for a baseline.
    attack: str | None
    # Number of the defence's candidate, from 0.
    candidate: int | None = None
    # Number of the attack's strength, from 0.
    strength: int | None = None
    # For a baseline, the attack and the role of the malicious agents.
    baseline_of: str = ""

    @property
    def slugs(self) -> list[str]:
        """The parts of its folder and of its experiment's name; numbers count from 1."""
        parts = [slug(name) for name in (self.setting, self.defence) if name]
        if self.candidate is not None:
            parts.append(str(self.candidate + 1))
        parts.append(slug(self.attack or "no attack"))
        if self.strength is not None:
            parts.append(str(self.strength + 1))
        return parts

    @property
    def title(self) -> str:
        """The name in messages: the parts of `slugs`, separated by commas."""
        parts = [self.setting, self.defence]
        if self.candidate is not None:
            parts.append(f"candidate {self.candidate + 1}")
        parts.append(self.attack or f"baseline of {self.baseline_of}")
        if self.strength is not None:
            parts.append(f"strength {self.strength + 1}")
        return ", ".join(filter(None, parts))


@dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    # The kind of the run; "tuning" for a choice of a candidate or a strength.
    kind: Literal["cell", "clean", "removed", "tuning"]
    key: CellKey
    # The folder in that of the grid.
    folder: str
    experiment: Experiment
    baseline: str | None = None


def _merge_changes(base: Changes, changes: Changes) -> Changes:
    """Merge changes over a table, section by section."""
    merged = {key: tables.merge(base.get(key), value) for key, value in changes.items()}
    return {**base, **merged}


def _with_name(experiment: Experiment, key: CellKey) -> Experiment:
    return experiment.model_copy(update={"name": "--".join(key.slugs), "title": key.title})


def _digest(experiment: Experiment) -> str:
    # Titles and other settings without an effect must not give a baseline another folder.
    settings = result_settings(experiment.settings())
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]

"""A grid: every defence against every attack in every setting, over one experiment; validated before anything runs.

A grid file holds what all cells share, as an experiment does, and axes, whose entries are changes over it:
`[attacks.NAME]`, `[defences.NAME]` and, if there are several, `[settings.NAME]`. Beside each attacked cell stand two
floors, the same run without attack, which say what the attack's measures are without it: in one the attackers train
cleanly and share what they learn, in the other they are removed, and what they know with them.
"""

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from fedcb2o.errors import ConfigError
from fedcb2o.experiments.config import tables
from fedcb2o.experiments.config.settings import Experiment, NonNegativeInt, Section, load
from fedcb2o.experiments.grid.baseline import BASELINE_ROLES, Changes, baseline_table
from fedcb2o.records import result_settings

CELL_KEYS = [
    key for key in Experiment.model_fields if key not in ("name", "title", "description", "seeds")
]
"""What an entry of an axis may change: seeds are shared, so that all cells are paired by them."""

StrengthKey = tuple[str, str, str]
"""A setting, a defence and an attack: what the strength of the attack is chosen for."""

AXIS_KEYS = {"defences": ("tune", "seeds"), "attacks": ("strengths",)}
"""What an entry of an axis may hold beside: lists of changes, of which one is chosen, and the only seeds to run."""


class TuningSection(Section):
    """How the candidates of `tune` are compared: on tuning images, with seeds of their own, against these attacks.

    An attack is the name of one in the grid or a table of changes, which may have a `name`; `setting` is that of the
    grid's in which all of this happens, by default the first. A defence whose best candidate lies at an end gets
    another one beyond, at most `widen` times.
    """

    seeds: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1, strict=False)]
    attacks: Annotated[tuple[str | Changes, ...], Field(min_length=1, strict=False)]
    setting: str | None = None
    widen: NonNegativeInt = 0


class AdversarySection(Section):
    """How the `strengths` of attacks are compared: on tuning images, with seeds of their own, against each defence as
    it will be run, in the grid's `setting` of that name, by default in each for itself."""

    seeds: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1, strict=False)]
    setting: str | None = None


class Grid(Section):
    """What a grid file says; `shared` are its keys that are an experiment's, `widened` are candidates added to those of
    the file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    title: str = ""
    description: str = ""
    reference: str | None = None
    set_aside: Annotated[tuple[str, ...], Field(strict=False)] = ()
    settings: dict[str, Changes] = Field(default_factory=dict)
    defences: Annotated[dict[str, Changes], Field(min_length=1)]
    attacks: Annotated[dict[str, Changes], Field(min_length=1)]
    tuning: TuningSection | None = None
    adversary: AdversarySection | None = None
    shared: Changes
    added_candidates: dict[str, list[Changes]] = Field(default_factory=dict)
    _cache: dict[str, Experiment] = PrivateAttr(
        default_factory=dict
    )  # a grid asks for the same ones again and again

    def to_table(self) -> dict[str, Any]:
        """The grid as plain values, its preset worked in: what `grid.toml` holds."""
        whole = self.model_dump(
            exclude={"shared", "widened"}, exclude_none=True, exclude_defaults=True
        )
        return tables.to_plain({**whole, **self.shared, "seeds": self.seeds})  # type: ignore[no-any-return]

    @property
    def seeds(self) -> list[int]:
        """The seeds of every cell."""
        return list(self.shared.get("seeds", Experiment.model_fields["seeds"].default))

    def seeds_of(self, defence: str) -> list[int]:
        """Those that a defence is run with: its own `seeds`, where a few made clear that it needs no more."""
        return list(self.defences[defence].get("seeds", self.seeds))

    @property
    def candidates(self) -> dict[str, list[Changes]]:
        """The candidates of each tuned defence: those of the file, then those that were added."""
        given = {
            name: changes["tune"] for name, changes in self.defences.items() if "tune" in changes
        }
        return {name: [*tune, *self.added_candidates.get(name, [])] for name, tune in given.items()}

    @property
    def strengths(self) -> dict[str, list[Changes]]:
        """The strengths of each attack that has several."""
        return {
            name: changes["strengths"]
            for name, changes in self.attacks.items()
            if "strengths" in changes
        }

    def cells(
        self,
        candidates: Mapping[str, int] | None = None,
        strengths: Mapping[StrengthKey, int] | None = None,
    ) -> list["Cell"]:
        """Every attacked cell with, before the first that needs them, its floors; tuned defences at the candidate
        chosen, attacks at their `worst` strength in that setting against that defence.

        Cells share floors where they differ in nothing but the attack, and the attacks have equal aims. The folders
        of floors, which have one name, do not depend on the candidate, nor any on the strength.
        """
        found: dict[str, Cell] = {}
        for setting in self.settings or [""]:
            for defence in self.defences:
                for attack in self.attacks:
                    place = CellKey(setting, defence, attack)
                    floor = None
                    strength = (strengths or {}).get(self.strength_key(place))
                    experiment = self.experiment(
                        setting, defence, attack, (candidates or {}).get(defence), strength
                    )
                    if experiment.attacked:
                        floor = _digest(
                            self._load(
                                baseline_table(self.experiment(setting, defence, attack), "clean")
                            )
                        )
                        for role in BASELINE_ROLES:
                            below = CellKey(setting, defence, None, baseline_of=f"{attack}, {role}")
                            folder = "/".join([role, *below.slugs[:-1], floor])
                            if folder not in found:
                                calm = _with_name(
                                    self._load(baseline_table(experiment, role)), below
                                )
                                found[folder] = Cell(role, below, folder, calm)
                    folder = "/".join(["cells", *place.slugs])
                    found[folder] = Cell("cell", place, folder, experiment, floor)
        return list(found.values())

    def trials(self) -> list["Cell"]:
        """Every run that the choice among candidates needs: each candidate against each of the tuning's attacks."""
        return [
            Cell(
                "tuning", place, "/".join(["tuning", *place.slugs]), self._tuning_experiment(place)
            )
            for defence, candidates in self.candidates.items()
            for number in range(len(candidates))
            for attack in self.tuning_attacks
            for place in [CellKey(self.tuning_setting, defence, attack, number)]
        ]

    def probes(self, candidates: Mapping[str, int] | None = None) -> list["Cell"]:
        """Every run that the choice among strengths needs: each of them against each defence, which is at the candidate
        chosen."""
        if self.adversary is None:
            return []
        last: Changes = {"seeds": self.adversary.seeds, "evaluate_on": "tuning"}
        settings = [self.adversary.setting] if self.adversary.setting else self.settings or [""]
        found = []
        for setting, defence, attack in product(settings, self.defences, self.strengths):
            for number in range(len(self.strengths[attack])):
                place = CellKey(setting, defence, attack, strength=number)
                parts = self._layers(
                    replace(place, candidate=(candidates or {}).get(defence)), self.attacks
                )
                folder = "/".join(["strengths", *place.slugs])
                found.append(
                    Cell(
                        "tuning", place, folder, _with_name(self._merge_layers(parts, last), place)
                    )
                )
        return found

    def strength_key(self, key: "CellKey") -> StrengthKey:
        """Under what the strength of an attack is chosen that is taken in some place."""
        setting = None if self.adversary is None else self.adversary.setting
        return setting or key.setting, key.defence, str(key.attack)

    @property
    def tuning_setting(self) -> str:
        """The setting in which candidates are compared."""
        named = None if self.tuning is None else self.tuning.setting
        return named or next(iter(self.settings), "")

    @property
    def tuning_attacks(self) -> dict[str, Changes]:
        """The attacks that candidates are compared against; one that is a table is named by its place."""
        given = () if self.tuning is None else self.tuning.attacks
        found: dict[str, Changes] = {}
        for i, attack in enumerate(given, start=1):
            if isinstance(attack, str):
                found[attack] = self.attacks[attack]
            else:
                name = str(attack.get("name", f"tuning attack {i}"))
                found[name] = {key: value for key, value in attack.items() if key != "name"}
        return found

    def _tuning_experiment(self, place: "CellKey") -> Experiment:
        assert self.tuning is not None
        last = {"seeds": self.tuning.seeds, "evaluate_on": "tuning"}
        return _with_name(self._merge_layers(self._layers(place, self.tuning_attacks), last), place)

    def experiment(
        self,
        setting: str,
        defence: str,
        attack: str,
        candidate: int | None = None,
        strength: int | None = None,
    ) -> Experiment:
        """The experiment of one cell; raises ConfigError that says which entries of the grid it comes from."""
        place = CellKey(setting, defence, attack, candidate, strength)
        made = self._merge_layers(
            self._layers(place, self.attacks), {"seeds": self.seeds_of(defence)}
        )
        return _with_name(made, CellKey(setting, defence, attack))

    def _layers(self, place: "CellKey", attacks: Mapping[str, Changes]) -> dict[str, Changes]:
        """The changes that make a run, in their order, each under the name by which a message knows it."""
        setting = place.setting
        defence = place.defence
        attack = str(place.attack)
        candidate = place.candidate
        parts = {f"setting `{setting}`": self.settings[setting]} if setting else {}
        parts[f"defence `{defence}`"] = _changes_of_entry("defences", self.defences[defence])
        if candidate is not None:
            parts[f"candidate {candidate + 1} of `{defence}`"] = self.candidates[defence][candidate]
        parts[f"attack `{attack}`"] = _changes_of_entry("attacks", attacks[attack])
        if place.strength is not None:
            parts[f"strength {place.strength + 1} of `{attack}`"] = self.strengths[attack][
                place.strength
            ]
        return parts

    def _merge_layers(self, layers: Mapping[str, Changes], final: Changes) -> Experiment:
        def merged(without: str | None = None) -> Changes:
            chosen = [changes for part, changes in layers.items() if part != without]
            return functools.reduce(
                _merge_changes, [*chosen, final], {"name": "cell", **self.shared}
            )

        def fault(without: str | None = None) -> str:
            try:
                self._load(merged(without))
            except ConfigError as error:
                return str(error).removeprefix("the experiment: ")
            return ""

        if told := fault():
            without = {part: fault(part) for part in layers}
            blamed = [part for part in layers if not without[part]] or [
                part for part in layers if without[part] != told
            ]
            raise ConfigError(f"{' and '.join(blamed) or 'what all cells share'}: {told}")
        return self._load(merged())

    def _load(self, table: Changes) -> Experiment:
        key = repr(table)
        if key not in self._cache:
            self._cache[key] = load(table)
        return self._cache[key]


def _changes_of_entry(axis: str, entry: Changes) -> Changes:
    """What an entry of an axis changes: all but what it holds beside."""
    return {key: value for key, value in entry.items() if key not in AXIS_KEYS[axis]}


@dataclass(frozen=True)
class CellKey:
    """Where in a grid a run belongs; without attack it is a floor, of the attack that it is `under` among others."""

    setting: str
    defence: str
    attack: str | None
    candidate: int | None = None
    strength: int | None = None
    baseline_of: str = ""

    @property
    def slugs(self) -> list[str]:
        """The parts of its folder and of its experiment's name."""
        candidate, strength = (
            [] if n is None else [str(n + 1)] for n in (self.candidate, self.strength)
        )
        where = map(slugify, filter(None, [self.setting, self.defence]))
        return [*where, *candidate, slugify(self.attack or "no attack"), *strength]

    @property
    def title(self) -> str:
        """As a message names it."""
        candidate = "" if self.candidate is None else f"candidate {self.candidate + 1}"
        strength = "" if self.strength is None else f"strength {self.strength + 1}"
        attack = self.attack or f"floor of {self.baseline_of}"
        return ", ".join(filter(None, [self.setting, self.defence, candidate, attack, strength]))


@dataclass(frozen=True)
class Cell:
    """One run of a grid: what it is, its folder in the grid's, its experiment, and the name of its floors' folders.
    "tuning" are the runs by which a candidate or a strength is chosen."""

    kind: Literal["cell", "clean", "removed", "tuning"]
    key: CellKey
    folder: str
    experiment: Experiment
    baseline: str | None = None


def slugify(text: str) -> str:
    """A name as part of a folder's: small letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _merge_changes(base: Changes, changes: Changes) -> Changes:
    """Changes over a table, section by section, as `extends` has them."""
    return {**base, **{key: tables.merge(base.get(key), value) for key, value in changes.items()}}


def _with_name(experiment: Experiment, place: CellKey) -> Experiment:
    return experiment.model_copy(update={"name": "--".join(place.slugs), "title": place.title})


def _digest(experiment: Experiment) -> str:
    text = json.dumps(result_settings(experiment.settings()), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]

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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, PrivateAttr, ValidationError

from fedcb2o import plugins, records
from fedcb2o.errors import ConfigError
from fedcb2o.experiments import tables
from fedcb2o.experiments.config import Experiment, Natural, Part, first_problem, load
from fedcb2o.experiments.samples import aim_of, trigger_of
from fedcb2o.federated import attacks
from fedcb2o.records import identity

Role = Literal["clean", "removed"]
ROLES: tuple[Role, ...] = get_args(Role)
"""What malicious agents do in the floors of a cell."""

Changes = dict[str, Any]
"""Keys of an experiment and their values, as in its file."""

VARIED = [key for key in Experiment.model_fields if key not in ("name", "title", "description", "seeds")]
"""What an entry of an axis may change: seeds are shared, so that all cells are paired by them."""

Tried = tuple[str, str, str]
"""A setting, a defence and an attack: what the strength of the attack is chosen for."""

OWN_KEYS = {"defences": ("tune", "seeds"), "attacks": ("strengths",)}
"""What an entry of an axis may hold beside: lists of changes, of which one is chosen, and the only seeds to run."""


class TuningPart(Part):
    """How the candidates of `tune` are compared: on tuning images, with seeds of their own, against these attacks.

    An attack is the name of one in the grid or a table of changes, which may have a `name`; `setting` is that of the
    grid's in which all of this happens, by default the first. A defence whose best candidate lies at an end gets
    another one beyond, at most `widen` times.
    """

    seeds: Annotated[tuple[Natural, ...], Field(min_length=1, strict=False)]
    attacks: Annotated[tuple[str | Changes, ...], Field(min_length=1, strict=False)]
    setting: str | None = None
    widen: Natural = 0


class AdversaryPart(Part):
    """How the `strengths` of attacks are compared: on tuning images, with seeds of their own, against each defence as
    it will be run, in the grid's `setting` of that name, by default in each for itself."""

    seeds: Annotated[tuple[Natural, ...], Field(min_length=1, strict=False)]
    setting: str | None = None


class Grid(Part):
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
    tuning: TuningPart | None = None
    adversary: AdversaryPart | None = None
    shared: Changes
    widened: dict[str, list[Changes]] = Field(default_factory=dict)
    _loaded: dict[str, Experiment] = PrivateAttr(default_factory=dict)  # a grid asks for the same ones again and again

    def table(self) -> dict[str, Any]:
        """The grid as plain values, its preset worked in: what `grid.toml` holds."""
        whole = self.model_dump(exclude={"shared", "widened"}, exclude_none=True, exclude_defaults=True)
        return tables.plain({**whole, **self.shared, "seeds": self.seeds})  # type: ignore[no-any-return]

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
        given = {name: changes["tune"] for name, changes in self.defences.items() if "tune" in changes}
        return {name: [*tune, *self.widened.get(name, [])] for name, tune in given.items()}

    @property
    def strengths(self) -> dict[str, list[Changes]]:
        """The strengths of each attack that has several."""
        return {name: changes["strengths"] for name, changes in self.attacks.items() if "strengths" in changes}

    def cells(self, chosen: Mapping[str, int] | None = None, worst: Mapping[Tried, int] | None = None) -> list["Cell"]:
        """Every attacked cell with, before the first that needs them, its floors; tuned defences at the candidate
        chosen, attacks at their `worst` strength in that setting against that defence.

        Cells share floors where they differ in nothing but the attack, and the attacks have equal aims. The folders
        of floors, which have one name, do not depend on the candidate, nor any on the strength.
        """
        found: dict[str, Cell] = {}
        for setting in self.settings or [""]:
            for defence in self.defences:
                for attack in self.attacks:
                    place, floor = Place(setting, defence, attack), None
                    strength = (worst or {}).get(self.tried(place))
                    experiment = self.experiment(setting, defence, attack, (chosen or {}).get(defence), strength)
                    if experiment.attacked:
                        floor = _digest(self._load(without_attack(self.experiment(setting, defence, attack), "clean")))
                        for role in ROLES:
                            below = Place(setting, defence, None, under=f"{attack}, {role}")
                            folder = "/".join([role, *below.slugs[:-1], floor])
                            if folder not in found:
                                calm = _named(self._load(without_attack(experiment, role)), below)
                                found[folder] = Cell(role, below, folder, calm)
                    folder = "/".join(["cells", *place.slugs])
                    found[folder] = Cell("cell", place, folder, experiment, floor)
        return list(found.values())

    def trials(self) -> list["Cell"]:
        """Every run that the choice among candidates needs: each candidate against each of the tuning's attacks."""
        return [
            Cell("tuning", place, "/".join(["tuning", *place.slugs]), self._trial(place))
            for defence, candidates in self.candidates.items()
            for number in range(len(candidates))
            for attack in self.tuning_attacks
            for place in [Place(self.tuning_setting, defence, attack, number)]
        ]

    def probes(self, chosen: Mapping[str, int] | None = None) -> list["Cell"]:
        """Every run that the choice among strengths needs: each of them against each defence, which is at the candidate
        chosen."""
        if self.adversary is None:
            return []
        last: Changes = {"seeds": self.adversary.seeds, "evaluate_on": "tuning"}
        settings = [self.adversary.setting] if self.adversary.setting else self.settings or [""]
        found = []
        for setting, defence, attack in product(settings, self.defences, self.strengths):
            for number in range(len(self.strengths[attack])):
                place = Place(setting, defence, attack, strength=number)
                parts = self._parts(replace(place, candidate=(chosen or {}).get(defence)), self.attacks)
                folder = "/".join(["strengths", *place.slugs])
                found.append(Cell("tuning", place, folder, _named(self._made(parts, last), place)))
        return found

    def tried(self, place: "Place") -> Tried:
        """Under what the strength of an attack is chosen that is taken in some place."""
        setting = None if self.adversary is None else self.adversary.setting
        return setting or place.setting, place.defence, str(place.attack)

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

    def _trial(self, place: "Place") -> Experiment:
        assert self.tuning is not None
        last = {"seeds": self.tuning.seeds, "evaluate_on": "tuning"}
        return _named(self._made(self._parts(place, self.tuning_attacks), last), place)

    def experiment(
        self, setting: str, defence: str, attack: str, candidate: int | None = None, strength: int | None = None
    ) -> Experiment:
        """The experiment of one cell; raises ConfigError that says which entries of the grid it comes from."""
        place = Place(setting, defence, attack, candidate, strength)
        made = self._made(self._parts(place, self.attacks), {"seeds": self.seeds_of(defence)})
        return _named(made, Place(setting, defence, attack))

    def _parts(self, place: "Place", attacks: Mapping[str, Changes]) -> dict[str, Changes]:
        """The changes that make a run, in their order, each under the name by which a message knows it."""
        setting, defence, attack, candidate = place.setting, place.defence, str(place.attack), place.candidate
        parts = {f"setting `{setting}`": self.settings[setting]} if setting else {}
        parts[f"defence `{defence}`"] = _changes("defences", self.defences[defence])
        if candidate is not None:
            parts[f"candidate {candidate + 1} of `{defence}`"] = self.candidates[defence][candidate]
        parts[f"attack `{attack}`"] = _changes("attacks", attacks[attack])
        if place.strength is not None:
            parts[f"strength {place.strength + 1} of `{attack}`"] = self.strengths[attack][place.strength]
        return parts

    def _made(self, parts: Mapping[str, Changes], last: Changes) -> Experiment:
        def merged(without: str | None = None) -> Changes:
            chosen = [changes for part, changes in parts.items() if part != without]
            return functools.reduce(_over, [*chosen, last], {"name": "cell", **self.shared})

        def fault(without: str | None = None) -> str:
            try:
                self._load(merged(without))
            except ConfigError as error:
                return str(error).removeprefix("the experiment: ")
            return ""

        if told := fault():
            without = {part: fault(part) for part in parts}
            blamed = [part for part in parts if not without[part]] or [part for part in parts if without[part] != told]
            raise ConfigError(f"{' and '.join(blamed) or 'what all cells share'}: {told}")
        return self._load(merged())

    def _load(self, table: Changes) -> Experiment:
        key = repr(table)
        if key not in self._loaded:
            self._loaded[key] = load(table)
        return self._loaded[key]


def _changes(axis: str, entry: Changes) -> Changes:
    """What an entry of an axis changes: all but what it holds beside."""
    return {key: value for key, value in entry.items() if key not in OWN_KEYS[axis]}


@dataclass(frozen=True)
class Place:
    """Where in a grid a run belongs; without attack it is a floor, of the attack that it is `under` among others."""

    setting: str
    defence: str
    attack: str | None
    candidate: int | None = None
    strength: int | None = None
    under: str = ""

    @property
    def slugs(self) -> list[str]:
        """The parts of its folder and of its experiment's name."""
        candidate, strength = ([] if n is None else [str(n + 1)] for n in (self.candidate, self.strength))
        where = map(slug, filter(None, [self.setting, self.defence]))
        return [*where, *candidate, slug(self.attack or "no attack"), *strength]

    @property
    def title(self) -> str:
        """As a message names it."""
        candidate = "" if self.candidate is None else f"candidate {self.candidate + 1}"
        strength = "" if self.strength is None else f"strength {self.strength + 1}"
        attack = self.attack or f"floor of {self.under}"
        return ", ".join(filter(None, [self.setting, self.defence, candidate, attack, strength]))


@dataclass(frozen=True)
class Cell:
    """One run of a grid: what it is, its folder in the grid's, its experiment, and the name of its floors' folders.
    "tuning" are the runs by which a candidate or a strength is chosen."""

    kind: Literal["cell", "clean", "removed", "tuning"]
    place: Place
    folder: str
    experiment: Experiment
    floor: str | None = None


def without_attack(experiment: Experiment, role: Role) -> Changes:
    """A floor of an attacked experiment, as a table: malicious agents train on true labels or are not there, and what
    the attack aims at is measured all the same. Who would ask more peers than are left asks all of them."""
    table = experiment.model_dump(exclude_unset=True, exclude={"title", "description", "attack"})
    agents = experiment.agents.model_copy(update={"malicious_role": role})
    left = {"malicious_role": role, "budget": min(agents.budget, max(1, agents.num_agents - 1))}
    aim = {"attack": measured(experiment)}
    return {**table, "name": "floor", "agents": {**table["agents"], **left}, **(aim if aim["attack"] else {})}


def measured(experiment: Experiment) -> Changes | None:
    """The attack on data that has the aim of an experiment's attack, and nothing else: equal for equal aims.

    That is its sources and targets, and a backdoor's trigger; None where the attack is after the accuracy alone.
    """
    poison = None if experiment.attack is None else experiment.attack.poison
    if poison is None:
        return None
    aim, trigger = aim_of(experiment), trigger_of(experiment)
    pairs = [list(pair) for pair in zip(aim.sources, aim.targets, strict=False)]
    if trigger is None and pairs:
        one = {"name": "label_flip", "source": pairs[0][0], "target": pairs[0][1]}
        return one if len(pairs) == 1 else {"name": "label_flips", "pairs": pairs}
    if trigger is None and not aim.sources:
        return {"name": "spread_flip", "target": aim.targets[0]} if aim.targets else None
    known = plugins.parameters(plugins.resolve("attack", poison.name, attacks))
    shown = {key for key, parameter in known.items() if parameter.default is parameter.empty}
    shown |= {"name", "source", "target", *(plugins.parameters(trigger) if trigger else ())}
    return {key: value for key, value in poison.resolved("attack", attacks).items() if key in shown}


def load_grid(source: str | Path | Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> Grid:
    """A grid from the name of a built-in one, a TOML file or a mapping, with some of its keys changed ("rounds": 5), of
    which entries may say otherwise; every cell of it is validated. With other `seeds`, defences that name some of their
    own keep those that are left.

    Raises ConfigError with one line that names what is wrong, where in the grid, and the nearest right thing.
    """
    if not isinstance(source, str | Path | Mapping):
        raise ConfigError(
            f"a grid is a built-in one's name, a file GRID.toml or a mapping, got a {type(source).__name__}"
        )
    where = str(source) if str(source).endswith(".toml") else f"grid `{source}`"
    if isinstance(source, Mapping):
        table, where = tables.extended({"name": "grid", **source}), "the grid"
    elif str(source).endswith(".toml"):
        table = tables.read(Path(source))
    else:
        table = _built_in(str(source))
    if changes:
        table = tables.with_changes(table, changes, where)
        where += " with changes"
        if "seeds" in changes and isinstance(defences := table.get("defences"), Mapping):
            table["defences"] = {name: _left(own, changes["seeds"]) for name, own in defences.items()}
    try:
        grid = _read(table)
        _check(grid)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return grid


def _left(defence: Any, seeds: Any) -> Any:
    """A defence with those of its own seeds that are left of others; with all of them where none is."""
    if not (isinstance(defence, Mapping) and isinstance(defence.get("seeds"), list) and isinstance(seeds, Sequence)):
        return defence
    left = [seed for seed in defence["seeds"] if seed in seeds]
    return {key: value for key, value in {**defence, "seeds": left}.items() if key != "seeds" or left}


def grids() -> dict[str, str]:
    """The built-in grids' names and what each is, a line each."""
    folder = resources.files("fedcb2o.experiments") / "grids"
    names = sorted(path.name.removesuffix(".toml") for path in folder.iterdir() if path.name.endswith(".toml"))
    return {name: str(_built_in(name).get("description", "")) for name in names}


def slug(text: str) -> str:
    """A name as part of a folder's: small letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _built_in(name: str) -> dict[str, Any]:
    path = resources.files("fedcb2o.experiments") / "grids" / f"{name}.toml"
    if not path.is_file():
        if (Path(name) / "grid.toml").is_file():
            raise ConfigError(
                f"{name} is a grid's folder: `fedcb2o bench {Path(name) / 'grid.toml'} --out {name} --resume` goes on "
                f"with it, and `fedcb2o report {name}` shows it"
            )
        raise ConfigError(
            f"there is no grid `{name}`.{plugins.nearest(name, grids())} Built in: {', '.join(grids())}; "
            "a file's name ends in .toml"
        )
    return tables.extended({"name": name, **records.parse_toml(path.read_bytes())})


def _read(table: Mapping[str, Any]) -> Grid:
    own = [key for key in Grid.model_fields if key not in ("shared", "widened")]
    _known(table, [*own, *VARIED, "seeds"])
    if isinstance(table.get("tuning"), Mapping):
        _known(table["tuning"], list(TuningPart.model_fields), "tuning: ")
    if isinstance(table.get("adversary"), Mapping):
        _known(table["adversary"], list(AdversaryPart.model_fields), "adversary: ")
    shared = {key: value for key, value in table.items() if key not in own}
    try:
        grid = Grid.model_validate({**{key: table[key] for key in own if key in table}, "shared": shared})
    except ValidationError as error:
        raise ConfigError(first_problem(error, {})) from error
    for axis in ("settings", "defences", "attacks"):
        kind, folders = axis.removesuffix("s"), dict[str, str]()
        for name, changes in getattr(grid, axis).items():
            _known(changes, [*VARIED, *OWN_KEYS.get(axis, ())], f"{kind} `{name}`: ")
            if not slug(name):
                raise ConfigError(f"{kind} `{name}` needs a letter or a digit in its name, for its folder's")
            if (other := folders.setdefault(slug(name), name)) != name:
                raise ConfigError(f"{axis} `{other}` and `{name}` would share the folder {slug(name)}: rename one")
    return grid


def _check(grid: Grid) -> None:
    """Raises ConfigError for what does not fit together, in the whole grid or in a single cell."""
    _among("reference", grid.reference, grid.defences)
    for attack in grid.set_aside:
        _among("set_aside", attack, grid.attacks)
    for name, tune in ((name, changes["tune"]) for name, changes in grid.defences.items() if "tune" in changes):
        _check_list(f"defence `{name}`: `tune`", f"candidate {{}} of `{name}`: ", tune)
    for name, changes in grid.defences.items():
        seeds = changes.get("seeds", grid.seeds)
        if not (isinstance(seeds, Sequence) and seeds and all(seed in grid.seeds for seed in seeds)):
            raise ConfigError(f"defence `{name}`: `seeds` must be a list of some of the grid's, got {seeds!r}")
    for name, strengths in grid.strengths.items():
        _check_list(f"attack `{name}`: `strengths`", f"strength {{}} of `{name}`: ", strengths)
    _check_tuning(grid)
    _check_adversary(grid)
    grid.cells()
    grid.trials()
    for defence, tune in grid.candidates.items():  # whichever will be chosen
        for setting, attack, number in product(grid.settings or [""], grid.attacks, range(len(tune))):
            grid.experiment(setting, defence, attack, number)


def _check_list(key: str, each: str, entries: Any) -> None:
    if not (isinstance(entries, Sequence) and entries and all(isinstance(changes, Mapping) for changes in entries)):
        raise ConfigError(f"{key} must be a list of tables, each of changes, got {entries!r}")
    for number, changes in enumerate(entries, start=1):
        _known(changes, VARIED, each.format(number))


def _check_adversary(grid: Grid) -> None:
    adversary = grid.adversary
    if adversary is None:
        if grid.strengths:
            raise ConfigError(f"`strengths` of attack `{min(grid.strengths)}` need a section [adversary] with `seeds`")
        return
    if not grid.strengths:
        raise ConfigError("[adversary] is for attacks with several strengths, and none has `strengths`")
    if common := sorted(set(adversary.seeds) & set(grid.seeds)):
        raise ConfigError(f"`adversary.seeds` must differ from `seeds`, and both hold {common[0]}: choose others")
    _among("adversary.setting", adversary.setting, grid.settings)
    for setting, defence, (attack, strengths) in product(grid.settings or [""], grid.defences, grid.strengths.items()):
        calm = without_attack(grid.experiment(setting, defence, attack), "clean")
        for number in range(len(strengths)):
            cell = grid.experiment(setting, defence, attack, strength=number)
            if not cell.attacked or without_attack(cell, "clean") != calm:
                raise ConfigError(
                    f"strength {number + 1} of `{attack}` changes what its floor is, so that strengths cannot be "
                    "compared: make it an attack of its own"
                )
    grid.probes()


def _check_tuning(grid: Grid) -> None:
    tuning, counts = grid.tuning, {name: len(tune) for name, tune in grid.candidates.items()}
    if tuning is None:
        if counts:
            raise ConfigError(f"`tune` of defence `{min(counts)}` needs a section [tuning] with `seeds` and `attacks`")
        return
    if not counts:
        raise ConfigError("[tuning] is for defences with candidates, and none has `tune`")
    if len(set(counts.values())) > 1:
        told = ", ".join(f"`{name}` {count}" for name, count in counts.items())
        raise ConfigError(f"every tuned defence must have as many candidates in `tune` as the others, got {told}")
    if common := sorted(set(tuning.seeds) & set(grid.seeds)):
        raise ConfigError(f"`tuning.seeds` must differ from `seeds`, and both hold {common[0]}: choose others")
    _among("tuning.setting", tuning.setting, grid.settings)
    for attack in tuning.attacks:
        if isinstance(attack, str):
            _among("tuning.attacks", attack, grid.attacks)
        else:
            _known(attack, [*VARIED, "name"], "tuning.attacks: ")
    if len(grid.tuning_attacks) < len(tuning.attacks):
        raise ConfigError("two of `tuning.attacks` have one name: give each its own")


def _among(key: str, name: str | None, names: Collection[str]) -> None:
    if name is not None and name not in names:
        has = ", ".join(f"`{each}`" for each in names) or "none"
        raise ConfigError(f"`{key}` names `{name}`.{plugins.nearest(name, names)} The grid has: {has}")


def _known(table: Mapping[str, Any], keys: Sequence[str], where: str = "") -> None:
    for key in table:
        if key not in keys:
            raise ConfigError(f"{where}there is no key `{key}` here.{plugins.nearest(key, keys)}")


def _over(base: Changes, changes: Changes) -> Changes:
    """Changes over a table, section by section, as `extends` has them."""
    return {**base, **{key: tables.over(base.get(key), value) for key, value in changes.items()}}


def _named(experiment: Experiment, place: Place) -> Experiment:
    return experiment.model_copy(update={"name": "--".join(place.slugs), "title": place.title})


def _digest(experiment: Experiment) -> str:
    text = json.dumps(identity(experiment.settings()), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]

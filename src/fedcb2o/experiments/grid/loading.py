"""The reading and validation of grid files, and the built-in grids."""

from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedcb2o import plugins, records
from fedcb2o.errors import ConfigError
from fedcb2o.experiments.config import tables
from fedcb2o.experiments.config.settings import describe_error
from fedcb2o.experiments.grid.baseline import baseline_table
from fedcb2o.experiments.grid.definition import (
    AXIS_KEYS,
    CELL_KEYS,
    AdversarySection,
    Grid,
    TuningSection,
    slugify,
)


def load_grid(
    source: str | Path | Mapping[str, Any], changes: Mapping[str, Any] | None = None
) -> Grid:
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
        table = tables.resolve_extends({"name": "grid", **source})
        where = "the grid"
    elif str(source).endswith(".toml"):
        table = tables.read_table(Path(source))
    else:
        table = _read_built_in(str(source))
    if changes:
        table = tables.apply_changes(table, changes, where)
        where += " with changes"
        if "seeds" in changes and isinstance(defences := table.get("defences"), Mapping):
            table["defences"] = {
                name: _keep_seeds(own, changes["seeds"]) for name, own in defences.items()
            }
    try:
        grid = _parse_grid(table)
        _check_grid(grid)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return grid


def _keep_seeds(defence: Any, seeds: Any) -> Any:
    """A defence with those of its own seeds that are left of others; with all of them where none is."""
    if not (
        isinstance(defence, Mapping)
        and isinstance(defence.get("seeds"), list)
        and isinstance(seeds, Sequence)
    ):
        return defence
    left = [seed for seed in defence["seeds"] if seed in seeds]
    return {
        key: value for key, value in {**defence, "seeds": left}.items() if key != "seeds" or left
    }


def grids() -> dict[str, str]:
    """The built-in grids' names and what each is, a line each."""
    folder = resources.files("fedcb2o.experiments") / "grids"
    names = sorted(
        path.name.removesuffix(".toml") for path in folder.iterdir() if path.name.endswith(".toml")
    )
    return {name: str(_read_built_in(name).get("description", "")) for name in names}


def _read_built_in(name: str) -> dict[str, Any]:
    path = resources.files("fedcb2o.experiments") / "grids" / f"{name}.toml"
    if not path.is_file():
        if (Path(name) / "grid.toml").is_file():
            raise ConfigError(
                f"{name} is a grid's folder: `fedcb2o bench {Path(name) / 'grid.toml'} --out {name} --resume` goes on "
                f"with it, and `fedcb2o report {name}` shows it"
            )
        raise ConfigError(
            f"there is no grid `{name}`.{plugins.did_you_mean(name, grids())} Built in: {', '.join(grids())}; "
            "a file's name ends in .toml"
        )
    return tables.resolve_extends({"name": name, **records.parse_toml(path.read_bytes())})


def _parse_grid(table: Mapping[str, Any]) -> Grid:
    own = [key for key in Grid.model_fields if key not in ("shared", "widened")]
    _check_keys(table, [*own, *CELL_KEYS, "seeds"])
    if isinstance(table.get("tuning"), Mapping):
        _check_keys(table["tuning"], list(TuningSection.model_fields), "tuning: ")
    if isinstance(table.get("adversary"), Mapping):
        _check_keys(table["adversary"], list(AdversarySection.model_fields), "adversary: ")
    shared = {key: value for key, value in table.items() if key not in own}
    try:
        grid = Grid.model_validate(
            {**{key: table[key] for key in own if key in table}, "shared": shared}
        )
    except ValidationError as error:
        raise ConfigError(describe_error(error, {})) from error
    for axis in ("settings", "defences", "attacks"):
        kind = axis.removesuffix("s")
        folders = dict[str, str]()
        for name, changes in getattr(grid, axis).items():
            _check_keys(changes, [*CELL_KEYS, *AXIS_KEYS.get(axis, ())], f"{kind} `{name}`: ")
            if not slugify(name):
                raise ConfigError(
                    f"{kind} `{name}` needs a letter or a digit in its name, for its folder's"
                )
            if (other := folders.setdefault(slugify(name), name)) != name:
                raise ConfigError(
                    f"{axis} `{other}` and `{name}` would share the folder {slugify(name)}: rename one"
                )
    return grid


def _check_grid(grid: Grid) -> None:
    """Raises ConfigError for what does not fit together, in the whole grid or in a single cell."""
    _check_reference("reference", grid.reference, grid.defences)
    for attack in grid.set_aside:
        _check_reference("set_aside", attack, grid.attacks)
    for name, tune in (
        (name, changes["tune"]) for name, changes in grid.defences.items() if "tune" in changes
    ):
        _check_change_list(f"defence `{name}`: `tune`", f"candidate {{}} of `{name}`: ", tune)
    for name, changes in grid.defences.items():
        seeds = changes.get("seeds", grid.seeds)
        if not (
            isinstance(seeds, Sequence) and seeds and all(seed in grid.seeds for seed in seeds)
        ):
            raise ConfigError(
                f"defence `{name}`: `seeds` must be a list of some of the grid's, got {seeds!r}"
            )
    for name, strengths in grid.strengths.items():
        _check_change_list(
            f"attack `{name}`: `strengths`", f"strength {{}} of `{name}`: ", strengths
        )
    _check_tuning(grid)
    _check_adversary(grid)
    grid.cells()
    grid.trials()
    for defence, tune in grid.candidates.items():  # whichever will be chosen
        for setting, attack, number in product(
            grid.settings or [""], grid.attacks, range(len(tune))
        ):
            grid.experiment(setting, defence, attack, number)


def _check_change_list(key: str, each: str, entries: Any) -> None:
    if not (
        isinstance(entries, Sequence)
        and entries
        and all(isinstance(changes, Mapping) for changes in entries)
    ):
        raise ConfigError(f"{key} must be a list of tables, each of changes, got {entries!r}")
    for number, changes in enumerate(entries, start=1):
        _check_keys(changes, CELL_KEYS, each.format(number))


def _check_adversary(grid: Grid) -> None:
    adversary = grid.adversary
    if adversary is None:
        if grid.strengths:
            raise ConfigError(
                f"`strengths` of attack `{min(grid.strengths)}` need a section [adversary] with `seeds`"
            )
        return
    if not grid.strengths:
        raise ConfigError(
            "[adversary] is for attacks with several strengths, and none has `strengths`"
        )
    if common := sorted(set(adversary.seeds) & set(grid.seeds)):
        raise ConfigError(
            f"`adversary.seeds` must differ from `seeds`, and both hold {common[0]}: choose others"
        )
    _check_reference("adversary.setting", adversary.setting, grid.settings)
    for setting, defence, (attack, strengths) in product(
        grid.settings or [""], grid.defences, grid.strengths.items()
    ):
        calm = baseline_table(grid.experiment(setting, defence, attack), "clean")
        for number in range(len(strengths)):
            cell = grid.experiment(setting, defence, attack, strength=number)
            if not cell.attacked or baseline_table(cell, "clean") != calm:
                raise ConfigError(
                    f"strength {number + 1} of `{attack}` changes what its floor is, so that strengths cannot be "
                    "compared: make it an attack of its own"
                )
    grid.probes()


def _check_tuning(grid: Grid) -> None:
    tuning = grid.tuning
    counts = {name: len(tune) for name, tune in grid.candidates.items()}
    if tuning is None:
        if counts:
            raise ConfigError(
                f"`tune` of defence `{min(counts)}` needs a section [tuning] with `seeds` and `attacks`"
            )
        return
    if not counts:
        raise ConfigError("[tuning] is for defences with candidates, and none has `tune`")
    if len(set(counts.values())) > 1:
        told = ", ".join(f"`{name}` {count}" for name, count in counts.items())
        raise ConfigError(
            f"every tuned defence must have as many candidates in `tune` as the others, got {told}"
        )
    if common := sorted(set(tuning.seeds) & set(grid.seeds)):
        raise ConfigError(
            f"`tuning.seeds` must differ from `seeds`, and both hold {common[0]}: choose others"
        )
    _check_reference("tuning.setting", tuning.setting, grid.settings)
    for attack in tuning.attacks:
        if isinstance(attack, str):
            _check_reference("tuning.attacks", attack, grid.attacks)
        else:
            _check_keys(attack, [*CELL_KEYS, "name"], "tuning.attacks: ")
    if len(grid.tuning_attacks) < len(tuning.attacks):
        raise ConfigError("two of `tuning.attacks` have one name: give each its own")


def _check_reference(key: str, name: str | None, names: Collection[str]) -> None:
    if name is not None and name not in names:
        has = ", ".join(f"`{each}`" for each in names) or "none"
        raise ConfigError(
            f"`{key}` names `{name}`.{plugins.did_you_mean(name, names)} The grid has: {has}"
        )


def _check_keys(table: Mapping[str, Any], keys: Sequence[str], where: str = "") -> None:
    for key in table:
        if key not in keys:
            raise ConfigError(
                f"{where}there is no key `{key}` here.{plugins.did_you_mean(key, keys)}"
            )

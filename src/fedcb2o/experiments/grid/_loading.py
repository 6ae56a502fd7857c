"""The reading and validation of grids, and the built-in grids."""

from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedcb2o import plugins, records
from fedcb2o.errors import ConfigError
from fedcb2o.experiments import foreign
from fedcb2o.experiments.config import tables
from fedcb2o.experiments.config.loading import describe_error
from fedcb2o.experiments.grid._baseline import baseline_table
from fedcb2o.experiments.grid._definition import (
    AXIS_KEYS,
    CELL_KEYS,
    AdversarySection,
    Grid,
    TuningSection,
)
from fedcb2o.records import METRICS, chosen_metrics

_OWN_KEYS = [key for key in Grid.model_fields if key not in ("shared", "added_candidates")]


def load_grid(
    source: str | Path | Mapping[str, Any],
    changes: Mapping[str, Any] | None = None,
    data_dir: Path | None = None,
) -> Grid:
    """Load a built-in grid, a file of TOML or of another library, or a mapping; check every cell.

    Without `agents.benign` the data are read to count their owners. `changes` has new values by
    dotted key; entries may overrule them. With other `seeds`, defences with seeds of their own keep
    those that remain.
    """
    if not isinstance(source, str | Path | Mapping):
        kind = type(source).__name__
        raise ConfigError(
            f"a grid is a built-in one's name, a file GRID.toml or a mapping, got a {kind}"
        )
    if isinstance(source, Mapping):
        table = tables.resolve_extends({"name": "grid", **plugins.to_python(source)})
        where = "the grid"
    elif str(source).endswith(".toml"):
        table = tables.read_table(Path(source))
        where = str(source)
    elif str(source).endswith(foreign.SUFFIXES):
        table = foreign.read_grid_table(Path(source))
        where = str(source)
    else:
        table = _read_built_in(str(source))
        where = f"grid `{source}`"
    # Changes come before the axes, so that an entry of the grid overrules them.
    if changes:
        changes = plugins.to_python(changes)
        table = tables.apply_changes(table, changes, where)
        where += " with changes"
        defences = table.get("defences")
        if "seeds" in changes and isinstance(defences, Mapping):
            table["defences"] = {
                name: _keep_seeds(entry, changes["seeds"]) for name, entry in defences.items()
            }
    if isinstance(table.get("defences"), Mapping):
        table["defences"] = {
            name: _extended_defence(f"{where}: defence `{name}`", entry)
            for name, entry in table["defences"].items()
        }
    # The message for a missing key would not say that this is an experiment.
    if "rounds" in table and "defences" not in table:
        raise ConfigError(f"{where} has no `defences`: an experiment is run by `fedcb2o run`")
    try:
        grid = _parse_grid(table)
        grid._data_dir = data_dir
        _check_grid(grid)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return grid


def _extended_defence(where: str, defence: Any) -> Any:
    """Merge a defence over the algorithm of the preset that its key `extends` names.

    The other sections of the preset, such as its data, are those of the grid.
    """
    if not isinstance(defence, Mapping) or "extends" not in defence:
        return defence
    changes = {key: value for key, value in defence.items() if key != "extends"}
    try:
        # Only the algorithm: a defence with samples of its own could not be compared.
        algorithm = tables.preset(str(defence["extends"]))["algorithm"]
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return tables.merge({"algorithm": algorithm}, changes)


def _keep_seeds(defence: Any, seeds: Any) -> Any:
    """Return a defence with those of its own seeds that remain; all seeds where none does."""
    if not isinstance(defence, Mapping) or not isinstance(seeds, Sequence):
        return defence
    if not isinstance(defence.get("seeds"), list):
        return defence
    kept = [seed for seed in defence["seeds"] if seed in seeds]
    # A defence without any of the seeds would silently be missing from the grid.
    if kept:
        return {**defence, "seeds": kept}
    return {key: value for key, value in defence.items() if key != "seeds"}


def grids() -> dict[str, str]:
    """Return the built-in grids: the description of each by its name."""
    folder = resources.files("fedcb2o.experiments") / "grids"
    files = [path.name for path in folder.iterdir() if path.name.endswith(".toml")]
    names = sorted(name.removesuffix(".toml") for name in files)
    return {name: str(_read_built_in(name).get("description", "")) for name in names}


def _read_built_in(name: str) -> dict[str, Any]:
    path = resources.files("fedcb2o.experiments") / "grids" / f"{name}.toml"
    if path.is_file():
        return tables.resolve_extends({"name": name, **records.parse_toml(path.read_bytes())})
    tables.raise_if_grid_folder(name)
    built_in = grids()
    raise ConfigError(
        f"there is no grid `{name}`.{plugins.did_you_mean(name, built_in)} Built in: "
        f"{', '.join(built_in)}; a file's name ends in .toml"
    )


def _parse_grid(table: Mapping[str, Any]) -> Grid:
    """Return the grid of a table. Raise ConfigError for unknown keys and unusable names."""
    _check_keys(table, [*_OWN_KEYS, *CELL_KEYS, "seeds"])
    for key, section in (("tuning", TuningSection), ("adversary", AdversarySection)):
        if isinstance(table.get(key), Mapping):
            _check_keys(table[key], list(section.model_fields), f"{key}: ")
    own = {key: table[key] for key in _OWN_KEYS if key in table}
    shared = {key: value for key, value in table.items() if key not in _OWN_KEYS}
    try:
        grid = Grid.model_validate({**own, "shared": shared})
    except ValidationError as error:
        raise ConfigError(describe_error(error, {})) from error
    for axis in ("settings", "defences", "attacks"):
        _check_axis(axis, getattr(grid, axis))
    return grid


def _check_axis(axis: str, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigError for unknown keys of an axis, and names that no folder can have."""
    kind = axis.removesuffix("s")
    folders: dict[str, str] = {}
    for name, changes in entries.items():
        _check_keys(changes, [*CELL_KEYS, *AXIS_KEYS.get(axis, ())], f"{kind} `{name}`: ")
        # Names are rows of tables and legends, where a line break would hide a part.
        if name != records.one_line(name):
            raise ConfigError(f"{kind} {name!r} must have a name of one line, with single spaces")
        # Folders of runs have the names of their row and column.
        folder = records.slug(name)
        if not folder:
            raise ConfigError(
                f"{kind} `{name}` needs a letter or a digit in its name, for its folder's"
            )
        other = folders.setdefault(folder, name)
        # Names differ in case or punctuation that folders do not keep.
        if other != name:
            raise ConfigError(
                f"{axis} `{other}` and `{name}` would share the folder {folder}: rename one"
            )


def _check_grid(grid: Grid) -> None:
    """Raise ConfigError for problems of the whole grid or of a single cell."""
    _check_reference("reference", grid.reference, grid.defences)
    metrics = {**METRICS, **chosen_metrics(grid.shared.get("metrics", []))}
    _check_reference("rank_by", grid.rank_by, metrics)
    for attack in grid.set_aside:
        _check_reference("set_aside", attack, grid.attacks)
    for name, entry in grid.defences.items():
        if "tune" in entry:
            # Lists first: reading a cell would fail with a message about its contents.
            label = f"candidate {{}} of `{name}`: "
            _check_change_list(f"defence `{name}`: `tune`", label, entry["tune"])
    for name, entry in grid.defences.items():
        _check_defence_seeds(name, entry.get("seeds", grid.seeds), grid)
    for name, strengths in grid.strengths.items():
        label = f"strength {{}} of `{name}`: "
        _check_change_list(f"attack `{name}`: `strengths`", label, strengths)
    _check_tuning(grid)
    _check_adversary(grid)
    # Every cell is validated here, so that an error is found before hours of work.
    grid.cells()
    grid.trials()
    for defence, candidates in grid.candidates.items():  # any of them may be chosen
        for setting, attack in product(grid.settings or [""], grid.attacks):
            for number in range(len(candidates)):
                grid.experiment(setting, defence, attack, number)


def _check_defence_seeds(name: str, seeds: Any, grid: Grid) -> None:
    is_list = isinstance(seeds, Sequence) and bool(seeds)
    if not is_list or not all(seed in grid.seeds for seed in seeds):
        raise ConfigError(
            f"defence `{name}`: `seeds` must be a list of some of the grid's, got {seeds!r}"
        )


def _check_change_list(key: str, label: str, entries: Any) -> None:
    is_list = isinstance(entries, Sequence) and bool(entries)
    if not is_list or not all(isinstance(changes, Mapping) for changes in entries):
        raise ConfigError(f"{key} must be a list of tables of changes, got {entries!r}")
    for number, changes in enumerate(entries, start=1):
        _check_keys(changes, CELL_KEYS, label.format(number))


def _check_adversary(grid: Grid) -> None:
    """Raise ConfigError where strengths cannot be compared."""
    adversary = grid.adversary
    if adversary is None:
        if grid.strengths:
            name = min(grid.strengths)
            raise ConfigError(
                f"`strengths` of attack `{name}` need a section [adversary] with `seeds`"
            )
        return
    if not grid.strengths:
        raise ConfigError(
            "[adversary] is for attacks with several strengths, and none has `strengths`"
        )
    # Strengths that were chosen on the reported seeds would overfit them.
    _check_own_seeds("adversary.seeds", adversary.seeds, grid)
    _check_reference("adversary.setting", adversary.setting, grid.settings)
    settings = grid.settings or [""]
    for setting, defence, attack in product(settings, grid.defences, grid.strengths):
        baseline = baseline_table(grid.experiment(setting, defence, attack), "clean")
        for number in range(len(grid.strengths[attack])):
            cell = grid.experiment(setting, defence, attack, strength=number)
            # The success of strengths is net of one baseline.
            if not cell.attacked or baseline_table(cell, "clean") != baseline:
                raise ConfigError(
                    f"strength {number + 1} of `{attack}` changes its baseline, so that strengths "
                    "cannot be compared: make it an attack of its own"
                )
    grid.probes()


def _check_own_seeds(key: str, seeds: Sequence[int], grid: Grid) -> None:
    common = sorted(set(seeds) & set(grid.seeds))
    if common:
        raise ConfigError(f"`{key}` must differ from `seeds`, and both hold {common[0]}")


def _check_tuning(grid: Grid) -> None:
    """Raise ConfigError where candidates cannot be compared."""
    tuning = grid.tuning
    counts = {name: len(candidates) for name, candidates in grid.candidates.items()}
    if tuning is None:
        if counts:
            name = min(counts)
            raise ConfigError(
                f"`tune` of defence `{name}` needs a section [tuning] with `seeds` and `attacks`"
            )
        return
    if not counts:
        raise ConfigError("[tuning] is for defences with candidates, and none has `tune`")
    # More candidates are more chances to fit the tuning seeds.
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"`{name}` {count}" for name, count in counts.items())
        raise ConfigError(
            f"every tuned defence must have the same number of candidates in `tune`, got {listed}"
        )
    _check_own_seeds("tuning.seeds", tuning.seeds, grid)
    _check_reference("tuning.setting", tuning.setting, grid.settings)
    for attack in tuning.attacks:
        if isinstance(attack, str):
            _check_reference("tuning.attacks", attack, grid.attacks)
        else:
            _check_keys(attack, [*CELL_KEYS, "name"], "tuning.attacks: ")
    if len(grid.tuning_attacks) < len(tuning.attacks):
        raise ConfigError("two of `tuning.attacks` have one name: rename one")


def _check_reference(key: str, name: str | None, names: Collection[str]) -> None:
    if name is not None and name not in names:
        listed = ", ".join(f"`{known}`" for known in names) or "none"
        suggestion = plugins.did_you_mean(name, names)
        raise ConfigError(f"`{key}` names `{name}`.{suggestion} The grid has: {listed}")


def _check_keys(table: Mapping[str, Any], keys: Sequence[str], where: str = "") -> None:
    for key in table:
        if key not in keys:
            suggestion = plugins.did_you_mean(key, keys)
            raise ConfigError(f"{where}there is no key `{key}` here.{suggestion}")

"""The commands for runs and grids: run, bench, assess, compare, report, track."""

import contextlib
import importlib
import logging
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer import Argument, Option

from fedcb2o.cli import completion
from fedcb2o.cli.configurations import print_descriptions
from fedcb2o.cli.help_format import RareOption
from fedcb2o.cli.log_output import is_quiet, is_verbose, set_verbosity
from fedcb2o.errors import ConfigError

if TYPE_CHECKING:
    from fedcb2o.data import Dataset
    from fedcb2o.experiments import Experiment
    from fedcb2o.experiments.grid._grid_runner import GridResult
    from fedcb2o.records import Run
    from fedcb2o.report import ArticleForm

_LOGGER = logging.getLogger(__name__)
# Sections of a run that may name functions.
_CODE_SECTIONS = ("agents", "algorithm", "attack", "data", "metrics", "model", "training")
_MAX_SEEDS = 100_000  # largest number of seeds in a range


class _Intervals(StrEnum):
    """Spread shown after a mean in the table of an article."""

    none = "none"
    std = "std"
    ci = "ci"


class _AgentSummary(StrEnum):
    """Summary over benign agents in a table."""

    mean = "mean"
    worst = "worst"
    worst_tenth = "worst_tenth"


def _validate_cluster_address(value: str | None) -> str | None:
    """Validate the address of a cluster, before other arguments."""
    if value is not None:
        from fedcb2o.experiments.config.arguments import check_address

        check_address(value)
    return value


_ChangesOption = Annotated[
    list[str] | None, Option("--set", metavar="KEY=VALUE", help="Change a setting. Repeatable.")
]
_SeedsOption = Annotated[str | None, Option(metavar="SEEDS", help="Seeds, such as 0,1,2 or 0-19.")]
_OutOption = Annotated[
    Path | None, Option(metavar="DIR", help="Folder of the results. Default: runs/NAME.")
]
_DataDirOption = Annotated[Path | None, Option(metavar="DIR", help="Folder of the data files.")]
_DeviceOption = Annotated[
    str | None, Option(metavar="DEVICE", help="cpu, cuda, cuda:1 or mps. Default: cpu.")
]
_JobsOption = Annotated[
    int | None, Option(min=1, metavar="NUMBER", help="Processes. Default: one per processor.")
]
_ClusterOption = Annotated[
    str | None,
    RareOption(
        metavar="[ADDRESS]",
        callback=_validate_cluster_address,
        is_eager=True,
        help="Run by Ray: here, auto, or HOST:PORT.",
    ),
]
_TrackOption = Annotated[
    list[str] | None,
    RareOption(
        metavar="TRACKER",
        autocompletion=completion.trackers,
        help="Show in tensorboard[=DIR] or mlflow[=URI].",
    ),
]
_QuietOption = Annotated[bool, Option("--quiet", help="Print errors only, and no progress.")]
_RunsArgument = Annotated[list[Path], Argument(metavar="RUN", help="Folders of runs.")]


def run(
    experiments: Annotated[
        list[str],
        Argument(
            metavar="PRESET_OR_FILE.toml",
            help="Presets or configuration files.",
            autocompletion=completion.presets,
        ),
    ],
    changes: _ChangesOption = None,
    seeds: _SeedsOption = None,
    out: _OutOption = None,
    data_dir: _DataDirOption = None,
    workers: Annotated[int | None, RareOption(min=1, metavar="NUMBER", help="Processes.")] = None,
    memory: Annotated[
        str | None,
        RareOption(
            metavar="SIZE", help="Such as 24GiB (1024^3 bytes each). Models beyond it go to disk."
        ),
    ] = None,
    device: _DeviceOption = None,
    cluster: _ClusterOption = None,
    blocks: Annotated[
        int | None, RareOption(min=1, metavar="NUMBER", help="Groups of agents on a cluster.")
    ] = None,
    track: _TrackOption = None,
    resume: Annotated[bool, Option("--resume", help="Continue from the last checkpoint.")] = False,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Remove the run that the folder holds first.")
    ] = False,
    verbose: Annotated[
        bool, RareOption("--verbose", help="Print the choices for this machine.")
    ] = False,
    quiet: _QuietOption = False,
    clean_twin: Annotated[
        bool, RareOption("--clean-twin", help="Also run without the attack, in NAME-clean.")
    ] = False,
    local_baseline: Annotated[
        bool, RareOption("--local-baseline", help="Also train every agent alone, in NAME-local.")
    ] = False,
) -> list[Path]:
    """Run experiments, each for all of its seeds.

    Example: fedcb2o run digits-fedassay --set algorithm.alpha=10 --seeds 0,1,2 --out runs/mine
    """
    from fedcb2o.experiments.config.datasets import load_for_data
    from fedcb2o.experiments.runs._progress import Progress
    from fedcb2o.experiments.runs._runner import run_loaded

    set_verbosity(verbose=verbose, quiet=quiet)
    settings = _command_settings(changes, seeds, device)
    loaded = [load_for_data(name, settings, data_dir) for name in experiments]
    # All experiments are loaded first: a typing error in the last one must not follow hours of
    # runs.
    jobs = _plan_runs(loaded, out, with_counterparts=clean_twin, with_baselines=local_baseline)
    progress = Progress(Console(stderr=True, quiet=is_quiet()), verbose=is_verbose())
    with progress:
        for experiment, dataset, folder in jobs:
            run_loaded(
                experiment,
                dataset,
                out=folder,
                data_dir=data_dir,
                workers=workers,
                memory=memory,
                resume=resume,
                overwrite=overwrite,
                watch=_ignore_progress if is_quiet() else progress,
                cluster=cluster,
                blocks=blocks,
                track=track,
            )
    folders = [folder for *_, folder in jobs]
    _LOGGER.info("Done. For a table: fedcb2o compare %s", " ".join(map(str, folders)))
    return folders


def _ignore_progress(*arguments: object) -> None:
    """Show nothing."""


def _plan_runs(
    experiments: "Sequence[tuple[Experiment, Dataset | None]]",
    out: Path | None,
    *,
    with_counterparts: bool,
    with_baselines: bool,
) -> "list[tuple[Experiment, Dataset | None, Path]]":
    """Return the experiments to run, with counterparts and baselines, their data and folders."""
    jobs = []
    for experiment, dataset in experiments:
        if out is None:
            folder = Path("runs") / experiment.name
        else:
            folder = out if len(experiments) == 1 else out / experiment.name
        jobs.append((experiment, dataset, folder))
        if with_counterparts and experiment.attacked:
            clean_folder = folder.with_name(f"{folder.name}-clean")
            jobs.append((experiment.clean_counterpart(), dataset, clean_folder))
        elif with_counterparts:
            _LOGGER.warning("%s has no clean counterpart: it has no attack.", experiment.name)
        if with_baselines:
            local_folder = folder.with_name(f"{folder.name}-local")
            jobs.append((experiment.local_baseline(), dataset, local_folder))
    return jobs


def _command_settings(
    changes: Sequence[str] | None, seeds: str | None, device: str | None
) -> dict[str, Any]:
    settings = parse_settings(changes)
    if seeds is not None:
        settings["seeds"] = _parse_seeds(seeds)
    if device is not None:
        settings["device"] = device
    return settings


def parse_settings(changes: Sequence[str] | None) -> dict[str, Any]:
    """Parse texts of the form KEY=VALUE."""
    from fedcb2o.experiments.config.tables import parse_value

    settings = {}
    for change in changes or []:
        key, equals, value = change.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set needs KEY=VALUE, such as rounds=10, got {change!r}")
        settings[key.strip()] = parse_value(value.strip())
    return settings


def _parse_seeds(text: str) -> list[int]:
    """Parse seeds and ranges with commas between them."""
    seeds: list[int] = []
    try:
        for part in text.split(","):
            ends = [int(end) for end in part.split("-")]
            if len(ends) > 2 or ends != sorted(ends) or ends[-1] - ends[0] > _MAX_SEEDS:
                raise ValueError
            seeds += range(ends[0], ends[-1] + 1)
    except ValueError as error:
        raise ConfigError(
            f"--seeds needs whole numbers with commas, such as 0,1,2 or 0-19, got {text[:100]!r}"
        ) from error
    return seeds


def bench(
    grid: Annotated[
        str | None,
        Argument(
            metavar="GRID",
            help="GRID.toml, a file of ByzFL or FLPoison, or a built-in grid (--list).",
            autocompletion=completion.grids,
        ),
    ] = None,
    list_: Annotated[bool, Option("--list", help="List the built-in grids, one per line.")] = False,
    changes: _ChangesOption = None,
    seeds: _SeedsOption = None,
    out: _OutOption = None,
    jobs: _JobsOption = None,
    data_dir: _DataDirOption = None,
    device: _DeviceOption = None,
    resume: Annotated[bool, Option("--resume", help="Continue; failed cells run again.")] = False,
    cluster: _ClusterOption = None,
    track: _TrackOption = None,
    quiet: _QuietOption = False,
) -> Path | None:
    """Run a grid: every defence against every attack, for all seeds.

    Example: fedcb2o bench quick --out runs/quick, then: fedcb2o report runs/quick
    """
    from fedcb2o.experiments.grid._eta import GridProgress
    from fedcb2o.experiments.grid._grid_runner import bench as run_grid
    from fedcb2o.experiments.grid._loading import grids

    set_verbosity(quiet=quiet)
    if list_:
        print_descriptions(grids())
        return None
    if grid is None:
        raise ConfigError(
            "which grid? Name its file, GRID.toml, or a built-in one (fedcb2o bench --list)"
        )
    result = run_grid(
        grid,
        watch=GridProgress(Console(stderr=True, quiet=is_quiet())),
        changes=_command_settings(changes, seeds, device),
        out=out,
        jobs=jobs,
        data_dir=data_dir,
        resume=resume,
        cluster=cluster,
        track=track,
    )
    advice = f"For the matrices: fedcb2o report {result.folder}"
    if result.failed:
        _exit_with_failures(result, f"--resume tries them again. {advice}")
    _LOGGER.info("Done. %s", advice)
    return result.folder


def assess(
    method: Annotated[
        str,
        Argument(
            metavar="PRESET_OR_FILE.toml",
            help="Preset or configuration file, of which `algorithm` is the method.",
            autocompletion=completion.presets,
        ),
    ],
    full: Annotated[
        bool,
        Option("--full", help="All combinations, more rounds and ten seeds: a night on 2 cores."),
    ] = False,
    out: _OutOption = None,
    jobs: _JobsOption = None,
    quiet: _QuietOption = False,
) -> Path:
    """Judge a method by the fixed adversary, and write its entry for the board.

    The same command continues an assessment that was stopped.

    Example: fedcb2o assess mine.toml
    """
    from fedcb2o.experiments.grid._assessment import assess as run_assessment
    from fedcb2o.experiments.grid._eta import GridProgress
    from fedcb2o.records import atomic_write
    from fedcb2o.report import to_rich
    from fedcb2o.report.board import entry_table, entry_toml, make_entry

    set_verbosity(quiet=quiet)
    watch = GridProgress(Console(stderr=True, quiet=is_quiet()))
    result = run_assessment(method, full=full, out=out, jobs=jobs, watch=watch)
    if result.failed:
        _exit_with_failures(result, "the same command tries them again")
    entry = make_entry(result.folder)
    path = result.folder / "entry.toml"
    atomic_write(path, entry_toml(entry).encode())
    console = Console()
    caption = (
        "Percent, each under the worst attack in brackets. A round takes "
        f"{entry.cost:.1f} times the processor time of plain averaging."
    )
    console.print(
        to_rich(entry_table(entry), title=entry.title, caption=caption, width=console.width)
    )
    print(f"The entry is {path}.")
    return path


def _exit_with_failures(result: "GridResult", advice: str) -> NoReturn:
    for title, error in result.failed.items():
        _print_error(f"Failed: {title}: {error}")
    _print_error(f"{len(result.failed)} of {result.cells} cells failed; {advice}")
    raise typer.Exit(1)


def _print_error(line: str) -> None:
    print(line, file=sys.stderr)


def compare(
    runs: _RunsArgument,
    over: Annotated[
        _AgentSummary,
        Option(help="Summary over benign agents: mean, worst agent, or mean of the worst tenth."),
    ] = _AgentSummary.mean,
) -> None:
    """Print the paper's Table 1 of runs, at the last round."""
    from fedcb2o.records import Run

    _print_table([Run(folder) for folder in runs], over)


def report(
    runs: Annotated[
        list[Path], Argument(metavar="RUN_OR_GRID", help="Folders of runs, or of grids.")
    ],
    out: Annotated[Path, Option(help="Folder for tables, figures and report.html.")] = Path(
        "report"
    ),
    reference: Annotated[
        str | None,
        Option(
            metavar="DEFENCE",
            help="Defence of a grid that the others are compared with. Default: that of the grid.",
        ),
    ] = None,
    membership: Annotated[
        bool, Option("--membership", help="Measure membership inference against the models.")
    ] = False,
    data_dir: _DataDirOption = None,
    own: Annotated[
        list[str] | None,
        Option(
            metavar="MODULE:FUNCTION",
            help="Allow this function, or this base of a language model, of the runs. Repeatable.",
        ),
    ] = None,
    intervals: Annotated[
        _Intervals,
        RareOption(
            help="In `article` of a grid: nothing, standard deviations or confidence intervals.",
        ),
    ] = _Intervals.std,
    precision: Annotated[int, RareOption(help="In `article` of a grid: decimals.")] = 1,
    baselines: Annotated[
        bool,
        RareOption("--baselines", help="In `article` of a grid: the columns without attack, too."),
    ] = False,
) -> Path:
    """Write the report of runs, or the results explorer of grids; print the main table."""
    from fedcb2o.records import Run, refuse_models
    from fedcb2o.report import ArticleForm, is_grid
    from fedcb2o.report import report as write_report
    from fedcb2o.report.tables import find_local_baseline

    grids = [folder for folder in runs if is_grid(folder)]
    if grids and len(grids) < len(runs):
        raise ConfigError("a report is of runs or of grids: give folders of one kind")
    if grids:
        form = ArticleForm(intervals.value, precision, baselines)
        _report_grids(grids, out, reference, form)
        return out
    if reference is not None:
        raise ConfigError(
            "`--reference` is for the folder of a grid, which compares defences with one of them"
        )
    opened = [Run(folder) for folder in runs]
    foreign = _foreign_name(opened, own or [])
    # The import takes seconds, and most reports read no models.
    if foreign or membership or any(find_local_baseline(run, opened) for run in opened):
        importlib.import_module("fedcb2o.experiments")  # which reads models for the records
    # A report of somebody else's runs must not load the models that their settings name.
    with refuse_models(foreign) if foreign else contextlib.nullcontext():
        write_report(opened, out, membership=membership, data_dir=data_dir)
    _print_table(opened, _AgentSummary.mean)
    print(
        f"\nThe page is {out / 'report.html'}; tables (CSV, Markdown, LaTeX) and figures (PNG, "
        "PDF) are in the same folder."
    )
    return out


def _foreign_name(runs: list["Run"], allowed: list[str]) -> str:
    """Describe the first name in the runs' settings that is not allowed; empty without one."""
    from fedcb2o import plugins

    for run in runs:
        settings = [run.config.get(key) for key in _CODE_SECTIONS]
        bases = [{"base": part.get("base")} for part in settings if isinstance(part, dict)]
        code = [name for name in plugins.foreign_names_in(settings) if "/" not in name]
        for name in (*(name for name in code if ":" in name), *plugins.foreign_names_in(bases)):
            if name not in allowed:
                effect = plugins.describe_effect(name)
                return f"{run.folder} names {name[:100]!r}, {effect}, and allow it with --own"
    return ""


def _report_grids(
    folders: list[Path], out: Path, reference: str | None, form: "ArticleForm"
) -> None:
    from fedcb2o.report import grid_notes, read_grid, report_grid, terminal_tables, to_rich

    grids = [read_grid(folder, reference) for folder in folders]
    report_grid(grids, out, form)
    console = Console()
    for grid in grids:
        for sentence in grid_notes(grid):
            _LOGGER.warning("%s.", sentence)
        for setting, table in terminal_tables(grid).items():
            title = ": ".join(filter(None, [grid.title * (len(grids) > 1), setting])) or None
            caption = "Percent; regret: points behind the best defence of the worst column."
            console.print(to_rich(table, title=title, caption=caption, width=console.width))
    print(
        f"\nThe page is {out / 'report.html'}; the matrices (CSV, Markdown, LaTeX, figures) are in "
        f"{out / 'matrices' if len(grids) == 1 else out}, and `article` beside them has tables "
        "(LaTeX) and figures (PDF, PNG) for an article."
    )


def _print_table(runs: list["Run"], over: _AgentSummary) -> None:
    from fedcb2o.report import (
        comparability_notes,
        incomplete_note,
        left_out_note,
        seed_caption,
        to_rich,
        unverified_note,
    )
    from fedcb2o.report import compare as compare_runs

    for run in runs:
        for note in (incomplete_note, left_out_note, unverified_note):
            if sentence := note(run):
                _LOGGER.warning("%s.", sentence)
    for sentence in comparability_notes(runs):
        _LOGGER.warning("%s.", sentence)
    console = Console()
    table = compare_runs(runs, over=over.value)
    caption = seed_caption(runs, over=over.value)
    console.print(to_rich(table, caption=caption, width=console.width))


def track(
    runs: Annotated[list[Path], Argument(metavar="RUN", help="Folders of runs or grids.")],
    to: Annotated[
        list[str],
        Option(
            metavar="TRACKER",
            autocompletion=completion.trackers,
            help="tensorboard or mlflow, in the folder of the run; tensorboard=DIR or mlflow=URI. "
            "Repeatable.",
        ),
    ],
) -> list[Path]:
    """Copy the records of runs and grids to TensorBoard or MLflow.

    Example: fedcb2o track runs/mine --to tensorboard, then: tensorboard --logdir runs/mine
    """
    from fedcb2o.tracking import track as copy_records

    for folder in runs:
        copy_records(folder, to)
    return runs

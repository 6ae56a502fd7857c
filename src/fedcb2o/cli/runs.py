"""The commands for runs and grids of them: run, bench, compare, report, track."""

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedcb2o.cli import completion
from fedcb2o.cli.configurations import print_descriptions
from fedcb2o.errors import ConfigError

if TYPE_CHECKING:
    from fedcb2o.records import Run


class _AgentSummary(StrEnum):
    """What a table shows of the benign agents."""

    mean = "mean"
    worst = "worst"
    worst_tenth = "worst_tenth"


def _validate_cluster_address(value: str | None) -> str | None:
    """The address of a cluster, which is looked at before all else: what follows may have been meant."""
    if value is not None:
        from fedcb2o.experiments.config.arguments import check_address

        check_address(value)
    return value


_ChangesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting, such as algorithm.alpha=2. Repeatable.",
    ),
]
_SeedsOption = Annotated[
    str | None, typer.Option(help="Seeds, such as 0,1,2 or 0-19. Default: the file's own.")
]
_DeviceOption = Annotated[
    str | None,
    typer.Option(
        help="Where models and data lie: cpu, cuda, cuda:1, mps, ... Default: the file's, or cpu."
    ),
]
_ClusterOption = Annotated[
    str | None,
    typer.Option(
        metavar="[ADDRESS]",
        callback=_validate_cluster_address,
        is_eager=True,
        help="Run seeds, or cells, by Ray: on this machine, or on the cluster that it is in (auto) or that has its head"
        " at HOST:PORT.",
    ),
]
_TrackOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TRACKER",
        autocompletion=completion.trackers,
        help="Copy the records as they are written to tensorboard or mlflow, in the folder of the run, or to"
        " tensorboard=DIR or mlflow=URI. Repeatable.",
    ),
]
_RunsArgument = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.", show_default=False)
]


def run(
    experiments: Annotated[
        list[str],
        typer.Argument(
            metavar="PRESET_OR_FILE.toml...",
            help="Presets or configuration files.",
            show_default=False,
            autocompletion=completion.presets,
        ),
    ],
    changes: _ChangesOption = None,
    seeds: _SeedsOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The run's folder (with several experiments: of their folders). Default: runs/NAME."
        ),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the data set's files lie.")] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes. Default: from the work, the processors and the memory."
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory, such as 24GiB or 24G (1024^3 bytes each), or 24GB (1000^3); models beyond it go to disk."
            " Default: what is free.",
        ),
    ] = None,
    device: _DeviceOption = None,
    cluster: _ClusterOption = None,
    blocks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Spread the agents of each seed over a cluster, in so many blocks."
        ),
    ] = None,
    track: _TrackOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Say what was chosen for this machine.")
    ] = False,
    clean_twin: Annotated[
        bool,
        typer.Option(
            "--clean-twin",
            help="Also run each attacked experiment with malicious agents that train on true labels, in NAME-clean:"
            " the net attack success is the difference.",
        ),
    ] = False,
) -> list[Path]:
    """Run experiments, each for all of its seeds.

    Example: fedcb2o run digits-fedcb2o --set algorithm.alpha=10 --seeds 0,1,2 --out runs/mine
    """
    from fedcb2o.experiments.config.settings import load
    from fedcb2o.experiments.runs.progress import Progress
    from fedcb2o.experiments.runs.runner import run as run_experiment

    settings = _settings(changes, seeds, device)
    chosen = []
    for name in experiments:
        one = load(name, settings)
        folder = (
            Path("runs") / one.name
            if out is None
            else out
            if len(experiments) == 1
            else out / one.name
        )
        chosen.append((one, folder))
        if clean_twin and one.attacked:
            chosen.append((one.clean_counterpart(), folder.with_name(f"{folder.name}-clean")))
        elif clean_twin:
            print(f"Note: no clean twin of {one.name}: nobody attacks in it.", file=sys.stderr)
    with Progress(verbose=verbose) as progress:
        for one, folder in chosen:
            run_experiment(
                one,
                out=folder,
                data_dir=data_dir,
                workers=workers,
                memory=memory,
                resume=resume,
                watch=progress,
                cluster=cluster,
                blocks=blocks,
                track=track,
            )
    folders = [folder for _, folder in chosen]
    print("Done. For a table: fedcb2o compare", *folders, file=sys.stderr)
    return folders


def _settings(
    changes: Sequence[str] | None, seeds: str | None, device: str | None
) -> dict[str, Any]:
    settings = parse_settings(changes)
    if seeds is not None:
        settings["seeds"] = _parse_seeds(seeds)
    if device is not None:
        settings["device"] = device
    return settings


def parse_settings(changes: Sequence[str] | None) -> dict[str, Any]:
    """The settings in texts KEY=VALUE."""
    from fedcb2o.experiments.config.tables import parse_value

    settings = {}
    for change in changes or []:
        key, equals, value = change.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set needs KEY=VALUE, got {change!r}")
        settings[key.strip()] = parse_value(value.strip())
    return settings


def _parse_seeds(text: str) -> list[int]:
    try:
        ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
        if all(len(each) <= 2 and each == sorted(each) for each in ends):
            return [seed for each in ends for seed in range(each[0], each[-1] + 1)]
        raise ValueError
    except ValueError as error:
        raise ConfigError(
            f"--seeds needs whole numbers with commas, such as 0,1,2 or 0-19, got {text!r}"
        ) from error


def bench(
    grid: Annotated[
        str | None,
        typer.Argument(
            metavar="GRID",
            help="A grid's file, GRID.toml, or a built-in one (--list).",
            show_default=False,
            autocompletion=completion.grids,
        ),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the built-in grids, a line each.")
    ] = False,
    changes: _ChangesOption = None,
    seeds: _SeedsOption = None,
    out: Annotated[Path | None, typer.Option(help="The grid's folder. Default: runs/NAME.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes. Default: one for each processor.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the data set's files lie.")] = None,
    device: _DeviceOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on; what failed is tried again.")
    ] = False,
    cluster: _ClusterOption = None,
    track: _TrackOption = None,
) -> Path | None:
    """Run a grid: every defence against every attack, each for all of its seeds.

    Example: fedcb2o bench quick --out runs/quick, then: fedcb2o report runs/quick
    """
    from fedcb2o.experiments.grid.grid_runner import bench as run_grid
    from fedcb2o.experiments.grid.loading import grids

    if list_:
        print_descriptions(grids())
        return None
    if grid is None:
        raise ConfigError(
            "which grid? Name its file, GRID.toml, or a built-in one (fedcb2o bench --list)"
        )
    settings = _settings(changes, seeds, device)
    done = run_grid(
        grid,
        changes=settings,
        out=out,
        jobs=jobs,
        data_dir=data_dir,
        resume=resume,
        cluster=cluster,
        track=track,
    )
    told = f"For the matrices: fedcb2o report {done.folder}"
    if done.failed:
        for title, error in done.failed.items():
            print(f"Failed: {title}: {error}", file=sys.stderr)
        print(
            f"{len(done.failed)} of {done.cells} cells failed; --resume tries them again. {told}",
            file=sys.stderr,
        )
        raise typer.Exit(1)
    print(f"Done. {told}", file=sys.stderr)
    return done.folder


def compare(
    runs: _RunsArgument,
    over: Annotated[
        _AgentSummary,
        typer.Option(
            help="What to show of the benign agents: their mean, the worst one, the mean of the worst tenth."
        ),
    ] = _AgentSummary.mean,
) -> None:
    """Print one table over runs: the paper's Table 1, at the last round, mean and 95% interval over seeds."""
    from fedcb2o.records import Run

    _print_table([Run(folder) for folder in runs], over)


def report(
    runs: _RunsArgument,
    out: Annotated[Path, typer.Option(help="Where tables, figures and report.html go.")] = Path(
        "report"
    ),
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="DEFENCE",
            help="Of a grid: whom the others are compared with. Default: the grid's.",
        ),
    ] = None,
) -> Path:
    """Write tables, figures and one page over runs or, of a grid's folder, its matrices; and print the table."""
    from fedcb2o.records import Run
    from fedcb2o.report import is_grid
    from fedcb2o.report import report as write_report

    if any(map(is_grid, runs)):
        _report_grid(runs, out, reference)
        return out
    if reference is not None:
        raise ConfigError(
            "`--reference` is for the folder of a grid, whose differences are to one of its defences"
        )
    opened = [Run(folder) for folder in runs]
    write_report(opened, out)
    _print_table(opened, _AgentSummary.mean)
    print(
        f"\nThe page is {out / 'report.html'}; tables (CSV, Markdown, LaTeX) and figures (PNG) lie beside it."
    )
    return out


def _report_grid(folders: list[Path], out: Path, reference: str | None) -> None:
    from fedcb2o.report import grid_notes, read_grid, report_grid, terminal_tables, to_rich

    if len(folders) > 1:
        raise ConfigError("the folder of a grid is reported by itself: give it alone")
    results = read_grid(folders[0], reference)
    console = Console()
    report_grid(results, out)
    for sentence in grid_notes(results):
        print(f"Note: {sentence}.", file=sys.stderr)
    for setting, table in terminal_tables(results).items():
        console.print(
            to_rich(table, title=setting or None, caption="Percent.", width=console.width)
        )
    print(
        f"\nThe page is {out / 'report.html'}; the matrices (CSV, Markdown, LaTeX, PNG) are in {out / 'matrices'}."
    )


def _print_table(runs: list["Run"], over: _AgentSummary) -> None:
    from fedcb2o.report import compare as compare_runs
    from fedcb2o.report import incomplete_note, seed_caption, to_rich, unverified_note

    console = Console()
    for run in runs:
        for sentence in filter(None, (incomplete_note(run), unverified_note(run))):
            print(f"Note: {sentence}.", file=sys.stderr)
    console.print(
        to_rich(
            compare_runs(runs, over=over.value), caption=seed_caption(runs), width=console.width
        )
    )


def track(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs or of grids.", show_default=False),
    ],
    to: Annotated[
        list[str],
        typer.Option(
            metavar="TRACKER",
            autocompletion=completion.trackers,
            help="tensorboard or mlflow, in the folder of the run; tensorboard=DIR or mlflow=URI. Repeatable.",
            show_default=False,
        ),
    ],
) -> list[Path]:
    """Copy the records of runs and grids to TensorBoard or MLflow: what `--track` does while they are written.

    Example: fedcb2o track runs/mine --to tensorboard, then: tensorboard --logdir runs/mine
    """
    from fedcb2o.tracking import track as copy

    for folder in runs:
        copy(folder, to)
    return runs

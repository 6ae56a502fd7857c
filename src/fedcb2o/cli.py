"""The command line: run, compare, report, presets, data."""

import contextlib
import os
import sys
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedcb2o.errors import ConfigError, FedCB2OError

if TYPE_CHECKING:
    from fedcb2o.records import Run

app = typer.Typer(
    name="fedcb2o",
    help="Federated learning without a server that stays right when some participants attack it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Get data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")


class Over(StrEnum):
    """What a table shows of the benign agents."""

    mean = "mean"
    worst = "worst"
    worst_tenth = "worst_tenth"


Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.", show_default=False)]


def _version(wanted: bool) -> bool:
    if wanted:
        print(version("fedcb2o"))
        raise typer.Exit
    return wanted


@app.callback()
def _root(
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None: ...


@app.command()
def run(
    experiments: Annotated[
        list[str],
        typer.Argument(metavar="PRESET_OR_FILE.toml...", help="Presets or configuration files.", show_default=False),
    ],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, such as algorithm.alpha=2. Repeatable."),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, such as 0,1,2. Default: the experiment's own.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The run's folder (with several experiments: of their folders). Default: runs/NAME."),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the data set's files lie.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes. Default: from the work and the machine.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = False,
    clean_twin: Annotated[
        bool,
        typer.Option(
            "--clean-twin",
            help="Also run each attacked experiment with malicious agents that train on true labels, in NAME-clean:"
            " the net attack success is the difference.",
        ),
    ] = False,
) -> None:
    """Run experiments, each for all of its seeds.

    Example: fedcb2o run digits-fedcb2o --set algorithm.alpha=5 --seeds 0,1,2 --out runs/mine
    """
    from fedcb2o.experiments.config import load, parse_value
    from fedcb2o.experiments.progress import Progress
    from fedcb2o.experiments.run import run as run_experiment

    settings = {}
    for change in changes or []:
        key, equals, value = change.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set needs KEY=VALUE, got {change!r}")
        settings[key.strip()] = parse_value(value.strip())
    if seeds is not None:
        settings["seeds"] = _seeds(seeds)
    chosen = []
    for name in experiments:
        one = load(name, settings)
        folder = Path("runs") / one.name if out is None else out if len(experiments) == 1 else out / one.name
        chosen.append((one, folder))
        if clean_twin and one.attacked:
            chosen.append((one.clean_twin(), folder.with_name(f"{folder.name}-clean")))
        elif clean_twin:
            print(f"Note: no clean twin of {one.name}: nobody attacks in it.", file=sys.stderr)
    with Progress() as progress:
        for one, folder in chosen:
            run_experiment(one, out=folder, data_dir=data_dir, workers=workers, resume=resume, watch=progress)
    print("Done. For a table: fedcb2o compare", *(folder for _, folder in chosen), file=sys.stderr)


def _seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--seeds needs whole numbers with commas, such as 0,1,2, got {text!r}") from error


@app.command()
def compare(
    runs: Runs,
    over: Annotated[
        Over,
        typer.Option(help="What to show of the benign agents: their mean, the worst one, the mean of the worst tenth."),
    ] = Over.mean,
) -> None:
    """Print one table over runs: the paper's Table 1, at the last round, mean ± standard deviation over seeds."""
    from fedcb2o.records import Run

    _print_table([Run(folder) for folder in runs], over)


@app.command()
def report(
    runs: Runs,
    out: Annotated[Path, typer.Option(help="Where tables, figures and report.html go.")] = Path("report"),
) -> None:
    """Write tables, figures and one page over runs, and print the table."""
    from fedcb2o.records import Run
    from fedcb2o.report import report as write_report

    opened = [Run(folder) for folder in runs]
    write_report(opened, out)
    _print_table(opened, Over.mean)
    print(f"\nThe page is {out / 'report.html'}; tables (CSV, Markdown, LaTeX) and figures (PNG) lie beside it.")


def _print_table(runs: list["Run"], over: Over) -> None:
    from fedcb2o.report import compare as compare_runs
    from fedcb2o.report import to_rich, unfinished

    console = Console()
    for run in runs:
        if sentence := unfinished(run):
            print(f"Note: {sentence}.", file=sys.stderr)
    seeds = sorted({seed for run in runs for seed in run.seeds})
    caption = f"Percent; mean ± standard deviation over seeds ({', '.join(map(str, seeds))}), at the last round."
    console.print(to_rich(compare_runs(runs, over=over.value), caption=caption, width=console.width))


@app.command()
def presets() -> None:
    """List the presets, a line each."""
    from fedcb2o.experiments.config import presets as all_presets

    listed = all_presets()
    width = max(map(len, listed))
    for name, description in listed.items():
        print(f"{name:{width}}  {description}")


@data_app.command()
def emnist(
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Take files at hand: IDX files, or the official gzip.zip."),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where to put them. Default: the user's cache.")] = None,
) -> None:
    """Get EMNIST (Cohen et al. 2017): download it, checked by its checksum, or take files at hand."""
    from fedcb2o.data.download import download_emnist, import_emnist
    from fedcb2o.data.emnist import default_folder

    target = data_dir or default_folder()
    written = download_emnist(target) if source is None else import_emnist(source, target)
    print(f"{len(written)} files in {target}")
    if data_dir is not None:
        print(f"Use them so: fedcb2o run emnist-small-fedcb2o --data-dir {target}")


def main() -> None:
    """The entry point: a mistake that the user can mend is one line and exit status 2, never a traceback."""
    try:
        app(prog_name="fedcb2o")
        sys.stdout.flush()
    except FedCB2OError as error:
        _leave(f"Error: {' '.join(str(error).split())}", 2)
    except (KeyboardInterrupt, SystemExit) as leaving:
        if isinstance(leaving, SystemExit) and leaving.code != 130:  # what typer makes of Ctrl-C
            raise
        _leave("Interrupted. What is written stays; --resume goes on from the last checkpoint.", 130)
    except BrokenPipeError:
        _leave("", 1)
    except OSError as error:
        what = error.filename or "cannot write the output"
        _leave(f"Error: {what}: {error.strerror or error}", 2)


def _leave(message: str, status: int) -> None:
    with contextlib.suppress(OSError):  # standard error may be full as well
        print(message, end="\n" if message else "", file=sys.stderr, flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # a full or closed standard output must not fail a second time
    sys.exit(status)

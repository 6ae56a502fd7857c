"""The command line: run, bench, compare, report, presets, minimize, data."""

import contextlib
import math
import os
import sys
from collections.abc import Mapping
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedcb2o.errors import ConfigError, FedCB2OError

if TYPE_CHECKING:
    from fedcb2o.data.files import Release
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


class Noise(StrEnum):
    """D(theta - m) of the particles' noise."""

    isotropic = "isotropic"
    anisotropic = "anisotropic"


class Quantile(StrEnum):
    """The level of Q_beta."""

    plain = "plain"
    averaged = "averaged"


class Kind(StrEnum):
    """Malicious particles that have a name."""

    static = "static"
    lure = "lure"
    tracking = "tracking"
    random = "random"
    oscillating = "oscillating"
    greedy = "greedy"


class Animation(StrEnum):
    """The format of an animation."""

    gif = "gif"
    html = "html"


From = Annotated[
    Path | None,
    typer.Option("--from", metavar="DIR", help="Take files at hand: the folder of them, or of the official archive."),
]
Into = Annotated[Path | None, typer.Option("--data-dir", help="Where to put them. Default: the user's cache.")]
UsageError: Any = typer.BadParameter.__base__  # click's, or that of the click inside typer, which does not name it
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
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory, such as 24GiB; models beyond it go to disk. Default: what is free."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Where models and data lie: cpu, cuda, cuda:1, mps, ... Default: the file's, or cpu."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Say what was chosen for this machine.")] = False,
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
    from fedcb2o.experiments.config import load
    from fedcb2o.experiments.progress import Progress
    from fedcb2o.experiments.run import run as run_experiment
    from fedcb2o.experiments.tables import parse_value

    settings = {}
    for change in changes or []:
        key, equals, value = change.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set needs KEY=VALUE, got {change!r}")
        settings[key.strip()] = parse_value(value.strip())
    if seeds is not None:
        settings["seeds"] = _seeds(seeds)
    if device is not None:
        settings["device"] = device
    chosen = []
    for name in experiments:
        one = load(name, settings)
        folder = Path("runs") / one.name if out is None else out if len(experiments) == 1 else out / one.name
        chosen.append((one, folder))
        if clean_twin and one.attacked:
            chosen.append((one.clean_twin(), folder.with_name(f"{folder.name}-clean")))
        elif clean_twin:
            print(f"Note: no clean twin of {one.name}: nobody attacks in it.", file=sys.stderr)
    with Progress(verbose=verbose) as progress:
        for one, folder in chosen:
            run_experiment(
                one, out=folder, data_dir=data_dir, workers=workers, memory=memory, resume=resume, watch=progress
            )
    print("Done. For a table: fedcb2o compare", *(folder for _, folder in chosen), file=sys.stderr)


def _seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--seeds needs whole numbers with commas, such as 0,1,2, got {text!r}") from error


@app.command()
def bench(
    grid: Annotated[
        str | None,
        typer.Argument(
            metavar="GRID", help="A grid's file, GRID.toml, or a built-in one (--list).", show_default=False
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the built-in grids, a line each.")] = False,
    out: Annotated[Path | None, typer.Option(help="The grid's folder. Default: runs/NAME.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes. Default: one for each processor.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the data set's files lie.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on; what failed is tried again.")] = False,
) -> None:
    """Run a grid: every defence against every attack, each for all of its seeds.

    Example: fedcb2o bench quick --out runs/quick, then: fedcb2o report runs/quick
    """
    from fedcb2o.experiments.bench import bench as run_grid
    from fedcb2o.experiments.grid import grids

    if list_:
        _print_listed(grids())
        return
    if grid is None:
        raise ConfigError("which grid? Name its file, GRID.toml, or a built-in one (fedcb2o bench --list)")
    done = run_grid(grid, out=out, jobs=jobs, data_dir=data_dir, resume=resume)
    told = f"For the matrices: fedcb2o report {done.folder}"
    if done.failed:
        for title, error in done.failed.items():
            print(f"Failed: {title}: {error}", file=sys.stderr)
        _leave(f"{len(done.failed)} of {done.cells} cells failed; --resume tries them again. {told}", 1)
    print(f"Done. {told}", file=sys.stderr)


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
    """Write tables, figures and one page over runs or, of a grid's folder, its matrices; and print the table."""
    from fedcb2o.records import Run
    from fedcb2o.report import is_grid
    from fedcb2o.report import report as write_report

    if any(map(is_grid, runs)):
        _report_grid(runs, out)
        return
    opened = [Run(folder) for folder in runs]
    write_report(opened, out)
    _print_table(opened, Over.mean)
    print(f"\nThe page is {out / 'report.html'}; tables (CSV, Markdown, LaTeX) and figures (PNG) lie beside it.")


def _report_grid(folders: list[Path], out: Path) -> None:
    from fedcb2o.report import briefs, grid_notes, read_grid, report_grid, to_rich

    if len(folders) > 1:
        raise ConfigError("the folder of a grid is reported by itself: give it alone")
    results, console = read_grid(folders[0]), Console()
    report_grid(results, out)
    for sentence in grid_notes(results):
        print(f"Note: {sentence}.", file=sys.stderr)
    for setting, table in briefs(results).items():
        console.print(to_rich(table, title=setting or None, caption="Percent.", width=console.width))
    print(f"\nThe page is {out / 'report.html'}; the matrices (CSV, Markdown, LaTeX, PNG) are in {out / 'matrices'}.")


def _print_table(runs: list["Run"], over: Over) -> None:
    from fedcb2o.report import compare as compare_runs
    from fedcb2o.report import to_rich, told_seeds, unfinished

    console = Console()
    for run in runs:
        if sentence := unfinished(run):
            print(f"Note: {sentence}.", file=sys.stderr)
    console.print(to_rich(compare_runs(runs, over=over.value), caption=told_seeds(runs), width=console.width))


@app.command()
def presets() -> None:
    """List the presets, a line each."""
    from fedcb2o.experiments.tables import presets as all_presets

    _print_listed(all_presets())


def _print_listed(listed: Mapping[str, str]) -> None:
    width = max(map(len, listed))
    for name, description in listed.items():
        print(f"{name:{width}}  {description}")


@app.command()
def minimize(
    problem: Annotated[
        str | None, typer.Argument(metavar="PROBLEM", help="A built-in problem (--list).", show_default=False)
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the built-in problems, a line each.")] = False,
    lower: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Your own L, [..., d] -> [...], by import path.")
    ] = None,
    upper: Annotated[str | None, typer.Option(metavar="MODULE:FUNCTION", help="Your own G; without it, CBO.")] = None,
    dim: Annotated[int | None, typer.Option(help="d, for your own L.")] = None,
    bounds: Annotated[str | None, typer.Option(metavar="LOW,HIGH", help="Particles stay inside.")] = None,
    target: Annotated[str | None, typer.Option(metavar="X,Y,...", help="The answer to your own problem.")] = None,
    num_particles: Annotated[int | None, typer.Option(help="N, of each cluster.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Weight parameter of exp(-alpha G).")] = None,
    beta: Annotated[float | None, typer.Option(help="Share of the ensemble in the sub-level set Q_beta.")] = None,
    lambda1: Annotated[float | None, typer.Option(help="Drift to the consensus point.")] = None,
    sigma1: Annotated[float | None, typer.Option(help="Noise about the consensus point.")] = None,
    lambda2: Annotated[float | None, typer.Option(help="Drift down the gradient of L.")] = None,
    sigma2: Annotated[float | None, typer.Option(help="Noise of the size of that gradient.")] = None,
    dt: Annotated[float | None, typer.Option(help="Step of time.")] = None,
    delta_q: Annotated[float | None, typer.Option(help="What Q_beta's level adds to the quantile of L.")] = None,
    radius: Annotated[float | None, typer.Option(help="R: the ball whose particles make the consensus.")] = None,
    noise: Annotated[Noise | None, typer.Option(help="The kind of noise.")] = None,
    quantile: Annotated[Quantile | None, typer.Option(help="q_beta, or averaged as in the paper.")] = None,
    batch: Annotated[int | None, typer.Option(help="Particles judged in a step, at random. Default: all.")] = None,
    maxiter: Annotated[int | None, typer.Option(help="Steps at most.")] = None,
    xtol: Annotated[float | None, typer.Option(help="Stop at this spread about the consensus point.")] = None,
    time_limit: Annotated[float | None, typer.Option(help="Stop after so many seconds.")] = None,
    seed: Annotated[int | None, typer.Option(help="The seed; of several runs, the first.")] = None,
    runs: Annotated[int | None, typer.Option(help="Independent runs, in one batch.")] = None,
    tol: Annotated[float, typer.Option(help="A run succeeds within this of the target in every coordinate.")] = 0.1,
    adversary: Annotated[
        Kind | None,
        typer.Option(help="Malicious particles: static at a bad minimiser of L, a lure at the minimiser of G, ..."),
    ] = None,
    num_malicious: Annotated[int | None, typer.Option(help="How many. Default: 10.")] = None,
    mass: Annotated[float | None, typer.Option(help="Their share w_m. Default: all particles count alike.")] = None,
    at: Annotated[
        str | None, typer.Option(metavar="X,Y,...", help="Where they stand or start; tracking: their offset.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where the files go. Default: runs/minimize-PROBLEM.")] = None,
    animate: Annotated[Animation | None, typer.Option(help="Also draw an animation.")] = None,
    no_figure: Annotated[bool, typer.Option("--no-figure", help="Write the result alone, as JSON.")] = False,
) -> None:
    """Minimise G over the minimisers of L by particles (CB2O), under attack if you like; print and draw what comes.

    Settings that are not given are the problem's own, else those of fedcb2o.minimize in Python.

    Example: fedcb2o minimize circle --adversary static --num-malicious 10 --delta-q 0.01 --runs 20
    """
    import torch

    from fedcb2o import minimizing
    from fedcb2o.particles.objectives import problems

    if (
        "OMP_NUM_THREADS" not in os.environ
    ):  # steps are small: threads cost more than they bring, much on a busy machine
        torch.set_num_threads(1)

    if list_:
        listed = problems()
        for name, one in listed.items():
            print(f"{name:{max(map(len, listed))}}  {one.title}")
        return
    box, place, answer = (
        _numbers(name, text) for name, text in (("--bounds", bounds), ("--at", at), ("--target", target))
    )
    if box is not None and len(box) != 2:
        raise ConfigError(f"--bounds needs LOW,HIGH, such as -3,3, got {bounds!r}")
    chosen = minimizing.find_problem(problem, lower, upper, dim, target=answer, box=box)
    groups = minimizing.find_adversaries(adversary, num_malicious, mass, place, chosen)
    asked: dict[str, Any] = {
        "num_particles": num_particles, "alpha": alpha, "beta": beta, "lambda1": lambda1, "sigma1": sigma1,
        "lambda2": lambda2, "sigma2": sigma2, "dt": dt, "delta_q": delta_q, "radius": radius, "batch": batch,
        "maxiter": maxiter, "xtol": xtol, "time_limit": time_limit, "seed": seed, "runs": runs, "bounds": box,
    }  # fmt: skip
    asked |= {"noise": None if noise is None else noise.value, "quantile": None if quantile is None else quantile.value}
    given = {name: value for name, value in asked.items() if value is not None}
    if not tol >= 0:
        raise ConfigError(f"--tol must be at least 0, got {tol}")
    folder = Path("runs") / f"minimize-{chosen.name}" if out is None else out
    minimizing.make_folder(folder)
    result, watch, settings, warned = minimizing.run(chosen, groups, given)
    for line in warned:
        print(line, file=sys.stderr)
    decay = watch.decay(chosen, result, settings)
    print(minimizing.told(chosen, result, decay, tol))
    attack = None if adversary is None else {
        "kind": str(adversary), "num_particles": groups[0].num_particles, "mass": mass, "at": place,
    }  # fmt: skip
    paths = minimizing.write(
        folder,
        minimizing.record(chosen, result, settings, decay, tol, attack),
        lambda: watch.scene(chosen, result, settings, minimizing.title(chosen, result, settings, groups, adversary)),
        figure=not no_figure,
        animation=None if animate is None else str(animate),
    )
    print("Wrote", *paths, file=sys.stderr)


def _numbers(option: str, text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} needs numbers with commas, such as -1,0, got {text!r}") from error
    if not all(map(math.isfinite, values)):
        raise ConfigError(f"{option} needs finite numbers, got {text!r}")
    return values


@data_app.command()
def emnist(source: From = None, data_dir: Into = None) -> None:
    """Get EMNIST (Cohen et al. 2017): download it, checked by its checksum, or take IDX files or gzip.zip at hand."""
    from fedcb2o.data.emnist import RELEASE

    _get(RELEASE, source, data_dir, "emnist-small-fedcb2o")


@data_app.command()
def mnist(source: From = None, data_dir: Into = None) -> None:
    """Get MNIST (LeCun et al. 1998): download it, checked by its checksums, or take IDX files at hand."""
    from fedcb2o.data.mnist import RELEASE

    _get(RELEASE, source, data_dir, "digits-fedcb2o --set data.name=mnist")


@data_app.command()
def cifar10(source: From = None, data_dir: Into = None) -> None:
    """Get CIFAR-10 (Krizhevsky 2009): download its binary version, checked by its checksum, or take it at hand."""
    from fedcb2o.data.cifar10 import RELEASE

    _get(RELEASE, source, data_dir, "digits-fedcb2o --set data.name=cifar10 --set model.name=resnet")


def _get(release: "Release", source: Path | None, data_dir: Path | None, example: str) -> None:
    from fedcb2o.data.download import download, import_files
    from fedcb2o.data.files import default_folder

    target = data_dir or default_folder(release)
    written = download(release, target) if source is None else import_files(release, source, target)
    print(f"{len(written)} files in {target}")
    where = "" if data_dir is None else f" --data-dir {target}"
    print(f"Use them so: fedcb2o run {example}{where}")


def main() -> None:
    """The entry point: a mistake that the user can mend is one line and exit status 2, never a traceback."""
    try:
        if app(prog_name="fedcb2o", standalone_mode=False) == 130:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
        sys.stdout.flush()
    except FedCB2OError as error:
        _leave(f"Error: {_one_line(error)}", 2)
    except UsageError as error:
        told = _one_line(error.format_message())  # nothing where no command was given: then its help was shown
        end = "" if told.endswith((".", "?")) else "."
        command = error.ctx.command_path if error.ctx else "fedcb2o"
        _leave(told and f"Error: {told}{end} See `{command} --help`.", 2)
    except KeyboardInterrupt:
        _leave("Interrupted. What is written stays; a run goes on from its last checkpoint with --resume.", 130)
    except BrokenPipeError:
        _leave("", 1)
    except OSError as error:
        what = error.filename or "cannot write the output"
        _leave(f"Error: {what}: {error.strerror or error}", 2)


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def _leave(message: str, status: int) -> None:
    with contextlib.suppress(OSError):  # standard error may be full as well
        print(message, end="\n" if message else "", file=sys.stderr, flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # a full or closed standard output must not fail a second time
    sys.exit(status)

"""The command line: run, bench, compare, report, track, presets, schema, minimize, data, peer.

What a command needs is imported when it runs: help and mistakes answer before PyTorch would be there.
"""

import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer

from fedcb2o.cli import configurations, data, peers, runs
from fedcb2o.cli.minimize import command
from fedcb2o.cli.signals import SignalGuard
from fedcb2o.errors import FedCB2OError
from fedcb2o.parallel import resources
from fedcb2o.safe_stdio import safe_streams, write_error

app = typer.Typer(
    name="fedcb2o",
    help="Federated learning without a server that stays right when some participants attack it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_data_app = typer.Typer(help="Get data sets.", no_args_is_help=True)
for _function in (
    runs.run,
    runs.bench,
    runs.compare,
    runs.report,
    runs.track,
    configurations.presets,
    configurations.schema,
    command.minimize,
):
    app.command()(_function)
for _get in (data.emnist, data.mnist, data.fashion_mnist, data.cifar10):
    _data_app.command(_get.__name__)(_get)  # as in a configuration: with an underscore
app.add_typer(_data_app, name="data")
_peer_app = typer.Typer(
    help="Train with other organisations, a process each.",
    no_args_is_help=True,
    callback=peers.require_extra,
)
for _step in (
    peers.identity,
    peers.renew,
    peers.federation,
    peers.amend,
    peers.sign,
    peers.check,
    peers.run,
    peers.report,
    peers.proof,
    peers.demo,
):
    _peer_app.command()(_step)
app.add_typer(_peer_app, name="peer")

_UsageError: Any = (
    typer.BadParameter.__base__
)  # click's, or that of the click inside typer, which does not name it


def _version(wanted: bool) -> bool:
    if wanted:
        print(version("fedcb2o"))
        raise typer.Exit
    return wanted


@app.callback()
def _root(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    resources.check_address_space()


@safe_streams()
def main() -> None:
    """The entry point: a mistake that the user can mend is one line and exit status 2, never a traceback.

    A command that makes files returns their paths, and has done its work even if it could not say so. One whose output
    is all that it makes fails where that is lost.
    """
    stops = SignalGuard()
    try:
        made = app(_with_cluster_address(sys.argv[1:]), prog_name="fedcb2o", standalone_mode=False)
        if made == 130:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
        if isinstance(made, int) and made:
            sys.exit(made)
        if not made and (error := write_error()):
            raise error
    except FedCB2OError as error:
        _exit(f"Error: {_one_line(error)}", 2)
    except _UsageError as error:
        told = _one_line(error.format_message()).replace(
            ": Value error, ", ": "
        )  # nothing where no command was given: then its help was shown
        end = "" if told.endswith((".", "?")) else "."
        command = error.ctx.command_path if error.ctx else "fedcb2o"
        _exit(told and f"Error: {told}{end} See `{command} --help`.", 2)
    except KeyboardInterrupt:
        told = f"{stops.outcome}. What is written stays; a run goes on from its last checkpoint with --resume."
        _exit(told, stops.exit_status)
    except BrokenPipeError:
        _exit("", 1)
    except OSError as error:
        what = error.filename or "cannot write the output"
        _exit(f"Error: {what}: {error.strerror or error}", 2)
    except Exception as error:
        if not resources.is_out_of_memory(error):
            raise
        _exit(f"Error: memory is full ({_one_line(error)}): {resources.MEMORY_CURES}", 2)
    finally:
        stops.restore()


def _with_cluster_address(words: Sequence[str]) -> list[str]:
    """The words of a command, in which --cluster alone, at the end or before another option, is --cluster local."""
    following = [*words[1:], "--"]
    return [
        each
        for word, after in zip(words, following, strict=False)
        for each in ([word, "local"] if word == "--cluster" and after.startswith("-") else [word])
    ]


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def _exit(message: str, status: int) -> None:
    print(message, end="\n" if message else "", file=sys.stderr, flush=True)
    sys.exit(status)

"""The command line `fedcb2o`.

The modules of a command are imported when it runs, so that help and errors do not wait for PyTorch.
"""

import dataclasses
import logging
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from fedcb2o.cli import configurations, data, operation, peers, runs
from fedcb2o.cli.help_format import Command, Group
from fedcb2o.cli.log_output import LogFormat, configure_logs, log_end, set_verbosity, stderr_logging
from fedcb2o.cli.minimize import minimize
from fedcb2o.cli.new import new
from fedcb2o.cli.signals import ServiceEndedError, SignalGuard
from fedcb2o.cli.watch import watch
from fedcb2o.errors import FedCB2OError
from fedcb2o.parallel import _resources
from fedcb2o.printable import format_traceback, one_line
from fedcb2o.python_words import command_words
from fedcb2o.safe_stdio import safe_streams, write_error

_INTERRUPT_STATUS = 130  # typer's result of Ctrl-C
_RUN_ENDED = "What is written stays; a run goes on from its last checkpoint with --resume."

app = typer.Typer(
    name="fedcb2o",
    cls=Group,
    help="Federated learning without a server, robust against participants that attack it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _function in (
    runs.run,
    runs.bench,
    runs.assess,
    runs.compare,
    runs.report,
    runs.track,
    watch,
    new,
    configurations.presets,
    configurations.keys,
    configurations.schema,
    minimize,
):
    app.command(cls=Command)(_function)

_data_app = typer.Typer(cls=Group, help="Get data sets.", no_args_is_help=True)
for _download in (data.emnist, data.mnist, data.fashion_mnist, data.cifar10):
    # The name has underscores, as in a configuration; typer would write hyphens.
    _data_app.command(_download.__name__, cls=Command)(_download)
app.add_typer(_data_app, name="data")

_peer_app = typer.Typer(
    cls=Group,
    help="Train with other organisations, one process each.",
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
    operation.relay,
    peers.run,
    operation.backup,
    operation.restore,
    peers.report,
    peers.proof,
    peers.demo,
):
    _peer_app.command(cls=Command)(_step)
app.add_typer(_peer_app, name="peer")

# The class of click, or of the copy of click in typer, which does not export it.
_UsageError: Any = typer.BadParameter.__base__


def _version(wanted: bool) -> bool:
    if wanted:
        print(version("fedcb2o"))
        raise typer.Exit
    return wanted


@app.callback()
def _root(
    _: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    verbose: Annotated[
        bool, Option("--verbose", help="Print more: the choices for this machine.")
    ] = False,
    quiet: Annotated[bool, Option("--quiet", help="Print results and errors only.")] = False,
    log_format: Annotated[LogFormat, Option(help="Format of log lines.")] = LogFormat.text,
    log_file: Annotated[
        Path | None, Option(help="File for log lines, which is rotated at 10 MiB.")
    ] = None,
) -> None:
    set_verbosity(verbose=verbose, quiet=quiet)
    if log_file is not None or log_format is not LogFormat.text:
        configure_logs(log_format, log_file)
    _resources.check_address_space()


@safe_streams()
@command_words()
@stderr_logging()
def main() -> None:
    """Run the command line.

    An error that the user can correct is one line and exit status 2 or 3, without a traceback. A
    command that makes files returns their paths, and succeeds even if its output is lost.
    """
    signals = SignalGuard()
    try:
        result = app(
            _with_cluster_address(sys.argv[1:]), prog_name="fedcb2o", standalone_mode=False
        )
        # typer turns Ctrl-C into a result in this mode.
        if result == _INTERRUPT_STATUS:
            raise KeyboardInterrupt
        if isinstance(result, int) and result:
            sys.exit(result)
        error = write_error()
        # Files were written, so lost output is no failure; without files output was all there is.
        if error and not result:
            raise error
    except FedCB2OError as error:
        _exit_with_error(one_line(str(error)), error.exit_status)
    except _UsageError as error:
        _exit_with_error(_usage_message(error), 2)
    except (KeyboardInterrupt, ServiceEndedError) as error:
        message = f"{signals.outcome}. {str(error) or _RUN_ENDED}"
        if not log_end(message, logging.INFO):
            print(message, file=sys.stderr, flush=True)
        sys.exit(signals.exit_status)
    except BrokenPipeError:
        # The reader of the output has ended, such as `head`.
        sys.exit(1)
    except OSError as error:
        subject = error.filename or "cannot write the output"
        _exit_with_error(one_line(f"{subject}: {error.strerror or error}"), 2)
    except Exception as error:
        text = one_line(str(error))
        if not _resources.is_out_of_memory(error):
            name = type(error).__name__
            if not log_end(f"unexpected {name}: {text}", logging.ERROR, error):
                print(format_traceback(error), file=sys.stderr, flush=True)
            sys.exit(1)
        _exit_with_error(f"memory is full ({text}): {_resources.MEMORY_CURES}", 2)
    finally:
        signals.restore()


def _usage_message(error: Any) -> str:
    """Return the message of a usage error; empty after help."""
    hint = _setting_hint(error)
    # The options with similar names do not help where a setting has the name.
    text = error.message if hint else error.format_message()
    text = one_line(text + hint).replace(": Value error, ", ": ")
    if not text:
        return ""
    if not text.endswith((".", "?")):
        text += "."
    command_path = error.ctx.command_path if error.ctx else "fedcb2o"
    return f"{text} See `{command_path} --help`."


def _setting_hint(error: Any) -> str:
    """Return a hint at --set if an unknown option has the name of a setting; otherwise empty."""
    option = getattr(error, "option_name", "")
    # An option that lacks its value has no context.
    if not option or error.ctx is None:
        return ""
    options = [name for parameter in error.ctx.command.params for name in parameter.opts]
    if option in options or "--set" not in options:
        return ""
    name = option.lstrip("-").replace("-", "_")
    if error.ctx.command.name == "minimize":
        from fedcb2o.particles import Paper

        keys = [field.name for field in dataclasses.fields(Paper)]
    else:
        from fedcb2o.experiments.key_table import key_rows

        keys = [key for key, *_ in key_rows()]
    matches = [key for key in keys if f".{key}".endswith(f".{name}")]
    return f". Did you mean --set {matches[0]}=VALUE?" if matches else ""


def _with_cluster_address(words: Sequence[str]) -> list[str]:
    """Insert the address `local` after a `--cluster` without one."""
    completed = []
    # typer has no option with an optional value.
    for word, following in zip(words, [*words[1:], "--"], strict=False):
        completed.append(word)
        if word == "--cluster" and following.startswith("-"):
            completed.append("local")
    return completed


def _exit_with_error(message: str, status: int) -> None:
    """End with an exit status, after a message if there is one."""
    if message and not log_end(message, logging.ERROR):
        print(f"Error: {message}", file=sys.stderr, flush=True)
    sys.exit(status)

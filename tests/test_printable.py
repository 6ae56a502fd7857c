"""Text of others in log lines, errors and tables: one line, without control of the terminal."""

import json
import logging
import os
import socket
import stat
import threading

import pytest

from fedcb2o.cli import main
from fedcb2o.cli.log_output import LogFormat, configure_logs, stderr_logging
from fedcb2o.errors import ConfigError
from fedcb2o.experiments.runs import _remote_job
from fedcb2o.printable import format_traceback, one_line, printable

EVIL = "\x1b[2J\x9b2Jorg-1\r\nError: org-2 cheats\u2028Note: \u202egpj\u2066\x07\u200f"
SHOWN = "[2J2Jorg-1 Error: org-2 cheats Note: gpj"
LOGGER = logging.getLogger("fedcb2o.peer")


def raised(message: str) -> ValueError:
    try:
        raise ValueError(message)
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (EVIL, SHOWN),
        ("a\tb\x00c", "a bc"),
        ("\u0645\u06cc\u200c\u062e", "\u0645\u06cc\u200c\u062e"),  # a letter of Persian needs it
        ("caf\u00e9 \U0001f600", "caf\u00e9 \U0001f600"),
        ("half \ud800", "half "),
    ],
)
def test_text_of_others_controls_no_terminal(text: str, line: str) -> None:
    assert one_line(text) == line
    assert printable("  two  spaces\n") == "  two  spaces "


@pytest.mark.parametrize("log_format", LogFormat)
@pytest.mark.parametrize("has_file", [True, False])
def test_log_lines_have_no_control_characters(log_format, has_file, tmp_path, capsys) -> None:
    file = tmp_path / "node.log"
    with stderr_logging():
        configure_logs(log_format, file if has_file else None)
        LOGGER.warning("%s refuses", EVIL)
        LOGGER.error("broken", exc_info=raised(EVIL))
        LOGGER.warning("%s", "x" * 100_000)
    lines = (file.read_text() if has_file else capsys.readouterr().err).split("\n")
    assert all(line.isprintable() for line in lines)
    assert f"{SHOWN} refuses" in lines[0]
    assert len(lines[-2]) < 10_000
    assert "95000 more characters" in lines[-2]
    if log_format is LogFormat.json:
        assert len(lines) == 4
        text = json.loads(lines[1])["error"]
        assert all(line.isprintable() for line in text.split("\n"))
    else:
        text = "\n".join(lines[2:-2])
        assert all(line.startswith("  ") for line in lines[2:-2])
    assert "Traceback (most recent call last):" in text
    assert f'"{__file__}", line' in text
    assert "ValueError: [2J2Jorg-1" in text


def test_the_error_of_a_thread_is_a_log_line(capsys) -> None:
    def fail() -> None:
        raise ValueError(EVIL)

    with stderr_logging():
        thread = threading.Thread(target=fail, name="fedcb2o-dial")
        thread.start()
        thread.join()
    output = capsys.readouterr().err
    assert output.startswith("Error: an error ended fedcb2o-dial\n  Traceback")
    assert all(line.isprintable() for line in output.split("\n"))


def test_a_traceback_of_another_formatter_is_not_printed(capsys) -> None:
    """The record keeps the first formatted traceback for all handlers."""
    record = LOGGER.makeRecord("fedcb2o", logging.ERROR, "", 0, "broken", (), None)
    record.exc_info = (ValueError, raised(EVIL), None)
    logging.Formatter().format(record)
    with stderr_logging():
        logging.getLogger("fedcb2o").handle(record)
    assert "\x1b" not in capsys.readouterr().err
    assert "\x1b" in logging.Formatter().format(record)


@pytest.mark.parametrize("error", [ConfigError(EVIL), ValueError(EVIL), OSError(5, EVIL, EVIL)])
def test_the_error_of_a_command_controls_no_terminal(error, monkeypatch, capsys) -> None:
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr("fedcb2o.peer.membership.federation.read_federation", fail)
    monkeypatch.setattr("sys.argv", ["fedcb2o", "peer", "sign", "federation.toml"])
    with pytest.raises(SystemExit) as end:
        main()
    is_unexpected = type(error) is ValueError
    assert end.value.code == (1 if is_unexpected else 2)
    output = capsys.readouterr().err
    assert output.replace("\n", "").isprintable()
    if is_unexpected:
        assert output.startswith("Traceback (most recent call last):")
    else:
        assert output.count("\n") == 1
        assert SHOWN in output


def test_log_lines_of_a_remote_job_control_no_terminal() -> None:
    stream = _remote_job.io.StringIO()
    with _remote_job._log_to(stream):
        LOGGER.error("%s", EVIL)
    assert stream.getvalue() == f"{SHOWN}\n"
    assert _remote_job.format_error(ConfigError(EVIL)) == SHOWN


def test_a_traceback_names_the_places_and_the_cause() -> None:
    try:
        raise RuntimeError("outside") from raised("inside")
    except RuntimeError as error:
        text = format_traceback(error)
    assert "ValueError: inside" in text
    assert "The above exception was the direct cause" in text
    assert text.endswith("RuntimeError: outside")


def test_log_files_are_readable_for_their_owner_only(tmp_path, monkeypatch) -> None:
    """Files of a former release, which others could read, are closed to them too."""
    monkeypatch.setattr("fedcb2o.cli.log_output._MAX_LOG_BYTES", 200)
    names = ["node.log", *(f"node.log.{k}" for k in range(1, 6))]
    for name in names[:4]:
        (tmp_path / name).write_text("old\n")
        (tmp_path / name).chmod(0o644)
    umask = os.umask(0)
    try:
        with stderr_logging():
            configure_logs(LogFormat.text, tmp_path / "node.log")
            modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in names[:4]]
            assert modes == [0o600] * 4
            assert (tmp_path / "node.log").read_text() == "old\n"
            for k in range(40):
                LOGGER.info("line %d", k)
    finally:
        os.umask(umask)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize("kind", ["link", "FIFO", "socket", "folder"])
@pytest.mark.parametrize("name", ["node.log", "node.log.1"])
def test_a_log_file_that_is_no_regular_file_is_refused(kind, name, tmp_path) -> None:
    path, target = tmp_path / name, tmp_path / "target"
    target.write_text("of somebody else")
    target.chmod(0o644)
    with socket.socket(socket.AF_UNIX) as listening:
        if kind == "link":
            path.symlink_to(target)
        elif kind == "FIFO":
            os.mkfifo(path)
        elif kind == "socket":
            listening.bind(str(path))
        else:
            path.mkdir()
        with stderr_logging(), pytest.raises(OSError, match=f"it is a {kind}, not a regular"):
            configure_logs(LogFormat.text, tmp_path / "node.log")
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("of somebody else", 0o644)

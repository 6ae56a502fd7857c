"""Closed, broken or full standard streams: a run continues, a command that only prints fails."""

import contextlib
import io
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import tomli_w

from fedcb2o.safe_stdio import SafeStream, safe_streams
from tests.tiny import ENVIRONMENT, FEDCB2O, TINY, bits, run_cli, tiny, write

# A user's function that prints more than a buffer holds, in the main process and in workers.
PRINTING_CRITERION = textwrap.dedent("""
    import sys

    from fedcb2o.federated.criteria import average_loss


    def criterion(judged):
        print("o" * 10_000)
        print("e" * 10_000, file=sys.stderr)
        return average_loss(judged)
""")
SCRIPT = "import sys, fedcb2o; fedcb2o.run(sys.argv[1], out=sys.argv[2], workers=1); print('done')"
GRID_AXES = {"attacks": {"flip": {"attack": TINY["attack"]}}, "defences": {"FedCB2O": {}}}


@contextlib.contextmanager
def unwritable_stream(fault):
    """Yield a stream to which a process cannot write."""
    if fault == "full":
        with open("/dev/full", "w") as full:  # noqa: PTH123 (a device)
            yield full
        return
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def run_with_fault(words, fault, folder, streams=("stdout", "stderr")):
    """Run a command that cannot write to `streams`; return its exit status, stdout and stderr."""
    if fault == "closed":
        closing = " ".join({"stdout": ">&-", "stderr": "2>&-"}[name] for name in streams)
        words, fault = ["sh", "-c", f'exec "$@" {closing}', "sh", *words], None
    with contextlib.nullcontext() if fault is None else unwritable_stream(fault) as broken:
        where = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE) | dict.fromkeys(
            streams if fault else (), broken
        )
        done = subprocess.run(
            [*map(str, words)],
            cwd=folder,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=100,
            **where,
        )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def printing_run(tmp_path_factory):
    """Return a folder with an experiment whose criterion prints, and the bits of its normal run."""
    folder = tmp_path_factory.mktemp("talkative")
    (folder / "talkative.py").write_text(PRINTING_CRITERION)
    path = write(folder / "tiny.toml", rounds=2, algorithm={"criterion": "talkative:criterion"})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        assert run_cli("run", path, "--out", folder / "said", "--workers", 1).status == 0
    return folder, bits(folder / "said")


@pytest.mark.parametrize(
    ("fault", "workers"),
    [
        ("closed", 1),
        pytest.param("closed", 2, marks=pytest.mark.slow),
        pytest.param("broken", 2, marks=pytest.mark.slow),
        pytest.param("full", 1, marks=pytest.mark.slow),
    ],
)
def test_a_run_succeeds_without_standard_streams(printing_run, tmp_path, fault, workers):
    folder, expected = printing_run
    words = [
        FEDCB2O,
        "run",
        "tiny.toml",
        "--out",
        tmp_path / "run",
        "--workers",
        workers,
        "--verbose",
    ]
    assert run_with_fault(words, fault, folder)[0] == 0
    assert bits(tmp_path / "run") == expected


@pytest.mark.slow
def test_a_run_without_standard_output_logs_to_the_error_stream(printing_run, tmp_path):
    folder, _ = printing_run
    words = [FEDCB2O, "run", "tiny.toml", "--out", tmp_path / "run", "--workers", 1]
    status, _, output = run_with_fault(words, "closed", folder, ["stdout"])
    assert status == 0
    assert output.splitlines()[-1] == f"Done. For a table: fedcb2o compare {tmp_path / 'run'}"


@pytest.mark.parametrize("fault", [pytest.param("broken", marks=pytest.mark.slow), "full"])
def test_a_script_continues_after_a_run_without_an_error_stream(printing_run, tmp_path, fault):
    folder, expected = printing_run
    words = [sys.executable, "-c", SCRIPT, "tiny.toml", tmp_path / "run"]
    status, output, _ = run_with_fault(words, fault, folder, ["stderr"])
    assert (status, output.splitlines()[-1]) == (0, "done")
    assert bits(tmp_path / "run") == expected


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["closed", "broken"])
def test_minimize_writes_its_result_without_standard_streams(tmp_path, fault):
    words = [FEDCB2O, "minimize", "circle", "--out", tmp_path / "result.json"]
    assert run_with_fault(words, fault, tmp_path)[0] == 0
    assert (tmp_path / "result.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["closed", "broken", "full"])
def test_a_grid_and_its_report_succeed_without_standard_streams(tmp_path, fault):
    shared = {name: value for name, value in tiny(rounds=1).items() if name != "attack"}
    (tmp_path / "grid.toml").write_text(tomli_w.dumps({**shared, **GRID_AXES}))
    result = run_with_fault(
        [FEDCB2O, "bench", "grid.toml", "--out", "grid", "--jobs", 2], fault, tmp_path
    )[0]
    assert result == 0
    assert run_with_fault([FEDCB2O, "report", "grid", "--out", "report"], fault, tmp_path)[0] == 0
    assert (tmp_path / "report" / "report.html").is_file()


@pytest.mark.parametrize(
    ("words", "fault", "status", "output"),
    [
        (["--version"], "closed", 2, "Error: cannot write the output: it is closed\n"),
        (["--version"], "full", 2, "Error: cannot write the output: No space left on device\n"),
        (["--help"], "broken", 1, ""),
    ],
)
def test_a_command_that_only_prints_fails_without_standard_output(
    tmp_path, words, fault, status, output
):
    assert run_with_fault([FEDCB2O, *words], fault, tmp_path, ["stdout"])[::2] == (status, output)


def test_a_safe_stream_drops_only_the_text_that_cannot_be_written():
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", buffering=1) as stream:
        output = SafeStream(stream)
        print("one", file=output)
        assert (os.read(reader, 100), output.error) == (b"one\n", None)
        os.close(reader)
        print("two", file=output, flush=True)
        assert isinstance(output.error, BrokenPipeError)
        new_reader, other = os.pipe()
        os.dup2(other, writer)
        os.close(other)
        print("three", file=output)
        assert os.read(new_reader, 100) == b"three\n"
        os.close(new_reader)
        print("four", file=output)
    print("five", file=output)
    assert isinstance(output.error, BrokenPipeError)


def test_standard_streams_are_restored(capsys):
    before = sys.stdout, sys.stderr
    with safe_streams():
        result = (sys.stdout.isatty(), sys.stderr.encoding)
        assert result == (before[0].isatty(), before[1].encoding)
        print("said")
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr().out == "said\n"


@pytest.mark.parametrize("first_out", ["one", "two"])
def test_blocks_in_several_threads_restore_the_original_streams(first_out):
    before = sys.stdout, sys.stderr
    begun, may_end = threading.Barrier(3), {"one": threading.Event(), "two": threading.Event()}

    @safe_streams()
    def run(name):
        begun.wait(10)
        may_end[name].wait(10)

    threads = {name: threading.Thread(target=run, args=(name,)) for name in may_end}
    try:
        with safe_streams():
            outer = sys.stdout
            with safe_streams():
                assert sys.stdout is outer
            assert sys.stdout is outer
            for thread in threads.values():
                thread.start()
            begun.wait(10)
        for name in sorted(threads, key=lambda name: name != first_out):
            assert sys.stdout is outer
            may_end[name].set()
            threads[name].join(10)
        assert (sys.stdout, sys.stderr) == before
    finally:
        sys.stdout, sys.stderr = before


def test_a_stream_that_other_code_installs_is_kept():
    before, installed = (sys.stdout, sys.stderr), io.StringIO()
    try:
        with safe_streams():
            sys.stdout = installed
        assert (sys.stdout, sys.stderr) == (installed, before[1])
    finally:
        sys.stdout, sys.stderr = before

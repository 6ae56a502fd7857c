"""Standard streams that are closed, broken or full: a run goes on, and what is only said must be
said."""

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
from tests.tiny import ENVIRONMENT, FEDCB2O, TINY, bits, here, tiny, write

# An own part that says more than a buffer holds, in whichever process it works.
TALKATIVE = textwrap.dedent("""
    import sys

    from fedcb2o.federated.criteria import average_loss


    def criterion(judged):
        print("o" * 10_000)
        print("e" * 10_000, file=sys.stderr)
        return average_loss(judged)
""")
SCRIPT = "import sys, fedcb2o; fedcb2o.run(sys.argv[1], out=sys.argv[2], workers=1); print('done')"
AXES = {"attacks": {"flip": {"attack": TINY["attack"]}}, "defences": {"FedCB2O": {}}}


@contextlib.contextmanager
def unwritable(how):
    """Streams for a process that nothing can be written to."""
    if how == "full":
        with open("/dev/full", "w") as full:  # noqa: PTH123 (a device)
            yield full
        return
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def ended(words, how, folder, streams=("stdout", "stderr")):
    """The exit status of a process that cannot write to some of its streams, and what it said on
    the others."""
    if how == "closed":
        closing = " ".join({"stdout": ">&-", "stderr": "2>&-"}[name] for name in streams)
        words, how = ["sh", "-c", f'exec "$@" {closing}', "sh", *words], None
    with contextlib.nullcontext() if how is None else unwritable(how) as broken:
        where = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE) | dict.fromkeys(
            streams if how else (), broken
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
def talkative(tmp_path_factory):
    """A folder with a run whose own part prints, and the bits of that run where all can be said."""
    folder = tmp_path_factory.mktemp("talkative")
    (folder / "talkative.py").write_text(TALKATIVE)
    path = write(folder / "tiny.toml", rounds=2, algorithm={"criterion": "talkative:criterion"})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        assert here("run", path, "--out", folder / "said", "--workers", 1).status == 0
    return folder, bits(folder / "said")


@pytest.mark.parametrize(
    ("how", "workers"),
    [
        ("closed", 1),
        pytest.param("closed", 2, marks=pytest.mark.slow),
        pytest.param("broken", 2, marks=pytest.mark.slow),
        pytest.param("full", 1, marks=pytest.mark.slow),
    ],
)
def test_a_run_ends_well_though_nothing_can_be_said(talkative, tmp_path, how, workers):
    folder, expected = talkative
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
    assert ended(words, how, folder)[0] == 0
    assert bits(tmp_path / "run") == expected


@pytest.mark.slow
def test_closed_standard_output_alone_is_no_matter_and_the_error_stream_says_all(
    talkative, tmp_path
):
    folder, _ = talkative
    words = [FEDCB2O, "run", "tiny.toml", "--out", tmp_path / "run", "--workers", 1]
    status, _, said = ended(words, "closed", folder, ["stdout"])
    assert status == 0
    assert said.splitlines()[-1] == f"Done. For a table: fedcb2o compare {tmp_path / 'run'}"


@pytest.mark.parametrize("how", [pytest.param("broken", marks=pytest.mark.slow), "full"])
def test_a_script_goes_on_after_a_run_that_could_say_nothing(talkative, tmp_path, how):
    folder, expected = talkative
    words = [sys.executable, "-c", SCRIPT, "tiny.toml", tmp_path / "run"]
    status, said, _ = ended(words, how, folder, ["stderr"])
    assert (status, said.splitlines()[-1]) == (0, "done")
    assert bits(tmp_path / "run") == expected


@pytest.mark.parametrize("how", [pytest.param("closed", marks=pytest.mark.slow), "broken"])
def test_minimize_writes_what_it_cannot_say(tmp_path, how):
    words = [FEDCB2O, "minimize", "circle", "--no-figure", "--out", tmp_path]
    assert ended(words, how, tmp_path)[0] == 0
    assert (tmp_path / "result.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["closed", "broken", "full"])
def test_a_grid_and_its_report_are_made_though_nothing_can_be_said(tmp_path, how):
    shared = {name: value for name, value in tiny(rounds=1).items() if name != "attack"}
    (tmp_path / "grid.toml").write_text(tomli_w.dumps({**shared, **AXES}))
    assert (
        ended([FEDCB2O, "bench", "grid.toml", "--out", "grid", "--jobs", 2], how, tmp_path)[0] == 0
    )
    assert ended([FEDCB2O, "report", "grid", "--out", "report"], how, tmp_path)[0] == 0
    assert (tmp_path / "report" / "report.html").is_file()


@pytest.mark.parametrize(
    ("words", "how", "status", "said"),
    [
        (["--version"], "closed", 2, "Error: cannot write the output: it is closed\n"),
        (["--version"], "full", 2, "Error: cannot write the output: No space left on device\n"),
        (["--help"], "broken", 1, ""),
        (["presets"], "broken", 1, ""),
    ],
)
def test_a_command_that_only_says_something_fails_where_it_cannot(
    tmp_path, words, how, status, said
):
    assert ended([FEDCB2O, *words], how, tmp_path, ["stdout"])[::2] == (status, said)


def test_an_output_drops_what_cannot_be_said_and_no_more():
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", buffering=1) as stream:
        output = SafeStream(stream)
        print("one", file=output)
        assert (os.read(reader, 100), output.error) == (b"one\n", None)
        os.close(reader)
        print("two", file=output, flush=True)
        assert isinstance(output.error, BrokenPipeError)
        again, other = os.pipe()
        os.dup2(other, writer)
        os.close(other)
        print("three", file=output)
        assert os.read(again, 100) == b"three\n"
        os.close(again)
        print("four", file=output)
    print("five", file=output)
    assert isinstance(output.error, BrokenPipeError)


def test_standard_streams_are_put_back(capsys):
    before = sys.stdout, sys.stderr
    with safe_streams():
        assert (sys.stdout.isatty(), sys.stderr.encoding) == (
            before[0].isatty(),
            before[1].encoding,
        )
        print("said")
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr().out == "said\n"


@pytest.mark.parametrize("first_out", ["one", "two"])
def test_blocks_in_several_threads_put_back_what_was_there_before_the_first(first_out):
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


def test_a_stream_that_another_put_there_meanwhile_stays():
    before, theirs = (sys.stdout, sys.stderr), io.StringIO()
    try:
        with safe_streams():
            sys.stdout = theirs
        assert (sys.stdout, sys.stderr) == (theirs, before[1])
    finally:
        sys.stdout, sys.stderr = before

"""Processes in separate sessions, for tests that kill or interrupt them."""

import contextlib
import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.tiny import ENVIRONMENT, FEDCB2O

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def start(*arguments: object, cwd: Path, **environment: str) -> subprocess.Popen[str]:
    """Start `fedcb2o ARGUMENTS` in a new session."""
    return subprocess.Popen(
        [FEDCB2O, *map(str, arguments)], cwd=cwd, env={**ENVIRONMENT, **environment}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def living(session: int) -> list[str]:
    """Return the command lines of a session's processes, except zombies."""
    processes = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdecimal() and os.getsid(int(process.name)) == session:
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
                processes += (
                    [] if state in "ZX" else [(process / "cmdline").read_text().replace("\0", " ")]
                )
    return processes


def assert_gone(session: int) -> None:
    deadline = time.monotonic() + 3
    while (remaining := living(session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert remaining == []

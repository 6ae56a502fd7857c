"""Commands for keys, versions, backups and relays: they start without PyTorch."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest
from tests.peer import relays
from tests.peer.waiting import wait_for
from tests.processes import needs_proc
from tests.tiny import ENVIRONMENT

from fedcb2o.data import SampleValues
from fedcb2o.errors import ConfigError
from fedcb2o.peer import read_federation, write_federation
from fedcb2o.peer.membership.federation_schema import SampleSchema
from fedcb2o.peer.wire.protocol import Answer, AnswerStatus
from fedcb2o.peer.wire.relayed import open_transport

LARGE = "{'torch', 'pandas', 'ray', 'scipy', 'matplotlib'}"
PROGRAM = f"""
import json, sys
from fedcb2o.cli import main
status = 0
for words in json.loads(sys.argv[1]):
    sys.argv = ["fedcb2o", "peer", *words]
    try:
        main()
    except SystemExit as error:
        status = status or error.code
    print("LOADED", *sorted({LARGE} & set(sys.modules)), flush=True)
sys.exit(status)
"""
MAX_RELAY_BYTES = 80 * 10**6
MODEL = Answer(AnswerStatus.OK, bytes(2**20))


def start(*commands: Sequence[object]) -> subprocess.Popen[str]:
    """Start a process that runs commands one after another."""
    words = json.dumps([[*map(str, command)] for command in commands])
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, words],
        env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.fixture
def relay_keys(tmp_path):
    return relays.relay_identity(tmp_path)


def test_commands_start_without_pytorch(federation_file, organisations, relay_keys, tmp_path):
    keys = organisations[0].folder
    two = tmp_path / "two.toml"
    run = tmp_path / "run"
    run.mkdir()
    (run / "federation.toml").write_bytes(federation_file.read_bytes())
    backup = tmp_path / "backup.tar.gz"
    new = ["--identity", tmp_path / "restored", "--run", tmp_path / "restored-run"]
    commands = [
        ["identity", "--name", "a", "--out", tmp_path / "keys"],
        ["renew", "--identity", tmp_path / "keys"],
        ["amend", federation_file, "--remove", "org-3", "--out", two],
        ["sign", two],
        ["sign", two, "--identity", keys],
        ["backup", "--identity", keys, "--run", run, "--out", backup],
        ["restore", backup, *new],
        *([name, "--help"] for name in ("check", "run", "relay", "federation", "report")),
    ]
    process = start(*commands)
    out, err = process.communicate(timeout=60)
    loaded = [line for line in out.splitlines() if line.startswith("LOADED")]
    assert loaded == ["LOADED"] * len(commands), err
    assert process.returncode == 0, err


def resident_bytes(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS:"))
    return 1024 * int(line.split()[1])


@needs_proc
def test_a_relay_takes_at_most_80_megabytes(federation_file, organisations, relay_keys):
    process = start(["relay", federation_file, "--identity", relay_keys.folder])
    federation = read_federation(federation_file)
    location = relay_keys.folder / "relay.member.toml"
    first, second = (
        open_transport(federation, one, relay=location, listen=False) for one in organisations[:2]
    )
    try:
        # Each answer in a thread of its own, so that the relay stores several at once.
        second.serve(lambda request, reply: threading.Thread(target=reply, args=[MODEL]).start())
        wait_for(lambda: 1 in first.connected_peers(), 60)
        for _ in range(4):
            questions = [first.ask(1, b"question", 60) for _ in range(8)]
            assert None not in [one.answer() for one in questions]
            assert resident_bytes(process.pid) < MAX_RELAY_BYTES
    finally:
        first.close()
        second.close()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert out.splitlines()[-1] == "LOADED", err


def test_only_programs_that_train_check_the_experiment(federation_file):
    federation = read_federation(federation_file)
    settings = federation.settings.model_copy(update={"algorithm": {"name": "fedcb3o"}})
    write_federation(federation.model_copy(update={"settings": settings}), federation_file)
    unchecked = read_federation(federation_file, check_experiment=False)
    for read in (lambda: read_federation(federation_file), lambda: unchecked.experiment):
        with pytest.raises(ConfigError, match="fedcb3o"):
            read()


def test_a_federation_file_knows_the_types_of_samples():
    (values, _) = get_args(SampleSchema.model_fields["values"].annotation)
    assert values == SampleValues

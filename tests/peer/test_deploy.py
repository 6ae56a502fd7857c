"""Files in deploy/: services, limits, hashes of packages and the health check of a container."""

import contextlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.peer import members
from typer.testing import CliRunner

from fedcb2o.cli import app
from fedcb2o.peer._metrics_server import MetricsServer

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = ("fedcb2o-peer@.service", "fedcb2o-relay@.service")


@pytest.mark.parametrize("name", ["compose.yaml", *UNITS])
def test_service_files_use_existing_options(name):
    text = (DEPLOY / name).read_text()
    words = set(re.findall(r"(?<=[ \[=])--[a-z-]+", text)) - {"--now"}
    assert {"--identity", "--metrics"} <= words
    helps = [
        CliRunner().invoke(app, [*command, "--help"], terminal_width=200).output
        for command in ([], ["peer", "run"], ["peer", "relay"])
    ]
    assert {word for word in words if not any(word in text for text in helps)} == set()


@pytest.mark.parametrize("name", UNITS)
def test_a_service_has_few_rights_and_bounds_of_memory_processes_files_and_time(name):
    text = (DEPLOY / name).read_text()
    settings = dict(line.split("=", 1) for line in text.splitlines() if re.match(r"\w+=", line))
    bounds = {"MemoryMax", "TasksMax", "CPUQuota", "LimitNOFILE", "LimitCORE", "TimeoutStopSec"}
    assert bounds <= settings.keys()
    assert settings["CapabilityBoundingSet"] == ""
    assert settings["User"] == "fedcb2o"
    others = (DEPLOY / "fedcb2o-peer@.service").read_text()
    rights = re.search(r"NoNewPrivileges=true\n.*?\n\n", others, re.DOTALL)
    assert rights is not None
    assert rights[0] in text
    if systemd := shutil.which("systemd-analyze"):
        command = [systemd, "security", "--offline=true", "--threshold=20", DEPLOY / name]
        subprocess.run(command, check=True, capture_output=True)


def test_locked_files_have_the_tested_release_of_each_package_of_a_node_with_hashes():
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().split("\n")
        if "==" in line
    )
    pinned = {canonical_name(name): version for name, version in pinned.items()}
    locked = {}
    for file in ("locked.txt", "locked-torch.txt"):
        text = (DEPLOY / file).read_text()
        assert "//" not in text  # no index
        for entry in re.split(r"\n(?=\S)", text.strip()):
            match = re.fullmatch(
                r"([a-z0-9.-]+)==(\S+)[^\n]*\n(    --hash=sha256:[0-9a-f]{64}( \\\n)?)+", entry
            )
            assert match, entry[:200]
            locked[match[1]] = match[2]
    apart = {name for name in locked if re.match("(nvidia|cuda|triton|colorama)", name)}
    assert {name: locked[name] for name in locked.keys() - apart} == {
        name: pinned[name] for name in locked.keys() - apart
    }
    for name in importlib.metadata.requires("fedcb2o"):
        extra = re.search(r"extra == ['\"](\w+)['\"]", name)
        if extra is None or extra[1] in ("peer", "metrics", "privacy"):
            assert canonical_name(re.match(r"[\w-]+", name)[0]) in locked


def canonical_name(name):
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["fedcb2o", "peer", "run", "federation.toml"], 0, ""),
        (["sleep", "60"], 1, "process 1 is neither `fedcb2o peer run` nor `peer relay`: sleep 60"),
        (["fedcb2o", "peer", "relay", "x", "--metrics", "PORT"], 0, ""),
        (["fedcb2o", "peer", "run", "x", "--metrics", "CLOSED"], 1, "Connection refused"),
        (["fedcb2o", "peer", "run", "x", "--metrics=ILL"], 1, "503"),
    ],
)
def test_the_health_check_of_a_container(words, status, message, tmp_path):
    states = {"PORT": True, "ILL": False}
    with contextlib.ExitStack() as stack:
        ports = {"CLOSED": members.free_ports(1)[0]}
        for name, healthy in states.items():
            server = MetricsServer(
                0, expires=datetime.now(UTC), health=lambda healthy=healthy: {"healthy": healthy}
            )
            server.start()
            stack.callback(server.close)
            ports[name] = server.port
        for name, port in ports.items():
            words = [word.replace(name, str(port)) for word in words]
        (tmp_path / "cmdline").write_text("\0".join([*words, ""]))
        check = [sys.executable, DEPLOY / "health.py", tmp_path / "cmdline"]
        done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert message in done.stderr

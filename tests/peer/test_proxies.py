"""Real proxies between members: tinyproxy passes TLS on, mitmproxy ends it.

tinyproxy is a package of Debian. mitmproxy has an environment of its own, because it pins other
versions of what this project uses: see `.ci/run`. Tests are skipped without them.
"""

import contextlib
import functools
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.peer import members, relays
from tests.peer.nodes import Nodes
from tests.peer.test_relay_runs import same_bits, simulated_models
from tests.peer.waiting import wait_for
from tests.tiny import ENVIRONMENT

from fedcb2o.peer import Federation, read_federation
from fedcb2o.peer.node.preflight import CheckResult, check_members

ROOT = Path(__file__).parents[2]
TINYPROXY = shutil.which("tinyproxy")
MITMPROXY = shutil.which(
    "mitmdump", path=os.pathsep.join([os.environ["PATH"], str(ROOT / "build/mitmproxy/bin")])
)
needs_tinyproxy = pytest.mark.skipif(
    TINYPROXY is None, reason="tinyproxy is not installed (Debian: apt-get install tinyproxy)"
)
needs_mitmproxy = pytest.mark.skipif(
    MITMPROXY is None, reason="mitmproxy is not installed (its lines in .ci/run install it)"
)
ROUNDS = 3


@contextlib.contextmanager
def running(command: list[object], log: Path, port: int) -> Iterator[None]:
    """Run a program that listens, with its output in a file."""
    with log.open("w") as file:
        process = subprocess.Popen(
            [str(part) for part in command], stdout=file, stderr=subprocess.STDOUT,
            env=ENVIRONMENT, cwd=log.parent,
        )  # fmt: skip
        try:
            wait_for(lambda: is_open(port) or process.poll() is not None, log.read_text)
            assert process.poll() is None, log.read_text()
            yield
        finally:
            process.terminate()
            process.wait(30)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def tinyproxy(folder: Path, federation: Federation) -> Iterator[int]:
    """Run tinyproxy with a password for the endpoints of a federation, and yield its port."""
    (port,) = members.free_ports(1)
    lines = [f"Port {port}", "Listen 127.0.0.1", "Allow 127.0.0.1", "BasicAuth name password"]
    lines += [
        f"ConnectPort {member.endpoint.rpartition(':')[2]}"
        for member in federation.members.values()
    ]
    (folder / "tinyproxy.conf").write_text("\n".join([*lines, "LogLevel Connect", ""]))
    command: list[object] = [TINYPROXY, "-d", "-c", folder / "tinyproxy.conf"]
    with running(command, folder / "tinyproxy.log", port):
        yield port


def set_environment(settings: dict[str, str]) -> None:
    os.environ.update(settings)


def train(peers: Nodes, behind: int, settings: dict[str, str], **options: object) -> None:
    """Run all nodes, one of them with variables of its environment."""
    direct = [j for j in range(len(peers.identities)) if j != behind]
    peers.start(*direct, **options)
    peers.start(behind, prepare=functools.partial(set_environment, settings), **options)
    statuses = peers.wait()
    assert statuses == [0] * len(statuses), [peers.log(j) for j in peers.processes]


@needs_tinyproxy
def test_a_node_behind_tinyproxy_with_a_password_gets_the_bits_of_a_simulation(tmp_path):
    orgs = members.identities(tmp_path, 3)
    settings = members.experiment(3, rounds=ROUNDS)
    path = tmp_path / "federation.toml"
    federation = members.federated(orgs, changes={"rounds": ROUNDS}, path=path, synchronous=True)
    peers = Nodes(tmp_path, path, [one.folder for one in orgs], {"together": 1, **settings})
    with tinyproxy(tmp_path, federation) as port, contextlib.closing(peers):
        train(peers, 2, {"HTTPS_PROXY": f"http://name:password@127.0.0.1:{port}"})
    models = simulated_models(tmp_path / "simulation", settings)
    assert all(same_bits(peers.model(j), models[j]) for j in range(3))
    log = (tmp_path / "tinyproxy.log").read_text()
    for member in [one.member for one in orgs[:2]]:
        assert f"CONNECT {member.endpoint} HTTP" in log


@contextlib.contextmanager
def mitmproxy(folder: Path, trusted: str) -> Iterator[dict[str, str]]:
    """Run mitmproxy, which trusts a root, and yield the variables of a member behind it."""
    (port,) = members.free_ports(1)
    (folder / "trusted.pem").write_text(trusted)
    options = {
        "confdir": folder / "authority",
        "ssl_verify_upstream_trusted_ca": folder / "trusted.pem",
        "save_stream_file": folder / "seen",
    }
    command: list[object] = [MITMPROXY, "--listen-host", "127.0.0.1", "--listen-port", port]
    for key, value in options.items():
        command += ["--set", f"{key}={value}"]
    with running(command, folder / "mitmproxy.log", port):
        yield {
            "HTTPS_PROXY": f"http://127.0.0.1:{port}",
            "FEDCB2O_PROXY_CA": str(folder / "authority" / "mitmproxy-ca-cert.pem"),
        }


@needs_mitmproxy
def test_a_member_behind_mitmproxy_takes_part_through_a_relay_for_signatures(tmp_path, monkeypatch):
    """The proxy reads each request, and sees names, times and sizes only."""
    orgs = relays.behind_nat(tmp_path, 3)
    settings = members.experiment(3, rounds=ROUNDS)
    path = tmp_path / "federation.toml"
    members.federated(orgs, changes={"rounds": ROUNDS}, path=path, synchronous=True)
    keys = relays.relay_identity(tmp_path)
    port = int(keys.member.endpoint.rpartition(":")[2])
    relay = [sys.executable, "-m", "fedcb2o", "peer", "relay", path, "--signatures-only"]
    peers = Nodes(tmp_path, path, [one.folder for one in orgs], {"together": 1, **settings})
    with (
        running([*relay, "--identity", keys.folder], tmp_path / "relay.log", port),
        mitmproxy(tmp_path, keys.member.root) as variables,
        contextlib.closing(peers),
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        location = keys.folder / "relay.member.toml"
        results = check_members(read_federation(path), orgs[0], seconds=2.0, relay=location)
        assert CheckResult("relay", "", ("a proxy ends TLS on the way",)) in results
        monkeypatch.undo()
        train(peers, 0, variables, relay=location)
    models = simulated_models(tmp_path / "simulation", settings)
    assert all(same_bits(peers.model(j), models[j]) for j in range(3))
    for j in range(3):
        senders = {one["id"] for line in peers.lines(j) for one in line["received"]}
        assert senders == {0, 1, 2} - {j}

    seen = (tmp_path / "seen").read_bytes()
    assert b"/v1/boxes/org-1/" in seen
    for hidden in (b"/v1/hello", b"/v1/manifest", b"/v1/models", b'"seen"'):
        assert hidden not in seen

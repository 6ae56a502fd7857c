"""A run in Flower's simulation, and the example over SuperLink and SuperNodes on loopback."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower has an environment of its own: make flower")

from tests.flower.test_flower import assert_equals_a_run

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"
BIN = Path(sys.executable).parent
SECONDS = 150


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Flower:
    """Processes of Flower in one folder, with a SuperLink on loopback."""

    def __init__(self, home, stack, *options):
        self.home = home
        self.stack = stack
        self.address = f"127.0.0.1:{free_port()}"
        self.environment = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(EXAMPLE.parents[1]),  # the modules of the tests
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1",
            "RAY_ADDRESS": "local",
        }
        config = f'[superlink.test]\naddress = "{self.address}"\ninsecure = true\n'
        (home / "config.toml").write_text('[superlink]\ndefault = "test"\n' + config)
        host, port = self.address.split(":")
        self.start(
            "flower-superlink", "--insecure", "--disable-runtime-dependency-installation",
            "--host", host, "--port", port, *options,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while not self.is_healthy():
            assert time.monotonic() < deadline
            time.sleep(0.2)

    def is_healthy(self):
        try:
            with urllib.request.urlopen(f"http://{self.address}/health") as answer:
                return answer.status == 200
        except OSError:
            return False

    def start(self, *command):
        process = subprocess.Popen(
            [BIN / command[0], *command[1:]],
            env=self.environment,
            cwd=self.home,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.stack.callback(kill_session, process)

    def run(self, app, *options):
        done = subprocess.run(
            [BIN / "flwr", "run", app, "test", "--stream", *options],
            env=self.environment, cwd=self.home, capture_output=True, text=True, timeout=SECONDS,
        )  # fmt: skip
        return done.stdout + done.stderr


def kill_session(process):
    """Kill a process and all processes of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


def test_a_simulation_of_eight_clients_equals_a_run(tmp_path, stack):
    """The models agree to 1e-6 after ten rounds with the same data, seeds and training."""
    app = tmp_path / "app"
    app.mkdir()
    shutil.copy(Path(__file__).with_name("same_run.py"), app / "fedcb2o_digits.py")
    config = (EXAMPLE / "pyproject.toml").read_text().replace("budget = 4", 'out = "models.pt"')
    (app / "pyproject.toml").write_text(config)
    flower = Flower(tmp_path, stack, "--simulation")
    output = flower.run(
        app,
        "--federation-config",
        "num-supernodes=8 client-resources-num-cpus=1 init-args-num-cpus=1",
        "--run-config",
        f"out='{tmp_path / 'models.pt'}'",
    )
    assert (tmp_path / "models.pt").exists(), output
    assert_equals_a_run(tmp_path)


def test_the_example_runs_over_a_superlink_and_supernodes(tmp_path, stack):
    flower = Flower(tmp_path, stack)
    for j in range(2):
        flower.start(
            "flower-supernode", "--insecure", "--superlink", flower.address,
            "--port", str(free_port()), "--node-config", f"partition-id={j} num-partitions=2",
        )  # fmt: skip
    output = flower.run(EXAMPLE, "--run-config", "rounds=1 budget=1")
    (accuracy,) = set(re.findall(r"'accuracy': (0\.\d+)", output)) or {0.0}
    assert float(accuracy) > 0.5, output
    assert re.search(r"'auc': 0\.[89]", output)

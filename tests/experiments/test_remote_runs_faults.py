"""Grids and seeds on a cluster of three nodes, with a killed node or command."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
from tests.experiments.test_cluster_faults import three  # noqa: F401 (a fixture)
from tests.experiments.test_grid import grid
from tests.experiments.test_remote_runs import SEEDS, bits, rounds_by, slow_loss, told, until  # noqa: F401 (a fixture)
from tests.processes import needs_proc
from tests.tiny import tiny

import fedcb2o
from fedcb2o.experiments import run
from fedcb2o.experiments.grid import GridProgress
from fedcb2o.experiments.runs import _remote_runs

pytest.importorskip("ray")

pytestmark = [needs_proc, pytest.mark.slow]

COMMAND = (
    "from fedcb2o.experiments.runs import _remote_runs; _remote_runs.CHECKPOINT_INTERVAL = 0.0; from "
    "fedcb2o.cli import main; main()"
)


def test_a_grid_continues_after_a_node_is_killed(three, tmp_path, told, monkeypatch, caplog):  # noqa: F811
    class Kill(GridProgress):
        def finish(self, *arguments: object) -> None:
            super().finish(*arguments)
            if len(three.others) == 2:
                three.remove_node(three.others.pop(), allow_graceful=False)

    monkeypatch.setattr(_remote_runs, "CHECKPOINT_INTERVAL", 0.0)
    settings = tiny(rounds=8, algorithm=slow_loss(told))
    defences = {"One": {}, "Two": {"algorithm": {"alpha": 1.0}}}
    plan = grid(rounds=8, algorithm=settings["algorithm"], defences=defences)
    done = fedcb2o.bench(plan, out=tmp_path / "many", cluster=three.address, watch=Kill())
    assert not done.failed
    assert "continues from the files that came back" in caplog.text
    fedcb2o.bench(plan, out=tmp_path / "one", jobs=2)
    assert bits(tmp_path / "many") == bits(tmp_path / "one")


def test_seeds_can_be_resumed_after_the_command_is_killed(three, tmp_path, told):  # noqa: F811
    plan = tiny(rounds=20, seeds=SEEDS, algorithm=slow_loss(told))
    path = tmp_path / "plan.toml"
    folder = tmp_path / "many"
    path.write_text(tomli_w.dumps(plan))
    arguments = ["run", str(path), "--out", str(folder), "--cluster", three.address]
    process = subprocess.Popen([sys.executable, "-c", COMMAND, *arguments])
    assert until(lambda: len(list(folder.glob("seed-*/checkpoint.safetensors"))) == len(SEEDS), 120)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed = rounds_by(told)
    assert until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in killed), 60)
    run(plan, out=folder, workers=1, resume=True)
    (resumed_rounds,) = (
        rounds for process, rounds in rounds_by(told).items() if process not in killed
    )
    assert min(resumed_rounds) > 0
    run(plan, out=tmp_path / "one", workers=1)
    assert bits(folder) == bits(tmp_path / "one")

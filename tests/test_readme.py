"""The shell commands of README.md run as printed, except package index and host names."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedcb2o.federated import aggregation, algorithms, attacks
from tests.peer.members import free_ports
from tests.test_docs import ROOT, blocks

README = ROOT / "README.md"
pytestmark = pytest.mark.timeout(1800)
SHELL = [block for _, block in blocks(README, "sh")]
LINES = [line.partition("    #")[0].strip() for block in SHELL for line in block.splitlines()]
OURS = ("pip install .", "pip install 'fedcb2o")  # PyTorch's own index needs a network
AVERAGES = {"mean", "by_num_samples", "dfedavgm", "dec_lora", "tad_lora"}
CLUSTERED_AVERAGES = {"ifca", "dfca"}
NO_DEFENCES = {*AVERAGES, *CLUSTERED_AVERAGES, "local_training", "by_rule"}
HOSPITAL = """
import fedcb2o
from sklearn.datasets import load_breast_cancer


def dataset():
    x, y = load_breast_cancer(return_X_y=True)
    return fedcb2o.dataset(x[PART], y[PART], class_names=("malignant", "benign"))
"""


def block_with(text: str) -> list[str]:
    """Return the commands of the README's block that contains a text."""
    (block,) = (block for block in SHELL if text in block)
    return block.splitlines()


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """Return the environment of a shell with the `fedcb2o` and `pip` of the tests."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HOME": str(folder), "OMP_NUM_THREADS": "1", **variables}


def shell(command: str, folder: Path, **variables: str) -> "subprocess.Popen[str]":
    """Start a command in a folder."""
    return subprocess.Popen(
        ["bash", "-ec", command],
        cwd=folder,
        env=environment(folder, **variables),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def outputs_of(*processes: "subprocess.Popen[str]") -> list[str]:
    """Wait for processes and return their output; all must end with status 0."""
    outputs = [process.communicate(timeout=1500)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs


def test_every_command_is_tested():
    tools = {line.split()[0] for line in LINES}
    assert tools == {"pip", "make", "fedcb2o"}
    assert [line for line in LINES if line.startswith("make")] == ["make demo", "make test"]


def count_defences() -> int:
    """Return the number of rules and algorithms that defend against something."""
    return len({*aggregation.__all__, *algorithms.__all__} - NO_DEFENCES)


def test_defences_and_attacks_are_counted():
    expected = f"compare {count_defences()} defences and {len(attacks.__all__)} attacks"
    assert expected in README.read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is missing")
@pytest.mark.parametrize("linked", [False, True])
def test_make_empties_no_environment_of_others(linked, tmp_path):
    mine = tmp_path / "mine" / "package"
    mine.parent.mkdir()
    mine.write_text("kept")
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    if linked:
        (folder / ".venv").symlink_to(mine.parent)
    else:
        mine = shutil.move(mine.parent, folder / ".venv") / mine.name
    made = subprocess.run(["make", "install"], cwd=folder, capture_output=True, text=True)
    assert made.returncode != 0
    assert "make has not made .venv" in made.stderr
    assert mine.read_text() == "kept"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is missing")
@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_make_has_the_target(command, tmp_path):
    (output,) = outputs_of(shell(f"{command} --dry-run -C {ROOT}", tmp_path))
    assert ".venv/bin/" in output


@pytest.mark.slow
def test_the_demo_runs(tmp_path):
    (output,) = outputs_of(shell(f"make demo --dry-run -C {ROOT}", tmp_path))
    commands = [line for line in output.splitlines() if line.startswith(".venv/bin/fedcb2o ")]
    assert len(commands) == 2
    script = "\n".join(commands).replace(".venv/bin/", "").replace("--seeds 0-9", "--seeds 0")
    outputs_of(shell(script.replace(" --set ", " --set rounds=2 --set ", 1), tmp_path))
    assert (tmp_path / "runs/demo-report/report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for line in LINES if line.startswith(OURS)])
def test_the_package_installs(command, tmp_path):
    build = "python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir wheels"
    outputs_of(shell(f"{build} {ROOT}", tmp_path))
    command = command.replace("install .", f"install --no-build-isolation {ROOT}")
    options = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "wheels", "PIP_NO_DEPS": "1"}
    outputs_of(
        shell(command.replace("pip", "python -m pip", 1), tmp_path, **options, PIP_TARGET="here")
    )
    assert (tmp_path / "here/fedcb2o/__init__.py").exists()


@pytest.mark.slow
def test_the_commands_of_a_users_project_run(tmp_path):
    outputs_of(shell("\n".join(block_with("fedcb2o new")), tmp_path))
    assert (tmp_path / "lab/report/report.html").exists()


@pytest.mark.slow
def test_the_commands_of_peers_run(tmp_path):
    pip, identity, federation, *steps = block_with("peer federation")
    assert pip.startswith("pip install")
    a, b = tmp_path / "hospital-a", tmp_path / "clinic-b"
    _, toml = next(blocks(ROOT / "docs" / "peers.md", "toml"))
    toml = toml.replace("benign = 3", "benign = 2").replace("budget = 2", "budget = 1")
    toml = toml.replace("rounds = 50", "rounds = 3").replace('"arrays"', '"my_hospital:dataset"')
    for part, folder in enumerate((a, b)):
        folder.mkdir()
        (folder / "my_hospital.py").write_text(HOSPITAL.replace("PART", f"{part}::2"))
    toml = "\n".join(line for line in toml.splitlines() if not line.startswith("path"))
    (a / "tumours.toml").write_text(toml)

    processes = []
    for folder, port in zip((a, b), free_ports(2), strict=True):
        command = identity.replace("peer.hospital-a.example:7447", f"127.0.0.1:{port}")
        processes.append(shell(command.replace("hospital-a", folder.name), folder))
    outputs_of(*processes)
    shutil.copy(b / "keys/clinic-b.member.toml", a)
    outputs_of(shell(federation, a))
    shutil.copy(a / "federation.toml", b)
    assert [step.split()[2] for step in steps] == ["check", "run", "report"]
    for step in steps:
        of_b = step.replace("hospital-a", "clinic-b")
        outputs_of(shell(step, a), shell(of_b, b))
    assert (a / "runs/hospital-a/report.html").exists()

"""Imports run one way: the contracts in pyproject.toml hold."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_imports_run_one_way():
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_room_is_a_package():
    # import-linter does not see a folder without __init__.py, and nor would the contracts.
    rooms = {module.parent for module in (ROOT / "src" / "fedcb2o").rglob("*.py")}
    assert [room.name for room in rooms if not (room / "__init__.py").exists()] == []

"""Imports between packages go in one direction, as the contracts in pyproject.toml state."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_imports_go_in_one_direction():
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_folder_of_modules_is_a_package():
    # import-linter ignores folders without __init__.py.
    folders = {module.parent for module in (ROOT / "src" / "fedcb2o").rglob("*.py")}
    assert [folder.name for folder in folders if not (folder / "__init__.py").exists()] == []

"""Other libraries' tests and results: `make external`.

    python -m tests.external.libraries [--byzfl REPOSITORY]

1. ByzFL's own tests of aggregators, pre-aggregators and attacks, from its repository, with
   `byzfl/byzfl.py` in place of ByzFL.
2. `test_libraries.py`: equal results of byzfl, krum and byzpy on random inputs. Each library is
   in a separate folder, and uses this environment's PyTorch.

Nothing is installed into this environment, and the temporary folder is removed. krum asks for
Python 3.12; its aggregators also run on 3.11.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = {"byzfl": "0.0.11", "krum": "0.9.1", "byzpy": "0.1.4"}
BYZFL = "https://github.com/LPD-EPFL/byzfl"
SUITES = {"aggregators": 40, "preaggregators": 12, "attacks": 32}

# Failing tests of ByzFL, with the reason.
KNOWN: dict[str, str] = {}


def install(folder: Path) -> dict[str, str]:
    """Install each library without its dependencies; return the errors by library."""
    failed = {}
    for name, version in PACKAGES.items():
        command = [
            sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile",
            "--ignore-requires-python", "--target", str(folder / name), f"{name}=={version}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            failed[name] = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
    return failed


def pytest(paths: list[Path], python_path: list[Path], cwd: Path) -> tuple[int, str]:
    """Run tests in a process; return its status and output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*python_path, ROOT]))}
    command = [
        sys.executable, "-m", "pytest", "-q", "-rfs", "--tb=line", "-p", "no:cacheprovider",
        "-c", os.devnull, "--rootdir", str(cwd), *map(str, paths),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def run_byzfl_tests(folder: Path, repository: str) -> bool:
    """Run ByzFL's tests on fedcb2o; return whether all failures are known."""
    source = folder / "source"
    clone = ["git", "clone", "--quiet", "--depth", "1", repository, str(source)]
    done = subprocess.run(clone, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"ByzFL's tests: skipped, {repository} cannot be cloned: {done.stderr.strip()}")
        return True
    is_good = True
    for suite, expected in SUITES.items():
        path = source / "tests" / f"unit_test_{suite}.py"
        _, output = pytest([path], [HERE / "byzfl"], folder)
        counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|error)", output)}
        passed = counts.get("passed", 0)
        failures = re.findall(r"^FAILED \S*?::(\w+)", output, re.MULTILINE)
        unknown = [name for name in failures if name not in KNOWN]
        print(f"ByzFL's tests of {suite}: {passed} of {expected} passed")
        for name in sorted(set(failures) & set(KNOWN)):
            print(f"  {failures.count(name)} of {name}: {KNOWN[name]}")
        if unknown or passed + len(failures) != expected:
            print(output)
            is_good = False
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(description="Tests and results of other libraries.")
    parser.add_argument(
        "--byzfl", default=BYZFL, metavar="REPOSITORY", help="ByzFL's git repository"
    )
    repository = parser.parse_args().byzfl
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for package, reason in install(folder).items():
            print(f"{package}: skipped, {reason}")
        is_good = run_byzfl_tests(folder, repository)
        status, output = pytest(
            [HERE / "test_libraries.py"], [folder / package for package in PACKAGES], ROOT
        )
        print(output)
        return int(not is_good or status != 0)


if __name__ == "__main__":
    sys.exit(main())

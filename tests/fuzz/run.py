"""Fuzz the targets with coverage (atheris, that is libFuzzer): make fuzz.

Each target has a process of its own and an equal share of the time. Its inputs stay in
build/fuzz/NAME for the next run. An input that breaks a property is written to build/fuzz/found;
it moves to tests/fuzz/corpus/NAME together with the repair.
"""

import argparse
import os
import sys
from pathlib import Path

try:
    import atheris
except ImportError:
    sys.exit("fuzzing needs atheris: make fuzz installs it, on Linux with Python 3.11 to 3.13")

import torch

# A copy of this process waits for ever for threads that torch has started in the original.
torch.set_num_threads(1)

with atheris.instrument_imports(include=["fedcb2o", "http", "tarfile", "tomllib"]):
    from tests.fuzz import targets

FOLDER = Path("build/fuzz")
FOUND = FOLDER / "found"
SLOWDOWN = 10.0
"""Factor by which instrumented code may be slower."""
HANG_SECONDS = 300  # of the clock: other programs may have the processors
MAX_MEGABYTES = 2048
MAX_INPUT_BYTES = 2**16


def fuzz(name: str, seconds: int, seed: int) -> int:
    """Fuzz one target in a process of its own; return the status of its end, 0 without a find."""
    corpus = FOLDER / name
    first = FOLDER / "seeds" / name
    for folder in (corpus, first, FOUND):
        folder.mkdir(parents=True, exist_ok=True)
    for number, content in enumerate(targets.first_inputs(name)):
        (first / str(number)).write_bytes(content)
    log = FOLDER / f"{name}.log"
    process = os.fork()
    if process:
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        lines = log.read_text(errors="replace").splitlines()
        shown = lines if status else [text for text in lines if "number_of_executed" in text]
        print("\n".join(shown[-40:]), flush=True)
        return status

    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    options = [
        f"-artifact_prefix={FOUND}/{name}-",
        f"-max_len={MAX_INPUT_BYTES}",
        f"-max_total_time={seconds}",
        f"-seed={seed}",
        f"-rss_limit_mb={MAX_MEGABYTES}",
        f"-timeout={HANG_SECONDS}",
        "-print_final_stats=1",
    ]
    atheris.Setup(
        [sys.argv[0], *options, str(corpus), str(first)],
        lambda data: targets.check(name, data, slowdown=SLOWDOWN),
    )
    atheris.Fuzz()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="Time of all targets together.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the mutations; 0: the time.")
    parser.add_argument("targets", nargs="*", help=f"By default all: {', '.join(targets.TARGETS)}")
    arguments = parser.parse_args()
    names = arguments.targets or list(targets.TARGETS)
    if unknown := set(names) - set(targets.TARGETS):
        parser.error(f"there is no target {', '.join(sorted(unknown))}")
    targets.world()
    seconds = max(1, round(60 * arguments.minutes / len(names)))
    failed = []
    for name in names:
        print(f"== {name}: {seconds} s", flush=True)
        if fuzz(name, seconds, arguments.seed):
            failed.append(name)
    found = sorted(map(str, FOUND.glob("*")))
    print(f"{len(names)} targets, {len(failed)} with a find: {', '.join(failed) or 'none'}")
    if failed:
        sys.exit("\n".join(["inputs that break a property:", *found]))


if __name__ == "__main__":
    main()

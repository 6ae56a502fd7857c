"""The peak of a run's memory at full size, against its bound: 2.5 times N*d*4 bytes plus 1.5 GiB.

    python benchmarks/memory.py [--agents N] [--rounds n] [--workers n] [--folder DIR]
    python benchmarks/memory.py --memory 12GiB --agents 1000 --rounds 1 --folder DIR

N = 100 agents with the paper's network (d = 6,572,975) and M = 20, random images, one training step a round; every
round ends in a checkpoint, and another process then resumes the run for one more round. Memory is the sum of the
proportional set sizes (PSS) of the run's process and all its descendants, from Linux' /proc/PID/smaps_rollup, up to ten
times a second: a page that several processes share counts once, and the models in /dev/shm count by being mapped.
Exits with 1 where the bound does not hold. The run's folder takes 2.7 GB and is removed at the end.

With --memory the run is told to take no more, which is then the bound, for all memory but the mapped file of the models
and the checkpoint, whose pages the system takes back as it likes: N agents of 20 images each, M = 4, and no resume.
Then memory is each process's resident set from /proc/PID/status: walking the pages of so large a file takes too long.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

EVERY = 0.1  # seconds between two samples
GIB = 2**30
KINDS = {"Pss": "in all", "Pss_Anon": "private", "Pss_Shmem": "shared models and data", "Pss_File": "files"}


def family(root: int) -> list[int]:
    """The process `root` and all its descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def proportional(pid: int) -> Counter[str]:
    """The bytes of one process's PSS, whole and by kind; none for one that has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return Counter()
    lines = (line.split() for line in text.splitlines()[1:])
    return Counter({words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[0].rstrip(":") in KINDS})


def resident(pid: int) -> Counter[str]:
    """The same from the counters of /proc/PID/status, which cost nothing however much is mapped: what processes share
    counts for each of them, and files do not count in the whole."""
    try:
        lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    except OSError:
        return Counter()
    names = {"RssAnon:": "Pss_Anon", "RssShmem:": "Pss_Shmem", "RssFile:": "Pss_File"}
    found = Counter({names[words[0]]: int(words[1]) * 1024 for words in lines if words and words[0] in names})
    return found + Counter({"Pss": found["Pss_Anon"] + found["Pss_Shmem"]})


def watch(
    command: list[str], folder: Path, held: Callable[[int], Counter[str]] = proportional
) -> dict[str, tuple[Counter[str], int]]:
    """Run a command; for each stage the largest sample of its memory, and the number of processes then."""
    peaks: dict[str, tuple[Counter[str], int]] = {}
    samples, start = 0, time.monotonic()
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            began = time.monotonic()
            found = [sample for sample in map(held, family(process.pid)) if sample]
            writing = next(folder.glob("seed-*/checkpoint.safetensors.tmp"), None)
            stage = "writing a checkpoint" if writing else "otherwise"
            total = sum(found, Counter())
            if total["Pss"] > peaks.get(stage, (Counter(), 0))[0]["Pss"]:
                peaks[stage] = total, len(found)
            samples += 1
            time.sleep(max(0.0, EVERY - (time.monotonic() - began)))
    if process.returncode:
        sys.exit(f"the run failed with {process.returncode}")
    seconds = time.monotonic() - start
    print(f"  {seconds:.0f} s, a sample every {seconds / samples:.2f} s", flush=True)
    return peaks


def run(agents: int, rounds: int, workers: int | None, folder: Path, resume: bool, memory: str | None) -> None:
    """The run itself: the paper's full size with one training step a round.

    What needs torch is imported here: the process that watches has nothing to do with the run's memory.
    """
    import fedcb2o
    from fedcb2o.experiments.config.settings import load

    malicious = agents * 15 // 100
    changes = {
        "data": {"name": random_images},
        "agents.benign": agents // 2 - malicious,
        "agents.malicious": malicious,
        "agents.budget": min(20, agents - 1),
        "training.local_steps": 1,
        "seeds": (0,),
        "rounds": rounds,
        "evaluate_every": 1000,  # but for the last round, which always is
        "checkpoint_every": 1,
    }
    if memory is not None:
        few = {"name": random_images, "per_class": 20 * agents // 47 + 1, "test_per_class": 1}
        changes |= {"data": few, "agents.benign_samples": 20, "agents.malicious_samples": 16, "agents.budget": 4}
        changes["checkpoint_every"] = rounds
    experiment = load("emnist-fedcb2o-trusted", changes)
    fedcb2o.run(experiment, out=folder, workers=workers, memory=memory, resume=resume, watch=_silent)


def _silent(*round_done: object) -> None:
    """Show no progress."""


def random_images(*, per_class: int = 900, test_per_class: int = 10):
    """Random images and labels of EMNIST's shapes, balanced, with a small test set (a `fedcb2o.Dataset`)."""
    import numpy as np
    import torch

    from fedcb2o.data._dataset import Dataset, Shard

    draw, classes = np.random.default_rng(0), 47
    y = torch.arange(classes).repeat(per_class)
    x = torch.from_numpy(draw.integers(0, 256, (len(y), 1, 28, 28), dtype=np.uint8))
    test = Shard(x[: test_per_class * classes].clone(), y[: test_per_class * classes].clone())
    return Dataset(pool=Shard(x, y), test=test, class_names=tuple(map(str, range(classes))))


def bytes_of(size: str) -> int:
    """The bytes of a size such as 12GiB."""
    from fedcb2o.experiments.runs.memory_plan import size as bytes_of

    return bytes_of(size)


def dimension() -> int:
    """d of the paper's network with 28x28 images and 47 classes."""
    return 832 + 51_264 + (3136 + 1) * 2048 + (2048 + 1) * 47


def main() -> None:
    """Run, watch, compare with the bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=100, help="N, an even number (default 100)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds before the resumed one (default 2)")
    parser.add_argument("--workers", type=int, help="processes of the run (default one a processor)")
    parser.add_argument("--memory", help="what the run is told to take, such as 12GiB")
    parser.add_argument("--folder", type=Path, help="where the run's folder is made (default the system's for such)")
    parser.add_argument("--run", choices=["start", "resume"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.agents < 4 or options.agents % 2:
        parser.error(f"--agents must be even and at least 4, got {options.agents}")
    if options.run:
        return run(
            options.agents, options.rounds, options.workers, options.folder, options.run == "resume", options.memory
        )
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    if options.folder is not None and not options.folder.is_dir():
        parser.error(f"--folder must be a folder that exists, got {options.folder}")
    if not Path("/proc/self/smaps_rollup").exists():
        sys.exit("this benchmark reads /proc/PID/smaps_rollup, which only Linux has")

    size = options.agents * dimension() * 4
    bound = 2.5 * size + 1.5 * GIB
    steps = [("start", options.rounds), ("resume", options.rounds + 1)]
    if options.memory is not None:
        bound, steps = bytes_of(options.memory), steps[:1]
    print(
        f"N = {options.agents}, d = {dimension():,}: the models take {size / GIB:.2f} GiB, bound {bound / GIB:.2f} GiB"
    )
    worst = 0
    with tempfile.TemporaryDirectory(prefix="fedcb2o-memory-", dir=options.folder) as temporary:
        folder = Path(temporary) / "run"
        for step, rounds in steps:
            arguments = ["--agents", options.agents, "--rounds", rounds, "--folder", folder, "--run", step]
            arguments += ["--workers", options.workers] if options.workers else []
            arguments += ["--memory", options.memory] if options.memory else []
            print(f"{step}, to round {rounds}", flush=True)
            peaks = watch(
                [sys.executable, __file__, *map(str, arguments)], folder, resident if options.memory else proportional
            )
            for stage, (peak, count) in peaks.items():
                kinds = ", ".join(f"{word} {peak[kind] / GIB:.2f}" for kind, word in KINDS.items() if kind != "Pss")
                print(f"  {stage:<20} {peak['Pss'] / GIB:6.2f} GiB in {count} processes ({kinds})")
                worst = max(worst, peak["Pss"])
            for line in next(folder.glob("seed-*/timing.jsonl")).read_text().splitlines()[-1:]:
                parts = json.loads(line)
                told = ", ".join(f"{part} {value:.1f}" for part, value in parts.items() if part != "round")
                print(f"  seconds of round {parts['round']}: {told}")
    peak = worst
    print(
        f"{'PASS' if peak <= bound else 'FAIL'}: peak {peak / GIB:.2f} GiB, bound {bound / GIB:.2f} GiB;"
        f" the peak is {peak / size:.2f} times the models"
    )
    sys.exit(peak > bound)


if __name__ == "__main__":
    main()

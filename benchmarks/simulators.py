"""Seconds per round of the same FedAvg work here, in a plain PyTorch loop, in Flower and in pfl.

    python -m venv /tmp/simulators && . /tmp/simulators/bin/activate
    python -m pip install torch==2.13.0 "flwr[simulation]==1.41.0" "pfl[pytorch]==0.6.0" .
    python benchmarks/simulators.py [--agents 100] [--rounds 3] [--small] [--only NAME ...]

A virtual environment of its own, since Flower needs a typer older than the one in constraints.txt. A simulator that is
not there is left out.

500 samples an agent, one epoch in batches of 64, SGD with momentum, a network of 107,998 parameters, all agents' models
averaged by samples after each round, no evaluation. A process for each side; they take turns, a round each, after one
that is not timed. All are given the same batches, and their last models are compared: rounding grows with the rounds.
Processor time is that of all processes of a side, from /proc on Linux.
"""

import argparse
import contextlib
import functools
import importlib.util
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import fedavg
import torch
from limits import products
from memory import family
from round import processor

from fedcb2o.experiments import assemble
from fedcb2o.experiments.config import load
from fedcb2o.experiments.samples import dataset_of, population_of
from fedcb2o.runtime import timed

HOW = {
    "flwr": 'python -m pip install "flwr[simulation]==1.41.0"',
    "pfl": 'python -m pip install "pfl[pytorch]==0.6.0"',
}
OURS, BFLOAT16 = "fedcb2o", "fedcb2o, bfloat16"


@dataclass(frozen=True)
class Kind:
    """A way to do the work, and the package that it needs."""

    run: Callable[[fedavg.Work, fedavg.Turn], None]
    package: str | None = None


def threads_pay(work: fedavg.Work) -> tuple[bool, str]:
    """Whether a thread a core is faster than one on a few training steps, and what they took."""
    module, (x, y) = fedavg.Net(), work.shards[0]
    order, found = work.order(0, 0)[:2], []
    before = torch.get_num_threads()
    for threads in (1, work.cores):
        torch.set_num_threads(threads)
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            fedavg.train(module, x, y, order)
            seconds.append(time.perf_counter() - start)
        found.append(statistics.median(seconds[1:]) / len(order))
    torch.set_num_threads(before)
    return found[1] < found[
        0
    ], f"a step takes {1e3 * found[0]:.1f} ms with one thread, {1e3 * found[1]:.1f} with {work.cores}"


def kinds(cores: int) -> dict[str, Kind]:
    """All sides by name."""
    ways = [(1, 1), (1, cores), (cores, 1)] if cores > 1 else [(1, 1)]
    bfloat16 = timed.precision_of("bfloat16", torch.device("cpu")) == "bfloat16"  # else a run is in float32
    told = {(p, t): f"{p} process{'es' * (p > 1)}, {t} thread{'s' * (t > 1)}" for p, t in ways}
    return {
        OURS: Kind(functools.partial(fedavg.library, precision="float32")),
        **({BFLOAT16: Kind(functools.partial(fedavg.library, precision="bfloat16"))} if bfloat16 else {}),
        **{f"plain, {told[p, t]}": Kind(functools.partial(fedavg.plain, processes=p, threads=t)) for p, t in ways},
        f"Flower, {cores} actor{'s' * (cores > 1)}": Kind(fedavg.flower, "flwr"),
        **{f"pfl, {told[p, t]}": Kind(functools.partial(fedavg.pfl, processes=p, threads=t), "pfl") for p, t in ways},
    }


def rate() -> float:
    """The best floating-point operations that this core does in a second of processor time, in limits.py's products."""
    before, best = torch.get_num_threads(), 0.0
    torch.set_num_threads(1)
    with torch.no_grad():
        for count, product in products().values():
            for _ in range(30):
                start = time.thread_time()
                product()
                best = max(best, count / (time.thread_time() - start))
    torch.set_num_threads(before)
    return best


def processor_seconds(root: int) -> float:
    """Seconds of work of a process and its descendants so far, with those that have ended."""
    ticks = 0
    for pid in family(root):
        with contextlib.suppress(OSError):  # it has ended
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def machine_seconds() -> float:
    """Seconds of work of all processors of this machine so far."""
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


@dataclass
class Side:
    """One side at work in its own process."""

    name: str
    process: subprocess.Popen[bytes]
    told: Connection
    log: Path
    seconds: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    def wait(self) -> None:
        """Until it stands before its next round, or is done."""
        try:
            self.told.recv()
        except EOFError:
            code = self.process.wait()
            raise SystemExit(f"{self.log.read_text()[-4000:]}\n{self.name}: its process ended with {code}") from None

    def round(self) -> None:
        """Its next round, measured."""
        machine, work, start = machine_seconds(), processor_seconds(self.process.pid), time.perf_counter()
        self.told.send(None)
        self.wait()
        seconds = time.perf_counter() - start
        work = processor_seconds(self.process.pid) - work
        others = max(0.0, (machine_seconds() - machine - work) / seconds)
        self.seconds.append(seconds)
        self.work.append(work)
        self.others.append(others)


def begin(stack: contextlib.ExitStack, name: str, arguments: list[str], folder: Path) -> Side:
    """Start a side; it goes up to its first round."""
    listener = stack.enter_context(Listener(family="AF_UNIX"))
    log = folder / f"{name}.log"
    output = stack.enter_context(log.open("wb"))
    command = [sys.executable, __file__, *arguments, "--folder", str(folder), "--side", name]
    process = subprocess.Popen([*command, "--address", str(listener.address)], stdout=output, stderr=output)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return Side(name, process, listener.accept(), log)


def child(options: argparse.Namespace, work: fedavg.Work) -> None:
    """What the process of a side does."""
    with Client(options.address) as parent:

        def turn(n: int) -> None:
            parent.send(n)
            parent.recv()

        kinds(work.cores)[options.side].run(work, turn)
        parent.send("done")


def prepare(work: fedavg.Work) -> None:
    """Leave the samples of each agent and the initial model for the sides, as the library deals them out."""
    experiment = load(fedavg.configuration(work, "float32"))
    dataset = dataset_of(experiment, None)
    population = population_of(experiment, 0, dataset)
    torch.save([(dataset.pool.x[i], dataset.pool.y[i]) for i in population.train], work.folder / "shards.pt")
    torch.save(assemble.module_of(experiment, 0, dataset).state_dict(), work.folder / "model.pt")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, help="how many (default 100)")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of each side (default 3)")
    parser.add_argument("--small", action="store_true", help="a quick check: 8 agents of 128 samples")
    parser.add_argument("--only", nargs="+", default=[""], help="only sides whose names begin with one of these")
    for name in ("folder", "side", "address"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)  # of the process of a side
    options = parser.parse_args()
    agents = options.agents or (8 if options.small else 100)
    if agents < 2 or options.rounds < 1:
        parser.error(f"--agents must be at least 2 and --rounds 1, got {agents} and {options.rounds}")
    cores = len(os.sched_getaffinity(0))
    samples, rounds = 128 if options.small else 500, options.rounds + 2
    if options.side:
        child(options, fedavg.Work(agents, samples, rounds, cores, Path(options.folder)))
        return
    found = {name: importlib.util.find_spec(name) is not None for name in HOW}
    packages = ["torch", *(name for name in HOW if found[name])]
    told = ", ".join(f"{name} {version(name)}" for name in packages)
    print(f"{processor()}, {cores} cores; Python {platform.python_version()}, {told}", flush=True)
    for name in HOW:
        if not found[name]:
            print(f"without {name}, which is not installed: {HOW[name]}")
    chosen = [
        name
        for name, kind in kinds(cores).items()
        if (kind.package is None or found[kind.package]) and name.startswith(tuple(options.only))
    ]
    best = rate()
    arguments = ["--agents", str(agents), "--rounds", str(options.rounds), *(["--small"] * options.small)]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        work = fedavg.Work(agents, samples, rounds, cores, Path(folder))
        prepare(work)
        pays, took = threads_pay(work)
        if cores > 1 and not pays:
            chosen = [name for name in chosen if not name.endswith(f"1 process, {cores} threads")]
            print(f"without {cores} threads in a process, which is slower here: {took}")
        d = sum(p.numel() for p in fedavg.Net().parameters())
        print(f"N = {agents}, d = {d:,}, {samples} samples an agent, one epoch, batches of {fedavg.BATCH}", flush=True)
        sides = [begin(stack, name, arguments, work.folder) for name in chosen]
        for side in sides:
            side.wait()
        for side in sides:  # the first round is not timed
            side.told.send(None)
            side.wait()
        for n in range(options.rounds):
            for side in sides[:: -1 if n % 2 else 1]:
                side.round()
                print(
                    f"  {side.name:<30} {side.seconds[-1]:7.2f} s, processor {side.work[-1]:7.2f} s;"
                    f" others kept {side.others[-1]:.1f} cores busy",
                    flush=True,
                )
        models = {}
        for side in sides:  # one more round, in which the library also evaluates and saves
            side.told.send(None)
            side.wait()
            side.told.send(None)
            side.wait()
            models[side.name] = torch.load(work.folder / f"{side.process.pid}.pt")
        initial = torch.cat([value.flatten() for value in work.state().values()])
    report(sides, models, initial, max(best, rate()), work)


def report(
    sides: list[Side],
    models: dict[str, torch.Tensor],
    initial: torch.Tensor,
    best: float,
    work: fedavg.Work,
) -> None:
    """Print what was found."""
    flop = 2.0 * work.agents * work.samples * sum(fedavg.multiplications())
    limit = flop / best
    print(
        f"limit: {flop / 1e12:.3f} TFLOP a round at {best / 1e9:.0f} GFLOP/s a core: {limit:.2f} s of a processor,"
        f" {limit / work.cores:.2f} s on {work.cores} cores"
    )
    reference = models[sides[0].name]
    moved = float((reference - initial).abs().max())
    print(f"models after {work.rounds} rounds, the largest difference to {sides[0].name} (it moved by {moved:.2g}):")
    for side in sides[1:]:
        print(f"  {side.name:<30} {float((models[side.name] - reference).abs().max()):.1e}")
    print("a round, seconds:                 least    median   processor: least    median   times the limit")
    for side in sides:
        print(
            f"  {side.name:<30} {min(side.seconds):7.2f}   {statistics.median(side.seconds):7.2f}"
            f"            {min(side.work):7.2f}   {statistics.median(side.work):7.2f}"
            f"             {min(side.work) / limit:.2f}"
        )
    others = [side for side in sides if side.name.startswith(("Flower", "pfl"))]
    loops = [side for side in sides if side.name.startswith("plain")]
    for ours in (side for side in sides if side.name in (OURS, BFLOAT16)):
        for what, those in (("other simulator", others), ("plain loop", loops)):
            if those:
                told = []
                for measure in ("seconds", "work"):
                    fastest = min(those, key=lambda side: statistics.median(getattr(side, measure)))
                    ratio = statistics.median(getattr(fastest, measure)) / statistics.median(getattr(ours, measure))
                    least = min(min(getattr(side, measure)) for side in those) / min(getattr(ours, measure))
                    word = "wall" if measure == "seconds" else "processor"
                    told.append(f"{word} {ratio:.2f} ({fastest.name}), by least times {least:.2f}")
                print(f"{ours.name}: times as fast as the fastest {what}: {'; '.join(told)}")


if __name__ == "__main__":
    main()

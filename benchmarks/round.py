"""Seconds per round of the library, of a plain PyTorch loop on the same work, and of the machine's own limit.

    python benchmarks/round.py [--rounds n] [--small] [--evaluate] [--data-dir DIR]

The speed setting: N = 20 (7 benign and 3 malicious agents in each of 2 clusters), M = 4, the paper's network, 500 and
1,200 samples, batches of 64, tau = 5, no test evaluation. The library in float32 and in bfloat16 and the loop in
float32 take turns within one run. Without --data-dir the images are random, of EMNIST's shapes.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import plain
import torch
from limits import NUM_CLASSES, family, multiplications, rate

from fedcb2o.data._dataset import Dataset, Shard, features
from fedcb2o.experiments.config import build
from fedcb2o.experiments.config.datasets import dataset_tensors, load_dataset
from fedcb2o.experiments.config.settings import Experiment, load
from fedcb2o.federated.agent_data import AgentData
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.inference import logits
from fedcb2o.federated.local_update import local_update_
from fedcb2o.federated.run_spec import RunSpec
from fedcb2o.kernels import autotune, dispatch
from fedcb2o.nn import architectures
from fedcb2o.parallel import shared_memory
from fedcb2o.parallel.executors import PoolExecutor
from fedcb2o.rng import stream
from fedcb2o.simulation.local_engine import LocalEngine
from fedcb2o.simulation.rounds import Round, run_rounds

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SMALL = {
    "model.hidden": 64,
    "training.local_epochs": 1,
    "agents.benign_samples": 100,
    "agents.malicious_samples": 160,
}


def random_images(*, per_class: int = 250, test_per_class: int = 296) -> Dataset:
    """Random images and labels of EMNIST's shapes, balanced; by default as many to test on as the presets have."""
    draw = np.random.default_rng(0)
    y = torch.arange(NUM_CLASSES).repeat(per_class)
    x = torch.from_numpy(draw.integers(0, 256, (len(y), 1, 28, 28), dtype=np.uint8))
    again = torch.arange(test_per_class * NUM_CLASSES) % len(y)
    return Dataset(
        pool=Shard(x, y),
        test=Shard(x[again], y[again]),
        class_names=tuple(map(str, range(NUM_CLASSES))),
    )


def experiment_of(small: bool, real: bool) -> Experiment:
    """The speed setting, made from the preset of the paper's full size."""
    hidden = {"hidden": SMALL["model.hidden"]} if small else {}
    probed = architectures.cnn((1, 28, 28), NUM_CLASSES, **hidden)
    images = torch.zeros(64, 1, 28, 28)
    by = {
        "linear": autotune.fastest_linear(),
        "convolution": autotune.fastest_single_convolution(probed, images, "float32"),
    }
    changes = {"agents.benign": 7, "agents.malicious": 3, "agents.budget": 4, **by}
    if not real:
        changes["data"] = {"name": random_images, **({"test_per_class": 4} if small else {})}
    return load("emnist-fedcb2o-trusted", changes | (SMALL if small else {}))


@dataclass(frozen=True)
class Library:
    """The library's side in one precision, ready for its first round."""

    block: AgentGroup
    workers: PoolExecutor[AgentGroup]
    rounds: Iterator[Round]
    found: list[dict[str, float]]
    evaluations: list[float]

    def round(self) -> dict[str, float]:
        """The seconds of the next round by its parts, without those of a test evaluation."""
        self.workers.map(ready, [()] * (4 * self.workers.count))
        seconds = dict(next(self.rounds).seconds)
        if "evaluate" in seconds:
            self.evaluations.append(seconds.pop("evaluate"))
        self.found.append(seconds)
        return seconds


@contextlib.contextmanager
def library(
    experiment: Experiment, dataset: Dataset, cores: int, options: argparse.Namespace
) -> Iterator[Library]:
    """A side of the library: `cores` processes that share its models."""
    prepared = build.prepare_seed(experiment, 0, dataset)
    dim = prepared.spec.dim
    make = functools.partial(build.build_full_group, experiment, 0, dataset.names, dim)
    with shared_memory.allocate_shared(
        build.tensor_specs(dataset, experiment.num_models, dim)
    ) as shared:
        tensors = shared.tensors()
        for name, tensor in dataset_tensors(dataset).items():
            tensors[name].copy_(tensor)
        block = prepared.build_agent_group(tensors["models"][:, :dim])
        agents = range(prepared.spec.num_agents)
        build.init_models_(
            block.models[: len(agents)],
            prepared.experiment,
            prepared.seed,
            prepared.dataset,
            agents,
        )
        workers: PoolExecutor[AgentGroup] = PoolExecutor(cores, shared, make)
        engine = LocalEngine(block, workers)
        memory = AgentState.initial(len(agents))
        made = run_rounds(engine, memory, 0, options.rounds, lambda n: options.evaluate)
        yield Library(block, workers, made, [], [])


def shard_of(holdings: AgentData, j: int) -> Shard:
    """What agent j trains on in the first round."""
    x, y = holdings.training_data(np.array([j]), 0)
    return Shard(x[0], y[0])


def work_of(block: AgentGroup, experiment: Experiment) -> plain.Work:
    """What the library's agents hold and do, for the loop: float images, as a loop would keep them."""
    holdings = block.data
    training = block.spec.training
    everyone = range(block.spec.num_agents)
    shards = [shard_of(holdings, j) for j in everyone]
    held = [Shard(*(each[0] for each in holdings.validation_data(np.array([j])))) for j in everyone]
    return plain.Work(
        train=[(features(s.x), s.y) for s in shards],
        validation=[(features(s.x), s.y) if len(s) else None for s in held],
        num_classes=block.spec.num_classes,
        hidden=experiment.model.parameters["hidden"],
        epochs=training.local_epochs,
        batch_size=training.batch_size,
        lr=training.lambda2 * training.gamma,
        momentum=training.momentum,
        alpha=experiment.algorithm.parameters["alpha"],
    )


def peers_of(terms: RunSpec, n: int) -> list[list[int]]:
    """Whom each agent of the loop downloads from: `budget` others at random."""
    draw = np.random.default_rng(n)
    everyone = range(terms.num_agents)
    return [
        draw.choice([i for i in everyone if i != j], terms.budget, replace=False).tolist()
        for j in everyone
    ]


def operations(terms: RunSpec, trained: int, validated: int, hidden: int) -> dict[str, float]:
    """Floating-point operations of a round, by its parts, of agents that hold so many samples to train and to judge
    on; a multiplication and an addition are two."""
    forward, backward = multiplications(hidden)
    images = terms.training.local_epochs * trained
    judged = (terms.budget + 1) * validated
    mixed = terms.num_agents * (terms.budget + 1) * terms.dim
    return {
        "train": 2.0 * images * (forward + backward),
        "aggregate": 2.0 * judged * forward,
        "mix": 2.0 * mixed,
    }


def ready(block: AgentGroup) -> None:
    """Have a worker make its block and take a step on a copy of a model, before a round is timed."""
    terms = block.spec
    theta = block.models[:1].clone()
    shard = shard_of(block.data, 0)
    training = dataclasses.replace(terms.training, local_steps=1)
    with dispatch.use_kernels(terms.kernels.linear, terms.kernels.convolution):
        local_update_(theta[0], terms.module, shard, training, stream(terms.seed, "ready"))
        logits(terms.module, theta, torch.tensor([0]), shard.x[:100])


def fastest(agents: plain.Agents, terms: RunSpec, cores: int) -> tuple[plain.Loop, str]:
    """The loop with the best number of processes and threads, by a try on less work, and what the tries took."""
    n = terms.num_agents
    some = range(0, n, max(1, n // max(n // 4, min(cores, n))))
    tried = []
    # several processes come last: they move the models into shared memory, which the others do not need
    choices = [(1, 1), (1, cores), (cores, 1)] if cores > 1 else [(1, 1)]
    for processes, threads in choices:
        loop = plain.Loop(agents, processes=processes, threads=threads)
        found = [sum(loop.round(some, peers_of(terms, 0), epochs=1).values()) for _ in range(2)]
        tried.append((min(found), processes, threads))
        loop.close()
    told = "; ".join(
        f"{p} process{'es' * (p > 1)} of {t} thread{'s' * (t > 1)}: {seconds:.2f} s"
        for seconds, p, t in tried
    )
    _, processes, threads = min(tried)
    return plain.Loop(agents, processes=processes, threads=threads), told


def processor() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


class Others:
    """How many processors other programs keep busy meanwhile: a measurement beside them is worth little (Linux)."""

    def __init__(self) -> None:
        self.start = self._now()

    def told(self) -> str:
        """In words, since this was made."""
        (clock, machine, ours), (clock_before, machine_before, ours_before) = (
            self._now(),
            self.start,
        )
        busy = (machine - machine_before - ours + ours_before) / (clock - clock_before)
        return f"; others kept {max(0.0, busy):.1f} cores busy" if machine else ""

    def _now(self) -> tuple[float, float, float]:
        """Seconds of the clock, of all processors' work, and of the work of this process and its descendants."""
        ours = 0
        stat = Path("/proc/stat")
        if not stat.exists():
            return time.perf_counter(), 0.0, 0.0
        user, nice, system, _, _, *interrupts = map(
            int, stat.read_text().splitlines()[0].split()[1:8]
        )
        for pid in family(os.getpid()):
            with contextlib.suppress(OSError):  # it has ended
                ours += sum(
                    map(
                        int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
                    )
                )
        tick = os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), (user + nice + system + sum(interrupts)) / tick, ours / tick


def line(name: str, seconds: dict[str, float], remark: str = "") -> None:
    """Print the seconds of a round and of its parts."""
    parts = ", ".join(f"{part} {value:.2f}" for part, value in seconds.items())
    print(f"  {name:<8} {sum(seconds.values()):8.2f} s   ({parts}{remark})", flush=True)


def middle(found: list[dict[str, float]]) -> dict[str, float]:
    """The median of each part."""
    return {part: statistics.median(seconds[part] for seconds in found) for part in found[0]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each side (default 3)")
    parser.add_argument(
        "--small", action="store_true", help="a quick check with a small network and few samples"
    )
    parser.add_argument(
        "--evaluate", action="store_true", help="also time a test evaluation after each round"
    )
    parser.add_argument(
        "--data-dir", type=Path, help="the folder of the EMNIST files, instead of random images"
    )
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    print(
        f"{processor()}, {cores} cores; Python {platform.python_version()}, torch {torch.__version__}",
        flush=True,
    )
    experiment = experiment_of(options.small, options.data_dir is not None)
    dataset = load_dataset(experiment, options.data_dir)
    rates = {precision: [rate(dtype=dtype)] for precision, dtype in PRECISIONS.items()}
    with contextlib.ExitStack() as stack:
        sides = {
            precision: stack.enter_context(
                library(
                    load(experiment, {"training.precision": precision}), dataset, cores, options
                )
            )
            for precision in PRECISIONS
        }
        block = sides["float32"].block
        workers = sides["float32"].workers
        terms = block.spec
        holdings = block.data
        trained = len(holdings.train.values)
        validated = len(holdings.validation.values)
        print(
            f"N = {terms.num_agents}, M = {terms.budget}, d = {terms.dim:,}, {trained:,} training samples,"
            f" tau = {terms.training.local_epochs}, batches of {terms.training.batch_size},"
            f" {'EMNIST' if options.data_dir else 'random images'}"
        )
        by = f"dense layers by {terms.kernels.linear}, convolutions {terms.kernels.convolution}"
        print(f"library: {cores} process{'es' * (cores > 1)} of 1 thread, {by}")
        loop, told = fastest(plain.make(work_of(block, experiment)), terms, cores)
        print(f"plain loop: {loop.name}, the fastest of these on less work ({told})", flush=True)
        theirs = []
        for n in range(options.rounds):
            for precision, side in sides.items():
                others = Others()
                line(precision, side.round(), others.told())
            others = Others()
            theirs.append(loop.round(range(terms.num_agents), peers_of(terms, n)))
            line("plain", theirs[-1], others.told())
        loop.close()
        together = {
            precision: workers.map(rate, [(dtype,)] * cores)
            for precision, dtype in PRECISIONS.items()
        }
    for precision, dtype in PRECISIONS.items():
        rates[precision].append(rate(dtype=dtype))

    plain_loop = middle(theirs)
    plain_seconds = statistics.median(sum(s.values()) for s in theirs)
    counts = operations(terms, trained, validated, experiment.model.parameters["hidden"])
    total = sum(counts.values())
    print(f"median of {options.rounds}:")
    for precision, side in sides.items():
        line(precision, middle(side.found))
    line("plain", plain_loop)
    for precision, side in sides.items():
        seconds = statistics.median(sum(s.values()) for s in side.found)
        best, product = max(
            (value, name) for found in rates[precision] for name, value in found.items()
        )
        at_once = sum(max(found.values()) for found in together[precision])
        limit = total / (best * cores)
        print(
            f"{precision}: limit {limit:.2f} s, {total / 1e12:.2f} TFLOP a round at {best / 1e9:.0f} GFLOP/s a core"
            f" ({product}) on {cores} cores; all cores at once reach {at_once / 1e9:.0f} GFLOP/s"
        )
        for part, count in counts.items():
            at_best = count / (best * cores)
            took = middle(side.found)[part]
            print(
                f"  {part:<10} {count / 1e12:8.3f} TFLOP, {at_best:8.2f} s, the library takes {took:8.2f} s"
            )
        print(
            f"  the library takes {seconds / limit:.2f} times the limit; the plain loop in float32 takes"
            f" {plain_seconds / seconds:.2f} times as long as the library"
        )
        if side.evaluations:
            evaluation = statistics.median(side.evaluations)
            every = experiment.evaluate_every
            share = evaluation / (every * seconds + evaluation)
            print(
                f"  a test evaluation takes {evaluation:.2f} s: {share:.1%} of a run with one in {every} rounds"
            )


if __name__ == "__main__":
    main()

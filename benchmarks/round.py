"""Seconds per round of the library, of a plain PyTorch loop, and of the machine's limit.

    python benchmarks/round.py [--rounds n] [--small] [--evaluate] [--data-dir DIR]

The speed setting: N = 20 (7 benign and 3 malicious agents in each of 2 clusters), M = 4, the
paper's network, 500 and 1,200 samples, batches of 64, tau = 5, no test evaluation. The library in
float32 and in bfloat16 and the loop in float32 take turns within one run. Without --data-dir the
images are random, with EMNIST's shapes.
"""

import argparse
import contextlib
import functools
import os
import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import plain
import torch
from limits import NUM_CLASSES, best_rates, multiplications, process_tree, processor_seconds

from fedcb2o.data import Dataset, Shard, features
from fedcb2o.experiments.config import network, prepared_seed
from fedcb2o.experiments.config.datasets import dataset_tensors, load_dataset
from fedcb2o.experiments.config.loading import load
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.federated.agent_group import AgentData, AgentGroup
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.inference import logits
from fedcb2o.federated.local_update import local_update_
from fedcb2o.federated.run_spec import RunSpec
from fedcb2o.kernels import _autotune, dispatch
from fedcb2o.nn import architectures
from fedcb2o.parallel import _shared_memory
from fedcb2o.parallel._executors import PoolExecutor
from fedcb2o.rng import stream
from fedcb2o.simulation.adversarial_engine import AdversarialEngine
from fedcb2o.simulation.local_engine import LocalEngine
from fedcb2o.simulation.rounds import Round, run_rounds

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SMALL = {
    "model.hidden": 64,
    "training.local_epochs": 1,
    "agents.benign_samples": 100,
    "agents.malicious_samples": 160,
}
Seconds = Mapping[str, float]


def random_images(*, per_class: int = 250, test_per_class: int = 296) -> Dataset:
    """Return random images and balanced labels with EMNIST's shapes."""
    draw = np.random.default_rng(0)
    y = torch.arange(NUM_CLASSES).repeat(per_class)
    x = torch.from_numpy(draw.integers(0, 256, (len(y), 1, 28, 28), dtype=np.uint8))
    test = torch.arange(test_per_class * NUM_CLASSES) % len(y)
    names = tuple(map(str, range(NUM_CLASSES)))
    return Dataset(pool=Shard(x, y), test=Shard(x[test], y[test]), class_names=names)


def speed_experiment(is_small: bool, is_real: bool) -> Experiment:
    """Return the speed setting, derived from the preset of the paper's full size."""
    hidden = {"hidden": SMALL["model.hidden"]} if is_small else {}
    network = architectures.cnn((1, 28, 28), NUM_CLASSES, **hidden)
    images = torch.zeros(64, 1, 28, 28)
    changes = {
        **{"agents.benign": 7, "agents.malicious": 3, "agents.budget": 4},
        "linear": _autotune.fastest_linear(),
        "convolution": _autotune.fastest_single_convolution(network, images, "float32"),
    }
    if not is_real:
        changes["data"] = {"name": random_images, **({"test_per_class": 4} if is_small else {})}
    if is_small:
        changes |= SMALL
    return load("emnist-fedcb2o-released", changes)


@dataclass(frozen=True)
class Library:
    """The library in one precision, ready for its first round."""

    group: AgentGroup
    executor: PoolExecutor[AgentGroup]
    rounds: Iterator[Round]
    seconds: list[Seconds]
    evaluations: list[float]

    def round(self) -> Seconds:
        """Return the seconds of the next round by phase, without a test evaluation."""
        self.executor.map(warm_up, [()] * (4 * self.executor.count))
        seconds = dict(next(self.rounds).seconds)
        if "evaluate" in seconds:
            self.evaluations.append(seconds.pop("evaluate"))
        self.seconds.append(seconds)
        return seconds


@contextlib.contextmanager
def library(
    experiment: Experiment, dataset: Dataset, cores: int, options: argparse.Namespace
) -> Iterator[Library]:
    """Start the library with one process per core and models in shared memory."""
    prepared = prepared_seed.prepare_seed(experiment, 0, dataset)
    dim = prepared.spec.dim
    make = functools.partial(prepared_seed.build_full_group, experiment, 0, dataset.names, dim)
    specs = prepared_seed.tensor_specs(dataset, experiment.num_models, dim)
    with _shared_memory.allocate_shared(specs) as shared:
        tensors = shared.tensors()
        for name, tensor in dataset_tensors(dataset).items():
            tensors[name].copy_(tensor)
        group = prepared.build_agent_group(tensors["models"][:, :dim])
        agents = range(prepared.spec.num_agents)
        models = group.models[: len(agents)]
        network.init_models_(models, experiment, prepared.seed, prepared.dataset, agents)
        executor: PoolExecutor[AgentGroup] = PoolExecutor(cores, shared, make)
        engine = LocalEngine(group, executor)
        state = AgentState.initial(len(agents))
        rounds = run_rounds(
            AdversarialEngine(engine), state, 0, options.rounds, int(options.evaluate)
        )
        yield Library(group, executor, rounds, [], [])


def training_shard(data: AgentData, j: int) -> Shard:
    """Return the training data of agent j in the first round."""
    x, y = data.training_data(np.array([j]), 0)
    return Shard(x[0], y[0])


def plain_work(group: AgentGroup, experiment: Experiment) -> plain.Work:
    """Return the work of the library's agents for the loop, with float images."""
    training = group.spec.training
    agents = range(group.spec.num_agents)
    shards = [training_shard(group.data, j) for j in agents]
    held_out = []
    for j in agents:
        x, y = group.data.gather(np.array([j]), group.data.validation)
        held_out.append(Shard(x[0], y[0]))
    return plain.Work(
        train=[(features(shard.x), shard.y) for shard in shards],
        validation=[(features(s.x), s.y) if len(s) else None for s in held_out],
        num_classes=group.spec.num_classes,
        hidden=experiment.model.parameters["hidden"],
        epochs=training.local_epochs,
        batch_size=training.batch_size,
        lr=training.lambda2 * training.gamma,
        momentum=training.momentum,
        alpha=group.spec.algorithm.weigh.alpha,
    )


def draw_peers(spec: RunSpec, n: int) -> list[list[int]]:
    """Draw `budget` peers at random for each agent of the loop."""
    draw = np.random.default_rng(n)
    agents = range(spec.num_agents)
    peers = []
    for j in agents:
        others = [i for i in agents if i != j]
        peers.append(draw.choice(others, spec.agents.budget, replace=False).tolist())
    return peers


def operations(spec: RunSpec, trained: int, validated: int, hidden: int) -> dict[str, float]:
    """Return the floating-point operations of a round by phase, two per multiply-add pair."""
    forward, backward = multiplications(hidden)
    images = spec.training.local_epochs * trained
    models = spec.agents.budget + 1
    return {
        "train": 2.0 * images * (forward + backward),
        "aggregate": 2.0 * models * validated * forward,
        "mix": 2.0 * spec.num_agents * models * spec.dim,
    }


def warm_up(group: AgentGroup) -> None:
    """Build a worker's group and train a copy of a model for one step."""
    spec = group.spec
    theta = group.models[:1].clone()
    shard = training_shard(group.data, 0)
    training = spec.training.model_copy(update={"local_steps": 1})
    with dispatch.use_kernels(spec.kernels.linear, spec.kernels.convolution):
        local_update_(theta[0], spec.module, shard, training, stream(spec.seed, "ready"))
        logits(spec.module, theta, torch.tensor([0]), shard.x[:100])


def fastest_loop(agents: plain.Agents, spec: RunSpec, cores: int) -> tuple[plain.Loop, str]:
    """Return the loop with the fastest division into processes, and the seconds of all tries."""
    n = spec.num_agents
    part = range(0, n, max(1, n // max(n // 4, min(cores, n))))
    # Several processes come last: they move the models into shared memory.
    divisions = [(1, 1), (1, cores), (cores, 1)] if cores > 1 else [(1, 1)]
    tries = []
    for processes, threads in divisions:
        loop = plain.Loop(agents, processes=processes, threads=threads)
        peers = draw_peers(spec, 0)
        seconds = [sum(loop.round(part, peers, epochs=1).values()) for _ in range(2)]
        tries.append((min(seconds), processes, threads))
        loop.close()
    text = "; ".join(
        f"{p} process{'es' * (p > 1)} of {t} thread{'s' * (t > 1)}: {seconds:.2f} s"
        for seconds, p, t in tries
    )
    _, processes, threads = min(tries)
    return plain.Loop(agents, processes=processes, threads=threads), text


def processor_name() -> str:
    """Return the name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


class OtherLoad:
    """Processors that other programs keep busy during a measurement (Linux)."""

    def __init__(self) -> None:
        self.start = self._times()

    def describe(self) -> str:
        """Return the number of busy processors since the start, as text."""
        clock, machine, ours = (a - b for a, b in zip(self._times(), self.start, strict=True))
        busy = (machine - ours) / clock
        return f"; others kept {max(0.0, busy):.1f} cores busy" if machine else ""

    def _times(self) -> tuple[float, float, float]:
        """Return seconds of the clock, of all processors, and of this process tree."""
        stat = Path("/proc/stat")
        if not stat.exists():
            return time.perf_counter(), 0.0, 0.0
        fields = stat.read_text().splitlines()[0].split()[1:8]
        user, nice, system, _, _, *interrupts = map(int, fields)
        ours = sum(processor_seconds(pid, with_children=True) for pid in process_tree(os.getpid()))
        machine = (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), machine, ours


def print_line(name: str, seconds: Seconds, remark: str = "") -> None:
    """Print the seconds of a round and of its phases."""
    phases = ", ".join(f"{phase} {value:.2f}" for phase, value in seconds.items())
    print(f"  {name:<8} {sum(seconds.values()):8.2f} s   ({phases}{remark})", flush=True)


def median_phases(rounds: Sequence[Seconds]) -> dict[str, float]:
    """Return the median of each phase."""
    return {phase: statistics.median(seconds[phase] for seconds in rounds) for phase in rounds[0]}


def median_round(rounds: Sequence[Seconds]) -> float:
    """Return the median seconds of a round."""
    return statistics.median(sum(seconds.values()) for seconds in rounds)


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each side (default 3)")
    parser.add_argument("--small", action="store_true", help="a quick check with a small network")
    parser.add_argument("--evaluate", action="store_true", help="time a test evaluation per round")
    parser.add_argument("--data-dir", type=Path, help="folder of the EMNIST files")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    return options


def main() -> None:
    """Measure and print."""
    options = parse_options()
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    print(f"{processor_name()}, {cores} cores; {versions}", flush=True)
    experiment = speed_experiment(options.small, options.data_dir is not None)
    dataset = load_dataset(experiment, options.data_dir)
    rates = {precision: [best_rates(dtype=dtype)] for precision, dtype in PRECISIONS.items()}
    with contextlib.ExitStack() as stack:
        sides = {}
        for precision in PRECISIONS:
            side = load(experiment, {"training.precision": precision})
            sides[precision] = stack.enter_context(library(side, dataset, cores, options))
        group = sides["float32"].group
        spec = group.spec
        trained = len(group.data.train.values)
        validated = len(group.data.validation.values)
        print(
            f"N = {spec.num_agents}, M = {spec.agents.budget}, d = {spec.dim:,},"
            f" {trained:,} training samples, tau = {spec.training.local_epochs},"
            f" batches of {spec.training.batch_size},"
            f" {'EMNIST' if options.data_dir else 'random images'}"
        )
        kernels = f"dense layers by {spec.kernels.linear}, convolutions {spec.kernels.convolution}"
        print(f"library: {cores} process{'es' * (cores > 1)} of 1 thread, {kernels}")
        loop, tries = fastest_loop(plain.make(plain_work(group, experiment)), spec, cores)
        print(f"plain loop: {loop.name}, the fastest of these on less work ({tries})", flush=True)

        loop_seconds = []
        for n in range(options.rounds):
            for precision, library_side in sides.items():
                load_before = OtherLoad()
                print_line(precision, library_side.round(), load_before.describe())
            load_before = OtherLoad()
            loop_seconds.append(loop.round(range(spec.num_agents), draw_peers(spec, n)))
            print_line("plain", loop_seconds[-1], load_before.describe())
        loop.close()
        executor = sides["float32"].executor
        together = {p: executor.map(best_rates, [(t,)] * cores) for p, t in PRECISIONS.items()}
    for precision, dtype in PRECISIONS.items():
        rates[precision].append(best_rates(dtype=dtype))

    counts = operations(spec, trained, validated, experiment.model.parameters["hidden"])
    print(f"median of {options.rounds}:")
    for precision, library_side in sides.items():
        print_line(precision, median_phases(library_side.seconds))
    print_line("plain", median_phases(loop_seconds))
    every = experiment.evaluate_every
    for precision, library_side in sides.items():
        best, product = max((rate, name) for r in rates[precision] for name, rate in r.items())
        at_once = sum(max(r.values()) for r in together[precision])
        total = sum(counts.values())
        print(
            f"{precision}: limit {total / (best * cores):.2f} s, {total / 1e12:.2f} TFLOP a round"
            f" at {best / 1e9:.0f} GFLOP/s a core ({product}) on {cores} cores;"
            f" all cores at once reach {at_once / 1e9:.0f} GFLOP/s"
        )
        report(library_side, counts, best * cores, median_round(loop_seconds), every)


def report(side: Library, counts: Seconds, rate: float, loop_seconds: float, every: int) -> None:
    """Print the library's times next to the limit and the loop."""
    seconds = median_round(side.seconds)
    phases = median_phases(side.seconds)
    for phase, count in counts.items():
        print(
            f"  {phase:<10} {count / 1e12:8.3f} TFLOP, {count / rate:8.2f} s,"
            f" the library takes {phases[phase]:8.2f} s"
        )
    print(
        f"  the library takes {seconds * rate / sum(counts.values()):.2f} times the limit;"
        f" the plain loop in float32 takes {loop_seconds / seconds:.2f} times as long"
    )
    if side.evaluations:
        evaluation = statistics.median(side.evaluations)
        share = evaluation / (every * seconds + evaluation)
        print(
            f"  a test evaluation takes {evaluation:.2f} s:"
            f" {share:.1%} of a run with one in {every} rounds"
        )


if __name__ == "__main__":
    main()

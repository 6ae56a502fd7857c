"""What a round costs as agents, downloads, parameters and processes grow, beside the machine's limit.

    python benchmarks/scale.py [--small]                 # in N: 100, 1,000, 10,000
    python benchmarks/scale.py --in budget|dim|workers   # in M, d or processes instead
    python benchmarks/scale.py --agents 2000 --budget 8 --hidden 32 --workers 2 --rounds 5

Small models (by default logistic regression on 20 features, d = 210) of agents with 20 samples each, of whom 3 of 10
flip labels: so little arithmetic that what is left is overhead. For each phase of a round the microseconds for an
agent, in processor time of all processes, least of some rounds, after a first one that does not count. "Limit" is the
floating-point operations of training and of judging at the best rate of one core, measured in the same run. Records are
the lines of a round, written; no checkpoint and no evaluation but for the column that says so.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from limits import family, rate

import fedcb2o
from fedcb2o.experiments.config import build
from fedcb2o.experiments.config.datasets import attack_goal, load_dataset
from fedcb2o.experiments.config.settings import Experiment, load
from fedcb2o.experiments.runs.local_backend import open_local_engine
from fedcb2o.experiments.runs.memory_plan import MemoryPlan
from fedcb2o.experiments.runs.round_records import metrics_record, pairs_record
from fedcb2o.federated.contacts import AgentState
from fedcb2o.parallel.executors import one_thread
from fedcb2o.records import RoundLog
from fedcb2o.simulation.rounds import run_rounds

FEATURES = 20
CLASSES = 10
SAMPLES = 20
PHASES = ("train", "aggregate", "mix", "records")
TICK = os.sysconf("SC_CLK_TCK")


def synthetic(*, samples: int) -> fedcb2o.Dataset:
    """Points around a centre for each class."""
    draw = np.random.default_rng(0)
    y = draw.integers(CLASSES, size=samples + 500)
    x = draw.normal(size=(CLASSES, FEATURES))[y] + draw.normal(size=(len(y), FEATURES))
    return fedcb2o.dataset(x[500:], y[500:], x_test=x[:500], y_test=y[:500])


def experiment_of(agents: int, budget: int, hidden: int | None) -> Experiment:
    """N agents of a small model, 3 of 10 malicious."""
    malicious = 3 * agents // 10
    return load(
        {
            "name": "scale",
            "seeds": [0],
            "rounds": 1000,
            "data": {"name": synthetic, "samples": SAMPLES * agents},
            "agents": {
                "num_clusters": 1,
                "benign": agents - malicious,
                "malicious": malicious,
                "benign_samples": SAMPLES,
                "malicious_samples": SAMPLES * 4 // 5,
                "budget": budget,
            },
            "model": {"name": "logistic"}
            if hidden is None
            else {"name": "mlp", "hidden": [hidden]},
            "training": {"gamma": 0.05, "batch_size": 8, "local_epochs": 1},
            "algorithm": {"name": "fedcb2o", "own_model": "trusted", "mixing_factor": 1.0},
            "attack": {"name": "label_flip", "source": 9, "target": 4},
        }
    )


def processor_seconds() -> float:
    """Processor time of this process and all its descendants."""
    total = time.process_time()
    for pid in family(os.getpid())[1:]:
        try:
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(words[11]) + int(words[12])) / TICK
    return total


def measure(experiment: Experiment, count: int, num_rounds: int) -> dict[str, float]:
    """Processor seconds of a round by phase, the least of some rounds; `evaluate` apart."""
    dataset = load_dataset(experiment, None)
    prepared = build.prepare_seed(experiment, 0, dataset)
    found: list[dict[str, float]] = []
    with ExitStack() as stack:
        engine = open_local_engine(stack, prepared, MemoryPlan(count, 0, 0))
        build.init_models_(
            engine.group.models[: prepared.num_persistent_rows],
            prepared.experiment,
            0,
            dataset,
            range(prepared.num_persistent_rows),
        )
        log = RoundLog(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        memory = AgentState.initial(prepared.spec.num_agents)
        aim = attack_goal(experiment)
        marks: list[float] = []

        def tell(n: int, phase: str) -> None:
            marks.append(processor_seconds())

        last = num_rounds
        stream = run_rounds(engine, memory, 0, num_rounds + 1, lambda n: n == last, tell)
        stack.enter_context(one_thread())
        for done in stream:
            marks.append(processor_seconds())
            wall = {name: done.seconds[name] for name in ("aggregate", "mix")}
            began = processor_seconds()
            log.append("metrics", metrics_record(aim, engine.adversary.malicious, done))
            log.append("pairs", pairs_record(done))
            ended = processor_seconds()
            mixed = marks[2] - marks[1]
            share = wall["aggregate"] / sum(
                wall.values()
            )  # processor time is known for both together
            line = {
                "train": marks[1] - marks[0],
                "aggregate": mixed * share,
                "mix": mixed * (1 - share),
            }
            line["records"] = ended - began
            if len(marks) == 4:
                line["evaluate"] = marks[3] - marks[2]
            found.append(line)
            marks.clear()
    best = {name: min(line[name] for line in found[1:]) for name in PHASES}
    return {**best, "evaluate": found[-1]["evaluate"], "dim": prepared.spec.dim}


def operations(experiment: Experiment, dim: int) -> float:
    """Floating-point operations of an agent and round: training, and judging M models and the own one."""
    agents = experiment.agents
    trained = 6.0 * dim * SAMPLES * 4 / 5
    judged = (
        2.0
        * dim
        * (agents.budget + 1)
        * SAMPLES
        / 5
        * agents.benign
        / (agents.benign + agents.malicious)
    )
    return trained + judged


def cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is measured, a line each."""
    base = {
        "agents": options.agents,
        "budget": options.budget,
        "hidden": options.hidden,
        "workers": options.workers,
    }
    sizes: dict[str, list[Any]] = {
        "agents": [100, 300, 1000] if options.small else [100, 1000, 10_000],
        "budget": [1, 4, 16, 64],
        "dim": [None, 32, 512, 4096],
        "workers": [1, 2],
    }
    if options.agents is None:
        base["agents"] = 1000
    elif options.along is None:
        yield base
        return
    along = options.along or "agents"
    for value in sizes[along]:
        yield {**base, {"dim": "hidden"}.get(along, along): value}


def main() -> None:
    """Measure each case and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--in", dest="along", choices=["agents", "budget", "dim", "workers"], help="what grows"
    )
    parser.add_argument("--agents", type=int, help="N (default 1000, where something else grows)")
    parser.add_argument("--budget", type=int, default=4, help="M (default 4)")
    parser.add_argument(
        "--hidden", type=int, help="a hidden layer of so many units (default none: d = 210)"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default 3)")
    parser.add_argument("--small", action="store_true", help="up to 1,000 agents: some seconds")
    options = parser.parse_args()
    if not Path("/proc/self/stat").exists():
        sys.exit("this benchmark reads /proc/PID/stat, which only Linux has")
    best = max(rate().values())
    print(
        f"one core's best rate: {best / 1e9:.0f} GFLOP/s; microseconds of processor time for an agent and round"
    )
    names = (*PHASES, "all", "limit", "a round, s", "evaluation")
    print(f"{'N':>7} {'M':>4} {'d':>8} {'workers':>8}", *(f"{name:>11}" for name in names))
    for case in cases(options):
        experiment = experiment_of(case["agents"], case["budget"], case["hidden"])
        found = measure(experiment, case["workers"], options.rounds)
        total = sum(found[name] for name in PHASES)
        each = [1e6 * found[name] / case["agents"] for name in PHASES]
        limit = 1e6 * operations(experiment, int(found["dim"])) / best
        numbers = [
            *each,
            1e6 * total / case["agents"],
            limit,
            total,
            1e6 * found["evaluate"] / case["agents"],
        ]
        start = (
            f"{case['agents']:>7,} {case['budget']:>4} {int(found['dim']):>8,} {case['workers']:>8}"
        )
        print(start, *(f"{number:>11.2f}" for number in numbers), flush=True)


if __name__ == "__main__":
    main()

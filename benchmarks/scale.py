"""Cost of a round per agent as agents, downloads, parameters or processes grow.

    python benchmarks/scale.py [--small]                 # in N: 100, 1,000, 10,000
    python benchmarks/scale.py --in budget|dim|workers   # in M, d or processes instead
    python benchmarks/scale.py --agents 2000 --budget 8 --hidden 32 --workers 2 --rounds 5
    python benchmarks/scale.py --page --agents 100000    # the table of docs/performance.md up to N

Small models (by default logistic regression on 20 features, d = 210) of agents with 20 samples
each, 3 of 10 with flipped labels: arithmetic is negligible, and the rest is overhead. For each
phase of a round the table has microseconds of processor time per agent, over all processes, the
least of several rounds after an uncounted first one. "Limit" is the floating-point operations of
training and validation at the best rate of one core in the same run. Records are the written lines
of a round. Checkpoints are not written, and only the last columns include an evaluation, with its
records. "Longest" are the seconds of a round with it in the main process and the busiest worker,
which is the duration on idle processors. `--page` writes one case after the other to scale.csv,
each in a process of its own, and the table.
"""

import argparse
import csv
import itertools
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from limits import best_rates, process_tree, processor_seconds
from page_table import replace_table

import fedcb2o
from fedcb2o.experiments.config import network, prepared_seed
from fedcb2o.experiments.config.datasets import load_dataset
from fedcb2o.experiments.config.loading import load
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.experiments.runs._local_backend import open_local_engine
from fedcb2o.experiments.runs._memory_plan import MemoryPlan
from fedcb2o.experiments.runs._round_records import metrics_record, pairs_record
from fedcb2o.federated.contacts import AgentState
from fedcb2o.parallel._executors import one_thread
from fedcb2o.records import RoundLog
from fedcb2o.simulation.adversarial_engine import AdversarialEngine
from fedcb2o.simulation.rounds import run_rounds

FEATURES = 20
CLASSES = 10
SAMPLES = 20
PHASES = ("train", "aggregate", "mix", "records")
VALUES = Path(__file__).with_suffix(".csv")
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
MARKS = ("<!-- scale -->", "<!-- /scale -->")
PAGE_AGENTS = (1000, 10_000, 100_000, 1_000_000)
COLUMNS = (
    *("agents", "budget", "workers", *PHASES, "evaluate", "all"),
    *("seconds", "longest", "mebibytes"),
)


def synthetic(*, samples: int) -> fedcb2o.Dataset:
    """Return random points around one centre per class."""
    draw = np.random.default_rng(0)
    y = draw.integers(CLASSES, size=samples + 500)
    centres = draw.normal(size=(CLASSES, FEATURES)).astype(np.float32)
    x = draw.standard_normal((len(y), FEATURES), dtype=np.float32)
    x += centres[y]
    return fedcb2o.dataset(x[500:], y[500:], x_test=x[:500], y_test=y[:500])


def small_experiment(agents: int, budget: int, hidden: int | None) -> Experiment:
    """Return an experiment with N agents of a small model, 3 of 10 malicious."""
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


class TreeClock:
    """Processor seconds of this process and its descendants, without those of the clock."""

    def __init__(self) -> None:
        self._own = 0.0

    def __call__(self) -> np.ndarray:
        """Return the seconds so far of all processes, and of this one and the busiest other."""
        start = time.process_time()
        others = [processor_seconds(pid) for pid in process_tree(os.getpid())[1:]]
        seconds = start - self._own
        self._own += time.process_time() - start
        return np.array([seconds + sum(others), seconds + max(others, default=0.0)])


def measure(experiment: Experiment, count: int, num_rounds: int) -> dict[str, Any]:
    """Return the least processor seconds by phase, of an evaluation, and the dimension `dim`.

    "longest" has those of the main process and the busiest worker, in a round with an evaluation.
    """
    dataset = load_dataset(experiment, None)
    prepared = prepared_seed.prepare_seed(experiment, 0, dataset)
    rows = prepared.num_persistent_rows
    seconds: list[dict[str, np.ndarray]] = []
    with ExitStack() as stack:
        engine = open_local_engine(stack, prepared, MemoryPlan(count, 0, 0))
        models = engine.group.models[:rows]
        network.init_models_(models, experiment, 0, dataset, range(rows))
        log = RoundLog(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        state = AgentState.initial(prepared.spec.num_agents)
        goal = experiment.resolved.goal
        marks: list[np.ndarray] = []
        clock = TreeClock()

        def mark(n: int, phase: str) -> None:
            marks.append(clock())

        rounds = run_rounds(
            AdversarialEngine(engine), state, 0, num_rounds + 1, num_rounds + 1, mark
        )
        stack.enter_context(one_thread())
        for result in rounds:
            marks.append(clock())
            log.append("metrics", metrics_record(goal, prepared.adversary.malicious, result))
            log.append("pairs", pairs_record(result))
            records = clock() - marks[-1]

            # Processor time covers both phases together; wall-clock time divides it.
            wall = {name: result.seconds[name] for name in ("aggregate", "mix")}
            share = wall["aggregate"] / sum(wall.values())
            both = marks[2] - marks[1]
            phases = {"train": marks[1] - marks[0], "records": records}
            phases |= {"aggregate": both * share, "mix": both * (1 - share)}
            if len(marks) == 4:
                phases["evaluate"] = marks[3] - marks[2]
            seconds.append(phases)
            marks.clear()
    least = {name: np.min([phases[name] for phases in seconds[1:]], 0) for name in PHASES}
    last = seconds[-1]
    longest = sum(least[name][1] for name in PHASES[:-1]) + last["evaluate"][1] + last["records"][1]
    evaluation = last["evaluate"][0] + last["records"][0] - least["records"][0]
    by_phase = {name: values[0] for name, values in least.items()}
    return {**by_phase, "evaluate": evaluation, "longest": longest, "dim": prepared.spec.dim}


def operations(experiment: Experiment, dim: int) -> float:
    """Return the floating-point operations of an agent's training and validation per round."""
    agents = experiment.agents
    training = 6.0 * dim * SAMPLES * 4 / 5
    validation = 2.0 * dim * (agents.budget + 1) * SAMPLES / 5
    return training + validation * agents.benign / (agents.benign + agents.malicious)


def cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the measured combinations of N, M, hidden width and processes."""
    base = {name: getattr(options, name) for name in ("agents", "budget", "hidden", "workers")}
    if options.agents is not None and options.along is None:
        yield base
        return

    base["agents"] = options.agents or 1000
    along = options.along or "agents"
    sizes: dict[str, list[Any]] = {
        "agents": [100, 300, 1000] if options.small else [100, 1000, 10_000],
        "budget": [1, 4, 16, 64],
        "dim": [None, 32, 512, 4096],
        "workers": [1, 2],
    }
    key = "hidden" if along == "dim" else along
    for value in sizes[along]:
        yield {**base, key: value}


def write_page(most: int, rounds: int) -> None:
    """Measure the cases of the page up to `most` agents, and write its table."""
    rows = []
    if VALUES.exists():
        with VALUES.open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    for agents, budget, workers in itertools.product(PAGE_AGENTS, (4, 20), (1, 2)):
        if agents > most:
            continue
        options = {"agents": agents, "budget": budget, "workers": workers, "rounds": rounds}
        words = [f"--{name}={value}" for name, value in options.items()]
        command = [sys.executable, __file__, "--values", *words]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        row = dict(zip(COLUMNS, printed.split(), strict=True))
        print(row, flush=True)
        rows = [known for known in rows if [*known.values()][:3] != [*row.values()][:3]] + [row]
        rows.sort(key=lambda row: [int(row[name]) for name in COLUMNS[:3]])
        with VALUES.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    head = ["agents", "M", "processes", *COLUMNS[3:9], "a round, s", "longest, s", "MiB"]
    lines = [head, *([f"{int(row['agents']):,}", *[*row.values()][1:]] for row in rows)]
    replace_table(PAGE, MARKS, lines, 0)


def main() -> None:
    """Measure each case and print one line for it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    along = ["agents", "budget", "dim", "workers"]
    parser.add_argument("--in", dest="along", choices=along, help="the parameter that grows")
    parser.add_argument("--agents", type=int, help="N (default 1000, if another parameter grows)")
    parser.add_argument("--budget", type=int, default=4, help="M (default 4)")
    parser.add_argument("--hidden", type=int, help="width of a hidden layer (default none)")
    parser.add_argument("--workers", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default 3)")
    parser.add_argument("--small", action="store_true", help="up to 1,000 agents: some seconds")
    parser.add_argument("--page", action="store_true", help="write the page's table, up to N")
    parser.add_argument("--values", action="store_true", help="print one row of scale.csv")
    options = parser.parse_args()
    if not Path("/proc/self/stat").exists():
        sys.exit("this benchmark reads /proc/PID/stat, which only Linux has")
    if options.page:
        write_page(options.agents or PAGE_AGENTS[-1], options.rounds)
        return
    if options.values:
        experiment = small_experiment(options.agents, options.budget, options.hidden)
        seconds = measure(experiment, options.workers, options.rounds)
        by_phase = [seconds[name] for name in (*PHASES, "evaluate")]
        by_phase.append(sum(by_phase))
        per_agent = [f"{1e6 * value / options.agents:.1f}" for value in by_phase]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        case = (options.agents, options.budget, options.workers)
        print(*case, *per_agent, f"{by_phase[-1]:.2f}", f"{seconds['longest']:.2f}", peak)
        return
    best = max(best_rates().values())
    unit = "microseconds of processor time for an agent and round"
    print(f"one core's best rate: {best / 1e9:.0f} GFLOP/s; {unit}")
    names = (*PHASES, "all", "limit", "a round, s", "evaluation")
    print(f"{'N':>7} {'M':>4} {'d':>8} {'workers':>8}", *(f"{name:>11}" for name in names))
    for case in cases(options):
        agents = case["agents"]
        experiment = small_experiment(agents, case["budget"], case["hidden"])
        seconds = measure(experiment, case["workers"], options.rounds)
        dim = int(seconds["dim"])
        total = sum(seconds[name] for name in PHASES)
        numbers = [1e6 * seconds[name] / agents for name in PHASES]
        numbers += [1e6 * total / agents, 1e6 * operations(experiment, dim) / best]
        numbers += [total, 1e6 * seconds["evaluate"] / agents]
        head = f"{agents:>7,} {case['budget']:>4} {dim:>8,} {case['workers']:>8}"
        print(head, *(f"{number:>11.2f}" for number in numbers), flush=True)


if __name__ == "__main__":
    main()

"""Processor seconds and bytes of the records of a round, in JSON lines and in Parquet.

    python benchmarks/record_formats.py [--agents 100000] [--budget 20] [--rounds 4] [--page]

The experiment is that of scale.py. Each round, with its evaluation, is written in each format by
turns, in another order every time. JSON lines of all agents are written only here. The table has
the median over the rounds after an uncounted first one; `--page` writes it to docs/performance.md.
"""

import argparse
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from page_table import replace_table
from scale import small_experiment

from fedcb2o.experiments.config import network, prepared_seed
from fedcb2o.experiments.config.datasets import load_dataset
from fedcb2o.experiments.runs._local_backend import open_local_engine
from fedcb2o.experiments.runs._memory_plan import MemoryPlan
from fedcb2o.experiments.runs._round_records import metrics_record, pairs_record
from fedcb2o.federated.contacts import AgentState
from fedcb2o.parallel._executors import one_thread
from fedcb2o.records import RoundLog, _parquet
from fedcb2o.simulation.adversarial_engine import AdversarialEngine
from fedcb2o.simulation.rounds import run_rounds

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
MARKS = ("<!-- record_formats -->", "<!-- /record_formats -->")
# Records, and whether they are in Parquet and of all agents.
FORMATS = {
    "metrics, JSON lines": ("metrics", False, True),
    "metrics, Parquet": ("metrics", True, True),
    "pairs of the sample, JSON lines": ("pairs", False, False),
    "pairs of all, JSON lines": ("pairs", False, True),
    "pairs of all, Parquet": ("pairs", True, True),
}


def main() -> None:
    """Write some rounds in each format, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=100_000, help="N (default 100,000)")
    parser.add_argument("--budget", type=int, default=20, help="M (default 20)")
    parser.add_argument("--rounds", type=int, default=4, help="rounds that count (default 4)")
    parser.add_argument("--page", action="store_true", help="write the page's table")
    options = parser.parse_args()
    experiment = small_experiment(options.agents, options.budget, None)
    dataset = load_dataset(experiment, None)
    prepared = prepared_seed.prepare_seed(experiment, 0, dataset)
    rows = prepared.num_persistent_rows
    sample = _parquet.MAX_PAIR_AGENTS
    seconds: dict[str, list[float]] = {name: [] for name in FORMATS}
    sizes: dict[str, list[int]] = {name: [] for name in FORMATS}
    with ExitStack() as stack:
        engine = open_local_engine(stack, prepared, MemoryPlan(1, 0, 0))
        network.init_models_(engine.group.models[:rows], experiment, 0, dataset, range(rows))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs = {}
        for number, (name, (log, is_parquet, _)) in enumerate(FORMATS.items()):
            place = folder / str(number)
            place.mkdir()
            logs[name] = RoundLog(place, columns=(log,) if is_parquet else ())
        state = AgentState.initial(options.agents)
        goal = experiment.resolved.goal
        stack.enter_context(one_thread())
        rounds = run_rounds(
            AdversarialEngine(engine), state, 0, options.rounds + 1, 1, lambda n, phase: None
        )
        for result in rounds:
            names = list(FORMATS)
            turn = result.n % len(names)
            for name in (*names[turn:], *names[:turn]):
                log, is_parquet, has_all = FORMATS[name]
                _parquet.MAX_PAIR_AGENTS = options.agents if has_all else sample
                before = logs[name].checksums((log,)).popitem()[1][0]
                start = time.process_time()
                if log == "metrics":
                    record = metrics_record(goal, prepared.adversary.malicious, result)
                else:
                    record = pairs_record(result, is_parquet=is_parquet)
                logs[name].append(log, record)
                seconds[name].append(time.process_time() - start)
                sizes[name].append(logs[name].checksums((log,)).popitem()[1][0] - before)
    table = [[f"{options.agents:,} agents, M = {options.budget}", "seconds", "MB"]]
    for name in FORMATS:
        megabytes = np.median(sizes[name][1:]) / 1e6
        table.append([name, f"{np.median(seconds[name][1:]):.2f}", f"{megabytes:.1f}"])
    for row in table:
        print(*row, sep=" | ")
    if options.page:
        replace_table(PAGE, MARKS, table, 1)


if __name__ == "__main__":
    main()

r"""Seconds that a round takes with each of a grid's defences, which take turns in one process, on one thread.

    .venv/bin/python benchmarks/defences.py emnist-all-data --data-dir DIR --defence "FedCB2O, sub-level set" \
        --defence "FedCB2O, all data" --defence "FedCB2O, all data, apart"     # two minutes
    .venv/bin/python benchmarks/defences.py quick                              # all defences of the grid `quick`

Attackers train cleanly, nothing is evaluated but the last round, and the first round of a turn is not counted. What a
grid tunes is at the experiment's value. A line a defence: the median over the turns, the least, and both as ratios to
the first defence. Other programs on the machine make a turn take up to twice as long; the ratio of the least bears that
best.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import fedcb2o
from fedcb2o.experiments.grid.definition import Grid
from fedcb2o.experiments.grid.loading import load_grid
from fedcb2o.parallel.executors import one_thread
from fedcb2o.report.grid_results import UNTIMED_PHASES


def seconds(grid: Grid, defence: str, rounds: int, data_dir: Path | None) -> float:
    """The median over the rounds of one turn, without the first."""
    attack = next(iter(grid.attacks))
    setting = next(iter(grid.settings), "")
    settings = grid.experiment(setting, defence, attack).settings()
    settings.pop("attack", None)
    settings["agents"]["malicious_role"] = "clean"
    settings |= {
        "seeds": [0],
        "rounds": rounds + 1,
        "evaluate_every": rounds + 1,
        "checkpoint_every": rounds + 1,
    }
    with tempfile.TemporaryDirectory() as folder, one_thread():
        fedcb2o.run(fedcb2o.load(settings), out=Path(folder) / "run", workers=1, data_dir=data_dir)
        lines = next(Path(folder).rglob("timing.jsonl")).read_text(encoding="utf-8").splitlines()
    took = [
        {part: s for part, s in json.loads(line).items() if part not in ("round", *UNTIMED_PHASES)}
        for line in lines[1:]
    ]
    return statistics.median(sum(parts.values()) for parts in took)


def main() -> None:
    """Measure in turns and print a line for each defence."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("grid", help="the name of a built-in grid, or its file")
    parser.add_argument("--defence", action="append", help="one of them; the first is compared to")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--data-dir", type=Path)
    given = parser.parse_args()
    grid = load_grid(given.grid)
    names = given.defence or [*grid.defences]
    if unknown := [name for name in names if name not in grid.defences]:
        parser.error(f"no defence {unknown[0]!r} in this grid: {'; '.join(grid.defences)}")
    took: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(given.turns):
        for name, each in took.items():
            each.append(seconds(grid, name, given.rounds, given.data_dir))
    median, least = (
        {name: of(each) for name, each in took.items()} for of in (statistics.median, min)
    )
    first = next(iter(took))
    width = max(map(len, took))
    print(f"{'seconds a round':{width}}  median   least    ratios of both")
    for name in took:
        ratios = "  ".join(f"{each[name] / each[first]:.2f}" for each in (median, least))
        print(f"{name:{width}}  {median[name]:.4f}  {least[name]:.4f}  {ratios}")


if __name__ == "__main__":
    main()

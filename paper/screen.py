"""Defences of a grid that need all seeds, and those with enough evidence from few.

    .venv/bin/python -m paper.screen runs/digits

A defence has enough evidence if its worst regret is significantly above the lowest worst regret
(paired 95% interval without 0) in every contest of the headline table, it is best in no column, and
it is not the reference. The contests are accuracy, attack success and either, with and without the
attacks that the grid sets aside. The grid's file may limit such a defence to the `seeds` of this
run. Defences with more seeds are compared on the common seeds.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from fedcb2o.report import read_grid
from fedcb2o.report._grid_metrics import COMPARED_METRICS
from fedcb2o.report._regret import worst_regret, worst_regret_differences
from fedcb2o.report.grid_results import GridResults
from fedcb2o.report.grid_tables import SettingResults, regret_contests


def contenders(results: GridResults) -> set[str]:
    """Return the defences that need all seeds, the reference included."""
    names = {results.reference}
    results = replace(results, rows=results.rows[results.rows.seed.isin(common_seeds(results))])
    for setting in results.settings:
        view = SettingResults(results, setting)
        for value in COMPARED_METRICS:
            names |= set(view.shortfalls(value).best)
        for shortfalls, attacks in regret_contests(view).values():
            worst = worst_regret(shortfalls, attacks)["mean"]
            lowest = str(worst.idxmin())
            differences = worst_regret_differences(shortfalls, attacks, lowest)
            names |= {lowest, *differences.index[~(differences.low > 0)]}
    return names


def common_seeds(results: GridResults) -> list[int]:
    """Return the seeds that every defence has, ascending."""
    return sorted(set.intersection(*results.rows.groupby("defence").seed.agg(set)))


def main() -> None:
    """Print the defences that need all seeds, and the others with their seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    results = read_grid(parser.parse_args().folder)
    needed = contenders(results)
    print("All seeds:", *(name for name in results.defences if name in needed), sep="\n  ")
    others = [name for name in results.defences if name not in needed]
    print(f"seeds = {common_seeds(results)}:", *others, sep="\n  ")


if __name__ == "__main__":
    main()

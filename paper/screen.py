"""Which defences of a grid need all of its seeds, and for which the few that were run say enough.

    .venv/bin/python paper/screen.py runs/digits

Enough is known of a defence whose worst regret is above the lowest one's by a paired interval that excludes 0 in every
contest of the headline (accuracy, attack success, either; with and without what the grid sets aside), and that is the
best in no column and not the reference. Such a defence may have the `seeds` of this run in the grid's file. Where some
have more seeds than others, all are judged by those that all have.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from fedcb2o.report import read_grid
from fedcb2o.report.grid_results import GridResults
from fedcb2o.report.grid_tables import COMPARED_METRICS, SettingResults, regret_contests
from fedcb2o.report.regret import worst_regret, worst_regret_differences


def contenders(results: GridResults) -> set[str]:
    """The defences that need all seeds, by those that all have."""
    found = {results.reference}
    seeds = common(results)
    results = replace(results, rows=results.rows[results.rows.seed.isin(seeds)])
    for view in (SettingResults(results, setting) for setting in results.settings):
        for value in COMPARED_METRICS:
            found |= set(view.shortfalls(value).best)
        for short, among in regret_contests(view).values():
            worst = worst_regret(short, among)["mean"]
            behind = worst_regret_differences(short, among, str(worst.idxmin()))
            found |= {str(worst.idxmin()), *behind.index[~(behind.low > 0)]}
    return found


def common(results: GridResults) -> list[int]:
    """The seeds that were run with every defence."""
    return sorted(set.intersection(*results.rows.groupby("defence").seed.agg(set)))


def main() -> None:
    """Print who needs all seeds, and the line for each of the others."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    results = read_grid(parser.parse_args().folder)
    found = contenders(results)
    seeds = common(results)
    print("All seeds:", *(name for name in results.defences if name in found), sep="\n  ")
    print(
        f"seeds = {seeds}:", *(name for name in results.defences if name not in found), sep="\n  "
    )


if __name__ == "__main__":
    main()

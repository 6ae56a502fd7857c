"""Heat maps over settings with names "COLUMN, ROW": the accuracy under the worst attack.

As in ByzFL's benchmark, the value of an attack is the best evaluation of the mean over seeds.
"""

import numpy as np
import pandas as pd

from fedcb2o.records import slug
from fedcb2o.report._heat_map import draw_heat_map
from fedcb2o.report._page import Page
from fedcb2o.report.grid_results import GridResults

_BEST = "Best defence"


def worst_attack_maps(results: GridResults) -> dict[str, pd.DataFrame]:
    """Return rows by columns for each defence, and for the best of several defences.

    It is empty unless the settings are a whole table of at least two cells, all attacks have
    finished in one of them, and the main metric is the accuracy. Other cells are NaN.
    """
    names = [setting.partition(", ") for setting in results.settings]
    columns = list(dict.fromkeys(column for column, _, _ in names))
    rows = list(dict.fromkeys(row for _, _, row in names))
    is_table = len(columns) * len(rows) == len(names) > 1 and all(rows)
    if not is_table or results.main != "accuracy" or results.curves.empty:
        return {}
    curves = results.curves[results.curves.role == "attack"].dropna(subset="accuracy")
    means = curves.groupby(["defence", "setting", "attack", "round"]).accuracy.mean()
    best = means.groupby(level=["defence", "setting", "attack"]).max().unstack("attack")
    # The worst attack is known once all have finished.
    worst = best.reindex(columns=results.attacks).min(axis=1, skipna=False)
    maps = {}
    for defence in results.defences:
        values = [
            [worst.get((defence, f"{column}, {row}"), np.nan) for column in columns] for row in rows
        ]
        maps[defence] = pd.DataFrame(values, rows, columns, dtype=float)
    if len(maps) > 1:
        stacked = np.stack([table.to_numpy() for table in maps.values()])
        maps[_BEST] = pd.DataFrame(stacked.max(axis=0), rows, columns)
    return {name: table for name, table in maps.items() if table.notna().to_numpy().any()}


def write_worst_attack_maps(page: Page, results: GridResults, start: str) -> None:
    """Write each map as a figure and a table, in the folder `worst-attack`."""
    for name, table in worst_attack_maps(results).items():
        path = f"{start}worst-attack/{slug(name)}"
        page.write_file(f"{path}.csv", table.to_csv(float_format="%.4f"))
        page.write_figure(path, draw_heat_map(table, table * np.nan, shades=1 - table))

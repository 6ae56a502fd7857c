"""FedAssay's former default next to the present one, in the grids that have both.

    .venv/bin/python -m paper.former    # read the former values from git

The values are in docs/benchmark/former: `values.csv` has a row per grid, column and seed, and
`regrets.csv` the former default's worst regret in its grid. They are those of the last commit in
which the former default was the method of the grids.
"""

import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from fedcb2o.report import SettingResults, read_grid

COMMIT = "42a81423"
VALUES = Path(__file__).parents[1] / "docs" / "benchmark" / "former" / "values.csv"
REGRETS = VALUES.with_name("regrets.csv")
MEASURES = {
    "accuracy": "accuracy",
    "accuracy_worst": "worst agent's accuracy",
    "attack_success_rate": "attack success",
    "attack_success_rate_worst": "worst agent's success",
}
LEAST = 0.5
"""Points; smaller losses are not listed."""


def former_regrets() -> "pd.Series[float]":
    """Return the former default's worst regrets in points, by title of grid and setting."""
    return pd.read_csv(REGRETS, index_col="grid").regret


def former_table(method: str, views: Iterable[tuple[str, SettingResults]]) -> pd.DataFrame:
    """List what the present default loses to the former one.

    Args:
        method: Name of the method in the grids.
        views: Grids by title; those without former values are left out.

    Returns:
        Text, one row per grid and measure: how many columns lose at least `LEAST` points, and the
        former and the present value of each in percent, means over seeds.
    """
    former = pd.read_csv(VALUES).groupby(["grid", "attack"], sort=False)[list(MEASURES)].mean()
    rows = []
    for title, view in views:
        if title not in former.index:
            continue
        own = view.rows[view.rows.defence == method]
        present = own.groupby("attack")[list(MEASURES)].mean()
        for measure, name in MEASURES.items():
            pairs = pd.DataFrame({"old": former.loc[title][measure], "new": present[measure]})
            pairs = 100 * pairs.dropna()
            sign = 1 if "success" in measure else -1
            loss = (sign * (pairs.new - pairs.old)).sort_values(ascending=False)
            lost = pairs.loc[loss.index[loss >= LEAST]]
            if len(lost):
                cells = (f"{a} {row.old:.1f} to {row.new:.1f}" for a, row in lost.iterrows())
                rows.append(
                    {
                        "Grid": title,
                        "Measure": name,
                        "Columns": f"{len(lost)} of {len(pairs)}",
                        "From the former default to the present one": "; ".join(cells),
                    }
                )
    return pd.DataFrame(rows).set_index("Grid")


def main() -> None:
    """Keep the former default's values and worst regrets."""
    from paper import results

    values, regrets = [], {}
    for name in (*results.MAIN_GRIDS, "settings"):
        with tempfile.TemporaryDirectory() as folder:
            for file in ("grid.toml", "summary.csv.gz"):
                command = ["git", "show", f"{COMMIT}:docs/benchmark/{name}/{file}"]
                content = subprocess.run(command, check=True, capture_output=True).stdout
                Path(folder, file).write_bytes(content)
            grid = read_grid(Path(folder))
        for setting in grid.settings:
            view = SettingResults(grid, setting)
            title = results.title_of(view)
            rows = view.rows[view.rows.defence == results.METHOD]
            columns = ["grid", "attack", "seed", *MEASURES]
            values.append(rows.assign(grid=title)[columns])
            worst = results.worst_regrets(view, without=results.TRIGGERS)[results.METHOD]
            regrets[title] = 100 * worst
    VALUES.parent.mkdir(exist_ok=True)
    pd.concat(values).to_csv(VALUES, index=False, lineterminator="\n")
    table = pd.Series(regrets, name="regret").rename_axis("grid")
    table.to_csv(REGRETS, float_format="%.2f", lineterminator="\n")


if __name__ == "__main__":
    main()

"""Effects of FedCB2O's parts in the grid `ablation`: differences with and without each part.

    .venv/bin/python -m paper.parts docs/benchmark/ablation    # significant differences

There are three families of differences: the default without one part, with half of the samples held
out and with all data; and Algorithm 2 with one part added. A difference is the gain from a part,
paired by seeds: in accuracy, or in the reduction of attack success. It is significant if its
p-value is below 5% after two corrections: Holm's over its whole family (both settings and both
metrics), and Bonferroni's for the number of looks at the results. `paper/pages.py` writes the
tables to pages under the names `SETTING/parts-FAMILY`.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.report import read_grid
from fedcb2o.report._statistics import (
    CONFIDENCE,
    add_attack_effects,
    format_interval,
    holm_correction,
    paired_differences,
    seed_statistics,
)
from fedcb2o.report.grid_results import GridResults
from fedcb2o.report.grid_tables import (
    COMPARED_METRICS,
    SIGNIFICANT_MARK,
    SettingResults,
    metric_info,
)

LOOKS = 4
"""Number of looks at the results while seeds were added: with five, eight, ten and twenty."""


@dataclass(frozen=True)
class Family:
    """Differences to one base defence.

    Attributes:
        base: Name of the base defence.
        prefix: Start of the names of the defences with one part more or less.
        added: Whether these defences have one part more.
        also: Further defences, each with its part.
        looks: Number of looks at the results.
    """

    base: str
    prefix: str
    added: bool
    also: tuple[tuple[str, str], ...] = ()
    looks: int = LOOKS

    def parts(self, results: GridResults) -> dict[str, str]:
        """Return the part that distinguishes each defence from the base."""
        prefixed = [name for name in results.defences if name.startswith(self.prefix)]
        return {**dict(self.also), **{name: name.removeprefix(self.prefix) for name in prefixed}}


FAMILIES = {
    "half": Family(
        "FedCB2O, sub-level set",
        "Without: ",
        added=False,
        also=(("Without the released split", "released split"),),
    ),
    "all-data": Family("FedCB2O, all data", "All data, without: ", added=False),
    "alone": Family(
        "Algorithm 2, own model trusted",
        "Alone: ",
        added=True,
        also=(("With the released split alone", "released split"),),
    ),
}


def gains(results: GridResults, family: Family) -> pd.DataFrame:
    """Compute the statistics over seeds of the gain from each part.

    Args:
        results: The results of the grid.
        family: The family of differences.

    Returns:
        One row per (setting, part, value, attack), with the column `stays` for significant gains.

    Raises:
        ConfigError: If the grid lacks a defence of the family.
    """
    parts = family.parts(results)
    names = [family.base, *parts]
    if not {*names} <= {*results.defences}:
        raise ConfigError(f"{results.folder} has no {family.base!r} with one part more or less")

    tables = {}
    for setting in results.settings:
        rows = add_attack_effects(results, setting)
        rows = rows[rows.defence.isin(names)]
        for value in COMPARED_METRICS:
            table = paired_differences(rows, value, family.base)
            higher_is_worse = metric_info(value).worse_direction == "high"
            if family.added == higher_is_worse:
                table = table.assign(mean=-table["mean"], low=-table.high, high=-table.low)
            tables[setting, value] = table

    table = pd.concat(tables, names=["setting", "value"]).rename(index=parts, level="defence")
    table = table.rename_axis(["setting", "value", "part", "attack"])
    return table.assign(stays=holm_correction(table.p) * family.looks < 1 - CONFIDENCE)


def parts_table(view: SettingResults, family: Family) -> pd.DataFrame:
    """Return the base defence's results and the gain from each part, in percent."""
    setting_gains = gains(view.results, family).loc[view.setting]
    columns = [(value, attack) for value in COMPARED_METRICS for attack in view.columns(value)]
    base_rows = view.rows[view.rows.defence == family.base]
    base = {value: seed_statistics(base_rows, value).loc[family.base] for value in COMPARED_METRICS}
    rows = {family.base: [_interval(base[value].loc[attack]) for value, attack in columns]}
    for part in family.parts(view.results).values():
        cells = []
        for value, attack in columns:
            gain = setting_gains.loc[(value, part, attack)]
            cells.append(_interval(gain, "+") + SIGNIFICANT_MARK * int(gain.stays))
        rows[part[0].upper() + part[1:]] = cells

    heads = [attack if value == "accuracy" else f"{attack}, success" for value, attack in columns]
    return pd.DataFrame.from_dict(rows, orient="index", columns=heads).rename_axis("Part")


def _interval(values: "pd.Series[float]", sign: str = "") -> str:
    return format_interval(*(100 * values[name] for name in ("mean", "low", "high")), sign=sign)


def main() -> None:
    """Print the significant differences of each family, sorted by p-value."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("grid", type=Path)
    try:
        results = read_grid(parser.parse_args().grid)
        tables = {name: gains(results, family) for name, family in FAMILIES.items()}
    except (ConfigError, RunError) as error:
        parser.error(str(error))
    for name, table in tables.items():
        significant = table[table.stays].sort_values("p")
        print(f"{name}: {len(significant)} of {len(table)} are significant")
        for (setting, value, part, attack), gain in significant.iterrows():
            metric = COMPARED_METRICS[value].lower()
            print(
                f"  {setting} | {part} | {metric} | {attack}: {_interval(gain, '+')},"
                f" p = {gain.p:.1g}"
            )


if __name__ == "__main__":
    main()

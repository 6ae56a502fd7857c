"""What each part of FedCB2O is worth in the grid `ablation`: the differences with it and without it.

    .venv/bin/python -m paper.parts docs/benchmark/ablation    # how many stay after correction, and which

There are three families of differences: of the whole, with half of the samples held out and with all data, with a part
left out; and of Algorithm 2 with a part added. A difference is what the part gains, paired by seeds: in accuracy, or by
how much fewer of an attack's tries succeed. It stays where its p-value is below 5% after Holm's correction over all of
its family, both settings and both measures together, and Bonferroni's for the times that the seeds were looked at.
`paper/pages.py` puts the tables on a page, by the names `SETTING/parts-FAMILY`.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.report import read_grid
from fedcb2o.report.grid_results import GridResults
from fedcb2o.report.grid_tables import (
    COMPARED_METRICS,
    SIGNIFICANT_MARK,
    SettingResults,
    metric_info,
)
from fedcb2o.report.statistics import (
    CONFIDENCE,
    add_attack_effects,
    format_interval,
    holm_correction,
    paired_differences,
    seed_statistics,
)

LOOKS = 4
"""How often the results were looked at while seeds were added: with five, eight, ten and twenty."""


@dataclass(frozen=True)
class Family:
    """Differences to one defence: what the names of those with a part more or less begin with, and which it is."""

    base: str
    prefix: str
    added: bool
    also: tuple[tuple[str, str], ...] = ()
    looks: int = LOOKS

    def parts(self, results: GridResults) -> dict[str, str]:
        """The part that each of the other defences has more or less."""
        named = {
            name: name.removeprefix(self.prefix)
            for name in results.defences
            if name.startswith(self.prefix)
        }
        return {**dict(self.also), **named}


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
    """By (setting, part, value, attack) the statistics over seeds of what a part gains, and whether it `stays`.

    Raises ConfigError where the grid has not the defences of the family.
    """
    parts = family.parts(results)
    found = {}
    if not {family.base, *parts} <= {*results.defences}:
        raise ConfigError(f"{results.folder} has no {family.base!r} with a part more or less")
    for setting in results.settings:
        rows = add_attack_effects(results, setting)
        rows = rows[rows.defence.isin([family.base, *parts])]
        for value in COMPARED_METRICS:
            table = paired_differences(rows, value, family.base)
            if family.added == (metric_info(value).worse_direction == "high"):
                table = table.assign(mean=-table["mean"], low=-table.high, high=-table.low)
            found[setting, value] = table
    table = pd.concat(found, names=["setting", "value"]).rename(index=parts, level="defence")
    table = table.rename_axis(["setting", "value", "part", "attack"])
    return table.assign(stays=holm_correction(table.p) * family.looks < 1 - CONFIDENCE)


def parts_table(view: SettingResults, family: Family) -> pd.DataFrame:
    """First what the family's own defence reaches, then for each part what it gains, in points of percent."""
    found = gains(view.results, family).loc[view.setting]
    columns = [(value, attack) for value in COMPARED_METRICS for attack in view.columns(value)]
    base = {
        value: seed_statistics(view.rows[view.rows.defence == family.base], value).loc[family.base]
        for value in COMPARED_METRICS
    }
    rows = {family.base: [_told(base[value].loc[attack]) for value, attack in columns]}
    for part in family.parts(view.results).values():
        each = [found.loc[(value, part, attack)] for value, attack in columns]
        rows[part[0].upper() + part[1:]] = [
            _told(one, "+") + SIGNIFICANT_MARK * int(one.stays) for one in each
        ]
    heads = [attack + ", success" * (value != "accuracy") for value, attack in columns]
    return pd.DataFrame.from_dict(rows, orient="index", columns=heads).rename_axis("Part")


def _told(found: "pd.Series[float]", sign: str = "") -> str:
    return format_interval(*(100 * found[name] for name in ("mean", "low", "high")), sign=sign)


def main() -> None:
    """Tell how many differences of each family stay, and which, the clearest first."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("grid", type=Path)
    try:
        results = read_grid(parser.parse_args().grid)
        all_gains = {name: gains(results, family) for name, family in FAMILIES.items()}
    except (ConfigError, RunError) as error:
        parser.error(str(error))
    for name, found in all_gains.items():
        stay = found[found.stays].sort_values("p")
        print(f"{name}: {len(stay)} of {len(found)} stay")
        for (setting, value, part, attack), one in stay.iterrows():
            print(
                f"  {setting} | {part} | {COMPARED_METRICS[value].lower()} | {attack}: {_told(one, '+')}, p = {one.p:.1g}"
            )


if __name__ == "__main__":
    main()

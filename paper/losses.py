"""Losses of FedAssay: the columns of all measurements in which other methods are better."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from paper import board, preregistered_2, trial

from fedcb2o.report._statistics import CONFIDENCE, holm_correction, paired_differences

BENCHMARK = Path(__file__).parents[1] / "docs" / "benchmark"
MEASURES = {
    "accuracy": "accuracy",
    "accuracy_worst": "worst agent's accuracy",
    "attack_success_rate": "attack success",
}
LEAST = 0.01
"""Accuracy or success; smaller losses are not listed."""
KEYS = ["defence", "attack", "seed"]
WITHOUT_ATTACK = ("none", "Clean", "Removed")
ALONE = "Training alone"


@dataclass(frozen=True)
class Comparison:
    """Values of methods on the same data, by attack and seed.

    Attributes:
        title: Name of the measurement and its data.
        rows: Columns defence, attack, seed and measures, as fractions.
        link: Returns the address of a measure's values.
    """

    title: str
    rows: pd.DataFrame
    link: Callable[[str], str]


def losses_table(method: str, comparisons: Iterable[Comparison]) -> pd.DataFrame:
    """List where another method is better than `method`.

    Differences are paired by seeds, and corrected by Holm's method over the rivals and columns of
    a comparison and measure. Fewer than five seeds are not tested.

    Args:
        method: Name of the method. Names that begin with it are its variants, and no rivals.
        comparisons: Measurements with the method.

    Returns:
        Text, one row per comparison and measure: how many columns have a loss above `LEAST`, and
        the largest loss of each such column in points, bold where a loss of the column is
        significant.
    """
    rows = []
    for comparison in comparisons:
        is_variant = comparison.rows.defence.str.startswith(method)
        is_own = comparison.rows.defence == method
        known = comparison.rows[is_own | ~is_variant]
        for measure, title in MEASURES.items():
            if measure not in known or known[measure].isna().all():
                continue
            found, count = _column_losses(known, measure, method)
            if found:
                link = comparison.link(measure)
                rows.append(
                    {
                        "Measurement": f"[{comparison.title}]({link})",
                        "Measure": title,
                        "Columns": f"{len(found)} of {count}",
                        "Points behind, per column": "; ".join(found),
                    }
                )
    return pd.DataFrame(rows).set_index("Measurement")


def _column_losses(rows: pd.DataFrame, measure: str, method: str) -> tuple[list[str], int]:
    """Return the largest loss of each column as text, and the number of columns."""
    table = paired_differences(rows, measure, method)
    gain = -table["mean"] if measure == "attack_success_rate" else table["mean"]
    is_significant = (holm_correction(table.p) < 1 - CONFIDENCE) & (gain > LEAST)
    is_marked = is_significant.groupby(level="attack").any()
    columns = gain.groupby(level="attack")
    largest = gain.loc[columns.idxmax()].sort_values(ascending=False)
    found = []
    for (rival, attack), value in largest[largest > LEAST].items():
        points = f"{100 * value:.1f}"
        if is_marked[attack]:
            points = f"**{points}**"
        found.append(f"{attack} {points} ({rival})")
    return found, len(columns)


def other_comparisons() -> Iterator[Comparison]:
    """Yield the measurements that are no grids, those of one page after the other."""
    second = pd.read_csv(preregistered_2.TEST)
    yield from _by_setting(second, "data", "Second registered test", "#the-second-registered-test")

    places = pd.read_csv(BENCHMARK / "weak-places" / "values.csv")
    yield from _by_setting(places, "setting", "The present default", "#the-present-default")

    long = pd.read_csv(BENCHMARK / "long-training" / "values.csv")
    long = long.drop(columns=["accuracy", "success"], errors="ignore")
    long = long.rename(columns={"accuracy_1000": "accuracy", "success_1000": "success"})
    yield from _by_setting(long, "setting", "Long training, round 1,000", "#long-training")

    adaptive = pd.read_csv(BENCHMARK / "adaptive" / "values.csv")
    link = "#attackers-that-know-the-criterion"
    yield from _by_setting(adaptive, "setting", "Attackers that know the criterion", link)

    exits = pd.read_csv(trial.VALUES)
    exits = exits[exits.method.isin(["alone", "FedAssay"])].replace({"method": {"alone": ALONE}})
    yield from _by_setting(exits, "setting", "Trial", "#trial-of-training-alone")

    texts = pd.read_csv(BENCHMARK / "language-model" / "values.csv")
    link = "howto/language-model.md"
    yield from _by_setting(texts, "task", "Language model", link)

    yield from _by_setting(_owners(), "data", "Owners", "owners.md#gain-over-training-alone")
    yield from _by_setting(_board(), "data", "The board", "board.md")


def _by_setting(table: pd.DataFrame, setting: str, title: str, link: str) -> Iterator[Comparison]:
    """Yield one comparison per setting of a table of percentages."""
    names: Mapping[str, str] = {
        "method": "defence",
        "worst_accuracy": "accuracy_worst",
        "success": "attack_success_rate",
    }
    table = table.rename(columns=names)
    measured = [name for name in MEASURES if name in table]
    table = table.assign(**{name: table[name] / 100 for name in measured})
    # Without an attack there is nothing to succeed.
    success = table.attack_success_rate if "attack_success_rate" in table else None
    if success is not None:
        table = table.assign(attack_success_rate=success.mask(table.attack.isin(WITHOUT_ATTACK)))
    for name, rows in table.groupby(setting, sort=False):
        yield Comparison(f"{title}: {name}", rows[[*KEYS, *measured]], lambda _: link)


def _owners() -> pd.DataFrame:
    """Return accuracies of the method and of training alone, on the data with owners."""
    table = pd.read_csv(BENCHMARK / "owners" / "values.csv")
    table = table[table.unit == "%"].set_index("data")
    rows = []
    for attack, cell in {"none": "clean", "label flip": "flip"}.items():
        for method, column in {"FedAssay": cell, ALONE: "alone"}.items():
            values = {"accuracy": f"{column} mean", "worst_accuracy": f"{column} min"}
            part = pd.DataFrame({name: table[source] for name, source in values.items()})
            rows.append(part.assign(method=method, attack=attack, seed=0).reset_index())
    return pd.concat(rows)


def _board() -> pd.DataFrame:
    """Return the means of all entries on the board over the settings of a data set."""
    rows = []
    for entry in board.entries():
        settings = pd.DataFrame([row.model_dump() for row in entry.settings])
        means = settings.groupby("data")[["no_attack", "mean", "worst", "success"]].mean()
        for data, row in means.iterrows():
            values = {"data": data, "method": entry.title, "seed": 0}
            rows.append({**values, "attack": "no attack", "accuracy": row.no_attack})
            attacked = {
                "accuracy": row["mean"],
                "worst_accuracy": row.worst,
                "success": row.success,
            }
            rows.append({**values, "attack": "worst attack", **attacked})
    return pd.DataFrame(rows)

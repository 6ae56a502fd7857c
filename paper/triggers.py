"""Defences against triggers by data set, on seeds and images on which nothing was chosen.

    .venv/bin/python -m paper.triggers            # measure missing runs
    .venv/bin/python -m paper.triggers --time     # the time of a run, as a ratio
    .venv/bin/python -m paper.triggers --again exchange

Attackers poison half of their samples. EMNIST and Fashion-MNIST are read from the folder that
FEDCB2O_DATA names, and HAPT needs the extra `har`. The values are in
docs/benchmark/triggers/values.csv: percent over benign agents after the last round. An interrupted
measurement resumes.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
from paper import cells, last_layer, victims
from paper.cells import Cell
from paper.distil import DIGITS, EMNIST, FASHION, SMALL
from paper.last_layer import CLEAN, TRIGGERS, WINE
from paper.sentences import SENTENCES, WORDS

VALUES = Path(__file__).parents[1] / "docs" / "benchmark" / "triggers" / "values.csv"
SEEDS = (21, 22)
METHODS: dict[str, dict[str, Any]] = {
    "FedAssay": {"name": "fedassay"},
    "exchange": {"name": "fedassay", "guards": {"trigger_exchange": 5}},
    "last layer": last_layer.METHODS["last layer"],
    "both": {**last_layer.METHODS["last layer"], "guards": {"trigger_exchange": 5}},
}


def _attack(name: str, **size: int) -> dict[str, Any]:
    return {"attack": {**TRIGGERS[name], "share": 0.5, **size}}


IMAGES = {name: _attack(name) for name in TRIGGERS}
# Patches of few pixels hardly work in images of 28x28, defended or not.
LARGE = {
    "backdoor": IMAGES["backdoor"],
    "black square": IMAGES["black square"],
    "large backdoor": _attack("backdoor", size=4, margin=1),
    "waves": IMAGES["waves"],
    "large distributed": _attack("distributed", size=6),
    "large black square": _attack("black square", size=8),
}
FEATURES = {
    "three features": {
        "attack": {"name": "paper.last_layer:table_backdoor", "target": 1, "share": 0.5}
    },
    "edge case": {"attack": {"name": "edge_case", "target": 1, "share": 0.5}},
}
# The guard needs images.
TABLES = {"wine", "HAPT", "sentences"}
WITHOUT_BOTH = {"EMNIST", "Fashion-MNIST"}
SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "digits": (
        "digits-fedassay",
        {**DIGITS, "evaluate_on": "redrawn"},
        {**IMAGES, **victims.ATTACKS},
    ),
    "wine": ("digits-fedassay", {**WINE, "evaluate_on": "redrawn"}, FEATURES),
    "HAPT": ("har-fedassay", {"evaluate_on": "test"}, FEATURES),
    "sentences": ("digits-fedassay", {**SENTENCES, "evaluate_on": "redrawn"}, WORDS),
    "EMNIST": (SMALL, {**EMNIST, "evaluate_on": "redrawn"}, LARGE),
    "Fashion-MNIST": (
        SMALL,
        {**FASHION, "evaluate_on": "test", "agents.num_clusters": 1, "agents.malicious": 2},
        LARGE,
    ),
}


def methods_of(setting: str) -> list[str]:
    """Return the methods that are measured in a setting."""
    missing = {"exchange", "both"} if setting in TABLES else set[str]()
    if setting in WITHOUT_BOTH:
        missing = {"both"}
    return [method for method in METHODS if method not in missing]


def run_cell(cell: Cell) -> tuple[float, float]:
    """Return accuracy and attack success of a cell."""
    name, method, attack, seed = cell
    preset, changes, attacks = SETTINGS[name]
    # Without attack, success is that of the first trigger on honest models.
    attacked = attacks.get(attack) or {**CLEAN, **next(iter(attacks.values()))}
    changes = {**changes, **attacked, "algorithm": METHODS[method], "evaluate_every": 100}
    measure = victims.measure if attack in victims.ATTACKS else cells.measure
    return measure(preset, changes, seed)


def all_cells() -> list[Cell]:
    """Return the cells in the order of their measurement, methods next to each other."""
    return [
        (name, method, attack, seed)
        for name, (_, _, attacks) in SETTINGS.items()
        for seed in SEEDS
        for attack in ("none", *attacks)
        for method in methods_of(name)
        if method != "both" or seed == SEEDS[0]
    ]


def _complete_rows() -> pd.DataFrame:
    """Return the values of those seeds, by setting and attack, that all methods have.

    Both defences together have the first seed alone.
    """
    values = pd.read_csv(VALUES)
    is_both = values.method == "both"
    num_methods = (~is_both).groupby([values.setting, values.attack, values.seed]).transform("sum")
    return values[
        num_methods == values.setting.map(lambda name: len({*methods_of(name)} - {"both"}))
    ]


def triggers_table() -> pd.DataFrame:
    """Return the number of seeds, and accuracy / success by setting and attack, as text.

    A row has the seeds that all of its methods have, and is left out without any.
    """
    values = _complete_rows()
    row = ["setting", "attack"]
    means = values.groupby([*row, "method"])[list(cells.MEASURES)].mean().map("{:.1f}".format)
    is_clean = means.index.get_level_values("attack") == "none"
    text = (means.accuracy + " / " + means.success).where(~is_clean, means.accuracy)
    table = text.unstack().fillna("")
    table.insert(0, "seeds", values.groupby(row).seed.nunique().astype(str))
    rows = [
        (name, attack)
        for name, (_, _, attacks) in SETTINGS.items()
        for attack in ("none", *attacks)
        if (name, attack) in table.index
    ]
    table = table.loc[rows, ["seeds", *METHODS]]
    table.index = pd.Index([f"{name}: {attack}" for name, attack in rows])
    table = table.rename(columns={"both": f"both, seed {SEEDS[0]}"})
    return table.rename_axis("Setting: attack").rename_axis(columns=None)


def choice_table(bound: float = 20.0) -> pd.DataFrame:
    """Return what each defence costs and lets through, by setting and method, as text.

    Points are relative to FedAssay's accuracy on the same seeds.
    """
    values = _complete_rows()
    rows = {}
    for name, method in itertools.product(SETTINGS, METHODS):
        chosen = values[(values.setting == name) & (values.method == method)]
        success = chosen.groupby("attack").success.mean().drop("none", errors="ignore")
        clean = chosen[chosen.attack == "none"]
        if clean.empty or success.empty:
            continue
        plain = values.query("setting == @name and method == 'FedAssay' and attack == 'none'")
        difference = clean.set_index("seed").accuracy - plain.set_index("seed").accuracy
        seed = f", seed {SEEDS[0]}" if method == "both" else ""
        rows[f"{name}: {method}{seed}"] = {
            "accuracy without attack": f"{clean.accuracy.mean():.1f} ({difference.mean():+.1f})",
            f"attacks at most {bound:.0f}%": f"{(success <= bound).sum()} of {len(success)}",
            "largest success": f"{success.max():.0f} ({success.idxmax()})",
        }
    return pd.DataFrame(rows).T.rename_axis("Setting: defence")


def time_ratios(repetitions: int = 4) -> dict[str, float]:
    """Return the processor time of the exchange as a multiple of FedAssay's, runs by turns."""
    ratios = {}
    for attack in ("none", "backdoor"):
        seconds: dict[str, list[float]] = {"FedAssay": [], "exchange": []}
        for _ in range(repetitions):
            for method, values in seconds.items():
                start = time.process_time()
                run_cell(("digits", method, attack, SEEDS[0]))
                values.append(time.process_time() - start)
        medians = {method: statistics.median(values) for method, values in seconds.items()}
        ratios[attack] = medians["exchange"] / medians["FedAssay"]
    return ratios


def main() -> None:
    """Measure the missing runs."""
    if sys.argv[1:] == ["--time"]:
        print(time_ratios())
        return
    cells.remove_requested(VALUES, METHODS, __doc__)
    cells.measure_missing(VALUES, "setting", all_cells(), run_cell)


if __name__ == "__main__":
    main()

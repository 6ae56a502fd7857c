"""Ablation of FedAssay: the method without one part at a time, on tuning images.

    .venv/bin/python -m paper.distil            # measure missing runs, an hour on a quiet core
    .venv/bin/python -m paper.distil --table    # print the means; docs/results.md has the extremes

EMNIST and Fashion-MNIST are read from the folder that FEDCB2O_DATA names, or from the user's, and
HAPT needs the extra `har`. The values are in docs/benchmark/distil/values.csv, one row per setting,
method, attack and seed: percent over benign agents after the last round. Seeds and images are not
those of any result, except for the test samples of HAPT: data with owners have no tuning images.
Methods are measured next to each other, so that an interrupted measurement has pairs to compare.
"""

import argparse
import itertools
import os
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pandas as pd
from paper import cells
from paper.cells import Cell

import fedcb2o

VALUES = Path(__file__).parents[1] / "docs" / "benchmark" / "distil" / "values.csv"
SEEDS = (3000, 3001, 3002)
Changes = dict[str, Any]

METHODS: dict[str, Changes] = {
    "FedAssay": {},
    "without newcomer_share": {"algorithm.guards.newcomer_share": False},
    "without max_distance": {"algorithm.guards.max_distance": False},
    "without min_distance": {"algorithm.guards.min_distance": False},
    "without interpolation": {"algorithm.guards.interpolation": 1.0},
    "without loss_tolerance": {"algorithm.guards.loss_tolerance": False},
    "without rank_tolerance": {"algorithm.rank_tolerance": False},
    "without label_coverage": {"algorithm.label_coverage": 0.0},
    "without the sub-level set": {"algorithm.beta": 1.0},
    "without G": {"algorithm.alpha": 0.0},
    "without tau": {"algorithm.criterion": {"name": "class_loss_excess", "least_deviation": 0.0}},
    "class_loss_gap": {"algorithm.criterion": "class_loss_gap"},
    "average loss": {"algorithm.criterion": "average_loss"},
}
VARIANTS: dict[str, Changes] = {
    "interpolation 0.75": {"algorithm.guards.interpolation": 0.75},
    "slack 0": {"algorithm.criterion": {"name": "class_loss_excess", "slack": 0.0}},
    "alpha 0.5": {"algorithm.alpha": 0.5},
    "alpha 2": {"algorithm.alpha": 2.0},
}
"""Other settings, measured after the parts."""
FLIP = {"name": "label_flip", "source": 9, "target": 4}
ATTACKS: dict[str, Changes] = {
    "none": {"agents.malicious_role": "clean"},
    "removed": {"agents.malicious_role": "removed"},
    "label flip": {"attack": {"name": "label_flip", "source": 5, "target": 6}},
    "label flip 0-6": {"attack": {"name": "label_flip", "source": 0, "target": 6}},
    "label flip 3-4": {"attack": {"name": "label_flip", "source": 3, "target": 4}},
    "random models": {"attack": {"name": "random_model"}},
    "ALIE": {"attack": {"name": "alie", "estimated_from": "benign", "z": 1.5}},
    "dissensus": {"attack": {"name": "dissensus", "eps": 0.3}},
    "gossip attack": {"attack": {"name": "spectral", "eps": 0.3}},
    "sybils": {"attack": {**FLIP, "from_round": 12, "sybils": True}},
}


def settings_of_grid(name: str) -> Changes:
    """Return the data, agents, network and training of a grid, as changes of a preset.

    Args:
        name: Name of the grid.

    Returns:
        Values by dotted key.
    """
    file = Path(fedcb2o.__file__).parent / "experiments" / "grids" / f"{name}.toml"
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    changes: Changes = {"rounds": table["rounds"]}
    for section in ("data", "agents", "model", "training"):
        changes |= {f"{section}.{key}": value for key, value in table[section].items()}
    return changes


class Setting(NamedTuple):
    """Data and agents of one part of the ablation.

    Attributes:
        preset: Preset that the setting changes.
        changes: Its changes.
        attacks: Attacks that are measured.
        seeds: Seeds.
    """

    preset: str
    changes: Changes
    attacks: tuple[str, ...]
    seeds: tuple[int, ...] = SEEDS


def skewed(concentration: float) -> Changes:
    """Return digits with label proportions from a Dirichlet distribution."""
    return {**DIGITS, "agents.skew": {"name": "dirichlet", "concentration": concentration}}


DIGITS: Changes = {"agents.benign": 7, "agents.malicious": 3}
TWO_CLASSES: Changes = {**DIGITS, "agents.skew": {"name": "shards", "classes": 2}}
FASHION: Changes = {
    **settings_of_grid("fashion-all-data"),
    "attack": {"name": "label_flip", "source": 0, "target": 6},
}
EMNIST = settings_of_grid("emnist-all-data")
SMALL = "emnist-small-fedassay"
ELSEWHERE = {"removed", "label flip 0-6", "label flip 3-4"}
DIGITS_ATTACKS = tuple(attack for attack in ATTACKS if attack not in ELSEWHERE)
SKEW_ATTACKS = ("none", "label flip", "random models")
SETTINGS: dict[str, Setting] = {
    "digits": Setting("digits-fedassay", DIGITS, DIGITS_ATTACKS),
    "torus": Setting("digits-fedassay", {**DIGITS, "agents.graph": "torus"}, SKEW_ATTACKS[:2]),
    "Dirichlet 0.5": Setting("digits-fedassay", skewed(0.5), SKEW_ATTACKS),
    "two classes": Setting("digits-fedassay", TWO_CLASSES, SKEW_ATTACKS),
    "half attack, 150 rounds": Setting("digits-fedassay", {"rounds": 150}, ("label flip",)),
    "EMNIST": Setting(SMALL, EMNIST, ("none", "label flip"), SEEDS[:1]),
    "Fashion-MNIST": Setting(
        SMALL, FASHION, ("none", "removed", "label flip 0-6", "ALIE"), SEEDS[:1]
    ),
    # Data of owners have no tuning part.
    "HAPT": Setting("har-fedassay", {"evaluate_on": "test"}, ("none", "label flip 3-4"), SEEDS[:2]),
}


def measure(cell: Cell) -> tuple[float, float]:
    """Return accuracy and attack success of a cell."""
    setting, method, attack, seed = cell
    part = SETTINGS[setting]
    changes = {
        "evaluate_every": part.changes.get("rounds", 25),
        **part.changes,
        **(METHODS | VARIANTS)[method],
        **ATTACKS[attack],
    }
    return cells.measure(part.preset, changes, seed)


def paired_means() -> pd.DataFrame:
    """Return means by setting, attack and method, over the seeds that most methods have.

    A seed that few methods have would set their means apart.
    """
    table = pd.read_csv(VALUES)
    methods = table.groupby(["setting", "attack", "seed"]).method.transform("nunique")
    most = methods.groupby([table.setting, table.attack]).transform("max")
    return (
        table[methods == most].groupby(["setting", "attack", "method"])[list(cells.MEASURES)].mean()
    )


def ablation_table() -> pd.DataFrame:
    """Return what leaving out a part costs and gains at most, in points and where, as text.

    Success without an attack is left aside.
    """
    means = paired_means()
    changes = means - means.xs("FedAssay", level="method")
    is_clean = changes.index.get_level_values("attack").isin(["none", "removed"])
    changes.loc[is_clean, "success"] = float("nan")
    rows = {}
    for method in METHODS:
        if not method.startswith("without"):
            continue
        own = changes.xs(method, level="method")
        rows[method.removeprefix("without ")] = {
            "accuracy lost at most": _extreme(-own.accuracy),
            "accuracy gained at most": _extreme(own.accuracy),
            "success added at most": _extreme(own.success),
            "success removed at most": _extreme(-own.success),
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("Left out")


def _extreme(points: pd.Series) -> str:
    """Return the largest of some differences, if it is positive, and its setting and attack."""
    setting, attack = points.idxmax()
    return f"{points.max():.1f} ({setting}, {attack})" if points.max() > 0 else ""


def main() -> None:
    """Measure missing runs, or print the means."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true")
    if parser.parse_args().table:
        table = paired_means().reset_index()
        for measured in cells.MEASURES:
            means = table.pivot_table(
                index="method", columns=["setting", "attack"], values=measured, sort=False
            )
            print(f"{measured}\n{means.round(1).to_string()}\n")
        return

    for methods, (setting, part) in itertools.product((METHODS, VARIANTS), SETTINGS.items()):
        neighbours = (
            (setting, method, attack, seed)
            for seed, attack, method in itertools.product(part.seeds, part.attacks, methods)
        )
        cells.measure_missing(VALUES, "setting", neighbours, measure)


if __name__ == "__main__":
    main()

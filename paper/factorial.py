"""What each choice that FedCB2O leaves open does, and which of them act together: a factorial on tuning images.

    .venv/bin/python paper/factorial.py digits      # measure what is missing, about an hour on two quiet cores
    .venv/bin/python paper/factorial.py digits --tables

Every seed runs a fractional factorial of resolution IV: a Hadamard matrix of order 16 folded over, that is with its
negative, 32 runs, whose columns are given to factors, and turned, by the seed. So within each seed a main effect is
orthogonal to the others and to interactions of two, and is the mean over seeds of what they found, with Student's
interval. Interactions of two factors, which a seed alone confounds, are fitted over all seeds by least squares. All
settings share the seeds. On Fashion-MNIST a seed runs four of the 32, and main effects are fitted too.
Effects are those of the second level against the first, in percent of benign agents' accuracy or attack success after
the last round.
"""

import argparse
import csv
import itertools
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a run a core

import numpy as np
import pandas as pd
from scipy import linalg, stats

import fedcb2o
from fedcb2o.experiments.config.tables import merge
from fedcb2o.report.statistics import format_interval, holm_correction, interval_half_width

RAW = Path(__file__).parents[1] / "docs" / "benchmark" / "factorial"
FLIP = {"name": "label_flip", "source": 3, "target": 8}
Tables = dict[str, Any]

SEEDS = range(1000, 1020)
"""The seeds on which FedCB2O is tuned; no reported number is of these."""

FACTORS: dict[str, tuple[Tables, Tables]] = {
    "split = released": ({}, {"agents": {"split": "released"}}),
    "own candidate": ({}, {"algorithm": {"own_candidate": True}}),
    "first contact whole": ({}, {"algorithm": {"first_contact": "whole"}}),
    "absent classes 0": ({}, {"algorithm": {"criterion": {"absent": "zero"}}}),
    "validation by batches": ({}, {"agents": {"validation_loss": "batches"}}),
    "own model judged": ({}, {"algorithm": {"own_model": "judged"}}),
    "beta 0.5": ({}, {"algorithm": {"beta": 0.5}}),
    "newcomers 1/3": (
        {},
        {"algorithm": {"selection": {"name": "prob_sampling", "newcomers": 1 / 3}}},
    ),
    "T_G = 5": ({}, {"algorithm": {"criterion_from_round": 5}}),
    "alpha 5": ({"algorithm": {"alpha": 2.0}}, {"algorithm": {"alpha": 5.0}}),
    "tested 2": ({}, {"algorithm": {"tested": 2.0}}),
    "judged half-way": ({}, {"algorithm": {"judged_at": 0.5}}),
    "gap tested, to the majority": (
        {},
        {"algorithm": {"criterion": {"z": 2.0, "against": "majority"}}},
    ),
    "record of L and G": ({}, {"algorithm": {"likelihood": "loss+criterion"}}),
    "ball 1.3": ({}, {"algorithm": {"ball": 1.3}}),
}


class Study(NamedTuple):
    """What is measured: the tables that all runs share, those of each setting, and how many rows of its
    design a seed runs."""

    shared: Tables
    settings: dict[str, Tables]
    rows: int = 32


CLEAN = {"malicious_role": "clean"}
DIRICHLET = {"skew": {"name": "dirichlet", "concentration": 0.5}}
ATTACKS: dict[str, Tables] = {
    "none": {"agents": CLEAN},
    "flip": {"attack": FLIP},
    "sybils": {"attack": {**FLIP, "from_round": 12, "sybils": True}},
    "trash": {"attack": {"name": "trash"}},
}
STUDIES = {
    "digits": Study(
        {"extends": "digits-fedcb2o-trusted", "agents": {"benign": 7, "malicious": 3}},
        {
            **ATTACKS,
            "skew, none": {"agents": {**CLEAN, **DIRICHLET}},
            "skew, flip": {"agents": DIRICHLET, "attack": FLIP},
        },
    ),
    "fashion": Study(
        {
            "extends": "emnist-small-fedcb2o-trusted",
            "rounds": 20,
            "data": {"name": "fashion_mnist", "train_per_class": 600, "test_per_class": 200},
            "agents": {
                "benign": 5,
                "malicious": 2,
                "benign_samples": 120,
                "malicious_samples": 300,
                "validation": 0.3,
                "budget": 5,
            },
            "model": {"name": "cnn", "channels": [8, 16], "hidden": 60, "down": "stride"},
            "training": {"gamma": 0.1, "batch_size": 32, "local_epochs": 1, "precision": "float32"},
        },
        {
            "none": {**ATTACKS["none"], "attack": FLIP},
            **{name: ATTACKS[name] for name in ("flip", "trash")},
        },
        rows=4,
    ),
}


def design(seed: int) -> np.ndarray:
    """The levels, -1 and 1, of the factors [32, factors] that a seed runs."""
    draw = np.random.default_rng(seed)
    half = linalg.hadamard(16)
    columns = draw.permutation(16)[: len(FACTORS)]
    turned = np.vstack([half, -half])[:, columns] * draw.choice([-1, 1], len(FACTORS))
    return draw.permutation(turned)


class Job(NamedTuple):
    """A run: `levels` is a sign for each factor."""

    study: str
    setting: str
    seed: int
    levels: str


def jobs(study: str) -> Iterator[Job]:
    """All runs of a study."""
    for seed, setting in itertools.product(SEEDS, STUDIES[study].settings):
        for row in design(seed)[: STUDIES[study].rows]:
            yield Job(study, setting, seed, "".join("+" if level > 0 else "-" for level in row))


def experiment(job: Job) -> Tables:
    """The configuration of a run."""
    study = STUDIES[job.study]
    tables: Tables = {
        "name": "run",
        "evaluate_on": "tuning",
        "algorithm": {"criterion": {"name": "class_loss_gap"}},
    }
    chosen = [
        levels[sign == "+"] for levels, sign in zip(FACTORS.values(), job.levels, strict=True)
    ]
    for more in (study.shared, *chosen, study.settings[job.setting]):
        tables = merge(tables, more)
    rounds = tables.get("rounds", 25)
    return {**tables, "evaluate_every": rounds, "checkpoint_every": rounds}


def measure(job: Job) -> tuple[float, float]:
    """Accuracy and attack success, if any, of a run."""
    with tempfile.TemporaryDirectory() as folder:
        run = fedcb2o.run(
            experiment(job), out=f"{folder}/run", seeds=[job.seed], workers=1, watch=lambda *_: None
        )
        last = run.records[~run.records.malicious & (run.records["round"] == run.config["rounds"])]
        success = last.attack_success_rate.mean() if "attack_success_rate" in last else float("nan")
    return 100 * float(last.accuracy.mean()), 100 * float(success)


def measured(study: str) -> pd.DataFrame:
    """All runs that there are."""
    return pd.read_csv(RAW / f"{study}.csv", dtype={"levels": str})


def run_missing(study: str) -> None:
    """Measure what is missing, and write it down run by run."""
    path = RAW / f"{study}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text("setting,seed,levels,accuracy,success\n")
    done = set(measured(study)[["setting", "seed", "levels"]].itertuples(index=False, name=None))
    missing = [job for job in jobs(study) if job[1:] not in done]
    with ProcessPoolExecutor(os.cpu_count()) as pool, path.open("a", newline="") as file:
        for k, (job, found) in enumerate(zip(missing, pool.map(measure, missing), strict=True)):
            csv.writer(file).writerow([*job[1:], *(f"{value:.4f}" for value in found)])
            file.flush()
            print(f"{k + 1} of {len(missing)}: {job.setting}, seed {job.seed}", flush=True)


def main_effects(rows: pd.DataFrame, value: str) -> pd.DataFrame:
    """The effect of each factor in a setting, with Student's 95% interval over seeds [factors x mean, low, high]; where
    a seed does a part of its rows, by least squares beside seeds."""
    levels = _levels(rows)
    names = list(FACTORS)
    if rows.groupby("seed").size().min() < 32:
        return _fitted(levels, rows, value, names).drop(columns="p")
    each = []
    for seed in sorted(set(rows.seed)):
        here = (rows.seed == seed).to_numpy()
        x = levels[here]
        y = rows[value].to_numpy()[here]
        each.append([y[column > 0].mean() - y[column < 0].mean() for column in x.T])
    mean = np.mean(each, 0)
    half = interval_half_width(len(each), np.std(each, 0, ddof=1))
    return pd.DataFrame({"mean": mean, "low": mean - half, "high": mean + half}, index=names)


def interactions(rows: pd.DataFrame, value: str) -> pd.DataFrame:
    """By how much a factor's effect is larger at another's second level than at its first, halved; by least squares
    beside main effects and seeds, with Student's 95% interval [pairs x mean, low, high, p]."""
    levels = _levels(rows)
    pairs = list(itertools.combinations(FACTORS, 2))
    places = {name: i for i, name in enumerate(FACTORS)}
    both = np.stack([levels[:, places[a]] * levels[:, places[b]] for a, b in pairs], 1)
    names = [f"{a} x {b}" for a, b in pairs]
    return _fitted(np.hstack([both, levels]), rows, value, [*names, *FACTORS]).loc[names]


def _fitted(x: np.ndarray, rows: pd.DataFrame, value: str, names: list[str]) -> pd.DataFrame:
    """Twice the coefficients of some columns of -1 and 1, beside one for each seed."""
    all_columns = np.hstack([x, pd.get_dummies(rows.seed).to_numpy(float)])
    y = rows[value].to_numpy()
    inverse = np.linalg.pinv(all_columns.T @ all_columns)
    found = inverse @ all_columns.T @ y
    freedom = len(y) - np.linalg.matrix_rank(all_columns)
    error = (np.square(y - all_columns @ found).sum() / freedom * np.diag(inverse)) ** 0.5
    mean, error = (2 * each[: x.shape[1]] for each in (found, error))
    half = stats.t.ppf(0.975, freedom) * error
    p = 2 * stats.t.sf(abs(mean / error), freedom)
    return pd.DataFrame(
        {"mean": mean, "low": mean - half, "high": mean + half, "p": p}, index=names
    )


def _levels(rows: pd.DataFrame) -> np.ndarray:
    return np.array([[1 if sign == "+" else -1 for sign in levels] for levels in rows.levels])


def tables(study: str) -> list[str]:
    """As lines of Markdown, main effects, a column a setting and value, and where there are enough rows to tell them
    apart the interactions that hold after Holm's correction over those of a column."""
    rows = measured(study)
    columns: dict[str, tuple[pd.DataFrame, str]] = {}
    for setting, value in itertools.product(STUDIES[study].settings, ("accuracy", "success")):
        here = rows[rows.setting == setting].reset_index(drop=True)
        attacked = not setting.endswith("none") and here.success.notna().all()
        if value == "accuracy" or attacked:
            columns[f"{setting}: {value}"] = here, value
    effects = [main_effects(*column) for column in columns.values()]
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    lines += [
        f"| {factor} | {' | '.join(_cell(each.loc[factor]) for each in effects)} |"
        for factor in FACTORS
    ]
    if STUDIES[study].rows < 32:
        return lines
    lines += ["", "| | both | effect |", "|---|---|---:|"]
    for name, column in columns.items():
        found = interactions(*column)
        found = found[holm_correction(found.p) < 0.05].sort_values("mean", key=abs, ascending=False)
        lines += [f"| {name} | {pair} | {_cell(each)} |" for pair, each in found.iterrows()]
    return lines


def _cell(effect: "pd.Series[float]") -> str:
    return format_interval(effect["mean"], effect.low, effect.high, sign="+")


def main() -> None:
    """Measure, or print the tables of what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument(
        "--tables", action="store_true", help="only print the tables of what there is"
    )
    asked = parser.parse_args()
    if not asked.tables:
        run_missing(asked.study)
    print("\n".join(tables(asked.study)))


if __name__ == "__main__":
    main()

"""Effects and interactions of FedCB2O's open choices: a factorial on tuning images.

    .venv/bin/python paper/factorial.py digits  # measure missing runs; an hour on two idle cores
    .venv/bin/python paper/factorial.py digits --tables

Every seed runs a fractional factorial of resolution IV with 32 runs: a Hadamard matrix of order 16
and its negative. The seed assigns columns to factors and draws their signs. Within a seed a main
effect is therefore orthogonal to the other main effects and to interactions of two factors. It is
estimated as the mean over seeds, with Student's interval. Interactions of two factors, which are
confounded within a seed, are fitted over all seeds by least squares. All settings share the seeds.
On Fashion-MNIST a seed runs four of the 32, and main effects are fitted too.

Effects are those of the second level against the first, in percent of benign agents' accuracy or
attack success after the last round.
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

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one run per core

import numpy as np
import pandas as pd
from scipy import linalg, stats

import fedcb2o
from fedcb2o.experiments.config.tables import merge
from fedcb2o.report._statistics import format_interval, holm_correction, interval_half_width

DATA = Path(__file__).parents[1] / "docs" / "benchmark" / "factorial"
FLIP = {"name": "label_flip", "source": 3, "target": 8}
NUM_ROWS = 32
Tables = dict[str, Any]

SEEDS = range(1000, 1020)
"""The tuning seeds of FedCB2O; no reported number is of these."""

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
        {"algorithm": {"guards": {"newcomer_share": 1 / 3}}},
    ),
    "T_G = 5": ({}, {"algorithm": {"criterion_from_round": 5}}),
    "alpha 5": ({"algorithm": {"alpha": 2.0}}, {"algorithm": {"alpha": 5.0}}),
    "tested 2": ({}, {"algorithm": {"guards": {"loss_tolerance": 2.0}}}),
    "judged half-way": ({}, {"algorithm": {"guards": {"interpolation": 0.5}}}),
    "ball 1.3": ({}, {"algorithm": {"guards": {"max_distance": 1.3}}}),
}


class Study(NamedTuple):
    """Common tables of all runs, tables of each setting, and design rows per seed."""

    shared: Tables
    settings: dict[str, Tables]
    rows: int = NUM_ROWS


CLEAN = {"malicious_role": "clean"}
DIRICHLET = {"skew": {"name": "dirichlet", "concentration": 0.5}}
ATTACKS: dict[str, Tables] = {
    "none": {"agents": CLEAN},
    "flip": {"attack": FLIP},
    "sybils": {"attack": {**FLIP, "from_round": 12, "sybils": True}},
    "trash": {"attack": {"name": "random_model"}},
}
STUDIES = {
    "digits": Study(
        {
            "extends": "digits-fedcb2o-paper",
            "agents": {"benign": 7, "malicious": 3, "colluders_own_model": True},
            "algorithm": {"own_model": "trusted", "mixing_factor": 1.0, "alpha": 2.0},
        },
        {
            **ATTACKS,
            "skew, none": {"agents": {**CLEAN, **DIRICHLET}},
            "skew, flip": {"agents": DIRICHLET, "attack": FLIP},
        },
    ),
    "fashion": Study(
        {
            "extends": "emnist-small-fedcb2o-paper",
            "algorithm": {"own_model": "trusted", "mixing_factor": 1.0},
            "rounds": 20,
            "data": {"name": "fashion_mnist", "train_per_class": 600, "test_per_class": 200},
            "agents": {
                **{"benign": 5, "malicious": 2, "benign_samples": 120, "malicious_samples": 300},
                **{"validation": 0.3, "budget": 5, "colluders_own_model": True},
            },
            "model": {"name": "cnn", "channels": [8, 16], "hidden": 60, "down": "stride"},
            "training": {"gamma": 0.1, "batch_size": 32, "local_epochs": 1, "precision": "float32"},
        },
        {
            "none": {**ATTACKS["none"], "attack": FLIP},
            "flip": ATTACKS["flip"],
            "trash": ATTACKS["trash"],
        },
        rows=4,
    ),
}


def design(seed: int) -> np.ndarray:
    """Return the factor levels of a seed's runs, -1 or 1, shape [32, factors]."""
    draw = np.random.default_rng(seed)
    half = linalg.hadamard(16)
    columns = draw.permutation(16)[: len(FACTORS)]
    levels = np.vstack([half, -half])[:, columns] * draw.choice([-1, 1], len(FACTORS))
    return draw.permutation(levels)


class Job(NamedTuple):
    """A run; `levels` has one sign per factor."""

    study: str
    setting: str
    seed: int
    levels: str


def jobs(study: str) -> Iterator[Job]:
    """Yield all runs of a study."""
    for seed, setting in itertools.product(SEEDS, STUDIES[study].settings):
        for row in design(seed)[: STUDIES[study].rows]:
            yield Job(study, setting, seed, "".join("+" if level > 0 else "-" for level in row))


def experiment(job: Job) -> Tables:
    """Return the configuration of a run."""
    study = STUDIES[job.study]
    tables: Tables = {
        "name": "run",
        "evaluate_on": "tuning",
        "algorithm": {"criterion": {"name": "class_loss_gap"}},
    }
    levels = [pair[sign == "+"] for pair, sign in zip(FACTORS.values(), job.levels, strict=True)]
    for changes in (study.shared, *levels, study.settings[job.setting]):
        tables = merge(tables, changes)
    rounds = tables.get("rounds", 25)
    return {**tables, "evaluate_every": rounds, "checkpoint_every": rounds}


def measure(job: Job) -> tuple[float, float]:
    """Return accuracy and attack success of a run, in percent; NaN without attack."""
    with tempfile.TemporaryDirectory() as folder:
        run = fedcb2o.run(
            experiment(job), out=f"{folder}/run", seeds=[job.seed], workers=1, watch=lambda *_: None
        )
        last = run.records[~run.records.malicious & (run.records["round"] == run.config["rounds"])]
        success = float("nan")
        if "attack_success_rate" in last:
            success = last.attack_success_rate.mean()
    return 100 * float(last.accuracy.mean()), 100 * float(success)


def measured(study: str) -> pd.DataFrame:
    """Read all measured runs."""
    return pd.read_csv(DATA / f"{study}.csv", dtype={"levels": str})


def run_missing(study: str) -> None:
    """Measure missing runs and append each to the file."""
    path = DATA / f"{study}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text("setting,seed,levels,accuracy,success\n")
    done = set(measured(study)[["setting", "seed", "levels"]].itertuples(index=False, name=None))
    missing = [job for job in jobs(study) if job[1:] not in done]
    with ProcessPoolExecutor(os.cpu_count()) as pool, path.open("a", newline="") as file:
        for k, (job, values) in enumerate(zip(missing, pool.map(measure, missing), strict=True)):
            csv.writer(file).writerow([*job[1:], *(f"{value:.4f}" for value in values)])
            file.flush()
            print(f"{k + 1} of {len(missing)}: {job.setting}, seed {job.seed}", flush=True)


def main_effects(rows: pd.DataFrame, value: str) -> pd.DataFrame:
    """Estimate the effect of each factor in a setting, with Student's 95% interval over seeds.

    Seeds with incomplete designs are fitted by least squares with one intercept per seed.
    """
    levels = _levels(rows)
    names = list(FACTORS)
    if rows.groupby("seed").size().min() < NUM_ROWS:
        return _least_squares(levels, rows, value, names).drop(columns="p")

    effects = []
    for seed in sorted(set(rows.seed)):
        in_seed = (rows.seed == seed).to_numpy()
        y = rows[value].to_numpy()[in_seed]
        effects.append(
            [y[column > 0].mean() - y[column < 0].mean() for column in levels[in_seed].T]
        )
    mean = np.mean(effects, 0)
    half = interval_half_width(len(effects), np.std(effects, 0, ddof=1))
    return pd.DataFrame({"mean": mean, "low": mean - half, "high": mean + half}, index=names)


def interactions(rows: pd.DataFrame, value: str) -> pd.DataFrame:
    """Estimate all interactions of two factors, with Student's 95% interval and p-value.

    An interaction is half the difference of a factor's effects at both levels of the other. The
    least-squares fit includes main effects and one intercept per seed.
    """
    levels = _levels(rows)
    pairs = list(itertools.combinations(range(len(FACTORS)), 2))
    products = np.stack([levels[:, a] * levels[:, b] for a, b in pairs], 1)
    factors = list(FACTORS)
    names = [f"{factors[a]} x {factors[b]}" for a, b in pairs]
    return _least_squares(np.hstack([products, levels]), rows, value, [*names, *factors]).loc[names]


def _least_squares(x: np.ndarray, rows: pd.DataFrame, value: str, names: list[str]) -> pd.DataFrame:
    """Return twice the coefficients of columns of -1 and 1, with one intercept per seed."""
    columns = np.hstack([x, pd.get_dummies(rows.seed).to_numpy(float)])
    y = rows[value].to_numpy()
    inverse = np.linalg.pinv(columns.T @ columns)
    coefficients = inverse @ columns.T @ y
    freedom = len(y) - np.linalg.matrix_rank(columns)
    error = (np.square(y - columns @ coefficients).sum() / freedom * np.diag(inverse)) ** 0.5
    mean = 2 * coefficients[: x.shape[1]]
    error = 2 * error[: x.shape[1]]
    half = stats.t.ppf(0.975, freedom) * error
    p = 2 * stats.t.sf(abs(mean / error), freedom)
    return pd.DataFrame(
        {"mean": mean, "low": mean - half, "high": mean + half, "p": p}, index=names
    )


def _levels(rows: pd.DataFrame) -> np.ndarray:
    return np.array([[1 if sign == "+" else -1 for sign in levels] for levels in rows.levels])


def tables(study: str) -> list[str]:
    """Format main effects and significant interactions as lines of Markdown.

    Interactions are shown for complete designs, if they are significant after Holm's correction
    within a column.
    """
    rows = measured(study)
    columns: dict[str, tuple[pd.DataFrame, str]] = {}
    for setting, value in itertools.product(STUDIES[study].settings, ("accuracy", "success")):
        in_setting = rows[rows.setting == setting].reset_index(drop=True)
        is_attacked = not setting.endswith("none") and in_setting.success.notna().all()
        if value == "accuracy" or is_attacked:
            columns[f"{setting}: {value}"] = (in_setting, value)

    effects = [main_effects(*column) for column in columns.values()]
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for factor in FACTORS:
        lines.append(f"| {factor} | {' | '.join(_cell(table.loc[factor]) for table in effects)} |")
    if STUDIES[study].rows < NUM_ROWS:
        return lines

    lines += ["", "| | both | effect |", "|---|---|---:|"]
    for name, column in columns.items():
        table = interactions(*column)
        table = table[holm_correction(table.p) < 0.05].sort_values("mean", key=abs, ascending=False)
        lines += [f"| {name} | {pair} | {_cell(effect)} |" for pair, effect in table.iterrows()]
    return lines


def _cell(effect: "pd.Series[float]") -> str:
    return format_interval(effect["mean"], effect.low, effect.high, sign="+")


def main() -> None:
    """Measure missing runs and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument(
        "--tables", action="store_true", help="only print the tables of measured runs"
    )
    arguments = parser.parse_args()
    if not arguments.tables:
        run_missing(arguments.study)
    print("\n".join(tables(arguments.study)))


if __name__ == "__main__":
    main()

"""`fedcb2o.minimize` and other optimisers on COCO's constrained functions.

    python -m venv coco && coco/bin/pip install fedcb2o coco-experiment==2.8.2 cma==4.5.0 cbx==1.0.4
    coco/bin/python benchmarks/coco.py --quick          # two minutes
    coco/bin/python benchmarks/coco.py                  # all values; continues where it stopped
    python benchmarks/coco.py --table                   # the table of docs/particles.md

`bbob-constrained` (Dufosse, Hansen, Brockhoff, Sampaio, Atamna and Auger, "Building scalable test
problems for benchmarking constrained optimizers", 2022): 54 functions with 1 to 54 constraints in
[-5, 5]^d. All methods have their defaults and the same evaluations of f with its constraints. A
method solves a function to a gap if it judged a feasible point with f - f* <= gap. The settings of
`minimize` were chosen on instance 1 in d = 2 and 5 alone, so that instances 2 to 6 judge.

- fedcb2o: L is the sum of squared violations, G is f.
- fedcb2o, paper: the same with the dynamics of the paper and its defaults.
- DE: SciPy's differential evolution of f + 1000 times the sum of violations.
- pycma: CMA-ES with its augmented Lagrangian, which sees every constraint, restarted.
- cbx: CBO of the same penalised function as DE. CBXPy's constrained dynamics need derivatives of
  one equality constraint, which the suite does not have.
- random: uniform points.

`--corrupt 0.2` replaces a random fifth of all evaluations by those of random points.
"""

import argparse
import contextlib
import csv
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from page_table import write_table

FOLDER = Path(__file__).resolve().parent
VALUES = FOLDER / "coco.csv"
PAGE = FOLDER.parent / "docs" / "particles.md"
MARKS = ("<!-- coco -->", "<!-- /coco -->")
GAPS = (10.0, 1.0, 0.1, 0.01)
EVALUATIONS_PER_DIM = {2: 1000, 3: 1000, 5: 1000, 10: 2000}
PENALTY = 1000.0
METHODS = ("fedcb2o", "DE", "pycma", "cbx", "random", "fedcb2o, paper")
# Dimension, instances, seeds of each, share of corrupted evaluations, methods.
PLAN: tuple[tuple[int, range, int, float, tuple[str, ...]], ...] = (
    (2, range(2, 3), 1, 0.0, METHODS[:5]),
    (5, range(2, 3), 1, 0.0, METHODS[:2]),
    (2, range(2, 3), 1, 0.2, METHODS[:3]),
    (10, range(2, 3), 1, 0.0, METHODS[:2]),
    (2, range(2, 3), 1, 0.1, METHODS[:3]),
    (2, range(2, 7), 1, 0.0, METHODS[:2]),
    (3, range(2, 3), 1, 0.0, METHODS[:2]),
    (5, range(2, 3), 1, 0.0, METHODS[2:5]),
    (2, range(2, 3), 1, 0.0, METHODS[5:]),
    (5, range(2, 7), 5, 0.0, METHODS[:2]),
    (10, range(2, 7), 5, 0.0, METHODS[:2]),
    (3, range(2, 7), 5, 0.0, METHODS[:2]),
    (2, range(2, 7), 5, 0.0, METHODS[:5]),
)
QUICK = ((2, range(2, 3), 1, 0.0, METHODS[:5]),)


class SpentError(Exception):
    """Signal of a spent budget."""


class Function:
    """A function of the suite that counts, corrupts and judges evaluations."""

    def __init__(self, problem: Any, evaluations: int, corrupt: float, seed: int) -> None:
        problem._best_parameter("print")
        self.problem = problem
        self.dim = problem.dimension
        self.least = problem(np.loadtxt("._bbob_problem_best_parameter.txt"))
        self.left = evaluations
        self.evaluations = evaluations
        self.corrupt = corrupt
        self.generator = np.random.default_rng((seed, 77))
        self.is_feasible = False
        self.best = np.inf

    def __call__(self, x: Any) -> tuple[float, np.ndarray]:
        """Return f and the violations, and judge the point by its true values."""
        if self.left <= 0:
            raise SpentError
        self.left -= 1
        x = np.asarray(x, float)
        f = self.problem(x)
        violations = np.maximum(self.problem.constraint(x), 0)
        if not violations.any():
            self.is_feasible = True
            self.best = min(self.best, f)
        if self.corrupt and self.generator.random() < self.corrupt:
            other = self.generator.uniform(-5, 5, self.dim)
            return self.problem(other), np.maximum(self.problem.constraint(other), 0)
        return f, violations

    def penalised(self, x: Any) -> float:
        """Return f + 1000 times the sum of violations."""
        f, violations = self(x)
        return float(f + PENALTY * violations.sum())


def run_fedcb2o(function: Function, seed: int, **settings: Any) -> None:
    """Minimise by this library."""
    import fedcb2o

    values = {}

    def lower(points: np.ndarray) -> np.ndarray:
        values.clear()
        out = np.empty(len(points))
        for i, x in enumerate(points):
            values[i], violations = function(x)
            out[i] = np.square(violations).sum()
        return out

    def upper(points: np.ndarray) -> np.ndarray:
        return np.array([values[i] for i in range(len(points))])

    fedcb2o.minimize(
        fedcb2o.from_numpy(lower),
        fedcb2o.from_numpy(upper),
        bounds=[(-5, 5)] * function.dim,
        maxfev=function.evaluations,
        seed=seed,
        **settings,
    )


def run_paper(function: Function, seed: int) -> None:
    """Minimise by the dynamics of the paper."""
    run_fedcb2o(function, seed, dynamics="paper", maxiter=10**6)


def run_differential_evolution(function: Function, seed: int) -> None:
    """Minimise by SciPy."""
    from scipy.optimize import differential_evolution

    box = [(-5, 5)] * function.dim
    while True:
        differential_evolution(
            function.penalised, box, rng=seed, maxiter=10**6, tol=0, polish=False
        )
        seed += 1000


def run_pycma(function: Function, seed: int) -> None:
    """Minimise by pycma's augmented Lagrangian."""
    import cma

    generator = np.random.default_rng(seed)
    violations: dict[bytes, Any] = {}

    def objective(x: np.ndarray) -> float:
        f, values = function(x)
        inner = function.problem.constraint(np.asarray(x, float))
        violations[x.tobytes()] = np.where(values > 0, values, np.minimum(inner, 0))
        return f

    def constraints(x: np.ndarray) -> list[float]:
        if x.tobytes() not in violations:
            objective(x)
        return list(violations[x.tobytes()])

    while True:
        cma.fmin_con2(
            objective,
            generator.uniform(-5, 5, function.dim),
            2.0,
            constraints=constraints,
            options={
                "verbose": -9,
                "seed": int(generator.integers(1, 10**6)),
                "maxfevals": function.left,
            },
        )


def run_cbx(function: Function, seed: int) -> None:
    """Minimise by CBXPy."""
    from cbx.dynamics import CBO

    def objective(x: np.ndarray) -> np.ndarray:
        values = [function.penalised(point) for point in x.reshape(-1, function.dim)]
        return np.array(values).reshape(x.shape[:-1])

    start = np.random.default_rng(seed).uniform(-5, 5, (1, 50, function.dim))
    settings = {"noise": "anisotropic", "dt": 0.1, "sigma": 1.0, "alpha": 1000.0}
    np.random.seed(seed)  # noqa: NPY002  CBXPy draws its noise there
    CBO(objective, x=start, f_dim="3D", max_it=10**6, verbosity=0, **settings).optimize()


def run_random(function: Function, seed: int) -> None:
    """Judge uniform points."""
    generator = np.random.default_rng(seed)
    while True:
        function(generator.uniform(-5, 5, function.dim))


RUNNERS: dict[str, Callable[[Function, int], None]] = dict(
    zip(
        METHODS,
        (run_fedcb2o, run_differential_evolution, run_pycma, run_cbx, run_random, run_paper),
        strict=True,
    )
)


def measure(plan: Any, log: Path) -> None:
    """Run all missing runs of a plan, and append one line for each to the log."""
    import cocoex

    done = set()
    if log.exists():
        done = {json.loads(line)["key"] for line in log.read_text().splitlines()}
    with log.open("a") as lines:
        for dim, instances, seeds, corrupt, methods in plan:
            suite = cocoex.Suite(
                "bbob-constrained",
                f"instances:{instances.start}-{instances.stop - 1}",
                f"dimensions:{dim}",
            )
            for problem in suite:
                for seed in range(1, seeds + 1):
                    for method in methods:
                        key = f"{method}|{problem.id}|{seed}|{corrupt}"
                        if key in done:
                            continue
                        function = Function(problem, EVALUATIONS_PER_DIM[dim] * dim, corrupt, seed)
                        start = time.time()
                        with contextlib.suppress(SpentError):
                            RUNNERS[method](function, seed)
                        row = {
                            **{"key": key, "method": method, "d": dim, "corrupt": corrupt},
                            **{"feasible": function.is_feasible},
                            "gap": float(function.best - function.least),
                            "seconds": time.time() - start,
                        }
                        lines.write(json.dumps(row) + "\n")
                        lines.flush()


def summarise(log: Path) -> list[dict[str, Any]]:
    """Return functions of 54 with a feasible point and within each gap, mean over runs."""
    groups: dict[tuple[int, float, str], list[dict[str, Any]]] = {}
    for line in log.read_text().splitlines():
        row = json.loads(line)
        groups.setdefault((row["d"], row["corrupt"], row["method"]), []).append(row)
    rows = []
    for (dim, corrupt, method), runs in sorted(
        groups.items(), key=lambda item: (item[0][1], item[0][0], METHODS.index(item[0][2]))
    ):
        counts = {
            f"gap {gap:g}": f"{54 * np.mean([run['gap'] <= gap for run in runs]):.1f}"
            for gap in GAPS
        }
        rows.append(
            {
                **{"d": dim, "evaluations": EVALUATIONS_PER_DIM[dim] * dim},
                **{"corrupted": f"{corrupt:.0%}", "method": method, "runs": len(runs)},
                "feasible": f"{54 * np.mean([run['feasible'] for run in runs]):.1f}",
                **counts,
            }
        )
    return rows


def main() -> None:
    """Measure, and print or write the values."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="d = 2, one instance, one seed")
    parser.add_argument("--table", action="store_true", help="write the table of the page")
    parser.add_argument("--log", type=Path, default="runs/coco.jsonl", help="one line per run")
    options = parser.parse_args()
    if options.table:
        write_table(PAGE, MARKS, VALUES, num_labels=4)
        return

    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    log = options.log.resolve()
    log.parent.mkdir(parents=True, exist_ok=True)
    if options.quick:
        log = Path(tempfile.mkdtemp()) / "coco.jsonl"
    os.chdir(tempfile.mkdtemp())  # the suite writes files
    measure(QUICK if options.quick else PLAN, log)
    rows = summarise(log)
    for row in rows:
        print("  ".join(str(value) for value in row.values()))
    if not options.quick:
        with VALUES.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()

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

Attacks, with a share of 10% or 20%:

- evaluations: a random part of all evaluations returns the values of a random point.
- particles: a part of the particles stays at the suite's initial solution, which is feasible and
  not optimal. The judge ignores them. Only fedcb2o and cbx have particles.
"""

import argparse
import contextlib
import csv
import itertools
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from page_table import replace_table

FOLDER = Path(__file__).resolve().parent
VALUES = FOLDER / "coco.csv"
PAGE = FOLDER.parent / "docs" / "particles.md"
MARKS = ("<!-- coco -->", "<!-- /coco -->")
GAPS = (10.0, 1.0, 0.1, 0.01)
NUM_FUNCTIONS = 54
EVALUATIONS_PER_DIM = {2: 1000, 3: 1000, 5: 1000, 10: 2000}
PENALTY = 1000.0
METHODS = ("fedcb2o", "DE", "pycma", "cbx", "random", "fedcb2o, paper")
WITH_PARTICLES = ("fedcb2o", "cbx")
ONE = range(2, 3)
ALL = range(2, 7)
EVALUATIONS = "evaluations"
PARTICLES = "particles"


class Part(NamedTuple):
    """A part of the plan: runs of methods on the functions of a dimension."""

    dim: int
    instances: range
    seeds: int
    methods: tuple[str, ...]
    attack: str = EVALUATIONS
    share: float = 0.0


# The most important parts come first, so that an interrupted measurement has them.
PLAN = (
    *(Part(dim, ONE, 1, METHODS[:5]) for dim in (2, 5, 3, 10)),
    *(Part(2, ONE, 1, METHODS[:5], EVALUATIONS, share) for share in (0.1, 0.2)),
    *(Part(2, ONE, 1, WITH_PARTICLES, PARTICLES, share) for share in (0.1, 0.2)),
    *(Part(dim, ONE, 1, METHODS[5:]) for dim in (2, 5)),
    *(Part(dim, ALL, 1, METHODS[:5]) for dim in (2, 5, 3)),
    *(Part(5, ONE, 1, METHODS[:5], EVALUATIONS, share) for share in (0.1, 0.2)),
    *(Part(5, ONE, 1, WITH_PARTICLES, PARTICLES, share) for share in (0.1, 0.2)),
    Part(10, ALL, 1, METHODS[:5]),
    *(Part(dim, ALL, 5, METHODS[:5]) for dim in (2, 3, 5, 10)),
)
QUICK = PLAN[:1]


class SpentError(Exception):
    """Signal of a spent budget."""


class Function:
    """A function of the suite that counts, corrupts and judges evaluations."""

    def __init__(self, problem: Any, seed: int, attack: str, share: float) -> None:
        problem._best_parameter("print")
        self.problem = problem
        self.dim = problem.dimension
        self.least = problem(np.loadtxt("._bbob_problem_best_parameter.txt"))
        self.evaluations = EVALUATIONS_PER_DIM[self.dim] * self.dim
        self.left = self.evaluations
        self.corrupt = share if attack == EVALUATIONS else 0.0
        self.malicious = share if attack == PARTICLES else 0.0
        self.trap = problem.initial_solution
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
        is_trap = self.malicious and np.array_equal(x, self.trap)
        if not is_trap and not violations.any():
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
    from fedcb2o.particles.adversaries import static
    from fedcb2o.particles.hopping import default_num_particles

    values = []
    if function.malicious:
        count = default_num_particles(function.dim)
        malicious = round(count * function.malicious)
        settings["num_particles"] = count - malicious
        settings["adversaries"] = static(malicious, function.trap)

    def lower(points: np.ndarray) -> np.ndarray:
        values.clear()
        violations = []
        for x in points:
            f, violated = function(x)
            values.append(f)
            violations.append(violated)
        return np.square(violations).sum(1)

    def upper(points: np.ndarray) -> np.ndarray:
        return np.array(values)

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
    from cbx.dynamics.pdyn import post_process_default

    malicious = round(50 * function.malicious)

    def objective(x: np.ndarray) -> np.ndarray:
        points = x.reshape(-1, function.dim)
        values = [function.penalised(point) for point in points]
        return np.array(values).reshape(x.shape[:-1])

    clip = post_process_default()

    def hold(dynamic: Any) -> None:
        clip(dynamic)
        dynamic.x[:, :malicious] = function.trap

    start = np.random.default_rng(seed).uniform(-5, 5, (1, 50, function.dim))
    start[:, :malicious] = function.trap
    settings = {"noise": "anisotropic", "dt": 0.1, "sigma": 1.0, "alpha": 1000.0}
    CBO(
        objective,
        x=start,
        f_dim="3D",
        max_it=10**6,
        verbosity=0,
        post_process=hold,
        seed=seed,
        **settings,
    ).optimize()


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


def measure(plan: Sequence[Part], log: Path) -> None:
    """Run all missing runs of a plan, and append one line for each to the log."""
    done = set()
    if log.exists():
        done = {json.loads(line)["key"] for line in log.read_text().splitlines()}
    with log.open("a") as lines:
        for part in plan:
            for seed, instance in itertools.product(range(1, part.seeds + 1), part.instances):
                for row in sweep(part, instance, seed, done):
                    lines.write(json.dumps(row) + "\n")
                    lines.flush()


def sweep(part: Part, instance: int, seed: int, done: set[str]) -> Iterator[dict[str, Any]]:
    """Run the missing runs of one instance and seed of a part on all functions."""
    import cocoex

    attack = "none"
    if part.share:
        attack = f"{part.share:.0%} {part.attack}"
    suite = cocoex.Suite("bbob-constrained", f"instances:{instance}", f"dimensions:{part.dim}")
    for problem in suite:  # a list of them would free all but the last
        for method in part.methods:
            key = f"{method}|{problem.id}|{seed}|{attack}"
            if key in done:
                continue
            done.add(key)
            function = Function(problem, seed, part.attack, part.share)
            start = time.process_time()
            with contextlib.suppress(SpentError):
                RUNNERS[method](function, seed)
            yield {
                **{"key": key, "method": method, "d": part.dim, "attack": attack},
                **{"instance": instance, "seed": seed, "feasible": function.is_feasible},
                "gap": float(function.best - function.least),
                "seconds": time.process_time() - start,
            }


def summarise(log: Path) -> list[dict[str, Any]]:
    """Return functions of 54 with a feasible point and within each gap, mean over sweeps.

    A sweep is one instance and seed of all functions. Only those count that all methods of a row
    of the page have.
    """
    groups: dict[tuple[str, int], dict[str, dict[tuple[int, int], list[dict[str, Any]]]]] = {}
    for line in log.read_text().splitlines():
        row = json.loads(line)
        methods = groups.setdefault((row["attack"], row["d"]), {})
        sweeps = methods.setdefault(row["method"], {})
        sweeps.setdefault((row["instance"], row["seed"]), []).append(row)

    rows = []
    for (attack, dim), methods in sorted(groups.items()):
        whole: dict[str, set[tuple[int, int]]] = {}
        for method, sweeps in methods.items():
            keys = {key for key, runs in sweeps.items() if len(runs) == NUM_FUNCTIONS}
            if keys:
                whole[method] = keys
        if not whole:
            continue
        common = sorted(set.intersection(*whole.values()))
        for method in sorted(whole, key=METHODS.index):
            runs = [run for key in common for run in methods[method][key]]
            gaps = np.array([run["gap"] for run in runs])
            counts = {f"gap {gap:g}": NUM_FUNCTIONS * np.mean(gaps <= gap) for gap in GAPS}
            counts = {"feasible": NUM_FUNCTIONS * np.mean([r["feasible"] for r in runs]), **counts}
            rows.append(
                {
                    **{"d": dim, "evaluations": EVALUATIONS_PER_DIM[dim] * dim, "attack": attack},
                    "instances": " ".join(str(i) for i in sorted({key[0] for key in common})),
                    **{"sweeps": len(common), "method": method},
                    **{name: f"{count:.3g}" for name, count in counts.items()},
                }
            )
    return sorted(rows, key=lambda row: row["attack"] != "none")


def page_rows() -> list[list[str]]:
    """Return the table of the page: one column per method with all counts."""
    with VALUES.open(encoding="utf-8") as file:
        values = list(csv.DictReader(file))
    labels = ("d", "attack", "instances")
    methods = [name for name in METHODS if any(row["method"] == name for row in values)]
    table: dict[tuple[str, ...], list[str]] = {}
    for row in values:
        key = tuple(row[name] for name in labels)
        cells = table.setdefault(key, [*key, *("" for _ in methods)])
        counts = [row["feasible"], *(row[f"gap {gap:g}"] for gap in GAPS)]
        cells[len(labels) + methods.index(row["method"])] = "/".join(counts)
    compared = [row for row in table.values() if sum(map(bool, row[len(labels) :])) > 1]
    return [[*labels, *methods], *compared]


def main() -> None:
    """Measure, and print or write the values."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="d = 2, one instance, one seed")
    parser.add_argument("--table", action="store_true", help="write the table of the page")
    parser.add_argument("--log", type=Path, default="runs/coco.jsonl", help="one line per run")
    options = parser.parse_args()
    if options.table:
        replace_table(PAGE, MARKS, page_rows(), num_labels=3)
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

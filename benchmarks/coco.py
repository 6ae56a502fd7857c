"""`fedcb2o.minimize` and other optimisers on COCO's constrained functions.

    python -m venv coco && coco/bin/pip install . coco-experiment==2.8.2 cma==4.5.0 cbx==1.0.4
    coco/bin/python benchmarks/coco.py --quick          # two minutes
    coco/bin/python benchmarks/coco.py                  # all values; continues where it stopped
    python benchmarks/coco.py --table                   # the table of docs/particles.md

`coco.csv` has one row per method and sweep, or sum of sweeps. A sweep is one instance and seed of
all functions. A measurement adds the missing sweeps of the plan; after a change of the optimiser,
delete the file first.

`bbob-constrained` (Dufosse, Hansen, Brockhoff, Sampaio, Atamna and Auger, "Building scalable test
problems for benchmarking constrained optimizers", 2022): 54 functions with 1 to 54 constraints in
[-5, 5]^d. All methods have their defaults and the same evaluations of f with its constraints. A
method solves a function to a gap if it judged a feasible point with f - f* <= gap. The settings of
`minimize` were chosen on instance 1 in d = 2 and 5 alone, so that instances 2 to 6 judge.

- fedcb2o: L is the sum of squared violations, G is f.
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
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from page_table import replace_table

FOLDER = Path(__file__).resolve().parent
VALUES = FOLDER / "coco.csv"
PAGE = FOLDER.parent / "docs" / "particles.md"
MARKS = ("<!-- coco -->", "<!-- /coco -->")
GAPS = (10.0, 1.0, 0.1, 0.01)
COUNTS = ("feasible", *(f"gap {gap:g}" for gap in GAPS))
NUM_FUNCTIONS = 54
EVALUATIONS_PER_DIM = {2: 1000, 3: 1000, 5: 1000, 10: 2000}
PENALTY = 1000.0
METHODS = ("fedcb2o", "DE", "pycma", "cbx", "random")
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

    @property
    def attack_name(self) -> str:
        """Return the attack in the values."""
        return f"{self.share:.0%} {self.attack}" if self.share else "none"


Row = dict[str, Any]
Key = tuple[str, ...]


def sweep_keys(row: Row) -> list[Key]:
    """Return (d, attack, instance, seed, method) of each sweep in a row of the values."""
    return [
        (row["d"], row["attack"], instance, row["seed"], row["method"])
        for instance in row["instances"].split()
    ]


# The most important parts come first, so that an interrupted measurement has them.
PLAN = (
    *(Part(dim, ONE, 1, METHODS) for dim in (2, 5, 3, 10)),
    *(Part(2, ONE, 1, METHODS, EVALUATIONS, share) for share in (0.1, 0.2)),
    *(Part(2, ONE, 1, WITH_PARTICLES, PARTICLES, share) for share in (0.1, 0.2)),
    *(Part(dim, ALL, 1, METHODS) for dim in (2, 5, 3)),
    *(Part(dim, ALL, 5, METHODS) for dim in (2, 3)),
    *(Part(5, ONE, 1, METHODS, EVALUATIONS, share) for share in (0.1, 0.2)),
    *(Part(5, ONE, 1, WITH_PARTICLES, PARTICLES, share) for share in (0.1, 0.2)),
    Part(10, ALL, 1, METHODS),
    *(Part(dim, ALL, 5, METHODS) for dim in (5, 10)),
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


def run_fedcb2o(function: Function, seed: int) -> None:
    """Minimise by this library."""
    import fedcb2o
    from fedcb2o.particles.adversaries import static
    from fedcb2o.particles.hopping import default_num_particles

    values = []
    settings: dict[str, Any] = {}
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
        (run_fedcb2o, run_differential_evolution, run_pycma, run_cbx, run_random),
        strict=True,
    )
)


def measure(plan: Sequence[Part], log: Path, measured: Iterable[Key], minutes: float) -> None:
    """Run the missing runs of a plan for some minutes, and append one line for each to the log.

    Sweeps in `measured` are not run again.
    """
    end = time.monotonic() + 60 * minutes
    done = set()
    if log.exists():
        done = {json.loads(line)["key"] for line in log.read_text().splitlines()}
    with log.open("a") as lines:
        for part in plan:
            for seed, instance in itertools.product(range(1, part.seeds + 1), part.instances):
                sweep = (str(part.dim), part.attack_name, str(instance), str(seed))
                missing = (name for name in part.methods if (*sweep, name) not in measured)
                for row in run_sweep(part._replace(methods=tuple(missing)), instance, seed, done):
                    lines.write(json.dumps(row) + "\n")
                    lines.flush()
                    if time.monotonic() > end:
                        return


def run_sweep(part: Part, instance: int, seed: int, done: set[str]) -> Iterator[Row]:
    """Run the missing runs of one instance and seed of a part on all functions."""
    if not part.methods:
        return
    import cocoex

    suite = cocoex.Suite("bbob-constrained", f"instances:{instance}", f"dimensions:{part.dim}")
    for problem in suite:  # a list of them would free all but the last
        for method in part.methods:
            key = f"{method}|{problem.id}|{seed}|{part.attack_name}"
            if key in done:
                continue
            done.add(key)
            function = Function(problem, seed, part.attack, part.share)
            start = time.process_time()
            with contextlib.suppress(SpentError):
                RUNNERS[method](function, seed)
            yield {
                **{"key": key, "method": method, "d": part.dim, "attack": part.attack_name},
                **{"instance": instance, "seed": seed, "feasible": function.is_feasible},
                "gap": float(function.best - function.least),
                "seconds": time.process_time() - start,
            }


def read_values() -> list[Row]:
    """Return the rows of the committed values."""
    if not VALUES.exists():
        return []
    with VALUES.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def new_rows(plan: Sequence[Part], log: Path, measured: Iterable[Key]) -> list[Row]:
    """Return one row for each new sweep in the log that all methods of its part have."""
    runs: dict[Key, list[Row]] = {}
    for line in log.read_text().splitlines():
        run = json.loads(line)
        key = tuple(str(run[name]) for name in ("d", "attack", "instance", "seed", "method"))
        runs.setdefault(key, []).append(run)
    whole = {key for key, items in runs.items() if len(items) == NUM_FUNCTIONS}

    rows = {}
    for part in plan:
        for seed, instance in itertools.product(range(1, part.seeds + 1), part.instances):
            sweep = (str(part.dim), part.attack_name, str(instance), str(seed))
            keys = [(*sweep, method) for method in part.methods]
            if not whole.union(measured).issuperset(keys):
                continue
            for key in whole.intersection(keys).difference(measured):
                names = ("d", "attack", "instances", "seed", "method")
                counts = [sum(run["feasible"] for run in runs[key])]
                counts += [sum(run["gap"] <= gap for run in runs[key]) for gap in GAPS]
                rows[key] = dict(zip((*names, *COUNTS), (*key, *map(str, counts)), strict=True))
    return [rows[key] for key in sorted(rows, key=lambda key: (*key[:-1], METHODS.index(key[-1])))]


def mean_counts(rows: Sequence[Row]) -> list[list[str]]:
    """Return d, attack, instances, number of sweeps, method and mean counts of 54 functions.

    Only those sweeps count that all methods of the dimension and attack have.
    """
    groups: dict[tuple[int, bool, str], dict[str, dict[tuple[str, str], Row]]] = {}
    for row in rows:
        group = groups.setdefault((int(row["d"]), row["attack"] != "none", row["attack"]), {})
        group.setdefault(row["method"], {})[row["instances"], row["seed"]] = row

    table = []
    for (dim, _, attack), methods in sorted(groups.items(), key=lambda item: item[0][1::-1]):
        common = set.intersection(*(set(sweeps) for sweeps in methods.values()))
        instances = [name for names, _ in common for name in names.split()]
        label = [str(dim), attack, " ".join(sorted(set(instances))), str(len(instances))]
        for method in sorted(methods, key=METHODS.index):
            chosen = [methods[method][key] for key in common]
            totals = [sum(int(row[name]) for row in chosen) for name in COUNTS]
            means = [f"{total / max(1, len(instances)):.4g}" for total in totals]
            table.append([*label, method, *means])
    return table


def page_rows() -> list[list[str]]:
    """Return the table of the page: one column per method with all counts."""
    rows = mean_counts(read_values())
    table: dict[tuple[str, ...], list[str]] = {}
    for *label, method, feasible, ten, one, tenth, hundredth in rows:
        cells = table.setdefault(tuple(label), [*label, *("" for _ in METHODS)])
        counts = (feasible, ten, one, tenth, hundredth)
        cells[len(label) + METHODS.index(method)] = "/".join(counts)
    header = ["d", "attack", "instances", "sweeps"]
    compared = [row for row in table.values() if sum(map(bool, row[len(header) :])) > 1]
    return [[*header, *METHODS], *compared]


def main() -> None:
    """Measure, and print or write the values."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="d = 2, one instance, one seed")
    parser.add_argument("--table", action="store_true", help="write the table of the page")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time")
    parser.add_argument("--log", type=Path, default="runs/coco.jsonl", help="one line per run")
    options = parser.parse_args()
    if options.table:
        replace_table(PAGE, MARKS, page_rows(), num_labels=4)
        return

    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    log = options.log.resolve()
    log.parent.mkdir(parents=True, exist_ok=True)
    plan: Sequence[Part] = PLAN
    values = read_values()
    if options.quick:
        log = Path(tempfile.mkdtemp()) / "coco.jsonl"
        plan, values = QUICK, []
    measured = {key for row in values for key in sweep_keys(row)}
    os.chdir(tempfile.mkdtemp())  # the suite writes files
    measure(plan, log, measured, options.minutes)
    values += new_rows(plan, log, measured)
    for row in mean_counts(values):
        print("  ".join(row))
    if not options.quick:
        with VALUES.open("w", newline="") as file:
            writer = csv.DictWriter(file, values[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(values)


if __name__ == "__main__":
    main()

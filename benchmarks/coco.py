"""`fedcb2o.minimize` and other optimisers on COCO's constrained functions.

    python -m venv coco && coco/bin/pip install . coco-experiment==2.8.2 cma==4.5.0 cbx==1.0.4
    coco/bin/python benchmarks/coco.py --quick          # two minutes
    coco/bin/python benchmarks/coco.py                  # all values; continues where it stopped
    python benchmarks/coco.py --table                   # the table of notes/optimiser.md

`coco.csv` has one row per method and sweep, or sum of sweeps. A sweep is one instance and seed of
all functions. A measurement adds the missing sweeps of the plan; after a change of the optimiser,
delete the file first.

`bbob-constrained` (Dufosse, Hansen, Brockhoff, Sampaio, Atamna and Auger, "Building scalable test
problems for benchmarking constrained optimizers", 2022): 54 functions with 1 to 54 constraints in
[-5, 5]^d. All methods have their defaults and the same evaluations of f with its constraints. A
method solves a function to a gap if the point x that it returns is feasible with f(x) - f* <= gap,
by true values. The settings of `minimize` were chosen on instance 1 alone, so that the others
judge.

- fedcb2o: f, with the constraints in SciPy's form; x is that of the result.
- SLSQP, COBYQA: SciPy's, from uniform points, restarted until the evaluations are spent. For these
  and all that follow, x is the best point by the values that the method received.
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
import functools
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
PAGE = FOLDER.parent / "notes" / "optimiser.md"
MARKS = ("<!-- coco -->", "<!-- /coco -->")
GAPS = (1.0, 0.01, 1e-6)
REACHED = 0.01  # gap whose evaluations are counted
COUNTS = ("feasible", *(f"gap {gap:g}" for gap in GAPS), "median")
NUM_FUNCTIONS = 54
PENALTY = 1000.0
METHODS = ("fedcb2o", "SLSQP", "COBYQA", "DE", "pycma", "cbx", "random")
FAST = ("fedcb2o", "SLSQP", "DE")
SLOW = ("pycma", "cbx", "random")
WITH_PARTICLES = ("fedcb2o", "cbx")
KEPT = range(11, 13)  # instances that no setting was chosen on
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
    # Evaluations per coordinate.
    budget: int = 1000

    @property
    def attack_name(self) -> str:
        """Return the attack in the values, or a small budget."""
        if self.budget != 1000:
            return f"{self.budget} d"
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
    Part(2, KEPT, 1, FAST),
    Part(2, KEPT, 1, FAST, EVALUATIONS, 0.1),
    Part(2, KEPT, 1, FAST, budget=100),
    *(Part(dim, KEPT, 1, FAST) for dim in (3, 5)),
    Part(2, KEPT, 1, (*FAST, "COBYQA"), budget=100),
    Part(10, KEPT, 1, FAST),
    Part(2, KEPT, 1, SLOW),
    Part(2, KEPT, 1, SLOW, budget=100),
    Part(2, KEPT, 1, SLOW, EVALUATIONS, 0.1),
    *(Part(2, KEPT, 1, WITH_PARTICLES, PARTICLES, share) for share in (0.1, 0.2)),
    *(Part(dim, KEPT, 1, SLOW) for dim in (3, 5, 10)),
    Part(2, KEPT, 1, (*FAST, *SLOW), EVALUATIONS, 0.2),
    Part(2, KEPT, 1, ("COBYQA",)),
)
QUICK = (Part(2, KEPT[:1], 1, (*FAST, *SLOW)),)


class SpentError(Exception):
    """Signal of a spent budget."""


class Function:
    """A function of the suite that counts, corrupts and judges evaluations."""

    def __init__(self, problem: Any, seed: int, part: Part) -> None:
        problem._best_parameter("print")
        self.problem = problem
        self.dim = problem.dimension
        self.least = problem(np.loadtxt("._bbob_problem_best_parameter.txt"))
        self.evaluations = part.budget * self.dim
        self.left = self.evaluations
        self.corrupt = part.share if part.attack == EVALUATIONS else 0.0
        self.malicious = part.share if part.attack == PARTICLES else 0.0
        self.trap = problem.initial_solution
        self.generator = np.random.default_rng((seed, 77))
        self.reached = np.inf
        self.best: tuple[float, float] = (np.inf, np.inf)
        self.x = np.zeros(self.dim)

    def __call__(self, x: Any) -> tuple[float, np.ndarray]:
        """Return f and the violations, and keep the best point by what they seem to be."""
        if self.left <= 0:
            raise SpentError
        self.left -= 1
        x = np.asarray(x, float)
        f = self.problem(x)
        violations = np.maximum(self.problem.constraint(x), 0)
        if not violations.any() and f - self.least <= REACHED and self.reached == np.inf:
            self.reached = self.evaluations - self.left
        if self.corrupt and self.generator.random() < self.corrupt:
            other = self.generator.uniform(-5, 5, self.dim)
            f, violations = self.problem(other), np.maximum(self.problem.constraint(other), 0)
        is_trap = self.malicious and np.array_equal(x, self.trap)
        seems = (float(violations.sum()), float(f))
        if not is_trap and seems < self.best:
            self.best = seems
            self.x = x.copy()
        return f, violations

    def gap(self, x: Any) -> tuple[bool, float]:
        """Return whether a point is feasible, and its true gap."""
        is_feasible = bool((self.problem.constraint(x) <= 0).all())
        return is_feasible, float(self.problem(x) - self.least) if is_feasible else np.inf

    def penalised(self, x: Any) -> float:
        """Return f + 1000 times the sum of violations."""
        f, violations = self(x)
        return float(f + PENALTY * violations.sum())


def run_fedcb2o(function: Function, seed: int) -> None:
    """Minimise by this library."""
    from scipy.optimize import NonlinearConstraint

    import fedcb2o
    from fedcb2o.particles.adversaries import static
    from fedcb2o.particles.hopping import default_num_particles

    settings: dict[str, Any] = {}
    if function.malicious:
        count = default_num_particles(function.dim)
        malicious = round(count * function.malicious)
        settings["num_particles"] = count - malicious
        settings["adversaries"] = static(malicious, function.trap)
    latest: dict[bytes, float] = {}

    def violations(x: np.ndarray) -> np.ndarray:
        f, violated = function(x)
        latest[x.tobytes()] = f
        inner = function.problem.constraint(x)
        return np.where(violated > 0, violated, np.minimum(inner, 0))

    # The constraint of a point is called before its objective; both count as one evaluation.
    result = fedcb2o.minimize(
        fedcb2o.from_point(lambda x: latest[x.tobytes()]),
        constraints=NonlinearConstraint(ProbeFree(violations), -np.inf, 0),
        bounds=[(-5, 5)] * function.dim,
        maxfev=function.evaluations,
        seed=seed,
        **settings,
    )
    function.x = result.x.numpy()


class ProbeFree:
    """A function of one point whose values are kept, so that trial calls do not count twice."""

    def __init__(self, function: Callable[[np.ndarray], np.ndarray]) -> None:
        self._function = function
        self._values: dict[bytes, np.ndarray] = {}

    def __call__(self, x: Any) -> np.ndarray:
        """Return the value, computed once per point."""
        x = np.asarray(x, float)
        if x.ndim != 1:
            raise ValueError("one point")
        key = x.tobytes()
        if key not in self._values:
            self._values[key] = self._function(x)
        return self._values[key]


def run_scipy(method: str, function: Function, seed: int) -> None:
    """Minimise by a local method of SciPy, with restarts from uniform points."""
    from scipy.optimize import NonlinearConstraint, minimize

    generator = np.random.default_rng(seed)
    memory: dict[bytes, tuple[float, np.ndarray]] = {}

    def both(x: np.ndarray) -> tuple[float, np.ndarray]:
        key = x.tobytes()
        if key not in memory:
            f, violated = function(x)
            inner = function.problem.constraint(np.asarray(x, float))
            memory[key] = (f, np.where(violated > 0, violated, np.minimum(inner, 0)))
        return memory[key]

    while True:
        constraints: Any = NonlinearConstraint(lambda x: both(x)[1], -np.inf, 0)
        if method == "SLSQP":
            constraints = {"type": "ineq", "fun": lambda x: -both(x)[1]}
        minimize(
            lambda x: both(x)[0],
            generator.uniform(-5, 5, function.dim),
            method=method,
            bounds=[(-5, 5)] * function.dim,
            constraints=constraints,
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
        (
            run_fedcb2o,
            functools.partial(run_scipy, "SLSQP"),
            functools.partial(run_scipy, "COBYQA"),
            run_differential_evolution,
            run_pycma,
            run_cbx,
            run_random,
        ),
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
            function = Function(problem, seed, part)
            start = time.process_time()
            with contextlib.suppress(SpentError):
                RUNNERS[method](function, seed)
            yield {
                **{"key": key, "method": method, "d": part.dim, "attack": part.attack_name},
                **{"instance": instance, "seed": seed},
                **dict(zip(("feasible", "gap"), function.gap(function.x), strict=True)),
                "reached": function.reached,
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
                reached = [run["reached"] for run in runs[key] if run["reached"] < math.inf]
                counts.append(round(float(np.median(reached))) if reached else 0)
                rows[key] = dict(zip((*names, *COUNTS), (*key, *map(str, counts)), strict=True))
    return [rows[key] for key in sorted(rows, key=lambda key: (*key[:-1], METHODS.index(key[-1])))]


def mean_counts(rows: Sequence[Row]) -> list[list[str]]:
    """Return d, attack, instances, number of sweeps, method and mean counts of 54 functions.

    The last count is the median of the evaluations to a gap of 0.01, where it was reached.

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
    for *label, method, _, one, hundredth, millionth, median in rows:
        cells = table.setdefault(tuple(label), [*label, *("" for _ in METHODS)])
        cells[len(label) + METHODS.index(method)] = f"{one}/{hundredth}/{millionth} ({median})"
    header = ["d", "attack", "instances", "sweeps"]
    compared = [row for row in table.values() if sum(map(bool, row[len(header) :])) > 1]
    table_rows = [[*header, *METHODS], *compared]
    kept = [k for k in range(len(table_rows[0])) if any(row[k] for row in compared)]
    return [[row[k] for k in kept] for row in table_rows]


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
    if values and not options.quick:
        with VALUES.open("w", newline="") as file:
            writer = csv.DictWriter(file, values[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(values)


if __name__ == "__main__":
    main()

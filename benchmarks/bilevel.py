"""`fedcb2o.minimize` by default on simple bi-level problems and the built-in problems.

    .venv/bin/python benchmarks/bilevel.py [--quick]      # a few minutes; --quick: one seed
    .venv/bin/python benchmarks/bilevel.py --rivals       # other methods, 500 d evaluations each
    .venv/bin/python benchmarks/bilevel.py --table        # the table of notes/optimiser.md

The simple bi-level problems are the eleven of BOLIBver2 (Zhou, Zemkoho and Tin, "BOLIB: Bilevel
Optimization LIBrary of test problems", 2020): minimise F among the minimisers of f on a set g >= 0.
Their sources are Franke, Mehlitz and Pilecka (2018), Mitsos and Barton (2006), and Shehu, Vuong and
Zemkoho (2019, Example 4.2, whose random data are drawn anew here and whose known value is computed
by proximal gradient descent). L is f, infinite where g < 0; G is F. Example 3.2 of Mitsos and
Barton has no solution: the only minimiser of f violates a constraint of F.

The built-in problems have 20,000 evaluations; the others have the default.

Rivals have the same 500 d evaluations of f, F and g at a point, and restart from uniform points:

- SLSQP and COBYQA of SciPy first minimise f on the set for half of the evaluations, and then F with
  the constraint f <= min f.
- a-IRG, the averaged iteratively regularised gradient method (Kaushik and Yousefian, "A method with
  convergence rates for optimization problems with variational inequality constraints", 2021), takes
  steps down grad f + eta grad F, by forward differences, from four points. Its projections onto the
  set are free.

A problem is solved if |F(x) - F*| and f(x) - min f are at most 1e-3 at the returned x, and g is at
least -1e-3. The least f is that of all methods.
"""

import argparse
import csv
import functools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from page_table import replace_table
from scipy import optimize

import fedcb2o
from fedcb2o import particles

FOLDER = Path(__file__).resolve().parent
VALUES = FOLDER / "bilevel.csv"
PAGE = FOLDER.parent / "notes" / "optimiser.md"
MARKS = ("<!-- bilevel -->", "<!-- /bilevel -->")
RIVAL_MARKS = ("<!-- bilevel rivals -->", "<!-- /bilevel rivals -->")
RIVAL_EVALUATIONS = 500  # per coordinate
TOLERANCE = 1e-3
BUILT_IN = ("circle", "circle-ackley", "circle-ackley-inside", "parabola-ackley")
WAVES = ("waves-1d", "waves-2d")
EVALUATIONS = 20_000

Objective = Callable[[np.ndarray], np.ndarray]


class BilevelProblem(NamedTuple):
    """A simple bi-level problem; points are columns y[0], y[1], ..."""

    name: str
    dim: int
    box: tuple[float, float] | None
    upper: Objective
    lower: Objective
    inside: Callable[[np.ndarray], list[np.ndarray]] | None
    known: float | None


def shehu(n: int = 10, rows: int = 5, mu: float = 0.1) -> BilevelProblem:
    """Return Example 4.2 of Shehu et al.: the least |y|_Q among minimisers of the lasso."""
    generator = np.random.default_rng(1)
    P = generator.standard_normal((n, n))
    Q = P @ P.T / n
    A = generator.standard_normal((rows, n))
    y = np.zeros(n)
    y[generator.integers(n)] = 5 + generator.random()
    b = A @ y + 0.01 * generator.standard_normal(rows)

    rate = 1 / np.linalg.norm(A, 2) ** 2
    best = np.zeros(n)
    for _ in range(200_000):
        moved = best - rate * A.T @ (A @ best - b)
        best = np.sign(moved) * np.maximum(abs(moved) - rate * mu, 0)

    def lower(y: np.ndarray) -> np.ndarray:
        residual = (A @ y.reshape(n, -1) - b[:, None]).reshape(rows, *y.shape[1:])
        return np.square(residual).sum(0) / 2 + mu * abs(y).sum(0)

    def upper(y: np.ndarray) -> np.ndarray:
        return np.einsum("i...,ij,j...->...", y, Q, y) / 2

    return BilevelProblem(
        "Shehu et al. 2019, 4.2", n, (-10, 10), upper, lower, None, float(upper(best))
    )


def problems() -> list[BilevelProblem]:
    """Return the eleven simple problems of BOLIBver2."""
    franke = "Franke et al. 2018, "
    mitsos = "Mitsos, Barton 2006, "
    return [
        BilevelProblem(
            franke + "5.1.1", 3, None,
            lambda y: ((y[0] - 2) ** 2 + (y[2] - 2) ** 2 + y[1] ** 2) / 2, lambda y: y.sum(0),
            lambda y: [y[0] + y[1], y[0] - y[1], y[0], y[2]], 3.0,
        ),
        BilevelProblem(
            franke + "5.1.3", 3, None, lambda y: -y[1], lambda y: y[2],
            lambda y: [y[2] - y[0] ** 2, 1 - y[1] ** 2 - y[0] ** 2, y[2]], -1.0,
        ),
        BilevelProblem(
            franke + "5.2.1", 2, None, lambda y: -y[1], lambda y: y[0],
            lambda y: [(y[1] - 0.5) ** 2 - (y[0] - 1) ** 2 + 1.25, 1 - y[1] - y[0], y[0]], -1.0,
        ),
        BilevelProblem(
            franke + "5.3", 2, (0, 1), lambda y: y[0] ** 2 + y[1] ** 2, lambda y: (y[0] - 2) ** 2,
            None, 1.0,
        ),
        BilevelProblem(mitsos + "3.1", 1, (-1, 1), lambda y: y[0], lambda y: -y[0], None, 1.0),
        BilevelProblem(
            mitsos + "3.2", 1, (-1, 1), lambda y: np.where(y[0] <= 0, y[0], np.inf),
            lambda y: -y[0], None, None,
        ),
        BilevelProblem(
            mitsos + "3.3", 1, (-10, 10), lambda y: y[0], lambda y: y[0] ** 2,
            lambda y: [y[0] ** 2 - 1], -1.0,
        ),
        BilevelProblem(
            mitsos + "3.4", 1, (-0.5, 1), lambda y: y[0], lambda y: -y[0] ** 2, None, 1.0
        ),
        BilevelProblem(
            mitsos + "3.5", 1, (-1, 1), lambda y: y[0],
            lambda y: 16 * y[0] ** 4 + 2 * y[0] ** 3 - 8 * y[0] ** 2 - 1.5 * y[0] + 0.5, None, 0.5,
        ),
        BilevelProblem(mitsos + "3.6", 1, (-1, 1), lambda y: y[0], lambda y: y[0] ** 3, None, -1.0),
        shehu(),
    ]  # fmt: skip


def as_objectives(problem: BilevelProblem) -> tuple[Any, Any]:
    """Return L and G."""

    def lower(x: np.ndarray) -> np.ndarray:
        y = np.moveaxis(x, -1, 0)
        values = problem.lower(y)
        if problem.inside is None:
            return values
        return np.where(np.stack(problem.inside(y)).min(0) >= 0, values, np.inf)

    def upper(x: np.ndarray) -> np.ndarray:
        return problem.upper(np.moveaxis(x, -1, 0))

    return fedcb2o.from_numpy(lower), fedcb2o.from_numpy(upper)


def measure_simple(problem: BilevelProblem, seeds: int) -> dict[str, Any]:
    """Return the largest error of F over seeds."""
    lower, upper = as_objectives(problem)
    place = {"dim": problem.dim, "bounds": problem.box}
    many = [fedcb2o.minimize(lower, upper, seed=seed, **place) for seed in range(seeds)]
    if problem.known is None:
        error = "no solution"
    else:
        error = f"{max(abs(float(found.upper) - problem.known) for found in many):.1e}"
    known = "none" if problem.known is None else f"{problem.known:.6g}"
    return _row(problem.name, problem.dim, known, error, many)


def measure_built_in(name: str, seeds: int) -> dict[str, Any]:
    """Return the largest error of x over seeds."""
    problem = particles.problem(name)
    settings: dict[str, Any] = {"maxfev": EVALUATIONS}
    if name in WAVES:
        settings["bounds"] = problem.box
    many = [
        fedcb2o.minimize(problem.lower, problem.upper, problem.dim, seed=seed, **settings)
        for seed in range(seeds)
    ]
    target = torch.tensor(problem.target, dtype=torch.float64)
    if name == "waves-1d":  # the published target has two decimals
        exact = optimize.minimize_scalar(
            lambda x: float(problem.lower(torch.tensor([x], dtype=torch.float64))),
            bounds=(-2.7, -2.4),
            options={"xatol": 1e-9},
        )
        target = torch.tensor([exact.x])
    errors = [float((found.x - target).abs().max()) for found in many]
    return _row(f"built-in {name}", problem.dim, "x", f"{max(errors):.1e}", many, errors)


def measure_levels(problems: int = 10) -> dict[str, Any]:
    """Return the largest error of x over nested least squares of three levels, d = 4.

    Two equations come first, then one, and then the point next to four planes. Projections onto
    the null spaces give the solution.
    """
    many = []
    errors = []
    for number in range(problems):
        generator = np.random.default_rng(number)
        systems = [(generator.normal(size=(m, 4)), generator.normal(size=m)) for m in (2, 1, 4)]
        x = np.zeros(4)
        free = np.eye(4)
        for matrix, target in systems:
            projected = matrix @ free
            x = x + free @ np.linalg.lstsq(projected, target - matrix @ x, rcond=None)[0]
            rank = np.linalg.matrix_rank(projected)
            free = free @ np.linalg.svd(projected)[2][rank:].T
        levels = [_squared_residual(*system) for system in systems]
        many.append(fedcb2o.minimize(levels, bounds=[(-20, 20)] * 4, seed=number))
        errors.append(float(np.abs(many[-1].x.numpy() - x).max()))
    name = f"nested least squares, three levels, {problems} problems"
    return _row(name, 4, "x", f"{max(errors):.1e}", many, errors)


def _squared_residual(matrix: np.ndarray, target: np.ndarray) -> Any:
    def level(x: np.ndarray) -> np.ndarray:
        return np.square(x @ matrix.T - target).sum(-1)

    return fedcb2o.from_numpy(level)


class SpentError(Exception):
    """Signal of a spent budget."""


class Counted:
    """A problem whose evaluations are counted, once per point of a start."""

    def __init__(self, problem: BilevelProblem, evaluations: int) -> None:
        self.problem = problem
        self.left = evaluations
        low, high = problem.box or (-3.0, 3.0)
        self.low, self.high = np.full(problem.dim, low), np.full(problem.dim, high)
        self._values: dict[bytes, tuple[float, float]] = {}

    def __call__(self, y: np.ndarray) -> tuple[float, float]:
        """Return f and F."""
        key = y.tobytes()
        if key not in self._values:
            if self.left <= 0:
                raise SpentError
            self.left -= 1
            self._values[key] = (float(self.problem.lower(y)), float(self.problem.upper(y)))
        return self._values[key]

    def forget(self) -> None:
        """Start anew: COBYQA moves its starts to the same points of a small box."""
        self._values = {}

    def inside(self, y: np.ndarray) -> np.ndarray:
        """Return g, at least 0 on the set."""
        if self.problem.inside is None:
            return np.zeros(1)
        return np.array(self.problem.inside(y), dtype=float)

    def judge(self, y: np.ndarray) -> tuple[float, float]:
        """Return f, infinite outside of the set, and F, uncounted."""
        is_inside = bool(self.inside(y).min() >= -TOLERANCE)
        if self.problem.box is not None:
            is_inside &= bool((y == y.clip(self.low, self.high)).all())
        lower = float(self.problem.lower(y)) if is_inside else math.inf
        return lower, float(self.problem.upper(y))


def by_scipy(method: str, counted: Counted, seed: int) -> np.ndarray:
    """Minimise f, and then F among its minimisers, by a local method of SciPy with restarts."""
    generator = np.random.default_rng(seed)
    bounds = None
    if counted.problem.box is not None:
        bounds = list(zip(counted.low, counted.high, strict=True))
    half = counted.left // 2
    # Violation of the set, f, F and the point of each end; those of NaN do not count.
    ends: list[tuple[float, float, float, np.ndarray]] = []
    cap = -math.inf

    def key(end: tuple[float, float, float, np.ndarray]) -> tuple[float, float, float]:
        return end[0], round(max(end[1], cap), 6), end[2]

    for level in (0, 1):
        constraints = [optimize.NonlinearConstraint(counted.inside, 0, np.inf)]
        if level:
            cap = min(ends, key=key)[1]
            constraints.append(optimize.NonlinearConstraint(lambda y: counted(y)[0], -np.inf, cap))
        while counted.left > half * (1 - level):
            counted.forget()
            try:
                found = optimize.minimize(
                    lambda y, level=level: counted(np.asarray(y, float))[level],
                    generator.uniform(counted.low, counted.high),
                    method=method,
                    bounds=bounds,
                    constraints=constraints,
                ).x
            except SpentError:
                break
            violation = max(0.0, -float(counted.inside(found).min()) - 1e-6)
            lower, upper = float(counted.problem.lower(found)), float(counted.problem.upper(found))
            if np.isfinite([lower, upper]).all():
                ends.append((violation, lower, upper, found))
    return min(ends, key=key)[3]


def by_a_irg(counted: Counted, seed: int) -> np.ndarray:
    """Run the averaged iteratively regularised gradient method from four points."""
    generator = np.random.default_rng(seed)
    dim = counted.problem.dim
    steps = counted.left // (4 * (dim + 1))
    ends = []
    for _ in range(4):
        y = _project(counted, generator.uniform(counted.low, counted.high))
        total, mean = 0.0, np.zeros(dim)
        for k in range(steps):
            here = np.array(counted(y))
            ahead = np.array([counted(y + 1e-7 * unit) for unit in np.eye(dim)])
            slopes = (ahead - here) / 1e-7
            rate = 0.1 / math.sqrt(k + 1)
            weight = math.sqrt(rate)
            total += weight
            mean += weight / total * (y - mean)
            y = _project(counted, y - rate * (slopes[:, 0] + slopes[:, 1] / (k + 1) ** 0.25))
        ends.append((*counted.judge(mean), mean))
    return min(ends, key=lambda end: (round(end[0], 3), end[1]))[2]


def _project(counted: Counted, y: np.ndarray) -> np.ndarray:
    """Return the point of the set next to y."""
    if counted.problem.box is not None:
        y = y.clip(counted.low, counted.high)
    if counted.problem.inside is None or counted.inside(y).min() >= 0:
        return y
    constraint = {"type": "ineq", "fun": counted.inside}
    found = optimize.minimize(lambda z: ((z - y) ** 2).sum(), y, constraints=constraint)
    return np.asarray(found.x)


def by_fedcb2o(counted: Counted, seed: int) -> np.ndarray:
    """Run this library with the same evaluations."""
    lower, upper = as_objectives(counted.problem)
    place: Any = {"dim": counted.problem.dim, "bounds": counted.problem.box}
    found = fedcb2o.minimize(lower, upper, maxfev=counted.left, seed=seed, **place)
    return np.asarray(found.x.numpy())


RIVALS: dict[str, Callable[[Counted, int], np.ndarray]] = {
    "fedcb2o": by_fedcb2o,
    "SLSQP": functools.partial(by_scipy, "SLSQP"),
    "COBYQA": functools.partial(by_scipy, "COBYQA"),
    "a-IRG": by_a_irg,
}


def compare_rivals(seeds: int) -> list[list[str]]:
    """Return a table of errors of F, and how many problems each method solves."""
    rows = []
    totals = np.zeros(len(RIVALS), dtype=int)
    for problem in problems():
        if problem.known is None:
            continue
        ends: list[list[tuple[float, float]]] = []
        for method in RIVALS.values():
            budgets = [Counted(problem, RIVAL_EVALUATIONS * problem.dim) for _ in range(seeds)]
            ends.append([item.judge(method(item, k)) for k, item in enumerate(budgets)])
        least = min(lower for column in ends for lower, _ in column)
        cells = []
        for k, column in enumerate(ends):
            errors = [max(abs(upper - problem.known), lower - least) for lower, upper in column]
            solved = sum(error <= TOLERANCE for error in errors)
            totals[k] += solved
            cells.append(f"{max(errors):.1e}" if seeds == 1 else f"{solved} ({max(errors):.1e})")
        rows.append([problem.name, *cells])
        print("  ".join(rows[-1]), flush=True)
    return [["problem", *RIVALS], *rows, ["solved", *map(str, totals)]]


def _row(
    name: str, dim: int, known: Any, error: str, many: list[Any], errors: list[float] | None = None
) -> dict[str, Any]:
    row = {
        **{"problem": name, "d": dim, "known": known, "largest error": error, "seeds": len(many)},
        "success": sum(found.success for found in many),
        "evaluations": round(np.mean([found.nfev for found in many])),
        "within 1e-3": "" if errors is None else sum(error <= 1e-3 for error in errors),
    }
    print("  ".join(str(value) for value in row.values()), flush=True)
    return row


def main() -> None:
    """Measure, and print or write the values."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed in place of five")
    parser.add_argument("--table", action="store_true", help="write the table of the page")
    parser.add_argument("--rivals", action="store_true", help="compare methods, on the page")
    options = parser.parse_args()
    if options.rivals:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        replace_table(PAGE, RIVAL_MARKS, compare_rivals(1), num_labels=1)
        return
    if options.table:
        columns = ("problem", "largest error", "success", "evaluations", "within 1e-3")
        with VALUES.open(encoding="utf-8") as file:
            rows = [[row[name] for name in columns] for row in csv.DictReader(file)]
        replace_table(PAGE, MARKS, [columns, *rows], num_labels=1)
        return
    torch.set_num_threads(1)
    seeds = 1 if options.quick else 5
    rows = [measure_simple(problem, seeds) for problem in problems()]
    rows += [measure_built_in(name, seeds) for name in (*BUILT_IN, *WAVES, "rastrigin")]
    rows.append(measure_levels())
    if not options.quick:
        with VALUES.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()

"""`fedcb2o.minimize` by default on simple bi-level problems and the built-in problems.

    .venv/bin/python benchmarks/bilevel.py [--quick]      # a few minutes; --quick: one seed
    .venv/bin/python benchmarks/bilevel.py --table        # the table of notes/optimiser.md

The simple bi-level problems are the eleven of BOLIBver2 (Zhou, Zemkoho and Tin, "BOLIB: Bilevel
Optimization LIBrary of test problems", 2020): minimise F among the minimisers of f on a set g >= 0.
Their sources are Franke, Mehlitz and Pilecka (2018), Mitsos and Barton (2006), and Shehu, Vuong and
Zemkoho (2019, Example 4.2, whose random data are drawn anew here and whose known value is computed
by proximal gradient descent). L is f, infinite where g < 0; G is F. Example 3.2 of Mitsos and
Barton has no solution: the only minimiser of f violates a constraint of F.

The built-in problems have 20,000 evaluations; the others have the default.
"""

import argparse
import csv
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
    options = parser.parse_args()
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

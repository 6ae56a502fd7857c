"""CB2O, differential evolution, CMA-ES and SLSQP on the problems of docs/when-to-use-cb2o.md.

    python paper/when_to_use.py [--runs 5]
    python paper/when_to_use.py --figures docs/figures

It runs the page's code for the problems, and prints the page's tables or draws its figures. CMA-ES
needs the package `cma`.
"""

import argparse
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from scipy import optimize

import fedcb2o

PAGE = Path(__file__).parents[1] / "docs" / "when-to-use-cb2o.md"
EVALUATIONS = 20_000
WEIGHTS = (1.0, 100.0, 10_000.0)
Array = np.ndarray


class Task:
    """A problem with its test of a solution.

    Attributes:
        name: Name in the table.
        lower: L or violation, [n, d] -> [n], or None.
        upper: Objective, [n, d] -> [n].
        box: Bounds of the coordinates.
        is_solved: Test of a point [d].
        constraints: Constraints of SciPy for SLSQP.
        settings: Settings of CB2O.
    """

    def __init__(
        self, name: str, lower: Any, upper: Any, box: Any, is_solved: Any, **more: Any
    ) -> None:
        self.name = name
        self.lower = lower
        self.upper = upper
        self.box = np.array(box, dtype=float)
        self.is_solved = is_solved
        self.constraints = more.get("constraints", ())
        self.settings = more.get("settings", {})


def page_namespace() -> dict[str, Any]:
    """Run the page's code.

    Returns:
        The names that the code defines.
    """
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    names: dict[str, Any] = {}
    exec("\n".join(blocks), names)  # the project's own page
    return names


def draw_arm(page: dict[str, Any], ax: Axes, postures: Array, **style: Any) -> None:
    """Draw postures of the arm [n, 5] and its target."""
    for elbows in page["elbows"](postures):
        ax.plot(*np.concatenate([[[0, 0]], elbows]).T, "o-", markersize=3, **style)
    ax.plot(*page["TARGET"], "*", color="#D55E00", markersize=12)
    ax.set_aspect("equal")


def draw(page: dict[str, Any], folder: Path) -> None:
    """Draw the page's figures, from the results of its code."""
    size: dict[str, Any] = {"figsize": (4.2, 3.6), "layout": "constrained"}
    figure, ax = plt.subplots(**size)
    draw_arm(page, ax, page["any_posture"].x.numpy(), color="0.8")
    draw_arm(page, ax, page["arm"].x.numpy()[None], color="#0072B2")
    ax.set_title("without G (grey), with least effort (blue)")
    figure.savefig(folder / "when-arm.png", dpi=90)

    figure, axes = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained", sharey=True)
    for ax, (share, postures) in zip(axes, page["postures"].items(), strict=True):
        draw_arm(page, ax, postures, color="#0072B2", alpha=0.6)
        ax.set_title(f"{share:.0%} wrong evaluations")
    figure.savefig(folder / "when-corrupted.png", dpi=90)

    figure, ax = plt.subplots(**size)
    line, margin = page["line"], -page["minus_margin"](page["line"])
    for name, colour in ((-1, "#0072B2"), (1, "#D55E00")):
        ax.plot(*page["centred"][page["side"] == name].T, "o", color=colour, alpha=0.6)
    along = np.array([-np.sin(line[0]), np.cos(line[0])])
    normal = np.array([np.cos(line[0]), np.sin(line[0])])
    for shift, style in ((0, "-"), (margin, ":"), (-margin, ":")):
        ends = (line[1] + shift) * normal + np.outer([-3, 3], along)
        ax.plot(*ends.T, style, color="black")
    ax.set(xlim=(-2.5, 2.5), ylim=(-2.5, 2.5), xlabel="petal length", ylabel="petal width")
    figure.savefig(folder / "when-margin.png", dpi=90)

    figure, ax = plt.subplots(**size)
    plain, found = page["plain"], page["fair"].x.numpy()
    cloud = plain + np.random.default_rng(0).uniform(-0.3, 0.3, (300, 11))
    for models, marker, colour, label in (
        (cloud, ".", "0.7", "random models"),
        (plain, "s", "#D55E00", "logistic regression"),
        (found, "*", "#0072B2", "CB2O"),
    ):
        rates = page["error_rate"](models), page["unfairness"](models)
        ax.plot(*rates, marker, color=colour, markersize=12 if label == "CB2O" else 6, label=label)
    ax.axvline(page["error_rate"](plain), color="black", linestyle=":")
    ax.set(xlabel="share of errors", ylabel="gap between men and women")
    ax.legend()
    figure.savefig(folder / "when-fair.png", dpi=90)


def welded_beam() -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """Return cost and limits of the welded beam (Coello, Computers in Industry 41, 2000).

    Returns:
        The cost [n, 4] -> [n], whose least value is 1.7249, and the limits [n, 4] -> [n, 5], met
        where they are at most 0.
    """
    load, length, elasticity, shear_modulus = 6000.0, 14.0, 30e6, 12e6

    def cost(x: Array) -> Array:
        h, weld, t, b = np.moveaxis(x, -1, 0)
        return 1.10471 * h**2 * weld + 0.04811 * t * b * (length + weld)

    def limits(x: Array) -> Array:
        h, weld, t, b = np.moveaxis(x, -1, 0)
        radius = np.sqrt(weld**2 / 4 + ((h + t) / 2) ** 2)
        inertia = 2 * np.sqrt(2) * h * weld * (weld**2 / 12 + ((h + t) / 2) ** 2)
        direct = load / (np.sqrt(2) * h * weld)
        torsion = load * (length + weld / 2) * radius / inertia
        shear = np.sqrt(direct**2 + direct * torsion * weld / radius + torsion**2)
        bending = 6 * load * length / (b * t**2)
        deflection = 4 * load * length**3 / (elasticity * t**3 * b)
        slenderness = 1 - t / (2 * length) * np.sqrt(elasticity / (4 * shear_modulus))
        buckling = 4.013 * elasticity * np.sqrt(t**2 * b**6 / 36) / length**2 * slenderness
        parts = [shear - 13_600, bending - 30_000, deflection - 0.25, load - buckling, h - b]
        return np.stack(parts, -1)

    return cost, limits


def build_tasks(page: dict[str, Any]) -> list[Task]:
    """Return the rows of the table.

    Args:
        page: Names of the page's code.

    Returns:
        The tasks.
    """
    miss, effort = page["miss"], page["effort"]
    rng = page["rng"]

    def noisy(function: Any, size: float) -> Any:
        return lambda x: function(x) + size * rng.standard_normal(x.shape[:-1])

    def reaches(x: Array) -> bool:
        return bool(np.sqrt(miss(x)) < 0.02 and effort(x) < 1.05 * 1.692)

    hand = {"type": "eq", "fun": lambda x: page["elbows"](x)[-1] - page["TARGET"]}
    tasks = []
    for share in (0.0, 0.1, 0.2):
        name = f"arm, {share:.0%} wrong evaluations" if share else "arm"
        lower, upper = (page["corrupted"](function, share) for function in (miss, effort))
        tasks.append(
            Task(name, lower, upper, page["box"], reaches, constraints=None if share else hand,
                 settings=page["paper"] if share else {})
        )  # fmt: skip
    tasks.append(
        Task(
            "arm, noise of size 0.01",
            noisy(miss, 0.01),
            noisy(effort, 0.01),
            page["box"],
            lambda x: bool(np.sqrt(miss(x)) < 0.1 and effort(x) < 1.2 * 1.692),
            constraints=None,
            settings=page["paper"],
        )
    )

    errors = page["errors"]

    def is_widest(x: Array) -> bool:
        return bool(errors(x) <= 3 and page["minus_margin"](x) < -0.018)

    tasks.append(Task("iris", errors, page["minus_margin"], [(0, 2 * np.pi), (-2, 2)], is_widest))
    plain = page["plain"]
    limit = page["error_rate"](plain)

    def excess(x: Array) -> Array:
        return np.maximum(page["error_rate"](x) - limit, 0)

    tasks.append(
        Task("classifier", excess, page["unfairness"], np.c_[plain - 0.3, plain + 0.3],
             lambda x: excess(x) == 0 and page["unfairness"](x) < 0.01)
    )  # fmt: skip
    cost, limits = welded_beam()
    scale = np.array([13_600, 30_000, 0.25, 6000, 1.0])

    def violation(x: Array) -> Array:
        return np.maximum(limits(x) / scale, 0).sum(-1)

    beam = optimize.NonlinearConstraint(lambda x: limits(x) / scale, -np.inf, 0)
    tasks.append(
        Task("welded beam", violation, cost, [(0.1, 2), (0.1, 10), (0.1, 10), (0.1, 2)],
             lambda x: violation(x) < 1e-6 and cost(x) < 1.01 * 1.7249, constraints=beam)
    )  # fmt: skip

    def rosenbrock(x: Array) -> Array:
        return optimize.rosen(np.moveaxis(x, -1, 0))

    tasks.append(
        Task("Rosenbrock, d = 5", None, rosenbrock, [(-3, 3)] * 5, lambda x: rosenbrock(x) < 0.01)
    )
    return tasks


def by_cb2o(task: Task, settings: dict[str, Any], seed: int) -> Array:
    """Solve a task by CB2O."""
    settings = {
        **settings,
        "maxfev": EVALUATIONS,
        **task.settings,
        "bounds": task.box.tolist(),
        "seed": seed,
    }
    if task.lower is None:
        return fedcb2o.minimize(task.upper, **settings).x.numpy()
    return fedcb2o.minimize(task.lower, task.upper, **settings).x.numpy()


def penalty(task: Task, weight: float) -> Callable[[Array], Array]:
    """Return the objective with a weighted L, [n, d] -> [n]."""
    if task.lower is None:
        return task.upper
    return lambda x: task.upper(x) + weight * task.lower(x)


def by_de(task: Task, weight: float, seed: int) -> Array:
    """Solve a task by differential evolution with a penalty."""
    objective = penalty(task, weight)
    size = 15 * len(task.box)
    result = optimize.differential_evolution(
        lambda x: objective(x.T), task.box.tolist(), seed=seed, maxiter=EVALUATIONS // size - 1,
        popsize=15, polish=False, tol=0, vectorized=True, updating="deferred",
    )  # fmt: skip
    return result.x


def by_cma(task: Task, weight: float, seed: int) -> Array:
    """Solve a task by CMA-ES with a penalty, with restarts while evaluations are left."""
    import cma

    objective = penalty(task, weight)
    low, high = task.box.T
    generator = np.random.default_rng(seed)
    options = {"bounds": [low.tolist(), high.tolist()], "popsize": 40, "verbose": -9}
    options["CMA_stds"] = (high - low) / 4
    ends = []
    count = 0
    while count < EVALUATIONS:
        options |= {"maxfevals": EVALUATIONS - count, "seed": int(generator.integers(1, 2**31))}
        search = cma.CMAEvolutionStrategy(generator.uniform(low, high), 1.0, options)
        while not search.stop():
            points = np.array(search.ask())
            search.tell(list(points), objective(points).tolist())
        count += search.countevals + 1
        end = np.array(search.result.xfavorite)
        ends.append((float(objective(end)), end))
    return min(ends, key=lambda pair: pair[0])[1]


def by_slsqp(task: Task, seed: int) -> Array:
    """Solve a task by SLSQP with exact constraints, or with L as one.

    It restarts from uniform points while evaluations are left. The result is the end with the least
    L, and the least objective where L is within 1e-6.
    """
    low, high = task.box.T
    constraints = task.constraints
    if constraints is None or (not constraints and task.lower is not None):
        constraints = {"type": "eq", "fun": task.lower}
    generator = np.random.default_rng(seed)
    ends = []
    count = 0
    while count < EVALUATIONS:
        result = optimize.minimize(
            task.upper,
            generator.uniform(low, high),
            method="SLSQP",
            bounds=task.box.tolist(),
            constraints=constraints or (),
        )
        count += result.nfev
        violation = 0.0 if task.lower is None else float(task.lower(result.x))
        if np.isfinite(result.x).all():
            ends.append((max(violation, 1e-6), float(task.upper(result.x)), tuple(result.x)))
    return np.array(min(ends)[2])


def main() -> None:
    """Print the tables, or draw the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--figures", type=Path)
    arguments = parser.parse_args()
    runs = range(arguments.runs)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    page = page_namespace()
    if arguments.figures:
        draw(page, arguments.figures)
        return
    tasks = build_tasks(page)

    print("| weight w | " + " | ".join(f"{weight:g}" for weight in WEIGHTS) + " |")
    print("|---|" + "--:|" * len(WEIGHTS))
    by_weight = [[by_de(tasks[0], weight, seed) for seed in runs] for weight in WEIGHTS]
    for name, measure in (
        ("effort", page["effort"]),
        ("distance from the target", lambda x: np.sqrt(page["miss"](x))),
    ):
        medians = (np.median([measure(x) for x in points]) for points in by_weight)
        print(f"| {name} | " + " | ".join(f"{median:.3g}" for median in medians) + " |")

    print("\n| problem | CB2O | DE | CMA-ES | SLSQP |\n|---|--:|--:|--:|--:|")
    for task in tasks:
        counts = [sum(task.is_solved(by_cb2o(task, page["settings"], seed)) for seed in runs)]
        for method in (by_de, by_cma):
            weights = WEIGHTS if task.lower is not None else (1.0,)
            solved = [
                sum(task.is_solved(method(task, weight, seed)) for seed in runs)
                for weight in weights
            ]
            counts.append(max(solved))
        counts.append(sum(task.is_solved(by_slsqp(task, seed)) for seed in runs))
        print(
            f"| {task.name} | " + " | ".join(str(int(count)) for count in counts) + " |", flush=True
        )


if __name__ == "__main__":
    main()

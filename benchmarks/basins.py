"""Share of right and of wrong successes on random problems with basins of unequal width.

    .venv/bin/python benchmarks/basins.py [--problems 1000] [--first 0]

Each problem has 2 to 8 basins at random places of [-5, 5]^d, d = 1, 2, 3 or 5. The share of the box
in a basin is log-uniform between 1/500 and 1/5, whatever the depth of the basin, so that the best
one is often the narrowest. Four kinds take turns:

- paraboloids: the minimum of paraboloids, without G;
- wells: a shallow bowl minus Gaussian functions, without G;
- islands: a linear objective, and the union of balls as a constraint;
- two levels: a linear G, and L the squared distance from the union of balls.

A run is right if the value at the returned x is within 0.01 of the known one, and x is feasible to
0.001. Settings are the defaults. Problems 0 to 199 were used to choose settings of the optimiser.
"""

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

import fedcb2o

DIMS = (1, 2, 3, 5)
HALF = 5.0
SHARES = (0.002, 0.2)
TOLERANCE = 0.01
KINDS = ("paraboloids", "wells", "islands", "two levels")


class Basins(NamedTuple):
    """Centres [k, d], radii [k] and depths [k]."""

    centres: Tensor
    radii: Tensor
    depths: Tensor


class Task(NamedTuple):
    """The arguments of `minimize`, the known value, and the value and violation at a point."""

    kind: str
    dim: int
    settings: dict[str, Any]
    known: float
    value: Callable[[Tensor], Tensor]
    violation: Callable[[Tensor], Tensor]


def draw_basins(generator: np.random.Generator, dim: int) -> Basins:
    """Draw basins whose share of the box is log-uniform."""
    count = int(generator.integers(2, 9))
    shares = np.exp(generator.uniform(*np.log(SHARES), count))
    ball = math.pi ** (dim / 2) / math.gamma(dim / 2 + 1)
    radii = 2 * HALF * (shares / ball) ** (1 / dim)
    centres = generator.uniform(-HALF, HALF, (count, dim)) * 0.9
    depths = generator.uniform(0, 1, count)
    # The best basin is better than the second one by a tenth at least.
    best = depths.argmin()
    depths[best] = np.delete(depths, best).min() - generator.uniform(0.1, 1)
    return Basins(*(torch.from_numpy(part) for part in (centres, radii, depths)))


def draw_task(number: int) -> Task:
    """Return a problem by its number."""
    generator = np.random.default_rng((number, 74))
    kind = KINDS[number % len(KINDS)]
    dim = DIMS[number // len(KINDS) % len(DIMS)]
    basins = draw_basins(generator, dim)
    slope = torch.from_numpy(generator.normal(size=dim))
    slope = slope / slope.norm()

    def squares(x: Tensor) -> Tensor:  # squared distances from the centres, in radii
        return (x.unsqueeze(-2) - basins.centres).square().sum(-1) / basins.radii**2

    def paraboloids(x: Tensor) -> Tensor:
        return (basins.depths + 2 * squares(x)).amin(-1)

    def wells(x: Tensor) -> Tensor:
        depths = 1.5 - basins.depths
        return 0.01 * x.square().sum(-1) - (depths * torch.exp(-2 * squares(x))).sum(-1)

    def height(x: Tensor) -> Tensor:
        return x @ slope

    def outside(x: Tensor) -> Tensor:  # distance from the union of balls
        return ((squares(x).sqrt() - 1) * basins.radii).amin(-1)

    def inside(x: Tensor) -> Tensor:
        return torch.zeros(x.shape[:-1])

    box = [(-HALF, HALF)] * dim
    if kind in ("paraboloids", "wells"):
        value = paraboloids if kind == "paraboloids" else wells
        settings = {"lower": value, "bounds": box}
        return Task(kind, dim, settings, least_at_centres(value, basins, dim), value, inside)

    known = float((basins.centres @ slope - basins.radii).min())
    box = [(-3 * HALF, 3 * HALF)] * dim  # balls are inside
    settings = {"lower": height, "bounds": box}
    if kind == "islands":
        settings["constraints"] = optimize.NonlinearConstraint(outside, -np.inf, 0)
    else:
        settings["lower"] = lambda x: outside(x).clamp(min=0).square()
        settings["upper"] = height
    return Task(kind, dim, settings, known, height, outside)


def least_at_centres(value: Callable[[Tensor], Tensor], basins: Basins, dim: int) -> float:
    """Return the least value of local searches from all centres."""
    settings: dict[str, Any] = {"ftol": 1e-14, "gtol": 1e-10}
    ends = [
        optimize.minimize(
            lambda x: float(value(torch.from_numpy(x))),
            centre.numpy(),
            bounds=[(-HALF, HALF)] * dim,
            method="L-BFGS-B",
            options=settings,
        ).fun
        for centre in basins.centres
    ]
    return float(min(ends))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts: Counter[tuple[str, bool, bool]] = Counter()
    evaluations = Counter[str]()
    start = time.monotonic()
    for number in range(options.first, options.first + options.problems):
        task = draw_task(number)
        found = fedcb2o.minimize(**task.settings, seed=number)
        is_right = float(task.value(found.x)) <= task.known + TOLERANCE
        is_right = is_right and float(task.violation(found.x)) <= 1e-3
        counts[task.kind, bool(found.success), is_right] += 1
        evaluations[task.kind] += found.nfev
        if found.success and not is_right:
            print(f"wrong: {number}, {task.kind}, d = {task.dim}, {found.nfev} evaluations")
    titles = ("right success", "wrong success", "no success, x right", "x wrong")
    print("| problems | runs | " + " | ".join(titles) + " | mean evaluations |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    totals = [0] * 4
    for kind in KINDS:
        row = [
            counts[kind, *key]
            for key in ((True, True), (True, False), (False, True), (False, False))
        ]
        totals = [total + count for total, count in zip(totals, row, strict=True)]
        mean = round(evaluations[kind] / max(1, sum(row)))
        print(f"| {kind} | {sum(row)} | " + " | ".join(map(str, (*row, mean))) + " |")
    print(f"| all | {sum(totals)} | " + " | ".join(map(str, totals)) + " | |")
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()

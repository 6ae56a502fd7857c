"""Share of right successes of `fedcb2o.minimize` by default, on problems with many minima.

    .venv/bin/python benchmarks/success.py [--seeds 4]     # minutes

A run is right if the objective at x is within 0.01 of the known value; in the first group, G at a
minimiser of L. The functions of the second group are in Jamil and Yang, "A literature survey of
benchmark functions for global optimisation problems" (2013). Boxes are not symmetric where the
minimiser would be in the middle.
"""

import argparse
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fedcb2o
from fedcb2o import particles
from fedcb2o.particles import objectives

TOLERANCE = 0.01
CENTRE = (0.7, -1.3, 2.6)
SLOPE = (1.0, 0.5, 0.25, 0.7, 0.3)
LEVEL = (3.45, 1.6, -0.7)


class Task(NamedTuple):
    """A problem with the value of its last objective at the solution."""

    name: str
    dim: int
    box: tuple[float, float]
    lower: Callable[[Tensor], Tensor]
    upper: Callable[[Tensor], Tensor] | None
    value: float


def separate_minimisers() -> list[Task]:
    """Return problems whose L has many separate minimisers of equal value."""
    tasks = []
    for dim in (1, 2, 3):
        centre = torch.tensor(CENTRE[:dim], dtype=torch.float64)
        nearest = 2 * (centre / 2).round()
        tasks.append(
            Task(
                "grid", dim, (-10, 10), lambda x: torch.sin(math.pi * x / 2).square().sum(-1),
                objectives.paraboloid(*CENTRE[:dim]),
                float((nearest - centre).square().sum()),
            )
        )  # fmt: skip
    for dim in (2, 3, 5):
        slope = torch.tensor(SLOPE[:dim], dtype=torch.float64)
        tasks.append(
            Task(
                "corners", dim, (-4, 4), lambda x: (x.square() - 4).square().sum(-1),
                functools.partial(torch.matmul, other=slope), -2 * float(slope.sum()),
            )
        )  # fmt: skip
    for dim in (2, 3):
        level = torch.tensor(LEVEL[:dim], dtype=torch.float64)
        distance = float((level - level.round()).norm()) - 0.2  # to the nearest ball
        tasks.append(
            Task(
                "balls", dim, (-5, 5),
                lambda x: ((x - x.round()).square().sum(-1) - 0.04).clamp(min=0),
                objectives.paraboloid(*LEVEL[:dim]), distance**2,
            )
        )  # fmt: skip
    for name in ("waves-1d", "waves-2d"):
        waves = particles.problem(name)
        target = torch.tensor(waves.target, dtype=torch.float64)
        tasks.append(
            Task(name, waves.dim, waves.box, waves.lower, waves.upper, float(target.norm()))
        )
    return tasks


def multimodal() -> list[Task]:
    """Return multimodal functions without G."""

    def rastrigin(x: Tensor) -> Tensor:
        return (x.square() - 10 * torch.cos(2 * math.pi * x) + 10).sum(-1)

    def ackley(x: Tensor) -> Tensor:
        bowl = torch.exp(-0.2 * x.square().mean(-1).sqrt())
        return 20 + math.e - 20 * bowl - torch.exp(torch.cos(2 * math.pi * x).mean(-1))

    def griewank(x: Tensor) -> Tensor:
        root = torch.arange(1, x.shape[-1] + 1).sqrt()
        return x.square().sum(-1) / 4000 - torch.cos(x / root).prod(-1) + 1

    def schwefel(x: Tensor) -> Tensor:
        return 418.9828872724338 * x.shape[-1] - (x * x.abs().sqrt().sin()).sum(-1)

    def styblinski(x: Tensor) -> Tensor:
        return (x**4 - 16 * x**2 + 5 * x).sum(-1) / 2 + 39.16616570377142 * x.shape[-1]

    def michalewicz(x: Tensor) -> Tensor:
        index = torch.arange(1, x.shape[-1] + 1)
        return -(torch.sin(x) * torch.sin(index * x.square() / math.pi) ** 20).sum(-1)

    def drop_wave(x: Tensor) -> Tensor:
        square = x.square().sum(-1)
        return 1 - (1 + torch.cos(12 * square.sqrt())) / (square / 2 + 2)

    pi_box = (0.0, math.pi)
    return [
        *(Task("Rastrigin", dim, (-5.12, 4), rastrigin, None, 0) for dim in (2, 3, 5, 10)),
        *(Task("Ackley", dim, (-30, 20), ackley, None, 0) for dim in (2, 5, 10)),
        *(Task("Griewank", dim, (-60, 40), griewank, None, 0) for dim in (2, 5, 10)),
        *(Task("Schwefel", dim, (-500, 500), schwefel, None, 0) for dim in (2, 4, 6)),
        *(Task("Styblinski-Tang", dim, (-5, 5), styblinski, None, 0) for dim in (2, 4, 6)),
        Task("Michalewicz", 2, pi_box, michalewicz, None, -1.801303410098553),
        Task("Michalewicz", 5, pi_box, michalewicz, None, -4.687658179088148),
        Task("drop wave", 2, (-5.12, 4), drop_wave, None, 0),
    ]


def is_right(task: Task, found: Any) -> bool:
    """Return whether x has the known value."""
    if task.upper is None:
        return float(found.lower) - task.value <= TOLERANCE
    return abs(float(found.upper) - task.value) <= TOLERANCE


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    seeds = range(parser.parse_args().seeds)
    torch.set_num_threads(1)
    print("| problems | runs | right success | wrong success | no success, x right | x wrong |")
    print("|---|--:|--:|--:|--:|--:|")
    for title, tasks in (
        ("separate minimisers of L", separate_minimisers()),
        ("multimodal, without G", multimodal()),
    ):
        counts = {(success, right): 0 for success in (True, False) for right in (True, False)}
        for task in tasks:
            for seed in seeds:
                found = fedcb2o.minimize(
                    task.lower, task.upper, task.dim, bounds=task.box, seed=seed
                )
                key = (bool(found.success), is_right(task, found))
                counts[key] += 1
                if key == (True, False):
                    print(f"wrong: {task.name}, d = {task.dim}, seed {seed}")
        row = [title, len(tasks) * len(seeds), *counts.values()]
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


if __name__ == "__main__":
    main()

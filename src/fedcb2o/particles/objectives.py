"""Problems (L, G) with a known solution.

An objective maps an ensemble [..., d] to values [...]. The bi-level problems are those of the CB2O
literature: García Trillos, Kumar Akash, Li, Riedl and Zhu, "CB2O: Consensus-based bi-level
optimization" (arXiv 2411.13394). The `lower` of a problem may be one objective per cluster.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.particles._paper import Paper
from fedcb2o.particles.dynamics import Objective
from fedcb2o.plugins import did_you_mean

__all__ = ["Problem", "problem", "problems"]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem with its solution.

    `fedcb2o.minimize(problem.lower, problem.upper, problem.dim, **problem.settings)` solves it.

    Attributes:
        name: Name on the command line.
        title: Title of figures.
        lower: L, or one objective per cluster.
        upper: G, or None.
        dim: d.
        target: Minimiser of G among the minimisers of L, [d] or [clusters, d].
        box: Sides of the square in figures.
        bad: Minimiser of L that is bad for G, for attackers.
        lure: Minimiser of G, for attackers.
        settings: Settings of `minimize`.
    """

    name: str
    title: str
    lower: Any
    upper: Objective | None
    dim: int
    target: tuple[Any, ...]
    box: tuple[float, float] = (-3.0, 3.0)
    bad: tuple[float, ...] | None = None
    lure: tuple[float, ...] | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def num_clusters(self) -> int:
        """Number of clusters, one per objective in `lower`."""
        return 1 if callable(self.lower) else len(self.lower)


def problem(name: str) -> Problem:
    """Return a built-in problem.

    Args:
        name: Name of the problem.

    Returns:
        The problem.

    Raises:
        ConfigError: There is no such problem.
    """
    built_in = problems()
    if name not in built_in:
        others = f"{did_you_mean(name, built_in)} Built in: {', '.join(built_in)}"
        raise ConfigError(f"there is no problem `{name}`.{others}")
    return built_in[name]


def problems() -> dict[str, Problem]:
    """Return all built-in problems.

    Returns:
        Problems by name.
    """
    root = math.sqrt(0.5)
    circles = (circle_about(-1.5, 0.0), circle_about(1.5, 0.0))
    lowest = ((-1.5, -1.0), (1.5, -1.0))
    plain: dict[str, Any] = {}
    gradient = {"dynamics": Paper(lambda2=0.1, sigma2=0.01), "clusters": True}
    noise = {"dynamics": Paper(sigma1=4.0, dt=0.05), "maxiter": 1000}
    square, far = (-3.0, 3.0), (-10.0, 10.0)
    # fmt: off
    rows: tuple[tuple[Any, ...], ...] = (
        ("circle", "G a paraboloid about (2, 0), L the unit circle",
         circle, paraboloid(2.0, 0.0), 2, (1.0, 0.0), square, (-1.0, 0.0), (2.0, 0.0), plain),
        ("circle-ackley", "G Ackley's function about a point of the circle, L the unit circle",
         circle, ackley(root, -root), 2, (root, -root), square, (-1.0, 0.0), (root, -root),
         _PUBLISHED),
        ("circle-ackley-inside", "G Ackley's function about (1/2, 1/3), L the unit circle",
         circle, ackley(1 / 2, 1 / 3), 2, (0.7817183879, 0.6236315916), square, (-1.0, 0.0),
         (1 / 2, 1 / 3), _PUBLISHED),
        ("parabola-ackley", "G Ackley's function about (1/2, 1/3), L the parabola x2 = x1^2",
         parabola, ackley(1 / 2, 1 / 3), 2, (0.5427013393, 0.2945247437), square, (-1.5, 2.25),
         (1 / 2, 1 / 3), _PUBLISHED),
        ("waves-1d", "G = |x|, L a sum of waves with many local minima",
         waves_1d, norm, 1, (-2.57,), far, (3.71,), (0.0,),
         _published_waves(beta=0.15, maxiter=201)),
        ("waves-2d", "G = |x|, L waves in both coordinates",
         waves_2d, norm, 2, (-2.97, 0.0), far, None, (0.0, 0.0),
         _published_waves(beta=0.10, maxiter=1001)),
        ("rastrigin", "no G: Rastrigin's function in 10 dimensions, by CBO",
         rastrigin, None, 10, (0.0,) * 10, square, None, None, noise),
        ("two-circles",
         "two clusters: L_k the unit circles about (-1.5, 0) and (1.5, 0), G the height x2",
         circles, last_coordinate, 2, lowest, square, (-1.5, 1.0), None, gradient),
    )
    # fmt: on
    return {row[0]: Problem(*row) for row in rows}


def circle(x: Tensor) -> Tensor:
    """Compute (|x|^2 - 1)^2, whose minimisers are the unit circle."""
    return (x.square().sum(-1) - 1).square()


def circle_about(*centre: float) -> Objective:
    """Return `circle` about another centre."""
    return lambda x: circle(x - x.new_tensor(centre))


def parabola(x: Tensor) -> Tensor:
    """Compute (x1^2 - x2)^2, whose minimisers are a parabola."""
    return (x[..., 0].square() - x[..., 1]).square()


def paraboloid(*centre: float) -> Objective:
    """Return the function |x - centre|^2."""
    return lambda x: (x - x.new_tensor(centre)).square().sum(-1)


def norm(x: Tensor) -> Tensor:
    """Compute |x|."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return length


def last_coordinate(x: Tensor) -> Tensor:
    """Return the last coordinate."""
    return x[..., -1]


def ackley(*centre: float, A: float = 20.0, a: float = 0.2, b: float = 3.0) -> Objective:
    """Return Ackley's function about a centre v, where it is 0.

    It is -A exp(-a sqrt(b^2/d |x - v|^2)) - exp(sum cos(2 pi b (x - v)) / d) + e + A.
    """

    def objective(x: Tensor) -> Tensor:
        offset = x - x.new_tensor(centre)
        scale = -a * b / math.sqrt(x.shape[-1])
        bowl = torch.exp(scale * torch.linalg.vector_norm(offset, dim=-1))
        waves = torch.exp(torch.cos(2 * math.pi * b * offset).mean(-1))
        return -A * bowl - waves + math.e + A

    return objective


def rastrigin(x: Tensor) -> Tensor:
    """Compute sum (x_k^2 + 10 - 10 cos(2 pi x_k)), with the minimiser 0."""
    return norm(x).square() - 10 * torch.cos(2 * math.pi * x).sum(-1) + 10 * x.shape[-1]


def waves_1d(x: Tensor) -> Tensor:
    """Compute (sin 3x + cos(x - 1)) / 2."""
    return (torch.sin(3 * x[..., 0]) + torch.cos(x[..., 0] - 1)) / 2


def waves_2d(x: Tensor) -> Tensor:
    """Compute sin((x1 - 0.1)^2 / 2) + cos(x2 - pi)."""
    return torch.sin((x[..., 0] - 0.1).square() / 2) + torch.cos(x[..., 1] - math.pi)


def far_box(generator: np.random.Generator, n: int, dim: int) -> Any:
    """Sample points uniformly in [-10, 10]^d."""
    return generator.uniform(-10, 10, (n, dim))


# Settings of the published CB2O experiments.
_PUBLISHED = {
    "dynamics": Paper(alpha=30.0, beta=1 / 20, xtol=0.0),
    "num_particles": 50,
    "maxiter": 300,
}


def _published_waves(*, beta: float, maxiter: int) -> dict[str, Any]:
    dynamics = Paper(alpha=20.0, beta=beta, sigma1=10.0, batch=100, xtol=0.0)
    place = {"initial": far_box, "num_particles": 200}
    return {"dynamics": dynamics, **place, "maxiter": maxiter}

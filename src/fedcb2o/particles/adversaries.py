"""Malicious particles: any drift a_t and diffusion A_t that see the whole ensemble (eq:dyn_macro_m).

An adversary of your own is one function of a `View` that returns the pair (a_t, A_t), in an `Adversary` with a number
of particles and where they start:

    def to_origin(view):
        return -view.theta_m, 0.0

    fedcb2o.minimize(lower, upper, dim, adversaries=Adversary(to_origin, num_particles=10, initial=[3.0, 3.0]))

García Trillos et al. (arXiv 2412.02535), Section 1, "Consensus-Based Bi-Level Optimization in the Presence of Attacks".
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.particles import settings

__all__ = [
    "Adversary",
    "View",
    "gradient_flow",
    "greedy",
    "oscillating",
    "random",
    "static",
    "tracking",
]

Point = Tensor | np.ndarray | Sequence[float | int]


@dataclasses.dataclass(frozen=True)
class View:
    """All that an adversary may look at before the step n, at the time t = n dt: everything.

    `theta` are the benign particles [runs, n, d], `theta_m` the adversary's own [runs, n_m, d], `m` the consensus
    points [runs, clusters, d] of this step. `m_if` maps points [runs, c, d] to the consensus points
    [runs, c, clusters, d] that there would be if all the adversary's particles stood at that one point, and `m_without`
    are those without the adversary's particles. `generators` draw, one a run.
    """

    n: int
    t: float
    dt: float
    theta: Float[Tensor, "r n d"]
    theta_m: Float[Tensor, "r n_m d"]
    m: Float[Tensor, "r k d"]
    m_if: Callable[[Tensor], Tensor]
    m_without: Callable[[], Tensor]
    generators: Sequence[np.random.Generator]

    def to(self, where: Tensor) -> Tensor:
        """The drift a_t that puts the particles there, [..., d], in this one step."""
        return (where - self.theta_m) / self.dt

    def normal(self, *shape: int) -> Float[Tensor, "r *shape"]:
        """Standard normals, each run's from its own stream."""
        drawn = np.stack([generator.standard_normal(shape) for generator in self.generators])
        return torch.from_numpy(drawn).to(self.theta)


Move = Callable[[View], tuple[Tensor | float, Tensor | float]]


@dataclasses.dataclass(frozen=True)
class Adversary:
    """Malicious particles that move together by d theta = a_t dt + A_t dB (eq:dyn_macro_m).

    `move` maps a View to the pair (a_t, A_t): a_t of shape [runs, n_m, d] or any that broadcasts to it, A_t likewise,
    for each coordinate, or a matrix for each particle, [runs, n_m, d, d]. `initial` is one point [d], a point for each
    particle [n_m, d], or None: drawn by the sampler `initial`, or from the box. `mass` is the share w_m that they have
    together in the measure; None counts every particle of the system alike.
    """

    move: Move
    num_particles: int
    initial: Point | None = None
    mass: float | None = None

    def __post_init__(self) -> None:
        settings.check_function("an adversary's `move`", self.move)
        settings.check_count("an adversary's `num_particles`", self.num_particles)
        if (
            self.mass is not None
            and not 0 <= settings.check_number("an adversary's `mass`", self.mass) < 1
        ):
            raise ConfigError(
                f"an adversary's `mass` (w_m) must be at least 0 and below 1, got {self.mass}"
            )


def static(num_particles: int, at: Point, *, mass: float | None = None) -> Adversary:
    """Particles that stand still, at one point [d] or at one each [n_m, d].

    At a minimiser of L that is bad for G they capture the consensus point, if delta_q is 0, as soon as w_m is so near
    to beta that fewer than two benign particles are left in Q_beta (`capture.benign_left`).
    At the minimiser of G they are filtered as long as beta is small.
    """
    return Adversary(lambda view: (0.0, 0.0), num_particles, at, mass)


def tracking(num_particles: int, offset: Point, *, mass: float | None = None) -> Adversary:
    """Particles that stand at the first cluster's consensus point plus an offset [d], step after step."""

    def move(view: View) -> tuple[Tensor, float]:
        return view.to(view.m[:, :1] + _point("offset", offset, view.theta)), 0.0

    return Adversary(move, num_particles, None, mass)


def random(
    num_particles: int,
    *,
    sigma: float = 1.0,
    initial: Point | None = None,
    mass: float | None = None,
) -> Adversary:
    """Particles in Brownian motion with diffusion sigma."""
    return Adversary(lambda view: (0.0, sigma), num_particles, initial, mass)


def oscillating(
    num_particles: int, between: tuple[Point, Point], *, period: float, mass: float | None = None
) -> Adversary:
    """Particles that swing between two points [d], as a sine of the time with that period."""
    settings.check_positive("`period`", period)
    if not isinstance(between, Sequence | np.ndarray | Tensor) or len(between) != 2:
        raise ConfigError("an adversary's `between` must be two points")

    def move(view: View) -> tuple[Tensor, float]:
        share = (1 - math.cos(2 * math.pi * (view.t + view.dt) / period)) / 2
        a, b = (_point("between", point, view.theta) for point in between)
        return view.to(a + share * (b - a)), 0.0

    return Adversary(move, num_particles, between[0], mass)


def gradient_flow(
    num_particles: int,
    objective: Callable[[Tensor], Tensor],
    *,
    rate: float = 1.0,
    initial: Point | None = None,
    mass: float | None = None,
) -> Adversary:
    """Particles that descend an objective of theirs ([..., d] -> [...]): L, G, minus G, or a goal of their own."""

    def move(view: View) -> tuple[Tensor, float]:
        theta = view.theta_m.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(objective(theta).sum(), theta)
        return -rate * slope, 0.0

    return Adversary(move, num_particles, initial, mass)


def greedy(
    num_particles: int,
    *,
    candidates: int = 32,
    reach: float = 1.0,
    initial: Point | None = None,
    mass: float | None = None,
) -> Adversary:
    """Particles that step after step move the consensus point as far as they can from where it would be without them.

    All stand at one point: the best of as many candidates as given, in the distance by which they move the consensus
    point (of all clusters, in the root of the sum of squares). The candidates are the point of the step before, random
    benign particles, and steps from both of random length up to about `reach`.
    """
    settings.check_count("`candidates`", candidates, least=2)

    def move(view: View) -> tuple[Tensor, float]:
        runs, n, dim = view.theta.shape
        chosen = np.stack([each.integers(n, size=candidates - 1) for each in view.generators])
        start = view.theta.gather(
            1, torch.from_numpy(chosen).to(view.theta.device).unsqueeze(-1).expand(-1, -1, dim)
        )
        own = view.theta_m[:, :1]
        half = (candidates - 1) // 2
        start[:, :half] = own
        length = reach * 10.0 ** -view.normal(candidates - 1, 1).abs()
        length[:, half : half + half // 2] = 0.0  # some benign particles as they are
        points = torch.cat([own, start + length * view.normal(candidates - 1, dim)], 1)
        moved = (view.m_if(points) - view.m_without().unsqueeze(1)).square().sum((-2, -1))
        best = moved.nan_to_num(nan=-1.0).argmax(1)
        return view.to(points[torch.arange(runs), best].unsqueeze(1)), 0.0

    return Adversary(move, num_particles, initial, mass)


def _point(name: str, value: Point, like: Tensor) -> Float[Tensor, " d"]:
    """One point, as the particles are."""
    try:
        point = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"an adversary's `{name}` must be a point, an array of numbers: {error}"
        ) from error
    if point.shape != like.shape[-1:]:
        raise ConfigError(
            f"an adversary's `{name}` must have the shape {[*like.shape[-1:]]}, got {[*point.shape]}"
        )
    return point

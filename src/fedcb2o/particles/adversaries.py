"""Malicious particles with any drift a_t and diffusion A_t (eq:dyn_macro_m).

García Trillos et al. (arXiv 2412.02535), Section 1, "Consensus-Based Bi-Level Optimization in the
Presence of Attacks".

Example:
    >>> static(10, [3.0, 3.0]).num_particles
    10
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.docstrings import share_entries
from fedcb2o.errors import ConfigError
from fedcb2o.particles import settings

Point = Tensor | np.ndarray | Sequence[float | int]


@dataclasses.dataclass(frozen=True)
class View:
    """The complete knowledge of an adversary before step n.

    Attributes:
        n: Step.
        t: Time n dt.
        dt: Step of time.
        theta: Benign particles [runs, n, d].
        theta_m: The adversary's own particles [runs, n_m, d].
        m: Consensus points of this step [runs, clusters, d].
        generators: Sources of randomness, one per run.
    """

    n: int
    t: float
    dt: float
    theta: Float[Tensor, "r n d"]
    theta_m: Float[Tensor, "r n_m d"]
    m: Float[Tensor, "r k d"]
    generators: Sequence[np.random.Generator]

    def to(self, where: Tensor) -> Tensor:
        """Return the drift to a position in this step.

        Args:
            where: Positions, broadcast to [runs, n_m, d].

        Returns:
            The drift a_t.
        """
        return (where - self.theta_m) / self.dt

    def normal(self, *shape: int) -> Float[Tensor, "r *shape"]:
        """Draw standard normals, each run's from its own stream.

        Args:
            shape: Shape for one run.

        Returns:
            Normals [runs, *shape].
        """
        drawn = np.stack([generator.standard_normal(shape) for generator in self.generators])
        return torch.from_numpy(drawn).to(self.theta)


_Move = Callable[[View], tuple[Tensor | float, Tensor | float]]


@dataclasses.dataclass(frozen=True)
class Adversary:
    """Malicious particles with d theta = a_t dt + A_t dB (eq:dyn_macro_m).

    Attributes:
        move: Function of a `View` that returns the pair (a_t, A_t). a_t broadcasts to
            [runs, n_m, d]; A_t does too, for each coordinate, or is a matrix for each particle,
            [runs, n_m, d, d].
        num_particles: Number of particles n_m.
        initial: One point [d], a point per particle [n_m, d], or None: drawn by the sampler
            `initial` of `minimize`, or from the box.
        mass: Share w_m of all these particles in the measure; None for particles that count like
            all others.
    """

    move: _Move
    num_particles: int
    initial: Point | None = None
    mass: float | None = None

    def __post_init__(self) -> None:
        settings.check_function("an adversary's `move`", self.move)
        settings.check_count("an adversary's `num_particles`", self.num_particles)
        mass = settings.check_number("an adversary's `mass`", self.mass or 0.0)
        if not 0 <= mass < 1:
            raise ConfigError(f"an adversary's `mass` must be at least 0 and below 1, got {mass}")


def static(num_particles: int, at: Point, *, mass: float | None = None) -> Adversary:
    """Make particles that do not move.

    At a minimiser of L that is bad for G and with delta_q = 0, they capture the consensus point as
    soon as w_m is so close to beta that fewer than two benign particles are left in Q_beta
    (`theory.benign_left`). At the minimiser of G they are filtered as long as beta is small.

    Args:
        at: One point [d], or a point per particle [n_m, d].
    """
    return Adversary(lambda view: (0.0, 0.0), num_particles, at, mass)


def tracking(num_particles: int, offset: Point, *, mass: float | None = None) -> Adversary:
    """Make particles that follow the first cluster's consensus point at an offset.

    Args:
        offset: Offset [d].
    """

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
    """Make particles in Brownian motion.

    Args:
        sigma: Diffusion.
    """
    return Adversary(lambda view: (0.0, sigma), num_particles, initial, mass)


def oscillating(
    num_particles: int, between: tuple[Point, Point], *, period: float, mass: float | None = None
) -> Adversary:
    """Make particles that oscillate between two points, as a sine of the time.

    Args:
        between: Two points [d].
        period: Period, above 0.

    Raises:
        ConfigError: `between` does not hold two points, or `period` is not above 0.
    """
    settings.check_positive({"period": period})
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
    """Make particles that descend L, G, minus G or another objective.

    Args:
        objective: Function [..., d] -> [...].
        rate: Factor of the gradient.
    """

    def move(view: View) -> tuple[Tensor, float]:
        theta = view.theta_m.detach().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(objective(theta).sum(), theta)
        return -rate * gradient, 0.0

    return Adversary(move, num_particles, initial, mass)


def _point(name: str, value: Point, like: Tensor) -> Float[Tensor, " d"]:
    """Convert a point to the dtype and device of the particles."""
    try:
        point = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"an adversary's `{name}` must be a point, an array of numbers: {error}"
        ) from error
    if point.shape != like.shape[-1:]:
        shapes = f"{[*like.shape[-1:]]}, got {[*point.shape]}"
        raise ConfigError(f"an adversary's `{name}` must have the shape {shapes}")
    return point


_ARGUMENTS = {
    "num_particles": "Number of particles.",
    "initial": "Initial position, as in `Adversary`.",
    "mass": "Share w_m of the particles.",
}
for _adversary in (static, tracking, random, oscillating, gradient_flow):
    share_entries(_adversary, _ARGUMENTS, "The adversary.")

"""Particle systems as functions: evaluate an ensemble, find consensus points, take a step.

The systems are CB2O (eq:dyn_micro2), its malicious particles (eq:dyn_macro), FedCBO
(eq:fedcbo_dynamic) and FedCB2O (eq:fedcb2o_dynamics) of García Trillos et al. (arXiv 2412.02535),
for any number of clusters. Plain CBO is FedCBO with one cluster and without gradient. Ensembles are
[runs, n, d]; runs are independent.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedcb2o import consensus
from fedcb2o.errors import ConfigError, RunError, describe_type
from fedcb2o.particles.functions import require_unwritten, write_count

Objective = Callable[[Tensor], Tensor]
"""A function of points [..., d] that returns a value [...] for each."""

_FLOAT_TYPES = (torch.float64, torch.float32)


@dataclasses.dataclass(frozen=True)
class Values:
    """Values of the objectives of one cluster for an ensemble."""

    lower: Float[Tensor, "*a n"]
    upper: Float[Tensor, "*a n"] | None  # G of each particle; None without G
    gradient: Float[Tensor, "*a n d"] | None = None  # gradient of L; None where it is not needed
    # True for particles in the ball B_R(0); None for all.
    in_ball: Bool[Tensor, "*a n"] | None = None
    # True for particles with a NaN or infinite value, whose L and G read as infinity; None for no
    # such particle.
    excluded: Bool[Tensor, "*a n"] | None = None
    # L of particles whose G alone is +infinity, otherwise +infinity; None for no excluded particle,
    # or without G.
    barred_lower: Float[Tensor, "*a n"] | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> "Values":
        """Apply a function to each tensor; None stays None."""
        tensors = (getattr(self, field.name) for field in dataclasses.fields(self))
        results = (None if tensor is None else function(tensor) for tensor in tensors)
        return Values(*results)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class ConsensusParams:
    """Parameters of the consensus point at a step."""

    alpha: float  # weight parameter of exp(-alpha G)
    beta: float  # share of the ensemble in Q_beta (eq:Q_beta)
    delta_q: float = 0.0
    radius: float = math.inf  # R of the ball B_R(0)
    averaged: bool = False  # whether Q_beta uses the averaged quantile


@dataclasses.dataclass(frozen=True)
class EvaluationRequest:
    """A request for L, G and the gradient of L at points [runs, n, d]."""

    theta: Float[Tensor, "r n d"]
    lower: Objective
    upper: Objective | None
    flat: bool = False  # whether objectives receive [n, d] in place of [1, n, d]
    gradient: Objective | bool = False  # True means autograd
    radius: float = math.inf
    check_writes: bool = False  # whether writes by way of NumPy are noticed too
    # Points that a user of `Search` evaluated unasked, with their values, for the next step.
    own: list[tuple[Tensor, Values]] = dataclasses.field(default_factory=list)

    @property
    def user_points(self) -> Tensor:
        """The points as a user's function receives them."""
        return self.theta[0] if self.flat else self.theta

    def evaluate(self) -> Values:
        """Evaluate L, G and the gradient of L for every particle.

        Particles with a NaN or infinite value or coordinate are excluded. So are those outside the
        ball B_R(0) of `radius` R (eq:Q_beta).
        """
        points = self.user_points
        copy = points.clone() if self.check_writes else None
        shape = points.shape[:-1]

        # `clone` below keeps in-place operations of a user's function away from the leaves, where
        # autograd forbids them.
        slope: Tensor | None = None
        up: Tensor | None = None
        if self.gradient is True:
            leaves = points.detach().requires_grad_()
            with torch.enable_grad():
                low = _evaluate("lower", self.lower, leaves.clone(), copy, shape)
                if not low.requires_grad:
                    raise ConfigError("`lower` has no gradient by autograd: give `gradient`")
                (slope,) = torch.autograd.grad(low.sum(), leaves)
            low = low.detach()
        else:
            low = _evaluate("lower", self.lower, points, copy, shape)
            if self.gradient:
                slope = _evaluate("gradient", self.gradient, points, copy, points.shape)
        if self.upper is not None:
            before = write_count(low)
            up = _evaluate("upper", self.upper, points, copy, shape)
            if write_count(low) != before:
                raise ConfigError("`upper` writes into the values that `lower` returned")
        return to_values(self.theta, low, up, slope, radius=self.radius)


def to_values(
    theta: Float[Tensor, "r n d"],
    low: Float[Tensor, "..."],
    up: Float[Tensor, "..."] | None,
    slope: Float[Tensor, "..."] | None,
    *,
    radius: float = math.inf,
) -> Values:
    """Combine L, G and the gradient of L, and mark the excluded particles.

    With one run, tensors may lack its axis. `radius` is R of the ball B_R(0).
    """
    if low.ndim == 1:  # a single run
        low = low.unsqueeze(0)
        up = None if up is None else up.unsqueeze(0)
        slope = None if slope is None else slope.unsqueeze(0)
    in_ball = None
    if radius != math.inf:
        in_ball = theta.square().sum(-1) <= radius * radius

    # One finite sum is the fast test that all values are finite.
    total = theta.sum().item() + low.sum().item()
    if up is not None:
        total += up.sum().item()
    if math.isfinite(total):
        return Values(low, up, slope, in_ball)

    excluded = ~(low.isfinite() & theta.isfinite().all(-1))
    barred_lower = None
    if up is not None:
        # An infinite G is a bound of the user's. Smaller L behind it makes a result doubtful.
        barred_lower = low.masked_fill(excluded | ~up.isposinf(), torch.inf)
        excluded = excluded | ~up.isfinite()
        up = up.masked_fill(excluded, torch.inf)
    low = low.masked_fill(excluded, torch.inf)
    return Values(low, up, slope, in_ball, excluded, barred_lower)


def consensus_weights(
    values: Values, params: ConsensusParams, mass: Float[Tensor, "... n"] | None = None
) -> Float[Tensor, "*a n"]:
    """Compute the weights of the particles in m_{alpha,beta} (eq:consensus_point).

    Without G they are exp(-alpha L) of all particles (eq:fedcbo_dynamic, eq:fedcbo_ConsensusPoint).
    `mass` is the share of each particle in the measure; None for equal shares. Weights are float64.
    It is a RunError if all values are non-finite, or no particle of Q_beta is in the ball B_R(0).
    """
    mask = values.in_ball
    if values.upper is not None:
        mask = consensus.sublevel_mask(
            values.lower, params.beta, delta_q=params.delta_q, averaged=params.averaged, mass=mass
        )
        if values.in_ball is not None:
            mask = mask & values.in_ball

    objective = values.upper
    if objective is None:
        objective = values.lower
    mu = consensus.weights(objective, params.alpha, mask, mass=mass)
    is_restricted = values.excluded is not None or values.in_ball is not None
    if is_restricted and not (mu.sum(-1) > 0).all():
        if values.excluded is not None and values.excluded.all(-1).any():
            reason = "correct the objectives, start nearer, or take a smaller dt or sigma1"
            count = values.lower.shape[-1]
            raise RunError(f"all {count} particles have NaN or infinite objectives: {reason}")
        raise RunError(
            "no particle of the sub-level set Q_beta is inside the ball of `radius` ="
            f" {params.radius:g} about 0: take a larger radius, or a larger beta or delta_q"
        )
    return mu


def consensus_point(
    theta: Float[Tensor, "r n d"],
    values: Values,
    params: ConsensusParams,
    mass: Float[Tensor, "... n"] | None = None,
) -> Float[Tensor, "r d"]:
    """Compute m_{alpha,beta} of every run (eq:consensus_point, eq:clustered_csp).

    See `consensus_weights` for `mass` and the RunError.
    """
    mu = consensus_weights(values, params, mass)
    if values.excluded is not None:
        # Their weight is 0, and 0 * inf would be NaN.
        theta = theta.masked_fill(values.excluded.unsqueeze(-1), 0.0)
    return consensus.point(mu, theta)


def consensus_step_(
    theta: Float[Tensor, "r n d"],
    m: Float[Tensor, "r d"],
    normals: Float[Tensor, "r n d"] | None,
    *,
    lambda1: float,
    sigma1: float,
    dt: float,
    noise: str,
) -> None:
    """Take an Euler-Maruyama step of eq:dyn_micro2, drift and noise.

    D(theta - m) is |theta - m| Id for "isotropic" noise, as in the paper, and diag(theta - m) for
    "anisotropic" noise. `theta` changes in place, and the memory of `normals` is overwritten.
    Without normals there is no noise.
    """
    m = m.unsqueeze(-2)
    size = sigma1 * math.sqrt(dt)
    if normals is None:
        theta.lerp_(m, lambda1 * dt)
    elif noise == "anisotropic":
        # Every coordinate has its own share of the way to m.
        share = _constant(lambda1 * dt, normals.dtype, normals.device)
        theta.lerp_(m, torch.add(share, normals, alpha=-size, out=normals))
    else:
        length = torch.linalg.vector_norm(theta - m, dim=-1, keepdim=True)
        theta.lerp_(m, lambda1 * dt).addcmul_(normals, length, value=size)


def gradient_step_(
    theta: Float[Tensor, "r n d"],
    gradient: Float[Tensor, "r n d"],
    normals: Float[Tensor, "r n d"] | None,
    *,
    lambda2: float,
    sigma2: float,
    dt: float,
) -> None:
    """Add the gradient terms of eq:fedcb2o_dynamics.

    They are -lambda2 grad L dt and sigma2 |grad L| dB. `theta` changes in place. Without normals
    there is no noise.
    """
    theta.sub_(gradient, alpha=lambda2 * dt)
    if normals is not None:
        length = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
        theta.addcmul_(normals, length, value=sigma2 * math.sqrt(dt))


@functools.lru_cache(maxsize=16)
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a cached scalar tensor.

    Creating it takes a hundredth of a small ensemble's step.
    """
    return torch.tensor(value, dtype=dtype, device=device)


def _evaluate(
    name: str, function: Objective, points: Tensor, copy: Tensor | None, shape: Sequence[int]
) -> Tensor:
    """Call a user's function, and check its result and its writes."""
    before = write_count(points)
    try:
        values: object = function(points)
    except StopIteration as error:  # it would end the steps of `minimize`
        raise ConfigError(
            f"`{name}` raised StopIteration, as an exhausted iterator does"
        ) from error
    if copy is not None or write_count(points) != before:
        require_unwritten(f"`{name}`", function, points, before, copy)

    if not isinstance(values, Tensor):
        raise ConfigError(f"`{name}` must return a tensor, got {describe_type(values)}")
    if values.shape != shape:
        if name == "gradient":
            wrong = f"a tensor of shape {[*shape]}, got a tensor of shape {[*values.shape]}"
            raise ConfigError(f"`gradient` must return {wrong}")
        raise ConfigError(
            f"`{name}` must return one value a particle: shape {[*shape]} for an ensemble of shape"
            f" {[*points.shape]}, got {[*values.shape]}; sum over the last axis, as in"
            " x.square().sum(-1), or take a function of one point by fedcb2o.from_point"
        )
    if values.layout != torch.strided or values.device != points.device:
        got = f"a {values.layout} tensor on {values.device}".replace("torch.", "")
        raise ConfigError(f"`{name}` must return a dense tensor on {points.device}, got {got}")
    if values.dtype in _FLOAT_TYPES:
        return values
    if values.is_complex():
        raise ConfigError(f"`{name}` must return real numbers, got {values.dtype}")
    return values.to(points.dtype)

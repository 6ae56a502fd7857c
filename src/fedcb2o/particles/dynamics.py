"""The particle systems as functions: judge an ensemble, find the consensus points, take an Euler-Maruyama step.

CB2O (eq:dyn_micro2), its malicious particles (eq:dyn_macro), FedCBO (eq:fedcbo_dynamic) and FedCB2O
(eq:fedcb2o_dynamics) of García Trillos et al. (arXiv 2412.02535), for any number of clusters; plain CBO is FedCBO with
one cluster and no gradient. Ensembles are [runs, n, d]: every run is on its own.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedcb2o import consensus
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.particles.objectives import Objective
from fedcb2o.particles.write_guard import require_unwritten, write_count


@dataclasses.dataclass(frozen=True)
class Values:
    """What an ensemble is worth to one cluster: L, and G where there is one.

    `gradient` is that of L. `inside` says who is in the ball B_R(0); None: all. `bad` are the excluded ones, whose L
    and G read as plus infinity; None: nobody.
    """

    lower: Float[Tensor, "*a n"]
    upper: Float[Tensor, "*a n"] | None
    gradient: Float[Tensor, "*a n d"] | None = None
    in_ball: Bool[Tensor, "*a n"] | None = None
    excluded: Bool[Tensor, "*a n"] | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> "Values":
        """The same function of each tensor that is there."""
        parts = (getattr(self, field.name) for field in dataclasses.fields(self))
        return Values(*(None if part is None else function(part) for part in parts))  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class ConsensusParams:
    """The consensus point's settings at a step: alpha, and those of Q_beta (eq:Q_beta); `averaged` is its quantile."""

    alpha: float
    beta: float
    delta_q: float = 0.0
    radius: float = math.inf
    averaged: bool = False


def evaluate_objectives(
    theta: Float[Tensor, "r n d"],
    lower: Objective,
    upper: Objective | None,
    *,
    flat: bool = False,
    gradient: Objective | bool = False,
    radius: float = math.inf,
    check_writes: bool = False,
) -> Values:
    """L and G of every particle, and the gradient of L: by autograd where `gradient` is True, or by that function.

    With `flat` the objectives see [n, d] instead of [1, n, d]. `radius` is R of the ball B_R(0) (eq:Q_beta).
    Particles with a NaN or infinite value or coordinate are excluded. Raises ConfigError for values of a wrong shape or
    kind, and for a function that writes into the particles; looked at `closely`, by way of NumPy too.
    """
    seen = theta[0] if flat else theta
    slope = None
    copy = seen.clone() if check_writes else None
    if gradient is True:
        particles = seen.detach().requires_grad_()
        with torch.enable_grad():
            low = _evaluate_objective("lower", lower, particles.clone(), copy)
            if not low.requires_grad:
                raise ConfigError(
                    "`lower` has no gradient by autograd: give `gradient`, or set lambda2 and sigma2 to 0"
                )
            (slope,) = torch.autograd.grad(low.sum(), particles)
        low = low.detach()
    else:
        low = _evaluate_objective("lower", lower, seen, copy)
        if gradient:
            before = write_count(seen)
            slope = gradient(seen)
            require_unwritten("`gradient`", gradient, seen, before, copy)
            if not isinstance(slope, Tensor) or slope.shape != seen.shape:
                raise ConfigError(
                    f"`gradient` must return a tensor of shape {[*seen.shape]}, got {_describe_type(slope)}"
                )
    up = None if upper is None else _evaluate_objective("upper", upper, seen, copy)
    if flat:
        low = low.unsqueeze(0)
        up = None if up is None else up.unsqueeze(0)
        slope = None if slope is None else slope.unsqueeze(0)
    return to_values(theta, low, up, slope, radius=radius)


def to_values(
    theta: Float[Tensor, "r n d"],
    low: Float[Tensor, "r n"],
    up: Float[Tensor, "r n"] | None,
    slope: Float[Tensor, "r n d"] | None = None,
    *,
    radius: float = math.inf,
) -> Values:
    """L, G and the gradient of L of an ensemble as its Values: who is inside the ball B_R(0), who is excluded."""
    inside = None if radius == math.inf else theta.square().sum(-1) <= radius * radius
    if math.isfinite(
        theta.sum().item() + low.sum().item() + (0.0 if up is None else up.sum().item())
    ):
        return Values(low, up, slope, inside)
    bad = ~(low.isfinite() & theta.isfinite().all(-1))
    if up is not None:
        bad = bad | ~up.isfinite()
        up = up.masked_fill(bad, torch.inf)
    return Values(low.masked_fill(bad, torch.inf), up, slope, inside, bad)


def consensus_weights(
    values: Values, params: ConsensusParams, mass: Float[Tensor, "... n"] | None = None
) -> Float[Tensor, "*a n"]:
    """The weights of the particles in m_{alpha,beta} (eq:consensus_point), in float64.

    Without G they are exp(-alpha L) of all particles (eq:fedcbo_dynamic, eq:fedcbo_ConsensusPoint). `mass` is each
    particle's share where they do not count alike. Raises RunError where no particle is left: all of their values
    non-finite, or nobody of Q_beta inside the ball B_R(0).
    """
    mask = values.in_ball
    if values.upper is not None:
        mask = consensus.sublevel_mask(
            values.lower, params.beta, delta_q=params.delta_q, averaged=params.averaged, mass=mass
        )
        mask = mask if values.in_ball is None else mask & values.in_ball
    mu = consensus.weights(
        values.lower if values.upper is None else values.upper, params.alpha, mask, mass=mass
    )
    if (values.excluded is not None or values.in_ball is not None) and not (mu.sum(-1) > 0).all():
        if values.excluded is not None and values.excluded.all(-1).any():
            raise RunError(
                f"all {values.lower.shape[-1]} particles have NaN or infinite objectives: mend the objectives, start"
                " nearer, or take a smaller dt or sigma1"
            )
        raise RunError(
            f"no particle of the sub-level set Q_beta lies inside the ball of `radius` = {params.radius:g} about 0: take a"
            " larger radius, or a larger beta or delta_q"
        )
    return mu


def consensus_point(
    theta: Float[Tensor, "r n d"],
    values: Values,
    params: ConsensusParams,
    mass: Float[Tensor, "... n"] | None = None,
) -> Float[Tensor, "r d"]:
    """m_{alpha,beta} of every run (eq:consensus_point, eq:clustered_csp)."""
    mu = consensus_weights(values, params, mass)
    return consensus.point(
        mu,
        theta if values.excluded is None else theta.masked_fill(values.excluded.unsqueeze(-1), 0.0),
    )


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
    """One Euler-Maruyama step of eq:dyn_micro2 in place: the drift to the consensus point and its noise.

    D(theta - m) is |theta - m| Id for "isotropic" noise, as in the paper, and diag(theta - m) for "anisotropic".
    Without normals there is no noise; their memory is used for the step.
    """
    m = m.unsqueeze(-2)
    size = sigma1 * math.sqrt(dt)
    if normals is None:
        theta.lerp_(m, lambda1 * dt)
    elif noise == "anisotropic":  # every coordinate goes a part of its own of the way to m
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
    """The other two terms of eq:fedcb2o_dynamics in place: -lambda2 grad L dt and sigma2 |grad L| dB."""
    theta.sub_(gradient, alpha=lambda2 * dt)
    if normals is not None:
        length = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
        theta.addcmul_(normals, length, value=sigma2 * math.sqrt(dt))


@functools.lru_cache(maxsize=16)
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a tensor; making one anew takes a hundredth of a small ensemble's step."""
    return torch.tensor(value, dtype=dtype, device=device)


def _evaluate_objective(
    name: str, objective: Objective, theta: Tensor, copy: Tensor | None
) -> Tensor:
    """What an objective makes of an ensemble, checked: one number a particle, and nothing written."""
    before = write_count(theta)
    try:
        values: object = objective(theta)
    except TypeError as error:
        error.add_note(
            f"`{name}` gets a tensor of points; a function of NumPy's goes through fedcb2o.from_numpy"
        )
        raise
    if copy is not None or write_count(theta) != before:
        require_unwritten(f"`{name}`", objective, theta, before, copy)
    if not isinstance(values, Tensor):
        raise ConfigError(
            f"`{name}` must return a tensor, got {_describe_type(values)}; a NumPy function goes through"
            " fedcb2o.from_numpy, one of a single point through fedcb2o.from_point"
        )
    if values.shape != theta.shape[:-1]:
        raise ConfigError(
            f"`{name}` must return one value a particle: shape {[*theta.shape[:-1]]} for an ensemble of shape"
            f" {[*theta.shape]}, got {[*values.shape]}; sum over the last axis, as in x.square().sum(-1),"
            " or take a function of one point by fedcb2o.from_point"
        )
    if not values.is_floating_point():
        raise ConfigError(f"`{name}` must return floating-point numbers, got {values.dtype}")
    if values.layout != torch.strided or values.device != theta.device:
        where = f"a {values.layout} tensor on {values.device}".replace("torch.", "")
        raise ConfigError(f"`{name}` must return a dense tensor on {theta.device}, got {where}")
    return values


def _describe_type(value: object) -> str:
    return (
        f"a tensor of shape {[*value.shape]}"
        if isinstance(value, Tensor)
        else f"a {type(value).__name__}"
    )

"""Where runs of `minimize` start: seeds, clusters, the box, and the first ensembles, checked."""

import itertools
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.particles import settings
from fedcb2o.particles.adversaries import Adversary
from fedcb2o.particles.objectives import Objective
from fedcb2o.particles.system import Cluster
from fedcb2o.rng import stream

Seed = int | np.random.Generator | np.random.RandomState | torch.Generator | None
_Box = tuple[Tensor, Tensor]
"""The low and the high ends, [d] each."""
_DEFAULT_SPREAD = 3.0  # how far from their middle particles start where nothing is said


def has_many_seeds(seed: Any) -> bool:
    """Whether these are seeds, one for each run."""
    return (
        isinstance(seed, Sequence | np.ndarray)
        and not isinstance(seed, str | bytes)
        and np.ndim(seed) > 0
    )


def resolve_seeds(seed: Seed | Sequence[int], runs: int | None) -> list[int]:
    """The seed of every run."""
    if not has_many_seeds(seed):
        first = _draw_seed(seed)
        return [first + run for run in range(runs or 1)]
    seeds = [settings.check_count("`seed`", each, least=None) for each in seed]  # type: ignore[union-attr]
    if (runs is not None and len(seeds) != runs) or not seeds:
        raise ConfigError(
            f"`seed` names {len(seeds)} seeds for {runs} runs: give one for each, or the first alone"
        )
    return seeds


def _draw_seed(seed: Any) -> int:
    """A seed as it is given, or drawn: from a generator, or anew."""
    if seed is None:
        return secrets.randbits(63)
    if isinstance(seed, np.random.Generator):
        return int(seed.integers(2**63))
    if isinstance(seed, np.random.RandomState):
        return int(seed.randint(2**63 - 1, dtype=np.int64))
    if isinstance(seed, torch.Generator):
        return int(torch.randint(2**63 - 1, (), generator=seed, device=seed.device))
    return settings.check_count("`seed`", seed, least=None)


def check_adversaries(adversaries: Adversary | Sequence[Adversary]) -> list[Adversary]:
    """The malicious particles; raises ConfigError for what are none."""
    groups = list(adversaries) if isinstance(adversaries, Sequence) else [adversaries]
    for each in groups:
        if not isinstance(each, Adversary):
            raise ConfigError(
                f"`adversaries` must be an Adversary or a list of them, got a {type(each).__name__}: a function that "
                "moves particles goes into fedcb2o.Adversary(function, num_particles)"
            )
    return groups


def check_ensemble(initial: Any, runs: int) -> Tensor:
    """The ensemble [n, d], or one for each run, [runs, n, d], that particles are to start as."""
    ensemble = _array("`initial`", initial)
    if ensemble.ndim not in (2, 3) or not ensemble.shape[-1]:
        raise ConfigError(
            f"`initial` must be [n, d] or [runs, n, d] or a sampler, got the shape {[*ensemble.shape]}"
        )
    if ensemble.ndim == 3 and len(ensemble) != runs:
        raise ConfigError(f"`initial` has ensembles for {len(ensemble)} runs, there are {runs}")
    return ensemble


def build_clusters(
    lower: Objective | Sequence[Objective],
    upper: Objective | Sequence[Objective | None] | None,
    gradient: Objective | Sequence[Objective] | bool | None,
    num_particles: int | Sequence[int] | None,
    initial: Any,
) -> list[Cluster]:
    """Every cluster with its objectives and its rows."""
    lowers = [lower] if callable(lower) else list(lower)
    k = len(lowers)
    if not k:
        raise ConfigError("`lower` must be an objective, or one for each cluster, got none")

    def each(name: str, value: Any) -> list[Any]:
        values = list(value) if isinstance(value, Sequence) else [value] * k
        if len(values) != k:
            raise ConfigError(
                f"`{name}` must be one for all or one for each of the {k} objectives in `lower`, got {len(values)}"
            )
        return values

    uppers = each("upper", upper)
    if any((one is None) != (uppers[0] is None) for one in uppers):
        raise ConfigError("`upper` must be there for all clusters or for none")
    sizes = each("num_particles", 200 if num_particles is None else num_particles)
    if isinstance(initial, Tensor) and num_particles is None and initial.shape[-2] % k == 0:
        sizes = [initial.shape[-2] // k] * k
    sizes = [settings.check_count("`num_particles`", size) for size in sizes]
    if sum(sizes) < 2:
        raise ConfigError(
            "one particle is its own consensus point, wherever it is: `num_particles` must be at least 2"
        )
    if isinstance(initial, Tensor):
        n = initial.shape[-2]
        if sum(sizes) != n:
            raise ConfigError(
                f"`initial` has {n} particles, `num_particles` asks for {sizes if k > 1 else sizes[0]}"
            )
    ends = list(itertools.accumulate(sizes, initial=0))
    slopes = [True if one is None else one for one in each("gradient", gradient)]
    rows = itertools.starmap(slice, itertools.pairwise(ends))
    return [Cluster(*parts) for parts in zip(lowers, uppers, slopes, rows, strict=True)]


def build_box(
    bounds: Any, initial: Any, x0: Any, spread: Any, dim: int | None
) -> tuple[_Box | None, _Box]:
    """The bounds, if there are any, infinite where a side is open, and the box where particles start.

    That is x0 +- spread, as far as the bounds allow. Where both bounds of a coordinate are finite, it is by default
    all of what is between them, else as near to [-3, 3] as it can be.
    """
    if initial is not None and not (x0 is None and spread is None):
        raise ConfigError(
            "`initial` says where particles start, and so do `x0` and `spread`: give the one or the other"
        )
    middle = None if x0 is None else _point("`x0`", x0, dim)
    given = initial if middle is None else middle
    if isinstance(given, Tensor):
        if dim not in (None, given.shape[-1]):
            has = (
                f"`x0` has {len(given)}"
                if given is middle
                else f"`initial` has points of {given.shape[-1]}"
            )
            raise ConfigError(f"{has} coordinates, `dim` is {dim}")
        dim = given.shape[-1]
    low, high = _bounds_of_coordinates(bounds, dim)
    closed = (high - low).isfinite()
    half = (high - low) / 2
    far = (
        torch.where(closed, half, _DEFAULT_SPREAD)
        if spread is None
        else _point("`spread`", spread, len(low))
    )
    if len(far) != len(low) or not ((far > 0) & far.isfinite()).all():
        raise ConfigError(
            f"`spread` must be above 0 and finite, one for all or one for each coordinate, got {spread}"
        )
    if middle is None:
        middle = torch.where(closed, low + half, torch.zeros_like(low).clamp(low + far, high - far))
        if spread is None:  # to the bit
            far = far.masked_fill(closed, torch.inf)
    if not ((low <= middle) & (middle <= high)).all():
        raise ConfigError(f"`x0` = {middle.tolist()} is not within the `bounds`")
    start = torch.maximum(low, middle - far), torch.minimum(high, middle + far)
    return None if bounds is None else (low, high), start


def _bounds_of_coordinates(bounds: Any, dim: int | None) -> _Box:
    """The low and high ends [d] of the bounds, infinite where there is none."""
    if bounds is None:
        if dim is None:
            raise ConfigError(
                "`dim` is not known: give it, or `x0`, or `bounds` for each coordinate, or an `initial` ensemble"
            )
        bounds = (None, None)
    if hasattr(bounds, "lb"):  # scipy.optimize.Bounds
        bounds = np.stack(
            np.broadcast_arrays(np.atleast_1d(bounds.lb), np.atleast_1d(bounds.ub)), -1
        )
        bounds = bounds[0] if len(bounds) == 1 else bounds
    pairs = _array("`bounds`", _replace_none(bounds))
    if pairs.shape == (2,) and dim is not None:
        pairs = pairs.expand(dim, 2)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or dim not in (None, len(pairs)):
        raise ConfigError(
            f"`bounds` must be one (low, high) and `dim`, or a pair for each of the {dim or 'd'} coordinates, got the"
            f" shape {[*pairs.shape]}"
        )
    low, high = pairs.unbind(-1)
    if not (low < high).all():
        raise ConfigError("`bounds` must have every low below its high")
    return low, high


def _replace_none(bounds: Any) -> Any:
    """Bounds with infinity in place of None, which SciPy takes for none."""
    if not isinstance(bounds, Sequence) or isinstance(bounds, str | bytes):
        return bounds
    if len(bounds) == 2 and any(each is None for each in bounds):
        return [
            end if each is None else each
            for each, end in zip(bounds, (-np.inf, np.inf), strict=True)
        ]
    return [_replace_none(each) for each in bounds]


def _point(name: str, value: Any, dim: int | None) -> Tensor:
    """One number for each coordinate [d], or the same for all."""
    point = _array(name, value)
    if point.ndim > 1 or not point.isfinite().all():
        got = (
            f"the shape {[*point.shape]}, and an ensemble is `initial`"
            if point.ndim > 1
            else f"{point.tolist()}"
        )
        raise ConfigError(f"{name} must be a point [d] of finite numbers, got {got}")
    return point if point.ndim else point.expand(dim or 1)


def draw_ensembles(
    initial: Any, box: _Box, num_benign: int, adversaries: Sequence[Adversary], seeds: Sequence[int]
) -> Tensor:
    """The first ensemble of every run, [runs, n, d] in float64: the benign particles, then each adversary's.

    Without `initial` they start uniformly in the `box`.
    """
    low, high = box
    dim = len(low)
    settings.check_memory(
        len(seeds), num_benign + sum(each.num_particles for each in adversaries), dim
    )

    def uniform(generator: np.random.Generator, n: int, d: int) -> Any:
        return generator.uniform(low.numpy(), high.numpy(), (n, d))

    sampler = initial if callable(initial) else uniform

    def drawn(purpose: str, n: int) -> Tensor:
        name = "what the sampler `initial` returns"
        points = [
            _array(name, sampler(stream(seed, "particles", purpose), n, dim)) for seed in seeds
        ]
        for one in points:
            if one.shape != (n, dim):
                raise ConfigError(
                    f"the sampler `initial` must return the shape {[n, dim]}, got {[*one.shape]}"
                )
        return torch.stack(points)

    given = isinstance(initial, Tensor)
    parts = [initial.expand(len(seeds), -1, -1) if given else drawn("initial", num_benign)]
    for k, adversary in enumerate(adversaries):
        if adversary.initial is None:
            parts.append(drawn(f"initial adversary {k}", adversary.num_particles))
            continue
        points = _array("an adversary's `initial`", adversary.initial)
        if points.shape not in ((dim,), (adversary.num_particles, dim)):
            raise ConfigError(
                f"an adversary's `initial` must be a point [{dim}] or one for each particle,"
                f" [{adversary.num_particles}, {dim}], got the shape {[*points.shape]}"
            )
        parts.append(points.expand(len(seeds), adversary.num_particles, dim))
    start = torch.cat(parts, 1)
    if not start.isfinite().all():
        raise ConfigError("the `initial` ensemble has NaN or infinite coordinates")
    return start


def _array(name: str, value: Any) -> Tensor:
    """Numbers as a tensor in float64 on the CPU."""
    try:
        return torch.as_tensor(value, dtype=torch.float64).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{name} must be an array of numbers: {error}") from error

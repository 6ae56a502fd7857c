"""Start of `minimize`: seeds, clusters, start box and first ensembles."""

import dataclasses
import itertools
import logging
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.particles import settings
from fedcb2o.particles.adversaries import Adversary
from fedcb2o.particles.dynamics import Objective
from fedcb2o.particles.system import Cluster, Ensembles, Streams, System
from fedcb2o.plugins import to_python
from fedcb2o.rng import stream
from fedcb2o.user_values import to_tensor

_LOGGER = logging.getLogger(__name__)

Seed = int | np.random.Generator | np.random.RandomState | torch.Generator | None
_Box = tuple[Tensor, Tensor]
"""Low and high ends, [d] each."""
_DEFAULT_SPREAD = 3.0  # distance of the particles from their middle without bounds


class Stop(NamedTuple):
    """Reason of the end of a run, as a code for programs and as a text."""

    code: str
    text: str


@dataclasses.dataclass(frozen=True)
class Start:
    """A problem with the first ensembles of all runs."""

    system: System
    theta: Tensor  # first ensembles [runs, n, d]; the steps change them in place
    seeds: list[int]
    single_run: bool  # whether the axis of runs is dropped from the result
    single_cluster: bool  # whether that of clusters is
    box: _Box | None  # box in which later ensembles start; None for that of the run's first one
    extent: _Box  # smallest and largest coordinates of the first benign particles [runs, d]
    is_fixed: bool  # whether the bounds leave a single point
    # Whether the first particle is x0, and local searches by derivatives are allowed.
    has_first: bool = False
    finish: bool = False
    maxfev: int | None = None

    def squeeze_runs(self, values: Tensor) -> Any:
        """Drop the axis of a single run; a value without other axes becomes a plain number."""
        if not self.single_run:
            return values
        return values.item() if values.ndim == 1 else values[0]

    def squeeze(self, values: Tensor, runs: int = 0, clusters: int = 1) -> Tensor:
        """Drop the axes of a single run and of a single cluster."""
        values = values.squeeze(clusters) if self.single_cluster else values
        return values.squeeze(runs) if self.single_run else values

    def ensembles(self) -> Ensembles:
        """Return the state before the first step."""
        return Ensembles(
            0,
            self.theta,
            torch.arange(len(self.seeds)),
            Streams(self.seeds, self.theta),
            torch.zeros(len(self.seeds), dtype=torch.long),
        )


def start_runs(
    functions: tuple[Any, Any, Any],
    dim: Any,
    dynamics: Any,
    seed: Seed | Sequence[int],
    *,
    bounds: Any,
    x0: Any,
    spread: Any,
    initial: Any,
    num_particles: Any,
    runs: Any,
    adversaries: Adversary | Sequence[Adversary],
    dtype: torch.dtype,
    device: Any,
    maxfev: int | None = None,
    finish: bool = False,
) -> Start:
    """Draw the first ensembles of all runs.

    The arguments are those of `minimize`; `functions` are L, G and the gradient.
    """
    # 1. Check the arguments.
    dim = settings.check_optional_count("`dim`", dim)
    runs = settings.check_optional_count("`runs`", runs)
    settings.check_choices({"`dtype`": (dtype, (torch.float64, torch.float32))})
    settings.check_memory(runs or 1, 1, dim or 1)
    device = settings.check_device(device)
    groups: list[Any] = list(adversaries) if isinstance(adversaries, Sequence) else [adversaries]
    names = [type(group).__name__ for group in groups if not isinstance(group, Adversary)]
    if names:
        raise ConfigError(
            f"`adversaries` must be an Adversary or a list of them, got a {names[0]}: a"
            " function that moves particles goes into fedcb2o.Adversary(function, num_particles)"
        )
    single_run = runs is None and not has_many_seeds(seed)
    seeds = resolve_seeds(seed, runs)
    if initial is not None and not callable(initial):
        initial = _array("`initial`", initial)
        shape = [*initial.shape]
        if len(shape) not in (2, 3) or not shape[-1] or shape[:-2] not in ([], [len(seeds)]):
            shapes = f"[n, d] or [{len(seeds)} runs, n, d] or a sampler, got the shape {shape}"
            raise ConfigError(f"`initial` must be {shapes}")
    is_default = num_particles is None and not isinstance(initial, Tensor)
    if is_default and dim is not None:  # before a box of a great many coordinates
        settings.check_memory(len(seeds), dynamics.default_num_particles(dim), dim)

    # 2. Draw the particles.
    walls, box = build_box(bounds, initial, x0, spread, dim)
    default = dynamics.default_num_particles(len(box[0]))
    lower, upper, gradient = functions
    k = 1 if callable(lower) else max(1, len(lower))
    num_malicious = sum(adversary.num_particles for adversary in groups)
    batch = dynamics.batch or 0
    if maxfev is not None:  # two ensembles of a small budget, with their batches, and x
        default = min(default, max(2, ((maxfev // k - 1) // 2 - batch - num_malicious) // k))
    # A gradient that no term reads would cost a backward pass in each step.
    gradient = gradient if dynamics.needs_gradient else False
    clusters = build_clusters(lower, upper, gradient, num_particles, initial, default)
    num_benign = clusters[-1].rows.stop
    theta = draw_ensembles(initial, box, num_benign, groups, seeds).to(device, dtype)
    if walls is not None:
        walls = (walls[0].to(theta), walls[1].to(theta))
        theta[:, :num_benign].clamp_(*walls)
    is_fixed = walls is not None and bool(walls[0].eq(walls[1]).all())
    if is_fixed:
        _LOGGER.warning("`bounds` fix all coordinates: the result is the only point within them.")
    elif not dynamics.can_split and theta.eq(theta[:, :1]).all(2).all(1).any():
        raise ConfigError(
            "all particles start at one point, and agree before the first step: spread `initial`"
        )
    if batch and dynamics.needs_gradient:
        batch = theta.shape[1]
    # Without adversaries a smaller ensemble uses the rest of an adaptive budget.
    count = 2 if groups else dynamics.fewest_ensembles
    total = k * (count * (theta.shape[1] + batch) + 1)
    if maxfev is not None and total > maxfev:
        ensembles = "the first ensemble" if count == 1 else "two ensembles"
        raise ConfigError(
            f"`maxfev` = {maxfev} is too small: {ensembles} and x need {total} evaluations;"
            " take fewer particles by `num_particles`, or more evaluations"
        )
    has_first = x0 is not None and dynamics.keeps_x0
    if has_first:
        theta[:, 0] = _point("`x0`", x0, len(box[0])).to(theta)
    extent = theta[:, :num_benign].aminmax(dim=1)
    return Start(
        System(theta, clusters, groups, flat=single_run, bounds=walls, radius=dynamics.radius),
        theta,
        seeds,
        single_run,
        callable(lower),
        None if initial is not None else box,
        (extent.min, extent.max),
        is_fixed,
        has_first,
        finish,
        maxfev,
    )


def has_many_seeds(seed: Any) -> bool:
    """Return whether `seed` is a sequence or an array of seeds, one per run."""
    return isinstance(to_python(seed), Sequence) and not isinstance(seed, str | bytes)


def resolve_seeds(seed: Seed | Sequence[int], runs: int | None) -> list[int]:
    """Return the seed of every run.

    A single seed, or a generator's, is that of the first run, and consecutive numbers follow.
    """
    if has_many_seeds(seed):
        items: Any = to_python(seed)
        seeds = [settings.check_count("`seed`", item, least=None) for item in items]
        if (runs is not None and len(seeds) != runs) or not seeds:
            raise ConfigError(f"`seed` names {len(seeds)} seeds for {runs} runs: give one for each")
        return seeds

    if seed is None:
        first = secrets.randbits(63)
    elif isinstance(seed, np.random.Generator):
        first = int(seed.integers(2**63))
    elif isinstance(seed, np.random.RandomState):
        first = int(seed.randint(2**63 - 1, dtype=np.int64))
    elif isinstance(seed, torch.Generator):
        first = int(torch.randint(2**63 - 1, (), generator=seed, device=seed.device))
    else:
        first = settings.check_count("`seed`", seed, least=None)
    return [first + run for run in range(runs or 1)]


def build_clusters(
    lower: Objective | Sequence[Objective],
    upper: Objective | Sequence[Objective | None] | None,
    gradient: Objective | Sequence[Objective] | bool | None,
    num_particles: int | Sequence[int] | None,
    initial: Any,
    default: int,
) -> list[Cluster]:
    """Assign objectives and rows to the clusters.

    Each of the arguments is one for all clusters or one per cluster. A `gradient` of None means
    autograd, of False no gradient. By default the particles are a share of `initial`, or `default`
    without an ensemble.
    """
    lowers: list[Objective] = [lower] if callable(lower) else list(lower)
    k = len(lowers)
    if not k:
        raise ConfigError("`lower` must be an objective, or one for each cluster, got none")

    def per_cluster(name: str, value: Any) -> list[Any]:
        if not isinstance(value, Sequence):
            return [value] * k
        values = list(value)
        if len(values) != k:
            expected = f"one for each of the {k} objectives in `lower`, got {len(values)}"
            raise ConfigError(f"`{name}` must be one for all or {expected}")
        return values

    uppers = per_cluster("upper", upper)
    # Their results are tensors with an axis of clusters, which has G or has not.
    if any((item is None) != (uppers[0] is None) for item in uppers):
        raise ConfigError("`upper` must be there for all clusters or for none")

    if num_particles is None:
        num_particles = default
        if isinstance(initial, Tensor) and initial.shape[-2] % k == 0:
            num_particles = initial.shape[-2] // k
    sizes = per_cluster("num_particles", to_python(num_particles))
    sizes = [settings.check_count("`num_particles`", size) for size in sizes]
    if sum(sizes) < 2:
        raise ConfigError("`num_particles` must be at least 2: one is its own consensus point")
    if isinstance(initial, Tensor) and sum(sizes) != initial.shape[-2]:
        requested = sizes if k > 1 else sizes[0]
        raise ConfigError(
            f"`initial` has {initial.shape[-2]} particles, `num_particles` asks for {requested}"
        )

    ends = itertools.accumulate(sizes, initial=0)
    rows = itertools.starmap(slice, itertools.pairwise(ends))
    gradients = [True if item is None else item for item in per_cluster("gradient", gradient)]
    return [Cluster(*parts) for parts in zip(lowers, uppers, gradients, rows, strict=True)]


def build_box(
    bounds: Any, initial: Any, x0: Any, spread: Any, dim: int | None
) -> tuple[_Box | None, _Box]:
    """Return the bounds and the box in which the particles start.

    The box is x0 +- spread within the bounds. Where both bounds of a coordinate are finite, it is
    by default the interval between them, and otherwise as near to [-3, 3] as the bounds allow. The
    bounds are None, or infinite at open sides.
    """
    if initial is not None and not (x0 is None and spread is None):
        raise ConfigError("`initial` says where particles start: leave out `x0` and `spread`")
    # 1. Read d from `x0` or `initial`.
    middle = None if x0 is None else _point("`x0`", x0, dim)
    for name, source in (("`x0` has", middle), ("`initial` has points of", initial)):
        if isinstance(source, Tensor):
            if dim not in (None, source.shape[-1]):
                raise ConfigError(f"{name} {source.shape[-1]} coordinates, `dim` is {dim}")
            dim = source.shape[-1]

    # 2. Find the half width of the box.
    low, high = _bounds_of_coordinates(bounds, dim)
    closed = (high - low).isfinite()
    far = torch.where(closed, (high - low) / 2, _DEFAULT_SPREAD)
    if spread is not None:
        far = _point("`spread`", spread, len(low))
    is_fixed = low == high
    if len(far) != len(low) or not (((far > 0) | is_fixed) & far.isfinite()).all():
        raise ConfigError(f"`spread` must be one number or d, above 0 and finite, got {spread}")

    # 3. Find its middle.
    if middle is None:
        open_middle = torch.zeros_like(low).clamp(low + far, high - far)
        middle = torch.where(closed, low + (high - low) / 2, open_middle)
        if spread is None:  # the sides are then the bounds to the bit
            far = far.masked_fill(closed, torch.inf)
    if not ((low <= middle) & (middle <= high)).all():
        raise ConfigError(f"`x0` = {middle.tolist()} is not within the `bounds`")

    box = (torch.maximum(low, middle - far), torch.minimum(high, middle + far))
    if not (box[1] - box[0]).isfinite().all():
        raise ConfigError(f"`spread` = {spread} is too large: the box has no finite width")
    return None if bounds is None else (low, high), box


def _bounds_of_coordinates(bounds: Any, dim: int | None) -> _Box:
    """Return the ends [d] of the bounds, infinite at open sides."""
    if bounds is None:
        if dim is None:
            raise ConfigError("`dim` is not known: give it, or `x0`, or `bounds`, or `initial`")
        bounds = (None, None)
    if hasattr(bounds, "lb"):  # scipy.optimize.Bounds
        ends = np.broadcast_arrays(np.atleast_1d(bounds.lb), np.atleast_1d(bounds.ub))
        bounds = np.stack(ends, -1)
        # SciPy's bounds of one pair hold for every coordinate.
        if len(bounds) == 1:
            bounds = bounds[0]

    items = np.array(bounds, dtype=object) if isinstance(bounds, Sequence) else bounds
    if isinstance(items, np.ndarray) and items.dtype == object and items.shape[-1:] == (2,):
        bounds = np.where(items == np.array(None), (-np.inf, np.inf), items).tolist()
    pairs = _array("`bounds`", bounds)
    if pairs.shape == (2,) and dim is not None:
        pairs = pairs.expand(dim, 2)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or dim not in (None, len(pairs)):
        got = f"the {dim or 'd'} coordinates, got the shape {[*pairs.shape]}"
        raise ConfigError(
            f"`bounds` must be one (low, high) and `dim`, or a pair for each of {got}"
        )
    low, high = pairs.unbind(-1)
    wrong = ~((low <= high) & (low < torch.inf) & (high > -torch.inf))
    if wrong.any():
        k = int(wrong.nonzero()[0])
        pair = f"({low[k]:g}, {high[k]:g}) for coordinate {k}; equal ones fix a coordinate"
        raise ConfigError(f"`bounds` must have every low at most its high, and no NaN, got {pair}")
    return low, high


def _point(name: str, value: Any, dim: int | None) -> Tensor:
    """Return one number per coordinate [d]; a single number counts for all."""
    point = _array(name, value)
    if point.ndim > 1 or not point.isfinite().all():
        got: Any = point.tolist()
        if point.ndim > 1:
            got = f"the shape {[*point.shape]}, and an ensemble is `initial`"
        raise ConfigError(f"{name} must be a point [d] of finite numbers, got {got}")
    return point if point.ndim else point.expand(dim or 1)


def draw_ensembles(
    initial: Any, box: _Box, num_benign: int, adversaries: Sequence[Adversary], seeds: Sequence[int]
) -> Tensor:
    """Return the first ensemble of every run [runs, n, d], benign particles first.

    `initial` is an ensemble, a sampler, or None for the uniform distribution in the box.
    """
    low, high = (side.numpy() for side in box)
    dim = len(low)

    def uniform(generator: np.random.Generator, n: int, dim: int) -> np.ndarray:
        return generator.uniform(low, high, (n, dim))

    sampler = initial if callable(initial) else uniform
    num_malicious = sum(adversary.num_particles for adversary in adversaries)
    settings.check_memory(len(seeds), num_benign + num_malicious, dim)

    def draw(purpose: str, n: int) -> Tensor:
        ensembles = []
        for seed in seeds:
            points = sampler(stream(seed, "particles", purpose), n, dim)
            ensembles.append(_array("the result of the sampler `initial`", points))
            if ensembles[-1].shape != (n, dim):
                shapes = f"{[n, dim]}, got {[*ensembles[-1].shape]}"
                raise ConfigError(f"the sampler `initial` must return the shape {shapes}")
        return torch.stack(ensembles)

    if isinstance(initial, Tensor):
        parts = [initial.expand(len(seeds), -1, -1)]
    else:
        parts = [draw("initial", num_benign)]
    for k, adversary in enumerate(adversaries):
        if adversary.initial is None:
            # A stream of its own, so that benign particles are the same with and without the
            # attack.
            parts.append(draw(f"initial adversary {k}", adversary.num_particles))
            continue
        points = _array("an adversary's `initial`", adversary.initial)
        if points.shape not in ((dim,), (adversary.num_particles, dim)):
            raise ConfigError(
                f"an adversary's `initial` must be a point [{dim}] or one for each particle,"
                f" [{adversary.num_particles}, {dim}], got the shape {[*points.shape]}"
            )
        parts.append(points.expand(len(seeds), adversary.num_particles, dim))

    ensembles = torch.cat(parts, 1)
    if not ensembles.isfinite().all():
        raise ConfigError("the `initial` ensemble has NaN or infinite coordinates")
    return ensembles


def _array(name: str, value: Any) -> Tensor:
    """Convert numbers to a float64 tensor on the CPU."""
    return to_tensor(f"{name} holds", value).to("cpu", torch.float64)

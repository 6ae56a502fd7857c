"""A run of `minimize` that is watched: what there is to draw of it, in bounded memory, and how far it is."""

import inspect
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from fedcb2o.particles import theory
from fedcb2o.particles._minimize import CaptureWarning, minimize
from fedcb2o.particles.adversaries import Adversary
from fedcb2o.particles.objectives import Problem
from fedcb2o.particles.result import Result
from fedcb2o.particles.state import State
from fedcb2o.report.decay import Decay
from fedcb2o.report.particle_figures import Scene

_GRID_POINTS = 181  # points of the landscape along an axis
_MAX_DRAWN_PARTICLES = 300  # particles in a figure
_VARTHETA = 0.25  # of thm:main, for the band of the figure
_FIT_UNTIL_SHARE = 0.05  # the rate is fitted until V has come down to this share of its start


def run_recorded(
    problem: Problem,
    groups: Sequence[Adversary],
    overrides: Mapping[str, Any],
    *,
    progress: bool = True,
) -> tuple[Result, "Recorder", dict[str, Any], list[str]]:
    """Minimise; returns the result, what was watched, all settings, and the warnings, each a line."""
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(minimize).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is not parameter.empty
    }
    chosen = {**problem.settings, **overrides}
    settings = {**defaults, **chosen}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    bar = Progress(
        *columns, console=console, transient=True, disable=not (progress and console.is_terminal)
    )
    task = bar.add_task(problem.name, total=settings["maxiter"])
    last = time.monotonic()

    def show(n: int) -> None:
        nonlocal last
        if progress and time.monotonic() - last > (0.1 if console.is_terminal else 15):
            last = time.monotonic()
            bar.update(task, completed=n)
            if not console.is_terminal:
                print(
                    f"{problem.name}: step {n}/{settings['maxiter']}", file=sys.stderr, flush=True
                )

    watch = Recorder(problem, runs=settings["runs"], maxiter=settings["maxiter"], show=show)
    with warnings.catch_warnings(record=True) as caught, bar:
        warnings.simplefilter("always")
        result = minimize(
            problem.lower, problem.upper, problem.dim, adversaries=groups, callback=watch, **chosen
        )
    told = dict.fromkeys(" ".join(str(each.message).split()) for each in caught)
    capture = {
        " ".join(str(each.message).split())
        for each in caught
        if issubclass(each.category, CaptureWarning)
    }
    lines = [f"Warning: {line}" for line in told]
    lines += [f"Note: {note}" for note in result.notes if note not in capture]
    return result, watch, settings, lines


class Recorder:
    """A callback of `minimize` that keeps what figures need, in bounded memory, and shows how far the run is."""

    def __init__(
        self, problem: Problem, *, runs: int | None, maxiter: int, show: Callable[[int], None]
    ) -> None:
        self.clusters = 1 if callable(problem.lower) else len(problem.lower)
        self.runs = runs or 1
        self.show = show
        self.frames = _DownsampledSeries(128)
        # Of every ensemble its mean and variance: V to any point follows from them.
        self.moments = _DownsampledSeries(
            min(600, max(60, 4_000_000 // (self.runs * self.clusters * problem.dim)))
        )

    def __call__(self, state: State) -> None:
        """Look at the particles before step n."""
        self.show(state.n)
        theta = _with_runs(state.theta, 3)
        runs = state.runs
        if self.moments.is_due(state.n):
            self.moments.add(state.n, (runs, *_moments(theta, self.clusters)))
        if self.frames.is_due(state.n) and runs[0] == 0:
            x = state.x if state.theta.ndim == 2 else state.x[0]
            self.frames.add(state.n, self._frame(theta[0], _with_runs(state.theta_m, 3)[0], x))

    def _frame(
        self, theta: Tensor, theta_m: Tensor, x: Tensor
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        size = len(theta) // self.clusters
        some = theta.reshape(self.clusters, size, -1)[
            :, : _MAX_DRAWN_PARTICLES // self.clusters
        ].flatten(0, 1)
        parts = (some, theta_m[:_MAX_DRAWN_PARTICLES], x.reshape(self.clusters, -1))
        return tuple(part[:, :2].cpu().numpy().astype(float) for part in parts)  # type: ignore[return-value]

    def scene(
        self, problem: Problem, result: Result, settings: Mapping[str, Any], title: str
    ) -> Scene:
        """All that there is to draw."""
        flat = result.theta.ndim == 2
        dt = settings["dt"]
        nit = torch.as_tensor(result.nit).reshape(-1).tolist()
        frames = self.frames.items
        if frames[-1][0] < nit[0]:
            first = (result.theta, result.theta_m, result.x) if flat else (
                result.theta[0], result.theta_m[0], result.x[0])  # fmt: skip
            frames = [*frames, (nit[0], self._frame(*first))]
        theta, theta_m, m = (np.stack([frame[part] for _, frame in frames]) for part in range(3))
        target = (
            np.array(problem.target, dtype=float).reshape(-1, problem.dim)
            if problem.target
            else None
        )
        answers = result.x.cpu().numpy().reshape(self.runs, self.clusters, problem.dim)[..., :2]
        at_rest = [] if target is None else [target[:, :2]]
        box = _box(problem.box, np.concatenate([answers[0], *at_rest, theta_m[0]]))
        grid, lower, upper = _grid(problem, box, flat=flat)
        return Scene(
            title=title, dim=problem.dim, box=box, grid=grid, lower_values=lower, upper_values=upper,
            times=np.array([n * dt for n, _ in frames]), theta=theta,
            cluster=np.repeat(np.arange(self.clusters), theta.shape[1] // self.clusters),
            theta_m=theta_m, m=m, final_points=answers, target=None if target is None else target[:, :2],
            decay=self.decay(problem, result, settings),
        )  # fmt: skip

    def decay(self, problem: Problem, result: Result, settings: Mapping[str, Any]) -> Decay:
        """V towards the target, or without one towards the last consensus point, and what the theory says of it."""
        K = self.clusters
        d = problem.dim
        nit = torch.as_tensor(result.nit).reshape(-1)
        x = result.x.reshape(self.runs, K, d)
        to = torch.tensor(problem.target).to(x).reshape(1, K, d) if problem.target else x
        end = (int(nit.max()), (torch.arange(self.runs), *_moments(_with_runs(result.theta, 3), K)))
        items = [*(item for item in self.moments.items if item[0] < end[0]), end]
        V = torch.full((len(items), self.runs, K), torch.nan, dtype=torch.float64)
        for row, (_, (runs, mean, variance)) in enumerate(items):
            V[row, runs] = (
                (variance + (mean - to[runs if len(to) > 1 else slice(None)]).square().sum(-1)) / 2
            ).cpu()
        for row, (n, _) in enumerate(items[:-1]):
            V[row] = torch.where((n >= nit).unsqueeze(-1), V[-1], V[row])
        t = torch.tensor([n * settings["dt"] for n, _ in items], dtype=torch.float64)
        middle = V.nanmedian(1).values.T
        windows = [_fit_window(own) for own in middle]
        fitted = [
            float(theory.fit_decay_rate(t[rows], own[rows]))
            for rows, own in zip(windows, middle, strict=True)
        ]
        told, line, band = _theory(problem, settings, t, middle)
        seen = [(float(t[rows][0]), float(t[rows][-1])) for rows in windows]
        towards = "the target" if problem.target else "the last consensus point"
        return Decay(t.numpy(), V.numpy(), fitted, seen, told, line, band, towards)


def _theory(
    problem: Problem, settings: Mapping[str, Any], t: Tensor, V: Tensor
) -> tuple[str, Any, Any]:
    """What thm:main says of V, [clusters, s], in words, as a line and as a band; nothing where it does not apply."""
    outside = _outside_the_theorem(problem, settings)
    if outside:
        return f"theory: no rate is stated ({', '.join(outside)})", None, None
    noise = settings["noise"]
    lambda1 = settings["lambda1"]
    sigma1 = settings["sigma1"]
    rate = theory.contraction_rate(lambda1=lambda1, sigma1=sigma1, dim=problem.dim, noise=noise)
    told = f"theory: {'2λ₁ − dσ₁²' if noise == 'isotropic' else '2λ₁ − σ₁²'} = {rate:.3g}"
    if rate <= 0:
        return f"{told}, no decay promised", None, None
    line = (V[:, :1] * torch.exp(-rate * t)).T.numpy()
    if noise == "anisotropic":
        return told, line, None
    sides = theory.decay_bounds(t, float(V[0, 0]), vartheta=_VARTHETA, rate=rate)
    return (
        f"{told} (band: ϑ = {_VARTHETA:g})",
        line,
        tuple(side.unsqueeze(1).numpy() for side in sides),
    )


def _outside_the_theorem(problem: Problem, settings: Mapping[str, Any]) -> list[str]:
    """What a run has that the system of thm:main (eq:dyn_macro) has not, and so takes it out of the theorem."""
    reasons = {
        "several clusters": not callable(problem.lower),
        "no G": problem.upper is None,
        "λ₂ > 0": settings["lambda2"] > 0,
        "σ₂ > 0": settings["sigma2"] > 0,
        "bounds": settings["bounds"] is not None,
        "random batches": settings["batch"] is not None,
    }
    return [reason for reason, holds in reasons.items() if holds]


class _DownsampledSeries:
    """Items at equal steps, at most `limit`: when there are more, every second goes and the steps double."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.stride = 1
        self.items: list[tuple[int, Any]] = []

    def is_due(self, n: int) -> bool:
        return n % self.stride == 0

    def add(self, n: int, item: Any) -> None:
        self.items.append((n, item))
        if len(self.items) > self.limit:
            self.stride *= 2
            self.items = [item for item in self.items if item[0] % self.stride == 0]


def _fit_window(V: Tensor) -> slice:
    """The records to fit a rate to: until V has come down to a share of its start, or near to the least it comes to.

    Where strong noise first spreads the particles far, from the largest V to near the least after it.
    """
    V = V.nan_to_num(nan=torch.inf)
    spreads = bool(V.max() > 10 * V[0])
    start = int(V.argmax()) if spreads else 0
    rest = V[start:]
    least = 1.2 * float(rest.min())
    low = rest <= (least if spreads else max(_FIT_UNTIL_SHARE * float(rest[0]), least))
    return slice(start, start + max(3, int(low.double().argmax()) + 1))


def _moments(theta: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Each cluster's mean [r, K, d] and mean squared distance from it [r, K], over its finite particles."""
    parts = theta.double().reshape(len(theta), clusters, -1, theta.shape[-1])
    finite = parts.isfinite().all(-1, keepdim=True)
    if finite.all():
        mean = parts.mean(2)
        return mean, (parts - mean.unsqueeze(2)).square().sum(-1).mean(-1)
    parts = parts.where(finite, 0.0)
    count = finite.sum(2)
    mean = parts.sum(2) / count
    squares = (parts - mean.unsqueeze(2)).square().where(finite, 0.0)
    return mean, squares.sum((2, 3)) / count.squeeze(-1)


def _with_runs(values: Tensor, ndim: int) -> Tensor:
    return values if values.ndim == ndim else values.unsqueeze(0)


def _box(box: tuple[float, float], points: np.ndarray) -> tuple[float, float]:
    """The square to show: the problem's, enlarged for what matters, but not without limit."""
    low, high = box
    side = high - low
    finite = points[np.isfinite(points)]
    if len(finite) and finite.min() < low:
        low = finite.min() - 0.05 * side
    if len(finite) and finite.max() > high:
        high = finite.max() + 0.05 * side
    return float(max(low, box[0] - side)), float(min(high, box[1] + side))


def _grid(problem: Problem, box: tuple[float, float], *, flat: bool) -> tuple[Any, Any, Any]:
    """L and G on a grid of the square; nothing where d is above 2."""
    if problem.dim > 2:
        return None, None, None
    line = torch.linspace(
        *box, _GRID_POINTS if problem.dim == 2 else 4 * _GRID_POINTS, dtype=torch.float64
    )
    axes = torch.meshgrid(*[line] * problem.dim, indexing="xy")
    points = torch.stack(axes, -1).reshape(-1, problem.dim)
    points = points if flat else points.unsqueeze(0)

    def seen(objective: Callable[[Tensor], Tensor]) -> np.ndarray:
        with torch.no_grad():
            values = objective(points).double().reshape(axes[0].shape).cpu().numpy()
        return np.where(np.isfinite(values), values, np.nan)

    lowers = [problem.lower] if callable(problem.lower) else list(problem.lower)
    upper = None if problem.upper is None else seen(problem.upper)
    return line.numpy(), np.stack([seen(each) for each in lowers]), upper

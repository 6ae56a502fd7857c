"""A recorded run of `minimize`: data for figures in bounded memory, and progress."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from fedcb2o.particles import Problem, Result, State, adaptive, minimize, theory
from fedcb2o.particles.adversaries import Adversary
from fedcb2o.particles.functions import UserFunction
from fedcb2o.particles.settings import PAPER, choose_dynamics
from fedcb2o.report._decay import Decay
from fedcb2o.report._particle_figures import Scene

_GRID_POINTS = 181  # points of the landscape along an axis
_MAX_DRAWN_PARTICLES = 300  # particles in a figure
_VARTHETA = 0.25  # of thm:main, for the band of the figure
_FIT_UNTIL_SHARE = 0.05  # the rate is fitted until V has decayed to this share of its start
_STEPS_PER_UPDATE = 10  # of the progress bar

_Frame = tuple[np.ndarray, np.ndarray, np.ndarray]


class RecordedRun(NamedTuple):
    """A run of `minimize` with its recorder, settings and notes."""

    result: Result
    recorder: "Recorder"
    settings: dict[str, Any]
    notes: list[str]


def default_settings() -> dict[str, Any]:
    """Return the defaults of the settings of `minimize`."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(minimize).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }


def resolve_settings(problem: Problem, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run with the defaults of its dynamics.

    A setting that the adaptive dynamics choose on the way is None.
    """
    own = {name: chosen.get(name) for name in PAPER}
    dynamics = choose_dynamics(chosen.get("dynamics"), own, not callable(problem.lower))
    defaults = PAPER if dynamics == "paper" else {"dt": adaptive.DT}
    return {**default_settings(), **defaults, **chosen, "dynamics": dynamics}


def run_recorded(
    problem: Problem,
    groups: Sequence[Adversary],
    overrides: Mapping[str, Any],
    *,
    progress: bool = True,
) -> RecordedRun:
    """Run `minimize` and record it.

    `overrides` replaces settings of the problem.
    """
    chosen = {**problem.settings, **overrides}
    if overrides.get("dynamics") == "adaptive":  # in place of the published settings
        chosen = dict(overrides)
    settings = resolve_settings(problem, chosen)

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (progress and console.is_terminal),
    )
    task = bar.add_task(problem.name, total=settings["maxiter"])
    recorder = Recorder(problem, settings["runs"] or 1)

    def on_step(state: State) -> None:
        recorder(state)
        if not bar.disable and state.n % _STEPS_PER_UPDATE == 0:
            bar.update(task, completed=state.n)

    with warnings.catch_warnings(record=True) as caught, bar:
        warnings.simplefilter("always")
        result = minimize(
            problem.lower,
            problem.upper,
            problem.dim,
            adversaries=groups,
            callback=on_step,
            **chosen,
        )
    messages = [" ".join(str(warning.message).split()) for warning in caught]
    notes = list(dict.fromkeys([*messages, *result.notes]))
    return RecordedRun(result, recorder, settings, notes)


class Recorder:
    """A callback of `minimize` that records the data of figures in bounded memory."""

    def __init__(self, problem: Problem, runs: int) -> None:
        """Start a recording."""
        self.clusters = problem.num_clusters
        self.runs = runs
        self.frames = _DownsampledSeries(128)
        # The mean and variance of every ensemble: V to any point follows from them.
        numbers = self.runs * self.clusters * problem.dim
        self.moments = _DownsampledSeries(min(600, max(60, 4_000_000 // numbers)))

    def __call__(self, state: State) -> None:
        """Record the state before step n."""
        theta = _with_runs(state.theta, 3)
        runs = state.runs
        if self.moments.is_due(state.n):
            self.moments.add(state.n, (runs, *_moments(theta, self.clusters)))
        if self.frames.is_due(state.n) and runs[0] == 0:
            x = state.x
            if state.theta.ndim > 2:
                x = x[0]
            self.frames.add(state.n, self._frame(theta[0], _with_runs(state.theta_m, 3)[0], x))

    def _frame(self, theta: Tensor, theta_m: Tensor, x: Tensor) -> _Frame:
        """Return two coordinates of benign and malicious particles and consensus points."""
        size = len(theta) // self.clusters
        drawn = _MAX_DRAWN_PARTICLES // self.clusters
        benign = theta.reshape(self.clusters, size, -1)[:, :drawn].flatten(0, 1)
        malicious = theta_m[:_MAX_DRAWN_PARTICLES]
        return (
            _two_coordinates(benign),
            _two_coordinates(malicious),
            _two_coordinates(x.reshape(self.clusters, -1)),
        )

    def scene(
        self, problem: Problem, result: Result, settings: Mapping[str, Any], title: str
    ) -> Scene:
        """Return the content of the figures."""
        # 1. The recorded frames, and the last ensemble of the first run.
        flat = result.theta.ndim == 2
        last_step = torch.as_tensor(result.nit).reshape(-1).tolist()[0]
        frames = self.frames.items
        if frames[-1][0] < last_step:
            final = (result.theta, result.theta_m, result.x)
            if not flat:
                final = (result.theta[0], result.theta_m[0], result.x[0])
            frames = [*frames, (last_step, self._frame(*final))]
        theta, theta_m, m = (np.stack([frame[part] for _, frame in frames]) for part in range(3))

        # 2. The square and the landscape.
        points = result.x.cpu().numpy().reshape(self.runs, self.clusters, problem.dim)[..., :2]
        visible = [points[0], theta_m[0]]
        target = None
        if problem.target:
            target = np.array(problem.target, dtype=float).reshape(-1, problem.dim)[:, :2]
            visible.append(target)
        box = _visible_box(problem.box, np.concatenate(visible))
        grid, lower, upper = _evaluate_on_grid(problem, box, flat=flat)

        return Scene(
            title=title,
            dim=problem.dim,
            box=box,
            grid=grid,
            lower_values=lower,
            upper_values=upper,
            times=np.array([n * settings["dt"] for n, _ in frames]),
            theta=theta,
            cluster=np.repeat(np.arange(self.clusters), theta.shape[1] // self.clusters),
            theta_m=theta_m,
            m=m,
            final_points=points,
            target=target,
            decay=self.decay(problem, result, settings),
        )

    def decay(self, problem: Problem, result: Result, settings: Mapping[str, Any]) -> Decay:
        """Compute V over time, its fitted rates and the theory.

        V is the distance from the target, or without one from the last consensus point.
        """
        # 1. The recorded moments, and those of the last ensembles.
        K = self.clusters
        nit = torch.as_tensor(result.nit).reshape(-1)
        last = (torch.arange(self.runs), *_moments(_with_runs(result.theta, 3), K))
        last_step = int(nit.max())
        items = [item for item in self.moments.items if item[0] < last_step]
        items.append((last_step, last))

        # 2. V from the moments; it stays after a run has stopped.
        reference = result.x.reshape(self.runs, K, problem.dim)
        if problem.target:
            reference = torch.tensor(problem.target).to(reference).reshape(1, K, problem.dim)
        V = torch.full((len(items), self.runs, K), torch.nan, dtype=torch.float64)
        for row, (_, (runs, mean, variance)) in enumerate(items):
            centre = reference
            if len(reference) > 1:
                centre = reference[runs]
            V[row, runs] = ((variance + (mean - centre).square().sum(-1)) / 2).cpu()
        for row, (n, _) in enumerate(items[:-1]):
            V[row] = torch.where((n >= nit).unsqueeze(-1), V[-1], V[row])

        # 3. The rates of the median over the runs.
        t = torch.tensor([n * settings["dt"] for n, _ in items], dtype=torch.float64)
        medians = V.nanmedian(1).values.T
        windows = [_fit_window(median) for median in medians]
        rates = [
            float(theory.fit_decay_rate(t[window], median[window]))
            for window, median in zip(windows, medians, strict=True)
        ]
        label, line, band = _theory(problem, settings, t, medians)
        return Decay(
            t=t.numpy(),
            V=V.numpy(),
            fitted_rates=rates,
            fit_windows=[(float(t[window][0]), float(t[window][-1])) for window in windows],
            legend_label=label,
            theory=line,
            theory_bounds=band,
            reference_name="the target" if problem.target else "the last consensus point",
        )


def _theory(
    problem: Problem, settings: Mapping[str, Any], t: Tensor, V: Tensor
) -> tuple[str, Any, Any]:
    """Return a label, a line and a band for V by thm:main."""
    differences = _differences_from_theorem(problem, settings)
    if differences:
        return f"theory: no rate is stated ({', '.join(differences)})", None, None

    noise = settings["noise"]
    rate = theory.contraction_rate(
        lambda1=settings["lambda1"], sigma1=settings["sigma1"], dim=problem.dim, noise=noise
    )
    formula = "2λ₁ − dσ₁²" if noise == "isotropic" else "2λ₁ − σ₁²"
    label = f"theory: {formula} = {rate:.3g}"
    if rate <= 0:
        return f"{label}, no decay promised", None, None
    line = (V[:, :1] * torch.exp(-rate * t)).T.numpy()
    if noise == "anisotropic":
        return label, line, None
    bounds = theory.decay_bounds(t, float(V[0, 0]), vartheta=_VARTHETA, rate=rate)
    band = tuple(bound.unsqueeze(1).numpy() for bound in bounds)
    return f"{label} (band: ϑ = {_VARTHETA:g})", line, band


def _differences_from_theorem(problem: Problem, settings: Mapping[str, Any]) -> list[str]:
    """List the features of a run that thm:main (eq:dyn_macro) does not cover."""
    if settings["dynamics"] == "adaptive":
        return ["adaptive dynamics"]
    features = {
        "several clusters": not callable(problem.lower),
        "no G": problem.upper is None,
        "λ₂ > 0": settings["lambda2"] > 0,
        "σ₂ > 0": settings["sigma2"] > 0,
        "bounds": settings["bounds"] is not None,
        "random batches": settings["batch"] is not None,
    }
    return [name for name, is_present in features.items() if is_present]


class _DownsampledSeries:
    """At most `limit` items at equal steps.

    A full series drops every second item.
    """

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
    """Return the records for the fit of a rate.

    They end where V has decayed to a share of its start, or is near its minimum. Where strong
    noise first spreads the particles, they are from the largest V to near the following minimum.
    """
    V = V.nan_to_num(nan=torch.inf)
    is_spreading = bool(V.max() > 10 * V[0])
    start = 0
    if is_spreading:
        start = int(V.argmax())
    remaining = V[start:]
    threshold = 1.2 * float(remaining.min())
    if not is_spreading:
        threshold = max(_FIT_UNTIL_SHARE * float(remaining[0]), threshold)
    is_low = remaining <= threshold
    return slice(start, start + max(3, int(is_low.double().argmax()) + 1))


def _moments(theta: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Return each cluster's mean [r, K, d] and variance [r, K].

    Only finite particles count.
    """
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
    if values.ndim == ndim:
        return values
    return values.unsqueeze(0)


def _two_coordinates(points: Tensor) -> np.ndarray:
    return points[:, :2].cpu().numpy().astype(float)


def _visible_box(box: tuple[float, float], points: np.ndarray) -> tuple[float, float]:
    """Return the problem's square, enlarged for points by at most its side."""
    low, high = box
    side = high - low
    finite = points[np.isfinite(points)]
    if len(finite) and finite.min() < low:
        low = finite.min() - 0.05 * side
    if len(finite) and finite.max() > high:
        high = finite.max() + 0.05 * side
    return float(max(low, box[0] - side)), float(min(high, box[1] + side))


def _evaluate_on_grid(
    problem: Problem, box: tuple[float, float], *, flat: bool
) -> tuple[Any, Any, Any]:
    """Return grid coordinates with L and G there; None for d > 2."""
    if problem.dim > 2:
        return None, None, None

    num_points = _GRID_POINTS if problem.dim == 2 else 4 * _GRID_POINTS
    line = torch.linspace(*box, num_points, dtype=torch.float64)
    axes = torch.meshgrid(*[line] * problem.dim, indexing="xy")
    points = torch.stack(axes, -1).reshape(-1, problem.dim)
    if not flat:
        points = points.unsqueeze(0)

    def evaluate(objective: Callable[[Tensor], Tensor]) -> np.ndarray:
        with torch.no_grad():
            values = UserFunction("an objective", objective)(points).double()
        grid_values = values.reshape(axes[0].shape).cpu().numpy()
        return np.where(np.isfinite(grid_values), grid_values, np.nan)

    lowers = problem.lower
    if callable(lowers):
        lowers = [lowers]
    upper = None
    if problem.upper is not None:
        upper = evaluate(problem.upper)
    return line.numpy(), np.stack([evaluate(lower) for lower in lowers]), upper

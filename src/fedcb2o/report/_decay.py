"""Figure of the decay of V (eq:V), with thm:main's rate.

V is half the mean squared distance of the particles to the target (García Trillos et al., arXiv
2412.02535). The figure draws plain arrays, a `Decay`, in the colours of `figures`.
"""

import dataclasses
import warnings
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from fedcb2o.report._panels import LINE_STYLES

BENIGN_COLOURS = ("#0072B2", "#009E73", "#56B4E9", "#7F7F7F")
"""One colour per cluster."""
MALICIOUS_COLOUR = "#D55E00"
_MAX_DRAWN_RUNS = 40
_MAX_DRAWN_VALUE = 1e100  # V of diverged particles; larger values overflow in matplotlib


@dataclasses.dataclass(frozen=True)
class Decay:
    """V over time, its fitted rates and the theory."""

    # Times, shape [s].
    t: np.ndarray
    # Values, shape [s, runs, clusters].
    V: np.ndarray
    # Rate of the median over runs for each cluster.
    fitted_rates: Sequence[float]
    # First and last time of each fit.
    fit_windows: Sequence[tuple[float, float]]
    legend_label: str
    # Exponentials of the theory, shape [s, clusters]; None without a promised decay or rate.
    # thm:main is about one cluster with a G and without gradient terms.
    theory: np.ndarray | None = None
    # Lower and upper bound of V by thm:main, each of shape [s, clusters].
    theory_bounds: tuple[np.ndarray, np.ndarray] | None = None
    # Name of the point that V is measured from.
    reference_name: str = "the target"


def draw_decay(ax: Axes, decay: Decay) -> None:
    """Draw V over time, with the theory and the fit."""
    clusters = decay.V.shape[2]
    medians = []
    for k in range(clusters):
        values = decay.V[..., k]
        values = np.where((values > 0) & (values < _MAX_DRAWN_VALUE), values, np.nan)
        if np.isfinite(values).any():
            medians.append(_draw_cluster(ax, decay, values, k))
    if decay.theory is None:
        ax.plot([], [], linestyle="none", label=decay.legend_label)

    ax.set_yscale("log")
    if medians:
        highest = max(np.nanmax(median) for median in medians)
        lowest = min(np.nanmin(median) for median in medians)
        start = medians[0][np.isfinite(medians[0])][0]
        top = 3 * min(highest, 1e10 * start)
        ax.set_ylim(max(min(lowest / 3, top / 1000), 1e-300), top)
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_xlim(decay.t[0], max(decay.t[-1], decay.t[0] + 1e-9))
    ax.set_title(f"(b) Decay of V towards {decay.reference_name}")
    ax.set_xlabel("time t")
    ax.set_ylabel("V, half the mean squared distance")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), fontsize=8.5, handlelength=2.5)


def _draw_cluster(ax: Axes, decay: Decay, values: np.ndarray, k: int) -> np.ndarray:
    """Draw cluster k with values [s, runs]; return the median over runs."""
    t = decay.t
    colour = BENIGN_COLOURS[k % len(BENIGN_COLOURS)]
    if values.shape[1] > 1:
        ax.plot(t, values[:, :_MAX_DRAWN_RUNS], color=colour, linewidth=0.6, alpha=0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        median: np.ndarray = np.nanmedian(values, 1)

    name = _curve_name(decay, values.shape[1], k)
    ax.plot(t, median, color=colour, linewidth=2, label=name, zorder=3)
    label = decay.legend_label * (k == 0)
    if decay.theory_bounds is not None:
        low, high = (bound[:, k] for bound in decay.theory_bounds)
        ax.fill_between(t, low, high, color="0.87", linewidth=0, label=label, zorder=1)
    elif decay.theory is not None:
        ax.plot(
            t,
            decay.theory[:, k],
            label=label,
            color="0.45",
            linestyle=LINE_STYLES[2],
            linewidth=1.4,
            zorder=2,
        )
    _draw_fit(ax, decay, median, k)
    return median


def _curve_name(decay: Decay, runs: int, k: int) -> str:
    name = "V of the run"
    if decay.V.shape[2] > 1:
        name = f"cluster {k + 1}"
    elif runs > 1:
        name = f"median of {runs} runs"
    rate = decay.fitted_rates[k]
    if np.isfinite(rate):
        start, end = decay.fit_windows[k]
        window = f"t = {format_time(start)} to {format_time(end)}"
        name += f", fitted rate {rate:.3g} (dashed, {window})"
    return name


def _draw_fit(ax: Axes, decay: Decay, median: np.ndarray, k: int) -> None:
    """Draw the fitted exponential through the mean of the fitted points."""
    t = decay.t
    rate = decay.fitted_rates[k]
    start, end = decay.fit_windows[k]
    is_fitted = (start <= t) & (t <= end) & np.isfinite(median)
    if not (np.isfinite(rate) and is_fitted.any()):
        return
    offset = np.mean(np.log(median[is_fitted]) + rate * t[is_fitted])
    ax.plot(
        t[is_fitted],
        np.exp(offset - rate * t[is_fitted]),
        color=MALICIOUS_COLOUR,
        linestyle=LINE_STYLES[1],
        linewidth=1.8,
        zorder=4,
    )


def format_time(t: float) -> str:
    """Format a time with three significant digits.

    Example:
        >>> format_time(0.123456)
        '0.123'
    """
    return f"{float(t):.3g}"

"""The figure of how the particles' distance to the target decays: V over time (eq:V) against the rate of thm:main
(García Trillos et al., arXiv 2412.02535). It draws plain arrays, a `Decay`; colours as in `figures`.
"""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from fedcb2o.report.figures import LINE_STYLES

BENIGN_COLOURS = ("#0072B2", "#009E73", "#56B4E9", "#7F7F7F")  # a colour a cluster
MALICIOUS_COLOUR = "#D55E00"
_MAX_DRAWN_RUNS = 40
_MAX_DRAWN_VALUE = (
    1e100  # V of particles that fly off; beyond it matplotlib's own arithmetic overflows
)


@dataclasses.dataclass(frozen=True)
class Decay:
    """V over the times `t`, [s, runs, clusters], what was fitted to it, and what the theory says.

    `fitted` is the rate of the median over runs for each cluster, seen in the time `window`. The theory's exponentials,
    one a cluster: `line` [s, clusters] and, where thm:main applies, the two `band` ones that it has V between; both
    None where no decay is promised, or no rate is stated: thm:main is on one cluster with a G and without the terms of
    the gradient. `told` says so in the legend. V is measured from `towards`.
    """

    t: np.ndarray
    V: np.ndarray
    fitted_rates: Sequence[float]
    fit_windows: Sequence[tuple[float, float]]
    legend_label: str
    theory: np.ndarray | None = None
    theory_bounds: tuple[np.ndarray, np.ndarray] | None = None
    reference_name: str = "the target"


def draw_decay(ax: Axes, decay: Decay) -> None:
    """V over time on a log scale, the band or line of the theory, and the fit."""
    t = decay.t
    clusters = decay.V.shape[2]
    lows = []
    highs = []
    starts = []
    for k in range(clusters):
        colour = BENIGN_COLOURS[k % len(BENIGN_COLOURS)]
        each = decay.V[..., k]
        each = np.where((each > 0) & (each < _MAX_DRAWN_VALUE), each, np.nan)
        if not np.isfinite(each).any():
            continue
        many = each.shape[1] > 1
        if many:
            ax.plot(t, each[:, :_MAX_DRAWN_RUNS], color=colour, linewidth=0.6, alpha=0.3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            middle = np.nanmedian(each, 1)
        name = (
            f"cluster {k + 1}"
            if clusters > 1
            else f"median of {each.shape[1]} runs"
            if many
            else "V of the run"
        )
        start, until = decay.fit_windows[k]
        if np.isfinite(decay.fitted_rates[k]):
            name += f", fitted rate {decay.fitted_rates[k]:.3g} (dashed, t = {format_time(start)} to {format_time(until)})"
        ax.plot(t, middle, color=colour, linewidth=2, label=name, zorder=3)
        lows.append(np.nanmin(middle))
        highs.append(np.nanmax(middle))
        starts.append(middle[np.isfinite(middle)][0])
        told = decay.legend_label if k == 0 else None
        if decay.theory_bounds is not None:
            steep, flat = (each[:, k] for each in decay.theory_bounds)
            ax.fill_between(t, steep, flat, color="0.87", linewidth=0, label=told, zorder=1)
        elif decay.theory is not None:
            look: dict[str, Any] = {
                "color": "0.45",
                "linestyle": LINE_STYLES[2],
                "linewidth": 1.4,
                "zorder": 2,
            }
            ax.plot(t, decay.theory[:, k], label=told, **look)
        kept = (start <= t) & (t <= until) & np.isfinite(middle)
        if np.isfinite(decay.fitted_rates[k]) and kept.any():
            # Through the middle of the points that it was fitted to.
            centre = np.mean(np.log(middle[kept]) + decay.fitted_rates[k] * t[kept])
            look = {
                "color": MALICIOUS_COLOUR,
                "linestyle": LINE_STYLES[1],
                "linewidth": 1.8,
                "zorder": 4,
            }
            ax.plot(t[kept], np.exp(centre - decay.fitted_rates[k] * t[kept]), **look)
    if decay.theory is None:
        ax.plot([], [], linestyle="none", label=decay.legend_label)
    ax.set_yscale("log")
    if lows:
        top = 3 * min(max(highs), 1e10 * starts[0])
        ax.set_ylim(max(min(min(lows) / 3, top / 1000), 1e-300), top)
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_xlim(t[0], max(t[-1], t[0] + 1e-9))
    ax.set_title(f"(b) Decay of V towards {decay.reference_name}")
    ax.set_xlabel("time t")
    ax.set_ylabel("V, half the mean squared distance")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), fontsize=8.5, handlelength=2.5)


def format_time(t: float) -> str:
    """A time for people."""
    return f"{float(t):.3g}"

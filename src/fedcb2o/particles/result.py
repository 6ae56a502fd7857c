"""The state of `minimize` for callbacks, its result and history, in the user's shapes."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_COLOURS = {"lower": "#0072B2", "upper": "#D55E00", "spread": "0.6"}


@dataclasses.dataclass(frozen=True)
class State:
    """The state of all active runs before step n.

    Copy what you keep: `theta` changes in place.

    Attributes:
        n: Step.
        t: Time n dt.
        x: Consensus point, in the shape of the result.
        theta: Benign particles.
        theta_m: Malicious particles.
        lower: L of every particle in its own cluster; None in a step with a random batch.
        upper: G of every particle; None without G or in a step with a random batch.
        runs: Indices of the active runs.
    """

    n: int
    t: float
    x: Tensor
    theta: Tensor
    theta_m: Tensor
    lower: Tensor | None
    upper: Tensor | None
    runs: Tensor


@dataclasses.dataclass(frozen=True)
class History:
    """Consensus points, spreads and values at recorded steps.

    They are NaN after a run has stopped.

    Attributes:
        n: Steps [records].
        t: Times n dt.
        x: Consensus points [records, ...].
        spread: Root mean squared distance of the ensemble from them.
        lower: L of the best end so far; of "paper" dynamics, the least L of the ensemble.
        upper: G at that point; L without G.
    """

    n: Tensor
    t: Tensor
    x: Tensor
    spread: Tensor
    lower: Tensor
    upper: Tensor


class RunnerUp(NamedTuple):
    """The end of another search: a point [d] with L, G and the number of searches that end there.

    Without G, `upper` is L.
    """

    x: Tensor
    lower: float
    upper: float
    searches: int


@dataclasses.dataclass(frozen=True, repr=False)
class Result(Mapping[str, Any]):
    """The result of `minimize`, like SciPy's OptimizeResult: `result.x`, or `result["x"]`.

    With `runs`, every field of a run has that leading axis. With several clusters, `x` is
    [clusters, d] and `lower` and `upper` are [clusters].

    Attributes:
        x: The answer, [d]: the best judged point; the consensus point of "paper" dynamics.
        consensus: Consensus point of the best ensemble, [d].
        lower: L at x; with constraints, the sum of the scaled violations.
        upper: G at x, or None without G.
        success: Whether x can be trusted: two independent searches (three without G) ended at x, to
            a thousandth of the box; 1,000 d uniform points in the box, and searches from the
            promising ones, led to no better end; x meets the constraints; L is nowhere smaller with
            an infinite G. For "paper" dynamics, whether the ensemble reached
            a consensus: its spread about x is at most `xtol`, and x is not at the edge of the start
            region with smaller L or G further out.
        status: "success", or why it is False: a limit "maxfev", "maxiter" or "time_limit", the
            "callback", "interrupted" by Ctrl-C, "infeasible" without a point that meets the
            constraints, "barred" by an infinite G, or at the "boundary" of the start region.
        message: The same in words.
        nit: Number of steps.
        nfev: Number of points that L received, summed over clusters.
        excluded: Number of those with a NaN or infinite objective.
        spread: Root mean squared distance of the benign particles from x.
        theta: Last benign ensemble, [n, d], cluster by cluster.
        theta_m: Last malicious particles, [n_m, d].
        history: Consensus points and spreads of earlier steps.
        notes: Remarks of the theory on the settings.
        fun: Value of the user's first function at x: L, or the objective with constraints.
        constr: Violation of each constraint's components at x, one tensor [m] per constraint; None
            without constraints.
        constr_violation: Largest of these violations.
        seed: Seed of the run; `minimize(..., seed=result.seed[3])` repeats the fourth run alone.
        seconds: Wall time of all runs.
        levels: Value of each objective at x, [levels], of objectives in order.
        runners_up: Up to five other ends, best first, as tuples (x, lower, upper, searches) with
            the number of searches that ended there; a list of lists with `runs`. Empty of "paper"
            dynamics.
    """

    x: Tensor
    consensus: Tensor
    lower: Tensor
    upper: Tensor | None
    success: Any
    status: Any
    message: Any
    nit: Any
    nfev: Any
    excluded: Any
    spread: Tensor
    theta: Tensor
    theta_m: Tensor
    history: History
    notes: tuple[str, ...]
    seed: Any
    seconds: float
    fun: Tensor
    constr: list[Tensor] | None = None
    constr_violation: Any = None
    levels: Tensor | None = None
    runners_up: list[Any] = dataclasses.field(default_factory=list)

    def plot(self, ax: Any = None) -> Any:
        """Draw L, G and the spread of the history on logarithmic axes.

        Args:
            ax: Axes of matplotlib; by default those of a new figure.

        Returns:
            The axes.
        """
        if ax is None:
            from matplotlib.figure import Figure

            ax = Figure(figsize=(5.0, 3.5), layout="constrained").subplots()
        steps = self.history.n.numpy()
        for name in ("lower", "upper", "spread"):
            path = getattr(self.history, name).cpu().numpy().reshape(len(steps), -1)
            if name != "upper" or self.upper is not None:
                excess = path
                if name != "spread":  # above the least value, as L and G may be negative
                    excess = path - np.nanmin(path, initial=np.inf)
                for k, column in enumerate(excess.T):
                    ax.plot(steps, column, label=None if k else name, color=_COLOURS[name])
        ax.set(xlabel="step", ylabel="above the least value; spread")
        ax.set_yscale("symlog", linthresh=1e-10)
        ax.legend()
        return ax

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))

    def __repr__(self) -> str:
        lines = self._summary_of_runs() if isinstance(self.message, list) else self._summary()
        lines.append(("seconds", f"{self.seconds:.2f}"))
        lines += [("note", note) for note in self.notes]

        width = max(len(name) for name, _ in lines)
        indent = "\n" + " " * (width + 2)
        return "\n".join(
            f"{name:>{width}}: {str(value).replace(chr(10), indent)}" for name, value in lines
        )

    def _summary(self) -> list[tuple[str, Any]]:
        lines: list[tuple[str, Any]] = [("message", self.message), ("success", self.success)]
        names = ["x", "lower", "upper"]
        if self.constr_violation is not None:
            # With constraints, L is their violation, which the user has not written.
            names = ["x", "fun", "constr_violation"]
        for name in names:
            value = getattr(self, name)
            if value is not None:
                rounded = np.round(torch.as_tensor(value).cpu().numpy(), 6) + 0.0  # no -0
                text = np.array2string(rounded, precision=6, threshold=12, suppress_small=True)
                lines.append((name, text))
        if self.levels is not None and self.levels.shape[-1] > 2:
            lines.append(("levels", np.round(self.levels.cpu().numpy(), 6) + 0.0))
        lines.append(("spread", f"{float(self.spread.max()):.3g}"))
        lines += [("nit", self.nit), ("nfev", self.nfev)]
        if self.excluded:
            lines.append(("excluded", self.excluded))
        return lines

    def _summary_of_runs(self) -> list[tuple[str, Any]]:
        count = len(self.message)
        # Runs of equal settings end in few ways, and one line has room for one.
        most_common = max(set(self.message), key=self.message.count)
        frequency = self.message.count(most_common)
        lines = [
            ("runs", f"{count}, of which {int(self.success.sum())} reached a consensus"),
            ("message", f"{most_common} ({frequency} of {count} runs)"),
        ]
        for name in ("x", "lower", "upper", "nit"):
            value = getattr(self, name)
            if value is not None:
                lines.append((name, f"tensor of shape {[*value.shape]}"))
        return lines

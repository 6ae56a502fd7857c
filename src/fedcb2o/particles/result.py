"""The result of `minimize` and its history, in the user's shapes."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcb2o.particles._adaptive import Adaptive
from fedcb2o.particles._paper import Paper
from fedcb2o.particles.ask_tell import EvaluationRequest, EvaluationSteps
from fedcb2o.particles.constraints import Constraints
from fedcb2o.particles.dynamics import Values
from fedcb2o.particles.initialisation import Start, Stop
from fedcb2o.particles.system import Ensembles, Evaluation, System

Dynamics = Paper | Adaptive
_COLOURS = {"lower": "#0072B2", "upper": "#D55E00", "spread": "0.6"}


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


class Record(NamedTuple):
    """A step of the history, of the active runs."""

    n: int
    runs: Tensor
    # Consensus points [runs, clusters, d].
    m: Tensor
    # Spreads [runs, clusters].
    spread: Tensor
    # L and G [runs, clusters, 2].
    best: Tensor


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
        """Return the solution; of many runs, the number of successes."""
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
        successes = int(self.success.sum())
        most_common = max(set(self.message), key=self.message.count)
        frequency = self.message.count(most_common)
        lines = [
            ("runs", f"{count}, of which {successes} reached a consensus"),
            ("message", f"{most_common} ({frequency} of {count} runs)"),
        ]
        for name in ("x", "lower", "upper", "nit"):
            value = getattr(self, name)
            if value is not None:
                lines.append((name, f"tensor of shape {[*value.shape]}"))
        return lines


def least_values(system: System, info: Evaluation) -> Tensor:
    """Return the least L of each cluster, and G there [runs, clusters, 2]; without G, L twice."""
    pairs = []
    for cluster, values in zip(system.clusters, info.values, strict=True):
        lower = values.lower[:, cluster.rows]
        least, rows = lower.min(1, keepdim=True)
        upper = least if values.upper is None else values.upper[:, cluster.rows].gather(1, rows)
        pairs.append(torch.cat([least, upper], 1))
    return torch.stack(pairs, 1)


def finish_runs(
    system: System,
    state: Ensembles,
    m: Tensor,
    spread: Tensor,
    agreed: Tensor,
    ending: Tensor,
    fields: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Record the runs that end at a step.

    `agreed` tells of each active run if it reached a consensus, `ending` if it ends. `fields` has
    `x` if it is not the consensus point. The fields of the ending runs get the indices `runs`.
    """
    tensors = {
        "x": system.clamp(m),
        "consensus": system.clamp(m),
        "spread": spread,
        "theta": system.benign(state.theta),
        "theta_m": system.malicious(state.theta),
        **fields,
    }
    if not ending.all():
        tensors = {name: tensor[ending.to(tensor.device)] for name, tensor in tensors.items()}
    runs = state.runs[ending]
    extra = tensors.pop("extra", 0)  # evaluations of the run outside of steps
    return {
        **tensors,
        "runs": runs,
        "success": agreed[ending],
        "nit": torch.full_like(runs, state.n),
        "nfev": torch.full_like(runs, state.num_evaluated) + extra,
        "excluded": state.excluded[ending],
    }


def build_result(
    ends: list[dict[str, Tensor]],
    records: list[Record],
    start: Start,
    dynamics: Dynamics,
    *,
    stops: list[Stop],
    notes: tuple[str, ...],
    seconds: float,
) -> EvaluationSteps[Result]:
    """Combine the ended runs in their original order.

    `ends` are results of `finish_runs`. `stops` are the reasons that the field "stop" counts.
    The generator's result is that of `minimize`.
    """
    # Runs end at different steps.
    final = ends[0]
    if len(ends) > 1:
        order = torch.cat([end["runs"] for end in ends]).argsort()
        final = {
            name: torch.cat([end[name] for end in ends])[order.to(tensor.device)]
            for name, tensor in final.items()
        }

    # 1. Evaluate the objectives at x.
    shape = start.shape
    system = start.system
    at_x = yield from _evaluate_at(final["x"], system)
    if (yield from dynamics.confirm_(final, at_x, start)):
        at_x = yield from _evaluate_at(final["x"], system)
    x = final["x"]
    uppers = [values.upper for values in at_x if values.upper is not None]
    upper = shape.squeeze(torch.cat(uppers, 1)) if uppers else None
    lower = shape.squeeze(torch.cat([values.lower for values in at_x], 1))
    fields: dict[str, Any] = {"lower": lower, "upper": upper, "fun": lower}
    constraints = system.clusters[0].lower
    if isinstance(constraints, Constraints):
        fields["constr"] = [
            shape.squeeze(part.reshape(len(x), 1, -1)) for part in constraints.latest
        ]
        fields["constr_violation"] = shape.squeeze_runs(constraints.latest_violation.reshape(-1))
        fields["fun"] = upper
        if constraints.latest_inner is not None:
            fields["fun"] = shape.squeeze(constraints.latest_inner.reshape(len(x), 1))

    # 2. Decide which runs succeeded.
    run_stops = [stops[number] for number in final["stop"].tolist()]
    success, reasons = yield from dynamics.judge(final, at_x, start, run_stops)
    messages = [reason.text for reason in reasons]
    statuses = [reason.code for reason in reasons]

    # 3. Assemble the history.
    steps = torch.tensor([record.n for record in records])
    path = x.new_full((len(records), *x.shape), torch.nan)
    spreads = path[..., 0].clone()
    best = spreads.unsqueeze(-1).repeat(1, 1, 1, 2)
    for row, record in enumerate(records):
        recorded: Any = slice(None)
        if len(record.runs) < len(start.seeds):
            recorded = record.runs.to(x.device)
        path[row, recorded] = record.m
        spreads[row, recorded] = record.spread
        best[row, recorded] = record.best.to(best)
    columns = (path, spreads, *best.unbind(-1))
    squeezed = (shape.squeeze(column, 1, 2) for column in columns)
    history = History(steps, steps * dynamics.dt, *squeezed)

    runners_up: list[Any] = [[] for _ in messages]
    for run, rows in enumerate(final.get("runners_up", ())):
        runners_up[run] = [
            RunnerUp(row[:-3].to(x), float(row[-3]), float(row[-2]), int(row[-1]))
            for row in rows[rows.isfinite().all(1)]
        ]

    per_run = ("nit", "nfev", "excluded", "theta", "theta_m")
    return Result(
        x=shape.squeeze(x),
        consensus=shape.squeeze(final["consensus"]),
        **fields,
        success=shape.squeeze_runs(success),
        status=statuses[0] if shape.single_run else statuses,
        message=messages[0] if shape.single_run else messages,
        spread=shape.squeeze(final["spread"]),
        **{name: shape.squeeze_runs(final[name]) for name in per_run},
        history=history,
        notes=notes,
        seed=start.seeds[0] if shape.single_run else start.seeds,
        seconds=seconds,
        runners_up=runners_up[0] if shape.single_run else runners_up,
    )


def count_points(steps: EvaluationSteps[Result]) -> EvaluationSteps[Result]:
    """Add the points that the end of a run evaluates to `nfev`.

    The requests stay the same.
    """
    count = 0
    try:
        request = next(steps)
        while True:
            count += request.theta.shape[1]
            try:
                values = yield request
            except (Exception, KeyboardInterrupt) as error:
                request = steps.throw(error)
            else:
                request = steps.send(values)
    except StopIteration as end:
        result: Result = end.value
    return dataclasses.replace(result, nfev=result.nfev + count)


def _evaluate_at(x: Tensor, system: System) -> EvaluationSteps[list[Values]]:
    """Evaluate each cluster's objectives at its own point of x [runs, clusters, d]."""
    at_x = []
    for k, cluster in enumerate(system.clusters):
        points = x[:, k : k + 1]
        at_x.append((yield EvaluationRequest(points, cluster.lower, cluster.upper, system.flat)))
    return at_x

"""What `minimize` hands out: the result and the way there, in the user's shapes."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcb2o.particles.ask_tell import EvaluationRequest, EvaluationSteps
from fedcb2o.particles.boundary_check import is_boundary_consensus
from fedcb2o.particles.system import Cluster, System

_CONSENSUS_MESSAGE = "consensus: spread at most xtol = {:g}"
_BOUNDARY_MESSAGE = (
    "the particles agreed at the edge of where they started, and L or G is less further out: let them start in a larger"
    " box, by `spread`, `bounds` or `initial`"
)


@dataclasses.dataclass(frozen=True)
class History:
    """The consensus point `x` [records, ...] and the ensemble's spread about it, at the times `t` of the steps `n`.

    The spread is the root of the mean squared distance. Where a run had stopped, both are NaN.
    """

    n: Tensor
    t: Tensor
    x: Tensor
    spread: Tensor


@dataclasses.dataclass(frozen=True, repr=False)
class Result(Mapping[str, Any]):
    """The answer of `minimize`, in the manner of SciPy's OptimizeResult: `result.x`, or `result["x"]`.

    With `runs`, every field of a run has that leading axis. With several clusters, `x` is [clusters, d] and `lower` and
    `upper` are [clusters].

    Attributes:
        x: the consensus point of the last ensemble, [d].
        lower: L there; also `fun`.
        upper: G there, or None where there is no G.
        success: whether the ensemble came to a consensus, its spread about x being at most `xtol`, and not at the edge
            of where it started while L, or G, is less further out.
        message: why it stopped.
        nit: steps taken.
        nfev: particles judged, each once by L and once by G of every cluster; what x is worth and what adversaries ask
            are not counted.
        excluded: how many of those had a NaN or infinite objective, and had no part in the consensus.
        spread: root mean squared distance of the benign particles from x.
        theta: the last benign ensemble, [n, d]; those of all clusters, one after the other.
        theta_m: the last malicious particles, [n_m, d].
        history: the way there.
        notes: what the theory has to say on the settings.
        seed: the seed of the run; `minimize(..., seed=result.seed[3])` repeats the fourth run alone.
        seconds: wall time of all runs.
    """

    x: Tensor
    lower: Tensor
    upper: Tensor | None
    success: Any
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

    @property
    def fun(self) -> Tensor:
        """L at x, the first function's value, by SciPy's name."""
        return self.lower

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def __iter__(self) -> Iterator[str]:
        yield from (field.name for field in dataclasses.fields(self))
        yield "fun"

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        """The answer first; of many runs, how many succeeded."""
        lines = []
        if isinstance(self.message, list):
            count = len(self.message)
            lines.append(
                ("runs", f"{count}, of which {int(self.success.sum())} reached a consensus")
            )
            common = max(set(self.message), key=self.message.count)
            lines.append(("message", f"{common} ({self.message.count(common)} of {count} runs)"))
            for name in ("x", "lower", "upper", "nit"):
                if (value := getattr(self, name)) is not None:
                    lines.append((name, f"tensor of shape {[*value.shape]}"))
        else:
            lines += [("message", self.message), ("success", self.success)]
            for name in ("x", "lower", "upper"):
                if (value := getattr(self, name)) is not None:
                    lines.append(
                        (
                            name,
                            np.array2string(
                                value.cpu().numpy(), precision=6, threshold=12, suppress_small=True
                            ),
                        )
                    )
            lines += [
                ("spread", f"{float(self.spread.max()):.3g}"),
                ("nit", self.nit),
                ("nfev", self.nfev),
            ]
            lines += [("excluded", self.excluded)] if self.excluded else []
        lines.append(("seconds", f"{self.seconds:.2f}"))
        lines += [("note", note) for note in self.notes]
        wide = max(len(name) for name, _ in lines)
        return "\n".join(
            f"{name:>{wide}}: {str(value).replace(chr(10), chr(10) + ' ' * (wide + 2))}"
            for name, value in lines
        )


@dataclasses.dataclass(frozen=True)
class OutputShape:
    """Which leading axes the user sees: that of runs, unless `flat`, and that of clusters, unless `single`."""

    single_run: bool
    single_cluster: bool

    def squeeze_runs(self, values: Tensor) -> Any:
        """Without the axis of runs, and a plain number where nothing else is left, if there is one run."""
        if not self.single_run:
            return values
        return values[0] if values.ndim > 1 else values[0].item()

    def squeeze(self, values: Tensor, runs: int = 0, clusters: int = 1) -> Tensor:
        """Without the axes that the user does not see."""
        values = values.squeeze(clusters) if self.single_cluster else values
        return values.squeeze(runs) if self.single_run else values


@dataclasses.dataclass(frozen=True)
class FinishedRuns:
    """The runs that ended at a step, as they were then."""

    runs: Tensor
    m: Tensor
    spread: Tensor
    theta: Tensor
    theta_m: Tensor
    judged: Tensor
    excluded: Tensor
    agreed: Tensor
    n: int
    reason: str


def finish_runs(
    system: System, m: Tensor, spread: Tensor, n: int, agreed: Tensor, ending: Tensor, reason: str
) -> FinishedRuns:
    """The runs that are `ending` at step n, for that reason or because they `agreed`."""
    tensors = (m, spread, system.benign, system.malicious)
    if not ending.all():
        tensors = tuple(each[ending.to(each.device)] for each in tensors)  # type: ignore[assignment]
    excluded = system.excluded[ending]
    counts = (torch.full_like(excluded, system.num_evaluated), excluded, agreed[ending])
    return FinishedRuns(system.runs[ending], *tensors, *counts, n=n, reason=reason)


def build_result(
    ends: list[FinishedRuns],
    records: list[tuple[int, Tensor, Tensor, Tensor]],
    shape: OutputShape,
    clusters: list[Cluster],
    seeds: list[int],
    *,
    start: tuple[Tensor, Tensor],
    walls: tuple[Tensor, Tensor] | None,
    delta_q: float,
    dt: float,
    xtol: float,
    notes: tuple[str, ...],
    seconds: float,
) -> EvaluationSteps[Result]:
    """What came of the runs, in their order, and in the shapes that the user asked for."""
    order = torch.cat([end.runs for end in ends]).argsort()

    def gather(name: str) -> Tensor:
        parts = [getattr(end, name) for end in ends]
        return parts[0] if len(parts) == 1 else torch.cat(parts)[order.to(parts[0].device)]

    x = gather("m")
    at_x = []
    for k, each in enumerate(clusters):
        at_x.append(
            (yield EvaluationRequest(x[:, k : k + 1], each.lower, each.upper, shape.single_run))
        )
    lower = torch.cat([values.lower for values in at_x], 1)
    upper = torch.cat([values.upper for values in at_x], 1) if at_x[0].upper is not None else None  # type: ignore[misc]
    success = gather("agreed")
    messages = [
        (_CONSENSUS_MESSAGE.format(xtol) if agreed else end.reason)
        for end in ends
        for agreed in end.agreed.tolist()
    ]
    messages = [messages[k] for k in order.tolist()]
    if success.any():
        further = yield from is_boundary_consensus(
            x, at_x, start, clusters, walls=walls, delta_q=delta_q, flat=shape.single_run
        )
        stuck = success & further.any(1).cpu()
        messages = [
            _BOUNDARY_MESSAGE if at_edge else told
            for told, at_edge in zip(messages, stuck.tolist(), strict=True)
        ]
        success = success & ~stuck
    nit = torch.cat([torch.full_like(end.runs, end.n) for end in ends])[order]
    steps = torch.tensor([n for n, *_ in records])
    path = x.new_full((len(records), *x.shape), torch.nan)
    spreads = path[..., 0].clone()
    for row, (_, runs, m, spread) in enumerate(records):
        there = runs.to(x.device) if len(runs) < len(seeds) else slice(None)
        path[row, there], spreads[row, there] = m, spread
    return Result(
        x=shape.squeeze(x),
        lower=shape.squeeze(lower),
        upper=None if upper is None else shape.squeeze(upper),
        success=shape.squeeze_runs(success),
        message=messages[0] if shape.single_run else messages,
        nit=shape.squeeze_runs(nit),
        nfev=shape.squeeze_runs(gather("judged")),
        excluded=shape.squeeze_runs(gather("excluded")),
        spread=shape.squeeze(gather("spread")),
        theta=shape.squeeze_runs(gather("theta")),
        theta_m=shape.squeeze_runs(gather("theta_m")),
        history=History(steps, steps * dt, shape.squeeze(path, 1, 2), shape.squeeze(spreads, 1, 2)),
        notes=notes,
        seed=seeds[0] if shape.single_run else seeds,
        seconds=seconds,
    )

"""Ask and tell: the steps of `minimize` for objectives that run elsewhere.

Example:
    >>> search = Search(dim=1, seed=1, num_particles=20, maxiter=300)
    >>> while not search.done:
    ...     search.tell([float(point @ point) for point in search.ask()])
    >>> abs(search.result.x.item()) < 0.1
    True
"""

import copy
import dataclasses
import inspect
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.particles._minimize import minimize
from fedcb2o.particles.ask_tell import EvaluationSteps, check_names
from fedcb2o.particles.constraints import Constraints
from fedcb2o.particles.dynamics import EvaluationRequest, Values, to_values
from fedcb2o.particles.functions import takes_tensors
from fedcb2o.particles.ledger import Ledger
from fedcb2o.particles.result import Result
from fedcb2o.user_values import to_tensor


class Best(NamedTuple):
    """The best point [d] so far, with L and G; without G, `upper` is L."""

    x: Tensor
    lower: float
    upper: float


class Search:
    """`minimize` for users who evaluate points themselves: a simulator, a cluster, by hand.

        search = Search(dim=2)
        while not search.done:
            points = search.ask()                      # [n, d]
            search.tell([measure(point) for point in points.numpy()])
        print(search.result)

    With the same values it has the same result as `minimize`, bit for bit.

    Single points may come back in any order: `ask(1, worker)` and `tell(value, points=point,
    worker=worker)`. Then points that workers never return go to others, and values that would be
    the best, values of suspicious workers and a small share of the others are repeated elsewhere.

    A search can be pickled. With `file` it survives the end of the process.

    Attributes:
        result: The result, or None before the end.
        done: Whether the search has ended.
        best: The best point so far, `(x, lower, upper)`, or None before the first value.
    """

    def __init__(
        self,
        dim: int | None = None,
        *,
        upper: bool = False,
        file: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> None:
        """Start a search, or continue that of a file.

        Args:
            dim: d; by default that of `x0`, `bounds` or `initial`.
            upper: Whether there is a G, so that `tell` receives its values too.
            file: File of JSON lines to which every value is added. If it exists, the search
                continues where the file ends; dim, settings and seed must be the same.
            settings: Settings of `minimize`, except `lower`, `args` and `gradient`. A constraint
                whose `fun` is None is measured: `tell` receives its values.

        Raises:
            ConfigError: A setting is invalid, or the file is that of another search.
        """
        for name in ("lower", "args", "gradient"):
            if name in settings:
                raise ConfigError(
                    f"`{name}` is for functions, which Search has none of: leave it out"
                )
        # The generator behind `minimize`: requests go to the user in place of functions.
        steps = inspect.unwrap(minimize)
        check_names(settings, inspect.signature(steps).parameters)
        self._settings = {"dim": dim, "upper": upper, **settings}
        self._log: list[dict[str, Any]] = []
        self._file: Path | None = None
        self.result: Result | None = None
        self.best: Best | None = None
        self._request: EvaluationRequest | None = None
        self._ledger = Ledger()
        self._own: list[Any] = []
        self._widths: list[int] = []  # numbers of L, G and the constraints per point
        self._steps: EvaluationSteps[Result] = steps(
            _unavailable_objective,
            _unavailable_objective if upper else None,
            dim,
            gradient=_unavailable_objective,
            **settings,
        )
        with torch.no_grad():
            self._open(next(self._steps))
        if file is not None:
            path = Path(file)
            if path.exists():
                self._replay(map(json.loads, path.read_text(encoding="utf-8").splitlines()))
            self._file = path

    def __reduce__(self) -> Any:
        return _rebuild, (self._settings, self._log)

    @property
    def done(self) -> bool:
        """True after the end of the search, when `result` is available.

        It is False for a search that failed.
        """
        return self.result is not None

    def ask(self, count: int | None = None, worker: str | int | None = None) -> Tensor:
        """Return the points to evaluate: the ensemble or a batch of it.

        At the end they are the solution and, if it is at the edge of the start region, points
        further out.

        Args:
            count: Largest number of points; by default all of the step.
            worker: Name of the worker that will evaluate them. It receives no point twice.

        Returns:
            A copy of the points, [n, d], or [runs, n, d] of several runs without `count`. They are
            [0, d] if the worker has to wait for others.

        Raises:
            RunError: The search has ended or failed.
        """
        points = self._pending_request().user_points
        if count is None and worker is None:
            return points.clone()
        rows = self._ledger.hand_out(count, _check_worker(worker))
        return points.reshape(-1, points.shape[-1])[rows]

    def tell(
        self,
        lower: Any,
        upper: Any = None,
        gradient: Any = None,
        constraints: Any = (),
        *,
        points: Any = None,
        worker: str | int | None = None,
    ) -> None:
        """Receive the values of the points, and take a step when all are known.

        Args:
            lower: L of each point, [n] or [runs, n]: a tensor, an array or a list; NaN, or a masked
                or missing value, for failed evaluations. With constraints, the objective. A list of
                tuples has all numbers of each point: L, G if there is one, and the constraints.
            upper: G of each point, if there is a G.
            gradient: Gradient of L at each point, [n, d], if `lambda2` or `sigma2` is above 0.
            constraints: Values of each constraint whose `fun` is None, in their order: [n] or
                [n, m].
            points: Points [n, d] or [d] to which the values belong: a part of the step, in any
                order, or points of the user's own. By default all points of the step.
            worker: Name of the worker that evaluated the points. Without a name, values are
                believed.

        Raises:
            ConfigError: A value has a wrong shape or type; `tell` may then be called again.
            RunError: No particle is left, or the search has ended.
        """
        request = self._pending_request()
        if isinstance(lower, list) and lower and isinstance(lower[0], tuple):
            columns = [list(column) for column in zip(*lower, strict=True)]
            lower = columns.pop(0)
            if self._settings["upper"] and columns:
                upper = columns.pop(0)
            constraints = columns or constraints
        at = request.user_points
        if points is not None:
            if request.gradient:
                raise ConfigError(
                    "single points have no gradient: tell all points of a step at once"
                )
            at = _check_points(points, at)
        # L, G if there is one, and the measured constraints.
        told = [_check_values("lower", lower, at[..., 0])]
        if self._settings["upper"]:
            told.append(_check_values("upper", upper, at[..., 0]))
        elif upper is not None:
            raise ConfigError("`upper` was not requested: a search with G is Search(upper=True)")
        slope = None
        if request.gradient:
            slope = _check_values("gradient", gradient, at)
        elif gradient is not None:
            raise ConfigError("`gradient` was not requested: `lambda2` and `sigma2` are 0")
        measured = [_measured_values(values, at) for values in constraints]
        named: Any = zip(("lower", "upper"), told, strict=False)
        entry: dict[str, Any] = {name: values.tolist() for name, values in named}
        if slope is not None:
            entry["gradient"] = slope.tolist()
        if measured:
            entry["constraints"] = [values.tolist() for values in measured]
        if points is not None:
            entry |= {"points": at.tolist(), "worker": _check_worker(worker)}
        self._record(entry)
        if points is None:
            self._send(request, [*told, *measured], slope)
        else:
            self._add_part(request, at.reshape(-1, at.shape[-1]), [*told, *measured], worker)

    def drop(self, worker: str | int) -> None:
        """Forget a worker that is gone: its points go to others.

        Args:
            worker: Name of the worker.
        """
        request = self._pending_request()
        self._record({"drop": worker})
        self._ledger.drop(worker)
        self._finish_step(request)

    def suspicion(self, worker: str | int) -> float:
        """Return the share of wrong values of a worker.

        Args:
            worker: Name of the worker.

        Returns:
            Wrong values over checked ones, with a prior of 5%.
        """
        return self._ledger.suspicion(worker)

    def _add_part(
        self, request: EvaluationRequest, points: Tensor, told: list[Tensor], worker: Any
    ) -> None:
        """Keep the values of points [n, d] of the step, or of the user's own."""
        columns = [part.reshape(len(points), -1) for part in told]
        self._widths = [column.shape[1] for column in columns]
        numbers = torch.cat(columns, 1).double().cpu().numpy()
        for k, value in enumerate(numbers):
            rows = self._ledger.rows(points[k].double().cpu().numpy())
            if not rows:
                self._own.append((points[k : k + 1], value[None]))
                self._judge(request, *self._own[-1])
            for row in rows:
                self._ledger.add(row, worker, value)
        self._finish_step(request)

    def _finish_step(self, request: EvaluationRequest) -> None:
        """Judge the settled points, and take a step if all points are settled."""
        points = request.user_points
        rows, numbers = self._ledger.settled()
        if len(rows) == len(points.reshape(-1, points.shape[-1])):
            self._send(request, self._split(numbers, points))
        elif rows:
            self._judge(request, points.reshape(-1, points.shape[-1])[rows], numbers)

    def _split(self, numbers: Any, points: Tensor) -> list[Tensor]:
        """Return L, G and the constraints of points from their numbers [n, m]."""
        parts = [
            torch.from_numpy(part).to(points).reshape(*points.shape[:-1], -1)
            for part in np.split(numbers, np.cumsum(self._widths)[:-1], axis=1)
        ]
        count = 2 if self._settings["upper"] else 1
        return [*(part[..., 0] for part in parts[:count]), *parts[count:]]

    def _values(
        self, request: EvaluationRequest, points: Tensor, told: list[Tensor], slope: Any = None
    ) -> Values:
        """Return the values of points as functions would return them, and keep the best point."""
        low, *measured = told
        up = measured.pop(0) if self._settings["upper"] else None
        level = request.lower
        if isinstance(level, Constraints):
            is_single = level.inner is None
            up = low if is_single else up
            low = level(points, measured, None if is_single else low)
        theta = points.reshape(-1, *points.shape[-2:])
        values = to_values(theta, low, up, slope, radius=request.radius)
        lower = values.lower.flatten()
        upper = lower if values.upper is None else values.upper.flatten()
        # L decides, and G between points of equal L.
        row = int(np.lexsort((upper.cpu().numpy(), lower.cpu().numpy()))[0])
        x = theta.reshape(-1, theta.shape[-1])[row].clone()
        best = Best(x, float(lower[row]), float(upper[row]))
        if np.isfinite(best.lower) and (self.best is None or best[1:] < self.best[1:]):
            self.best = best
        return values

    def _judge(self, request: EvaluationRequest, points: Tensor, numbers: Any) -> Values | None:
        """Return the values of single points, or None while constraints have no scale."""
        if isinstance(request.lower, Constraints):
            if not request.lower.has_scale:
                return None
            # Constraints remember the points of their latest call.
            request = dataclasses.replace(request, lower=copy.copy(request.lower))
        return self._values(request, points, self._split(numbers, points))

    def _send(self, request: EvaluationRequest, told: list[Tensor], slope: Any = None) -> None:
        """Take a step with the values of all points."""
        values = self._values(request, request.user_points, told, slope)
        for points, numbers in self._own:
            own = self._judge(request, points, numbers)
            assert own is not None
            request.own.append((points, own))
        self._own = []
        self._request = None
        try:
            with torch.no_grad():
                self._open(self._steps.send(values))
        except StopIteration as end:
            self.result = end.value

    def _open(self, request: EvaluationRequest) -> None:
        self._request = request
        # float64 on the CPU: points are compared by their bytes when values come back.
        self._ledger.open(request.theta.flatten(0, 1).double().cpu().numpy())

    def _record(self, entry: dict[str, Any]) -> None:
        self._log.append(entry)
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(entry) + "\n")
                # A killed process loses no value that `tell` has taken.
                lines.flush()

    def _replay(self, entries: Any) -> None:
        """Receive the values of a log again."""
        try:
            for entry in entries:
                if "drop" in entry:
                    self.drop(entry["drop"])
                else:
                    self.tell(**entry)
        except (ConfigError, RunError, KeyError, TypeError) as error:
            raise ConfigError(
                f"the values are those of a search with other settings or another seed: {error}"
            ) from error

    def _pending_request(self) -> EvaluationRequest:
        if self._request is None:
            raise RunError(
                "this search has ended: its answer is `result`"
                if self.done
                else "this search has failed"
            )
        return self._request


def _rebuild(settings: dict[str, Any], log: list[dict[str, Any]]) -> Search:
    search = Search(**settings)
    search._replay(log)
    return search


def _check_worker(worker: Any) -> str | int | None:
    """Refuse a name that a file cannot keep."""
    if worker is not None and not isinstance(worker, str | int):
        raise ConfigError(f"`worker` must be a word or a whole number, got {worker!r:.60}")
    return worker


def _check_points(points: Any, like: Tensor) -> Tensor:
    """Convert a user's points [n, d] or [d] to a tensor like that of a step."""
    rows = to_tensor("`points` holds", points).to(like)
    dim = like.shape[-1]
    if rows.ndim not in (1, 2) or rows.shape[-1] != dim:
        raise ConfigError(f"`points` must be [n, {dim}] or one point, got {[*rows.shape]}")
    return rows


def _check_values(name: str, values: Any, like: Tensor) -> Tensor:
    """Convert values to a floating-point tensor of the shape and device of `like`."""
    if values is None:
        raise ConfigError(f"`{name}` must be given, in the shape {[*like.shape]}")
    tensor = to_tensor(f"`{name}` holds", values).to(like.device, copy=True)
    if tensor.numel() == 1 == like.numel():  # a list of one value for one point
        tensor = tensor.reshape(like.shape)
    if tensor.shape != like.shape:
        shapes = f"{[*like.shape]} of the requested points, got {[*tensor.shape]}"
        raise ConfigError(f"`{name}` must have the shape {shapes}")
    # Whole numbers and lists take the type of the points; a type of the user stays.
    is_float = tensor.dtype in (torch.float64, torch.float32)
    return tensor if is_float and isinstance(values, Tensor | np.ndarray) else tensor.to(like.dtype)


def _measured_values(values: Any, points: Tensor) -> Tensor:
    """Convert a measured constraint's values to [..., m]."""
    tensor = to_tensor("`constraints` holds", values).to(points)
    return tensor.unsqueeze(-1) if tensor.shape == points.shape[:-1] else tensor


@takes_tensors
def _unavailable_objective(x: Tensor) -> Tensor:
    raise ConfigError("an adversary requests L and G at further points: use minimize")

"""Ask and tell: the steps of `minimize` for objectives that run elsewhere, in a simulator, on a cluster, by hand."""

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.particles._minimize import minimize
from fedcb2o.particles.ask_tell import EvaluationRequest, EvaluationSteps
from fedcb2o.particles.dynamics import to_values
from fedcb2o.particles.result import Result


class Search:
    """What `minimize` does, for who judges the particles by other means than functions.

        search = Search(dim=2)
        while not search.done:
            points = search.ask()                      # [n, d]
            search.tell([measure(point) for point in points.numpy()])
        print(search.result)

    Told the same, it comes to the same as `minimize`, bit for bit: a search that was cut off goes on when one of the
    same settings and seed is told again what was told before.

    Attributes:
        result: the answer, or None before it is `done`.
        done: whether it has ended.
    """

    def __init__(self, dim: int | None = None, *, upper: bool = False, **settings: Any) -> None:
        """Begin.

        Args:
            dim: d; read from `x0`, `bounds` or `initial` where it is not given.
            upper: whether there is a G, so that `tell` takes its values too.
            settings: any of `minimize`, but `lower`, `args` and `gradient`.
        """
        for name in ("lower", "args", "gradient"):
            if name in settings:
                raise ConfigError(
                    f"`{name}` is for functions, which Search has none of: leave it out"
                )
        self.result: Result | None = None
        self._question: EvaluationRequest | None = None
        steps = inspect.unwrap(minimize)
        self._steps: EvaluationSteps[Result] = steps(
            _unavailable_objective,
            _unavailable_objective if upper else None,
            dim,
            gradient=_unavailable_objective,
            **settings,
        )
        with torch.no_grad():
            self._question = next(self._steps)

    @property
    def done(self) -> bool:
        """Whether it has ended, and `result` is there."""
        return self.result is not None

    def ask(self) -> Tensor:
        """The points to be judged now, [n, d], or [runs, n, d] of several runs: a copy, the same until they are told.

        These are the ensemble, or a batch of it; in the end the answer and, if it lies at the edge of where particles
        started, points further out.
        """
        return self._pending_request().user_points.clone()

    def tell(self, lower: Any, upper: Any = None, gradient: Any = None) -> None:
        """What was asked for, and on to the next step.

        Args:
            lower: L of each point, [n] or [runs, n]: a tensor, an array or a list. NaN where there is none.
            upper: G of each point, if there is a G.
            gradient: that of L at each point, [n, d], if `lambda2` or `sigma2` is above 0.

        Raises ConfigError for what does not fit, after which the points can be told again, and RunError where no
        particle is left to agree on.
        """
        question = self._pending_request()
        points = question.user_points
        low = _check_values("lower", lower, points, points.shape[:-1])
        up = _check_values(
            "upper", upper, points, None if question.upper is None else points.shape[:-1]
        )
        slope = _check_values(
            "gradient", gradient, points, points.shape if question.gradient else None
        )
        if question.flat:
            low, up, slope = (
                None if each is None else each.unsqueeze(0) for each in (low, up, slope)
            )
        values = to_values(question.theta, low, up, slope, radius=question.radius)  # type: ignore[arg-type]
        self._question = None
        try:
            with torch.no_grad():
                self._question = self._steps.send(values)
        except StopIteration as end:
            self.result = end.value

    def _pending_request(self) -> EvaluationRequest:
        if self._question is None:
            raise RunError(
                "this search has ended: its answer is `result`"
                if self.done
                else "this search has failed"
            )
        return self._question


def _check_values(
    name: str, values: Any, points: Tensor, shape: torch.Size | None
) -> Tensor | None:
    """Values as a tensor of that shape, beside the points; None where they are not asked for."""
    if shape is None:
        if values is not None:
            raise ConfigError(
                f"`{name}` is told and not asked for: a search with G is Search(..., upper=True)"
            )
        return None
    if values is None:
        raise ConfigError(f"`{name}` must be told, of the shape {[*shape]}")
    try:
        known = isinstance(values, Tensor | np.ndarray)
        told = torch.as_tensor(values, dtype=None if known else points.dtype, device=points.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"`{name}` must be numbers, of the shape {[*shape]}: {error}") from error
    if told.shape != shape:
        raise ConfigError(
            f"`{name}` must have the shape {[*shape]}, as the points that were asked, got {[*told.shape]}"
        )
    return told if told.is_floating_point() else told.to(points.dtype)


def _unavailable_objective(x: Tensor) -> Tensor:
    raise ConfigError(
        "an adversary asks what L and G are where no particle is, which a search is not told: give them to minimize"
    )

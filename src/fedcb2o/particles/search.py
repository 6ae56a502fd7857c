"""Ask and tell: the steps of `minimize` for objectives that run elsewhere.

Example:
    >>> search = Search(dim=1, seed=1, num_particles=20, maxiter=300)
    >>> while not search.done:
    ...     search.tell([float(point @ point) for point in search.ask()])
    >>> abs(search.result.x.item()) < 0.1
    True
"""

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.particles._minimize import minimize
from fedcb2o.particles.ask_tell import EvaluationRequest, EvaluationSteps
from fedcb2o.particles.constraints import Constraints
from fedcb2o.particles.dynamics import to_values
from fedcb2o.particles.functions import takes_tensors
from fedcb2o.particles.result import Result
from fedcb2o.user_values import to_tensor


class Search:
    """`minimize` for users who evaluate points themselves: a simulator, a cluster, by hand.

        search = Search(dim=2)
        while not search.done:
            points = search.ask()                      # [n, d]
            search.tell([measure(point) for point in points.numpy()])
        print(search.result)

    With the same values it has the same result as `minimize`, bit for bit. To resume an interrupted
    search, start one with the same settings and seed and tell it the earlier values again.

    Attributes:
        result: The result, or None before the end.
        done: Whether the search has ended.
    """

    def __init__(self, dim: int | None = None, *, upper: bool = False, **settings: Any) -> None:
        """Start a search.

        Args:
            dim: d; by default that of `x0`, `bounds` or `initial`.
            upper: Whether there is a G, so that `tell` receives its values too.
            settings: Settings of `minimize`, except `lower`, `args` and `gradient`. A constraint
                whose `fun` is None is measured: `tell` receives its values.

        Raises:
            ConfigError: A setting is invalid.
        """
        for name in ("lower", "args", "gradient"):
            if name in settings:
                raise ConfigError(
                    f"`{name}` is for functions, which Search has none of: leave it out"
                )
        self.result: Result | None = None
        self._request: EvaluationRequest | None = None
        # The generator behind `minimize`: requests go to the user in place of functions.
        steps = inspect.unwrap(minimize)
        self._steps: EvaluationSteps[Result] = steps(
            _unavailable_objective,
            _unavailable_objective if upper else None,
            dim,
            gradient=_unavailable_objective,
            **settings,
        )
        with torch.no_grad():
            self._request = next(self._steps)

    @property
    def done(self) -> bool:
        """True after the end of the search, when `result` is available.

        It is False for a search that failed.
        """
        return self.result is not None

    def ask(self) -> Tensor:
        """Return the points to evaluate: the ensemble or a batch of it.

        At the end they are the solution and, if it is at the edge of the start region, points
        further out.

        Returns:
            A copy of the points, [n, d], or [runs, n, d] of several runs. The points stay the same
            until `tell`.

        Raises:
            RunError: The search has ended or failed.
        """
        return self._pending_request().user_points.clone()

    def tell(
        self, lower: Any, upper: Any = None, gradient: Any = None, constraints: Any = ()
    ) -> None:
        """Receive the values of the points, and take a step.

        Args:
            lower: L of each point, [n] or [runs, n]: a tensor, an array or a list; NaN, or a masked
                or missing value, for failed evaluations. With constraints, the objective.
            upper: G of each point, if there is a G.
            gradient: Gradient of L at each point, [n, d], if `lambda2` or `sigma2` is above 0.
            constraints: Values of each constraint whose `fun` is None, in their order: [n] or
                [n, m].

        Raises:
            ConfigError: A value has a wrong shape or type; `tell` may then be called again.
            RunError: No particle is left, or the search has ended.
        """
        request = self._pending_request()
        points = request.user_points
        low = _check_values("lower", lower, points[..., 0])
        up = None
        slope = None
        level = request.lower
        if isinstance(level, Constraints):
            measured = [_measured_values(values, points) for values in constraints]
            is_single = level.inner is None
            up = low if is_single else _check_values("upper", upper, points[..., 0])
            low = level.level(points, measured, None if is_single else low)
        elif request.upper is not None:
            up = _check_values("upper", upper, points[..., 0])
        elif upper is not None:
            raise ConfigError("`upper` was not requested: a search with G is Search(upper=True)")
        if request.gradient:
            slope = _check_values("gradient", gradient, points)
        elif gradient is not None:
            raise ConfigError("`gradient` was not requested: `lambda2` and `sigma2` are 0")
        values = to_values(request.theta, low, up, slope, radius=request.radius)

        self._request = None
        try:
            with torch.no_grad():
                self._request = self._steps.send(values)
        except StopIteration as end:
            self.result = end.value

    def _pending_request(self) -> EvaluationRequest:
        if self._request is not None:
            return self._request
        if self.done:
            raise RunError("this search has ended: its answer is `result`")
        raise RunError("this search has failed")


def _check_values(name: str, values: Any, like: Tensor) -> Tensor:
    """Convert values to a floating-point tensor of the shape and device of `like`."""
    if values is None:
        raise ConfigError(f"`{name}` must be given, in the shape {[*like.shape]}")
    tensor = to_tensor(f"`{name}` holds", values).to(like.device, copy=True)
    if tensor.shape != like.shape:
        raise ConfigError(
            f"`{name}` must have the shape {[*like.shape]} of the requested points,"
            f" got {[*tensor.shape]}"
        )
    is_array = isinstance(values, Tensor | np.ndarray)
    if is_array and tensor.dtype in (torch.float64, torch.float32):
        return tensor
    return tensor.to(like.dtype)


def _measured_values(values: Any, points: Tensor) -> Tensor:
    """Convert a measured constraint's values to [..., m]."""
    tensor = to_tensor("`constraints` holds", values).to(points)
    if tensor.shape == points.shape[:-1]:
        return tensor.unsqueeze(-1)
    return tensor


@takes_tensors
def _unavailable_objective(x: Tensor) -> Tensor:
    raise ConfigError(
        "an adversary requests L and G at further points, which a search cannot evaluate: use"
        " minimize"
    )

"""Who judges the particles: the steps of `minimize` ask for L and G of points, and go on with what they are answered.

So the steps are one generator, which functions answer (`answered`), or whoever knows the values (`search.py`).
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Generator
from typing import ParamSpec, TypeVar, get_args

import torch
from torch import Tensor

from fedcb2o.particles.dynamics import Values, evaluate_objectives
from fedcb2o.particles.objectives import Objective

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class EvaluationRequest:
    """What are L and G, and the gradient of L where it is asked for, at `theta`, [runs, n, d]? As `judge` takes it."""

    theta: Tensor
    lower: Objective
    upper: Objective | None
    flat: bool = False
    gradient: Objective | bool = False
    radius: float = math.inf
    check_writes: bool = False

    @property
    def user_points(self) -> Tensor:
        """The points as a function sees them, [n, d] where there is one run."""
        return self.theta[0] if self.flat else self.theta

    def evaluate(self) -> Values:
        """By the functions themselves."""
        return evaluate_objectives(
            self.theta, self.lower, self.upper, flat=self.flat, gradient=self.gradient, radius=self.radius,
            check_writes=self.check_writes,
        )  # fmt: skip


EvaluationSteps = Generator[EvaluationRequest, Values, _T]


def run_with_objectives(steps: Callable[_P, EvaluationSteps[_T]]) -> Callable[_P, _T]:
    """The function that takes the same and returns what comes of the steps, each of their questions answered."""

    @functools.wraps(steps)
    def whole(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with torch.no_grad():
            asking = steps(*args, **kwargs)
            try:
                question = next(asking)
                while True:
                    try:
                        values = question.evaluate()
                    except Exception as error:  # the steps know what a function may fail at
                        question = asking.throw(error)
                    else:
                        question = asking.send(values)
            except StopIteration as end:
                result: _T = end.value
                return result

    told = inspect.signature(steps)
    outcome = get_args(told.return_annotation)[-1]
    whole.__annotations__ = {**steps.__annotations__, "return": outcome}
    whole.__dict__["__signature__"] = told.replace(return_annotation=outcome)
    return whole

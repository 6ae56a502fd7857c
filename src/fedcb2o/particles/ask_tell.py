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

from fedcb2o.particles.dynamics import Values, judge
from fedcb2o.particles.objectives import Objective

P = ParamSpec("P")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Question:
    """What are L and G, and the gradient of L where it is asked for, at `theta`, [runs, n, d]? As `judge` takes it."""

    theta: Tensor
    lower: Objective
    upper: Objective | None
    flat: bool = False
    gradient: Objective | bool = False
    radius: float = math.inf
    closely: bool = False

    @property
    def shown(self) -> Tensor:
        """The points as a function sees them, [n, d] where there is one run."""
        return self.theta[0] if self.flat else self.theta

    def answer(self) -> Values:
        """By the functions themselves."""
        return judge(
            self.theta, self.lower, self.upper, flat=self.flat, gradient=self.gradient, radius=self.radius,
            closely=self.closely,
        )  # fmt: skip


Asking = Generator[Question, Values, T]


def answered(steps: Callable[P, Asking[T]]) -> Callable[P, T]:
    """The function that takes the same and returns what comes of the steps, each of their questions answered."""

    @functools.wraps(steps)
    def whole(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.no_grad():
            asking = steps(*args, **kwargs)
            try:
                question = next(asking)
                while True:
                    try:
                        values = question.answer()
                    except Exception as error:  # the steps know what a function may fail at
                        question = asking.throw(error)
                    else:
                        question = asking.send(values)
            except StopIteration as end:
                result: T = end.value
                return result

    told = inspect.signature(steps)
    outcome = get_args(told.return_annotation)[-1]
    whole.__annotations__ = {**steps.__annotations__, "return": outcome}
    whole.__dict__["__signature__"] = told.replace(return_annotation=outcome)
    return whole

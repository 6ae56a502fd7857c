"""Requests for objective values: `minimize` as a generator that asks and receives.

The steps of `minimize` are one generator of `EvaluationRequest`s. Functions answer them
(`run_with_objectives`), or a user who knows the values (`search.py`).

Example:
    >>> request = EvaluationRequest(torch.ones(1, 3, 2), lambda x: x.sum(-1), None)
    >>> request.evaluate().lower.tolist()
    [[2.0, 2.0, 2.0]]
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Generator, Iterable
from typing import ParamSpec, TypeVar, get_args

import torch
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.particles.dynamics import Objective, Values, evaluate_objectives
from fedcb2o.plugins import did_you_mean

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class EvaluationRequest:
    """A request for L, G and the gradient of L at points [runs, n, d].

    The fields except `own` are the arguments of `evaluate_objectives`.
    """

    theta: Tensor
    lower: Objective
    upper: Objective | None
    flat: bool = False
    gradient: Objective | bool = False
    radius: float = math.inf
    check_writes: bool = False
    # Points that a user of `Search` evaluated unasked, with their values, for the next step.
    own: list[tuple[Tensor, Values]] = dataclasses.field(default_factory=list)

    @property
    def user_points(self) -> Tensor:
        """The points as a user's function receives them: [n, d] if `flat`, else [runs, n, d]."""
        if self.flat:
            return self.theta[0]
        return self.theta

    def evaluate(self) -> Values:
        """Answer the request by its functions."""
        arguments = dict(vars(self))
        del arguments["own"]
        return evaluate_objectives(**arguments)


_HINTS = {
    "workers": "a pool calls a function of one point by fedcb2o.from_point(f, workers=pool.map)",
    "integrality": "let the functions round coordinates that are whole numbers, np.round(x[0])",
    "tol": "a spread that ends a run is `dynamics=fedcb2o.Adaptive(xtol=...)`",
    "method": "the method is chosen by `dynamics`",
    "fun": "the objective is `lower`",
    "jac": "the gradient of L is `gradient`",
}


def check_names(names: Iterable[str], valid: Iterable[str]) -> None:
    """Refuse settings that `minimize` does not have, with the way to the same effect."""
    valid = list(valid)
    for name in names:
        if name not in valid:
            hint = did_you_mean(name, valid)
            if name in _HINTS:
                hint = f" Instead, {_HINTS[name]}."
            raise ConfigError(f"minimize has no setting `{name}`.{hint}")


EvaluationSteps = Generator[EvaluationRequest, Values, _T]


def run_with_objectives(steps: Callable[_P, EvaluationSteps[_T]]) -> Callable[_P, _T]:
    """Turn a generator of requests into a function that answers them.

    The function has the same arguments and returns the generator's result.
    """
    valid = list(inspect.signature(steps).parameters)

    @functools.wraps(steps)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        check_names(kwargs, valid)
        with torch.no_grad():
            generator = steps(*args, **kwargs)
            try:
                request = next(generator)
                while True:
                    try:
                        values = request.evaluate()
                    # The generator may tolerate a failing function, and ends at Ctrl-C.
                    except (Exception, KeyboardInterrupt) as error:
                        request = generator.throw(error)
                    else:
                        request = generator.send(values)
            except StopIteration as end:
                result: _T = end.value
                return result
            except RuntimeError as error:
                if not isinstance(error.__cause__, StopIteration):
                    raise
                raise ConfigError(
                    "a schedule, a sampler or an adversary raised StopIteration, as an exhausted"
                    " iterator does"
                ) from error

    # The annotations name the result in place of the generator.
    signature = inspect.signature(steps)
    result_type = get_args(signature.return_annotation)[-1]
    run.__annotations__ = {**steps.__annotations__, "return": result_type}
    run.__dict__["__signature__"] = signature.replace(return_annotation=result_type)
    return run

"""Requests for objective values: `minimize` as a generator that asks and receives.

The steps of `minimize` are one generator of `EvaluationRequest`s. Functions answer them
(`run_with_objectives`), or a user who knows the values (`search.py`).
"""

import functools
import inspect
from collections.abc import Callable, Generator, Iterable
from typing import ParamSpec, TypeVar, get_args

import torch

from fedcb2o.errors import ConfigError
from fedcb2o.particles.dynamics import EvaluationRequest, Values
from fedcb2o.plugins import did_you_mean

_P = ParamSpec("_P")
_T = TypeVar("_T")


_HINTS = {
    "workers": "a pool calls a function of one point by fedcb2o.from_point(f, workers=pool.map)",
    "integrality": "let the functions round coordinates that are whole numbers, np.round(x[0])",
    "tol": "a spread that ends a run is `dynamics=fedcb2o.Adaptive(xtol=...)`",
    "method": "the method is chosen by `dynamics`",
    "fun": "the objective is `lower`",
    "jac": "the gradient of L is `gradient`",
    **dict.fromkeys(("alpha", "beta", "sigma1", "dt"), "take `dynamics=fedcb2o.Paper(...)`"),
}


def check_names(names: Iterable[str], valid: Iterable[str], of: str = "minimize") -> None:
    """Refuse settings that do not exist, with the way to the same effect."""
    valid = list(valid)
    for name in names:
        if name not in valid:
            hint = did_you_mean(name, valid)
            if name in _HINTS:
                hint = f" Instead, {_HINTS[name]}."
            raise ConfigError(f"{of} has no setting `{name}`.{hint}")


EvaluationSteps = Generator[EvaluationRequest, Values, _T]


def run_with_objectives(steps: Callable[_P, EvaluationSteps[_T]]) -> Callable[_P, _T]:
    """Turn a generator of requests into a function that answers them."""
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

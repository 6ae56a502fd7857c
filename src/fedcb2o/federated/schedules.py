"""Learning rates by round: the schedules of `torch.optim.lr_scheduler`, by name.

A schedule is stepped once a round. A function of a user's own, (n, rounds, *, ...) -> factor,
returns the factor on the learning rate in round n, counted from 0, of all rounds.

>>> step = functools.partial(__getattr__("StepLR"), step_size=2, gamma=0.5)
>>> rates(step, 0.1, 5)
(1.0, 1.0, 0.5, 0.5, 0.25)
"""

import functools
import inspect
import math
import warnings
from typing import Any

import torch

from fedcb2o.errors import ConfigError
from fedcb2o.plugins import USER_FUNCTION, function_name

_OWN_KEYS = ("optimizer", "last_epoch", "verbose")
_UNFIT = ("LRScheduler", "ReduceLROnPlateau", "ChainedScheduler", "SequentialLR")


def __getattr__(name: str) -> Any:
    """Return the built-in schedules, PyTorch's classes as functions (n, rounds, lr, *, ...)."""
    if name.startswith("_") and name != "__all__":
        raise AttributeError(name)
    from torch.optim import lr_scheduler  # its compiler takes a second to import

    names = [key for key in lr_scheduler.__all__ if key not in _UNFIT]
    if name == "__all__":
        return names
    if name not in names:
        raise AttributeError(name)
    return _schedule(getattr(lr_scheduler, name))


def _schedule(scheduler: Any) -> Any:
    """Return a function whose keyword-only parameters are those of a class of PyTorch."""

    def schedule(rounds: int, lr: float, **options: Any) -> tuple[float, ...]:
        optimiser = torch.optim.SGD([torch.zeros(1)], lr=lr)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of steps of an optimiser that come first
            instance = scheduler(optimiser, **options)
            found = []
            for _ in range(rounds):
                found.append(float(optimiser.param_groups[0]["lr"]) / lr)
                instance.step()
        return tuple(found)

    parameters = [
        parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=parameter.empty)
        for name, parameter in list(inspect.signature(scheduler).parameters.items())
        if name not in _OWN_KEYS
    ]
    own = list(inspect.signature(schedule).parameters.values())[:2]
    schedule.__signature__ = inspect.Signature([*own, *parameters])  # type: ignore[attr-defined]
    schedule.__name__ = scheduler.__name__
    return schedule


def rates(schedule: "functools.partial[Any]", lr: float, rounds: int) -> tuple[float, ...]:
    """Return the factor on the learning rate in each round; ConfigError for an unusable one."""
    name = function_name(schedule)
    if USER_FUNCTION.get(schedule) is not None:
        found = tuple(float(schedule(n, rounds)) for n in range(rounds))
    else:
        try:
            found = schedule(rounds, lr)
        except Exception as error:  # of PyTorch, about a parameter
            raise ConfigError(
                f"`training.schedule` = `{name}`: {type(error).__name__}: {error}"
            ) from error
    wrong = [factor for factor in found if not (math.isfinite(factor) and factor >= 0)]
    if wrong:
        raise ConfigError(
            f"`training.schedule` = `{name}` has the factor {wrong[0]}: a finite number from 0"
        )
    return found

"""CB2O as a method of `scipy.optimize.minimize`: `scipy.optimize.minimize(fun, x0, method=fedcb2o.cb2o)`."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.optimize import OptimizeResult
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.particles._minimize import minimize
from fedcb2o.particles.initialisation import has_many_seeds
from fedcb2o.particles.objectives import from_point
from fedcb2o.particles.result import Result
from fedcb2o.particles.state import State
from fedcb2o.plugins import did_you_mean

# What SciPy gives by a name of its own, and what a single answer of one function has no place for.
_NOT_OPTIONS = {"lower", "dim", "args", "x0", "bounds", "gradient", "callback", "runs"}


def cb2o(
    fun: Callable[..., Any],
    x0: Any,
    args: Any = (),
    *,
    bounds: Any = None,
    callback: Callable[..., Any] | None = None,
    tol: float | None = None,
    jac: Callable[..., Any] | None = None,
    hess: Any = None,
    hessp: Any = None,
    constraints: Any = (),
    upper: Callable[..., Any] | None = None,
    disp: bool = False,
    **options: Any,
) -> OptimizeResult:
    """Minimise `fun` by consensus-based optimisation, or `upper` among the minimisers of `fun` (eq:bilevel_opt).

    As SciPy calls a method: all functions are of one point, an array [d] -> a number.

    Args:
        fun: L.
        x0: the point about which particles start.
        args: further arguments of `fun`, `upper` and `jac`.
        bounds: as SciPy's; particles stay inside.
        callback: called before every step with the consensus point, callback(x), or as callback(intermediate_result=r)
            with r.x and r.fun; True or StopIteration stops.
        tol: `xtol` of `minimize`.
        jac: the gradient of `fun`, for `lambda2` and `sigma2`.
        hess: not used.
        hessp: not used.
        constraints: none: what is allowed can be the minimisers of `fun`, and the objective `upper`.
        upper: G, an option as all that follow.
        disp: whether to print the result.
        options: those of `fedcb2o.minimize`, such as spread, num_particles, maxiter, maxfev and seed.

    Raises ConfigError for options that there are not, and what `minimize` raises.
    """
    known = set(inspect.signature(minimize).parameters) - _NOT_OPTIONS
    for name in options:
        if name not in known:
            raise ConfigError(
                f"cb2o has no option `{name}`.{did_you_mean(name, known)} It has those of fedcb2o.minimize"
            )
    if np.size(constraints):
        raise ConfigError(
            "cb2o has bounds and no other constraints: let `fun` be by how much a point breaks them, and the objective"
            " the option `upper`"
        )
    if has_many_seeds(options.get("seed")):
        raise ConfigError("cb2o takes one seed; many runs at once are fedcb2o.minimize's")
    if tol is not None:
        options.setdefault("xtol", tol)

    def seen(state: State) -> Any:
        return _call_callback(callback, state.x.numpy().copy(), lambda x: fun(x, *args))  # type: ignore[arg-type]

    args = args if isinstance(args, tuple) else (args,)
    result = minimize(
        from_point(fun), None if upper is None else from_point(upper), args=args, x0=np.ravel(x0), bounds=bounds,
        gradient=_batch_gradient(jac) if callable(jac) else None, callback=None if callback is None else seen, **options,
    )  # fmt: skip
    if disp:
        print(result)
    return _to_scipy_result(result)


def _call_callback(callback: Callable[..., Any], x: Any, fun: Callable[[Any], Any]) -> Any:
    """Call a callback of SciPy's, of either kind."""
    try:
        whole = set(inspect.signature(callback).parameters) == {"intermediate_result"}
    except (TypeError, ValueError):  # a built-in function shows no signature
        whole = False
    return (
        callback(intermediate_result=OptimizeResult(x=x, fun=fun(x.copy())))
        if whole
        else callback(x)
    )


def _batch_gradient(jac: Callable[..., Any]) -> Callable[..., Tensor]:
    """A gradient of a whole ensemble from that of a point."""

    def gradient(x: Tensor, *args: Any) -> Tensor:
        slopes = [np.asarray(jac(point, *args), float) for point in x.numpy().copy()]
        if wrong := [slope.shape for slope in slopes if slope.shape != x.shape[1:]]:
            raise ConfigError(
                f"`jac` must return the gradient at a point, of shape {[*x.shape[1:]]}, got {[*wrong[0]]}"
            )
        return torch.from_numpy(np.stack(slopes))

    return gradient


def _to_scipy_result(result: Result) -> OptimizeResult:
    """The result by NumPy, under SciPy's names."""
    names = (
        "x",
        "fun",
        "upper",
        "success",
        "message",
        "nit",
        "nfev",
        "excluded",
        "spread",
        "theta",
        "seed",
        "notes",
    )
    values = {name: result[name] for name in names if result[name] is not None}
    values = {
        name: each.numpy() if isinstance(each, Tensor) and each.ndim else each
        for name, each in values.items()
    }
    values = {
        name: each.item() if isinstance(each, Tensor) else each for name, each in values.items()
    }
    return OptimizeResult(values, status=0 if result.success else 1)

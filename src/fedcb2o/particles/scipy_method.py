"""CB2O as a method of SciPy: `scipy.optimize.minimize(fun, x0, method=fedcb2o.cb2o)`.

Example:
    >>> from scipy.optimize import minimize as scipy_minimize
    >>> result = scipy_minimize(lambda x: x @ x, [1.0, 1.0], method=cb2o, options={"maxiter": 50})
    >>> result.nit <= 50
    True
"""

import functools
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
from fedcb2o.particles.objectives import evaluate_point, from_point
from fedcb2o.particles.result import Result
from fedcb2o.particles.state import State
from fedcb2o.plugins import did_you_mean
from fedcb2o.user_values import to_array

# Settings with a name of SciPy's own, and `runs`, which has more than one result.
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
    """Minimise `fun` by CBO, or `upper` among the minimisers of `fun` (eq:bilevel_opt).

    SciPy calls this method. All functions are of one point: an array [d] -> a number.

    Args:
        fun: L.
        x0: Point around which the particles start.
        args: Further arguments of `fun`, `upper` and `jac`.
        bounds: As SciPy's; particles stay inside.
        callback: Called before every step with the consensus point, callback(x), or as
            callback(intermediate_result=r) with r.x and r.fun; True or StopIteration stops.
        tol: `xtol` of `minimize`.
        jac: Gradient of `fun`, for `lambda2` and `sigma2`.
        hess: Not used.
        hessp: Not used.
        constraints: Must be empty; a constraint can be `fun`, with the objective as `upper`.
        upper: G; an option, as all that follow.
        disp: Whether to print the result.
        options: Settings of `fedcb2o.minimize`, such as spread, num_particles, maxiter and seed.

    Returns:
        The result under SciPy's names.

    Raises:
        ConfigError: An option is unknown or invalid.
        RunError: No particle is left.
    """
    valid = set(inspect.signature(minimize).parameters) - _NOT_OPTIONS
    for name in options:
        if name not in valid:
            raise ConfigError(
                f"cb2o has no option `{name}`.{did_you_mean(name, valid)} It has those of"
                " fedcb2o.minimize"
            )
    if np.size(constraints):
        raise ConfigError(
            "cb2o has bounds and no other constraints: let `fun` be by how much a point breaks"
            " them, and the objective the option `upper`"
        )
    if has_many_seeds(options.get("seed")):
        raise ConfigError("cb2o takes one seed; many runs at once are fedcb2o.minimize's")
    if tol is not None:
        options.setdefault("xtol", tol)

    if not isinstance(args, tuple):
        args = (args,)

    def on_step(state: State) -> Any:
        x = state.x.numpy().copy()
        return _call_callback(callback, x, functools.partial(evaluate_point, fun, args))  # type: ignore[arg-type]

    result = minimize(
        from_point(fun),
        None if upper is None else from_point(upper),
        args=args,
        x0=to_array("`x0` holds", x0).ravel(),
        bounds=bounds,
        gradient=_batch_gradient(jac) if callable(jac) else None,
        callback=None if callback is None else on_step,
        **options,
    )
    if disp:
        print(result)
    return _to_scipy_result(result)


def _call_callback(callback: Callable[..., Any], x: Any, fun: Callable[[Any], Any]) -> Any:
    """Call a SciPy callback of either kind."""
    try:
        names = set(inspect.signature(callback).parameters)
    except (TypeError, ValueError):  # a built-in function without a signature
        names = set()
    if names == {"intermediate_result"}:
        return callback(intermediate_result=OptimizeResult(x=x, fun=fun(x.copy())))
    return callback(x)


def _batch_gradient(jac: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return the gradient of an ensemble from that of a point."""

    def gradient(x: Tensor, *args: Any) -> Tensor:
        slopes = [
            to_array("`jac` returned", jac(point, *args)).astype(float)
            for point in x.numpy().copy()
        ]
        for slope in slopes:
            if slope.shape != x.shape[1:]:
                raise ConfigError(
                    f"`jac` must return the gradient at a point, of shape {[*x.shape[1:]]},"
                    f" got {[*slope.shape]}"
                )
        return torch.from_numpy(np.stack(slopes))

    return gradient


def _to_scipy_result(result: Result) -> OptimizeResult:
    """Convert a result to NumPy, under SciPy's names."""
    names = ("x", "fun", "upper", "success", "message", "nit", "nfev", "excluded", "spread")
    values = {}
    for name in (*names, "theta", "seed", "notes"):
        value = result[name]
        if isinstance(value, Tensor):
            value = value.numpy() if value.ndim else value.item()
        if value is not None:
            values[name] = value
    return OptimizeResult(values, status=0 if result.success else 1)

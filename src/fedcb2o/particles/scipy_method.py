"""CB2O as a method of SciPy: `scipy.optimize.minimize(fun, x0, method=fedcb2o.cb2o)`.

Example:
    >>> from scipy.optimize import minimize as scipy_minimize
    >>> result = scipy_minimize(lambda x: x @ x, [1.0, 1.0], method=cb2o, options={"maxiter": 50})
    >>> result.nit <= 50
    True
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from scipy.optimize import OptimizeResult
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.particles._minimize import minimize, resolve_dynamics
from fedcb2o.particles.ask_tell import check_names
from fedcb2o.particles.functions import UserFunction, with_args
from fedcb2o.particles.initialisation import has_many_seeds
from fedcb2o.particles.result import Result, State
from fedcb2o.user_values import to_array

# Settings with a name of SciPy's own, and `runs`, which has more than one result.
_NOT_OPTIONS = {
    *("lower", "dim", "args", "x0", "bounds", "gradient", "callback", "runs", "constraints")
}


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
    """Minimise `fun` by CBO, or under constraints, or `upper` among the minimisers of `fun`.

    SciPy calls this method. Functions are of one point, an array [d] -> a number, or of many,
    [n, d] -> [n]; the first call finds the form.

    Args:
        fun: The objective; with `upper`, L (eq:bilevel_opt).
        x0: Point around which the particles start.
        args: Further arguments of `fun`, `upper` and `jac`.
        bounds: As SciPy's; particles stay inside.
        callback: Called before every step with the consensus point, callback(x), or as
            callback(intermediate_result=r) with r.x and r.fun; True or StopIteration stops.
        tol: `xtol` of the dynamics.
        jac: Gradient of `fun`, for `lambda2` and `sigma2`.
        hess: Not used.
        hessp: Not used.
        constraints: As SciPy's: NonlinearConstraint, LinearConstraint, dictionaries, or several.
        upper: G; an option, as all that follow.
        disp: Whether to print the result.
        options: Settings of `fedcb2o.minimize`, such as spread, num_particles, maxiter and seed.

    Returns:
        The result under SciPy's names.

    Raises:
        ConfigError: An option is unknown or invalid.
        RunError: No particle is left.
    """
    check_names(options, set(inspect.signature(minimize).parameters) - _NOT_OPTIONS, "cb2o")
    if has_many_seeds(options.get("seed")):
        raise ConfigError("cb2o takes one seed; many runs at once are fedcb2o.minimize's")
    if tol is not None:
        # SciPy passes its `tol` to every method; here it is a parameter of the dynamics.
        dynamics = resolve_dynamics(options.get("dynamics"), is_single=True)
        options["dynamics"] = dataclasses.replace(dynamics, xtol=tol)

    errors = options.get("errors", "raise")

    def convert(name: str, function: Callable[..., Any], *, vector: bool = False) -> UserFunction:
        bound = with_args(function, args)
        return UserFunction(name, bound, vector=vector, errors=errors, arrays_only=True)

    objective = convert("`fun`", fun)

    def on_step(state: State) -> Any:
        x = state.x.numpy().copy()
        names: set[str] = set()
        with contextlib.suppress(TypeError, ValueError):  # a built-in without a signature
            names = set(inspect.signature(callback).parameters)  # type: ignore[arg-type]
        if names != {"intermediate_result"}:
            return callback(x)  # type: ignore[misc]
        # One more evaluation: the consensus point is no particle.
        fun = objective(state.x[None]).item()
        return callback(intermediate_result=OptimizeResult(x=x, fun=fun))  # type: ignore[misc]

    result = minimize(
        objective,
        None if upper is None else convert("`upper`", upper),
        constraints=constraints,
        x0=to_array("`x0` holds", x0).ravel(),
        bounds=bounds,
        gradient=convert("`jac`", jac, vector=True) if callable(jac) else None,
        callback=None if callback is None else on_step,
        **options,
    )
    if disp:
        print(result)
    return _to_scipy_result(result)


def _to_scipy_result(result: Result) -> OptimizeResult:
    """Convert a result to NumPy, under SciPy's names."""
    names = ("x", "fun", "upper", "success", "message", "nit", "nfev", "excluded", "spread")
    values = {}
    for name in (*names, "theta", "seed", "notes", "constr_violation"):
        value = result[name]
        if isinstance(value, Tensor):
            value = value.numpy() if value.ndim else value.item()
        if value is not None:
            values[name] = value
    # SciPy's results have these fields for problems with constraints only.
    if result.constr is not None:
        values["constr"] = [violation.numpy() for violation in result.constr]
    if result.fun is result.upper:  # the objective under constraints
        del values["upper"]
    return OptimizeResult(values, status=0 if result.success else 1)

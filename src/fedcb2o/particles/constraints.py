"""Constraints in SciPy's form as an objective L: the sum of their squared scaled violations.

A constraint is low <= c(x) <= high for c: R^d -> R^m, an equality where low = high. The violation
of a component is max(low - c, c - high, 0). L divides each component's violation by its median
over the particles of the first ensemble that violate the component, so that L has no unit.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.particles.dynamics import Objective
from fedcb2o.particles.functions import UserFunction, with_args
from fedcb2o.user_values import to_array

_SCIPY_CLASSES = (optimize.NonlinearConstraint, optimize.LinearConstraint, optimize.Bounds)


class Constraint(NamedTuple):
    """One constraint low <= c(x) <= high."""

    name: str
    # c, points [..., d] -> [..., m]; None if a user of `Search` tells the values.
    function: Callable[[Tensor], Tensor] | None
    low: Tensor  # lower ends, [m] or one for all components
    high: Tensor
    keep_feasible: Tensor  # true for inequalities whose violation excludes a particle

    def at(self, x: Tensor, measured: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return c [..., m] at points [..., d], its ends [m], and if a violation excludes [m].

        Without a function, c is `measured`.
        """
        values = measured if self.function is None else self.function(x)
        ends = max(self.low.numel(), self.high.numel())
        if values is None or values.shape[:-1] != x.shape[:-1]:
            got = "none" if values is None else f"{[*values.shape]}"
            shapes = f"in the shape {[*x.shape[:-1], 'm']}, got {got}"
            raise ConfigError(f"{self.name} needs a value per component and point, {shapes}")
        if ends not in (1, values.shape[-1]):
            raise ConfigError(f"{self.name} has {values.shape[-1]} components and {ends} ends")
        parts = (self.low.to(values), self.high.to(values), self.keep_feasible.to(values.device))
        return values, *(part.expand(values.shape[-1]) for part in parts)


class Constraints:
    """The objective L of constraints, points [..., d] -> [...].

    With an objective `inner` that is minimised among the feasible points, L is `inner` at feasible
    points. At all others it is the largest value of `inner` in the first ensemble plus the sum of
    the squared scaled violations. `tol` is the violation up to which an equality is met, in units
    of its typical violation.
    """

    latest: list[Tensor]  # violations at the points of the latest call, [..., m] of each constraint
    # Values of `inner` at these points, also where a constraint is violated.
    latest_inner: Tensor | None = None
    # Scaled residuals at these points, at most 0 where all are met; an equality has two.
    latest_residuals: Tensor

    @property
    def latest_violation(self) -> Tensor:
        """Largest violation [...] at each point of the latest call, in the constraints' units."""
        return torch.cat(self.latest, -1).amax(-1)

    @property
    def has_scale(self) -> bool:
        """Return whether the first ensemble has been evaluated."""
        return self._scale is not None

    def __init__(
        self, items: Sequence[Constraint], tol: float = 1e-4, inner: Objective | None = None
    ) -> None:
        self.items = list(items)
        self.tol = tol
        self.inner = inner
        self._scale: Tensor | None = None  # typical violations [runs, 1, components]
        self._worst: Tensor | None = None  # largest `inner` of the first ensembles [runs, 1]

    def for_runs(self, runs: Tensor) -> "Constraints":
        """Return the objective for the ensembles of a part of the runs, with their scales."""
        if self._scale is None or len(runs) == len(self._scale):
            return self
        part = copy.copy(self)
        rows = runs.to(self._scale.device)
        part._scale = self._scale[rows]
        part._worst = None if self._worst is None else self._worst[rows]
        return part

    def __call__(
        self, x: Tensor, measured: Sequence[Tensor] = (), inner: Tensor | None = None
    ) -> Tensor:
        """Return L of points [..., d].

        `measured` has the values [..., m] of the constraints without a function, in their order,
        and `inner` those of the objective `inner`.
        """
        if inner is None and self.inner is not None:
            inner = self.inner(x)
        # 1. The violations, and their typical size at the first call.
        told = iter(measured)
        sides = [
            item.at(x, next(told, None) if item.function is None else None) for item in self.items
        ]
        parts = [torch.maximum(low - values, values - high) for values, low, high, _ in sides]
        excess = torch.cat(parts, -1)
        is_equality = torch.cat([low == high for _, low, high, _ in sides])
        is_kept = torch.cat([kept for *_, kept in sides]) & ~is_equality
        if self._scale is None:
            self._scale = _typical(excess)
            if inner is not None:
                finite = inner.where(inner.isfinite(), -torch.inf).amax(-1)
                self._worst = finite.where(finite.isfinite(), 0.0).reshape(-1, 1)

        # 2. The sum of the squared scaled violations.
        scale = _per_run(self._scale, excess)
        self.latest = [part.clamp(min=0) for part in parts]
        residuals = torch.where(is_equality, excess / scale - self.tol, excess / scale)
        scaled = residuals.clamp(min=0)
        if is_equality.any():  # the distances from both sides have no kink
            offsets = torch.cat([values - low for values, low, *_ in sides], -1)
            signed = (offsets / scale)[..., is_equality]
            both = [signed - self.tol, -signed - self.tol]
            residuals = torch.cat([residuals[..., ~is_equality], *both], -1)
        self.latest_residuals = residuals
        total = scaled.square().sum(-1)
        self.latest_inner = inner
        if self._worst is not None and inner is not None:
            total = torch.where(total > 0, _per_run(self._worst, inner) + total, inner)
        if is_kept.any():
            total = total.masked_fill(((scaled > 0) & is_kept).any(-1), torch.nan)
        return total

    def feasible_only(self, objective: Objective) -> Objective:
        """Return an objective that is infinite at points that `keep_feasible` excludes.

        It is not evaluated there.
        """
        kept = [item for item in self.items if item.keep_feasible.any()]
        if not kept or any(item.function is None for item in kept):
            return objective

        def of_feasible(x: Tensor) -> Tensor:
            allowed = ~Constraints(kept)(x).isnan()
            values = x.new_full(allowed.shape, torch.inf)
            if allowed.any():
                values[allowed] = objective(x[allowed]).to(values)
            return values

        return of_feasible


def with_constraints(
    lower: Any, upper: Any, constraints: Any, tol: float, errors: str
) -> tuple[Any, Any]:
    """Return L and G of a problem with constraints, or the objectives themselves without any."""
    items = parse_constraints(constraints, errors)
    if not items:
        return lower, upper
    if not callable(lower):
        raise ConfigError("`constraints` need one objective, not one for each cluster")
    level = Constraints(items, tol)
    if upper is None:
        return level, level.feasible_only(lower)
    level.inner = level.feasible_only(lower)
    return level, level.feasible_only(upper)


def parse_constraints(constraints: Any, errors: str = "raise") -> list[Constraint]:
    """Convert constraints in SciPy's form; see `minimize`."""
    is_single = isinstance(constraints, (*_SCIPY_CLASSES, Mapping, Constraint))
    is_single = is_single or callable(constraints) or not isinstance(constraints, Iterable)
    items = [constraints] if is_single else list(constraints)
    return [_parse(f"constraint {k}", item, errors) for k, item in enumerate(items, 1)]


def _parse(name: str, item: Any, errors: str) -> Constraint:
    if isinstance(item, Mapping):
        kind = str(item.get("type", "")).lower()
        if kind not in ("eq", "ineq") or not callable(item.get("fun")):
            raise ConfigError(
                f'{name} needs the keys "type", "eq" or "ineq", and "fun", a function; got'
                f" {dict(item)!r:.80}"
            )
        function = with_args(item["fun"], item.get("args", ()))
        high = torch.tensor([0.0 if kind == "eq" else torch.inf], dtype=torch.float64)
        converted = _convert_function(name, function, errors)
        return Constraint(name, converted, torch.zeros_like(high), high, torch.tensor([False]))
    if isinstance(item, Constraint):
        return item
    if not isinstance(item, _SCIPY_CLASSES):
        raise ConfigError(
            f"{name} must be a NonlinearConstraint or LinearConstraint of scipy.optimize, or a"
            f' dictionary such as {{"type": "ineq", "fun": function}}, got a {type(item).__name__}'
        )
    low = _to_tensor(f"the lower end of {name} is", item.lb)
    high = _to_tensor(f"the upper end of {name} is", item.ub)
    keep = torch.from_numpy(np.array(item.keep_feasible, dtype=bool, ndmin=1))
    if (low > high).any() or low.isnan().any() or high.isnan().any():
        raise ConfigError(f"{name} has a lower end above its upper end, or NaN")

    if isinstance(item, optimize.Bounds):
        return Constraint(name, lambda x: x, low, high, keep)
    if isinstance(item, optimize.NonlinearConstraint):
        return Constraint(name, _convert_function(name, item.fun, errors), low, high, keep)
    dense = item.A.toarray() if hasattr(item.A, "toarray") else item.A
    matrix = _to_tensor(f"the matrix of {name} is", np.atleast_2d(dense))

    def linear(x: Tensor) -> Tensor:
        if matrix.shape[1] != x.shape[-1]:
            raise ConfigError(
                f"the matrix of {name} has {matrix.shape[1]} columns for {x.shape[-1]} coordinates"
            )
        product: Tensor = x @ matrix.to(x).T
        return product

    return Constraint(name, linear, low, high, keep)


def _convert_function(name: str, function: Any, errors: str) -> UserFunction | None:
    if function is None:
        return None
    if not callable(function):
        raise ConfigError(f"the `fun` of {name} must be a function, got {function!r:.60}")
    return UserFunction(name, function, vector=True, errors=errors)


def _to_tensor(source: str, values: Any) -> Tensor:
    array = to_array(source, np.asarray(values, dtype=float))
    return torch.from_numpy(np.atleast_1d(array))


def _typical(excess: Tensor) -> Tensor:
    """Return each component's median violation per run, [runs, 1, components].

    Without a violation it is the median distance from the ends, and 1 if that is 0.
    """
    ensembles = (excess if excess.ndim > 2 else excess.unsqueeze(0)).flatten(1, -2)
    ensembles = ensembles.where(ensembles.isfinite(), torch.nan)
    violation, distance = (
        sizes.where(sizes > 0, torch.nan).nanmedian(1, keepdim=True).values
        for sizes in (ensembles, ensembles.abs())
    )
    return violation.where(violation.isfinite(), distance).nan_to_num(nan=1.0)


def _per_run(values: Tensor, like: Tensor) -> Tensor:
    """Give values [runs, 1, ...] the shape to combine with those of points."""
    return values[0] if like.ndim < values.ndim else values

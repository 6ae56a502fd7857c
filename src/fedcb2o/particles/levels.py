"""Objectives in order: each is minimised among the minimisers of those before, within a tolerance.

The levels are stages of `minimize`. With two levels without tolerance there is one stage, the
bi-level problem. Otherwise each stage starts at the point of the stage before. An earlier level
with a tolerance is a constraint, and earlier levels without one are L: the sum of what they are
above their least values.
"""

import contextlib
import dataclasses
import functools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.particles import settings
from fedcb2o.particles._adaptive import Adaptive
from fedcb2o.particles.ask_tell import EvaluationSteps
from fedcb2o.particles.constraints import Constraint, parse_constraints
from fedcb2o.particles.functions import UserFunction, takes_tensors, with_args
from fedcb2o.particles.initialisation import has_many_seeds
from fedcb2o.particles.result import Result


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Largest distance of a level from its least value."""

    absolute: float = 0.0
    relative: float = 0.0  # share of the least value's size
    # Standard errors of the mean, for a level that returns several values per point.
    errors: float = 0.0


def parse_tolerance(value: Any) -> Tolerance:
    """Convert a number, "5%", "1 se" (standard errors) or None to a tolerance."""
    if value is None:
        return Tolerance()
    kind, number = "absolute", value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\S+?)\s*(%|se)\s*", value)
        if not match:
            raise ConfigError(
                f'`tolerances` must be numbers, "5%" of the least value or "1 se", standard errors,'
                f" got {value!r}"
            )
        kind, number = "relative" if match[2] == "%" else "errors", match[1]
        with contextlib.suppress(ValueError):  # refused below
            number = float(number) / (100 if kind == "relative" else 1)
    checked = settings.check_positive({"tolerances": number}, or_zero=True)["tolerances"]
    return Tolerance(**{kind: checked})


class Level:
    """One objective in order; a level with standard errors is the mean of several values."""

    def __init__(self, function: Any, args: Any, tolerance: Tolerance, errors: str) -> None:
        several: Any = {"vector": bool(tolerance.errors), "errors": errors}
        self._function = UserFunction("`lower`", with_args(function, args), **several)
        self.tolerance = tolerance
        self.cap = 0.0  # largest value that counts as minimal
        self._scale = 0.0  # typical excess
        takes_tensors(self)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the values [...] of points [..., d]."""
        values: Tensor = self._function(x)
        return values.mean(-1) if self.tolerance.errors else values

    def finish(self, x: Tensor) -> None:
        """Set the largest value that counts as minimal, at the minimiser x [d] of this level."""
        values = self._function(x[None])[0].double()
        self.cap = float(values.mean())
        # Relative to the least value, and not to the spread, which depends on the box.
        size = abs(self.cap)
        if self.tolerance.errors:
            count = values.numel()
            if count < 2:
                raise ConfigError(
                    f"a tolerance in standard errors needs several values per point, got {count}"
                )
            self.cap += self.tolerance.errors * float(values.std()) / count**0.5
        self.cap += self.tolerance.absolute + self.tolerance.relative * size

    @property
    def is_exact(self) -> bool:
        """True without a tolerance."""
        return self.tolerance == Tolerance()

    def as_constraint(self, name: str) -> Constraint:
        """Return the constraint that the level is at most its cap."""
        low, high = (torch.tensor([end], dtype=torch.float64) for end in (-torch.inf, self.cap))
        return Constraint(name, lambda x: self(x).unsqueeze(-1), low, high, torch.tensor([False]))

    def excess(self, x: Tensor) -> Tensor:
        """Return what the level is above its cap, in units of the first typical excess."""
        excess = (self(x) - self.cap).clamp(min=0)
        # Levels have units of their own: without a scale the largest would hide the others.
        if not self._scale:
            self._scale = float(excess[excess > 0].median()) if (excess > 0).any() else 1.0
        return excess / self._scale


def split_levels(function: Callable[..., Any], count: int, args: Any, errors: str) -> list[Any]:
    """Return `count` objectives that share the calls of one function of all."""
    joint = UserFunction("`lower`", with_args(function, args), vector=True, errors=errors)
    latest: list[Tensor] = []

    def values(x: Tensor) -> Tensor:
        # `minimize` asks for L and G of the same points one after the other.
        if not latest or not torch.equal(latest[0], x):
            found = joint(x)
            if (got := found.shape[-1]) != count:
                text = f"must return `levels` = {count} values per point, got {got}"
                raise ConfigError(f"`lower` {text}")
            latest[:] = [x.clone(), found]
        return latest[1]

    return [takes_tensors(lambda x, k=k: values(x)[..., k]) for k in range(count)]  # type: ignore[misc]


def minimize_in_order(
    steps: Callable[..., EvaluationSteps[Result]],
    lowers: Sequence[Any],
    tolerances: Any,
    arguments: Mapping[str, Any],
) -> EvaluationSteps[Result]:
    """Minimise each objective among the minimisers of those before, by the steps of `minimize`."""
    count = len(lowers)
    if tolerances is None or isinstance(tolerances, str) or not isinstance(tolerances, Sequence):
        tolerances = [tolerances] * (count - 1)
    if len(tolerances) not in (count - 1, count):
        raise ConfigError(
            f"`tolerances` must be one for all levels or one for each of the {count} but the last,"
            f" got {len(tolerances)}"
        )
    parsed = [parse_tolerance(item) for item in [*tolerances, None][:count]]
    for item in lowers:
        settings.check_function("`lower`", item, "a function, or a list with one for each cluster")
    common = dict(arguments)
    # The levels take the arguments of the user, and no stage needs them again.
    args, errors = common.pop("args"), common["errors"]
    if count == 1 or (count == 2 and parsed[0] == Tolerance()):
        upper = None if count == 1 else with_args(lowers[1], args)
        found = yield from steps(with_args(lowers[0], args), upper, **common)
        pair = [found.fun] if found.upper is None or count == 1 else [found.lower, found.upper]
        return dataclasses.replace(found, levels=torch.stack(pair, -1))

    if common["runs"] is not None or has_many_seeds(common["seed"]):
        raise ConfigError("several levels with tolerances, and more than two, take one run each")
    pairs = zip(lowers, parsed, strict=True)
    levels = [Level(item, args, tolerance, errors) for item, tolerance in pairs]
    items = parse_constraints(common.pop("constraints"), errors)
    # Without tolerance the first two levels are one stage.
    first = 1 if levels[0].is_exact else 0
    results: list[Result] = []
    started = time.monotonic()
    for k in range(first, count):
        done = levels[:k]
        named = [(f"level {j}", level) for j, level in enumerate(done, 1)]
        capped = [level.as_constraint(name) for name, level in named if not level.is_exact]
        exact = [level for level in done if level.is_exact]
        lower: Any = None
        if exact:  # after the first stage in units of their first excess
            lower = levels[0] if k == 1 else takes_tensors(functools.partial(_total_excess, exact))
        stage = dict(common, constraints=[*items, *capped])
        dynamics = Adaptive() if stage["dynamics"] in (None, "adaptive") else stage["dynamics"]
        if k < count - 1 and isinstance(dynamics, Adaptive):
            # An earlier level needs its least value only, and not one minimiser.
            stage["dynamics"] = dataclasses.replace(dynamics, agree="value")
        if common["maxfev"] is not None:
            left = common["maxfev"] - sum(result.nfev for result in results)
            # What a stage does not use is left for the later ones.
            stage["maxfev"] = left // (count - k)
        if results:
            # The end of a stage meets the constraints of the next one.
            stage |= {"x0": results[-1].x, "initial": None}
            stage["time_limit"] = max(1e-3, common["time_limit"] - time.monotonic() + started)
        objectives = [objective for objective in (lower, levels[k]) if objective is not None]
        results.append((yield from steps(*objectives, **stage)))
        for level in levels[: k + 1] if k == first else [levels[k]]:
            level.finish(results[-1].x)
        if results[-1].status in ("interrupted", "callback"):
            break

    # The result is that of the last stage, under the names of the first and the last level.
    last = results[-1]
    x = last.x[None]
    values = torch.stack([level(x)[0] for level in levels])
    numbered = enumerate(results, first + 1)
    failed = next(((k, item) for k, item in numbered if not item.success), None)
    return dataclasses.replace(
        last,
        lower=values[0],
        upper=values[-1],
        fun=values[0],
        levels=values,
        success=failed is None,
        status="success" if failed is None else failed[1].status,
        message=last.message if failed is None else f"level {failed[0]}: {failed[1].message}",
        nit=sum(result.nit for result in results),
        nfev=sum(result.nfev for result in results),
        excluded=sum(result.excluded for result in results),
        seconds=time.monotonic() - started,
    )


def _total_excess(levels: Sequence[Level], x: Tensor) -> Tensor:
    return torch.stack([level.excess(x) for level in levels]).sum(0)

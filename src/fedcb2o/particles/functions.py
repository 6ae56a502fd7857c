"""Functions as users write them: of tensors or arrays, of many points or of one.

A converted function maps points [..., d] to values [...], or to [..., d] or [..., m] if it has
several values per point.

Functions must not write into their input. PyTorch counts writes into a tensor, so these are noticed
at once. Writes into a NumPy array that shares the memory are not counted; a copy reveals them.
"""

import contextlib
import functools
import itertools
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.particles import settings
from fedcb2o.plugins import failing_line, label
from fedcb2o.user_values import to_array, to_tensor

_LOGGER = logging.getLogger(__name__)

_CONVERTED = "_takes_tensors"  # attribute of functions whose form is known
_NUM_COMPARED = 3  # points whose values alone are compared with those among many

_Call = Callable[[Tensor], Any]


def takes_tensors(function: _Call) -> _Call:
    """Mark a function of tensors of points, so that no other form is tried."""
    setattr(function, _CONVERTED, True)
    return function


def from_numpy(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """Make an objective without gradient from a NumPy function of an ensemble.

    The function runs on the CPU. Masked and missing values count as NaN.

    Args:
        function: Function [..., d] -> [...]. It owns its array and may write into it.

    Returns:
        The objective.

    Raises:
        ConfigError: In a call, where the function does not return numbers.
    """
    source = f"the NumPy function {label(function)} returned"

    @takes_tensors
    @functools.wraps(function)
    def objective(x: Tensor, *args: Any) -> Tensor:
        values = function(x.detach().cpu().numpy().copy(), *args)
        return to_tensor(source, values).to(x.device)

    return objective


def from_point(
    function: Callable[..., Any], *, workers: Callable[..., Any] = map, errors: str = "raise"
) -> Callable[..., Tensor]:
    """Make an objective from a function of one point, as SciPy's functions are.

    Masked and missing values count as NaN.

    Args:
        function: Function of a NumPy array [d] that returns a number.
        workers: Function that calls it for each particle: the built-in `map`, or that of a pool
            of threads or processes.
        errors: "exclude" takes an exception of the function as NaN at that point, and warns once;
            "raise" stops at the exception, with a note that has the point.

    Returns:
        The objective.

    Raises:
        ConfigError: An argument is invalid; in a call, where `function` returns no number, or
            `workers` not one value for each point.
    """
    settings.check_function("`workers`", workers)
    settings.check_choices({"`errors`": (errors, ("raise", "exclude"))})
    evaluate: Callable[..., Any] = _evaluate_point
    if errors == "exclude":
        evaluate = _evaluate_or_describe
    is_logged = False

    @takes_tensors
    @functools.wraps(function)
    def objective(x: Tensor, *args: Any) -> Tensor:
        nonlocal is_logged
        # A copy: a function that writes into its point would move the particle.
        points = x.detach().cpu().numpy().copy().reshape(-1, x.shape[-1])
        call = functools.partial(evaluate, function, args)
        values = list(workers(call, points))
        if len(values) != len(points):
            raise ConfigError(f"`workers` returned {len(values)} values for {len(points)} points")

        failures = [value for value in values if isinstance(value, str)]
        if failures and not is_logged:
            _LOGGER.warning("%s: such points are excluded.", failures[0])
            is_logged = True
        if failures:
            shape = next((np.shape(value) for value in values if not isinstance(value, str)), ())
            # A failed point needs the shape of the others, which a constraint has.
            missing = np.full(shape, np.nan).tolist()
            values = [missing if isinstance(value, str) else value for value in values]
        kinds = {isinstance(value, bool) for value in values}
        _refuse_truth_values(f"the function {label(function)}", len(kinds) == 2, values[:0])
        dtype = torch.bool if kinds == {True} else x.dtype
        tensor = torch.tensor(values, dtype=dtype, device=x.device)
        return tensor.reshape((*x.shape[:-1], *tensor.shape[1:]))

    return objective


def _evaluate_point(function: Callable[..., Any], args: tuple[Any, ...], point: Any) -> Any:
    """Return the number, or the list of numbers, that a user's function of a point returns."""
    try:
        value = function(point, *args)
    except Exception as error:
        cure = (
            f"{_describe_failure(function, point, error)}: return NaN where it is not defined, or"
            ' take errors="exclude"'
        )
        if isinstance(error, StopIteration):  # it would end a loop over the points
            raise ConfigError(cure) from error
        error.add_note(cure)
        raise
    if isinstance(value, float):
        return float(value)
    name = f"the function {label(function)}"
    array = to_array(f"{name} of a point returned", value)
    if array.size == 1:  # a constraint that calls this function refuses a truth value
        return array.item() if array.dtype == bool else float(array.item())
    _refuse_truth_values(name, array.dtype == bool, value)
    if array.ndim > 1:
        raise ConfigError(
            f"{name} of a point must return a number or a list, got the shape {[*array.shape]}"
        )
    return array.astype(float).tolist()


def with_args(objective: Any, args: Any) -> Any:
    """Bind further arguments, a tuple or a single one, to an objective: objective(x, *args)."""
    if not isinstance(args, tuple):
        args = (args,)
    if not args or objective is None:
        return objective

    @functools.wraps(objective)
    def bound(x: Any) -> Any:
        return objective(x, *args)

    return bound


def convert_functions(
    name: str,
    functions: Any,
    args: Any,
    errors: str,
    *,
    vector: bool = False,
    or_none: bool = True,
    hint: str = "",
) -> Any:
    """Convert one function or several to a `UserFunction`, with further arguments bound."""
    if isinstance(functions, Sequence) and not isinstance(functions, str | bytes):
        kind: Any = {"vector": vector, "or_none": or_none, "hint": hint}
        return [convert_functions(name, item, args, errors, **kind) for item in functions]
    if isinstance(functions, UserFunction) or (or_none and functions is None):
        return functions
    settings.check_function(
        name, functions, "a function, or a list with one for each cluster", hint
    )
    return UserFunction(name, with_args(functions, args), vector=vector, errors=errors)


class UserFunction:
    """A user's function of points, called in the form that it accepts.

    The first call tries the forms in order: a tensor of all points, a tensor [n, d], an array
    [n, d], one point as an array, one point as a tensor. Later calls take the form that fitted. A
    form of many points fits only if it gives a point the same value among others as alone: a
    function of one point that divides by x.sum() accepts many.

    A `vector` function has several values per point, in a last axis. With `errors` "exclude"
    points where the function raises an exception are NaN. `arrays_only` calls it with arrays
    alone, as SciPy does.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        vector: bool = False,
        errors: str = "raise",
        arrays_only: bool = False,
    ) -> None:
        self._name = name
        self._function = function
        self._vector = vector
        self._errors = errors
        self._arrays_only = arrays_only
        self._form: _Form | None = None
        self._is_logged = False
        # Messages and reports name the function of the user.
        functools.update_wrapper(self, function, updated=())
        if getattr(function, _CONVERTED, False):
            self._form = _Form("", function, of_rows=False)

    def __call__(self, x: Tensor) -> Any:
        """Return the values of points [..., d]: [...], or [..., m] of a vector function."""
        if self._form is None:
            return self._first_call(x)
        # One point that fails must not exclude the others, so each is called by itself.
        if self._errors == "exclude" and self._form.is_pointwise:
            return self._call_rows(self._form, x)
        try:
            return self._finish(self._form.call(x), x)
        except Exception as error:
            if self._errors == "raise" or isinstance(error, ConfigError):
                raise
            return self._call_rows(self._form, x)

    def _first_call(self, x: Tensor) -> Tensor:
        # 1. Try all points at once. With n = d, one row more tells points from coordinates.
        rows = x.reshape(-1, x.shape[-1])
        is_ambiguous = x.shape[-2] == x.shape[-1]
        failures: list[tuple[str, Any]] = []
        # A function that reduces the wrong axis of a square would return a result of the right
        # shape.
        points = torch.cat([rows, rows[:1]]) if is_ambiguous else x
        for form in self._forms(points.ndim):
            values = self._attempt(form, points, failures)
            if values is None:
                continue
            if len(rows) > 1:  # one point does not tell the forms apart
                self._form = form._replace(of_rows=form.of_rows or is_ambiguous)
            return self._finish(values[: len(rows)], x) if is_ambiguous else values

        # 2. Try point by point, where the function may fail at some of them.
        if self._errors == "exclude":
            for form in self._forms(2):
                alone = (row for row in rows if self._attempt(form, row[None], []) is not None)
                fitting = list(itertools.islice(alone, _NUM_COMPARED))
                several = torch.stack(fitting) if fitting else rows[:0]
                if fitting and self._attempt(form, several, failures) is not None:
                    self._form = form if len(fitting) > 1 else None
                    return self._call_rows(form, x)

        hint = ', or take errors="exclude"' if self._errors == "raise" else ""
        first = next((reason for _, reason in failures if isinstance(reason, Exception)), None)
        line = failing_line(first) if first else ""
        place = line and f", first{line}"
        raise ConfigError(
            f"{self._name}, {label(self._function)}, accepts neither many points nor one:"
            f" {_explain(failures)}{place}. Write it for points [..., d], as tensors or as NumPy"
            f" arrays, or for one point [d], as fedcb2o.from_point takes it{hint}"
        ) from first

    def _forms(self, ndim: int) -> "Iterator[_Form]":
        """Return the forms of a call for points with `ndim` axes, in the order of trial."""
        function = self._function
        if not self._arrays_only:
            yield _Form("tensor [..., d]", function, of_rows=False)
            if ndim > 2:
                yield _Form("tensor [n, d]", function)
        yield _Form("array [n, d]", from_numpy(function))
        yield _Form("one array [d]", from_point(function), is_pointwise=True)
        if not self._arrays_only:

            @functools.wraps(function)
            def of_tensor(point: np.ndarray) -> Any:
                return function(torch.from_numpy(point))

            yield _Form("one tensor [d]", from_point(of_tensor), is_pointwise=True)

    def _attempt(self, form: "_Form", x: Tensor, failures: list[tuple[str, Any]]) -> Tensor | None:
        """Return the values of points, or None where the form does not fit."""
        # A form that does not fit may have written into the points, and the next one needs them.
        copy = x.clone()
        before = write_count(copy)
        try:
            values = self._finish(form.call(copy), x)
        except StopIteration as error:  # it would end the steps of `minimize`
            raise ConfigError(
                f"{self._name} raised StopIteration, as an exhausted iterator does"
            ) from error
        except _TruthValueError:
            raise
        except Exception as error:
            failures.append((form.name, error))
            return None

        lead = x.shape[:-1]
        fits = values.shape[: len(lead)] == lead and values.ndim == len(lead) + self._vector
        if not fits:
            expected = [*lead, "m"] if self._vector else [*lead]
            got = f"the shape {[*values.shape]} for points {[*x.shape]}"
            failures.append((form.name, f"it returned {got}, expected {expected}"))
            return None
        require_unwritten(self._name, self._function, copy, before, x)
        if not form.is_pointwise and self._depends_on_others(form, x, values):
            failures.append((form.name, "its value at a point depends on the other points"))
            return None
        return values

    def _depends_on_others(self, form: "_Form", x: Tensor, values: Tensor) -> bool:
        """Return whether points have other values alone than among all points.

        Functions that are random, or that accept no single point, count as independent.
        """
        # Such values are refused later, by name.
        if values.layout != torch.strided or values.device != x.device:
            return False
        rows = x.detach().reshape(-1, x.shape[-1])
        flat = _to_rows(values, len(rows))
        # Rounding depends on the number of points.
        scale = flat.abs().nanmedian(0).values.nan_to_num(0, 0, 0).clamp(min=1e-8)
        atol = 1e-6 if values.dtype == torch.float64 else 1e-4

        def agree(a: Tensor, b: Tensor) -> bool:
            return torch.allclose(a / scale, b / scale, rtol=1e-4, atol=atol, equal_nan=True)

        def evaluate(call: Callable[[], Any], count: int) -> Tensor | None:
            try:
                return _to_rows(to_tensor("", call()), count)
            except Exception:
                return None

        with _keep_random_state():
            is_independent = True
            for k in {0, len(rows) // 2, len(rows) - 1}:
                one = rows[k].clone().reshape(*[1] * (x.ndim - 1), -1)
                array = rows[k].cpu().numpy().copy()
                calls = [functools.partial(self._function, array)]
                if len(rows) > 1:
                    calls.insert(self._vector, functools.partial(form.call, one))
                found = (evaluate(call, 1) for call in calls)
                alone = next((values for values in found if values is not None), None)
                if alone is not None and alone.shape[1] == flat.shape[1]:
                    is_independent &= agree(alone, flat[k : k + 1])
            if is_independent:
                return False
            again = evaluate(functools.partial(form.call, x.detach().clone()), len(rows))
            return again is not None and again.shape == flat.shape and agree(again, flat)

    def _finish(self, values: Any, x: Tensor) -> Tensor:
        """Return values as a tensor [...] or [..., m], where their shape allows it."""
        tensor: Tensor = values
        if not isinstance(values, Tensor):
            tensor = to_tensor(f"{self._name} returned", values).to(x.device)
        if self._vector:
            _refuse_truth_values(self._name, tensor.dtype == torch.bool, values)
        lead = x.shape[:-1]
        if tensor.shape == lead and not self._vector:
            return tensor
        flat = (lead.numel(),)
        if not self._vector:
            fits = tensor.shape in (flat, (*flat, 1), (*lead, 1))
            return tensor.reshape(lead) if fits else tensor
        if tensor.shape in (lead, flat):
            return tensor.reshape(*lead, 1)
        return tensor.reshape(*lead, -1) if tensor.shape[:-1] == flat else tensor

    def _call_rows(self, form: "_Form", x: Tensor) -> Tensor:
        """Return the values of each point, NaN where the function raises an exception."""
        values: list[Tensor | None] = []
        for row in x.reshape(-1, x.shape[-1]):
            try:
                values.append(self._finish(form.call(row[None]), row[None])[0].to(x))
            except ConfigError:
                raise
            except Exception as error:
                values.append(None)
                if not self._is_logged:
                    failure = _describe_failure(self._function, row.cpu().numpy(), error)
                    _LOGGER.warning("%s: such points are excluded.", failure)
                self._is_logged = True
        shape = next((value.shape for value in values if value is not None), torch.Size())
        missing = x.new_full(shape, torch.nan)
        stacked = torch.stack([missing if value is None else value for value in values])
        return self._finish(stacked, x)


def _refuse_truth_values(name: str, is_bool: bool, values: Any) -> None:
    """Refuse truth values, or a list with one: as numbers, False and True are both at least 0."""
    if isinstance(values, list | tuple):
        types = (str(getattr(item, "dtype", type(item).__name__)) for item in values)
        is_bool = is_bool or any(name in ("bool", "torch.bool") for name in types)
    if is_bool:
        raise _TruthValueError(
            f"{name} returned truth values, expected amounts: return x[0] - 1 rather than x[0] >= 1"
        )


def _to_rows(values: Tensor, count: int) -> Tensor:
    return values.detach().double().cpu().reshape(count, -1)


@contextlib.contextmanager
def _keep_random_state() -> Iterator[None]:
    """Restore the global random numbers after a block, so that its calls change no result."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


class _TruthValueError(ConfigError):
    """A constraint returned truth values."""


def _explain(failures: list[tuple[str, Any]]) -> str:
    """Return the reasons why forms did not fit, with the names of the forms."""
    forms: dict[str, list[str]] = {}
    for name, reason in failures:
        text = str(reason)
        if isinstance(reason, ConfigError):
            text = "it returned " + text.split(" returned ")[-1]
        elif isinstance(reason, Exception):
            text = " ".join(repr(reason).split())
        forms.setdefault(text, []).append(name)
    return "; ".join(f"{text} ({', '.join(names)})" for text, names in forms.items())


class _Form(NamedTuple):
    """A form of calling a function: with tensors or arrays, of all points or of each."""

    name: str
    function: _Call
    of_rows: bool = True  # whether points are [n, d], without further leading axes
    is_pointwise: bool = False  # whether the user's function is called for each point

    def call(self, x: Tensor) -> Any:
        if self.of_rows and x.ndim > 2:
            x = x.reshape(-1, x.shape[-1])
        return self.function(x)


def _evaluate_or_describe(function: Any, *args: Any) -> Any:
    """Return the values, or the description of the function's exception."""
    try:
        return _evaluate_point(function, *args)
    except ConfigError:
        raise
    except Exception as error:
        return _describe_failure(function, args[-1], error)


def _describe_failure(function: Callable[..., Any], point: Any, error: Exception) -> str:
    where = np.array2string(np.asarray(point), separator=", ", threshold=12)
    return f"the function {label(function)} failed at the point {where}: {error!r}"


def write_count(x: Tensor) -> int:
    """Return the number of PyTorch's writes into a tensor or its views; 0 in inference mode."""
    return 0 if x.is_inference() else x._version


def require_unwritten(
    name: str,
    function: Callable[..., Any],
    x: Tensor,
    before: int,
    copy: Tensor | None = None,
    kind: str = "particles",
) -> None:
    """Refuse a function that wrote into its input `x`, whose copy may be from before the call."""
    if write_count(x) != before or (copy is not None and not _same_bits(x, copy)):
        text = f"writes into the {kind} that it receives: let it work on a copy, such as x.clone()"
        raise ConfigError(f"{name}, {label(function)}, {text}")


@contextlib.contextmanager
def forbid_writes(
    name: str,
    function: Callable[..., Any],
    guarded: Sequence[tuple[Tensor, str]],
    check_writes: bool,
) -> Iterator[None]:
    """Refuse writes into tensors, with the names of their contents, inside a `with` block."""
    before = [(write_count(x), x.clone() if check_writes else None) for x, _ in guarded]
    yield
    for (x, kind), (count, copy) in zip(guarded, before, strict=True):
        require_unwritten(name, function, x, count, copy, kind)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal, where NaN equals NaN."""
    # As integers, because NaN differs from itself and -0 equals 0.
    words = torch.int64 if a.dtype == torch.float64 else torch.int32
    return torch.equal(a.detach().contiguous().view(words), b.contiguous().view(words))

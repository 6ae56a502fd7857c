"""Conversion of arrays, tensors, lists and tables from users to NumPy arrays.

Missing and masked values are errors wherever they are: in an array, in a row of a list, in a
column of a table. Tables (pandas, Polars, Arrow, structured arrays) keep the names of their columns
and the labels of their rows until those are compared.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from numbers import Integral, Real
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcb2o.errors import DataError

_GIVE_ARRAY = "give an array, a list, or a table (pandas.DataFrame)"
_FILL_IN = "fill them in, or leave these samples out"
MAX_EXACT = 2**53
"""Largest whole number up to which float64 holds all whole numbers."""
_MAX_CHECKED_ROWS = 2**16
_MAX_CHECKED_VALUES = 2**20
_MAX_MERGED_SHARE = 0.01
_MAX_LISTED_NAMES = 5


def to_array(name: str, values: Any) -> NDArray[Any]:
    """Convert values from a user to an array without missing values.

    The values are an array, a tensor, a table, or a list of these or of numbers or words. The array
    holds numbers, truth values, words or dates, never objects. DataError is raised if they are
    masked, missing, sparse, of several kinds, or no array. `name` is that of the values in
    messages.
    """
    table = as_table(values)
    if table is not None:
        _check_none_is_missing(name, table)
        values = table

    _check_is_array(name, values)
    if isinstance(values, pd.Series):
        _check_none_is_missing(name, values)
    values_are_items = is_dataset(values)
    try:
        # By its length, because not every data set ends an iteration with IndexError.
        if values_are_items:
            values = [values[k] for k in range(len(values))]
        array = np.asarray(_plain(name, values))
        if array.dtype.kind == "U" and isinstance(values, Sequence):
            # NumPy writes numbers among words as words, NaN as "nan".
            array = np.array(values, dtype=object)
    except DataError:
        raise
    except Exception as error:  # a user's object may fail in any way
        reason = str(error).partition("\n")[0]
        hint = "; a data set of pairs (x, y) is given without `y`" if values_are_items else ""
        raise DataError(f"`{name}` cannot be read as an array ({reason}){hint}") from error
    if array.dtype.kind in "OT":
        return _resolve_objects(name, array.astype(object))
    return array


def to_numbers(name: str, values: Any, *, exact: bool = False) -> NDArray[Any]:
    """Convert numbers from a user to an array of real numbers or truth values.

    With `exact`, whole numbers that float64 would round next to fractions stay Python's numbers in
    an array of objects. DataError is raised if the values are no real numbers, or are masked,
    missing or sparse.
    """
    table = as_table(values)
    if table is None:
        array = to_array(name, values)
        _check_is_numeric(name, array)
        is_rounded = array.dtype == np.float64 and isinstance(values, Sequence)
        if exact and is_rounded and np.abs(array).max(initial=0) > MAX_EXACT:
            return np.array(_plain(name, values), dtype=object)
        return array

    _check_none_is_missing(name, table)
    is_plain = all(isinstance(dtype, np.dtype) and dtype.kind in "iuf" for dtype in table.dtypes)
    if is_plain and not (exact and len(set(table.dtypes)) > 1):
        return table.to_numpy()

    arrays = [to_array(f"{name}[{c!r}]", table.iloc[:, k]) for k, c in enumerate(table.columns)]
    words = [str(c) for c, array in zip(table, arrays, strict=True) if array.dtype.kind == "U"]
    if len(words) > 1:
        raise DataError(
            f"`{name}` must hold numbers, and its columns {', '.join(map(repr, words))} hold words:"
            " leave out those without a meaning, and write others as numbers first, as"
            " pandas.get_dummies does"
        )

    columns = []
    for column, array in zip(table.columns, arrays, strict=True):
        _check_is_numeric(f"{name}[{column!r}]", array)
        if array.ndim != 1:
            raise DataError(
                f"`{name}[{column!r}]` must hold one number for each sample, got shape"
                f" {array.shape}: give an array of these values (numpy.stack)"
            )
        columns.append(array)
    # Columns of several types, such as numbers and truth values, become float64.
    if len({array.dtype for array in columns}) > 1:
        is_large = [array.dtype.kind in "iu" and large_values(array).any() for array in columns]
        common = object if exact and any(is_large) else np.float64
        columns = [array.astype(common) for array in columns]
    if not columns:
        return np.empty((len(table), 0))
    return np.column_stack(columns)


def large_values(array: NDArray[Any]) -> NDArray[np.bool_]:
    """Return where an array has numbers beyond 2^53, the whole numbers that float64 holds."""
    return np.asarray(np.abs(array.astype(np.float64)) > MAX_EXACT)


def to_float64(arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Convert samples of several parts to float64, for differences between them.

    Bytes stay bytes. Where a feature has whole numbers that float64 cannot tell apart, the first
    sample's is subtracted from all.
    """
    converted = [array if array.dtype == np.uint8 else array.astype(np.float64) for array in arrays]
    first = arrays[0]
    has_bytes = any(array.dtype == np.uint8 for array in arrays)
    if has_bytes or len({array.shape[1:] for array in arrays}) > 1:
        return converted  # parts of several types or shapes are compared later
    large = np.zeros(first.shape[1:], dtype=bool)
    for array in arrays:
        if array.dtype.kind in "iuO":
            large |= large_values(array).any(0)
    if large.any():
        # Python's whole numbers have no limit.
        origin = first[0][large].astype(object)
        for array, values in zip(arrays, converted, strict=True):
            values[:, large] = (array[:, large].astype(object) - origin).astype(np.float64)
    return converted


def as_table(values: Any) -> pd.DataFrame | None:
    """Return a table with named columns as a data frame, else None.

    Tables are those of pandas, Polars and Arrow, and structured arrays.
    """
    if isinstance(values, pd.DataFrame):
        return values
    if isinstance(values, np.ndarray):
        if values.dtype.names is None or values.ndim != 1 or _is_masked(values):
            return None
        array = np.asarray(values)
        return pd.DataFrame({field: list(array[field]) for field in values.dtype.names})

    kind = type(values)
    # Data sets of Hugging Face have both, and images that pandas does not decode.
    is_arrow = hasattr(kind, "column_names") and hasattr(kind, "to_pandas")
    if is_arrow and not hasattr(kind, "with_format"):
        return pd.DataFrame(values.to_pandas())
    if hasattr(kind, "columns") and hasattr(kind, "to_numpy"):
        return pd.DataFrame({column: np.asarray(values[column]) for column in values.columns})
    return None


def is_dataset(values: Any) -> bool:
    """Return whether an object has a length and items, and is neither array nor list."""
    if isinstance(values, Sequence) or not hasattr(values, "__getitem__"):
        return False
    interfaces = ("__array__", "__array_interface__", "__array_struct__")
    is_array = any(hasattr(values, interface) for interface in interfaces)
    return hasattr(values, "__len__") and not is_array


def match_columns(names: Sequence[str], parts: Sequence[Any]) -> list[Any]:
    """Order the columns of several tables as in the first table.

    Other values than tables stay as they are. `names` are those of the parts in messages. DataError
    is raised if tables have columns of different names.
    """
    tables = {k: table for k, part in enumerate(parts) if (table := as_table(part)) is not None}
    if not tables:
        return list(parts)

    first = min(tables)
    first_name = names[first]
    expected = [str(column) for column in tables[first].columns]
    matched: list[Any] = []
    for k, (name, values) in enumerate(zip(names, parts, strict=True)):
        table = tables.get(k)
        columns = [] if table is None else [str(column) for column in table.columns]
        if values is None or columns == expected:
            matched.append(values)
        elif table is None or _has_default_names(columns, expected):
            _warn(
                f"the columns of `{name}` and `{first_name}` have no names in common: they are"
                " matched by position"
            )
            matched.append(values)
        else:
            matched.append(table.iloc[:, _column_order(name, columns, first_name, expected)])
            _warn(
                f"`{name}` has the columns of `{first_name}` in another order: they are matched by"
                " their names"
            )
    return matched


def _has_default_names(columns: list[str], expected: list[str]) -> bool:
    """Return whether one of two tables without a common name has the numbers 0 to d - 1."""
    default = [str(k) for k in range(len(columns))]
    is_default = default in (columns, expected)
    return is_default and len(columns) == len(expected) and set(columns).isdisjoint(expected)


def _column_order(
    name: str, columns: list[str], first_name: str, expected: list[str]
) -> NDArray[np.int64]:
    """Return the position of each expected column, or raise DataError if names differ."""
    if sorted(columns) == sorted(expected) and len(set(columns)) == len(columns):
        return np.array([columns.index(column) for column in expected])

    differences = []
    for owner, own, other in ((name, columns, expected), (first_name, expected, columns)):
        only = [repr(column) for column in own if column not in other]
        if only:
            listed = ", ".join(only[:_MAX_LISTED_NAMES])
            if len(only) > _MAX_LISTED_NAMES:
                listed += f" and {len(only) - _MAX_LISTED_NAMES} more"
            differences.append(f"only `{owner}` has {listed}")
    if not differences:
        differences.append("names that occur twice cannot be matched")
    raise DataError(
        f"`{name}` and `{first_name}` must have columns of the same names: {'; '.join(differences)}"
    )


def check_rows_match(name: str, x: Any, label: str, y: Any) -> None:
    """Check that the row labels of two pandas objects do not contradict each other.

    DataError is raised if both have row labels, and these differ.
    """
    is_pandas = isinstance(x, pd.DataFrame | pd.Series) and isinstance(y, pd.DataFrame | pd.Series)
    if not is_pandas or len(x) != len(y) or x.index.equals(y.index):
        return

    # Rows are matched by position. Labels 0 to n - 1 in ascending order say nothing about rows.
    default = pd.RangeIndex(len(x))
    has_default = x.index.equals(default) or y.index.equals(default)
    same_labels = len(x.index.symmetric_difference(y.index)) == 0
    if has_default and not same_labels:
        return

    difference = "have different row labels (the index of pandas)"
    cure = ""
    if same_labels:
        difference = "have the same row labels (the index of pandas) in different orders"
        cure = "bring the rows into one order (`y.loc[x.index]`) or, "
    raise DataError(
        f"`{name}` and `{label}` {difference}: {cure}where row k of one belongs to row k of the"
        " other, drop the labels of both (`.reset_index(drop=True)`)"
    )


def warn_of_merged_values(source: str, values: NDArray[Any], cure: str) -> None:
    """Warn if different values become equal in float32.

    `source` is the start of the message, such as "`x` holds", and `cure` its end.
    """
    if values.dtype.kind not in "iuf" or values.dtype.itemsize < 4 or values.dtype == np.float32:
        return

    # Some samples are looked at, so that the check is fast.
    columns = values[:_MAX_CHECKED_ROWS].reshape(min(len(values), _MAX_CHECKED_ROWS), -1)
    columns = columns[: max(2, _MAX_CHECKED_VALUES // max(1, columns.shape[1]))]
    # float32 holds all whole numbers up to 2**24.
    if columns.dtype.kind in "iu" and abs(columns.astype(np.float64)).max() <= 2**24:
        return

    ordered = np.sort(columns, axis=0)
    differs = ordered[1:] != ordered[:-1]
    rounded = ordered.astype(np.float32)
    is_merged = differs & (rounded[1:] == rounded[:-1])
    num_distinct = 1 + differs.sum(0)
    num_merged = is_merged.sum(0)
    # Rare coincidences among many random numbers are not worth a warning.
    affected = np.flatnonzero(num_merged > _MAX_MERGED_SHARE * num_distinct)
    if not affected.size:
        return

    column = affected[0]
    row = np.flatnonzero(is_merged[:, column])[0]
    where = ""
    if values.ndim > 1:
        position = [int(k) for k in np.unravel_index(column, values.shape[1:])]
        where = f" at {position}"
    if len(affected) > 1:
        where += f" (and at {len(affected) - 1} other positions)"
    _warn(
        f"{source} {num_distinct[column]} different numbers{where}, and float32, in which"
        f" networks compute, has only {num_distinct[column] - num_merged[column]} for them:"
        f" {ordered[row, column]} and {ordered[row + 1, column]} are equal there; {cure}"
    )


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def _check_is_numeric(name: str, array: NDArray[Any]) -> None:
    """Raise DataError unless an array holds real numbers or truth values."""
    if array.dtype.kind in "biuf":
        return
    hint = {
        "U": "; write words as numbers first, as pandas.get_dummies does",
        "S": "; write words as numbers first",
        "c": "; give real and imaginary parts as numbers of their own",
        "M": "; write dates as numbers first, such as days since the first of them",
        "m": "; write durations as numbers first, such as seconds",
    }.get(array.dtype.kind, "")
    raise DataError(f"`{name}` must hold numbers, got values of type {array.dtype}{hint}")


def _check_none_is_missing(name: str, values: pd.DataFrame | pd.Series) -> None:
    """Raise DataError if a table or a column has missing values."""
    missing = np.argwhere(values.isna().to_numpy())
    if not missing.size:
        return
    row, *column = missing[0].tolist()
    where = f" in column {str(values.columns[column[0]])!r}" if column else ""
    raise DataError(
        f"`{name}` has {len(missing)} missing values, the first in sample {row}{where}: {_FILL_IN}"
    )


def _check_is_array(name: str, values: Any) -> None:
    """Raise DataError for sparse matrices, and for objects without an order."""
    kind = type(values).__name__
    if isinstance(values, Tensor):
        if values.layout is not torch.strided:
            raise DataError(f"`{name}` is a sparse tensor: give its `.to_dense()`")
    elif hasattr(values, "toarray") and hasattr(values, "nnz"):
        raise DataError(f"`{name}` is a sparse matrix ({kind}): give its `.toarray()`")
    elif isinstance(values, Mapping | Iterator | set | frozenset | str | bytes):
        raise DataError(f"`{name}` is a {kind}: {_GIVE_ARRAY}")


def _plain(name: str, values: Any) -> Any:
    """Replace tensors by arrays, and refuse masked values, at any depth of a list."""
    if isinstance(values, Tensor):
        return _tensor_to_array(name, values)
    if hasattr(values, "__array__"):
        values = np.asanyarray(values)  # the mask of a variable in a file, too
    if _is_masked(values):
        raise DataError(f"`{name}` has masked values: {_FILL_IN}")

    is_object_array = isinstance(values, np.ndarray) and values.dtype == object and values.ndim > 0
    if not is_object_array and not isinstance(values, Sequence):
        return values
    kinds = set(map(type, values))
    if kinds == {pd.Series}:
        # Rows are matched by the names of their values.
        return to_array(name, pd.DataFrame(list(values)))
    if kinds == {pd.DataFrame}:
        names = [f"{name}[{k}]" for k in range(len(values))]
        return list(map(to_numbers, names, match_columns(names, values)))
    has_nested = any(issubclass(kind, list | tuple | np.ma.MaskedArray | Tensor) for kind in kinds)
    if not has_nested and not (is_object_array and np.ndarray in kinds):
        return values
    return [_plain(name, value) for value in values]


def _is_masked(values: Any) -> bool:
    """Return whether an array has masked values, in any field."""
    if not isinstance(values, np.ma.MaskedArray):
        return False
    return bool(np.ascontiguousarray(np.ma.getmaskarray(values)).view(bool).any())


def _tensor_to_array(name: str, tensor: Tensor) -> NDArray[Any]:
    _check_is_array(name, tensor)
    if isinstance(tensor, torch.masked.MaskedTensor):
        masked: Any = tensor  # its methods have no types
        if not masked.get_mask().all():
            raise DataError(f"`{name}` has masked values: {_FILL_IN}")
        tensor = masked.get_data()
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float64):
        tensor = tensor.float()  # NumPy has no bfloat16
    return tensor.numpy()


def _resolve_objects(name: str, values: NDArray[Any]) -> NDArray[Any]:
    """Convert an array of objects to one of numbers, truth values or words."""
    if not values.ndim:
        value = values.item()
        kind = "missing" if value is None else f"a {type(value).__name__}"
        raise DataError(f"`{name}` is {kind}: {_GIVE_ARRAY}")
    items = values.ravel().tolist()
    missing = np.flatnonzero([item is np.ma.masked for item in items] | pd.isna(values.ravel()))
    if missing.size:
        row = int(np.unravel_index(missing[0], values.shape)[0])
        raise DataError(
            f"`{name}` has {len(missing)} missing values, the first in sample {row}: {_FILL_IN}"
        )

    kinds = set(map(type, items))
    # The narrowest kind that holds all items comes first.
    candidates: list[tuple[tuple[type, ...], type]] = [
        ((str,), str),
        ((bool, np.bool_), bool),
        ((Integral, np.bool_), np.int64),
        ((Real, np.bool_, Decimal), np.float64),
    ]
    for accepted, dtype in candidates:
        if all(issubclass(kind, accepted) for kind in kinds):
            try:
                return values.astype(dtype)
            except OverflowError:  # an integer beyond 64 bits
                continue

    names = sorted(kind.__name__ for kind in kinds)
    hint = ""
    if any(issubclass(kind, Mapping) for kind in kinds):
        hint = ": make a table of them (pandas.DataFrame)"
    elif any(hasattr(kind, "toarray") for kind in kinds):
        hint = ": give the `.toarray()` of each"
    elif any(hasattr(kind, "year") for kind in kinds):
        hint = ": write dates as numbers first, such as days since the first of them"
    elif values.ndim == 2 and str in kinds:
        is_word = [any(isinstance(item, str) for item in column) for column in values.T]
        columns = ", ".join(map(str, np.flatnonzero(is_word)[:_MAX_LISTED_NAMES]))
        hint = f": words are in column {columns} (from 0); leave them out, or write them as numbers"
    raise DataError(
        f"`{name}` must hold numbers or words, of one kind, got {' and '.join(names)}{hint}"
    )

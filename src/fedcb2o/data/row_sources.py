"""Samples and labels from tables, data sets of rows and loaders of batches.

A source is a pair (x, y), a table, a mapping of columns, a loader, or anything with a length and
items: pairs (x, y), or rows that are mappings. Two `columns` name the samples and the labels.

Example:
    >>> rows = [{"age": 30, "dose": 1.5, "ill": 0}, {"age": 50, "dose": 2.0, "ill": 1}]
    >>> x, y = samples_and_labels("`x`", rows, (["age", "dose"], "ill"))
    >>> x.to_numpy().tolist(), y
    ([[30.0, 1.5], [50.0, 2.0]], [0, 1])
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from fedcb2o.data._dataset import Shard
from fedcb2o.data.input_arrays import as_table, is_dataset
from fedcb2o.errors import DataError
from fedcb2o.plugins import did_you_mean

_HOW = "give columns=(samples, labels)"


def samples_and_labels(label: str, source: Any, columns: Any = None) -> tuple[Any, Any]:
    """Return the samples and the labels of a source.

    `columns` names the column of samples, or a list of columns, and the column of labels. It is
    None for pairs, and for `data` and `target` of scikit-learn. DataError is raised if the source
    has neither pairs nor these columns. `label` is the name of the source in messages.
    """
    # A tuple of mappings is a data set of rows.
    is_pair = isinstance(source, tuple) and not any(isinstance(k, Mapping) for k in source)
    if columns is not None and not is_pair and not isinstance(source, Shard):
        if isinstance(columns, str) or not isinstance(columns, Sequence) or len(columns) != 2:
            raise DataError(
                "`columns` must name two, that of the samples and that of the labels, got"
                f" {columns!r}"
            )
        x, y = select_columns(label, source, columns)
        return x, y
    if isinstance(source, Shard):
        return source.x, source.y
    if isinstance(source, Mapping) and {"data", "target"} <= source.keys():
        return source["data"], source["target"]
    if isinstance(source, tuple | list):
        if len(source) != 2:
            raise DataError(f"{label} must be samples and labels, (x, y), got {len(source)} things")
        return source[0], source[1]

    names = _column_names(source)
    if names is not None:
        raise DataError(f"{label} has the columns {', '.join(map(str, names))}: {_HOW}")
    items = list(_items(label, source))
    for item in items:
        if isinstance(item, Mapping):
            keys = ", ".join(map(repr, item))
            raise DataError(f"{label} has items that are mappings, with the keys {keys}: {_HOW}")
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(
                f"{label} must be a pair of samples and labels, (x, y), or have items (x, y): its"
                f" items are of type {type(item).__name__}"
            )
    return _join(source, [x for x, _ in items]), _join(source, [y for _, y in items])


def select_columns(label: str, source: Any, keys: Sequence[Any]) -> list[Any]:
    """Return columns of a table, a mapping, a loader or rows.

    Rows are mappings. A list of names stands for the table of these columns. Images become arrays
    [channels, height, width].
    """
    table: Any = as_table(source)
    if table is None:
        table = source
    if table is source and not isinstance(source, pd.DataFrame | Mapping):
        table = _columns(label, source)
    return [_select(label, table, key) for key in keys]


def _select(label: str, table: Any, key: Any) -> Any:
    if isinstance(key, list | tuple):
        return pd.DataFrame({name: _select(label, table, name) for name in key})
    if key not in table:
        names = [str(name) for name in table]
        hint = did_you_mean(str(key), names) or f" It has: {', '.join(names)}"
        raise DataError(f"{label} has no column {key!r}.{hint}")
    return _as_arrays(label, table[key])


def _columns(label: str, source: Any) -> Mapping[Any, Any]:
    """Return the columns of a source of rows or batches."""
    if _is_hugging_face(source):
        return dict(source[:])  # decodes and transforms all rows at once
    items = list(_items(label, source))
    for item in items:
        if not isinstance(item, Mapping):
            raise DataError(
                f"{label} must have rows that are mappings, for `columns`; its items are of type"
                f" {type(item).__name__}"
            )
    names = list(items[0]) if items else []
    for item in items:
        if item.keys() != items[0].keys():
            raise DataError(
                f"{label} has rows with different keys: {', '.join(map(repr, names))} and"
                f" {', '.join(map(repr, item))}"
            )
    return {name: _join(source, [item[name] for item in items]) for name in names}


def _items(label: str, source: Any) -> Iterable[Any]:
    """Return the items of a data set, or the batches of a loader."""
    if _is_loader(source):
        return source  # type: ignore[no-any-return]  # it iterates over batches
    if not isinstance(source, Sequence) and not is_dataset(source):
        hint = ""
        if hasattr(source, "__iter__") and not hasattr(source, "__len__"):
            hint = ": it has no length; give a list of its items"
        raise DataError(
            f"{label} must be (x, y), or a data set with a length and items (x, y) or rows with"
            f" columns, got a {type(source).__name__}{hint}"
        )
    try:
        return [source[k] for k in range(len(source))]
    except Exception as error:  # a user's data set may fail in any way
        raise DataError(
            f"{label} must be (x, y), or have items that can be read"
            f" ({type(error).__name__}: {error})"
        ) from error


def _join(source: Any, parts: list[Any]) -> Any:
    """Return the values of all items: those of batches are concatenated."""
    if not _is_loader(source):
        return _as_arrays("", parts)
    if parts and isinstance(parts[0], torch.Tensor):
        return torch.cat(parts)
    return [value for part in parts for value in part]


def _as_arrays(label: str, values: Any) -> Any:
    """Replace images of Pillow by arrays [channels, height, width]; leave all other values."""
    if not isinstance(values, list) or not values or not hasattr(values[0], "getbands"):
        return values
    images = []
    for image in values:
        if image.mode in ("P", "1"):  # numbers of colours, and bits
            image = image.convert("RGB" if image.mode == "P" else "L")
        array = np.asarray(image)
        images.append(array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0))
    shapes = sorted({image.shape for image in images})
    if len(shapes) > 1:
        raise DataError(
            f"{label or 'the data set'} has images of several shapes, such as {shapes[0]} and"
            f" {shapes[1]}: bring them to one size (`.resize`) and mode (`.convert`)"
        )
    return np.stack(images)


def _column_names(source: Any) -> list[Any] | None:
    """Return the names of a table's or a mapping's columns, else None."""
    if _is_hugging_face(source):
        return list(source.column_names)
    if isinstance(source, Mapping):
        return list(source)
    table = as_table(source)
    return None if table is None else list(table.columns)


def _is_hugging_face(source: Any) -> bool:
    names = ("column_names", "with_format", "__len__")  # a stream has no length
    return all(hasattr(type(source), name) for name in names)


def _is_loader(source: Any) -> bool:
    """Return whether an object iterates over batches of a data set, as PyTorch's DataLoader."""
    return hasattr(source, "dataset") and hasattr(source, "batch_size")

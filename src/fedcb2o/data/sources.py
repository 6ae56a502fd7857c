"""Users' sources of samples: arrays, tables, loaders, data sets, and lists of pairs.

A source is read once, so that the samples, labels and owners of a row stay together. It is a pair
(x, y), a table, a mapping of columns, a loader, or anything with a length and items: pairs (x, y),
or rows that are mappings. Two `columns` name the samples and the labels.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch.utils.data import BatchSampler, SequentialSampler

from fedcb2o.data import images
from fedcb2o.data._dataset import Shard
from fedcb2o.data.input_arrays import as_table, is_dataset, to_array
from fedcb2o.errors import DataError
from fedcb2o.plugins import did_you_mean

_HOW = "give columns=(samples, labels)"
_FORMATS = (None, "custom", "numpy", "torch", "pandas")
"""Formats of data sets of Hugging Face in which columns are read as they are."""


class Part(NamedTuple):
    """Samples, labels and owners as a user gave them, not yet checked.

    `label` is the source in messages, `x_name` and `y_name` are its samples and labels. `classes`
    are the names of the labels 0, 1, ... that the source declares. `mode` is that of images.
    `owner`, `group` and `time` have a value per sample.
    """

    label: str
    x_name: str
    y_name: str
    x: Any
    y: Any
    owner: Any = None
    group: Any = None
    time: Any = None
    classes: tuple[str, ...] = ()
    mode: str = ""


def read(
    label: str,
    names: tuple[str, str],
    source: Any,
    y: Any = None,
    *,
    columns: Any = None,
    owner: Any = None,
    group: Any = None,
    time: Any = None,
) -> Part:
    """Read the samples, labels and owners of a source, in one pass.

    With `y` the source is the samples alone. `names` are those of samples and labels in messages.
    `columns` names the column of samples, or a list of columns, and the column of labels. It is
    None for pairs, and for `data` and `target` of scikit-learn. `owner`, `group` and `time` are
    names of columns, or have a value for each sample. DataError is raised if the source has
    neither pairs nor these columns.
    """
    part = Part(label, *names, source, y, owner, group, time)
    if y is None:
        part = _read_rows(part, columns)
    if not images.has_images(part.x):
        return part
    x, mode = images.to_array(part.x_name, part.x)
    return part._replace(x=x, mode=mode)


def _read_rows(part: Part, columns: Any) -> Part:
    """Fill in a part whose `x` is the source of samples and labels."""
    label, source, owner = part.label, part.x, part.owner
    keys = {key: getattr(part, key) for key in ("owner", "group", "time")}
    column_of = {key: value for key, value in keys.items() if isinstance(value, str)}
    for key, value in keys.items():
        is_array = value is not None and key not in column_of
        if is_array and _is_loader(source) and not _keeps_order(source):
            raise DataError(
                f"{label} is a loader that changes the order of its samples, which are not those"
                f" of `{key}`: name a column (`columns`, `{key}`), or set shuffle=False"
            )
    if isinstance(source, Shard):
        return part._replace(x=source.x, y=source.y)
    if columns is not None and not _is_pair(source):
        if isinstance(columns, str) or not isinstance(columns, Sequence) or len(columns) != 2:
            raise DataError(
                "`columns` must name two, that of the samples and that of the labels, got"
                f" {columns!r}"
            )
        features = columns[0] if isinstance(columns[0], list | tuple) else ()
        if columns[1] in features:
            raise DataError(
                f"`columns` names {columns[1]!r} among the samples, and as the labels: leave it out"
                " of the samples"
            )
        x, y, *values = _select_all(label, source, [*columns, *column_of.values()])
        classes = _declared_classes(label, source, columns[1])
        selected = dict(zip(column_of, values, strict=True))
        if "owner" in column_of:
            selected["owner"] = _named_owners(label, source, owner, selected["owner"])
        return part._replace(x=x, y=y, classes=classes, **selected)
    if isinstance(source, Mapping) and {"data", "target"} <= source.keys():
        found = {key: _select(label, source, name) for key, name in column_of.items()}
        names = _as_names(source.get("target_names"))
        is_number = np.asarray(source["target"]).dtype.kind in "iu"
        classes = names if is_number and np.max(source["target"]) < len(names) else ()
        part = part._replace(x=source["data"], y=source["target"], classes=classes)
        return part._replace(**found)
    if column_of:
        key, value = next(iter(column_of.items()))
        raise DataError(f"`{key}` = {value!r} names a column: {_HOW} too, or an array of {key}s")
    if _is_pair(source):
        if len(source) != 2:
            raise DataError(f"{label} must be samples and labels, (x, y), got {len(source)} things")
        return part._replace(x=source[0], y=source[1])

    table = as_table(source)
    if table is not None or isinstance(source, Mapping) or _is_hugging_face(source):
        named = getattr(source, "column_names", source) if table is None else table
        listed = ", ".join(map(str, named))
        raise DataError(f"{label} has the columns {listed}: {_cure_for_splits(source) or _HOW}")
    items = list(_items(label, source))
    for item in items:
        if isinstance(item, Mapping):
            listed = ", ".join(map(repr, item))
            raise DataError(f"{label} has items that are mappings, with the keys {listed}: {_HOW}")
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(
                f"{label} must be a pair of samples and labels, (x, y), or have items (x, y): its"
                f" items are of type {type(item).__name__}"
            )
    has_batches = _has_batches(source, [y for _, y in items])
    x, y = (_join(label, [item[k] for item in items], has_batches) for k in range(2))
    return part._replace(x=x, y=y, classes=_declared_classes(label, source, None))


def _is_pair(source: Any) -> bool:
    """Return whether a tuple or list is (x, y), and not a data set of rows or of pairs."""
    if not isinstance(source, tuple | list) or any(isinstance(item, Mapping) for item in source):
        return False
    has_pairs = all(isinstance(item, tuple) and len(item) == 2 for item in source)
    if len(source) == 2:
        return not (has_pairs and all(_is_scalar(label) for _, label in source))
    return not (has_pairs and source)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | Number | np.generic) or getattr(value, "shape", None) == ()


def _select_all(label: str, source: Any, keys: Sequence[Any]) -> list[Any]:
    """Return columns of a table, a mapping, a loader or rows, read once.

    A list of names stands for the table of these columns.
    """
    table: Any = as_table(source)
    if table is None:
        table = source
        if not isinstance(source, Mapping):
            table = _columns(label, source)
    return [_select(label, table, key) for key in keys]


def _select(label: str, table: Any, key: Any) -> Any:
    if isinstance(key, list | tuple):
        return pd.DataFrame({name: _number_column(label, table, name) for name in key})
    if key not in table:
        names = [str(name) for name in table]
        hint = did_you_mean(str(key), names) or f" It has: {', '.join(names)}"
        if cure := _cure_for_splits(table):
            hint = f" {cure}"
        raise DataError(f"{label} has no column {key!r}.{hint}")
    return table[key]


def _number_column(label: str, table: Any, name: Any) -> Any:
    """Return one of several columns of samples."""
    column = _select(label, table, name)
    if isinstance(column, pd.Series):
        return column
    array = to_array(f"{label.strip('`')}[{name!r}]", column)
    if array.ndim != 1:
        raise DataError(
            f"{label} has samples of shape {array.shape[1:]} in the column {name!r}: of several"
            " columns each has one number for a sample"
        )
    return array


def _columns(label: str, source: Any) -> Mapping[Any, Any]:
    """Return the columns of a source of rows or batches."""
    if _is_hugging_face(source):
        features = getattr(source, "features", None) or {}
        has_images = any(type(feature).__name__ == "Image" for feature in features.values())
        form = (getattr(source, "format", None) or {}).get("type")
        # Formats of arrays have images in layouts of their own.
        if form not in _FORMATS or (has_images and form not in (None, "custom")):
            source = source.with_format(None)
        return dict(source[:])  # decodes and transforms all rows at once
    items = list(_items(label, source))
    for item in items:
        if not isinstance(item, Mapping):
            raise DataError(
                f"{label} must have rows that are mappings, for `columns`; its items are of type"
                f" {type(item).__name__}"
            )
        if item.keys() != items[0].keys():
            raise DataError(
                f"{label} has rows with different keys: {', '.join(map(repr, items[0]))} and"
                f" {', '.join(map(repr, item))}"
            )
    names = list(items[0]) if items else []
    has_batches = _has_batches(source, [item[name] for item in items for name in names])
    return {name: _join(label, [item[name] for item in items], has_batches) for name in names}


def _items(label: str, source: Any) -> Iterable[Any]:
    """Return the items of a data set, or the batches of a loader."""
    if _is_loader(source):
        num_processes = getattr(source.sampler, "num_replicas", 1)
        if num_processes > 1:
            warnings.warn(
                f"{label} is a loader with the samples of one of {num_processes} processes: give"
                " one without the DistributedSampler",
                stacklevel=2,
            )
        drops = getattr(source, "drop_last", False) and hasattr(source.sampler, "__len__")
        lost = len(source.sampler) % source.batch_size if drops else 0
        if lost:
            warnings.warn(
                f"{label} is a loader that leaves out its last {lost} samples: set drop_last=False",
                stacklevel=2,
            )
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


def _join(label: str, parts: list[Any], has_batches: bool) -> Any:
    """Return the values of all items: those of batches are concatenated."""
    if not has_batches:
        return parts
    if not isinstance(parts[0], torch.Tensor):
        return [value for part in parts for value in part]
    try:
        return torch.cat(parts)
    except (RuntimeError, TypeError) as error:
        shapes = sorted({tuple(getattr(part, "shape", ()))[1:] for part in parts})
        raise DataError(
            f"{label} has batches of samples of several shapes, such as"
            f" {' and '.join(map(str, shapes[:2]))}: bring them to one shape"
        ) from error


def _has_batches(source: Any, values: list[Any]) -> bool:
    """Return whether the items of a source are batches."""
    if not _is_loader(source) or not values:
        return False
    # Without a batch size items may be samples, and these have labels without an axis.
    has_size = source.batch_size is not None or getattr(source, "batch_sampler", None) is not None
    return has_size or not any(map(_is_scalar, values))


def _is_loader(source: Any) -> bool:
    """Return whether an object iterates over batches of a data set, as PyTorch's DataLoader."""
    return hasattr(source, "dataset") and hasattr(source, "batch_size")


def _keeps_order(loader: Any) -> bool:
    """Return whether a loader has the samples in the order of its data set."""
    batches = getattr(loader, "batch_sampler", None)
    is_plain = batches is None or type(batches) is BatchSampler
    return is_plain and type(getattr(loader, "sampler", None)) is SequentialSampler


def _cure_for_splits(source: Any) -> str:
    """Describe the cure for a mapping of data sets, as `DatasetDict` of Hugging Face; else ''."""
    if not isinstance(source, Mapping) or "train" not in source:
        return ""
    if not all(is_dataset(part) or as_table(part) is not None for part in source.values()):
        return ""
    test = [key for key in source if key != "train"][-1:]
    tests = "".join(f', x_test=splits["{key}"]' for key in test)
    return f'It is several data sets, give each: dataset(splits["train"]{tests}, ...)'


def _is_hugging_face(source: Any) -> bool:
    names = ("column_names", "with_format", "__len__")  # a stream has no length
    return not isinstance(source, Mapping) and all(hasattr(type(source), name) for name in names)


def _declared_classes(label: str, source: Any, column: Any) -> tuple[str, ...]:
    """Return the names of the labels 0, 1, ... that a source declares; empty without names.

    These are those of a column `ClassLabel` of Hugging Face, and `classes` of folders of images. A
    loader, a subset and a concatenation have those of their data sets.
    """
    while source is not None:
        if names := _names_in_column(source, column):
            return names
        if getattr(source, "target_transform", None) is not None:
            return ()  # labels may have any other meaning
        numbers = getattr(source, "class_to_idx", None)
        if isinstance(numbers, Mapping):
            is_complete = sorted(numbers.values()) == list(range(len(numbers)))
            return _as_names(sorted(numbers, key=numbers.__getitem__)) if is_complete else ()
        if names := _as_names(getattr(source, "classes", None)):
            return names
        if isinstance(parts := getattr(source, "datasets", None), Sequence):
            declared = dict.fromkeys(_declared_classes(label, part, column) for part in parts)
            if len(declared) > 1:
                raise DataError(
                    f"{label} joins data sets with different names of classes,"
                    f" {' and '.join(map(str, declared))}, so that a label has several meanings:"
                    " give words as labels, or each as an owner of `datasets`"
                )
            return next(iter(declared), ())
        source = getattr(source, "dataset", None)
    return ()


def _names_in_column(source: Any, column: Any) -> tuple[str, ...]:
    """Return the names of a column of Hugging Face, of the type ClassLabel."""
    features = getattr(source, "features", None)
    feature = features.get(column) if isinstance(features, Mapping) else None
    return _as_names(getattr(feature, "names", None))


def _named_owners(label: str, source: Any, column: str, values: Any) -> Any:
    """Return owners by the names that their column declares, else as they are."""
    source = source.dataset if _is_loader(source) else source
    names = _names_in_column(source, column)
    numbers = to_array("owner", values) if names else np.zeros(0)
    if not names or numbers.dtype.kind not in "iu":
        return values
    if numbers.min(initial=0) < 0:
        raise DataError(
            f"{label} has samples without an owner, of the number {numbers.min()} in {column!r}:"
            " leave them out (`.filter`)"
        )
    return np.array(names)[numbers]


def _as_names(names: Any) -> tuple[str, ...]:
    """Return a list of different words as a tuple, and anything else as no names."""
    if isinstance(names, np.ndarray):
        names = names.tolist()
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return ()
    return tuple(names) if len(set(names)) == len(names) else ()

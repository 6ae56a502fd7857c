"""Validation of samples, labels, targets and owners from users."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from fedcb2o.data import input_arrays, names
from fedcb2o.data._dataset import Groups, Owners
from fedcb2o.data.sources import Part
from fedcb2o.errors import DataError

_MANY_VALUES = 20
_FEW_SAMPLES = 5
"""More values than these, of fewer samples each, look like the targets of a regression."""

NamesFrom = Literal["user", "source", "labels"]
"""The user named the classes, the data set declares them, or they are the labels."""


class Classes(NamedTuple):
    """The classes of a data set, none for a regression.

    `hint` describes the cure where the targets of a regression were taken for classes.
    """

    names: tuple[str, ...] = ()
    names_from: NamesFrom = "user"
    hint: str = ""


def check_samples(name: str, x: Any, *, exact: bool = False) -> NDArray[Any]:
    """Check samples [n, ...]; pixels stay uint8, and other values become float32.

    With `exact` they stay of their type, for differences between samples. DataError is raised for a
    wrong shape or type, and for values that are not finite.
    """
    samples = input_arrays.to_numbers(name, x, exact=exact)
    if samples.ndim < 2 or not samples.size:
        hint = ""
        if samples.ndim == 1:
            hint = "; one feature per sample is a column (`.to_frame()`, `.reshape(-1, 1)`)"
        raise DataError(
            f"`{name}` must hold samples [n, features] or images [n, channels, height, width],"
            f" got shape {samples.shape}{hint}"
        )
    # A copy, because the caller may change its array. Other types are converted anyway.
    if samples.dtype == np.uint8:
        return samples.copy()

    converted = _to_finite_float32(name, samples)
    if exact:
        return samples
    cure = "set `standardise=True`, or shift or scale them first"
    input_arrays.warn_of_merged_values(f"`{name}` holds", samples, cure)
    return converted


def check_targets(name: str, y: Any) -> NDArray[np.float32]:
    """Check the targets of a regression, one or several per sample."""
    targets = input_arrays.to_numbers(name, y)
    if not targets.ndim or not targets.size:
        raise DataError(f"`{name}` must hold numbers [n] or [n, k], got shape {targets.shape}")
    converted = _to_finite_float32(name, targets)
    cure = "shift or scale them first, such as by their mean"
    input_arrays.warn_of_merged_values(f"`{name}` holds", targets, cure)
    return converted


def _to_finite_float32(name: str, values: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        converted = values.astype(np.float32)
    invalid = np.argwhere(~np.isfinite(converted))
    if invalid.size:
        row, *position = invalid[0].tolist()
        raise DataError(
            f"`{name}` holds {len(invalid)} values that are no finite float32 numbers, the first in"
            f" sample {row} at {position}: {values[tuple(invalid[0])]}; fill them in, or leave out"
            " these samples or features"
        )
    return converted


def check_labels(
    name: str, y: Any, singular: str = "label", plural: str = "classes"
) -> NDArray[Any]:
    """Check whole numbers, truth values or words, one per sample.

    `singular` and `plural` are the words for them in messages.
    """
    labels = input_arrays.to_array(name, y)
    if labels.ndim != 1:
        raise DataError(
            f"`{name}` must hold one {singular} for each sample, [n], got shape"
            f" {labels.shape}{_hint_for_rows(labels)}"
        )
    if labels.dtype.kind == "U":
        return names.normalise_words(labels)
    if labels.dtype.kind == "b":
        return labels

    # Whole numbers that int64 holds, also where they are written as 1.0.
    is_whole = np.array([False])
    if labels.dtype.kind in "iuf":
        is_whole = (abs(labels) < 2**63) & (labels == np.round(labels))
    if not is_whole.all():
        raise DataError(
            f"`{name}` must hold {plural}, whole numbers or words,"
            f" got {_describe_invalid(labels, is_whole, plural)}"
        )
    limit = 2 ** (1 + np.finfo(labels.dtype).nmant) if labels.dtype.kind == "f" else None
    if limit is not None and abs(labels).max(initial=0) > limit:
        raise DataError(
            f"`{name}` has {plural} such as {abs(labels).max():.0f}, which {labels.dtype} rounds:"
            " give whole numbers (int64) or words"
        )
    return labels.astype(np.int64)


def _hint_for_rows(labels: NDArray[Any]) -> str:
    """Describe the cure for labels with a row per sample."""
    if labels.ndim != 2:
        return ""
    if labels.shape[1] == 1:
        return ": take its only column"
    if labels.dtype.kind not in "biuf":
        return ""
    is_zero_or_one = ((labels == 0) | (labels == 1)).all()
    if is_zero_or_one and (labels.sum(1) == 1).all():
        return ": take its argmax along the rows"
    if is_zero_or_one:
        return (
            ", and rows with several labels or none: for these set `numbers=True` and a"
            " `training.loss` for several labels"
        )
    return "; the targets of a regression need `numbers=True`"


def _describe_invalid(labels: NDArray[Any], is_whole: NDArray[np.bool_], plural: str) -> str:
    """Describe the first invalid label, or the type of all labels."""
    if labels.dtype.kind in "SM":
        return f"values of type {labels.dtype}: `.astype(str)` makes words of them"
    if labels.dtype.kind not in "fu":
        return f"values of type {labels.dtype}"

    invalid = labels[np.flatnonzero(~is_whole)[0]]
    is_fraction = labels.dtype.kind == "f" and bool(np.isfinite(invalid)) and invalid % 1
    if plural == "classes" and is_fraction:
        return f"{invalid}; the targets of a regression need `numbers=True`"
    return f"{invalid}"


def check_widths(
    label_names: Sequence[str], targets: Sequence[NDArray[Any]], class_names: Any
) -> None:
    """Raise DataError unless parts have as many targets for each sample, and no classes."""
    if class_names is not None:
        raise DataError(
            "`class_names` are those of classes, and with `numbers` there are none: leave one of"
            " them out"
        )
    for name, values in zip(label_names, targets, strict=True):
        if values.shape[1:] != targets[0].shape[1:]:
            raise DataError(
                f"`{label_names[0]}` and `{name}` must hold as many numbers for each sample, got"
                f" shapes {targets[0].shape} and {values.shape}"
            )


def resolve_classes(
    parts: Sequence[Part],
    labels: Sequence[NDArray[Any]],
    class_names: Iterable[str] | Mapping[Any, str] | None,
) -> tuple[list[NDArray[Any]], Classes]:
    """Convert the labels of all parts to numbers from 0 on, and name the classes.

    The names are the user's, or those that the parts declare, or the labels in ascending order.
    DataError is raised if the labels of the parts do not fit together or do not fit the names.
    """
    names_from: NamesFrom = "labels" if class_names is None else "user"
    if class_names is None and any(part.classes for part in parts):
        names_from = "source"
        labels, class_names = _by_declared_names(parts, labels)
    is_word = [part.dtype.kind == "U" for part in labels]
    if len(set(is_word)) > 1:
        words = parts[is_word.index(True)].y_name
        numbers = parts[is_word.index(False)].y_name
        first, second = (part.y_name for part in parts if part.y_name in (words, numbers))
        raise DataError(
            f"`{first}` and `{second}` must hold labels of one kind, got words in `{words}` and"
            f" numbers in `{numbers}`"
        )
    values = np.unique(np.concatenate(labels))
    is_words = values.dtype.kind == "U"
    hint = ""
    if class_names is None:
        if len(values) == 1:
            raise DataError(
                f"every sample has the label {values[0]}: there must be two classes or more"
            )
        found = tuple(map(str, values.tolist()))
        has_many = len(values) > _MANY_VALUES
        if has_many and not is_words and sum(map(len, labels)) < _FEW_SAMPLES * len(values):
            hint = (
                f"; numbers of {len(values)} values look like the targets of a regression, which"
                " needs `numbers=True`"
            )
    else:
        named = names.by_label(class_names, words=is_words)
        unnamed = sorted(set(values.tolist()) - named.keys())
        if unnamed and isinstance(class_names, Mapping):
            raise DataError(f"`class_names` has no name for the label {unnamed[0]!r}")
        if unnamed:
            raise DataError(
                f"with `class_names` of {len(named)} classes, labels are numbers from 0 to"
                f" {len(named) - 1}, got {values[0]} to {values[-1]}; without, they are any whole"
                " numbers or words"
            )
        values, found = np.array(list(named)), tuple(named.values())
    numbered = [np.searchsorted(values, part) for part in labels]
    return numbered, Classes(found, names_from, hint)


def _by_declared_names(
    parts: Sequence[Part], labels: Sequence[NDArray[Any]]
) -> tuple[list[NDArray[Any]], tuple[str, ...]]:
    """Return labels as numbers of common classes, and the names that the sources declare.

    The order is that of the source with all names, or else that of their letters. Words count as
    names. Numbers of a part without names are those of the only order.
    """
    is_words = [values.dtype.kind == "U" for values in labels]
    vocabularies = []
    for part, values, has_words in zip(parts, labels, is_words, strict=True):
        vocabulary = tuple(map(names.to_nfc, part.classes))
        if has_words:
            vocabulary = tuple(np.unique(values).tolist())
        elif vocabulary:
            _check_labels_have_names(part, values, len(vocabulary))
        vocabularies.append(vocabulary)

    declared = [vocabulary for vocabulary in vocabularies if vocabulary]
    common = max(declared, key=len)
    if not all(set(vocabulary) <= set(common) for vocabulary in declared):
        common = tuple(sorted(set().union(*declared)))
    orders = {v for v, has_words in zip(vocabularies, is_words, strict=True) if v and not has_words}
    numbered: list[NDArray[Any]] = []
    for part, values, vocabulary in zip(parts, labels, vocabularies, strict=True):
        if vocabulary:
            places = np.array([common.index(name) for name in vocabulary])
            is_word = values.dtype.kind == "U"
            numbered.append(
                places[np.searchsorted(vocabulary, values) if is_word else values.astype(int)]
            )
        elif orders == {common}:
            numbered.append(values)
        else:
            raise DataError(
                f"`{part.y_name}` has numbers as labels, and the other data sets name their classes"
                " in different orders: give words as labels"
            )
    return numbered, common


def _check_labels_have_names(part: Part, labels: NDArray[Any], count: int) -> None:
    """Raise DataError for numbers that are no place among `count` names."""
    unnamed = labels[(labels < 0) | (labels >= count)]
    if len(unnamed):
        meaning = "means that there is no label" if unnamed[0] == -1 else "has no name"
        raise DataError(
            f"`{part.y_name}` has {len(unnamed)} samples with the label {unnamed[0]}, which"
            f" {meaning}: the data set names the labels 0 to {count - 1}. Leave them out"
            " (`.filter`), or give `class_names`"
        )


def check_owners(parts: Sequence[Part], sizes: Sequence[int]) -> Owners:
    """Check the owners of samples and, in a second part, of test samples.

    Owners are in ascending order. Without a second part or its owners, test samples test every
    agent. `sizes` are the numbers of samples of the parts. DataError is raised if a length or type
    is wrong, or a test sample has an unknown owner.
    """
    checked = []
    for name, part, size in zip(("owner", "owner_test"), parts, sizes, strict=False):
        if part.owner is None:
            continue
        labels = check_labels(name, part.owner, "owner", "owners")
        if len(labels) != size:
            raise DataError(f"`{name}` names {len(labels)} owners, and there are {size} samples")
        input_arrays.check_rows_match(part.x_name, part.x, name, part.owner)
        checked.append(labels)
    values = np.unique(checked[0])
    tests = torch.full((sum(sizes[1:]),), -1)
    if len(checked) > 1:
        if len({labels.dtype.kind == "U" for labels in checked}) > 1:
            raise DataError("`owner` and `owner_test` must be of one kind, got words and numbers")
        unknown = np.setdiff1d(checked[1], values)
        if unknown.size:
            raise DataError(f"`owner_test` names {unknown[0]}, who owns no sample by `owner`")
        tests = torch.from_numpy(np.searchsorted(values, checked[1]))
    pool = torch.from_numpy(np.searchsorted(values, checked[0]))
    reserved = torch.zeros(sizes[0], dtype=torch.bool)
    return Owners(tuple(map(str, values.tolist())), pool, tests, reserved)


def check_keys(
    key: Literal["group", "time"], parts: Sequence[Part], sizes: Sequence[int]
) -> NDArray[Any] | None:
    """Check the group or time of each sample in all parts; None without any.

    `sizes` are the numbers of samples of the parts. DataError is raised if a length or type is
    wrong, or a part has none.
    """
    given = [(part, size, getattr(part, key)) for part, size in zip(parts, sizes, strict=True)]
    if all(values is None for *_, values in given):
        return None
    checked = []
    for part, size, values in given:
        if values is None:
            raise DataError(f"{part.label} has no `{key}`, and other samples have: give it for all")
        if key == "time":
            array = _check_times(part.label, values)
        else:
            array = check_labels("group", values, "group", "groups")
        if len(array) != size:
            raise DataError(f"`{key}` has {len(array)} values, and {part.label} {size} samples")
        input_arrays.check_rows_match(part.x_name, part.x, key, values)
        checked.append(array)
    if len({array.dtype.kind for array in checked}) > 1:
        raise DataError(f"`{key}` must be of one kind, got several, such as words and numbers")
    return np.concatenate(checked)


def _check_times(label: str, values: Any) -> NDArray[Any]:
    """Check numbers or dates, one per sample; dates become whole nanoseconds."""
    if isinstance(values, torch.Tensor):
        values = values.numpy(force=True)
    column = pd.Series(np.asarray(values) if isinstance(values, list | tuple) else values)
    is_date = pd.api.types.is_datetime64_any_dtype(column.dtype)
    if column.isna().any():
        raise DataError(f"{label} has samples without a time: fill it in, or leave them out")
    if is_date:
        return pd.DatetimeIndex(column).as_unit("ns").asi8
    if column.dtype.kind not in "iuf":
        raise DataError(
            f"`time` must be numbers or dates (pandas.to_datetime), got {column.dtype} in {label}"
        )
    return column.to_numpy()


def number_groups(
    group: NDArray[Any] | None, time: NDArray[Any] | None, owner: NDArray[np.int64]
) -> Groups | None:
    """Return the groups of samples: those of `group`, in the order of their first time.

    Without `group`, an owner's samples of one time are a group. None without groups and times.
    """
    if time is None:
        numbers = None if group is None else np.unique(group, return_inverse=True)[1]
        return None if numbers is None else Groups(torch.from_numpy(numbers))
    instant = np.unique(time, return_inverse=True)[1]
    if group is None:
        group = instant * (owner.max(initial=0) + 1) + owner
    numbers = np.unique(group, return_inverse=True)[1]
    first = np.full(numbers.max(initial=0) + 1, len(numbers))
    np.minimum.at(first, numbers, instant)
    rank = np.argsort(np.argsort(first, kind="stable"), kind="stable")
    return Groups(torch.from_numpy(rank[numbers]), by_time=True)

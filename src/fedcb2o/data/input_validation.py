"""Validation of samples, labels, targets and owners from users.

Example:
    >>> check_samples("x", [[1, 2], [3, 4]]).dtype
    torch.float32
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from fedcb2o.data import input_arrays, names
from fedcb2o.data._dataset import Shard
from fedcb2o.errors import DataError


def check_samples_and_labels(
    name: str, x: Any, label: str, y: Any, *, numbers: bool = False, exact: bool = False
) -> tuple[Tensor, NDArray[Any]]:
    """Check samples and their labels, of which there are as many.

    `name` and `label` are the words for them in messages. With `numbers`, `y` holds the targets of
    a regression. With `exact`, samples keep the precision of float64.
    """
    samples = check_samples(name, x, exact=exact)
    labels = _check_numbers(label, y) if numbers else _check_labels(label, y)
    if len(samples) != len(labels):
        raise DataError(
            f"`{name}` holds {len(samples)} samples, and `{label}` {len(labels)} labels:"
            " each needs one"
        )
    input_arrays.check_rows_match(name, x, label, y)
    return samples, labels


def to_shards(
    parts: Sequence[tuple[Tensor, NDArray[Any]]],
    label_names: Sequence[str],
    class_names: Iterable[str] | Mapping[Any, str] | None,
    *,
    numbers: bool,
) -> tuple[list[Shard], tuple[str, ...]]:
    """Convert checked samples and labels to shards with classes from 0 on.

    There is one shard per part, such as the pool and the test set. With `numbers`, labels are the
    targets of a regression, without classes. DataError is raised if the labels of the parts do not
    fit together or do not fit `class_names`.
    """
    if not numbers:
        values, classes = _resolve_classes(
            [labels for _, labels in parts], label_names, class_names
        )
        shards = [Shard(x, torch.from_numpy(np.searchsorted(values, y))) for x, y in parts]
        return shards, classes

    if class_names is not None:
        raise DataError(
            "`class_names` are those of classes, and with `numbers` there are none: leave one of"
            " them out"
        )
    for name, (_, targets) in zip(label_names, parts, strict=True):
        if targets.shape[1:] != parts[0][1].shape[1:]:
            raise DataError(
                f"`{label_names[0]}` and `{name}` must hold as many numbers for each sample, got"
                f" shapes {parts[0][1].shape} and {targets.shape}"
            )
    return [Shard(x, torch.from_numpy(y)) for x, y in parts], ()


def check_samples(name: str, x: Any, *, exact: bool = False) -> Tensor:
    """Check samples [n, ...]; pixels stay uint8, and other values become float32.

    With `exact` they become float64, for differences between samples. DataError is raised for a
    wrong shape or type, and for values that are not finite.
    """
    samples = input_arrays.to_numbers(name, x)
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
        return torch.from_numpy(samples.copy())

    converted = _to_finite_float32(name, samples)
    if exact:
        return torch.from_numpy(samples.astype(np.float64))
    cure = "set `standardise=True`, or shift or scale them first"
    input_arrays.warn_of_merged_values(f"`{name}` holds", samples, cure)
    return torch.from_numpy(converted)


def _check_numbers(name: str, y: Any) -> NDArray[np.float32]:
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


def _check_labels(
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


def _resolve_classes(
    labels: Sequence[NDArray[Any]],
    label_names: Sequence[str],
    class_names: Iterable[str] | Mapping[Any, str] | None,
) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Return the ascending label values of the classes, and their names."""
    is_word = [part.dtype.kind == "U" for part in labels]
    if len(set(is_word)) > 1:
        words = label_names[is_word.index(True)]
        numbers = label_names[is_word.index(False)]
        first, second = sorted((words, numbers), key=label_names.index)
        raise DataError(
            f"`{first}` and `{second}` must hold labels of one kind, got words in `{words}` and"
            f" numbers in `{numbers}`"
        )
    values = np.unique(np.concatenate(labels))
    is_words = values.dtype.kind == "U"
    if class_names is None:
        if len(values) == 1:
            raise DataError(
                f"every sample has the label {values[0]}: there must be two classes or more"
            )
        return values, tuple(map(str, values.tolist()))

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
    return np.array(list(named)), tuple(named.values())


def check_owners(
    owner: Any, owner_test: Any, samples: int, tests: int
) -> tuple[tuple[str, ...], Int[Tensor, " n"], Int[Tensor, " t"]]:
    """Check the owners of samples and of test samples.

    Returns the ascending names of the owners, the owner of each of `samples` samples as an index,
    and that of each of `tests` test samples, -1 where it tests every agent. DataError is raised if
    a length or type is wrong, or `owner_test` names an unknown owner.
    """
    labels = _check_owner_labels("owner", owner, samples)
    values = np.unique(labels)
    owners = tuple(map(str, values.tolist()))
    pool_owners = torch.from_numpy(np.searchsorted(values, labels))
    if owner_test is None:
        return owners, pool_owners, torch.full((tests,), -1)

    test_labels = _check_owner_labels("owner_test", owner_test, tests)
    if (labels.dtype.kind == "U") != (test_labels.dtype.kind == "U"):
        raise DataError("`owner` and `owner_test` must be of one kind, got words and numbers")
    unknown = np.setdiff1d(test_labels, values)
    if unknown.size:
        raise DataError(f"`owner_test` names {unknown[0]}, who owns no sample by `owner`")
    return owners, pool_owners, torch.from_numpy(np.searchsorted(values, test_labels))


def _check_owner_labels(name: str, owner: Any, samples: int) -> NDArray[Any]:
    labels = _check_labels(name, owner, "owner", "owners")
    if len(labels) != samples:
        raise DataError(f"`{name}` names {len(labels)} owners, and there are {samples} samples")
    return labels

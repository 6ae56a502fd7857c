"""Validation of samples, labels, targets and owners from users.

Example:
    >>> check_samples("x", [[1, 2], [3, 4]]).dtype
    torch.float32
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from fedcb2o.data._dataset import Shard
from fedcb2o.errors import DataError


def check_samples_and_labels(
    name: str, x: Any, label: str, y: Any, *, numbers: bool = False
) -> tuple[Tensor, NDArray[Any]]:
    """Check samples and their labels.

    Args:
        name: Name of the samples in messages.
        x: Samples.
        label: Name of the labels in messages.
        y: Labels, or targets.
        numbers: Whether `y` holds the targets of a regression.

    Returns:
        Samples as a tensor and labels as an array of the same length.

    Raises:
        DataError: The samples or labels are invalid, or their lengths differ.
    """
    samples = check_samples(name, x)
    labels = _check_numbers(label, y) if numbers else _check_labels(label, y)
    if len(samples) != len(labels):
        raise DataError(
            f"`{name}` holds {len(samples)} samples, and `{label}` {len(labels)} labels:"
            " each needs one"
        )
    return samples, labels


def to_shards(
    parts: Sequence[tuple[Tensor, NDArray[Any]]],
    class_names: Sequence[str] | None,
    *,
    numbers: bool,
) -> tuple[list[Shard], tuple[str, ...]]:
    """Convert checked samples and labels to shards with classes from 0 on.

    Args:
        parts: Samples and labels, such as those of the pool and of the test set.
        class_names: Names of the classes, or None.
        numbers: Whether labels are the targets of a regression.

    Returns:
        One shard per part, and the names of the classes (none for a regression).

    Raises:
        DataError: The labels of the parts do not fit together or do not fit `class_names`.
    """
    if not numbers:
        values, names = _resolve_classes([labels for _, labels in parts], class_names)
        shards = [Shard(x, torch.from_numpy(np.searchsorted(values, y))) for x, y in parts]
        return shards, names

    if class_names is not None:
        raise DataError(
            "`class_names` are those of classes, and with `numbers` there are none: leave one of"
            " them out"
        )
    if len({labels.shape[1:] for _, labels in parts}) > 1:
        raise DataError("`y` and `y_test` must hold as many numbers for each sample")
    return [Shard(x, torch.from_numpy(y)) for x, y in parts], ()


def check_samples(name: str, x: Any) -> Tensor:
    """Check samples.

    Args:
        name: Name of the samples in messages.
        x: Samples [n, ...].

    Returns:
        Pixels as uint8, other values as float32.

    Raises:
        DataError: The samples have a wrong shape or type, or values that are not finite.
    """
    samples = _to_array(name, x)
    if samples.ndim < 2 or not samples.size:
        raise DataError(
            f"`{name}` must hold samples [n, features] or images [n, channels, height, width],"
            f" got shape {samples.shape}"
        )
    if samples.dtype == np.uint8:
        return torch.from_numpy(samples.copy())
    return torch.from_numpy(_to_finite_float32(name, samples))


def _check_numbers(name: str, y: Any) -> NDArray[np.float32]:
    """Check the targets of a regression, one or several per sample."""
    targets = _to_array(name, y)
    if not targets.ndim or not targets.size:
        raise DataError(f"`{name}` must hold numbers [n] or [n, k], got shape {targets.shape}")
    return _to_finite_float32(name, targets)


def _to_finite_float32(name: str, values: NDArray[Any]) -> NDArray[np.float32]:
    if values.dtype.kind not in "biuf":
        hint = "; write words as numbers first" if values.dtype.kind in "OU" else ""
        raise DataError(f"`{name}` must hold numbers, got values of type {values.dtype}{hint}")

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
    labels = _to_array(name, y)
    if labels.ndim != 1:
        hint = ""
        if labels.ndim == 2 and labels.shape[1] > 1:
            hint = ": take its argmax along the rows"
        elif labels.ndim == 2:
            hint = ": take its only column"
        raise DataError(
            f"`{name}` must hold one {singular} for each sample, [n], got shape"
            f" {labels.shape}{hint}"
        )
    if labels.dtype.kind in "bU":
        return labels
    if labels.dtype == object and all(isinstance(label, str) for label in labels):
        return labels.astype(str)

    is_whole = np.array([False])
    if labels.dtype.kind in "iuf":
        is_whole = (abs(labels) < 2**63) & (labels == np.round(labels))
    if not is_whole.all():
        raise DataError(
            f"`{name}` must hold {plural}, whole numbers or words,"
            f" got {_describe_invalid(labels, is_whole, plural)}"
        )
    return labels.astype(np.int64)


def _describe_invalid(labels: NDArray[Any], is_whole: NDArray[np.bool_], plural: str) -> str:
    """Describe the first invalid label, or the type of all labels."""
    if labels.dtype.kind not in "fu":
        return f"values of type {labels.dtype}"

    invalid = labels[np.flatnonzero(~is_whole)[0]]
    is_fraction = labels.dtype.kind == "f" and bool(np.isfinite(invalid)) and invalid % 1
    if plural == "classes" and is_fraction:
        return f"{invalid}; the targets of a regression need `numbers=True`"
    return f"{invalid}"


def _to_array(name: str, values: Any) -> NDArray[Any]:
    if np.ma.is_masked(values):
        raise DataError(f"`{name}` has masked values: fill them in, or leave these samples out")
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        is_dataset = hasattr(values, "__getitem__") and not isinstance(values, list | tuple)
        hint = "; PyTorch data sets are for fedcb2o.datasets" if is_dataset else ""
        raise DataError(f"`{name}` cannot be read as an array ({error}){hint}") from error


def _resolve_classes(
    labels: Sequence[NDArray[Any]], class_names: Sequence[str] | None
) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Return the ascending label values of the classes, and their names."""
    if len({part.dtype.kind == "U" for part in labels}) > 1:
        raise DataError("`y` and `y_test` must hold labels of one kind, got words and numbers")
    if isinstance(class_names, str) or not isinstance(class_names, Iterable | None):
        raise DataError(
            f"`class_names` must be a list of words, one for each class, got {class_names!r}"
        )

    values = np.unique(np.concatenate(labels))
    names = tuple(map(str, values.tolist() if class_names is None else class_names))
    if class_names is None and len(names) == 1:
        raise DataError(f"every sample has the label {names[0]}: there must be two classes or more")
    if len(set(names)) < max(2, len(names)):
        raise DataError(
            f"there must be two classes or more, of different names, got {', '.join(names)}"
        )
    if class_names is None:
        return values, names

    if values.dtype.kind == "U" or values[0] < 0 or values[-1] >= len(names):
        raise DataError(
            f"with `class_names` of {len(names)} classes, labels are numbers from 0 to"
            f" {len(names) - 1}, got {values[0]} to {values[-1]}; without, they are any whole"
            " numbers or words"
        )
    return np.arange(len(names)), names


def check_owners(
    owner: Any, owner_test: Any, samples: int, tests: int
) -> tuple[tuple[str, ...], Int[Tensor, " n"], Int[Tensor, " t"]]:
    """Check the owners of samples and of test samples.

    Args:
        owner: Owner of each sample.
        owner_test: Owner of each test sample; None for samples that test every agent.
        samples: Number of samples.
        tests: Number of test samples.

    Returns:
        Names of the owners in ascending order; the owner of each sample as an index; the owner of
        each test sample, -1 where it tests every agent.

    Raises:
        DataError: A length or type is wrong, or `owner_test` names an unknown owner.
    """
    labels = _check_owner_labels("owner", owner, samples)
    values = np.unique(labels)
    names = tuple(map(str, values.tolist()))
    pool_owners = torch.from_numpy(np.searchsorted(values, labels))
    if owner_test is None:
        return names, pool_owners, torch.full((tests,), -1)

    test_labels = _check_owner_labels("owner_test", owner_test, tests)
    if (labels.dtype.kind == "U") != (test_labels.dtype.kind == "U"):
        raise DataError("`owner` and `owner_test` must be of one kind, got words and numbers")
    unknown = np.setdiff1d(test_labels, values)
    if unknown.size:
        raise DataError(f"`owner_test` names {unknown[0]}, who owns no sample by `owner`")
    return names, pool_owners, torch.from_numpy(np.searchsorted(values, test_labels))


def _check_owner_labels(name: str, owner: Any, samples: int) -> NDArray[Any]:
    labels = _check_labels(name, owner, "owner", "owners")
    if len(labels) != samples:
        raise DataError(f"`{name}` names {len(labels)} owners, and there are {samples} samples")
    return labels

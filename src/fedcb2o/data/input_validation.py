"""What users give as samples, labels, numbers and owners: read and checked, with one line for what is wrong."""

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
    """Samples and their labels as they were given, or `numbers` to be told, checked; `name` and `label` are what
    messages call them."""
    samples = check_samples(name, x)
    found = _check_numbers(label, y) if numbers else _check_labels(label, y)
    if len(samples) != len(found):
        raise DataError(
            f"`{name}` holds {len(samples)} samples, and `{label}` {len(found)} labels: each needs one"
        )
    return samples, found


def to_shards(
    parts: Sequence[tuple[Tensor, NDArray[Any]]],
    class_names: Sequence[str] | None,
    *,
    numbers: bool,
) -> tuple[list[Shard], tuple[str, ...]]:
    """Samples with their classes as numbers from 0 on, or with numbers to be told; and the names of the classes."""
    if numbers:
        if class_names is not None:
            raise DataError(
                "`class_names` are those of classes, and with `numbers` there are none: leave one of them out"
            )
        if len({labels.shape[1:] for _, labels in parts}) > 1:
            raise DataError("`y` and `y_test` must hold as many numbers for each sample")
        return [Shard(x, torch.from_numpy(y)) for x, y in parts], ()
    values, names = _resolve_classes([labels for _, labels in parts], class_names)
    return [Shard(x, torch.from_numpy(np.searchsorted(values, y))) for x, y in parts], names


def check_samples(name: str, x: Any) -> Tensor:
    """Samples: pixels as uint8, all else as float32."""
    given = _to_array(name, x)
    if given.ndim < 2 or not given.size:
        raise DataError(
            f"`{name}` must hold samples [n, features] or images [n, channels, height, width], got shape {given.shape}"
        )
    if given.dtype == np.uint8:
        return torch.from_numpy(given.copy())
    return torch.from_numpy(_to_finite_float32(name, given))


def _check_numbers(name: str, y: Any) -> NDArray[np.float32]:
    """Numbers to be told of each sample, one or several."""
    given = _to_array(name, y)
    if not given.ndim or not given.size:
        raise DataError(f"`{name}` must hold numbers [n] or [n, k], got shape {given.shape}")
    return _to_finite_float32(name, given)


def _to_finite_float32(name: str, given: NDArray[Any]) -> NDArray[np.float32]:
    if given.dtype.kind not in "biuf":
        words = "; write words as numbers first" if given.dtype.kind in "OU" else ""
        raise DataError(f"`{name}` must hold numbers, got values of type {given.dtype}{words}")
    with np.errstate(over="ignore"):
        found = given.astype(np.float32)
    if (bad := np.argwhere(~np.isfinite(found))).size:
        row, *place = bad[0].tolist()
        raise DataError(
            f"`{name}` holds {len(bad)} values that are no finite float32 numbers, the first in sample {row} at"
            f" {place}: {given[tuple(bad[0])]}; fill them in, or leave out these samples or features"
        )
    return found


def _check_labels(
    name: str, y: Any, singular: str = "label", plural: str = "classes"
) -> NDArray[Any]:
    """Labels as whole numbers, truth values or words; `one` and `many` are what messages call them."""
    labels = _to_array(name, y)
    if labels.ndim != 1:
        cure = ""
        if labels.ndim == 2:
            cure = (
                ": take its argmax along the rows"
                if labels.shape[1] > 1
                else ": take its only column"
            )
        raise DataError(
            f"`{name}` must hold one {singular} for each sample, [n], got shape {labels.shape}{cure}"
        )
    if labels.dtype.kind in "bU":
        return labels
    if labels.dtype == object and all(isinstance(label, str) for label in labels):
        return labels.astype(str)
    whole = (
        (abs(labels) < 2**63) & (labels == np.round(labels))
        if labels.dtype.kind in "iuf"
        else np.array([False])
    )
    if not whole.all():
        wrong = (
            labels[np.flatnonzero(~whole)[0]]
            if labels.dtype.kind in "fu"
            else f"values of type {labels.dtype}"
        )
        part = (
            labels.dtype.kind == "f"
            and plural == "classes"
            and bool(np.isfinite(wrong))
            and wrong % 1
        )
        cure = "; numbers to be told need `numbers=True`" if part else ""
        raise DataError(f"`{name}` must hold {plural}, whole numbers or words, got {wrong}{cure}")
    return labels.astype(np.int64)


def _to_array(name: str, values: Any) -> NDArray[Any]:
    if np.ma.is_masked(values):
        raise DataError(f"`{name}` has masked values: fill them in, or leave these samples out")
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        mapped = hasattr(values, "__getitem__") and not isinstance(values, list | tuple)
        cure = "; data sets of PyTorch's are for fedcb2o.datasets" if mapped else ""
        raise DataError(f"`{name}` cannot be read as an array ({error}){cure}") from error


def _resolve_classes(
    labels: Sequence[NDArray[Any]], class_names: Sequence[str] | None
) -> tuple[NDArray[Any], tuple[str, ...]]:
    """The values of the labels that are the classes 0 to C - 1, ascending, and the names of these."""
    if len({each.dtype.kind == "U" for each in labels}) > 1:
        raise DataError("`y` and `y_test` must hold labels of one kind, got words and numbers")
    values = np.unique(np.concatenate(labels))
    if isinstance(class_names, str) or not isinstance(class_names, Iterable | None):
        raise DataError(
            f"`class_names` must be a list of words, one for each class, got {class_names!r}"
        )
    names = tuple(str(name) for name in (values.tolist() if class_names is None else class_names))
    if class_names is None and len(names) == 1:
        raise DataError(f"every sample has the label {names[0]}: there must be two classes or more")
    if len(set(names)) < max(2, len(names)):
        raise DataError(
            f"there must be two classes or more, of different names, got {', '.join(names)}"
        )
    if class_names is not None:
        if values.dtype.kind == "U" or values[0] < 0 or values[-1] >= len(names):
            raise DataError(
                f"with `class_names` of {len(names)} classes, labels are numbers from 0 to {len(names) - 1}, got"
                f" {values[0]} to {values[-1]}; without, they are any whole numbers or words"
            )
        values = np.arange(len(names))
    return values, names


def check_owners(
    owner: Any, owner_test: Any, samples: int, tests: int
) -> tuple[tuple[str, ...], Int[Tensor, " n"], Int[Tensor, " t"]]:
    """The names of owners, ascending as they were given; whose each sample is, and whose each test sample: all
    everybody's, -1, where `owner_test` is not given."""
    of = _check_owner_labels("owner", owner, samples)
    values = np.unique(of)
    names = tuple(map(str, values.tolist()))
    whose = torch.from_numpy(np.searchsorted(values, of))
    if owner_test is None:
        return names, whose, torch.full((tests,), -1)
    of_test = _check_owner_labels("owner_test", owner_test, tests)
    if (of.dtype.kind == "U") != (of_test.dtype.kind == "U"):
        raise DataError("`owner` and `owner_test` must be of one kind, got words and numbers")
    if (stray := np.setdiff1d(of_test, values)).size:
        raise DataError(f"`owner_test` names {stray[0]}, who owns no sample by `owner`")
    return names, whose, torch.from_numpy(np.searchsorted(values, of_test))


def _check_owner_labels(name: str, owner: Any, samples: int) -> NDArray[Any]:
    found = _check_labels(name, owner, "owner", "owners")
    if len(found) != samples:
        raise DataError(f"`{name}` names {len(found)} owners, and there are {samples} samples")
    return found

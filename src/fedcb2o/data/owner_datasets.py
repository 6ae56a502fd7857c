"""Data sets of several owners."""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedcb2o.data import input_arrays, input_validation, names
from fedcb2o.data._dataset import Dataset, Owners, Shard
from fedcb2o.data._sample_format import match_samples
from fedcb2o.data.array_dataset import build_dataset
from fedcb2o.data.row_sources import samples_and_labels
from fedcb2o.errors import DataError

_PURPOSES = ("train", "validation", "test")


def datasets(
    parts: Any,
    *,
    columns: Any = None,
    test: Any = None,
    class_names: Iterable[str] | Mapping[Any, str] | None = None,
    test_share: float = 0.25,
    standardise: bool = False,
    numbers: bool = False,
) -> Dataset:
    """Make a data set of several owners, each an agent with its samples.

    Each owner gives samples and labels (x, y), a data set of such pairs, a table or a data set with
    `columns`, or a mapping from "train" and, optionally, "validation" and "test" to one of these.
    Agents hold out a share for validation (`agents.validation`) where an owner gives no validation
    samples.

    Args:
        parts: Owners' data, by name or in order; or a partitioner of `flwr-datasets`.
        columns: Columns of samples and labels, as in `fedcb2o.dataset`.
        test: Samples that test every agent.
        class_names: Names of the classes, as in `fedcb2o.dataset`.
        test_share: Share of an owner's samples that is held out where it gives no test samples; 0
            with `test` holds out none.
        standardise: Whether to scale features to mean 0 and standard deviation 1 over the pool.
        numbers: Whether labels are the targets of a regression.

    Returns:
        The data set.

    Raises:
        DataError: An owner's data have a wrong shape or type, or hold invalid values.
        ConfigError: `test_share` is out of range.

    Example:
        >>> ones = ([[1.0], [1.5], [3.0], [3.5]], [0, 0, 1, 1])
        >>> datasets({"north": ones, "south": ones}).owners
        Owners(north: 3, south: 3)
    """
    if hasattr(parts, "load_partition") and hasattr(parts, "num_partitions"):
        parts = [parts.load_partition(k) for k in range(parts.num_partitions)]
    if not isinstance(parts, Mapping):
        if not isinstance(parts, Sequence) or isinstance(parts, str):
            raise DataError(
                "the data sets must be a list, or a mapping by owners' names,"
                f" got a {type(parts).__name__}"
            )
        parts = {str(k): part for k, part in enumerate(parts)}
    parts = names.by_owner(parts)
    if not parts:
        raise DataError("there must be a data set for each owner, got none")

    # 1. List the pieces of all owners, then the common test samples.
    pieces: list[tuple[int, str, str, Any]] = []
    for owner, (name, part) in enumerate(parts.items()):
        for purpose, label, piece in _pieces_by_purpose(name, part):
            pieces.append((owner, purpose, label, piece))
    if test is not None:
        pieces.append((-1, "test", "test", test))

    # 2. Check each piece. Tables get one order of columns.
    labels = [label for _, _, label, _ in pieces]
    x_names = [f"x of {label}" for label in labels]
    y_names = [f"y of {label}" for label in labels]
    pairs = [samples_and_labels(label, piece, columns) for _, _, label, piece in pieces]
    x_parts = input_arrays.match_columns(x_names, [x for x, _ in pairs])
    y_parts = input_arrays.match_columns(y_names, [y for _, y in pairs])
    check = functools.partial(
        input_validation.check_samples_and_labels, numbers=numbers, exact=standardise
    )
    checked = list(map(check, x_names, x_parts, y_names, y_parts))
    matched = match_samples(labels, [x for x, _ in checked])
    checked = list(zip(matched, [y for _, y in checked], strict=True))

    # 3. Concatenate the pieces.
    shards, classes = input_validation.to_shards(checked, y_names, class_names, numbers=numbers)
    sizes = [len(shard) for shard in shards]
    owner_of_sample = np.repeat([owner for owner, *_ in pieces], sizes)
    purpose_of_sample = np.repeat([purpose for _, purpose, *_ in pieces], sizes)
    is_test = purpose_of_sample == "test"
    samples = Shard(
        torch.cat([shard.x for shard in shards]), torch.cat([shard.y for shard in shards])
    )
    owners = Owners(
        tuple(parts),
        torch.from_numpy(owner_of_sample[~is_test]),
        torch.from_numpy(owner_of_sample[is_test]),
        torch.from_numpy(purpose_of_sample[~is_test] == "validation"),
    )
    pool = samples.part(np.flatnonzero(~is_test))
    tests = samples.part(np.flatnonzero(is_test)) if is_test.any() else None
    built = build_dataset(pool, tests, classes, owners, test_share, standardise)
    if class_names is None and not numbers:
        names.check_labels(built)
    return built


def _pieces_by_purpose(name: str, part: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield (purpose, label in messages, samples) of an owner."""
    if not isinstance(part, Mapping):
        part = {"train": part}
    if "train" not in part or not part.keys() <= {*_PURPOSES}:
        raise DataError(
            f"owner {name!r} must bring samples to train on, and may for validation and test,"
            f" got {list(part)}"
        )
    for purpose in _PURPOSES:
        if part.get(purpose) is not None:
            yield purpose, f"owner {name!r} ({purpose})", part[purpose]

"""Data sets from arrays."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcb2o.data import input_arrays, input_validation, names
from fedcb2o.data._dataset import Dataset, Owners, Shard, features, stratified_mask
from fedcb2o.data._sample_format import match_samples
from fedcb2o.data.row_sources import samples_and_labels, select_columns
from fedcb2o.errors import ConfigError, DataError
from fedcb2o.plugins import to_python
from fedcb2o.rng import stream

# Rounding error of float32, relative to the distance from the mean plus the standard deviation.
_MAX_ROUNDING_ERROR = 1e-6


def dataset(
    x: Any,
    y: Any = None,
    *,
    columns: Any = None,
    owner: Any = None,
    x_test: Any = None,
    y_test: Any = None,
    owner_test: Any = None,
    class_names: Iterable[str] | Mapping[Any, str] | None = None,
    test_share: float = 0.25,
    standardise: bool = False,
    numbers: bool = False,
) -> Dataset:
    """Make a data set from samples and labels: arrays, tensors, lists, tables or data sets.

    Args:
        x: Samples [n, ...]. Values of type uint8 are pixels and stay uint8; all others become
            float32. Columns of tables are matched by their names. Without `y`, a table, a mapping
            of columns, a data set with a length and items (x, y) or rows that are mappings, such
            as one of Hugging Face, or a loader of these.
        y: Labels [n], whole numbers or words. Their different values, sorted, are the classes.
        columns: Without `y`, names of the columns of samples and of labels, such as
            ("image", "label") or (["age", "dose"], "ill").
        owner: Owner of each sample [n], whole numbers or words, or with `columns` the name of a
            column. Each value is an agent that holds its own samples.
        x_test: Test samples. Without them, a fixed share of each class, or of each owner without
            test samples, is held out from `x`.
        y_test: Labels of the test samples.
        owner_test: Owner of each test sample. Without it, `x_test` tests every agent.
        class_names: Names of the classes; labels are then the numbers 0 to C - 1. Or a mapping
            {label: name}.
        test_share: Share that is held out, in (0, 1); 0 with `owner` and `x_test` holds out none.
        standardise: Whether to scale features to mean 0 and standard deviation 1 over the pool.
        numbers: Whether `y` [n] or [n, k] holds the targets of a regression, without classes.

    Returns:
        The data set.

    Raises:
        DataError: An array has a wrong shape, type or length, or holds invalid values.
        ConfigError: `test_share` is out of range.

    Example:
        >>> data = dataset([[0.0], [1.0], [2.0], [3.0]], ["a", "a", "b", "b"], test_share=0.5)
        >>> data.class_names, len(data.pool), len(data.test)
        (('a', 'b'), 2, 2)
    """
    if y is None:
        if isinstance(owner_test, str):
            (owner_test,) = select_columns("`x_test`", x_test, [owner_test])
        if isinstance(owner, str):
            (owner,) = select_columns("`x`", x, [owner])
        if x_test is not None and y_test is None:
            x_test, y_test = samples_and_labels("`x_test`", x_test, columns)
        x, y = samples_and_labels("`x`", x, columns)
    elif columns is not None:
        raise DataError("`columns` name the samples and labels of a source: leave `y` out")
    if (x_test is None) != (y_test is None):
        raise DataError(
            "`x_test` and `y_test` go together: give both, or neither to have some of `x` held out"
        )
    if owner_test is not None and (owner is None or x_test is None):
        raise DataError(
            "`owner_test` goes with `owner` and `x_test`: it names the owner of each test sample"
        )

    x, x_test = input_arrays.match_columns(["x", "x_test"], [x, x_test])
    y, y_test = input_arrays.match_columns(["y", "y_test"], [y, y_test])
    # Standardising subtracts before it rounds, and needs float64 until then.
    check = functools.partial(
        input_validation.check_samples_and_labels, numbers=numbers, exact=standardise
    )
    parts = [check("x", x, "y", y)]
    if x_test is not None:
        parts.append(check("x_test", x_test, "y_test", y_test))
    samples = match_samples(["`x`", "`x_test`"][: len(parts)], [x for x, _ in parts])
    parts = list(zip(samples, [labels for _, labels in parts], strict=True))
    shards, classes = input_validation.to_shards(
        parts, ["y", "y_test"][: len(parts)], class_names, numbers=numbers
    )
    pool = shards[0]
    test = None
    num_tests = 0
    if x_test is not None:
        test = shards[1]
        num_tests = len(test)

    owners = None
    if owner is not None:
        owner_names, pool_owners, test_owners = input_validation.check_owners(
            owner, owner_test, len(pool), num_tests
        )
        input_arrays.check_rows_match("x", x, "owner", owner)
        input_arrays.check_rows_match("x_test", x_test, "owner_test", owner_test)
        reserved = torch.zeros(len(pool), dtype=torch.bool)
        owners = Owners(owner_names, pool_owners, test_owners, reserved)
    built = build_dataset(pool, test, classes, owners, test_share, standardise)
    if class_names is None and not numbers:
        # Labels to which the user gave no names may be doubtful.
        names.check_labels(built)
    return built


def build_dataset(
    pool: Shard,
    test: Shard | None,
    class_names: tuple[str, ...],
    owners: Owners | None,
    test_share: float,
    standardise: bool,
) -> Dataset:
    """Make a data set, holding out missing test samples.

    `class_names` are empty for a regression. ConfigError is raised for a share that is out of
    range, and DataError if a class or an owner has too few samples.
    """
    test_share = to_python(test_share)
    # With owners and common test samples, holding out is optional.
    may_be_zero = owners is not None and test is not None
    is_valid = isinstance(test_share, int | float) and 0 < test_share < 1
    if not is_valid and not (may_be_zero and test_share == 0):
        group = "class" if owners is None else "owner's samples"
        raise ConfigError(
            f"`test_share` is the share of every {group} that tests, between 0 and 1,"
            f" got {test_share!r}"
        )

    if owners is not None:
        pool, test, owners = _hold_out_by_owner(pool, test, owners, test_share)
    elif test is None:
        labels = pool.y.numpy() if class_names else np.zeros(len(pool), np.int64)
        groups = {k: f"class {name!r}" for k, name in enumerate(class_names)}
        cure = " of each class: give `x_test` and `y_test`, or leave the class out"
        is_test = _hold_out_mask(labels, groups or {0: "the data set"}, test_share, cure)
        test = pool.part(np.flatnonzero(is_test))
        pool = pool.part(np.flatnonzero(~is_test))

    if standardise:
        pool, test = _standardise(pool, test)
    return Dataset(pool, test, class_names, owners)


def _hold_out_by_owner(
    pool: Shard, test: Shard | None, owners: Owners, test_share: float
) -> tuple[Shard, Shard, Owners]:
    """Hold out a share of the samples of owners without test samples."""
    pool_owners = owners.pool.numpy()
    test_owners = owners.test.numpy()
    untested = np.setdiff1d(np.arange(len(owners.names)), test_owners).tolist()
    groups = {owner: f"owner {owners.names[owner]!r}" for owner in untested}

    if groups and test_share:
        # Reserved samples validate. Owners with test samples keep all others.
        is_excluded = owners.validates.numpy() | ~np.isin(pool_owners, untested)
        group_of_sample = np.where(is_excluded, -1, pool_owners)
        cure = ": give it test samples of its own, or leave it out"
        is_test = _hold_out_mask(group_of_sample, groups, test_share, cure)

        held_out = pool.part(np.flatnonzero(is_test))
        if test is None:
            test = held_out
        else:
            test = Shard(torch.cat((test.x, held_out.x)), torch.cat((test.y, held_out.y)))
        remaining = np.flatnonzero(~is_test)
        owners = Owners(
            owners.names,
            owners.pool[remaining],
            torch.cat([owners.test, torch.from_numpy(pool_owners[is_test])]),
            owners.validates[remaining],
        )
        pool = pool.part(remaining)

    assert test is not None
    return pool, test, owners


def _hold_out_mask(
    groups: NDArray[np.int64], names: Mapping[int, str], share: float, cure: str
) -> NDArray[np.bool_]:
    """Select a share of each named group, at least one and not all."""
    counts = np.bincount(groups[groups >= 0], minlength=1 + max(names)).tolist()
    for group, name in names.items():
        if counts[group] < 2:
            raise DataError(
                f"{name} has {counts[group]} samples, and holding some out needs 2 or more{cure}"
            )
    sizes = [
        min(max(round(share * count), 1), count - 1) if group in names else 0
        for group, count in enumerate(counts)
    ]
    # The test set is the same for every seed.
    return stratified_mask(groups, sizes, stream(0, "dataset", "test"))


def _standardise(pool: Shard, test: Shard) -> tuple[Shard, Shard]:
    """Scale features to mean 0 and standard deviation 1 over the pool."""
    rounded = features(pool.x).double()
    mean = rounded.mean(0)
    std = rounded.std(0, correction=0)
    # Constant features become 0.
    divisor = torch.where(rounded.amax(0) > rounded.amin(0), std, 1.0)
    pool_x, test_x = (((features(part.x) - mean) / divisor).float() for part in (pool, test))

    if pool.x.dtype == torch.float64:
        largest = torch.maximum(pool.x.amax(0), -pool.x.amin(0))
        # An error of float32: half a unit in the last place, plus half of the smallest number.
        may_be_coarse = largest * 2**-24 + 2**-150 > _MAX_ROUNDING_ERROR * std
        if may_be_coarse.any():
            columns = _standardise_exactly(pool.x[:, may_be_coarse], test.x[:, may_be_coarse])
            is_coarse, pool_columns, test_columns = columns
            may_be_coarse[may_be_coarse.clone()] = is_coarse
            pool_x[:, may_be_coarse] = pool_columns
            test_x[:, may_be_coarse] = test_columns
    return Shard(pool_x, pool.y), Shard(test_x, test.y)


def _standardise_exactly(pool: Tensor, test: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Standardise the features that float32 is too coarse for, before they are rounded.

    These are features whose rounding error is above a millionth of their standard deviation.
    Returns which of the d features they are, and their columns of the pool and of the test samples.
    """
    # Differences from one sample are exact where values are close to each other.
    differences = pool - pool[:1]
    mean = differences.mean(0)
    std = differences.std(0, correction=0)
    std = torch.where(pool.amax(0) > pool.amin(0), std, 1.0)

    # An outlier has a large error, but is far from the others, too.
    error = (pool.float().double() - pool).abs()
    limit = _MAX_ROUNDING_ERROR * ((differences - mean).abs() + std)
    is_coarse = (error > limit).any(0)
    test_differences = test - pool[:1]
    # The others are left out, so that results stay the same bits as in earlier versions.
    scaled = [
        ((part - mean) / std).float()[:, is_coarse] for part in (differences, test_differences)
    ]
    return is_coarse, scaled[0], scaled[1]

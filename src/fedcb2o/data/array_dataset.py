"""Data sets from arrays at hand."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedcb2o.data import input_validation
from fedcb2o.data._dataset import Dataset, Owners, Shard, features, stratified_mask
from fedcb2o.errors import ConfigError, DataError
from fedcb2o.rng import stream


def dataset(
    x: Any,
    y: Any,
    *,
    owner: Any = None,
    x_test: Any = None,
    y_test: Any = None,
    owner_test: Any = None,
    class_names: Sequence[str] | None = None,
    test_share: float = 0.25,
    standardise: bool = False,
    numbers: bool = False,
) -> Dataset:
    """A data set from samples x [n, ...] and their labels y [n]: arrays, tensors, lists or tables.

    Samples of type uint8 are pixels and stay so; all others become float32. Labels are whole numbers or words: their
    different values, sorted, are the classes 0 to C - 1 and give these their names; with `class_names` they are the
    numbers 0 to C - 1 themselves. With `numbers` y [n] or [n, k] are numbers to be told, and there are no classes.
    Without `x_test` and `y_test` a share `test_share` of every class, always the same, is held out for testing, and the
    pool is the rest. `standardise` brings every feature to mean 0 and standard deviation 1 over the pool.

    With `owner` [n], whole numbers or words, agents bring their own: each of its values is an agent, and what it holds
    is its own. `owner_test` says whose own test samples those of `x_test` are; without it they test everybody. Of an
    owner without test samples of its own a share `test_share` is held out (0: none, where `x_test` tests everybody).

    Raises DataError that says what is wrong with the arrays, or ConfigError for a share that leaves nothing.
    """
    if (x_test is None) != (y_test is None):
        raise DataError(
            "`x_test` and `y_test` go together: give both, or neither to have some of `x` held out"
        )
    if owner_test is not None and (owner is None or x_test is None):
        raise DataError(
            "`owner_test` goes with `owner` and `x_test`: it says whose own test samples those are"
        )
    pieces = [input_validation.check_samples_and_labels("x", x, "y", y, numbers=numbers)]
    if x_test is not None:
        pieces.append(
            input_validation.check_samples_and_labels(
                "x_test", x_test, "y_test", y_test, numbers=numbers
            )
        )
    shards, names = input_validation.to_shards(pieces, class_names, numbers=numbers)
    pool = shards[0]
    test = None if x_test is None else shards[1]
    owners = None
    if owner is not None:
        names_of, of_pool, of_test = input_validation.check_owners(
            owner, owner_test, len(pool), 0 if test is None else len(test)
        )
        owners = Owners(names_of, of_pool, of_test, torch.zeros(len(pool), dtype=torch.bool))
    return build_dataset(pool, test, names, owners, test_share, standardise)


def build_dataset(
    pool: Shard,
    test: Shard | None,
    class_names: tuple[str, ...],
    owners: Owners | None,
    test_share: float,
    standardise: bool,
) -> Dataset:
    """A data set of these samples, of which some are held out where tests lack, and all are standardised if asked."""
    none = (
        owners is not None and test is not None and test_share == 0
    )  # what is there tests everybody
    if not isinstance(test_share, int | float) or not (none or 0 < test_share < 1):
        whose = "class" if owners is None else "owner's samples"
        raise ConfigError(
            f"`test_share` is the share of every {whose} that tests, between 0 and 1, got {test_share!r}"
        )
    if owners is None:
        if test is None:
            labels = pool.y.numpy() if class_names else np.zeros(len(pool), np.int64)
            wanted = {k: f"class {name!r}" for k, name in enumerate(class_names)} or {
                0: "the data set"
            }
            held = _hold_out_mask(
                labels,
                wanted,
                test_share,
                " of each class: give `x_test` and `y_test`, or leave the class out",
            )
            pool, test = pool.part(np.flatnonzero(~held)), pool.part(np.flatnonzero(held))
    else:
        pool, test, owners = _hold_out_by_owner(pool, test, owners, test_share)
    if pool.x.shape[1:] != test.x.shape[1:]:
        shapes = tuple(pool.x.shape[1:]), tuple(test.x.shape[1:])
        raise DataError(
            f"the samples of `x` have shape {shapes[0]}, and those of `x_test` {shapes[1]}"
        )
    if standardise:
        pool, test = _standardise(pool, test)
    return Dataset(pool, test, class_names, owners)


def _hold_out_by_owner(
    pool: Shard, test: Shard | None, owners: Owners, test_share: float
) -> tuple[Shard, Shard, Owners]:
    """The same where owners without test samples of their own have a share of their others held out for that."""
    of = owners.pool.numpy()
    of_test = owners.test.numpy()
    lacking = {
        k: f"owner {owners.names[k]!r}"
        for k in np.setdiff1d(np.arange(len(owners.names)), of_test).tolist()
    }
    if lacking and test_share:
        groups = np.where(owners.validates.numpy() | ~np.isin(of, list(lacking)), -1, of)
        held = _hold_out_mask(
            groups, lacking, test_share, ": give it test samples of its own, or leave it out"
        )
        kept = np.flatnonzero(~held)
        mine = pool.part(np.flatnonzero(held))
        own = torch.from_numpy(of[held])
        of_test = np.concatenate([of_test, of[held]])
        test = (
            mine
            if test is None
            else Shard(*(torch.cat(pair) for pair in ((test.x, mine.x), (test.y, mine.y))))
        )
        owners = Owners(
            owners.names, owners.pool[kept], torch.cat([owners.test, own]), owners.validates[kept]
        )
        pool = pool.part(kept)
    assert test is not None
    return pool, test, owners


def _hold_out_mask(
    groups: NDArray[np.int64], wanted: Mapping[int, str], share: float, cure: str
) -> NDArray[np.bool_]:
    """Which samples test: of each group wanted a share, but at least one and not all of them."""
    counts = np.bincount(groups[groups >= 0], minlength=1 + max(wanted)).tolist()
    for group, name in wanted.items():
        if counts[group] < 2:
            raise DataError(
                f"{name} has {counts[group]} samples, and holding some out needs 2 or more{cure}"
            )
    sizes = [
        min(max(round(share * n), 1), n - 1) if k in wanted else 0 for k, n in enumerate(counts)
    ]
    return stratified_mask(groups, sizes, stream(0, "dataset", "test"))


def _standardise(pool: Shard, test: Shard) -> tuple[Shard, Shard]:
    """Both with every feature at mean 0 and standard deviation 1 over the pool; at 0 there if it does not vary."""
    x = features(pool.x).double()
    mean = x.mean(0)
    std = x.std(0, correction=0)
    std = torch.where(x.amax(0) > x.amin(0), std, 1.0)
    pool, test = (
        Shard(((features(shard.x) - mean) / std).float(), shard.y) for shard in (pool, test)
    )
    return pool, test

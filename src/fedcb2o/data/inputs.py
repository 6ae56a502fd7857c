"""The door for users' samples: data sets of one pool, and of several owners.

Whatever a user gives becomes parts, read once by `sources.read` and checked by `check_parts`.
"""

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcb2o.data import input_arrays, input_validation, names, sources
from fedcb2o.data._dataset import (
    Dataset,
    Groups,
    Owners,
    Shard,
    features,
    group_mask,
    stratified_mask,
)
from fedcb2o.data._sample_format import match_samples
from fedcb2o.data.overlap import count_shared
from fedcb2o.data.scaling import Scaler
from fedcb2o.errors import ConfigError, DataError
from fedcb2o.plugins import to_python
from fedcb2o.rng import stream

# Rounding error of float32, relative to the distance from the mean plus the standard deviation.
_MAX_ROUNDING_ERROR = 1e-6

_MAX_SCALE_RATIO = 100  # of the standard deviations of targets in two parts
_MIN_COMPARED = 20  # samples from which a feature that equals the label is no coincidence
_MOST_FRACTIONS = 20  # different numbers with fractions that are not taken for a regression
_LOGGER = logging.getLogger(__name__)

_PURPOSES = ("train", "validation", "test")


def dataset(
    x: Any,
    y: Any = None,
    *,
    columns: Any = None,
    owner: Any = None,
    group: Any = None,
    time: Any = None,
    x_test: Any = None,
    y_test: Any = None,
    owner_test: Any = None,
    group_test: Any = None,
    class_names: Iterable[str] | Mapping[Any, str] | None = None,
    test_share: float = 0.25,
    standardise: bool | Literal["owner"] | Scaler = False,
    numbers: bool | None = None,
) -> Dataset:
    """Make a data set from samples and labels: arrays, tensors, lists, tables or data sets.

    Args:
        x: Samples [n, ...]. Values of type uint8 are pixels and stay uint8; all others become
            float32. Columns of tables are matched by their names. Without `y`, a list of pairs, a
            table, a mapping of columns, a data set with a length and items (x, y) or rows that are
            mappings, such as one of Hugging Face, or a loader of these.
        y: Labels [n], whole numbers or words. Their different values, sorted, are the classes.
            Names that a data set declares (`classes`, `ClassLabel`) are the classes, in its order.
        columns: Without `y`, names of the columns of samples and of labels, such as
            ("image", "label") or (["age", "dose"], "ill").
        owner: Owner of each sample [n], whole numbers or words, or with `columns` the name of a
            column. Each value is an agent that holds its own samples.
        group: Group of each sample [n], such as a recording, a patient or a day, or the name of a
            column. No split divides a group. Groups of several owners are held out for all of them.
        time: Time of each sample [n], numbers or dates, or the name of a column. Splits hold out
            the last samples, or the groups that begin last.
        x_test: Test samples. Without them, a fixed share of each class, or of each owner without
            test samples, is held out from `x`.
        y_test: Labels of the test samples.
        owner_test: Owner of each test sample. Without it, `x_test` tests every agent.
        group_test: Group of each test sample; a warning counts those in groups of `group`.
        class_names: Names of the classes; labels are then the numbers 0 to C - 1. Or a mapping
            {label: name}.
        test_share: Share that is held out, in (0, 1); 0 with `owner` and `x_test` holds out none.
        standardise: Whether to scale features to mean 0 and standard deviation 1 over the pool,
            which agents can agree on without their samples (`fedcb2o.data.Scaler`). "owner": each
            owner's features over its own pool. Or the scaler that was agreed on.
        numbers: Whether `y` [n] or [n, k] holds the targets of a regression, without classes. By
            default, floating-point numbers with fractions and more than 20 different values do.

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
    if y is not None and columns is not None:
        raise DataError("`columns` name the samples and labels of a source: leave `y` out")
    has_y = y is not None or y_test is not None
    if has_y and (x_test is None) != (y_test is None):
        raise DataError(
            "`x_test` and `y_test` go together: give both, or neither to have some of `x` held out"
        )
    if owner_test is not None and (owner is None or x_test is None):
        raise DataError(
            "`owner_test` goes with `owner` and `x_test`: it names the owner of each test sample"
        )
    if group_test is not None and (group is None or x_test is None):
        raise DataError(
            "`group_test` goes with `group` and `x_test`: it names the group of each test sample"
        )
    keys = {"owner": owner, "group": group, "time": time}
    parts = [sources.read("`x`", ("x", "y"), x, y, columns=columns, **keys)]
    if x_test is not None:
        test_columns = columns if y_test is None else None
        read = sources.read(
            *("`x_test`", ("x_test", "y_test"), x_test, y_test),
            columns=test_columns,
            owner=owner_test,
            group=group_test,
        )
        parts.append(read)

    checked = check_parts(parts, class_names, numbers=numbers, exact=bool(standardise))
    pool = checked.shards[0]
    test = None if x_test is None else checked.shards[1]
    owners = None
    if owner is not None:
        owners = input_validation.check_owners(parts, [len(shard) for shard in checked.shards])
    # Test samples have no time: they are not split.
    group_parts = parts if group_test is not None else parts[:1]
    sizes = [len(shard) for shard in checked.shards[: len(group_parts)]]
    group_values = input_validation.check_keys("group", group_parts, sizes)
    times = input_validation.check_keys("time", parts[:1], sizes[:1])
    _warn_of_divided_groups(group_values, np.arange(sum(sizes)) >= len(pool))
    trained = None if group_values is None else group_values[: len(pool)]
    owner_of_sample = np.zeros(len(pool), np.int64)
    if owners is not None:
        owner_of_sample = owners.pool.numpy()
    return build_dataset(
        pool,
        test,
        checked.classes,
        owners,
        test_share,
        groups=input_validation.number_groups(trained, times, owner_of_sample),
        standardise=standardise,
    )


def datasets(
    parts: Any,
    *,
    columns: Any = None,
    group: str | None = None,
    time: str | None = None,
    test: Any = None,
    class_names: Iterable[str] | Mapping[Any, str] | None = None,
    test_share: float = 0.25,
    standardise: bool | Literal["owner"] | Scaler = False,
    numbers: bool | None = None,
) -> Dataset:
    """Make a data set of several owners, each an agent with its samples.

    Each owner gives samples and labels (x, y), a data set of such pairs, a table or a data set with
    `columns`, or a mapping from "train" and, optionally, "validation" and "test" to one of these.
    Agents hold out a share for validation (`agents.validation`) where an owner gives no validation
    samples. Owners whose data sets declare different classes share the union, by name.

    Args:
        parts: Owners' data, by name or in order; or a partitioner of `flwr-datasets`.
        columns: Columns of samples and labels, as in `fedcb2o.dataset`.
        group: With `columns`, that of groups that no split divides, as in `fedcb2o.dataset`.
        time: With `columns`, that of times, as in `fedcb2o.dataset`.
        test: Samples that test every agent.
        class_names: Names of the classes, as in `fedcb2o.dataset`.
        test_share: Share of an owner's samples that is held out where it gives no test samples; 0
            with `test` holds out none.
        standardise: As in `fedcb2o.dataset`.
        numbers: As in `fedcb2o.dataset`.

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

    # 1. Read the pieces of all owners, then the common test samples.
    pieces: list[tuple[int, str, str, Any]] = []
    for owner, (name, part) in enumerate(parts.items()):
        for purpose, piece in _pieces_by_purpose(name, part, columns):
            pieces.append((owner, purpose, f"owner {name!r} ({purpose})", piece))
    if test is not None:
        pieces.append((-1, "test", "test", test))
    read = [
        sources.read(
            *(label, (f"x of {label}", f"y of {label}"), piece),
            columns=columns,
            group=group,
            time=time,
        )
        for _, _, label, piece in pieces
    ]
    checked = check_parts(read, class_names, numbers=numbers, exact=bool(standardise))

    # 2. Concatenate the pieces.
    sizes = [len(shard) for shard in checked.shards]
    owner_of_sample = np.repeat([owner for owner, *_ in pieces], sizes)
    purpose_of_sample = np.repeat([purpose for _, purpose, *_ in pieces], sizes)
    is_test = purpose_of_sample == "test"
    samples = Shard(
        torch.cat([shard.x for shard in checked.shards]),
        torch.cat([shard.y for shard in checked.shards]),
    )
    owners = Owners(
        tuple(parts),
        torch.from_numpy(owner_of_sample[~is_test]),
        torch.from_numpy(owner_of_sample[is_test]),
        torch.from_numpy(purpose_of_sample[~is_test] == "validation"),
    )
    pool = samples.part(np.flatnonzero(~is_test))
    tests = samples.part(np.flatnonzero(is_test)) if is_test.any() else None

    # 3. Their groups.
    group_values = input_validation.check_keys("group", read, sizes)
    times = input_validation.check_keys("time", read, sizes)
    _warn_of_divided_groups(group_values, purpose_of_sample != "train")
    groups = input_validation.number_groups(
        None if group_values is None else group_values[~is_test],
        None if times is None else times[~is_test],
        owner_of_sample[~is_test],
    )
    return build_dataset(
        pool,
        tests,
        checked.classes,
        owners,
        test_share,
        groups=groups,
        standardise=standardise,
    )


def _pieces_by_purpose(name: str, part: Any, columns: Any) -> Iterator[tuple[str, Any]]:
    """Yield (purpose, samples) of an owner."""
    is_source = isinstance(part, Mapping) and "train" not in part
    if is_source and (columns is not None or {"data", "target"} <= part.keys()):
        part = {"train": part}  # a mapping of columns
    if not isinstance(part, Mapping):
        part = {"train": part}
    if "train" not in part or not part.keys() <= {*_PURPOSES}:
        raise DataError(
            f"owner {name!r} must bring samples to train on, and may for validation and test,"
            f" got {list(part)}"
        )
    for purpose in _PURPOSES:
        if part.get(purpose) is not None:
            yield purpose, part[purpose]


class CheckedParts(NamedTuple):
    """Parts of a data set that fit together: one shard per part, and the classes."""

    shards: list[Shard]
    classes: input_validation.Classes


def check_parts(
    parts: Sequence[sources.Part],
    class_names: Iterable[str] | Mapping[Any, str] | None,
    *,
    numbers: bool | None,
    exact: bool = False,
    tokens: bool = False,
) -> CheckedParts:
    """Check the samples and labels of parts, alone and against each other.

    With `numbers`, labels are the targets of a regression; None recognises them. With `exact`,
    samples are float64, for differences between them; with `tokens` they stay whole numbers.
    DataError is raised for invalid samples or labels, and for parts that do not fit together.
    """
    # 1. One order of columns, and images of one mode.
    x_names = [part.x_name for part in parts]
    y_names = [part.y_name for part in parts]
    xs = input_arrays.match_columns(x_names, [part.x for part in parts])
    ys = input_arrays.match_columns(y_names, [part.y for part in parts])
    modes: dict[str, str] = {}
    for part in parts:
        if part.mode:
            modes.setdefault(part.mode, part.x_name)
    if len(modes) > 1:
        (mode, first), (other, second) = list(modes.items())[:2]
        raise DataError(
            f"`{first}` has images of mode {mode}, and `{second}` of mode {other}: bring them to"
            " one mode (`.convert`)"
        )

    # 2. Each part.
    if numbers is None:
        numbers = class_names is None and _are_targets(parts, ys)
    checked = [
        check_part(part._replace(x=x, y=y), numbers=numbers, exact=exact, tokens=tokens)
        for part, x, y in zip(parts, xs, ys, strict=True)
    ]
    arrays = [x for x, _ in checked]
    labels = [y for _, y in checked]
    if not tokens:
        _warn_of_labels_as_samples(xs[0], arrays, labels)
    if exact:
        arrays = input_arrays.to_float64(arrays)

    # 3. Their types, scales and classes.
    samples = list(map(torch.as_tensor, arrays))
    if not tokens:
        samples = match_samples([part.label for part in parts], samples)
    if numbers:
        input_validation.check_widths(y_names, labels, class_names)
        _warn_of_other_scales(y_names, labels)
        classes = input_validation.Classes()
    else:
        labels, classes = input_validation.resolve_classes(parts, labels, class_names)
    return CheckedParts(list(map(Shard, samples, map(torch.from_numpy, labels))), classes)


def _warn_of_other_scales(names: Sequence[str], targets: Sequence[NDArray[Any]]) -> None:
    """Warn where the targets of a part spread far more, or less, than those of the first."""
    scales = [values.astype(np.float64).std(0).max() for values in targets]
    for name, values, scale in zip(names[1:], targets[1:], scales[1:], strict=True):
        has_scale = min(len(values), len(targets[0])) >= _MIN_COMPARED and min(scale, scales[0]) > 0
        if has_scale and not 1 / _MAX_SCALE_RATIO < scale / scales[0] < _MAX_SCALE_RATIO:
            warnings.warn(
                f"the targets of `{name}` have the standard deviation {scale:.4g}, and those of"
                f" `{names[0]}` {scales[0]:.4g}: bring both to one scale",
                stacklevel=4,
            )


def _warn_of_labels_as_samples(
    first: Any, xs: Sequence[NDArray[Any]], ys: Sequence[NDArray[Any]]
) -> None:
    """Warn where a feature equals the label in all samples; `first` may name the features."""
    has_features = all(x.ndim == 2 and x.shape[1:] == xs[0].shape[1:] for x in xs)
    is_number = all(y.dtype.kind in "biuf" and y.shape[1:] == ys[0].shape[1:] for y in ys)
    if not (has_features and is_number and sum(map(len, ys)) >= _MIN_COMPARED):
        return
    targets = [y.reshape(len(y), -1) for y in ys]
    pairs = np.argwhere(np.ones((xs[0].shape[1], targets[0].shape[1]), dtype=bool))
    for x, y in zip(xs, targets, strict=True):
        for rows in (slice(_MIN_COMPARED), slice(None)):  # a few samples exclude most features
            pairs = pairs[(x[rows, pairs[:, 0]] == y[rows, pairs[:, 1]]).all(0)]
    if len(pairs):
        k = int(pairs[0, 0])
        table = input_arrays.as_table(first)
        name = f"feature {k}" if table is None else f"the column {table.columns[k]!r}"
        warnings.warn(
            f"{name} of the samples is equal to the label of each: leave it out, so that it is not"
            " predicted from itself",
            stacklevel=4,
        )


def _are_targets(parts: Sequence[sources.Part], ys: Sequence[Any]) -> bool:
    """Return whether labels are the targets of a regression: fractions, and many values."""
    arrays = [
        input_arrays.to_array(part.y_name, y).ravel() for part, y in zip(parts, ys, strict=True)
    ]
    if any(y.dtype.kind not in "iuf" for y in arrays):
        return False
    values = np.unique(np.concatenate(arrays))
    has_fractions = np.isfinite(values).all() and (values != np.round(values)).any()
    if not has_fractions or len(values) <= _MOST_FRACTIONS:
        return False
    _LOGGER.warning(
        "`%s` has %d different numbers with fractions: they are the targets of a regression."
        " `numbers` = true says so without this line.",
        parts[0].y_name,
        len(values),
    )
    return True


def check_part(
    part: sources.Part, *, numbers: bool = False, exact: bool = False, tokens: bool = False
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Check the samples and labels of a part alone, as `check_parts` does."""
    x = part.x if tokens else input_validation.check_samples(part.x_name, part.x, exact=exact)
    check_y = input_validation.check_targets if numbers else input_validation.check_labels
    y = check_y(part.y_name, part.y)
    if len(x) != len(y):
        raise DataError(
            f"`{part.x_name}` holds {len(x)} samples, and `{part.y_name}` {len(y)} labels:"
            " each needs one"
        )
    input_arrays.check_rows_match(part.x_name, part.x, part.y_name, part.y)
    return x, y


def build_dataset(
    pool: Shard,
    test: Shard | None,
    classes: input_validation.Classes,
    owners: Owners | None,
    test_share: float,
    *,
    groups: Groups | None = None,
    standardise: bool | Literal["owner"] | Scaler = False,
    compare_owners: bool = True,
) -> Dataset:
    """Make a data set, holding out missing test samples.

    Doubtful classes and samples in two parts give a warning. Without `compare_owners` owners may
    have classes of their own. ConfigError is raised for a share that is out of range, and DataError
    if a class or an owner has too few samples.
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
        pool, test, owners, groups = _hold_out_by_owner(pool, test, owners, groups, test_share)
    elif test is None and groups is not None:
        cure = ": give `x_test` and `y_test`"
        everyone = np.zeros(len(pool), np.int64)
        is_test = _hold_out_groups(everyone, {0: "the data set"}, groups, test_share, cure)
        test = pool.part(np.flatnonzero(is_test))
        pool = pool.part(np.flatnonzero(~is_test))
        groups = groups.part(np.flatnonzero(~is_test))
    elif test is None:
        labels = pool.y.numpy() if classes.names else np.zeros(len(pool), np.int64)
        named = {k: f"class {name!r}" for k, name in enumerate(classes.names)}
        if classes.names_from == "source":
            # A part of a data set need not have all of its classes.
            named = {k: named[k] for k in np.unique(labels).tolist()}
        cure = f" of each class: give `x_test` and `y_test`, or leave the class out{classes.hint}"
        is_test = _hold_out_mask(labels, named or {0: "the data set"}, test_share, cure)
        test = pool.part(np.flatnonzero(is_test))
        pool = pool.part(np.flatnonzero(~is_test))

    if isinstance(standardise, Scaler):
        pool, test = (Shard(standardise(part.x), part.y) for part in (pool, test))
    elif standardise == "owner":
        pool, test = _standardise_by_owner(pool, test, owners)
    elif standardise:
        pool, test = _standardise(pool, test)
    built = Dataset(pool, test, classes.names, owners, groups)
    if classes.hint:
        warnings.warn(f"`y` has {len(classes.names)} classes{classes.hint}", stacklevel=3)
    if classes.names_from != "user":
        # Labels to which the user gave no names may be doubtful.
        names.check_labels(built, compare_owners=compare_owners)
    return check_overlap(built)


def check_overlap(built: Dataset) -> Dataset:
    """Warn of samples that are in two parts of a data set; return it, marked as checked."""
    pool = built.pool
    parts = [("test", built.test.x, pool.x)]
    if built.owners is not None and built.owners.validates.any():
        validates = built.owners.validates
        parts.append(("validation", pool.x[validates], pool.x[~validates]))
    for name, x, others in parts:
        count = count_shared(x, others)
        if count:
            warnings.warn(
                f"{count} of {len(x)} {name} samples are samples to train on, too, so that accuracy"
                " on them is no test: leave out rows that occur twice (pandas.drop_duplicates), or"
                " split before samples are copied",
                stacklevel=4,
            )
    object.__setattr__(built, "is_checked", True)
    return built


def _warn_of_divided_groups(group: NDArray[Any] | None, is_held_out: NDArray[np.bool_]) -> None:
    """Warn of test and validation samples in groups that are trained on."""
    if group is None:
        return
    held_out = group[is_held_out]
    count = int(np.isin(held_out, group[~is_held_out]).sum())
    if count:
        warnings.warn(
            f"{count} of {len(held_out)} samples that are given for test or validation are in"
            " groups (`group`) with samples to train on, so that accuracy on them is no test:"
            " split by groups, or have them held out (`test_share`)",
            stacklevel=3,
        )


def _hold_out_by_owner(
    pool: Shard, test: Shard | None, owners: Owners, groups: Groups | None, test_share: float
) -> tuple[Shard, Shard, Owners, Groups | None]:
    """Hold out a share of the samples of owners without test samples."""
    pool_owners = owners.pool.numpy()
    test_owners = owners.test.numpy()
    untested = np.setdiff1d(np.arange(len(owners.names)), test_owners).tolist()
    names = {owner: f"owner {owners.names[owner]!r}" for owner in untested}

    if names and test_share:
        # Reserved samples validate. Owners with test samples keep all others.
        is_excluded = owners.validates.numpy() | ~np.isin(pool_owners, untested)
        owner_of_sample = np.where(is_excluded, -1, pool_owners)
        cure = ": give it test samples of its own, or leave it out"
        if groups is None:
            is_test = _hold_out_mask(owner_of_sample, names, test_share, cure)
        else:
            is_test = _hold_out_groups(owner_of_sample, names, groups, test_share, cure)

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
        groups = None if groups is None else groups.part(remaining)

    assert test is not None
    return pool, test, owners, groups


def _hold_out_groups(
    owner_of_sample: NDArray[np.int64],
    names: Mapping[int, str],
    groups: Groups,
    share: float,
    cure: str,
) -> NDArray[np.bool_]:
    """Select whole groups with about a share of each named owner's samples.

    Groups of several owners are selected for all of them. Other samples have -1 in
    `owner_of_sample`.
    """
    draw = None if groups.by_time else stream(0, "dataset", "test")
    group = groups.pool.numpy()
    is_test = np.zeros(len(group), bool)
    owned = np.flatnonzero(owner_of_sample >= 0)
    pairs = np.unique(np.stack([owner_of_sample[owned], group[owned]]), axis=1)
    for owner, name in names.items():
        count = int((pairs[0] == owner).sum())
        if count < 2:
            raise DataError(
                f"{name} has {count} groups, and holding some out needs 2 or more{cure}"
            )
    if len(np.unique(pairs[1])) == pairs.shape[1]:
        for owner in names:
            members = np.flatnonzero(owner_of_sample == owner)
            is_test[members] = group_mask(group[members], share, draw)
        return is_test

    is_test[owned] = group_mask(group[owned], share, draw)
    for owner, name in names.items():
        chosen = is_test[owner_of_sample == owner]
        if chosen.all() or not chosen.any():
            part = "training" if chosen.all() else "test"
            raise DataError(
                f"{name} is left without {part} samples, because owners have groups in common"
                f" (`group`){cure}"
            )
    return is_test


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


def _standardise_by_owner(pool: Shard, test: Shard, owners: Owners | None) -> tuple[Shard, Shard]:
    """Scale the features of each owner to mean 0 and standard deviation 1 over its own pool."""
    if owners is None or (owners.test < 0).any():
        reason = "these data have no owners" if owners is None else "common test samples have none"
        raise DataError(f"`standardise` = 'owner' needs an owner of each sample, and {reason}")
    scaled = [torch.zeros(part.x.shape) for part in (pool, test)]
    for owner in range(len(owners.names)):
        places = [torch.nonzero(ids == owner)[:, 0] for ids in (owners.pool, owners.test)]
        parts = _standardise(pool.part(places[0].numpy()), test.part(places[1].numpy()))
        for x, place, part in zip(scaled, places, parts, strict=True):
            x[place] = part.x
    return Shard(scaled[0], pool.y), Shard(scaled[1], test.y)


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

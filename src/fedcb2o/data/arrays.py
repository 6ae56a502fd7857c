"""Data sets from arrays at hand: in Python, or in an .npz file."""

import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.data.shard import Dataset, Shard, features, hold_out
from fedcb2o.errors import ConfigError, DataError
from fedcb2o.streams import stream

__all__ = ["arrays"]

KEYS = ("x", "y", "x_test", "y_test", "class_names")


def arrays(*, path: str, data_dir: Path | None = None, test_share: float = 0.25, standardise: bool = False) -> Dataset:
    """The data set in an .npz file (`numpy.savez`): `x`, `y` and, if you like, `x_test` with `y_test`, `class_names`.

    They and the other parameters are those of `dataset`. A relative `path` begins in `data_dir`, or else in the working
    directory. Raises DataError if the file is missing, damaged, or holds something else.
    """
    file = Path(data_dir or ".").expanduser() / Path(path).expanduser()
    held = _load(file)
    try:
        return dataset(**held, test_share=test_share, standardise=standardise)
    except DataError as error:
        raise DataError(f"{file}: {error}") from error


def _load(file: Path) -> dict[str, Any]:
    """The arrays in an .npz file by name; nothing in it is ever unpickled."""
    if not file.is_file():
        raise DataError(
            f"there is no file {file}: `data.path` begins in the folder of `--data-dir`, or in the working one"
        )
    if not zipfile.is_zipfile(file):
        raise DataError(f"{file} is no .npz file: write it with numpy.savez(path, x=x, y=y)")
    try:
        with np.load(file, allow_pickle=False) as opened:
            held = {key: opened[key] for key in opened.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{file} cannot be read ({error}): it must hold arrays of numbers and words only") from error
    for key in held:
        if key not in KEYS:
            raise DataError(
                f"{file} holds `{key}`, which is none of {', '.join(KEYS)}.{plugins.nearest(key.lower(), KEYS)}"
            )
    for key in ("x", "y"):
        if key not in held:
            raise DataError(f"{file} holds no `{key}`: write it with numpy.savez(path, x=x, y=y)")
    if "class_names" in held:
        held["class_names"] = held["class_names"].ravel().tolist()
    return held


def dataset(
    x: Any,
    y: Any,
    *,
    x_test: Any = None,
    y_test: Any = None,
    class_names: Sequence[str] | None = None,
    test_share: float = 0.25,
    standardise: bool = False,
) -> Dataset:
    """A data set from samples x [n, ...] and their labels y [n]: arrays, tensors, lists or tables.

    Samples of type uint8 are pixels and stay so; all others become float32. Labels are whole numbers or words: their
    different values, sorted, are the classes 0 to C - 1 and give these their names; with `class_names` they are the
    numbers 0 to C - 1 themselves. Without `x_test` and `y_test` a share `test_share` of every class, always the same,
    is held out for testing, and the pool is the rest. `standardise` brings every feature to mean 0 and standard
    deviation 1 over the pool.

    Raises DataError that says what is wrong with the arrays, or ConfigError for a share that leaves nothing.
    """
    if (x_test is None) != (y_test is None):
        raise DataError("`x_test` and `y_test` go together: give both, or neither to have some of `x` held out")
    if not isinstance(test_share, int | float) or not 0 < test_share < 1:
        raise ConfigError(f"`test_share` is the share of every class that tests, between 0 and 1, got {test_share!r}")
    parts = [_part("x", x, "y", y)]
    if x_test is not None:
        parts.append(_part("x_test", x_test, "y_test", y_test))
    values, names = _classes([labels for _, labels in parts], class_names)
    shards = [Shard(samples, torch.from_numpy(np.searchsorted(values, labels))) for samples, labels in parts]
    if x_test is None:
        shards = [*hold_out(shards[0], _test_sizes(shards[0].y, names, test_share), stream(0, "dataset", "test"))]
    pool, test = shards
    if pool.x.shape[1:] != test.x.shape[1:]:
        shapes = tuple(pool.x.shape[1:]), tuple(test.x.shape[1:])
        raise DataError(f"the samples of `x` have shape {shapes[0]}, and those of `x_test` {shapes[1]}")
    if standardise:
        pool, test = _standardised(pool, test)
    return Dataset(pool=pool, test=test, class_names=names)


def _part(name: str, x: Any, label: str, y: Any) -> tuple[Tensor, NDArray[Any]]:
    """Samples and their labels as they were given, checked; `name` and `label` are what messages call them."""
    samples, labels = _samples(name, x), _labels(label, y)
    if len(samples) != len(labels):
        raise DataError(f"`{name}` holds {len(samples)} samples, and `{label}` {len(labels)} labels")
    return samples, labels


def _samples(name: str, x: Any) -> Tensor:
    given = _array(name, x)
    if given.ndim < 2 or not given.size:
        raise DataError(
            f"`{name}` must hold samples [n, features] or images [n, channels, height, width], got shape {given.shape}"
        )
    if given.dtype == np.uint8:
        return torch.from_numpy(given.copy())
    if given.dtype.kind not in "biuf":
        raise DataError(f"`{name}` must hold numbers, got values of type {given.dtype}")
    with np.errstate(over="ignore"):
        samples = given.astype(np.float32)
    if (bad := np.argwhere(~np.isfinite(samples))).size:
        row, *place = bad[0].tolist()
        raise DataError(
            f"`{name}` holds {len(bad)} values that are no finite float32 numbers, the first in sample {row} at"
            f" {place}: {given[tuple(bad[0])]}; fill them in, or leave out these samples or features"
        )
    return torch.from_numpy(samples)


def _labels(name: str, y: Any) -> NDArray[Any]:
    """Labels as whole numbers, truth values or words."""
    labels = _array(name, y)
    if labels.ndim != 1:
        raise DataError(f"`{name}` must hold one label for each sample, [n], got shape {labels.shape}")
    if labels.dtype.kind in "bU":
        return labels
    if labels.dtype == object and all(isinstance(label, str) for label in labels):
        return labels.astype(str)
    whole = (abs(labels) < 2**63) & (labels == np.round(labels)) if labels.dtype.kind in "iuf" else np.array([False])
    if not whole.all():
        wrong = labels[np.flatnonzero(~whole)[0]] if labels.dtype.kind in "fu" else f"values of type {labels.dtype}"
        raise DataError(f"`{name}` must hold classes, whole numbers or words, got {wrong}")
    return labels.astype(np.int64)


def _array(name: str, values: Any) -> NDArray[Any]:
    if np.ma.is_masked(values):
        raise DataError(f"`{name}` has masked values: fill them in, or leave these samples out")
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"`{name}` cannot be read as an array ({error})") from error


def _classes(labels: Sequence[NDArray[Any]], class_names: Sequence[str] | None) -> tuple[NDArray[Any], tuple[str, ...]]:
    """The values of the labels that are the classes 0 to C - 1, ascending, and the names of these."""
    if len({each.dtype.kind == "U" for each in labels}) > 1:
        raise DataError("`y` and `y_test` must hold labels of one kind, got words and numbers")
    values = np.unique(np.concatenate(labels))
    if isinstance(class_names, str) or not isinstance(class_names, Iterable | None):
        raise DataError(f"`class_names` must be a list of words, one for each class, got {class_names!r}")
    names = tuple(str(name) for name in (values.tolist() if class_names is None else class_names))
    if class_names is None and len(names) == 1:
        raise DataError(f"every sample has the label {names[0]}: there must be two classes or more")
    if len(set(names)) < max(2, len(names)):
        raise DataError(f"there must be two classes or more, of different names, got {', '.join(names)}")
    if class_names is not None:
        if values.dtype.kind == "U" or values[0] < 0 or values[-1] >= len(names):
            raise DataError(
                f"with `class_names` of {len(names)} classes, labels are numbers from 0 to {len(names) - 1}, got"
                f" {values[0]} to {values[-1]}; without, they are any whole numbers or words"
            )
        values = np.arange(len(names))
    return values, names


def _test_sizes(y: Tensor, names: Sequence[str], test_share: float) -> list[int]:
    """How many samples of each class test: their share, but at least one and not all of them."""
    counts = torch.bincount(y, minlength=len(names)).tolist()
    for name, count in zip(names, counts, strict=True):
        if count < 2:
            raise DataError(
                f"class {name!r} has {count} samples, and holding some out needs 2 or more of each class: give `x_test`"
                " and `y_test`, or leave the class out"
            )
    return [min(max(round(test_share * count), 1), count - 1) for count in counts]


def _standardised(pool: Shard, test: Shard) -> tuple[Shard, Shard]:
    """Both with every feature at mean 0 and standard deviation 1 over the pool; at 0 there if it does not vary."""
    x = features(pool.x).double()
    mean, std = x.mean(0), x.std(0, correction=0)
    std = torch.where(x.amax(0) > x.amin(0), std, 1.0)
    pool, test = (Shard(((features(shard.x) - mean) / std).float(), shard.y) for shard in (pool, test))
    return pool, test

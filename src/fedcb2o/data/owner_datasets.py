"""A data set of several owners, of what each brings: arrays, or data sets as PyTorch has them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcb2o.data import input_validation
from fedcb2o.data._dataset import Dataset, Owners, Shard
from fedcb2o.data.array_dataset import build_dataset
from fedcb2o.errors import DataError

_PURPOSES = ("train", "validation", "test")


def datasets(
    parts: Sequence[Any] | Mapping[str, Any],
    *,
    test: Any = None,
    class_names: Sequence[str] | None = None,
    test_share: float = 0.25,
    standardise: bool = False,
    numbers: bool = False,
) -> Dataset:
    """A data set of several owners, each of which is an agent with what it brings; by their names, or in their order.

    Each brings samples and labels (x, y); or a map-style data set of PyTorch, whose items are such pairs; or a mapping
    with one or the other for "train" and, if it likes, for "validation" and "test". Of one without validation samples
    agents hold out a share (`agents.validation`), of one without test samples a share `test_share` is held out here (0:
    none, where `test` tests everybody). `test` are samples that test everybody. All else is as in `fedcb2o.dataset`.

    Raises DataError that says what is wrong, or ConfigError for a share that leaves nothing.
    """
    if not isinstance(parts, Mapping):
        if not isinstance(parts, Sequence) or isinstance(parts, str):
            raise DataError(
                f"the data sets must be a list, or a mapping by owners' names, got a {type(parts).__name__}"
            )
        parts = {str(k): part for k, part in enumerate(parts)}
    if not parts:
        raise DataError("there must be a data set for each owner, got none")
    pieces = list[tuple[Tensor, NDArray[Any]]]()
    kinds = list[str]()
    whose = list[int]()
    found = [
        (k, *each)
        for k, (name, part) in enumerate(parts.items())
        for each in _pieces_by_purpose(str(name), part)
    ]
    for owner, kind, where, part in [
        *found,
        *([(-1, "test", "test", test)] if test is not None else []),
    ]:
        x, y = _samples_and_labels(where, part)
        pieces.append(
            input_validation.check_samples_and_labels(
                f"x of {where}", x, f"y of {where}", y, numbers=numbers
            )
        )
        kinds.append(kind)
        whose.append(owner)
        if (shape := pieces[-1][0].shape[1:]) != pieces[0][0].shape[1:]:
            shapes = tuple(shape), tuple(pieces[0][0].shape[1:])
            raise DataError(
                f"the samples of {where} have shape {shapes[0]}, and those of {found[0][2]} {shapes[1]}"
            )
    if len({x.dtype for x, _ in pieces}) > 1:
        raise DataError("some owners bring pixels (uint8) and others numbers: make them one")
    shards, names = input_validation.to_shards(pieces, class_names, numbers=numbers)
    sizes = [len(each) for each in shards]
    of = np.repeat(whose, sizes)
    purpose = np.repeat(kinds, sizes)
    testing = purpose == "test"
    whole = Shard(torch.cat([each.x for each in shards]), torch.cat([each.y for each in shards]))
    owners = Owners(
        tuple(map(str, parts)),
        torch.from_numpy(of[~testing]),
        torch.from_numpy(of[testing]),
        torch.from_numpy(purpose[~testing] == "validation"),
    )
    tests = whole.part(np.flatnonzero(testing)) if testing.any() else None
    return build_dataset(
        whole.part(np.flatnonzero(~testing)), tests, names, owners, test_share, standardise
    )


def _pieces_by_purpose(name: str, part: Any) -> Iterator[tuple[str, str, Any]]:
    """What an owner brings for each purpose, and what messages call it."""
    if not isinstance(part, Mapping):
        part = {"train": part}
    if "train" not in part or not part.keys() <= {*_PURPOSES}:
        raise DataError(
            f"owner {name!r} must bring samples to train on, and may for validation and test, got {list(part)}"
        )
    for kind in _PURPOSES:
        if part.get(kind) is not None:
            yield kind, f"owner {name!r} ({kind})", part[kind]


def _samples_and_labels(where: str, part: Any) -> tuple[Any, Any]:
    """Samples and labels: as they are given, or those of the items of a data set."""
    if isinstance(part, Shard):
        return part.x, part.y
    if isinstance(part, tuple | list):
        if len(part) != 2:
            raise DataError(f"{where} must be samples and labels, (x, y), got {len(part)} things")
        return part[0], part[1]
    if not (hasattr(part, "__getitem__") and hasattr(part, "__len__")):
        raise DataError(
            f"{where} must be (x, y), or a data set with a length and items (x, y), got a {type(part).__name__}"
            + (": give its `.dataset`" if hasattr(part, "dataset") else "")
        )
    try:
        items = [(np.asarray(x), np.asarray(y)) for x, y in (part[k] for k in range(len(part)))]
        return np.stack([x for x, _ in items]), np.stack([y for _, y in items])
    except Exception as error:  # a user's data set may fail in any way
        raise DataError(
            f"{where} must have items (x, y) of one shape ({type(error).__name__}: {error})"
        ) from error

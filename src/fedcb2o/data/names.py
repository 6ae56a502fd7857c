"""Names of classes and owners: one spelling, one order, and warnings about doubtful labels.

Words are in Unicode's composed form (NFC), so that the two spellings of "é" are one name.

Example:
    >>> by_label({1: "cat", 0: "ant"}, words=False)
    {0: 'ant', 1: 'cat'}
    >>> look_alikes(["No", "Yes", "yes "])
    [('Yes', 'yes ')]
"""

import re
import unicodedata
import warnings
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcb2o.data._dataset import Dataset
from fedcb2o.errors import DataError
from fedcb2o.plugins import to_python

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)")
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+")
_MISSING = ("nan", "nat", "<na>")
"""Texts that NumPy and pandas write for missing values, in small letters."""
_NO_LABELS = {"-1", "-100", "255"}
"""Numbers that scikit-learn, PyTorch and segmentation masks take for samples without a label."""
_MAX_VOCABULARIES = 50
"""Largest number of label sets of owners that are compared."""
_MAX_LISTED = 5


def to_nfc(text: str) -> str:
    """Return a text in Unicode's composed form."""
    return unicodedata.normalize("NFC", text)


def normalise_words(words: NDArray[np.str_]) -> NDArray[np.str_]:
    """Return words in Unicode's composed form."""
    words = np.ascontiguousarray(words.astype(words.dtype.newbyteorder("="), copy=False))
    # ASCII has one form only.
    if not words.size or not words.itemsize or words.view(np.uint32).max() < 128:
        return words
    spellings, index = np.unique(words, return_inverse=True)
    return np.array([to_nfc(word) for word in spellings.tolist()])[index]


def by_label(class_names: Any, *, words: bool) -> dict[int | str, str]:
    """Return the class name of each label, in ascending order of labels.

    `class_names` are those of the classes 0 to C - 1 in order, or a mapping {label: name}. With
    `words`, labels are words. DataError is raised if the names have no order, are not words, or are
    not different.
    """
    if isinstance(class_names, set | frozenset):
        raise DataError(
            "`class_names` is a set, which has no order: give a list in the order of the labels,"
            " or a mapping {label: name}"
        )
    if isinstance(class_names, str | bytes) or not isinstance(class_names, Iterable):
        raise DataError(
            f"`class_names` must be a list of words, one for each class, got {class_names!r}"
        )
    if hasattr(class_names, "to_dict"):  # a table's column, whose index has the labels
        class_names = class_names.to_dict()
    is_mapping = isinstance(class_names, Mapping)
    pairs = class_names.items() if is_mapping else enumerate(class_names)

    named: dict[Any, str] = {}
    for key, name in pairs:
        label = _to_label(key, words=words) if is_mapping else key
        if label in named:
            raise DataError(f"`class_names` names the label {label!r} twice")
        named[label] = _to_name(name)
    names = list(named.values())
    if len(set(names)) < max(2, len(names)):
        raise DataError(
            f"there must be two classes or more, of different names, got {', '.join(names)}"
        )
    return dict(sorted(named.items()))


def by_owner(parts: Mapping[Any, Any]) -> dict[str, Any]:
    """Return values by the name of an owner, in the same order.

    Names are in Unicode's composed form. DataError is raised if two owners have one name.
    """
    named: dict[str, Any] = {}
    for owner, part in parts.items():
        name = to_nfc(str(owner))
        if name in named:
            raise DataError(f"two owners are called {name!r}: give each another name")
        named[name] = part
    return named


def _to_label(key: Any, *, words: bool) -> int | str:
    """Return the label that a key of a mapping means. JSON has numbers as texts."""
    if words and isinstance(key, str):
        return to_nfc(key)
    number = to_python(key)
    if isinstance(key, str) and _WHOLE_NUMBER.fullmatch(key):
        number = int(key)
    if not words and isinstance(number, int | float) and number == int(number):
        return int(number)
    kind = "words" if words else "whole numbers"
    raise DataError(
        f"`class_names` names the label {key!r}, and labels are {kind}: give a mapping"
        " {label: name}"
    )


def _to_name(name: Any) -> str:
    """Return the name of a class as text."""
    name = to_python(name)
    if isinstance(name, bytes):
        name = name.decode(errors="replace")
    is_valid = isinstance(name, str) and bool(name.strip())
    if not is_valid and not (isinstance(name, Real) and name == name):
        raise DataError(f"`class_names` must be words, one for each class, got {name!r}")
    return to_nfc(str(name) if isinstance(name, Real) else name)


def look_alikes(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the groups of names that differ only in case, spaces or the form of a number."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_comparison_key(name), []).append(name)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _comparison_key(name: str) -> str:
    text = name
    if not name.isascii():
        letters = unicodedata.normalize("NFKC", name)
        # Characters of the category Cf are invisible.
        text = "".join(letter for letter in letters if unicodedata.category(letter) != "Cf")
    text = " ".join(text.split()).casefold()
    number = number_in(text)
    return text if number is None else str(number.normalize())


def number_in(name: str) -> Decimal | None:
    """Return the number that a name is; None for a word."""
    return Decimal(name) if _NUMBER.fullmatch(name) else None


def check_labels(dataset: Dataset, *, compare_owners: bool = True) -> None:
    """Check the classes that were found in the labels of users.

    An empty label is a DataError. Labels are doubtful, and give a warning, where

    - they look missing, such as "nan", or -1 next to 0, 1 and 2,
    - they are numbers written as words, which sort otherwise,
    - two classes, or two owners, differ only in case, spaces or the form of a number,
    - test samples have labels that no other sample has,
    - owners seem to write the same labels in different ways.
    """
    names = dataset.class_names
    if not all(name.strip() for name in names):
        raise DataError("`y` has empty labels: fill them in, or leave these samples out")
    for name in names:
        if name.casefold() in _MISSING:
            _warn(
                f"the class {name!r} looks like missing labels: fill them in, or leave these"
                " samples out"
            )
    if all(map(_NUMBER.fullmatch, names)) and sorted(names, key=Decimal) != list(names):
        _warn(
            f"labels are numbers written as words, which sort {_listed(names)}: give numbers for"
            " their order"
        )

    classes = [name for name in names if name not in _NO_LABELS]
    # Labels -1, 0 and 1, or all values of a byte, are classes.
    if len(classes) not in (0, 1, 2, 255) and classes == [str(k) for k in range(len(classes))]:
        for name in _NO_LABELS & set(names):
            _warn(
                f"the class {name!r} next to 0 to {len(classes) - 1} looks like samples without a"
                " label: leave them out"
            )

    seen = _classes_by_owner(dataset)
    _warn_of_look_alikes(dataset, seen)
    untrained = np.setdiff1d(dataset.test.y.numpy(), dataset.pool.y.numpy())
    if untrained.size:
        labels = _listed([names[label] for label in untrained])
        _warn(f"test samples have labels that no sample to train on has: {labels}")
    groups = _owner_groups(seen)
    if len(groups) < 2 or not compare_owners:
        return
    described = []
    for group in groups[:_MAX_LISTED]:
        owners = _listed(np.array(dataset.names.owners)[group].tolist())
        labels = _listed(np.array(names)[seen[group].any(0)].tolist())
        described.append(f"{owners} with {labels}")
    more = f" and {len(groups) - _MAX_LISTED} more groups" * (len(groups) > _MAX_LISTED)
    _warn(
        f"owners have different labels: {'; '.join(described)}{more}. If labels mean the same,"
        " write them alike"
    )


def _classes_by_owner(dataset: Dataset) -> NDArray[np.bool_]:
    """Return the classes of each owner's samples, shape [owners, C]."""
    seen = np.zeros((len(dataset.names.owners), len(dataset.class_names)), bool)
    if dataset.owners is not None:
        own_tests = dataset.owners.test.numpy() >= 0
        seen[dataset.owners.pool.numpy(), dataset.pool.y.numpy()] = True
        seen[dataset.owners.test.numpy()[own_tests], dataset.test.y.numpy()[own_tests]] = True
    return seen


def _warn_of_look_alikes(dataset: Dataset, seen: NDArray[np.bool_]) -> None:
    """Warn of classes, and of owners, that are almost the same word."""
    owners = np.array(dataset.names.owners)
    for group in look_alikes(dataset.class_names):
        members = []
        for name in group:
            holders = _listed(owners[seen[:, dataset.class_names.index(name)]].tolist())
            members.append(f"{name!r} (of {holders})" if holders else repr(name))
        _warn(
            f"the classes {' and '.join(members)} are almost the same word: write them alike if"
            " they are one class"
        )
    for group in look_alikes(dataset.names.owners):
        _warn(
            f"the owners {_listed(group)} are almost the same word: write them alike if they are"
            " one owner"
        )


def _owner_groups(seen: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
    """Group the owners that seem to write labels in different ways.

    There are no groups where labels agree. `seen` has the classes of each owner, shape [owners, C].
    Groups that share no class are such groups. So are two or three equally large sets of labels,
    such as -1 and 1 next to 0 and 1, where all other owners have a part of one of them.
    """
    from scipy.sparse.csgraph import connected_components  # slow to import

    shared = seen.T.astype(np.float32) @ seen.astype(np.float32)
    component = connected_components(shared, directed=False)[1]
    group_of_owner = component[seen.argmax(1)] if seen.size else component[:0]
    groups = np.unique(group_of_owner)
    if len(groups) > 1:
        return [group_of_owner == group for group in groups]

    vocabularies = np.unique(seen, axis=0)
    if len(vocabularies) > _MAX_VOCABULARIES:
        return []
    maximal = [row for row in vocabularies if (row <= vocabularies).all(1).sum() == 1]
    if not 2 <= len(maximal) <= 3 or len({int(row.sum()) for row in maximal}) > 1:
        return []
    return [(seen == row).all(1) for row in maximal]


def _listed(names: Sequence[str]) -> str:
    """List some names, in quotes."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(map(repr, names[:_MAX_LISTED])) + more


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)

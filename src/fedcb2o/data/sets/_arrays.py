"""Data sets from an .npz file."""

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from fedcb2o import plugins
from fedcb2o.data._dataset import Dataset
from fedcb2o.data.array_dataset import dataset
from fedcb2o.errors import DataError

__all__ = ["arrays"]

_KEYS = ("x", "y", "owner", "x_test", "y_test", "owner_test", "class_names")


def arrays(
    *,
    path: str,
    data_dir: Path | None = None,
    test_share: float = 0.25,
    standardise: bool = False,
    numbers: bool = False,
) -> Dataset:
    """The data set in an .npz file (`numpy.savez`): `x`, `y` and, if you like, `owner`, `x_test` with `y_test`,
    `owner_test`, `class_names`.

    They and the other parameters are those of `dataset`. A relative `path` begins in `data_dir`, or else in the working
    directory. Raises DataError if the file is missing, damaged, or holds something else.
    """
    file = Path(data_dir or ".").expanduser() / Path(path).expanduser()
    held = _load(file)
    try:
        return dataset(**held, test_share=test_share, standardise=standardise, numbers=numbers)
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
        raise DataError(
            f"{file} cannot be read ({error}): it must hold arrays of numbers and words only"
        ) from error
    for key in held:
        if key not in _KEYS:
            raise DataError(
                f"{file} holds `{key}`, which is none of {', '.join(_KEYS)}.{plugins.did_you_mean(key.lower(), _KEYS)}"
            )
    for key in ("x", "y"):
        if key not in held:
            raise DataError(f"{file} holds no `{key}`: write it with numpy.savez(path, x=x, y=y)")
    if "class_names" in held:
        held["class_names"] = held["class_names"].ravel().tolist()
    return held

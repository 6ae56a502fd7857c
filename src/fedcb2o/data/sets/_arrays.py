"""Data sets from an .npz file."""

import zipfile
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedcb2o import plugins
from fedcb2o.data._dataset import Dataset
from fedcb2o.data.inputs import dataset
from fedcb2o.errors import DataError

_KEYS = (
    *("x", "y", "owner", "group", "time"),
    *("x_test", "y_test", "owner_test", "group_test", "class_names"),
)

_READ_ERRORS = (
    OSError,
    ValueError,
    EOFError,
    MemoryError,  # a shape beyond the memory
    RuntimeError,  # encrypted, or compressed in an unknown way
    zipfile.BadZipFile,
    zlib.error,
)


def arrays(
    *,
    path: str,
    data_dir: Path | None = None,
    test_share: float = 0.25,
    standardise: bool | Literal["owner"] = False,
    numbers: bool | None = None,
) -> Dataset:
    """Read a data set from an .npz file (`numpy.savez`).

    The file holds `x` and `y` and, optionally, `owner`, `group`, `time`, `x_test` with `y_test`,
    `owner_test`, `group_test` and `class_names`. They are the arguments of `fedcb2o.dataset`.

    Args:
        path: The file; a relative path starts in `data_dir`.
        data_dir: A folder; None for the working directory.
        standardise: As in `fedcb2o.dataset`.
        numbers: As in `fedcb2o.dataset`.

    Raises:
        DataError: The file is missing or damaged, or its arrays are invalid.
    """
    file = Path(data_dir or ".").expanduser() / Path(path).expanduser()
    contents = _load(file)
    try:
        return dataset(**contents, test_share=test_share, standardise=standardise, numbers=numbers)
    except DataError as error:
        raise DataError(f"{file}: {error}") from error


def _load(file: Path) -> dict[str, Any]:
    """Return the arrays in an .npz file by name; never unpickles."""
    if not file.is_file():
        raise DataError(
            f"there is no file {file}: `data.path` begins in the folder of `--data-dir`, or in the"
            " working one"
        )
    if not zipfile.is_zipfile(file):
        raise DataError(f"{file} is no .npz file: write it with numpy.savez(path, x=x, y=y)")

    try:
        # an open file, because NumPy does not close one that is no archive
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as opened:
            contents = {key: opened[key] for key in opened.files}
    except _READ_ERRORS as error:
        raise DataError(
            f"{file} cannot be read ({error}): it must hold arrays of numbers and words only"
        ) from error

    for key in contents:
        if key not in _KEYS:
            hint = plugins.did_you_mean(key.lower(), _KEYS)
            raise DataError(f"{file} holds `{key}`, which is none of {', '.join(_KEYS)}.{hint}")
    for key in ("x", "y"):
        if key not in contents:
            raise DataError(f"{file} holds no `{key}`: write it with numpy.savez(path, x=x, y=y)")
    if "class_names" in contents:
        contents["class_names"] = contents["class_names"].ravel().tolist()
    return contents

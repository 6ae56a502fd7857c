"""TOML as it is written by hand, read in one place: whatever is wrong with it is a ValueError of one line."""

import tomllib
from pathlib import Path
from typing import Any


def parse_toml(content: bytes) -> dict[str, Any]:
    """The table in a file's content, which may begin with a byte-order mark; raises ValueError for what is none."""
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        byte = f"byte 0x{content[error.start]:02x} at position {error.start}"
        raise ValueError(f"it is not text in UTF-8 ({byte}): save it in this encoding") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"it is not TOML: {error}") from error
    except RecursionError as error:
        raise ValueError("its lists or tables are nested too deeply") from error


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a file; raises ValueError for what is none, and OSError where it cannot be read."""
    return parse_toml(path.read_bytes())

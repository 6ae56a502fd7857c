"""What the documentation says of each key of a configuration, read from the tables of its page."""

import functools
import re
from importlib import resources
from pathlib import Path

PAGE = "docs/configuration.md"
LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")


@functools.cache
def described() -> dict[str, str]:
    """The meaning of each key, such as "agents.budget" or "algorithm.alpha"; nothing where the page is not there.

    The page's tables with the columns key, range, default and meaning say it. In the section "Keys" keys are whole; in
    others they are the parameters of algorithms.
    """
    found: dict[str, str] = {}
    section = ""
    columns = False
    for line in _page().splitlines():
        if line.startswith("#"):
            section = line.strip("# ")
        cells = (
            [cell.strip() for cell in line.strip().strip("|").split(" | ")]
            if line.startswith("|")
            else []
        )
        columns = bool(cells) and (columns or cells[0] == "key")
        if columns and cells[0].startswith("`"):
            prefix = "" if section == "Keys" else "algorithm."
            for key in re.findall(r"`([^`]+)`", cells[0]):
                found.setdefault(f"{prefix}{key}", _plain(cells))
    return found


def _plain(cells: list[str]) -> str:
    """The meaning and the range of a key as text without links."""
    _, span, default, meaning = [LINK.sub(r"\1", cell) for cell in cells]
    return f"{meaning[:1].upper()}{meaning[1:]} ({span}; default: {default})"


def _page() -> str:
    """The page: in a wheel inside the package, in a clone beside its sources."""
    for path in (resources.files("fedcb2o") / PAGE, Path(__file__).parents[4] / PAGE):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return ""

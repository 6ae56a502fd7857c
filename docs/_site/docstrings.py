"""Docstrings are plain text in which `name` is code: a * or a | stands for itself, as in a * b and |x|."""

import re

from sphinx.application import Sphinx


def plain(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Escape what would be markup, outside of `code`."""
    text = re.split(r"(`+[^`]*`+)", "\n".join(lines))
    text[::2] = [re.sub(r"([*|])", r"\\\1", part) for part in text[::2]]
    lines[:] = "".join(text).split("\n")


def setup(app: Sphinx) -> dict[str, bool]:
    """Do so with every docstring, before its sections are looked for."""
    app.connect("autodoc-process-docstring", plain, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

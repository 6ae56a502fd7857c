"""Docstrings as plain text with `code` and indented code blocks.

The characters * and | have no special meaning, as in a * b and |x|.
"""

import re

from sphinx.application import Sphinx


def plain(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Mark code, and escape characters that are markup in reStructuredText."""
    text = re.split(r"(`+[^`]*`+|(?<=\n\n)(?: {4}.*\n)+)", "\n".join(lines))
    text[::2] = [re.sub(r"([*|])", r"\\\1", part) for part in text[::2]]
    text[1::2] = [
        f".. code-block:: python\n\n{part}" if part.endswith("\n") else part for part in text[1::2]
    ]
    lines[:] = "".join(text).split("\n")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the conversion before sections are parsed."""
    app.connect("autodoc-process-docstring", plain, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

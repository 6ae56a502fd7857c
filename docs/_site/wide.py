"""Wide pictures keep a readable width; they scroll on small screens."""

from pathlib import Path

import imagesize
from docutils import nodes
from sphinx.application import Sphinx

WIDE = 1.8  # width / height from which a picture is wide


def mark(app: Sphinx, page: nodes.document, name: str) -> None:
    """Add the class `wide` of site.css to wide pictures."""
    for picture in page.findall(nodes.image):
        width, height = imagesize.get(Path(app.srcdir, picture["uri"]))
        if width > WIDE * height > 0:
            picture["classes"].append("wide")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the marking for every page."""
    app.connect("doctree-resolved", mark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

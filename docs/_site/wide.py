"""Pictures that are much wider than high keep a width at which they can be read; on a telephone they scroll."""

from pathlib import Path

import imagesize
from docutils import nodes
from sphinx.application import Sphinx

WIDE = 1.8  # times the height


def mark(app: Sphinx, page: nodes.document, name: str) -> None:
    """Give such pictures the class that site.css knows."""
    for picture in page.findall(nodes.image):
        width, height = imagesize.get(Path(app.srcdir, picture["uri"]))
        if width > WIDE * height > 0:
            picture["classes"].append("wide")


def setup(app: Sphinx) -> dict[str, bool]:
    """Do so in every page that is written."""
    app.connect("doctree-resolved", mark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

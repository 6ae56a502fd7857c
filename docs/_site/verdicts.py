"""Verdicts of the claims page: a colour by verdict, and their statistic by the keyboard too."""

import re

from docutils import nodes
from sphinx.application import Sphinx

KINDS = {"agrees": "single", "disagrees": "single"}
"""Classes of site.css by verdict; of other verdicts, their own name."""


def mark(app: Sphinx, page: nodes.document, name: str) -> None:
    """Add the class and the tab stop to each verdict, a span with a title."""
    if name != "claims":
        return

    for raw in list(page.findall(nodes.raw)):
        verdict = raw.next_node(nodes.Text, descend=False, siblings=True)
        if raw.astext().startswith("<span title=") and verdict is not None:
            kind = KINDS.get(verdict.astext(), verdict.astext())
            opening = re.sub("^<span", f'<span class="{kind}" tabindex="0"', raw.astext())
            raw.replace_self(nodes.raw("", opening, format="html"))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the marking."""
    app.connect("doctree-resolved", mark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""Links that only a forge can show: text for a folder, the including page for SECURITY.md."""

from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx


def without_links(app: Sphinx, page: nodes.document) -> None:
    """Replace links to folders by their text, and to SECURITY.md by the page that includes it."""
    here = Path(app.env.doc2path(app.env.docname)).parent
    for link in list(page.findall(pending_xref)):
        if Path(link["reftarget"]).stem == "SECURITY":
            link.attributes |= {"refdomain": "doc", "reftarget": "security", "reftargetid": None}
        if link["refdomain"] is None and (here / link["reftarget"]).is_dir():
            link.replace_self(link.children)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the replacement for every page."""
    app.connect("doctree-read", without_links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

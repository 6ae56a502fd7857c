"""Links to folders of the repository, which a forge shows and a site does not, are plain text here."""

from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx


def without_links(app: Sphinx, page: nodes.document) -> None:
    """Put its text in the place of each link to a folder."""
    here = Path(app.env.doc2path(app.env.docname)).parent
    for link in list(page.findall(pending_xref)):
        if link["refdomain"] is None and (here / link["reftarget"]).is_dir():
            link.replace_self(link.children)


def setup(app: Sphinx) -> dict[str, bool]:
    """Do so in every page that is read."""
    app.connect("doctree-read", without_links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

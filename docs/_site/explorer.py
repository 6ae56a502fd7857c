"""Links to states of the results explorer, a page of its own beside those of the site."""

import re

from sphinx.application import Sphinx

LINK = re.compile(r"\[(?P<text>[^]]+)\]\((?P<target>explorer\.html[^)\s]*)\)")


def keep_fragments(app: Sphinx, name: str, source: list[str]) -> None:
    """Write links to the explorer as HTML, with their fragments."""
    source[0] = LINK.sub(
        lambda match: f'<a href="{match["target"].replace("&", "&amp;")}">{match["text"]}</a>',
        source[0],
    )


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the rewriting for every page."""
    app.connect("source-read", keep_fragments)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

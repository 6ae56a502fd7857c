"""The directive `keys`: a table of the keys of a configuration, or of the parts of a kind."""

import re

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from fedcb2o.experiments.key_table import key_rows
from fedcb2o.experiments.schema import part_rows

LINK = re.compile(r"\]\((?P<page>[\w./-]*\.md)?(?P<anchor>#[\w-]+)?\)")


class Keys(SphinxDirective):
    """A table; the argument names the kind of parts."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        lines = ["| key | meaning |", "| --- | --- |"]
        if self.arguments:
            lines[0] = "| name | purpose and parameters |"
            for name, parameters, purpose in part_rows(self.arguments[0]):
                code = f" `{parameters}`" if parameters else ""
                lines.append(f"| `{name}` | {purpose}{code} |")
        else:
            for key, values, default, meaning in key_rows():
                text = meaning[:1].upper() + meaning[1:]
                cell = _linked(f"{text}. {values}; default: {default}")
                lines.append(f"| `{key}` | {cell} |")
        node = nodes.container()
        self.state.nested_parse(StringList(lines, "keys"), self.content_offset, node)
        return node.children


def _linked(text: str) -> str:
    """Rewrite links from docs/configuration.md to links from docs/reference."""
    return LINK.sub(
        lambda match: f"](../{match['page'] or 'configuration.md'}{match['anchor'] or ''})", text
    )


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("keys", Keys)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

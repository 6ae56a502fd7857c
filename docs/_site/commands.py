"""The directive `commands`: every command of the command line, in the words of its own --help."""

from collections.abc import Iterator
from typing import Any

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typer.testing import CliRunner

from fedcb2o.cli import app as line

LOOK = {"COLUMNS": "80", "TERMINAL_WIDTH": "80", "NO_COLOR": "1", "TERM": "dumb"}


class Commands(SphinxDirective):
    """A section for each command."""

    def run(self) -> list[nodes.Node]:
        """The sections."""
        sections: list[nodes.Node] = []
        for words in _commands([], typer.main.get_command(line)):
            name = " ".join(words)
            told = CliRunner().invoke(line, [*words, "--help"], prog_name="fedcb2o", env=LOOK).output.strip("\n")
            text = "\n".join(row.rstrip() for row in told.splitlines())
            anchor = nodes.make_id(name)
            title, block = nodes.title(text=name), nodes.literal_block(text, text, language="text")
            sections.append(nodes.section("", title, block, ids=[anchor], names=[anchor]))
        return sections


def _commands(words: list[str], command: Any) -> Iterator[list[str]]:
    """The words of each command that has no others below it."""
    below = getattr(command, "commands", {})
    if not below:
        yield words
    for name, each in below.items():
        yield from _commands([*words, name], each)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""The directive `commands`: every command of the command line and what it takes, in the words of its own --help."""

from collections.abc import Iterator
from typing import Any

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from fedcb2o.cli import app as line


class Commands(SphinxDirective):
    """A section for each command: what it does, and a list of its arguments and options."""

    def run(self) -> list[nodes.Node]:
        """The sections."""
        return [_section(words, command) for words, command in _commands([], typer.main.get_command(line))]


def _commands(words: list[str], command: Any) -> Iterator[tuple[str, Any]]:
    """Each command that has no others below it, with its words."""
    below = getattr(command, "commands", {})
    if not below:
        yield " ".join(words), command
    for name, each in below.items():
        yield from _commands([*words, name], each)


def _section(words: str, command: Any) -> nodes.section:
    section = nodes.section(ids=[nodes.make_id(words)], names=[words])
    section += nodes.title(text=words)
    for text in (command.help or "").split("\n\n"):
        example = text.removeprefix("Example: ")
        section += _paragraph(text) if example == text else nodes.literal_block(example, example, language="text")
    section += (takes := nodes.definition_list())
    for each in command.params:
        named = [] if each.param_type_name == "argument" else [", ".join([*each.opts, *each.secondary_opts])]
        written = " ".join([*named, each.metavar or (each.name.upper() if not named else "")]).strip()
        term, told = nodes.term("", "", nodes.literal(text=written)), _paragraph(each.help or "")
        takes += nodes.definition_list_item("", term, nodes.definition("", told))
    return section


def _paragraph(text: str) -> nodes.paragraph:
    """A paragraph in which what stands between backticks is code."""
    paragraph = nodes.paragraph()
    for i, part in enumerate(" ".join(text.replace("\\[", "[").split()).split("`")):
        paragraph += nodes.literal(text=part) if i % 2 else nodes.Text(part)
    return paragraph


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

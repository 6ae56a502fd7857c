"""The directive `commands`: all commands with their options, from --help."""

from collections.abc import Iterator
from typing import Any

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from fedcb2o.cli import app as line


class Commands(SphinxDirective):
    """Sections of commands: description, arguments and options."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        return [
            _section(words, command)
            for words, command in _commands([], typer.main.get_command(line))
        ]


def _commands(words: list[str], command: Any) -> Iterator[tuple[str, Any]]:
    """Yield the commands without subcommands, each with its full name."""
    subcommands = getattr(command, "commands", {})
    if not subcommands:
        yield " ".join(words), command

    for name, subcommand in subcommands.items():
        yield from _commands([*words, name], subcommand)


def _section(words: str, command: Any) -> nodes.section:
    section = nodes.section(ids=[nodes.make_id(words)], names=[words])
    section += nodes.title(text=words)

    for text in (command.help or "").split("\n\n"):
        example = text.removeprefix("Example: ")
        if example == text:
            section += _paragraph(text)
        else:
            section += nodes.literal_block(example, example, language="text")

    parameters = nodes.definition_list()
    for parameter in command.params:
        term = nodes.term("", "", nodes.literal(text=_usage(parameter)))
        definition = nodes.definition("", _paragraph(parameter.help or ""))
        parameters += nodes.definition_list_item("", term, definition)

    section += parameters
    return section


def _usage(parameter: Any) -> str:
    """Return the names and the placeholder of an argument or option."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return f"{names} {parameter.metavar or ''}".strip()


def _paragraph(text: str) -> nodes.paragraph:
    """Return a paragraph with text between backticks as code."""
    paragraph = nodes.paragraph()
    for i, part in enumerate(" ".join(text.replace("\\[", "[").split()).split("`")):
        is_code = i % 2 == 1
        paragraph += nodes.literal(text=part) if is_code else nodes.Text(part)
    return paragraph


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""Help of the commands: flags without a type, rare options in a panel of their own."""

import functools
from typing import Any

from typer import Option
from typer.core import TyperCommand, TyperGroup

RareOption = functools.partial(Option, rich_help_panel="Rarely needed")
"""An option that few runs need, in a panel of its own."""


def _without_flag_types(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class Command(TyperCommand):
    """A command whose help shows flags without `<bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of the command."""
        return _without_flag_types(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands whose help shows flags without `<bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of the group."""
        return _without_flag_types(super().get_params(ctx))

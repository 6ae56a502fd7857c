"""Help of the commands: flags without a type, rare options in a panel of their own."""

from typing import Any

from typer.core import TyperCommand, TyperGroup

RARE = "Rarely needed"
"""Panel of the options that few runs need."""


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

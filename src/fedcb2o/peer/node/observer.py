"""Who is told how a node is doing."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Watch(Protocol):
    """Who is told how a node is doing."""

    def phase(self, n: int, name: str) -> None:
        """Round `n`, counted from 1, is at "training", "mixing" ..."""
        ...

    def round(self, line: Mapping[str, Any]) -> None:
        """A round is over: its line in rounds.jsonl."""
        ...

    def note(self, text: str) -> None:
        """What the operator should know."""
        ...


class Silent:
    """Tells nobody."""

    def phase(self, n: int, name: str) -> None:
        """Nothing."""

    def round(self, line: Mapping[str, Any]) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

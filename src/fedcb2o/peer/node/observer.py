"""Who is told how a node is doing."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class NodeObserver(Protocol):
    """Who is told how a node is doing."""

    def on_phase(self, n: int, name: str) -> None:
        """Round `n`, counted from 1, is at "training", "mixing" ..."""
        ...

    def on_round(self, line: Mapping[str, Any]) -> None:
        """A round is over: its line in rounds.jsonl."""
        ...

    def on_note(self, text: str) -> None:
        """What the operator should know."""
        ...


class NullObserver:
    """Tells nobody."""

    def on_phase(self, n: int, name: str) -> None:
        """Nothing."""

    def on_round(self, line: Mapping[str, Any]) -> None:
        """Nothing."""

    def on_note(self, text: str) -> None:
        """Nothing."""

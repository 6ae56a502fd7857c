"""Interface of an observer of a node's progress."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class NodeObserver(Protocol):
    """Receiver of a node's progress."""

    def on_phase(self, n: int, name: str) -> None:
        """Handle the start of a phase ("training", "aggregating" ...) of round `n` from 1."""

    def on_round(self, line: Mapping[str, Any]) -> None:
        """Handle the end of a round."""

    def on_note(self, text: str) -> None:
        """Handle a message for the operator."""


class NullObserver:
    """Observer that ignores everything."""

    def on_phase(self, n: int, name: str) -> None: ...

    def on_round(self, line: Mapping[str, Any]) -> None: ...

    def on_note(self, text: str) -> None: ...

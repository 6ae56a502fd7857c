"""Progress of a node as log lines."""

import logging
from collections.abc import Mapping
from typing import Any

from fedcb2o.peer.report.live_table import LiveTable

_LOGGER = logging.getLogger(__name__)


class RoundLog(LiveTable):
    """Progress of a node as log lines, with the record of each round as their data.

    `has_table` shows the live table too, because log lines go to a file.
    """

    def __init__(
        self, names: Mapping[int, str], *, agent_id: int, rounds: int, has_table: bool = False
    ) -> None:
        super().__init__(names, agent_id=agent_id, rounds=rounds)
        self.is_live = self.is_live and has_table
        self._prints_lines = True
        self._record: Mapping[str, Any] | None = None

    def on_round(self, line: Mapping[str, Any]) -> None:
        """Log a finished round."""
        self._record = line
        super().on_round(line)
        self._record = None

    def _print(self, line: str) -> None:
        level = logging.WARNING if self._record is None else logging.INFO
        data = {"member": self._own_name, "record": self._record}
        _LOGGER.log(level, "%s", line, extra={"data": data})

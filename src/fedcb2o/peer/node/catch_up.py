"""Rounds of a late member in which the distance from its own model is not checked.

After skipped rounds an agent's own model is the outlier: the models of all others may be too far
from it.
"""

from collections.abc import Mapping
from typing import Any

ROUNDS = 3
"""Rounds with an average of peers' models, after which the distance is checked again."""


class CatchUp:
    """Count of the rounds that a late member still needs.

    `rounds_left` counts rounds with an average; 0 if the distance is checked.
    """

    def __init__(self) -> None:
        self.rounds_left = 0
        self._has_average = False  # since the start or the last gap
        self._last_round = 0

    def start(self) -> None:
        """Begin, because rounds are skipped."""
        self.rounds_left = ROUNDS
        self._has_average = False

    def start_if_late(self, is_late: bool) -> None:
        """Begin if the others are ahead of a model that was never averaged.

        An agent is late if more than half of the others are ahead.
        """
        if is_late and not self._has_average:
            self.start()

    def add_round(self, record: Mapping[str, Any]) -> None:
        """Count a finished round by its record in rounds.jsonl."""
        # Rounds were skipped before a restart.
        if record["round"] > self._last_round + 1:
            self.start()
        self._last_round = record["round"]
        # A rule without weights, such as a median, records NaN.
        if any(model["weight"] != 0 for model in record["received"]):
            self._has_average = True
            self.rounds_left = max(0, self.rounds_left - 1)
        self.rounds_left = record.get("catch_up", self.rounds_left)

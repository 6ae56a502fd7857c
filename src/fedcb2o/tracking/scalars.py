"""What is tracked: numbers by name and round, over the benign agents of one seed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcb2o import records
from fedcb2o.records import EVALUATED_METRICS, OPTIONAL_METRICS, agent_statistics

Scalar = tuple[int, str, float]
"""A round, counted from 1, the name of a number, and the number."""


@dataclass(frozen=True)
class SeedRun:
    """Whose points: one seed of a run, which has a `name` where it is one of a grid's."""

    run: Path
    seed: int
    name: str = ""

    @property
    def folder(self) -> Path:
        """Where the seed's records lie."""
        return self.run / f"seed-{self.seed}"

    def settings(self) -> dict[str, Any]:
        """The run's config.toml, as it is now."""
        return records.read_config(self.run / "config.toml")


def round_scalars(line: Mapping[str, Any], malicious: Sequence[bool]) -> Iterator[Scalar]:
    """What is tracked of a line of metrics.jsonl: the mean of each metric over the benign agents that have one.

    Of what was evaluated also the worst agent and the mean of the worst tenth, as in summary.json. A name is that of
    the metric and which of these it is: "accuracy/mean", "accuracy/worst", "accuracy/worst_tenth".
    """
    for metric, values in line.items():
        if not isinstance(values, list) or len(values) != len(malicious):
            continue
        known = [
            v
            for v, bad in zip(values, malicious, strict=True)
            if not bad and isinstance(v, int | float)
        ]
        if known and metric in (*EVALUATED_METRICS, *OPTIONAL_METRICS):
            for over, value in agent_statistics(metric, np.array(known, dtype=float)).items():
                yield line["round"], f"{metric}/{over}", value
        elif known:
            yield line["round"], f"{metric}/mean", float(np.mean(known))

"""Scalars for trackers: numbers of one seed by name and round."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcb2o import records
from fedcb2o.records import METRICS, OPTIONAL_METRICS, STANDARD_METRICS, agent_statistics

Scalar = tuple[int, str, float]
"""Round from 1, name, and value."""


@dataclass(frozen=True)
class SeedRun:
    """One seed of a run."""

    run: Path
    seed: int
    # Path of the run in its grid; empty for a run outside a grid.
    name: str = ""

    @property
    def folder(self) -> Path:
        """The folder seed-SEED in the folder of the run, with the records of the seed."""
        return self.run / f"seed-{self.seed}"

    def settings(self) -> dict[str, Any]:
        """Read the current config.toml of the run."""
        return records.read_config(self.run / "config.toml")


def round_scalars(line: Mapping[str, Any], malicious: Sequence[bool]) -> Iterator[Scalar]:
    """Compute the scalars of one round of metrics, such as "accuracy/mean".

    Each metric has its mean over the benign agents with a value. Evaluated ones also have the worst
    agent and the mean of the worst tenth, as in summary.json.
    """
    for metric, values in line.items():
        if not isinstance(values, list) or len(values) != len(malicious):
            continue
        benign = [
            value
            for value, is_malicious in zip(values, malicious, strict=True)
            if not is_malicious and isinstance(value, int | float)
        ]
        if not benign:
            continue
        if metric in (*STANDARD_METRICS, *OPTIONAL_METRICS):
            statistics = agent_statistics(METRICS[metric], np.array(benign, dtype=float))
            for statistic, value in statistics.items():
                yield line["round"], f"{metric}/{statistic}", value
        else:
            yield line["round"], f"{metric}/mean", float(np.mean(benign))

"""Runs: the rounds of each seed, the run directory, recovery, and runs on a cluster."""

from fedcb2o.experiments.runs._progress import Progress, RoundCallback
from fedcb2o.experiments.runs._runner import run

__all__ = ["Progress", "RoundCallback", "run"]

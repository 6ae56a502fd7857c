"""Runs: the rounds of each seed, the run directory, recovery, and runs on a cluster."""

from fedcb2o.experiments.runs.progress import Progress, Watch
from fedcb2o.experiments.runs.run_directory import alone
from fedcb2o.experiments.runs.runner import run

__all__ = ["Progress", "Watch", "alone", "run"]

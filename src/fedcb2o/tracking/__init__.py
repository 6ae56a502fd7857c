"""Trackers: what TensorBoard or MLflow shows of a run or a grid, copied from its records.

Records are what counts; a tracker has a copy of what `points` makes of them, by a writer of its own, while rounds are
written (`following`) or afterwards (`track`). By default the copy lies in the folder of the run.
"""

from fedcb2o.tracking.scalars import Scalar, SeedRun, round_scalars
from fedcb2o.tracking.sync import follow, track
from fedcb2o.tracking.trackers import validate_targets

__all__ = ["Scalar", "SeedRun", "follow", "round_scalars", "track", "validate_targets"]

"""Copies of records in TensorBoard and MLflow.

Records are the source. A tracker has a copy of the scalars of `round_scalars`, written while rounds
are written (`follow`) or afterwards (`track`). By default the copy is in the folder of the run.
"""

from fedcb2o.tracking.scalars import round_scalars
from fedcb2o.tracking.sync import follow, track
from fedcb2o.tracking.trackers import validate_targets

__all__ = ["follow", "round_scalars", "track", "validate_targets"]

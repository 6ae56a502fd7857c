"""Data sets, and how agents share them out.

A configuration names a data set by a function in `__all__`: (*, data_dir, ...) -> Dataset. Its parts lie beside it:
`shard` (what agents hold), `partition` (clusters, shares, train and validation), `download` (EMNIST's files).
"""

from fedcb2o.data.digits import digits
from fedcb2o.data.emnist import emnist

__all__ = ["digits", "emnist"]

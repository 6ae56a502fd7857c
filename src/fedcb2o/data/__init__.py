"""Data sets, their partition among agents, and their files.

`fedcb2o.data.sets` holds the built-in data sets that a configuration may name; they are
re-exported. `fedcb2o.data.downloads` gets their files.

Example:
    >>> digits().num_classes
    10
"""

from fedcb2o.data import sets, skews, transforms
from fedcb2o.data._dataset import Dataset, DatasetNames, Groups, Owners, Shard, features, hold_out
from fedcb2o.data._partition import Population, partition, partition_by_owner, validation_mask
from fedcb2o.data._sample_format import (
    OTHER_SCALE,
    SampleValues,
    ValueRange,
    brightness,
    channels_last_hint,
    match_samples,
    pixel_range,
    sample_values,
    using_range,
    value_range,
)
from fedcb2o.data.inputs import dataset, datasets
from fedcb2o.data.release import Release, default_folder, user_folder
from fedcb2o.data.scaling import Scaler
from fedcb2o.data.sets import *  # noqa: F403
from fedcb2o.data.sets._text import tokenise
from fedcb2o.data.transforms import ClusterTransform, ClusterView, rotate

__all__ = [
    "OTHER_SCALE",
    "ClusterTransform",
    "ClusterView",
    "Dataset",
    "DatasetNames",
    "Groups",
    "Owners",
    "Population",
    "Release",
    "SampleValues",
    "Scaler",
    "Shard",
    "ValueRange",
    "brightness",
    "channels_last_hint",
    "dataset",
    "datasets",
    "default_folder",
    "features",
    "hold_out",
    "match_samples",
    "partition",
    "partition_by_owner",
    "pixel_range",
    "rotate",
    "sample_values",
    "skews",
    "tokenise",
    "transforms",
    "user_folder",
    "using_range",
    "validation_mask",
    "value_range",
]
__all__ += sets.__all__

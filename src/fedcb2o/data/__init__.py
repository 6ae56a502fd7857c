"""Data sets, their partition among agents, and their files.

`fedcb2o.data.sets` holds the built-in data sets that a configuration may name; they are
re-exported. `fedcb2o.data.downloads` gets their files.

Example:
    >>> digits().num_classes
    10
"""

from fedcb2o.data import skews, transforms
from fedcb2o.data._dataset import (
    Dataset,
    DatasetNames,
    Owners,
    Shard,
    features,
    group_members,
    hold_out,
    stratified_mask,
)
from fedcb2o.data._partition import (
    Population,
    partition,
    validation_mask,
)
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
from fedcb2o.data.natural_partition import partition_by_owner
from fedcb2o.data.release import Release, default_folder, user_folder
from fedcb2o.data.sets import (
    arrays,
    breast_cancer,
    cifar10,
    diabetes,
    digits,
    docstrings,
    emnist,
    fashion_mnist,
    fashion_shops,
    mnist,
    owner_table,
    text,
    typefaces,
)
from fedcb2o.data.sets._text import tokenise
from fedcb2o.data.transforms import ClusterTransform, ClusterView, rotate

__all__ = [
    "OTHER_SCALE",
    "ClusterTransform",
    "ClusterView",
    "Dataset",
    "DatasetNames",
    "Owners",
    "Population",
    "Release",
    "SampleValues",
    "Shard",
    "ValueRange",
    "arrays",
    "breast_cancer",
    "brightness",
    "channels_last_hint",
    "cifar10",
    "dataset",
    "datasets",
    "default_folder",
    "diabetes",
    "digits",
    "docstrings",
    "emnist",
    "fashion_mnist",
    "fashion_shops",
    "features",
    "group_members",
    "hold_out",
    "match_samples",
    "mnist",
    "owner_table",
    "partition",
    "partition_by_owner",
    "pixel_range",
    "rotate",
    "sample_values",
    "skews",
    "stratified_mask",
    "text",
    "tokenise",
    "transforms",
    "typefaces",
    "user_folder",
    "using_range",
    "validation_mask",
    "value_range",
]

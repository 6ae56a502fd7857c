"""Data sets, and how agents share them out.

`fedcb2o.data.sets` holds the built-in data sets that a configuration may name; they are re-exported here.
"""

from fedcb2o.data import skews
from fedcb2o.data._dataset import Dataset, Names, Owners, Shard, drawn, features, hold_out, members_of
from fedcb2o.data._partition import Population, partition, rotate, validates
from fedcb2o.data.array_dataset import dataset
from fedcb2o.data.natural_partition import natural
from fedcb2o.data.owner_datasets import datasets
from fedcb2o.data.release import Release, default_folder, own_folder
from fedcb2o.data.sets import (
    arrays,
    breast_cancer,
    cifar10,
    diabetes,
    digits,
    emnist,
    fashion_mnist,
    fashion_shops,
    mnist,
    typefaces,
)

__all__ = [
    "Dataset",
    "Names",
    "Owners",
    "Population",
    "Release",
    "Shard",
    "arrays",
    "breast_cancer",
    "cifar10",
    "dataset",
    "datasets",
    "default_folder",
    "diabetes",
    "digits",
    "drawn",
    "emnist",
    "fashion_mnist",
    "fashion_shops",
    "features",
    "hold_out",
    "members_of",
    "mnist",
    "natural",
    "own_folder",
    "partition",
    "rotate",
    "skews",
    "typefaces",
    "validates",
]

"""Built-in data sets: (*, data_dir, ...) -> Dataset.

A configuration names a data set by a function in `__all__`.
"""

from fedcb2o.data.sets._arrays import arrays
from fedcb2o.data.sets._breast_cancer import breast_cancer
from fedcb2o.data.sets._cifar10 import cifar10
from fedcb2o.data.sets._diabetes import diabetes
from fedcb2o.data.sets._digits import digits
from fedcb2o.data.sets._docstrings import docstrings
from fedcb2o.data.sets._emnist import emnist
from fedcb2o.data.sets._fashion_mnist import fashion_mnist
from fedcb2o.data.sets._fashion_shops import fashion_shops
from fedcb2o.data.sets._mnist import mnist
from fedcb2o.data.sets._owner_table import owner_table
from fedcb2o.data.sets._text import text
from fedcb2o.data.sets._typefaces import typefaces

__all__ = [
    "arrays",
    "breast_cancer",
    "cifar10",
    "diabetes",
    "digits",
    "docstrings",
    "emnist",
    "fashion_mnist",
    "fashion_shops",
    "mnist",
    "owner_table",
    "text",
    "typefaces",
]

"""Data sets, and how agents share them out.

A configuration names a data set by a function in `__all__`: (*, data_dir, ...) -> Dataset. Its parts lie beside it:
`shard` (what agents hold), `partition` (clusters, shares, train and validation), `skews` (how labels differ between
agents), `natural` (agents that bring their own), `given` and `brought` (what users give: how it is read, and put
together of several owners), `files`, `idx` and `download` (files of images: how they are read, and how they get there).
"""

from fedcb2o.data.arrays import arrays
from fedcb2o.data.breast_cancer import breast_cancer
from fedcb2o.data.cifar10 import cifar10
from fedcb2o.data.diabetes import diabetes
from fedcb2o.data.digits import digits
from fedcb2o.data.emnist import emnist
from fedcb2o.data.fashion_mnist import fashion_mnist
from fedcb2o.data.fashion_shops import fashion_shops
from fedcb2o.data.mnist import mnist
from fedcb2o.data.typefaces import typefaces

__all__ = [
    "arrays",
    "breast_cancer",
    "cifar10",
    "diabetes",
    "digits",
    "emnist",
    "fashion_mnist",
    "fashion_shops",
    "mnist",
    "typefaces",
]

"""Built-in data sets: (*, data_dir, ...) -> Dataset.

A configuration names a data set by a function in `__all__`. A missing package is a ConfigError, and
a missing or damaged file a DataError.
"""

from fedcb2o.data.sets._arrays import arrays
from fedcb2o.data.sets._cifar10 import cifar10
from fedcb2o.data.sets._docstrings import docstrings
from fedcb2o.data.sets._fashion_shops import fashion_shops
from fedcb2o.data.sets._har import har
from fedcb2o.data.sets._mnist import emnist, fashion_mnist, mnist
from fedcb2o.data.sets._scikit_learn import breast_cancer, diabetes, digits
from fedcb2o.data.sets._shakespeare import shakespeare
from fedcb2o.data.sets._tables import chem97, flights, loans, movielens, owner_table, stops
from fedcb2o.data.sets._text import text
from fedcb2o.data.sets._typefaces import typefaces
from fedcb2o.docstrings import share_entries

__all__ = [
    "arrays",
    "breast_cancer",
    "chem97",
    "cifar10",
    "diabetes",
    "digits",
    "docstrings",
    "emnist",
    "fashion_mnist",
    "fashion_shops",
    "flights",
    "har",
    "loans",
    "mnist",
    "movielens",
    "owner_table",
    "shakespeare",
    "stops",
    "text",
    "typefaces",
]

_ARGUMENTS = {
    "data_dir": "Folder of the files; None for the default one.",
    "train_per_class": "First training images of each class; None for all.",
    "test_per_class": "First test images of each class; None for all.",
    "base": "Pretrained model whose tokens are used, see `fedcb2o.pretrained`.",
    "prompt": "Number of tokens that the model reads.",
    "answer": "Number of tokens that it learns.",
    "vocabulary": "Number of tokens of answers, the most frequent ones; None for all.",
    "test_share": "Share that tests, of each owner's samples or of each class.",
}
for _name in __all__:
    share_entries(globals()[_name], _ARGUMENTS, "The data set.")

"""Fashion-MNIST as shops might have it: data with owners of different sizes and assortments.

The photographs are real, the shops are made up: Fashion-MNIST does not say whose its photographs are.
"""

from pathlib import Path

import numpy as np

from fedcb2o.data._dataset import Dataset
from fedcb2o.data.array_dataset import dataset
from fedcb2o.data.sets._fashion_mnist import fashion_mnist
from fedcb2o.data.skews import dirichlet
from fedcb2o.errors import ConfigError
from fedcb2o.rng import stream

__all__ = ["fashion_shops"]


def fashion_shops(
    *,
    data_dir: Path | None = None,
    shops: int = 20,
    fewest: int = 150,
    most: int = 600,
    concentration: float = 2.0,
    test_per_class: int = 100,
) -> Dataset:
    """So many shops, each with `fewest` to `most` photographs of its own, a quarter of which are its own test.

    A shop's share of each class is by `dirichlet` with this `concentration`; no photograph is in two shops, and all is
    the same for every seed of a run. `test_per_class` of Fashion-MNIST's test photographs of each class test everybody.
    Images, files and `data_dir` are those of `fashion_mnist`. Raises DataError or ConfigError where there are too few.
    """
    if shops < 2 or not 8 <= fewest <= most:
        raise ConfigError(
            f"fashion_shops needs 2 `shops` or more, `fewest` from 8 and `most` no less, got {shops}, {fewest}, {most}"
        )
    draw = stream(0, "fashion_shops")
    sizes = draw.integers(fewest, most, size=shops, endpoint=True)
    whole = fashion_mnist(data_dir=data_dir, test_per_class=test_per_class)
    if (count := int(sizes.sum())) > len(whole.pool):
        raise ConfigError(
            f"`shops` that need {count} photographs are too many: there are {len(whole.pool)}"
        )
    chosen = draw.permutation(len(whole.pool))[:count]
    owner = dirichlet(whole.pool.y.numpy()[chosen], sizes, draw, concentration=concentration)
    return dataset(
        whole.pool.x[chosen],
        whole.pool.y[chosen],
        owner=np.char.add("shop-", np.char.zfill(owner.astype(str), len(str(shops - 1)))),
        x_test=whole.test.x,
        y_test=whole.test.y,
        class_names=whole.class_names,
    )

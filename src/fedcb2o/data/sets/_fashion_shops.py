"""Fashion-MNIST distributed among shops: owners with different sizes and assortments.

The photographs are real, the shops are not: Fashion-MNIST does not name the owners of its images.
"""

from pathlib import Path

import numpy as np

from fedcb2o.data._dataset import Dataset
from fedcb2o.data.inputs import dataset
from fedcb2o.data.sets._mnist import fashion_mnist
from fedcb2o.data.skews import dirichlet
from fedcb2o.errors import ConfigError
from fedcb2o.rng import stream


def fashion_shops(
    *,
    data_dir: Path | None = None,
    shops: int = 20,
    fewest: int = 150,
    most: int = 600,
    concentration: float = 2.0,
    test_per_class: int = 100,
) -> Dataset:
    """Distribute Fashion-MNIST among shops, each the owner of its photographs.

    A quarter of a shop's photographs are its test images. Each photograph belongs to one shop. The
    data set is the same for every seed.

    Args:
        data_dir: Folder of Fashion-MNIST's files, as for `fashion_mnist`.
        shops: Number of shops, at least 2.
        fewest: Smallest number of photographs of a shop, at least 8.
        most: Largest number of photographs of a shop.
        concentration: Parameter of `skews.dirichlet` for the classes of the shops.
        test_per_class: Fashion-MNIST test images of each class that test every agent.

    Returns:
        The data set; images are those of `fashion_mnist`.
    """
    if shops < 2 or not 8 <= fewest <= most:
        raise ConfigError(
            "fashion_shops needs 2 `shops` or more, `fewest` from 8 and `most` no less,"
            f" got {shops}, {fewest}, {most}"
        )
    draw = stream(0, "fashion_shops")
    sizes = draw.integers(fewest, most, size=shops, endpoint=True)
    source = fashion_mnist(data_dir=data_dir, test_per_class=test_per_class)
    count = int(sizes.sum())
    if count > len(source.pool):
        raise ConfigError(
            f"`shops` that need {count} photographs are too many: there are {len(source.pool)}"
        )

    chosen = draw.permutation(len(source.pool))[:count]
    labels = source.pool.y.numpy()[chosen]
    shop = dirichlet(labels, sizes, draw, concentration=concentration)
    digits = len(str(shops - 1))
    return dataset(
        source.pool.x[chosen],
        source.pool.y[chosen],
        owner=np.char.add("shop-", np.char.zfill(shop.astype(str), digits)),
        x_test=source.test.x,
        y_test=source.test.y,
        class_names=source.class_names,
    )

"""The handwritten digits that come with scikit-learn: 1797 images of 8 x 8 pixels, no download.

Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits" (UCI Machine Learning Repository, 1998), its test set.
"""

from pathlib import Path

import torch

from fedcb2o.data._dataset import Dataset, Shard, hold_out
from fedcb2o.errors import ConfigError
from fedcb2o.rng import stream

__all__ = ["digits"]


def digits(*, data_dir: Path | None = None, test_per_class: int = 24) -> Dataset:
    """The digits, with a test set of `test_per_class` images of each class and all others in the pool.

    Images are float32 [n, 1, 8, 8] in [0, 1]. The test set is the same for every seed of a run. `data_dir` is not
    read: the images lie in scikit-learn. Raises ConfigError if a class has too few images.
    """
    from sklearn.datasets import load_digits  # slow to import, and needed by nobody else

    bunch = load_digits()
    x = torch.from_numpy(bunch.images).float().div(16).unsqueeze(1)
    y = torch.from_numpy(bunch.target).long()
    most = int(torch.bincount(y).min()) - 1
    if not 1 <= test_per_class <= most:
        raise ConfigError(
            f"`test_per_class` of digits must be between 1 and {most}, got {test_per_class}"
        )
    pool, test = hold_out(Shard(x, y), [test_per_class] * 10, stream(0, "digits", "test"))
    return Dataset(pool=pool, test=test, class_names=tuple(str(c) for c in range(10)))

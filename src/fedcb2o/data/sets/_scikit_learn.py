"""Data sets of scikit-learn, which need no download.

- digits: 1797 handwritten digits, images of 8x8 pixels. Alpaydin and Kaynak, "Optical Recognition
  of Handwritten Digits" (UCI Machine Learning Repository, 1998), its test set.
- breast_cancer: 569 tumours in Wisconsin with 30 features. Street, Wolberg and Mangasarian,
  "Nuclear feature extraction for breast tumor diagnosis" (1993).
- diabetes: the progression of diabetes, a regression on 442 patients. Efron, Hastie, Johnstone and
  Tibshirani, "Least Angle Regression" (2004).
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedcb2o.data._dataset import Dataset, Shard, hold_out
from fedcb2o.data.inputs import dataset
from fedcb2o.errors import ConfigError
from fedcb2o.rng import stream


def digits(*, data_dir: Path | None = None, test_per_class: int = 24) -> Dataset:
    """Load the digits.

    Args:
        data_dir: Ignored; the images are part of scikit-learn.
        test_per_class: Test images of each class; the test set is the same for every seed.

    Returns:
        The data set; images are float32 [n, 1, 8, 8] in [0, 1].
    """
    table = torch.from_numpy(_read_table())
    x = table[:, :-1].float().div(16).reshape(-1, 1, 8, 8)
    y = table[:, -1].long()
    limit = int(torch.bincount(y).min()) - 1
    if not 1 <= test_per_class <= limit:
        raise ConfigError(
            f"`test_per_class` of digits must be between 1 and {limit}, got {test_per_class}"
        )
    pool, test = hold_out(Shard(x, y), [test_per_class] * 10, stream(0, "digits", "test"))
    return Dataset(pool=pool, test=test, class_names=tuple(str(c) for c in range(10)))


def _read_table() -> NDArray[np.float64]:
    """Return a row per image, 64 pixels and the label, from the file in scikit-learn."""
    # The function `load_digits` reads the same file, but to import it takes as long as a short run.
    spec = find_spec("sklearn")
    assert spec is not None
    assert spec.origin is not None
    return np.loadtxt(Path(spec.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")


def breast_cancer(*, test_share: float = 0.25) -> Dataset:
    """Load the tumours: malignant (0) or benign (1).

    Returns:
        The data set; features are float32 [n, 30], standardised over the pool.
    """
    from sklearn.datasets import load_breast_cancer  # slow to import

    table = load_breast_cancer()
    return dataset(
        table.data,
        table.target,
        class_names=table.target_names.tolist(),
        test_share=test_share,
        standardise=True,
    )


def diabetes(*, test_share: float = 0.25) -> Dataset:
    """Load the patients.

    Returns:
        The data set. Features are float32 [n, 10], standardised over the pool: age, sex, body mass
        index, blood pressure, six of serum. The target is the progression after a year, minus its
        mean and in standard deviations over all patients.
    """
    from sklearn.datasets import load_diabetes  # slow to import

    table = load_diabetes(scaled=False)
    y = (table.target - table.target.mean()) / table.target.std()
    return dataset(table.data, y, numbers=True, test_share=test_share, standardise=True)

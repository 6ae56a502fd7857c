"""The progression of diabetes, a number to be told, that comes with scikit-learn: 442 patients, no download.

Efron, Hastie, Johnstone and Tibshirani, "Least Angle Regression" (2004).
"""

from fedcb2o.data._dataset import Dataset
from fedcb2o.data.array_dataset import dataset

__all__ = ["diabetes"]


def diabetes(*, test_share: float = 0.25) -> Dataset:
    """The patients, a share `test_share` of whom is in the test set, the same for every seed of a run.

    Features are float32 [n, 10], standardised over the pool: age, sex, body mass index, blood pressure, six of serum.
    The number is the progression after a year, less its mean and in standard deviations over all patients.
    """
    from sklearn.datasets import load_diabetes  # slow to import, and needed by nobody else

    table = load_diabetes(scaled=False)
    y = (table.target - table.target.mean()) / table.target.std()
    return dataset(table.data, y, numbers=True, test_share=test_share, standardise=True)

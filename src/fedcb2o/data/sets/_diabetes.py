"""Progression of diabetes: a regression on 442 patients, from scikit-learn, no download.

Efron, Hastie, Johnstone and Tibshirani, "Least Angle Regression" (2004).

Example:
    >>> diabetes().num_outputs
    1
"""

from fedcb2o.data._dataset import Dataset
from fedcb2o.data.inputs import dataset


def diabetes(*, test_share: float = 0.25) -> Dataset:
    """Load the patients.

    Args:
        test_share: Share of patients in the test set, which is the same for every seed.

    Returns:
        The data set. Features are float32 [n, 10], standardised over the pool: age, sex, body mass
        index, blood pressure, six of serum. The target is the progression after a year, minus its
        mean and in standard deviations over all patients.
    """
    from sklearn.datasets import load_diabetes  # slow to import

    table = load_diabetes(scaled=False)
    y = (table.target - table.target.mean()) / table.target.std()
    return dataset(table.data, y, numbers=True, test_share=test_share, standardise=True)

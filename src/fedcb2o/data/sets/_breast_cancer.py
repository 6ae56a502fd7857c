"""Breast cancer in Wisconsin, a table that comes with scikit-learn: 569 tumours, 30 features each, no download.

Street, Wolberg and Mangasarian, "Nuclear feature extraction for breast tumor diagnosis" (1993).
"""

from fedcb2o.data._dataset import Dataset
from fedcb2o.data.array_dataset import dataset

__all__ = ["breast_cancer"]


def breast_cancer(*, test_share: float = 0.25) -> Dataset:
    """The tumours, with a share `test_share` of both classes, malignant (0) and benign (1), in the test set.

    Features are float32 [n, 30], standardised over the pool. The test set is the same for every seed of a run.
    """
    from sklearn.datasets import load_breast_cancer  # slow to import, and needed by nobody else

    table = load_breast_cancer()
    return dataset(
        table.data,
        table.target,
        class_names=table.target_names.tolist(),
        test_share=test_share,
        standardise=True,
    )

"""Breast cancer in Wisconsin: 569 tumours with 30 features, from scikit-learn, no download.

Street, Wolberg and Mangasarian, "Nuclear feature extraction for breast tumor diagnosis" (1993).

Example:
    >>> breast_cancer().class_names
    ('malignant', 'benign')
"""

from fedcb2o.data._dataset import Dataset
from fedcb2o.data.inputs import dataset


def breast_cancer(*, test_share: float = 0.25) -> Dataset:
    """Load the tumours: malignant (0) or benign (1).

    Args:
        test_share: Share of both classes in the test set, which is the same for every seed.

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

"""Membership inference: whether the loss of a model on a sample tells that it was trained on it.

The attack scores each sample by minus its loss (Yeom et al., 2018). It is measured by its AUC, the
probability that a training sample has a higher score than another sample, and by its true positive
rate at 1% false positives (Carlini et al., 2022).

>>> import numpy as np
>>> attack_auc(np.array([2.0, 3.0]), np.array([1.0, 2.0]))
0.875
"""

import numpy as np
from jaxtyping import Float
from scipy.stats import rankdata

FALSE_POSITIVES = 0.01
"""Rate of false positives at which true positives are counted."""


def attack_auc(members: Float[np.ndarray, " n"], others: Float[np.ndarray, " m"]) -> float:
    """Compute the area under the ROC curve of an attack.

    Args:
        members: Scores of training samples.
        others: Scores of samples that were not trained on.

    Returns:
        The area in [0, 1]; 0.5 for an attack that guesses. Equal scores count half.
    """
    ranks = rankdata(np.concatenate([members, others]))
    n = len(members)
    return float((ranks[:n].sum() - n * (n + 1) / 2) / (n * len(others)))


def true_positive_rate(members: Float[np.ndarray, " n"], others: Float[np.ndarray, " m"]) -> float:
    """Compute the true positive rate at 1% false positives.

    Args:
        members: Scores of training samples.
        others: Scores of samples that were not trained on. Below 100 of them, no false positive is
            allowed.

    Returns:
        Share of training samples above the threshold.
    """
    allowed = int(FALSE_POSITIVES * len(others))
    threshold = np.sort(others)[::-1][allowed]
    return float((members > threshold).mean())

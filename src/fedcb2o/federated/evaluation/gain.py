"""Gain over training alone: difference of two models' accuracies on the same samples.

The interval is that of Bonett and Price (2012) for paired proportions: with b samples that only the
first model predicts correctly, and c that only the second one does, p = (b + 1) / (n + 2) and
q = (c + 1) / (n + 2), it is p - q plus and minus z sqrt((p + q - (p - q)^2) / (n + 2)).

>>> import numpy as np
>>> gain = paired_gain(np.ones(100, bool), np.arange(100) < 80)
>>> f"{gain.difference:.2f} [{gain.low:.3f}, {gain.high:.3f}]"
'0.20 [0.114, 0.278]'
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

_QUANTILE = 1.959964  # of the normal distribution, for intervals of 95%
_MIN_TRAINED_SHARE = 0.9  # of the rounds that the model alone trained, for a fair comparison


@dataclass(frozen=True)
class Gain:
    """Accuracy of a model and of the model trained alone, on the same samples.

    `low` and `high` are the ends of the 95% interval of the difference.
    """

    samples: int
    accuracy: float
    alone: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        """Accuracy of the model minus that of the model trained alone."""
        return self.accuracy - self.alone

    def is_loss(self, count: int) -> bool:
        """Return whether the difference is significantly below 0 as one of `count` differences."""
        # The interval is widened to the level of Bonferroni's correction.
        center = self.difference * self.samples / (self.samples + 2)
        quantile = NormalDist().inv_cdf(1 - 0.025 / count)
        return center + (self.high - center) * quantile / _QUANTILE < 0


def mean_gain(gains: Sequence[Gain]) -> Gain:
    """Average gains of several rounds on the same samples, at least one.

    The number of samples is that of the last gain.

    Example:
        >>> mean_gain([Gain(8, 0.75, 0.5, -0.25, 0.75), Gain(8, 0.5, 0.5, -0.5, 0.5)])
        Gain(samples=8, accuracy=0.625, alone=0.5, low=-0.375, high=0.625)
    """
    # The standard error of a mean is at most the mean of the standard errors, however much the
    # rounds depend on each other. The mean of the intervals therefore covers at least as often as
    # they do.
    names = ("accuracy", "alone", "low", "high")
    means = (fmean(getattr(gain, name) for gain in gains) for name in names)
    return Gain(gains[-1].samples, *means)


def is_comparable(alone_rounds: int | None, rounds: int) -> bool:
    """Return whether the model alone has trained about as many rounds as the averaged models.

    True from nine tenths of the rounds on, or if `alone_rounds` was not recorded (None).

    Example:
        >>> is_comparable(6, 92), is_comparable(83, 92)
        (False, True)
    """
    # A member that joined late, or skipped rounds, trained fewer rounds than the others.
    return alone_rounds is None or alone_rounds >= _MIN_TRAINED_SHARE * rounds


def paired_gain(correct: Bool[np.ndarray, " n"], alone: Bool[np.ndarray, " n"]) -> Gain:
    """Compute the gain of a model over the model trained alone, with its 95% interval.

    The arrays tell whether each sample is predicted correctly; n is at least 1.
    """
    n = len(correct)
    first = (int(np.count_nonzero(correct & ~alone)) + 1) / (n + 2)
    second = (int(np.count_nonzero(alone & ~correct)) + 1) / (n + 2)
    difference = first - second
    half = _QUANTILE * math.sqrt((first + second - difference**2) / (n + 2))
    low = max(-1.0, difference - half)
    high = min(1.0, difference + half)
    return Gain(n, float(correct.mean()), float(alone.mean()), low, high)


def gain_record(
    correct: Bool[np.ndarray, " n"],
    alone: Bool[np.ndarray, " n"],
    labels: Int[np.ndarray, " n"],
    class_names: Sequence[str],
) -> dict[str, Any]:
    """Return the gain over all samples and by class, for a record.

    "gain" is that over all samples, and "class_gains" has those of classes with samples, by name.
    The record is empty without samples.
    """
    if not len(labels):
        return {}
    classes = {}
    for label, name in enumerate(class_names):
        is_class = labels == label
        if is_class.any():
            classes[name] = asdict(paired_gain(correct[is_class], alone[is_class]))
    return {"gain": asdict(paired_gain(correct, alone)), "class_gains": classes}

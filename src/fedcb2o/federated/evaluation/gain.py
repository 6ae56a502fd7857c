"""Gain over training alone: difference of two models' accuracies on the same samples.

The interval is that of Bonett and Price (2012) for paired proportions: with b samples that only the
first model predicts correctly, and c that only the second one does, p = (b + 1) / (n + 2) and
q = (c + 1) / (n + 2), it is p - q plus and minus z sqrt((p + q - (p - q)^2) / (n + 2)).
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
    """Accuracy of a model and of one trained alone, with a 95% interval of the difference."""

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
    """Average gains of rounds on the same samples, of which the last one's number counts."""
    # The standard error of a mean is at most the mean of the standard errors, however much the
    # rounds depend on each other. The mean of the intervals therefore covers at least as often as
    # they do.
    names = ("accuracy", "alone", "low", "high")
    means = (fmean(getattr(gain, name) for gain in gains) for name in names)
    return Gain(gains[-1].samples, *means)


def is_comparable(alone_rounds: int | None, rounds: int) -> bool:
    """Return whether the model alone trained nine tenths of the rounds; True if not recorded."""
    # A member that joined late, or skipped rounds, trained fewer rounds than the others.
    return alone_rounds is None or alone_rounds >= _MIN_TRAINED_SHARE * rounds


def paired_gain(correct: Bool[np.ndarray, " n"], alone: Bool[np.ndarray, " n"]) -> Gain:
    """Compute the gain over the model trained alone, by which samples each predicts correctly."""
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
    """Return "gain" over all samples and "class_gains" by name, or nothing without samples."""
    if not len(labels):
        return {}
    classes = {}
    for label, name in enumerate(class_names):
        is_class = labels == label
        if is_class.any():
            classes[name] = asdict(paired_gain(correct[is_class], alone[is_class]))
    return {"gain": asdict(paired_gain(correct, alone)), "class_gains": classes}

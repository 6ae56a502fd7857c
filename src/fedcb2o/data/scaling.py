"""Scales of features: per agent, or agreed among agents that keep their samples.

Example:
    >>> north, south = torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0]])
    >>> agreed = Scaler.agree([Scaler.fit(north), Scaler.fit(south)])
    >>> agreed.mean, agreed.variance * 3
    (tensor([2.], dtype=torch.float64), tensor([8.], dtype=torch.float64))
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from fedcb2o.data._dataset import features
from fedcb2o.errors import DataError


@dataclass(frozen=True)
class Scaler:
    """Mean and variance of each feature, which scale samples to mean 0 and deviation 1.

    Attributes:
        count: Number of samples.
        mean: Mean of each feature.
        variance: Mean squared deviation of each feature; a feature with variance 0 is not scaled.
    """

    count: int
    mean: Float[Tensor, "*features"]
    variance: Float[Tensor, "*features"]

    @classmethod
    def fit(cls, x: Shaped[Tensor, "n *features"]) -> "Scaler":
        """Return the scaler of some samples.

        Args:
            x: Samples, at least one; pixels (uint8) count as divided by 255.

        Returns:
            Their number, mean and variance, in float64.

        Raises:
            DataError: There are no samples, or values that are not finite.
        """
        values = features(torch.as_tensor(x)).double()
        if not len(values) or not values.isfinite().all():
            raise DataError("a scaler needs samples, and finite values")
        return cls(len(values), values.mean(0), values.var(0, correction=0))

    @classmethod
    def agree(cls, scalers: "Sequence[Scaler]") -> "Scaler":
        """Return the scaler of all samples together, from the scalers of several agents.

        An agent that lies about its own moves the result: where agents may be malicious, let each
        scale its own (`standardise="owner"`).

        Args:
            scalers: One for each agent, of the same features.

        Returns:
            The scaler that `fit` returns for the samples of all agents, to rounding.

        Raises:
            DataError: There are none, or they have different features.
        """
        if len({scaler.mean.shape for scaler in scalers}) != 1:
            raise DataError("scalers to agree on must have the same features, one or more agents")
        counts = torch.tensor([scaler.count for scaler in scalers], dtype=torch.float64)
        shares = (counts / counts.sum()).reshape(-1, *[1] * scalers[0].mean.ndim)
        means = torch.stack([scaler.mean for scaler in scalers])
        mean = (shares * means).sum(0)
        within = torch.stack([scaler.variance for scaler in scalers])
        variance = (shares * (within + (means - mean).square())).sum(0)
        return cls(int(counts.sum()), mean, variance)

    def __call__(self, x: Shaped[Tensor, "n *features"]) -> Float[Tensor, "n *features"]:
        """Return scaled samples, in float32."""
        if x.shape[1:] != self.mean.shape:
            raise DataError(
                f"the scaler has features of shape {tuple(self.mean.shape)}, and the samples"
                f" {tuple(x.shape[1:])}"
            )
        divisor = torch.where(self.variance > 0, self.variance.sqrt(), 1.0)
        return ((features(x).double() - self.mean) / divisor).float()

"""The normal distribution of an ensemble of consensus hopping.

Step size and covariance follow Hansen ("The CMA Evolution Strategy: A Tutorial", arXiv 1604.00772).
"""

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_START_STEP = 0.25  # first step size, relative to the widths of the box
_LARGEST_RADIUS = 0.5  # largest standard deviation of the particles, relative to the box
_MAX_FULL = 100  # coordinates from which the covariance is diagonal


class Cloud:
    """The normal distribution N(0, s^2 C) of the particles about m, in units of the box."""

    def __init__(self, dim: int, count: int, step: float = _START_STEP) -> None:
        """Start with the identity as C, for `count` particles in the better half."""
        weights = math.log(count + 0.5) - np.log(np.arange(1, count + 1))
        self.weights = weights / weights.sum()
        self.step = step
        self.generation = 0
        self._is_full = dim <= _MAX_FULL
        self._root = np.eye(dim) if self._is_full else np.ones(dim)
        self._inverse_root = self._root
        self._covariance = self._root
        self._path = np.zeros(dim)
        self._step_path = np.zeros(dim)

        # Learning rates of the tutorial, with the effective number of particles.
        number = 1 / float(np.square(self.weights).sum())
        self._number = number
        self._path_rate = (4 + number / dim) / (dim + 4 + 2 * number / dim)
        self._step_rate = (number + 2) / (dim + number + 5)
        one = 2 / ((dim + 1.3) ** 2 + number)
        many = min(1 - one, 2 * (number - 2 + 1 / number) / ((dim + 2) ** 2 + number))
        faster = 1.0 if self._is_full else (dim + 2) / 3
        self._one_rate = min(0.5, one * faster)
        self._many_rate = max(0.0, min(1 - self._one_rate, many * faster))
        excess = math.sqrt(max(0.0, (number - 1) / (dim + 1))) - 1
        self._damping = 1 + 2 * max(0.0, excess) + self._step_rate
        self._mean_length = math.sqrt(dim) * (1 - 1 / (4 * dim) + 1 / (21 * dim**2))
        self.longest = math.sqrt(dim) + 2 * dim / (dim + 2)

    def stretch(self, normals: Array) -> Array:
        """Turn standard normals [n, d] into offsets [n, d] from m."""
        if self._is_full:
            return self.step * (normals @ self._root.T)
        return self.step * normals * self._root

    @property
    def radius(self) -> float:
        """Largest standard deviation, in units of the box."""
        if self._is_full:
            return float(self.step * np.linalg.norm(self._root, axis=0).max())
        return float(self.step * self._root.max())

    def whiten(self, offset: Array) -> Array:
        """Divide an offset [d] by the standard deviations."""
        return self._invert(offset) / self.step

    def update(self, offsets: Array) -> Array:
        """Adapt s and C to the better half of a generation.

        `offsets` are its particles relative to m, best first, in units of the box.
        """
        moves = offsets / self.step
        length = np.linalg.norm(self._invert(moves), axis=1, keepdims=True)
        # Malicious particles may be anywhere. A cut length bounds their effect on s and C.
        moves = moves * np.minimum(1.0, self.longest / length.clip(1e-300))
        move = self.weights @ moves

        # 1. The step size grows if consecutive moves of m agree.
        self.generation += 1
        whitened = self._invert(move)
        rate = self._step_rate
        self._step_path *= 1 - rate
        self._step_path += math.sqrt(rate * (2 - rate) * self._number) * whitened
        length = float(np.linalg.norm(self._step_path))
        settled = math.sqrt(1 - (1 - rate) ** (2 * self.generation))
        is_short = length / settled < (1.4 + 2 / (len(move) + 1)) * self._mean_length

        # 2. The covariance learns the path of m and the shape of the better half.
        rate = self._path_rate
        self._path *= 1 - rate
        if is_short:
            self._path += math.sqrt(rate * (2 - rate) * self._number) * move
        kept = 1 - self._one_rate - self._many_rate
        if not is_short:
            kept += self._one_rate * rate * (2 - rate)
        if self._is_full:
            one: Array = np.outer(self._path, self._path)
            many: Array = (moves.T * self.weights) @ moves
        else:
            one = self._path**2
            many = self.weights @ moves**2
        self._covariance = kept * self._covariance + self._one_rate * one + self._many_rate * many
        moved: Array = self.step * move
        self.step *= math.exp(
            min(1.0, self._step_rate / self._damping * (length / self._mean_length - 1))
        )
        self._factor()
        self.step *= min(1.0, _LARGEST_RADIUS / self.radius)
        return moved

    def _invert(self, offsets: Array) -> Array:
        """Multiply offsets [..., d] by the inverse root of C."""
        if self._is_full:
            return offsets @ self._inverse_root.T
        return offsets * self._inverse_root

    def _factor(self) -> None:
        """Compute roots of C, with a bounded condition number."""
        if not self._is_full:
            self._covariance = self._covariance.clip(self._covariance.max() * 1e-14)
            self._root = np.sqrt(self._covariance)
            self._inverse_root = 1 / self._root
            return
        values, vectors = np.linalg.eigh((self._covariance + self._covariance.T) / 2)
        roots = np.sqrt(values.clip(values.max() * 1e-14))
        self._root = vectors * roots
        self._inverse_root = (vectors / roots).T

"""The problem of most tests: L is least on the unit circle, G at (2, 0)."""

import functools

import torch

import fedcb2o
from fedcb2o.particles.objectives import circle, paraboloid

G = paraboloid(2.0, 0.0)
minimize_on_circle = functools.partial(fedcb2o.minimize, circle, G, 2)


def double(values):
    """Return a float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)

"""Numerical kernels: devices, convolutions, dense layers, and the choice between them."""

from fedcb2o.kernels.dispatch import by

__all__ = ["by"]

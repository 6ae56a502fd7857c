"""Numerical kernels: devices, convolutions, dense layers, and the choice between them."""

from fedcb2o.kernels import devices
from fedcb2o.kernels.dispatch import use_kernels

__all__ = ["devices", "use_kernels"]

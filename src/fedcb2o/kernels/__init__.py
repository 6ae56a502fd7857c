"""Numerical kernels: devices, convolutions, dense layers, and the choice between them."""

from fedcb2o.kernels import autotune, devices, onednn
from fedcb2o.kernels.dispatch import use_kernels

__all__ = ["autotune", "devices", "onednn", "use_kernels"]

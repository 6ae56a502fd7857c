"""Numerical kernels: devices, convolutions, dense layers, and the choice between them."""

from fedcb2o.kernels.dispatch import use_kernels

__all__ = ["use_kernels"]

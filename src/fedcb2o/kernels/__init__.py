"""Numerical kernels: devices, convolutions, dense layers, and the choice between them."""

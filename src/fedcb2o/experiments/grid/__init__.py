"""Grids: every defence against every attack in every setting, over one experiment."""

from fedcb2o.experiments.grid._definition import Cell, Grid
from fedcb2o.experiments.grid._eta import GridProgress
from fedcb2o.experiments.grid._grid_runner import GridResult, bench
from fedcb2o.experiments.grid._loading import grids, load_grid

__all__ = ["Cell", "Grid", "GridProgress", "GridResult", "bench", "grids", "load_grid"]

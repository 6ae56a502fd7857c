"""Grids: every defence against every attack in every setting, over one experiment."""

from fedcb2o.experiments.grid.definition import Cell, Grid
from fedcb2o.experiments.grid.eta import GridProgress
from fedcb2o.experiments.grid.grid_runner import GridResult, bench
from fedcb2o.experiments.grid.loading import grids, load_grid

__all__ = ["Cell", "Grid", "GridProgress", "GridResult", "bench", "grids", "load_grid"]

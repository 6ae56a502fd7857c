"""Fixtures of the tests of reports."""

import pytest
from markupsafe import Markup
from matplotlib.figure import Figure

from fedcb2o.report import grid_page, page


@pytest.fixture
def no_figures(monkeypatch):
    """Replace the drawing of figures, which takes most of the time of a report."""

    def draw_nothing(*arguments, **options):
        return Figure(figsize=(1, 1))

    for module in (page, grid_page):
        monkeypatch.setattr(module, "to_png", lambda figure: b"")
    monkeypatch.setattr(page, "draw_panels", draw_nothing)
    monkeypatch.setattr(page, "figure_row", lambda figures, name: Markup())
    monkeypatch.setattr(grid_page, "draw_heat_map", draw_nothing)

"""Fixtures of the tests of reports."""

import pytest
from markupsafe import Markup
from matplotlib.figure import Figure

from fedcb2o.report import _grid_page, _page


@pytest.fixture
def no_figures(monkeypatch):
    """Replace the drawing of figures, which takes most of the time of a report."""

    def draw_nothing(*arguments, **options):
        return Figure(figsize=(1, 1))

    for module in (_page, _grid_page):
        monkeypatch.setattr(module, "to_png", lambda figure: b"")
    monkeypatch.setattr(_page, "draw_panels", draw_nothing)
    monkeypatch.setattr(_page, "figure_row", lambda figures, name: Markup())
    monkeypatch.setattr(_grid_page, "draw_heat_map", draw_nothing)

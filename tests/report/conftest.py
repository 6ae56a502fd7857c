"""Fixtures of the tests of reports."""

import pytest
from markupsafe import Markup
from matplotlib.figure import Figure

from fedcb2o.report import _article, _grid_page, _page, _statistics


@pytest.fixture(scope="module")
def intervals_of_two_seeds():
    """Show intervals from two seeds, which are easy to calculate by hand; reports need five."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_statistics, "MIN_SEEDS", 2)
        yield


@pytest.fixture
def set_min_seeds(monkeypatch):
    """Set the number of seeds that an interval needs."""
    return lambda number: monkeypatch.setattr(_statistics, "MIN_SEEDS", number)


@pytest.fixture
def no_figures(monkeypatch):
    """Replace the drawing of figures, which takes most of the time of a report."""

    def draw_nothing(*arguments, **options):
        return Figure(figsize=(1, 1))

    monkeypatch.setattr(_page, "to_file", lambda figure, suffix: b"")
    monkeypatch.setattr(_page, "draw_panels", draw_nothing)
    monkeypatch.setattr(_page, "figure_row", lambda figures, name: Markup())
    for module in (_article, _grid_page):
        monkeypatch.setattr(module, "draw_heat_map", draw_nothing)

"""Fixtures of the tests of reports."""

import pytest

from fedcb2o.report import _statistics


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

"""Settings of all tests: one thread, no display, the default handler of Ctrl-C."""

import gc
import itertools
import logging
import os
import signal
import sys
import warnings

# The garbage collector is off until the tests are collected. Modules and tests stay, so that no
# collection needs to examine them.
gc.disable()

# Before torch and numpy are first imported, here and in every process that a test starts.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"
os.environ["MPLBACKEND"] = "Agg"

# A background job or cron starts the tests with SIGINT ignored, which all processes would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

from tests.type_checks import CHECKED_PACKAGES, VARIABLE, install

if os.environ.get(VARIABLE):  # `make typecheck-runtime`
    install(CHECKED_PACKAGES)

import pytest
from hypothesis import settings
from markupsafe import Markup
from matplotlib.figure import Figure

import fedcb2o  # noqa: F401  (its settings of MKL come before the first product)
from fedcb2o.report import _article, _grid_page, _page

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Flower needs an older typer, which reads a former name
    from tests.tiny import save_time

save_time()

# The machine may be busy: pytest-timeout is the only clock. The same examples in every run, and no
# folder of examples.
settings.register_profile("steady", deadline=None, derandomize=True, database=None, max_examples=25)
settings.load_profile("steady")


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "quick: a test of a Ray cluster that continuous integration runs"
    )


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def process_state(tmp_path_factory):
    """Restore what code of a user may change in the process: log level, imported modules."""
    logger = logging.getLogger("fedcb2o")
    level = logger.level
    last = next(reversed(sys.modules))
    yield
    logger.setLevel(level)
    # `sys.modules` is in the order of imports: modules that the test imported come after `last`.
    for name in list(itertools.takewhile(last.__ne__, reversed(sys.modules))):
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(tmp_path_factory.getbasetemp())):
            del sys.modules[name]


@pytest.fixture
def no_figures(monkeypatch):
    """Replace the drawing of figures, which takes most of the time of a report."""

    def draw_nothing(*arguments, **options):
        return Figure(figsize=(1, 1))

    monkeypatch.setattr(_page, "to_file", lambda figure, suffix: b"")
    for module in (_article, _page):
        monkeypatch.setattr(module, "draw_panels", draw_nothing)
    monkeypatch.setattr(_page, "figure_row", lambda figures, name: Markup())
    for module in (_article, _grid_page):
        monkeypatch.setattr(module, "draw_heat_map", draw_nothing)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark tests that need a Ray cluster as slow: its processes take half a minute to start."""
    for item in items:
        if "cluster" in item.fixturenames:
            item.add_marker(pytest.mark.slow)

"""Settings of all tests: one thread, no display, the default handler of Ctrl-C."""

import os
import signal

# Before torch and numpy are first imported, here and in every process that a test starts.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"
os.environ["MPLBACKEND"] = "Agg"

# A background job or cron starts the tests with SIGINT ignored, which all processes would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

from tests.type_checks import CHECKED_PACKAGES, VARIABLE, install

if os.environ.get(VARIABLE):  # `make typecheck-runtime`
    install(CHECKED_PACKAGES)

from hypothesis import settings

# The machine may be busy: pytest-timeout is the only clock. The same examples in every run, and no
# folder of examples.
settings.register_profile("steady", deadline=None, derandomize=True, database=None)
settings.load_profile("steady")

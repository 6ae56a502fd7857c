"""What holds for all tests: one thread, no display, and shapes and types checked at run time."""

import os

# Before torch and numpy are first imported, here and in every process that a test starts.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"
os.environ["MPLBACKEND"] = "Agg"

import jaxtyping

# Before the package is first imported: it checks the annotations of whatever is imported after it.
jaxtyping.install_import_hook("fedcb2o", "beartype.beartype")

from hypothesis import settings

# The machine may be busy: pytest-timeout is the only clock. The same examples every time, and no folder of them.
settings.register_profile("steady", deadline=None, derandomize=True, database=None)
settings.load_profile("steady")

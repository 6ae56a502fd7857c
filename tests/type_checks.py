"""Run-time checks of types and shapes, by jaxtyping's import hook and beartype.

`make typecheck-runtime` runs the tests of the core packages with them. They take half of the
time of these tests, so that `make test` runs only `test_type_checks.py`.
"""

from collections.abc import Sequence

import jaxtyping

VARIABLE = "FEDCB2O_TYPECHECK"
CHECKED_PACKAGES = ("fedcb2o.consensus", "fedcb2o.federated", "fedcb2o.nn", "fedcb2o.particles")


def install(packages: Sequence[str]) -> None:
    """Check the annotations of packages that are imported from now on."""
    jaxtyping.install_import_hook(packages, "beartype.beartype")

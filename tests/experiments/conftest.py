"""What several tests of runs on a cluster use."""

import jaxtyping
import pytest


@pytest.fixture(scope="module")
def cluster():
    """Ray on this machine with four processors, which the runs of a module use."""
    from fedcb2o.ray_backend import connect

    jaxtyping.config.update("jaxtyping_disable", True)
    with connect.connected(connect.LOCAL, 200 * 2**20, 4):
        yield connect.LOCAL
    jaxtyping.config.update("jaxtyping_disable", False)

"""What several tests of runs on a cluster use."""

import pytest


@pytest.fixture(scope="module")
def cluster():
    """Ray on this machine with four processors, which the runs of a module use."""
    from fedcb2o.ray_backend import _connect

    with _connect.connected(_connect.LOCAL, 200 * 2**20, 4):
        yield _connect.LOCAL

"""Fixtures for tests of runs on a cluster."""

import pytest


@pytest.fixture(scope="module")
def cluster():
    """Start Ray on this machine with four processors, shared by the tests of a module."""
    from fedcb2o.ray_backend import _connect

    with _connect.connected(_connect.LOCAL, 200 * 2**20, 4):
        yield _connect.LOCAL


@pytest.fixture
def forbid_cluster(monkeypatch):
    """Return a function that lets the test fail where a cluster is joined afterwards."""
    from fedcb2o.ray_backend import _connect

    def forbid():
        monkeypatch.setattr(_connect, "connected", lambda *_: pytest.fail("a cluster was joined"))

    return forbid

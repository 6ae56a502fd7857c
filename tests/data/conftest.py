"""Download tests without a proxy: the server is on this machine."""

import pytest


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")

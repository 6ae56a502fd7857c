import warnings

import pytest

import fedcb2o


@pytest.fixture(autouse=True)
def without_capture_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedcb2o.CaptureWarning)
        yield

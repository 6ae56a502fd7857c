"""Import of the Flower module without Flower."""

import importlib
from importlib.util import find_spec

import pytest


@pytest.mark.skipif(find_spec("flwr") is not None, reason="Flower is here")
def test_the_error_names_the_extra():
    with pytest.raises(ModuleNotFoundError, match=r"fedcb2o\[flower\]"):
        importlib.import_module("fedcb2o.flower")

"""Run-time type checks: they refuse a wrong dtype, and a run of the core packages passes them."""

import subprocess
import sys

PROGRAM = """
from tests.type_checks import CHECKED_PACKAGES, install

install(CHECKED_PACKAGES)

import tempfile

import jaxtyping
import torch

from fedcb2o import consensus, run
from tests.tiny import tiny

try:
    consensus.quantile(torch.zeros(2, dtype=torch.int64), 0.5)
except jaxtyping.TypeCheckError:
    pass
else:
    raise AssertionError("integers passed as floating point numbers")

with tempfile.TemporaryDirectory() as folder:
    run(tiny(rounds=1), out=folder, workers=1)
"""


def test_type_checks_refuse_a_wrong_dtype_and_pass_a_round():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)

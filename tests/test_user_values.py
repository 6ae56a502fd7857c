"""Conversion of users' values: numbers of all types become tensors, other values are refused."""

import decimal
import fractions

import numpy as np
import pandas as pd
import pytest
import torch

from fedcb2o.errors import ConfigError
from fedcb2o.user_values import to_tensor

MASKED = np.ma.masked


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        (2, torch.int64, 2),
        (True, torch.bool, True),
        (MASKED, torch.float64, None),
        (np.float32(0.5), torch.float32, 0.5),
        (np.array([1, 2], ">i2"), torch.int16, [1, 2]),
        (np.array([1, 2], np.uint16), torch.int64, [1, 2]),
        (np.array([2**63], np.uint64), torch.float64, [2.0**63]),
        (np.array([1, 2], np.longdouble), torch.float64, [1, 2]),
        (np.array([0.5], ">f4"), torch.float32, [0.5]),
        (np.ma.array([1, 2], mask=[0, 1]), torch.float64, [1, None]),
        (np.ma.array([True, False], mask=[1, 0]), torch.float64, [None, 0]),
        (np.ma.array([0.5, 2], mask=[0, 1], dtype=np.float32), torch.float32, [0.5, None]),
        (np.ma.array([0.5, 2], mask=[0, 1], dtype=">f8"), torch.float64, [0.5, None]),
        ([1.5, MASKED], torch.float64, [1.5, None]),
        ([[1, MASKED], (2, 3)], torch.float64, [[1, None], [2, 3]]),
        ([np.ma.array([1, 2], mask=[0, 1]), np.arange(2)], torch.float64, [[1, None], [0, 1]]),
        (pd.Series([1, None], dtype="Int64"), torch.float64, [1, None]),
        (pd.Series([True, None], dtype="boolean"), torch.float64, [1, None]),
        (pd.DataFrame({"a": [1, 2], "b": [0.5, 1]}), torch.float64, [[1, 0.5], [2, 1]]),
        ([1, pd.NA, None], torch.float64, [1, None, None]),
        ([fractions.Fraction(1, 4), decimal.Decimal("0.5"), 10**30], torch.float64, [0.25, 0.5, 1e30]),
        ([torch.tensor(1), torch.tensor(2.5, requires_grad=True)], torch.float64, [1, 2.5]),
        ([torch.ones(1, dtype=torch.bfloat16)], torch.float64, [[1]]),
        (torch.tensor([1, 2]), torch.int64, [1, 2]),
        ([], torch.float64, []),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_numbers_become_a_tensor(values, dtype, expected):
    """None in `expected` stands for NaN."""
    tensor = to_tensor("f returned", values)
    assert tensor.dtype == dtype
    target = torch.tensor(np.array(expected, float))
    torch.testing.assert_close(tensor.double(), target, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a"], "f returned words; expected real numbers"),
        ([b"1"], "f returned words"),
        (np.array(["1"], object), "f returned a ndarray, .*'1' is not a real number"),
        (np.array([1j], object), "f returned a ndarray, .* is not a real number"),
        ([1j], "f returned complex numbers: take the real part or the absolute value"),
        (torch.tensor(1j), "f returned a complex tensor"),
        (torch.eye(2).to_sparse(), "f returned a sparse tensor"),
        (np.array(["2020"], "M8[D]"), "f returned dates"),
        (np.array([3], "m8[D]"), "f returned durations"),
        (np.zeros(2, [("a", float)]), "f returned records with several fields"),
        ([[1], [1, 2]], "f returned a list, expected an array of numbers"),
        ({"a": 1}, "f returned a dict, expected"),
        (None, "f returned None, expected numbers: is a `return` missing"),
        ((x for x in [1.0]), "f returned a generator, expected"),
        ([10**400], "f returned a list, .*too large"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_values_that_are_not_numbers_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        to_tensor("f returned", values)


def test_arrays_are_copied():
    values = np.array([[1.0, 2.0], [3.0, 4.0]])
    tensor = to_tensor("f returned", values.T)
    values[:] = 0
    assert tensor.tolist() == [[1, 3], [2, 4]]
    assert tensor.is_contiguous()

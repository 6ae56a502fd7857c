"""What is received: refused for each of its faults, and believed up to what the terms allow."""

import math

import numpy as np
import pytest
import torch
from tests.tiny import empty_models

from fedcb2o.federated import (
    MAX_VALUE,
    Message,
    admission,
    is_admissible,
    max_abs,
    rejection_reason,
)
from fedcb2o.rng import stream

DIM = 6


def message(theta=None, num_samples=20.0, round=3):
    return Message(torch.ones(DIM) if theta is None else theta, num_samples, round)


def with_one(value):
    theta = torch.zeros(DIM)
    theta[2] = value
    return theta


@pytest.mark.parametrize("num_samples", [0.0, 1.0, 20.5, 1e12])
@pytest.mark.parametrize(
    "theta", [torch.ones(DIM), with_one(MAX_VALUE), with_one(-MAX_VALUE), torch.zeros(DIM)]
)
def test_what_is_in_order_is_received(theta, num_samples):
    assert rejection_reason(message(theta, num_samples), dim=DIM, n=3) == ""


REFUSED = {
    "too short": (
        message(torch.ones(DIM - 1)),
        r"its model has type torch.float32 and shape \(5,\), expected float32",
    ),
    "too long": (message(torch.ones(DIM + 1)), r"shape \(7,\), expected float32 and \(6,\)"),
    "a matrix": (message(torch.ones(1, DIM)), r"shape \(1, 6\)"),
    "a number": (message(torch.tensor(1.0)), r"shape \(\)"),
    "empty": (message(torch.zeros(0)), r"shape \(0,\)"),
    "float64": (
        message(torch.ones(DIM).double()),
        r"its model has type torch.float64 and shape \(6,\)",
    ),
    "integers": (message(torch.ones(DIM).int()), "type torch.int32"),
    "complex": (message(torch.ones(DIM).to(torch.complex64)), "type torch.complex64"),
    "NaN": (
        message(with_one(math.nan)),
        "its model holds numbers that are not finite, or beyond 1e.06",
    ),
    "all NaN": (message(torch.full((DIM,), math.nan)), "not finite"),
    "infinite": (message(with_one(math.inf)), "not finite"),
    "minus infinity": (message(with_one(-math.inf)), "not finite"),
    "too large": (message(with_one(1.001 * MAX_VALUE)), "beyond 1e.06"),
    "too small": (message(with_one(-1.001 * MAX_VALUE)), "beyond 1e.06"),
    "of the round before": (message(round=2), "its model is of round 2, expected 3"),
    "of the next round": (message(round=4), "its model is of round 4, expected 3"),
    "claims less than nothing": (message(num_samples=-1.0), "it claims -1.0 samples"),
    "claims no number": (message(num_samples=math.nan), "it claims nan samples"),
    "claims infinitely many": (message(num_samples=math.inf), "it claims inf samples"),
    "claims a word": (message(num_samples="x"), "it claims 'x' samples"),
    "claims nothing": (message(num_samples=None), "it claims None samples"),
    "is sparse": (message(torch.zeros(DIM).to_sparse()), "it holds no dense tensor"),
    "is no tensor": (message([0.0] * DIM), "it holds no dense tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_is_refused_in_words(name):
    what, why = REFUSED[name]
    found = rejection_reason(what, dim=DIM, n=3)
    assert found
    assert "\n" not in found
    with pytest.raises(ValueError, match=why):
        raise ValueError(found)


ROWS = {
    "all": [0, 1, 2, 3, 4, 5, 6],
    "that follow each other": [2, 3, 4],
    "one": [5],
    "apart": [6, 0, 3],
    "backwards": [4, 3, 2],
    "twice": [1, 1, 2],
    "none": [],
}


@pytest.mark.parametrize("copied", [1, 30, 2**19])
@pytest.mark.parametrize("name", ROWS)
def test_extents_of_any_rows(name, copied, monkeypatch):
    """However many of them are looked at in one call."""
    monkeypatch.setattr(admission, "_NUMBERS_PER_CALL", copied)
    pool, rows = empty_models(7, 11), ROWS[name]
    pool.copy_(torch.from_numpy(stream(0, "pool").normal(size=(7, 11))))
    pool[3, 10], pool[4, 0], pool[6] = -1e30, math.nan, 0.0
    pool[5, 4] = -math.inf
    before = pool.clone()
    found = max_abs(pool, rows)
    expected = np.abs(pool[rows].double().numpy()).max(1, initial=0.0)
    assert found.dtype == np.float64
    assert found.shape == (len(rows),)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
    good = np.isfinite(expected)
    np.testing.assert_array_equal(found[good], expected[good])
    assert is_admissible(found).tolist() == [i not in (3, 4, 5) for i in rows]
    assert torch.equal(pool.nan_to_num(), before.nan_to_num())


def test_within_the_bound():
    assert is_admissible(
        np.array([0.0, MAX_VALUE, np.nextafter(MAX_VALUE, np.inf), np.inf, np.nan])
    ).tolist() == [
        *(True, True),
        *(False, False, False),
    ]

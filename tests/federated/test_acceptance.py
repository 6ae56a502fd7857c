"""Acceptance of received messages: reasons for refusal, and the bound on absolute values."""

import math

import numpy as np
import pytest
import torch
from tests.tiny import empty_models

from fedcb2o.federated.guards import acceptance
from fedcb2o.federated.guards.acceptance import (
    MAX_VALUE,
    Message,
    are_finite,
    is_acceptable,
    max_abs,
    rejection_reason,
)
from fedcb2o.rng import stream

DIM = 6


def message(theta=None, num_samples=20.0, round=3):
    return Message(torch.ones(DIM) if theta is None else theta, num_samples, round)


def theta_with(value):
    theta = torch.zeros(DIM)
    theta[2] = value
    return theta


@pytest.mark.parametrize("num_samples", [0.0, 1.0, 20.5, 1e12])
@pytest.mark.parametrize(
    "theta", [torch.ones(DIM), theta_with(MAX_VALUE), theta_with(-MAX_VALUE), torch.zeros(DIM)]
)
def test_valid_messages_are_admitted(theta, num_samples):
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
        message(theta_with(math.nan)),
        "its model holds numbers that are not finite, or beyond 1e.06",
    ),
    "all NaN": (message(torch.full((DIM,), math.nan)), "not finite"),
    "infinite": (message(theta_with(math.inf)), "not finite"),
    "minus infinity": (message(theta_with(-math.inf)), "not finite"),
    "too large": (message(theta_with(1.001 * MAX_VALUE)), "beyond 1e.06"),
    "too small": (message(theta_with(-1.001 * MAX_VALUE)), "beyond 1e.06"),
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
def test_invalid_messages_are_refused_with_a_reason(name):
    invalid, pattern = REFUSED[name]
    reason = rejection_reason(invalid, dim=DIM, n=3)
    assert reason
    assert "\n" not in reason
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(reason)


ROWS = {
    "all": [0, 1, 2, 3, 4, 5, 6],
    "that follow each other": [2, 3, 4],
    "one": [5],
    "apart": [6, 0, 3],
    "backwards": [4, 3, 2],
    "twice": [1, 1, 2],
    "none": [],
}


@pytest.mark.parametrize("numbers_per_call", [1, 30, 2**19])
@pytest.mark.parametrize("name", ROWS)
def test_largest_absolute_values_of_any_rows(name, numbers_per_call, monkeypatch):
    """The result does not depend on how many numbers one call examines."""
    monkeypatch.setattr(acceptance, "_NUMBERS_PER_CALL", numbers_per_call)
    models, rows = empty_models(7, 11), ROWS[name]
    models.copy_(torch.from_numpy(stream(0, "pool").normal(size=(7, 11))))
    models[3, 10], models[4, 0], models[6] = -1e30, math.nan, 0.0
    models[5, 4] = -math.inf
    before = models.clone()
    result = max_abs(models, rows)
    expected = np.abs(models[rows].double().numpy()).max(1, initial=0.0)
    assert result.dtype == np.float64
    assert result.shape == (len(rows),)
    np.testing.assert_array_equal(np.isfinite(result), np.isfinite(expected))
    is_finite = np.isfinite(expected)
    np.testing.assert_array_equal(result[is_finite], expected[is_finite])
    assert is_acceptable(result).tolist() == [i not in (3, 4, 5) for i in rows]
    assert torch.equal(models.nan_to_num(), before.nan_to_num())


def test_values_up_to_the_bound_are_acceptable():
    assert is_acceptable(
        np.array([0.0, MAX_VALUE, np.nextafter(MAX_VALUE, np.inf), np.inf, np.nan])
    ).tolist() == [*(True, True), *(False, False, False)]


def test_models_are_finite_by_their_numbers_and_not_by_their_sum(monkeypatch):
    monkeypatch.setattr(acceptance, "_NUMBERS_PER_CALL", 2 * DIM)
    models = torch.stack([theta_with(value) for value in (1.0, torch.nan, -torch.inf, 2.0)])
    models = torch.cat([models, torch.full((1, DIM), 3e38)])
    assert are_finite(models, [4, 2, 0, 1, 3]).tolist() == [True, False, True, False, True]
    assert are_finite(models, []).tolist() == []

"""Guards by hand: distances at their bounds, counted losses, tolerance in standard errors."""

import math

import numpy as np
import pytest
import torch

from fedcb2o.federated.aggregation.gram_matrix import distances_to_own, relative_distances
from fedcb2o.federated.guards.checks import (
    ADMITTED,
    TOO_FAR,
    TOO_NEAR,
    TOO_SENSITIVE,
    Guards,
    counted_losses,
    distance_check,
    tolerated,
)
from fedcb2o.federated.types import Losses

# The agent's model has norm 5, so that each distance below is a whole number of fifths.
OWN = [3.0, 4.0]
NAN = [math.nan, 0.0]


def outcomes(guards: Guards, *received: list[float], previous: list[float] | None = None) -> list:
    models = torch.tensor([OWN, previous or OWN, *received], dtype=torch.float64)
    rows = torch.arange(2, len(models)).unsqueeze(0)
    previous_row = None if previous is None else torch.tensor([1])
    (result,) = distance_check(guards, models, rows, torch.tensor([0]), previous_row).tolist()
    return result


def test_distances_are_in_units_of_the_norm_of_the_last_model() -> None:
    models = torch.tensor([OWN, [6.0, 8.0], [0.0, 0.0], [-3.0, -4.0], [3.0, 9.0]])
    rows = torch.tensor([1, 2, 3, 4, 0])
    assert relative_distances(models, rows).tolist() == [1.0, 1.0, 2.0, 1.0]


@pytest.mark.parametrize("d", [3, 5000])
def test_agents_together_measure_the_distances_of_agents_alone(d) -> None:
    """Several blocks of columns and of agents; an equal model is at distance 0."""
    models = torch.randn(60, d)
    rows, own = torch.randint(60, (40, 7)), torch.randint(60, (40,))
    rows[:, 3] = own
    found = distances_to_own(models, rows, own)
    for k in range(40):
        assert found[k].equal(distances_to_own(models, rows[k : k + 1], own[k : k + 1])[0])
    x = models.double()
    expected = (x[rows] - x[own, None]).norm(dim=-1) / x[own].norm(dim=-1, keepdim=True)
    torch.testing.assert_close(found, expected)
    assert (found[:, 3] == 0).all()
    assert distances_to_own(models, rows[:, :0], own).shape == (40, 0)
    assert distances_to_own(models, rows[:0], own[:0]).shape == (0, 7)


def test_a_model_at_the_largest_distance_is_admitted_and_one_beyond_it_is_not() -> None:
    guards = Guards(max_distance=1.0)
    received = ([6.0, 8.0], [0.0, 0.0], [6.0, 8.001], [3.0, 4.0], [-3.0, -4.0])
    assert outcomes(guards, *received) == [ADMITTED, ADMITTED, TOO_FAR, ADMITTED, TOO_FAR]


def test_the_least_distance_is_in_units_of_the_movement_of_the_own_model() -> None:
    guards = Guards(min_distance=0.5)
    half, nearer, far = [4.5, 6.0], [4.49, 6.0], [12.0, 16.0]
    # The model moved by its norm.
    result = outcomes(guards, half, nearer, OWN, far, previous=[0.0, 0.0])
    assert result == [ADMITTED, TOO_NEAR, TOO_NEAR, ADMITTED]
    # It moved by a fifth of its norm: a tenth is the least distance.
    result = outcomes(guards, nearer, [3.0, 4.49], [3.0, 4.5], far, previous=[3.0, 5.0])
    assert result == [ADMITTED, TOO_NEAR, ADMITTED, ADMITTED]


def test_no_model_is_too_near_from_a_third_of_the_distance_of_the_farthest_admitted_one() -> None:
    guards = Guards(min_distance=0.5, max_distance=2.0)
    moved_by_its_norm = [0.0, 0.0]
    third, nearer, farthest = [3.6, 4.8], [3.59, 4.8], [4.8, 6.4]
    result = outcomes(guards, third, nearer, farthest, previous=moved_by_its_norm)
    assert result == [ADMITTED, TOO_NEAR, ADMITTED]
    # A model that is too far says nothing.
    result = outcomes(guards, third, farthest, [30.0, 40.0], previous=moved_by_its_norm)
    assert result == [ADMITTED, ADMITTED, TOO_FAR]
    assert outcomes(guards, third, previous=moved_by_its_norm) == [ADMITTED]


def test_a_model_equal_to_an_own_model_that_did_not_move_is_admitted() -> None:
    assert outcomes(Guards(min_distance=0.5), OWN, previous=OWN) == [ADMITTED]


def test_too_far_counts_if_the_bounds_contradict_each_other() -> None:
    guards = Guards(max_distance=0.5, min_distance=3.0)
    result = outcomes(guards, [6.0, 8.0], [4.5, 6.0], [3.3, 4.4], previous=[0.0, 0.0])
    assert result == [TOO_FAR, ADMITTED, TOO_NEAR]


def test_a_distance_that_is_not_a_number_is_too_far() -> None:
    assert outcomes(Guards(max_distance=1e30), NAN) == [TOO_FAR]
    assert outcomes(Guards(), NAN) == [ADMITTED]  # no guard asks for its distance


@pytest.mark.parametrize(("num_classes", "near"), [(10, 10), (2, 2), (1, 2), (0, 2)])
def test_near_models_count_as_models_that_know_nothing(num_classes: int, near: int) -> None:
    kinds = np.array([ADMITTED, TOO_FAR, TOO_NEAR, TOO_SENSITIVE])
    expected = [math.inf, math.inf, math.log(near), math.inf]
    assert counted_losses(kinds, num_classes).tolist() == expected


def losses(*models: list[float]) -> Losses:
    """Return losses with these losses of samples."""
    per_sample = torch.tensor(models, dtype=torch.float64)
    m, n = per_sample.shape
    return Losses(
        mean=per_sample.mean(-1),
        by_class=torch.zeros(m, 1),
        present=torch.ones(1, dtype=torch.bool),
        entropy_of=lambda: torch.zeros(m),
        per_sample=per_sample,
        labels=torch.zeros(n, dtype=torch.int64),
    )


def test_a_loss_at_the_tolerance_is_tolerated_and_one_above_it_is_not() -> None:
    # The differences 0 and 2 have mean 1 and standard error 1; 1 and 3 have mean 2 and error 1.
    own, received = losses([1.0, 3.0]), losses([1.0, 5.0], [2.0, 6.0], [1.0, 3.0], [0.0, 1.0])
    result = tolerated(Guards(loss_tolerance=1.0), received, own).tolist()
    assert result == [True, False, True, True]
    result = tolerated(Guards(loss_tolerance=0.99), received, own).tolist()
    assert result == [False, False, True, True]
    assert tolerated(Guards(loss_tolerance=2.0), received, own).tolist() == [True, True, True, True]
    result = tolerated(Guards(loss_tolerance=0.0), received, own).tolist()
    assert result == [False, False, True, True]


def test_one_sample_has_no_standard_error() -> None:
    own, received = losses([1.0]), losses([1.0], [1.001], [0.5])
    assert tolerated(Guards(loss_tolerance=100.0), received, own).tolist() == [True, False, True]


def test_a_loss_that_is_not_finite_is_not_tolerated() -> None:
    own, received = losses([1.0, 3.0]), losses([math.nan, 3.0], [math.inf, 3.0])
    assert tolerated(Guards(loss_tolerance=5.0), received, own).tolist() == [False, False]

"""Robust rules on columns by hand, and the sorting network of columns."""

import pytest
import torch
from tests.views import models

from fedcb2o.federated.aggregation import coordinatewise


def test_coordinatewise_rules_by_hand():
    block = torch.tensor([[5.0, 1.0], [1.0, 1.0], [2.0, 1.0], [9.0, 7.0], [3.0, -5.0]])
    assert coordinatewise.coordinate_median(block).tolist() == [3, 1]
    assert coordinatewise.coordinate_median(block[:4]).tolist() == [3.5, 1]
    assert coordinatewise.trimmed_mean(block, f=1).tolist() == pytest.approx([10 / 3, 1])
    # Nearest to the median 3: 1, 2, 3, 5 and, with f = 2, 2, 3, 1 (a tie goes to the lower value).
    # Nearest to the median 1: 1, 1, 1 and -5.
    assert coordinatewise.meamed(block, f=1).tolist() == pytest.approx([11 / 4, -2 / 4])
    assert coordinatewise.meamed(block, f=2).tolist() == pytest.approx([2, 1])


@pytest.mark.parametrize(("m", "count"), [(5, 3), (9, 2), (12, 5), (11, 1), (7, 7)])
def test_the_mean_around_the_median_averages_the_nearest_values(m, count):
    values = models(m, 200).sort(dim=0).values
    nearest = (values - values.quantile(0.5, dim=0)).abs().sort(dim=0).indices[:count]
    expected = values.gather(0, nearest).mean(0)
    torch.testing.assert_close(coordinatewise.mean_around_median(values, count), expected)


@pytest.mark.parametrize("m", [*range(1, 18), 31, 32, 33, 100])
def test_columns_are_sorted(m):
    for block in (models(m, 40), models(m, 40).round(), models(m, 40).float().T.contiguous().T):
        assert coordinatewise.sort_columns(block).equal(block.sort(dim=0).values)


def test_the_sorting_network_sorts_all_zeros_and_ones():
    """The 0-1 principle: a network that sorts zeros and ones sorts any values."""
    for m in range(1, 13):
        block = ((torch.arange(2**m).unsqueeze(0) >> torch.arange(m).unsqueeze(1)) & 1).double()
        assert coordinatewise.sort_columns(block).equal(block.sort(dim=0).values)

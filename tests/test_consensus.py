"""The consensus point: quantile, sub-level set, weights, by hand and by their invariances."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcb2o import consensus
from fedcb2o.errors import ConfigError

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12).map(lambda v: torch.tensor(v, dtype=torch.float64))


def test_quantile_by_hand():
    lower = torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0])
    for beta, expected in ((0.01, 1.0), (0.2, 1.0), (0.21, 2.0), (0.4, 2.0), (0.5, 3.0), (0.6, 3.0), (1.0, 5.0)):
        assert consensus.quantile(lower, beta).item() == expected
    assert consensus.quantile(torch.arange(100.0), 0.07).item() == 6  # 0.07 * 100 is 7.000000000000001


@pytest.mark.parametrize("beta", [0.0, -0.1, 1.01, float("nan")])
def test_beta_out_of_range(beta):
    with pytest.raises(ConfigError, match="`beta` must be above 0 and at most 1"):
        consensus.quantile(torch.ones(3), beta)


def test_sublevel_set_keeps_ties_and_widens_by_delta_q():
    lower = torch.tensor([2.0, 1.0, 1.0, 1.5])
    assert consensus.sublevel_mask(lower, 0.25).tolist() == [False, True, True, False]
    assert consensus.sublevel_mask(lower, 0.25, delta_q=0.5).tolist() == [False, True, True, True]


def test_weights_by_hand():
    mu = consensus.weights(torch.tensor([0.0, torch.log(torch.tensor(2.0)).item()]), 1.0)
    assert mu.tolist() == pytest.approx([2 / 3, 1 / 3])
    masked = consensus.weights(torch.tensor([0.0, 1.0, 1.0]), 3.0, torch.tensor([False, True, True]))
    assert masked.tolist() == pytest.approx([0.0, 0.5, 0.5])


@pytest.mark.parametrize("huge", [1e6, 1e300])
def test_no_value_of_g_underflows_all(huge):
    assert consensus.weights(torch.tensor([huge, huge], dtype=torch.float64), 1e3).tolist() == [0.5, 0.5]
    assert consensus.weights(torch.tensor([huge, 2 * huge], dtype=torch.float64), 10.0).tolist() == [1.0, 0.0]


def test_what_is_bad_beyond_measure_has_no_weight():
    bad = torch.tensor([1.0, torch.inf, torch.nan])
    assert consensus.weights(bad, 0.0).tolist() == [1.0, 0.0, 0.0]
    assert consensus.weights(bad[1:], 2.0).tolist() == [0.0, 0.0]
    assert consensus.weights(bad[:0], 2.0).tolist() == []


def test_values_at_the_ends_of_floating_point():
    ends = torch.tensor([1e308, 1.1e308], dtype=torch.float64)
    assert consensus.weights(ends, 10.0).tolist() == [1.0, 0.0]
    assert consensus.weights(torch.tensor([5.0, 6.0]), 1e308).tolist() == [1.0, 0.0]
    # An agent whose own losses overflow finds all good peers infinitely better: they share the weight.
    assert consensus.weights(torch.tensor([-torch.inf, 0.0, -torch.inf]), 2.0).tolist() == [0.5, 0.0, 0.5]


@given(values, st.floats(0, 100), st.floats(-1e3, 1e3))
def test_weights_are_a_distribution_that_no_shift_changes(upper, alpha, shift):
    mu = consensus.weights(upper, alpha)
    assert mu.sum().item() == pytest.approx(1.0)
    shifted = consensus.weights((upper + shift) - shift, alpha)  # the same rounding on both sides
    torch.testing.assert_close(consensus.weights(upper + shift, alpha), shifted, rtol=1e-5, atol=1e-5)


@given(values, st.floats(0, 10), st.randoms(use_true_random=False))
def test_weights_follow_a_permutation(upper, alpha, random):
    order = list(range(len(upper)))
    random.shuffle(order)
    torch.testing.assert_close(consensus.weights(upper[order], alpha), consensus.weights(upper, alpha)[order])


def test_leading_axes_are_independent():
    upper = torch.tensor([[0.0, 1.0, 2.0], [5.0, 5.0, 4.0]])
    together = consensus.weights(upper, 2.0)
    for row, alone in zip(together, upper, strict=True):
        torch.testing.assert_close(row, consensus.weights(alone, 2.0))


def test_point_by_hand():
    models = torch.tensor([[0.0, 2.0], [4.0, 6.0]])
    mu = torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert consensus.point(mu, models).tolist() == [3.0, 5.0]

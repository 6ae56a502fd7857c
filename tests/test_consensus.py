"""The consensus point: quantile, sub-level set and weights, by hand and by invariance."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fedcb2o import consensus
from fedcb2o.errors import ConfigError
from tests import reference

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12).map(
    lambda v: torch.tensor(v, dtype=torch.float64)
)


def test_quantile_by_hand():
    lower = torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0])
    for beta, expected in (
        (0.01, 1.0),
        (0.2, 1.0),
        (0.21, 2.0),
        (0.4, 2.0),
        (0.5, 3.0),
        (0.6, 3.0),
        (1.0, 5.0),
    ):
        assert consensus.quantile(lower, beta).item() == expected
    # 0.07 * 100 is 7.000000000000001
    assert consensus.quantile(torch.arange(100.0), 0.07).item() == 6


@pytest.mark.parametrize("quantile", [consensus.quantile, consensus.averaged_quantile])
@pytest.mark.parametrize("beta", [1e-7, 2e-9, 1e-9, 1e-12, 1e-300, 5e-324])
def test_quantile_of_a_tiny_beta(quantile, beta):
    """The level is the least value with mass, because q_a is constant on [beta / 2, beta]."""
    lower = torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64)
    assert quantile(lower, beta).item() == 1.0
    assert quantile(lower, beta, mass=torch.tensor([0.5, 0.0, 0.5])).item() == 2.0
    assert quantile(torch.full((5,), torch.inf), beta).item() == torch.inf


def test_averaged_quantile_of_tiny_masses():
    """Steps of q_a narrower than 1e-9 count if beta is as small: the mean over [1, 2] 1e-10."""
    lower = torch.tensor([0.0, 4.0, 9.0], dtype=torch.float64)
    mass = torch.tensor([1.5e-10, 1.5e-10, 1 - 3e-10], dtype=torch.float64)
    assert consensus.averaged_quantile(lower, 2e-10, mass=mass).item() == pytest.approx(2.0)


def test_the_quantile_of_no_values_is_refused():
    for level in (consensus.quantile, consensus.averaged_quantile):
        with pytest.raises(ConfigError, match="the quantile of no values"):
            level(torch.zeros(0), 0.5)


@pytest.mark.parametrize("beta", [0.0, -0.1, 1.01, float("nan")])
def test_beta_out_of_range_is_refused(beta):
    with pytest.raises(ConfigError, match="`beta` must be above 0 and at most 1"):
        consensus.quantile(torch.ones(3), beta)


def test_sublevel_set_keeps_ties_and_widens_by_delta_q():
    lower = torch.tensor([2.0, 1.0, 1.0, 1.5])
    assert consensus.sublevel_mask(lower, 0.25).tolist() == [False, True, True, False]
    assert consensus.sublevel_mask(lower, 0.25, delta_q=0.5).tolist() == [False, True, True, True]


def test_weights_by_hand():
    mu = consensus.weights(torch.tensor([0.0, torch.log(torch.tensor(2.0)).item()]), 1.0)
    assert mu.tolist() == pytest.approx([2 / 3, 1 / 3])
    masked = consensus.weights(
        torch.tensor([0.0, 1.0, 1.0]), 3.0, torch.tensor([False, True, True])
    )
    assert masked.tolist() == pytest.approx([0.0, 0.5, 0.5])


@pytest.mark.parametrize("huge", [1e6, 1e300])
def test_huge_values_of_g_do_not_underflow(huge):
    result = consensus.weights(torch.tensor([huge, huge], dtype=torch.float64), 1e3).tolist()
    assert result == [0.5, 0.5]
    assert consensus.weights(
        torch.tensor([huge, 2 * huge], dtype=torch.float64), 10.0
    ).tolist() == [1.0, 0.0]


def test_infinite_and_nan_values_have_no_weight():
    bad = torch.tensor([1.0, torch.inf, torch.nan, -torch.inf])
    for alpha in (0.0, 2.0):
        assert consensus.weights(bad, alpha).tolist() == [1.0, 0.0, 0.0, 0.0]
        assert consensus.weights(bad[1:], alpha).tolist() == [0.0, 0.0, 0.0]
    assert consensus.weights(bad[:0], 2.0).tolist() == []


def test_weights_of_values_near_overflow():
    ends = torch.tensor([1e308, 1.1e308], dtype=torch.float64)
    assert consensus.weights(ends, 10.0).tolist() == [1.0, 0.0]
    assert consensus.weights(torch.tensor([5.0, 6.0]), 1e308).tolist() == [1.0, 0.0]
    far = torch.tensor([-1e308, 1e308, torch.nan], dtype=torch.float64)
    assert consensus.weights(far, 0.0).tolist() == [0.5, 0.5, 0.0]


@given(values, st.floats(0, 100), st.floats(-1e3, 1e3))
def test_weights_are_a_distribution_and_invariant_to_a_shift(upper, alpha, shift):
    mu = consensus.weights(upper, alpha)
    assert mu.sum().item() == pytest.approx(1.0)
    shifted = consensus.weights((upper + shift) - shift, alpha)  # equal rounding on both sides
    result = consensus.weights(upper + shift, alpha)
    torch.testing.assert_close(result, shifted, rtol=1e-5, atol=1e-5)


@given(values, st.floats(0, 10), st.randoms(use_true_random=False))
def test_weights_follow_a_permutation(upper, alpha, random):
    order = list(range(len(upper)))
    random.shuffle(order)
    expected = consensus.weights(upper, alpha)[order]
    torch.testing.assert_close(consensus.weights(upper[order], alpha), expected)


def test_rows_of_a_batch_are_independent():
    upper = torch.tensor([[0.0, 1.0, 2.0], [5.0, 5.0, 4.0]])
    batched = consensus.weights(upper, 2.0)
    for row, values_of_row in zip(batched, upper, strict=True):
        torch.testing.assert_close(row, consensus.weights(values_of_row, 2.0))


def test_point_by_hand():
    models = torch.tensor([[0.0, 2.0], [4.0, 6.0]])
    mu = torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert consensus.point(mu, models).tolist() == [3.0, 5.0]


# ---- eq:Q_beta: the averaged quantile, masses ----

betas = st.sampled_from([0.01, 0.07, 0.1, 0.3, 0.5, 0.8, 1.0])
masses = st.one_of(st.none(), st.lists(st.floats(0.01, 1.0), min_size=12, max_size=12))


def shares(mass, m):
    return [1.0] * m if mass is None else mass[:m]


def as_tensor(mass, m):
    return None if mass is None else torch.tensor(mass[:m], dtype=torch.float64)


def test_quantile_with_masses_by_hand():
    lower = torch.tensor([3.0, 1.0, 2.0])
    mass = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    for beta, expected in (
        (0.01, 1.0),
        (0.2, 1.0),
        (0.21, 2.0),
        (0.5, 2.0),
        (0.51, 3.0),
        (1.0, 3.0),
    ):
        assert consensus.quantile(lower, beta, mass=mass).item() == expected
        assert consensus.quantile(lower, beta, mass=7 * mass).item() == expected
    # A value without mass is no quantile, but it is in the sub-level set.
    with_zero = torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64)
    assert consensus.quantile(lower, 0.1, mass=with_zero).item() == 2.0
    assert consensus.sublevel_mask(lower, 0.1, mass=with_zero).tolist() == [False, True, True]


def test_averaged_quantile_by_hand():
    lower = torch.tensor([3.0, 1.0, 2.0, 4.0])
    # q_a is 1 up to 1/4, 2 up to 1/2, 3 up to 3/4.
    for beta, expected in (
        (0.2, 1.0),
        (0.25, 1.0),
        (0.5, 2.0),
        (0.75, (2 + 2 * 3) / 3),
        (1.0, 3.5),
    ):
        assert consensus.averaged_quantile(lower, beta).item() == pytest.approx(expected)
    mass = torch.tensor([0.5, 0.2, 0.3, 0.0], dtype=torch.float64)
    # 1 up to 0.2, 2 up to 0.5, 3 up to 1.
    assert consensus.averaged_quantile(lower, 0.3, mass=mass).item() == pytest.approx(
        (0.05 * 1 + 0.1 * 2) / 0.15
    )
    assert consensus.averaged_quantile(lower, 1.0, mass=mass).item() == pytest.approx(3.0)


def test_averaged_quantile_is_the_integral_of_the_quantile():
    """The midpoint rule with 500 points misses a jump by at most half an interval."""
    generator = torch.Generator().manual_seed(0)
    lower = torch.rand(30, generator=generator, dtype=torch.float64)
    for mass in (None, torch.rand(30, generator=generator, dtype=torch.float64)):
        for beta in (0.1, 0.35, 1.0):
            points = [beta / 2 + (k + 0.5) / 500 * beta / 2 for k in range(500)]
            fine = sum(consensus.quantile(lower, a, mass=mass).item() for a in points) / 500
            averaged = consensus.averaged_quantile(lower, beta, mass=mass).item()
            assert averaged == pytest.approx(fine, abs=1e-3)


@given(values, betas, masses)
def test_quantiles_match_the_oracle(lower, beta, mass):
    m = len(lower)
    level = consensus.quantile(lower, beta, mass=as_tensor(mass, m))
    assert level.item() == reference.level_at(beta, lower.tolist(), shares(mass, m))
    averaged = consensus.averaged_quantile(lower, beta, mass=as_tensor(mass, m))
    expected = reference.averaged_level(beta, lower.tolist(), shares(mass, m))
    assert averaged.item() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(values, betas, masses)
@example(
    torch.full((7,), 51.0, dtype=torch.float64), 0.7, None
)  # 2/beta * beta/2 * 51 is less than 51
@example(torch.tensor([0.1]), 0.3, None)
def test_averaged_quantile_is_between_the_quantiles(lower, beta, mass):
    """Therefore the sub-level set is never empty."""
    mass = as_tensor(mass, len(lower))
    averaged = consensus.averaged_quantile(lower, beta, mass=mass)
    assert (
        consensus.quantile(lower, beta / 2, mass=mass)
        <= averaged
        <= consensus.quantile(lower, beta, mass=mass)
    )
    assert consensus.sublevel_mask(lower, beta, averaged=True, mass=mass).any()


@pytest.mark.parametrize(
    ("finite", "m"), [(3, 10), (7, 10), (8, 10), (9, 10), (3, 30), (43, 100), (1, 1)]
)
def test_infinite_values_beyond_beta_do_not_change_the_level(finite, m):
    """With ceil(beta m) finite values, rounded sums of 1/m must not add an infinite one."""
    lower = torch.tensor([1.0] * finite + [torch.inf] * (m - finite), dtype=torch.float64)
    beta = finite / m
    for mass in (
        None,
        torch.full((m,), 1 / m, dtype=torch.float64),
        torch.full((m,), 0.37, dtype=torch.float64),
    ):
        assert consensus.quantile(lower, beta, mass=mass).item() == 1.0
        assert consensus.averaged_quantile(lower, beta, mass=mass).item() == pytest.approx(1.0)
        assert consensus.sublevel_mask(lower, beta, averaged=True, mass=mass).sum() == finite


@pytest.mark.parametrize("beta", [0.0, -0.1, 1.01, float("nan")])
def test_beta_out_of_range_of_the_averaged_quantile_is_refused(beta):
    with pytest.raises(ConfigError, match="`beta` must be above 0 and at most 1"):
        consensus.averaged_quantile(torch.ones(3), beta)


def test_weights_with_masses_by_hand():
    upper = torch.tensor([0.0, 0.0, torch.log(torch.tensor(2.0)).item(), 5.0])
    mass = torch.tensor([1.0, 0.5, 1.0, 0.0], dtype=torch.float64)
    assert consensus.weights(upper, 1.0, mass=mass).tolist() == pytest.approx(
        [0.5, 0.25, 0.25, 0.0]
    )
    worst = torch.tensor([True, False, False, True])
    assert consensus.weights(upper, 1.0, worst, mass=mass).tolist() == [1.0, 0.0, 0.0, 0.0]
    ends = torch.tensor([0.0, 0.0, -torch.inf, torch.nan])
    assert consensus.weights(ends, 1.0, mass=mass).tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])


@given(values, st.floats(0, 10), masses, st.sampled_from([1e-3, 0.5, 64.0]))
def test_weights_and_sets_are_invariant_to_the_scale_of_masses(upper, alpha, mass, scale):
    mass = torch.tensor(shares(mass, len(upper)), dtype=torch.float64)
    unscaled = consensus.weights(upper, alpha, mass=mass)
    scaled = consensus.weights(upper, alpha, mass=mass * scale)
    torch.testing.assert_close(unscaled, scaled)
    assert unscaled.sum().item() == pytest.approx(1.0)
    for averaged in (False, True):
        result = consensus.sublevel_mask(upper, 0.3, averaged=averaged, mass=mass)
        expected = consensus.sublevel_mask(upper, 0.3, averaged=averaged, mass=mass * 64.0)
        torch.testing.assert_close(result, expected)


def test_point_of_batches():
    generator = torch.Generator().manual_seed(0)
    mu = torch.rand(3, 4, generator=generator, dtype=torch.float64).softmax(-1)
    models = torch.rand(3, 4, 2, generator=generator, dtype=torch.float64)
    expected = torch.stack([weights @ rows for weights, rows in zip(mu, models, strict=True)])
    torch.testing.assert_close(consensus.point(mu, models), expected)
    torch.testing.assert_close(consensus.point(mu, models[0]), mu @ models[0])

"""The robust rules: by hand, in their limits, and one matrix of properties over all of them."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.views import LINE, models
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.federated.aggregation import (
    coordinatewise,
    gram_rules,
    own_model_rules,
    preaggregation,
    spread_rules,
)
from fedcb2o.federated.aggregation.base import apply, clip_byzantine_count, signature_of
from fedcb2o.federated.aggregation.gram_matrix import gram
from fedcb2o.rng import stream


def weights(rule: Callable[..., Tensor], x: Tensor, *given: Any, **parameters: Any) -> list[float]:
    return rule(gram(x), *given, **parameters).tolist()


# By hand


def test_krum_by_hand():
    # m - f - 2 = 2 nearest others: scores 1 + 4, 1 + 1, 1 + 4, 4 + 9, far.
    assert weights(gram_rules.krum, LINE, f=1) == [0, 1, 0, 0, 0]
    assert weights(gram_rules.multi_krum, LINE, f=1, selected=3) == pytest.approx(
        [1 / 3, 1 / 3, 1 / 3, 0, 0]
    )
    assert weights(gram_rules.multi_krum, LINE, f=1) == [0.25, 0.25, 0.25, 0.25, 0]
    # One nearest other: 0, 1 and 2 tie at 1, and the middle one is nearest to all.
    assert weights(gram_rules.krum, LINE, f=1, neighbours=1) == [0, 0, 1, 0, 0]


def test_geometric_median_by_hand():
    # Of three corners of a triangle with an angle of 120 degrees or more, it is that corner.
    corner = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.1]])
    assert weights(gram_rules.geometric_median, corner) == pytest.approx([1, 0, 0], abs=1e-3)
    # The centre of a square, its fifth point, stays; one iteration from the first corner weighs 1 /
    # distance.
    square = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]])
    assert weights(gram_rules.geometric_median, square) == pytest.approx([0.25] * 4)
    start = torch.tensor([1.0, 0.0, 0.0, 0.0])
    scores = [1 / 0.5, 1 / 2, 1 / math.sqrt(8), 1 / 2]
    found = weights(gram_rules.geometric_median, square, smoothing=0.5, iterations=1, start=start)
    assert found == pytest.approx([score / sum(scores) for score in scores])


def test_clipping_by_hand():
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])  # at distances 5 and 0.5 of the last
    assert weights(own_model_rules.centred_clipping, x, radius=1.0) == pytest.approx(
        [0.1, 0.5, 0.4]
    )
    assert weights(own_model_rules.norm_clipping, x, radius=1.0) == pytest.approx([0.1, 0.5, 0.4])
    assert weights(own_model_rules.norm_clipping, x) == pytest.approx(
        [2.75 / 5 / 2, 0.5, 0.5 - 2.75 / 5 / 2]
    )
    assert weights(own_model_rules.clipped_gossip, x, f=0, radius=1.0) == pytest.approx(
        [0.2 / 3, 1 / 3, 2 / 3 - 0.2 / 3]
    )
    # radius^2 = 1/1 of 0.5^2, the nearest one.
    assert weights(own_model_rules.clipped_gossip, x, f=1) == pytest.approx(
        [0.1 / 3, 1 / 3, 2 / 3 - 0.1 / 3]
    )
    # CS+ clips 2 f = 2 of three to the nearest one's distance, and where there are but two to
    # nothing.
    more = torch.cat([torch.tensor([[0.0, 1.0]]), x])
    assert weights(own_model_rules.cs_plus, more, f=1) == pytest.approx(
        [0.5 / 4, 0.1 / 4, 1 / 4, 1 - 1.6 / 4]
    )
    assert weights(own_model_rules.cs_plus, x, f=1) == [0, 0, 1]
    # Twice: v = (0.45, 0.6), at 4.25 of the first and 0.25 of the second model.
    v = torch.tensor([0.45, 0.6])
    expected = v + ((x[0] - v) / 4.25 + (x[1] - v)) / 2
    centred = functools.partial(own_model_rules.centred_clipping, radius=1.0, iterations=2)
    assert apply(centred, x).tolist() == pytest.approx(expected.tolist())


def test_rules_about_the_own_model_by_hand():
    x = torch.tensor([[3.0, 0.0], [2.2, 0.0], [0.0, 9.0], [2.0, 0.0]])
    assert weights(own_model_rules.monna, x, f=1) == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])
    assert weights(own_model_rules.monna, x, f=0) == [0.25] * 4
    # The level is 0.3 * 2 at the start, and 0.3 * 2 / e at the end.
    assert weights(own_model_rules.balance, x, 0.0) == [0, 0.5, 0, 0.5]
    assert weights(own_model_rules.balance, x, 0.0, gamma=0.6) == [0.25, 0.25, 0, 0.5]
    assert weights(own_model_rules.balance, x, 1.0, gamma=0.2, alpha=0.9) == [0, 0, 0, 1]
    losses = torch.tensor([1.0, 3.0, 0.1, 2.0])
    assert weights(own_model_rules.ubar, x, losses, f=1) == [0.5, 0, 0, 0.5]
    assert weights(own_model_rules.ubar, x, losses, f=0, alpha=0.2) == pytest.approx(
        [0.4, 0, 0.4, 0.2]
    )
    assert weights(own_model_rules.ubar, x, torch.tensor([5.0, 4.0, 0.1, 2.0]), f=1) == [
        0,
        0.5,
        0,
        0.5,
    ]
    assert weights(own_model_rules.ubar, x, torch.tensor([math.nan, math.inf, 0.1, 2.0]), f=1) == [
        0,
        0,
        0,
        1,
    ]


def test_fltrust_by_hand():
    # Updates about b = (1, 1): (2, 0) of cosine 1, (3, 3) of cosine 1 / sqrt 2, (-1, 0); the own
    # one is (1, 0).
    x = torch.tensor([[3.0, 1.0], [4.0, 4.0], [0.0, 1.0], [2.0, 1.0], [1.0, 1.0]])
    trust = torch.tensor([1.0, 1 / math.sqrt(2)])
    expected = (
        trust[0] * torch.tensor([1.0, 0]) + trust[1] * torch.tensor([1.0, 1.0]) / math.sqrt(2)
    ) / trust.sum()
    assert apply(own_model_rules.fltrust, x).tolist() == pytest.approx((expected + 1).tolist())
    assert weights(own_model_rules.fltrust, x[2:]) == [0, 1, 0]  # nobody is trusted
    assert weights(own_model_rules.fltrust, x[3:]) == [1, 0]


def test_sageflow_by_hand():
    losses, entropies = torch.tensor([1.0, 2.0, 0.5, math.nan]), torch.tensor([0.5, 0.9, 1.0, 0.1])
    samples = torch.tensor([100.0, 300.0, 100.0, 100.0])
    assert gram_rules.sageflow(losses, entropies, samples).tolist() == pytest.approx(
        [2 / 3, 1 / 3, 0, 0]
    )
    assert gram_rules.sageflow(losses, entropies, samples, delta=2.0).tolist() == pytest.approx(
        [0.8, 0.2, 0, 0]
    )
    by_samples = functools.partial(gram_rules.sageflow, by_samples=True)
    assert by_samples(losses, entropies, samples).tolist() == pytest.approx([0.4, 0.6, 0, 0])
    assert by_samples(losses, entropies, samples, delta=2.0).tolist() == pytest.approx(
        [4 / 7, 3 / 7, 0, 0]
    )
    assert gram_rules.sageflow(losses, entropies, samples, threshold=0.0).tolist() == [0, 0, 0, 0]


def test_bulyan_by_hand():
    # f = 1, m = 7: Krum takes five, then of each coordinate the three nearest to the median of the
    # five.
    x = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0], [50.0], [1000.0]])
    selected = gram_rules.bulyan(gram(x), f=1)
    # By the scores of 4, 3, 2, 1 and 1 nearest others: 2, then of equals the ones nearer to all, 3,
    # 1, 4 and 50.
    assert selected.rows.tolist() == [1, 2, 3, 4, 5]
    assert apply(functools.partial(gram_rules.bulyan, f=1), x).tolist() == pytest.approx([3.0])


# Limits: rules that are each other's special cases


@pytest.mark.parametrize("m", [1, 2, 3, 8])
def test_limits_that_are_the_mean(m):
    x = models(m, 50)
    average = x.mean(0)
    for rule in (
        gram_rules.mean,
        functools.partial(coordinatewise.trimmed_mean, f=0),
        functools.partial(coordinatewise.meamed, f=0),
        functools.partial(gram_rules.bulyan, f=0),
        functools.partial(gram_rules.multi_krum, f=0),
        functools.partial(gram_rules.multi_krum, f=1, selected=m),
        functools.partial(own_model_rules.monna, f=0),
        functools.partial(own_model_rules.clipped_gossip, f=0),
        functools.partial(own_model_rules.cs_plus, f=0),
        functools.partial(own_model_rules.clipped_gossip, f=0, radius=math.inf),
        functools.partial(gram_rules.geometric_median, smoothing=1e9),
    ):
        torch.testing.assert_close(apply(rule, x, clip_f=True), average)
    mixing = functools.partial(preaggregation.nnm, f=0)
    for rule in (
        coordinatewise.coordinate_median,
        gram_rules.geometric_median,
        functools.partial(gram_rules.krum, f=1),
    ):
        torch.testing.assert_close(apply(rule, x, mixing=mixing, clip_f=True), average)
    for size in (1, 2, m):
        if m % size == 0:
            torch.testing.assert_close(
                apply(
                    gram_rules.mean,
                    x,
                    mixing=preaggregation.bucketing(m, stream(0, "b"), size=size),
                ),
                average,
            )
    if m > 1:
        others = x[:-1].mean(0)
        for rule in (own_model_rules.centred_clipping, own_model_rules.norm_clipping):
            torch.testing.assert_close(apply(functools.partial(rule, radius=math.inf), x), others)
            torch.testing.assert_close(apply(functools.partial(rule, radius=1e-12), x), x[-1])
        everyone = functools.partial(own_model_rules.balance, gamma=1e9, alpha=0.0)
        torch.testing.assert_close(apply(everyone, x, None, 0.0), others)
        everyone = functools.partial(own_model_rules.ubar, f=0, alpha=0.0)
        torch.testing.assert_close(apply(everyone, x, None, torch.ones(m)), others)


def test_more_limits():
    x = models(9, 50)
    median = apply(coordinatewise.coordinate_median, x)
    torch.testing.assert_close(
        apply(functools.partial(coordinatewise.trimmed_mean, f=4), x), median
    )
    # In one dimension the geometric median is the median.
    torch.testing.assert_close(
        apply(
            functools.partial(gram_rules.geometric_median, smoothing=1e-12, iterations=10_000),
            x[:, :1],
        ),
        median[:1],
        rtol=0,
        atol=1e-5,
    )
    # Krum with f = 0 is the medoid but for the farthest one of each; of all distances it is the
    # medoid of squares.
    krum = functools.partial(gram_rules.krum, f=0, neighbours=8)
    assert apply(krum, x).equal(x[torch.cdist(x, x).square().sum(1).argmin()])
    one = functools.partial(gram_rules.multi_krum, f=2, selected=1)
    assert apply(one, x).equal(apply(functools.partial(gram_rules.krum, f=2), x))


# One matrix of properties over all rules


@dataclass(frozen=True)
class Case:
    """A rule that assumes f attackers, and what it promises."""

    rule: Callable[..., Any]
    takes_f: bool = True
    last: int = 0
    given: Callable[[Tensor], tuple[Any, ...]] = lambda x: ()
    mixing: Callable[..., Tensor] | None = None
    translates: bool = True
    scales: bool = True
    promises: bool = True  # whether f outliers cannot drag it away
    is_unique: bool = True  # whether no two subsets of models can be equally good

    def __call__(self, x: Tensor, f: int, rows: Tensor | None = None) -> Tensor:
        rule = functools.partial(self.rule, f=f) if self.takes_f else self.rule
        mixing = None if self.mixing is None else functools.partial(self.mixing, f=f)
        return apply(rule, x, rows, *self.given(x), mixing=mixing, clip_f=True)

    def admits(self, m: int) -> int:
        most = clip_byzantine_count(self.rule, 10**6, m) if self.takes_f else (m - 1) // 2
        return min(most, (m - 1) // 2)


def by_distance(x: Tensor) -> tuple[Tensor]:
    """A loss that moves with the model, and that translation and scaling leave in order."""
    return ((x - x[-1]).norm(dim=1),)


CASES = {
    "mean": Case(gram_rules.mean, takes_f=False, promises=False),
    "krum": Case(gram_rules.krum),
    "multi_krum": Case(gram_rules.multi_krum),
    "geometric_median": Case(
        functools.partial(gram_rules.geometric_median, smoothing=1e-12), takes_f=False
    ),
    "coordinate_median": Case(coordinatewise.coordinate_median, takes_f=False),
    "trimmed_mean": Case(coordinatewise.trimmed_mean),
    "meamed": Case(coordinatewise.meamed),
    "bulyan": Case(gram_rules.bulyan),
    "mda": Case(spread_rules.mda, is_unique=False),
    "smea": Case(spread_rules.smea),
    "caf": Case(spread_rules.caf),
    "centred_clipping": Case(
        functools.partial(own_model_rules.centred_clipping, radius=1.0),
        takes_f=False,
        last=1,
        scales=False,
    ),
    "centred_clipping twice": Case(
        functools.partial(own_model_rules.centred_clipping, radius=1.0, iterations=2),
        takes_f=False,
        last=1,
        scales=False,
    ),
    "norm_clipping": Case(own_model_rules.norm_clipping, takes_f=False, last=1),
    "clipped_gossip": Case(own_model_rules.clipped_gossip, last=1),
    "cs_plus": Case(own_model_rules.cs_plus, last=1),
    "balance": Case(
        own_model_rules.balance, takes_f=False, last=1, given=lambda x: (0.5,), translates=False
    ),
    "monna": Case(own_model_rules.monna, last=1),
    "ubar": Case(own_model_rules.ubar, last=1, given=by_distance),
    "fltrust": Case(own_model_rules.fltrust, takes_f=False, last=2),
    "nnm and mean": Case(gram_rules.mean, takes_f=False, mixing=preaggregation.nnm, promises=False),
    "nnm and trimmed_mean": Case(coordinatewise.trimmed_mean, mixing=preaggregation.nnm),
    "nnm and krum": Case(gram_rules.krum, mixing=preaggregation.nnm),
    "arc and trimmed_mean": Case(coordinatewise.trimmed_mean, mixing=preaggregation.arc, last=1),
    "nnm and bulyan": Case(gram_rules.bulyan, mixing=preaggregation.nnm),
}


matrix = pytest.mark.parametrize("name", CASES)


sizes = {"m": st.integers(4, 14), "f": st.integers(0, 6), "seed": st.integers(0, 10**6)}


@matrix
@settings(max_examples=10)
@given(**sizes)
def test_the_order_of_the_others_does_not_matter(name, m, f, seed):
    case, x = CASES[name], models(m, 6, seed)
    if not case.is_unique:
        return
    order = torch.from_numpy(stream(seed, "order").permutation(m - case.last))
    order = torch.cat([order, torch.arange(m - case.last, m)])
    torch.testing.assert_close(case(x[order], f), case(x, f), rtol=1e-7, atol=1e-7)


@matrix
@settings(max_examples=10)
@given(**sizes)
def test_what_moves_and_scales_with_the_models(name, m, f, seed):
    case, x = CASES[name], models(m, 6, seed)
    found = case(x, f)
    if case.translates:
        shift = models(1, 6, seed + 1) * 10
        torch.testing.assert_close(case(x + shift, f), found + shift[0], rtol=1e-6, atol=1e-6)
    if case.scales:
        torch.testing.assert_close(case(x * 0.01, f), found * 0.01, rtol=1e-6, atol=1e-8)


@matrix
@settings(max_examples=10)
@given(**sizes, size=st.sampled_from([1.0, 30.0, 1e4, 1e9]), together=st.booleans())
def test_outliers_do_not_drag_it_away(name, m, f, seed, size, together):
    """The attackers anywhere, f of them at most: the outcome is within a few diameters of the
    benign models."""
    case, x = CASES[name], models(m, 6, seed)
    f = min(f, case.admits(m))
    directions = models(1 if together else max(1, f), 6, seed + 2)
    x[:f] = size * directions[:f]
    benign = x[f:]
    if not case.promises:
        return
    diameter = float(torch.cdist(benign, benign).max())
    distance = float((case(x, f) - benign.mean(0)).norm())
    if case.last == 1 and not case.takes_f and f >= m // 2:
        return
    assert distance <= 4 * (diameter + 1) * (1 + f)


@matrix
@pytest.mark.parametrize("f", [0, 1, 3])
def test_every_number_of_models_from_the_least(name, f):
    case = CASES[name]
    for m in range(max(1, case.last), 12):
        found = case(models(m, 4), f)
        assert found.shape == (4,)
        assert found.isfinite().all()
        if m - case.last == 0:  # nobody answered
            torch.testing.assert_close(found, models(m, 4)[0])


@matrix
def test_weights_sum_to_one_and_one_model_alone_comes_out(name):
    case = CASES[name]
    copies = models(1, 5).expand(8, 5).contiguous()
    torch.testing.assert_close(case(copies, 1), copies[0])
    if signature_of(case.rule).reads == "gram" and case.rule is not gram_rules.bulyan:
        rule = functools.partial(case.rule, f=1) if case.takes_f else case.rule
        found = rule(gram(models(8, 5)), *case.given(models(8, 5)))
        assert float(found.sum()) == pytest.approx(1)
        assert (found >= 0).all() or name == "fltrust"


@matrix
def test_huge_models_stay_finite(name):
    """Finite in float32, their squares and sums are not."""
    case, x = CASES[name], models(9, 6, dtype=torch.float32)
    x[0], x[1] = 3e38, -3e38
    found = case(x, 2)
    assert found.isfinite().all()
    if case.promises:
        assert float(found.norm()) < 1e3


# Impossible and extreme


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda g: own_model_rules.centred_clipping(g, radius=0.0),
            "`radius` must be above 0, got 0.0",
        ),
        (lambda g: own_model_rules.norm_clipping(g, radius=-1.0), "`radius` must be above 0"),
        (
            lambda g: own_model_rules.clipped_gossip(g, f=1, radius=math.nan),
            "`radius` must be above 0, got nan",
        ),
        (lambda g: gram_rules.geometric_median(g, smoothing=0.0), "`smoothing` must be above 0"),
        (lambda g: gram_rules.krum(g, f=1, neighbours=0), "`neighbours` must be 1 or more, got 0"),
        (
            lambda g: gram_rules.multi_krum(g, f=1, selected=0),
            "`selected` must be 1 or more, got 0",
        ),
        (lambda g: own_model_rules.balance(g, 0.0, gamma=0.0), "`gamma` must be above 0"),
        (
            lambda g: own_model_rules.balance(g, 0.0, alpha=1.5),
            "`alpha`, the share of the agent's own model, must be from 0 to 1, got 1.5",
        ),
        (
            lambda g: preaggregation.bucketing(3, np.random.default_rng(0), size=0),
            "`size`, the number of models in a bucket",
        ),
    ],
)
def test_impossible_parameters(call, message):
    with pytest.raises(ConfigError, match=message):
        call(gram(LINE))


def test_distances_of_nearly_equal_models_and_beside_huge_ones():
    """Relative to exact differences: models that differ by 1e-4 of their size, in float32, beside
    one of size 1e30."""
    base = models(1, 20_000, dtype=torch.float32)
    pool = base + 1e-4 * models(6, 20_000, 1, torch.float32)
    pool[5] = 1e30
    x = pool[:5].double()
    exact = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square()
    found = gram_rules.squared_distances(gram(pool))[:5, :5]
    off = ~torch.eye(5, dtype=torch.bool)
    assert (found - exact).abs().max() < 1e-13 * float(x.square().sum(1).max())
    assert ((found - exact).abs()[off] / exact[off]).max() < 1e-5


def test_the_geometric_median_beside_a_huge_model():
    x = models(9, 50, dtype=torch.float32)
    alone = far = apply(gram_rules.geometric_median, x[:8])
    for size in (1e5, 1e15, 1e30):
        x[8] = size
        found = apply(gram_rules.geometric_median, x)
        assert float((found - alone).norm()) < 1.0
        if size > 1e5:
            torch.testing.assert_close(found, far, rtol=1e-3, atol=1e-3)
        far = found

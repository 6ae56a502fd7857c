"""Robust rules: values by hand, limits, and one matrix of properties for all rules."""

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


def weights(rule: Callable[..., Tensor], x: Tensor, *inputs: Any, **parameters: Any) -> list[float]:
    return rule(gram(x), *inputs, **parameters).tolist()


# By hand


def test_krum_by_hand():
    # m - f - 2 = 2 nearest others: scores 1 + 4, 1 + 1, 1 + 4, 4 + 9, far.
    assert weights(gram_rules.krum, LINE, f=1) == [0, 1, 0, 0, 0]
    assert weights(gram_rules.multi_krum, LINE, f=1, selected=3) == pytest.approx(
        [1 / 3, 1 / 3, 1 / 3, 0, 0]
    )
    assert weights(gram_rules.multi_krum, LINE, f=1) == [0.25, 0.25, 0.25, 0.25, 0]
    # One nearest other: 0, 1 and 2 tie at 1. The tie goes to the model nearest to all others.
    assert weights(gram_rules.krum, LINE, f=1, neighbours=1) == [0, 0, 1, 0, 0]


def test_geometric_median_by_hand():
    # In a triangle with an angle of at least 120 degrees, the median is the corner of that angle.
    corner = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.1]])
    assert weights(gram_rules.geometric_median, corner) == pytest.approx([1, 0, 0], abs=1e-3)
    # The median of a square is its centre. One iteration from a corner weighs by 1 / distance.
    square = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]])
    assert weights(gram_rules.geometric_median, square) == pytest.approx([0.25] * 4)
    start = torch.tensor([1.0, 0.0, 0.0, 0.0])
    scores = [1 / 0.5, 1 / 2, 1 / math.sqrt(8), 1 / 2]
    result = weights(gram_rules.geometric_median, square, smoothing=0.5, iterations=1, start=start)
    assert result == pytest.approx([score / sum(scores) for score in scores])


def test_clipping_by_hand():
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])  # at distances 5 and 0.5 from the last
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
    # radius^2 = 0.5^2, from the nearest model.
    assert weights(own_model_rules.clipped_gossip, x, f=1) == pytest.approx(
        [0.1 / 3, 1 / 3, 2 / 3 - 0.1 / 3]
    )
    # CS+ clips 2 f = 2 of three models to the distance of the nearest, and 2 of two models to 0.
    four = torch.cat([torch.tensor([[0.0, 1.0]]), x])
    assert weights(own_model_rules.cs_plus, four, f=1) == pytest.approx(
        [0.5 / 4, 0.1 / 4, 1 / 4, 1 - 1.6 / 4]
    )
    assert weights(own_model_rules.cs_plus, x, f=1) == [0, 0, 1]
    # Two iterations: the first gives v = (0.45, 0.6), at distances 4.25 and 0.25 from the models.
    v = torch.tensor([0.45, 0.6])
    expected = v + ((x[0] - v) / 4.25 + (x[1] - v)) / 2
    centred = functools.partial(own_model_rules.centred_clipping, radius=1.0, iterations=2)
    assert apply(centred, x).tolist() == pytest.approx(expected.tolist())


def test_own_model_rules_by_hand():
    x = torch.tensor([[3.0, 0.0], [2.2, 0.0], [0.0, 9.0], [2.0, 0.0]])
    assert weights(own_model_rules.monna, x, f=1) == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])
    assert weights(own_model_rules.monna, x, f=0) == [0.25] * 4
    # The threshold is 0.3 * 2 at the start, and 0.3 * 2 / e at the end.
    assert weights(own_model_rules.balance, x, 0.0) == [0, 0.5, 0, 0.5]
    assert weights(own_model_rules.balance, x, 0.0, gamma=0.6) == [0.25, 0.25, 0, 0.5]
    assert weights(own_model_rules.balance, x, 1.0, gamma=0.2, alpha=0.9) == [0, 0, 0, 1]
    losses = torch.tensor([1.0, 3.0, 0.1, 2.0])
    assert weights(own_model_rules.ubar, x, losses, f=1) == [0.5, 0, 0, 0.5]
    assert weights(own_model_rules.ubar, x, losses, f=0, alpha=0.2) == pytest.approx(
        [0.4, 0, 0.4, 0.2]
    )
    result = weights(own_model_rules.ubar, x, torch.tensor([5.0, 4.0, 0.1, 2.0]), f=1)
    assert result == [0, 0.5, 0, 0.5]
    result = weights(own_model_rules.ubar, x, torch.tensor([math.nan, math.inf, 0.1, 2.0]), f=1)
    assert result == [0, 0, 0, 1]


def test_fltrust_by_hand():
    # Updates from (1, 1): (2, 0) of cosine 1, (3, 3) of cosine 1 / sqrt 2, and (-1, 0). The agent's
    # own update is (1, 0).
    x = torch.tensor([[3.0, 1.0], [4.0, 4.0], [0.0, 1.0], [2.0, 1.0], [1.0, 1.0]])
    trust = torch.tensor([1.0, 1 / math.sqrt(2)])
    expected = (
        trust[0] * torch.tensor([1.0, 0]) + trust[1] * torch.tensor([1.0, 1.0]) / math.sqrt(2)
    ) / trust.sum()
    assert apply(own_model_rules.fltrust, x).tolist() == pytest.approx((expected + 1).tolist())
    assert weights(own_model_rules.fltrust, x[2:]) == [0, 1, 0]  # no peer is trusted
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
    # f = 1, m = 7: Krum selects five. Each coordinate averages the three nearest to their median.
    x = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0], [50.0], [1000.0]])
    selected = gram_rules.bulyan(gram(x), f=1)
    # Scores of 4, 3, 2, 1 and 1 nearest others select 2, 3, 1, 4 and 50. Ties go to the model
    # nearer to all others.
    assert selected.rows.tolist() == [1, 2, 3, 4, 5]
    assert apply(functools.partial(gram_rules.bulyan, f=1), x).tolist() == pytest.approx([3.0])


# Limits: rules that are special cases of other rules


@pytest.mark.parametrize("m", [1, 2, 3, 8])
def test_rules_that_are_the_mean_in_a_limit(m):
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
            result = apply(
                gram_rules.mean, x, mixing=preaggregation.bucketing(m, stream(0, "b"), size=size)
            )
            torch.testing.assert_close(result, average)
    if m > 1:
        others = x[:-1].mean(0)
        for rule in (own_model_rules.centred_clipping, own_model_rules.norm_clipping):
            torch.testing.assert_close(apply(functools.partial(rule, radius=math.inf), x), others)
            torch.testing.assert_close(apply(functools.partial(rule, radius=1e-12), x), x[-1])
        everyone = functools.partial(own_model_rules.balance, gamma=1e9, alpha=0.0)
        torch.testing.assert_close(apply(everyone, x, None, 0.0), others)
        everyone = functools.partial(own_model_rules.ubar, f=0, alpha=0.0)
        torch.testing.assert_close(apply(everyone, x, None, torch.ones(m)), others)


def test_rules_that_are_another_rule_in_a_limit():
    x = models(9, 50)
    median = apply(coordinatewise.coordinate_median, x)
    result = apply(functools.partial(coordinatewise.trimmed_mean, f=4), x)
    torch.testing.assert_close(result, median)
    # In one dimension the geometric median is the median.
    result = apply(
        functools.partial(gram_rules.geometric_median, smoothing=1e-12, iterations=10_000), x[:, :1]
    )
    torch.testing.assert_close(result, median[:1], rtol=0, atol=1e-5)
    # Krum with f = 0 ignores the farthest model. With all 8 neighbours it is the medoid of squares.
    krum = functools.partial(gram_rules.krum, f=0, neighbours=8)
    assert apply(krum, x).equal(x[torch.cdist(x, x).square().sum(1).argmin()])
    single = functools.partial(gram_rules.multi_krum, f=2, selected=1)
    assert apply(single, x).equal(apply(functools.partial(gram_rules.krum, f=2), x))


# One matrix of properties for all rules


@dataclass(frozen=True)
class Case:
    """Rule that assumes f attackers, with its properties."""

    rule: Callable[..., Any]
    takes_f: bool = True
    last: int = 0
    given: Callable[[Tensor], tuple[Any, ...]] = lambda x: ()
    mixing: Callable[..., Tensor] | None = None
    translates: bool = True
    scales: bool = True
    is_robust: bool = True  # whether the aggregate is bounded under f outliers
    is_unique: bool = True  # whether the best subset of models is unique

    def __call__(self, x: Tensor, f: int, rows: Tensor | None = None) -> Tensor:
        rule = functools.partial(self.rule, f=f) if self.takes_f else self.rule
        mixing = None if self.mixing is None else functools.partial(self.mixing, f=f)
        return apply(rule, x, rows, *self.given(x), mixing=mixing, clip_f=True)

    def admits(self, m: int) -> int:
        max_f = clip_byzantine_count(self.rule, 10**6, m) if self.takes_f else (m - 1) // 2
        return min(max_f, (m - 1) // 2)


def by_distance(x: Tensor) -> tuple[Tensor]:
    """Losses that increase with distance; translation and scaling keep their order."""
    return ((x - x[-1]).norm(dim=1),)


CASES = {
    "mean": Case(gram_rules.mean, takes_f=False, is_robust=False),
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
    "nnm and mean": Case(
        gram_rules.mean, takes_f=False, mixing=preaggregation.nnm, is_robust=False
    ),
    "nnm and trimmed_mean": Case(coordinatewise.trimmed_mean, mixing=preaggregation.nnm),
    "nnm and krum": Case(gram_rules.krum, mixing=preaggregation.nnm),
    "arc and trimmed_mean": Case(coordinatewise.trimmed_mean, mixing=preaggregation.arc, last=1),
    "nnm and bulyan": Case(gram_rules.bulyan, mixing=preaggregation.nnm),
}


all_rules = pytest.mark.parametrize("name", CASES)


sizes = {"m": st.integers(4, 14), "f": st.integers(0, 6), "seed": st.integers(0, 10**6)}


@all_rules
@settings(max_examples=10)
@given(**sizes)
def test_the_order_of_received_models_does_not_matter(name, m, f, seed):
    case, x = CASES[name], models(m, 6, seed)
    if not case.is_unique:
        return
    order = torch.from_numpy(stream(seed, "order").permutation(m - case.last))
    order = torch.cat([order, torch.arange(m - case.last, m)])
    torch.testing.assert_close(case(x[order], f), case(x, f), rtol=1e-7, atol=1e-7)


@all_rules
@settings(max_examples=10)
@given(**sizes)
def test_aggregates_translate_and_scale_with_the_models(name, m, f, seed):
    case, x = CASES[name], models(m, 6, seed)
    aggregate = case(x, f)
    if case.translates:
        shift = models(1, 6, seed + 1) * 10
        torch.testing.assert_close(case(x + shift, f), aggregate + shift[0], rtol=1e-6, atol=1e-6)
    if case.scales:
        torch.testing.assert_close(case(x * 0.01, f), aggregate * 0.01, rtol=1e-6, atol=1e-8)


@all_rules
@settings(max_examples=10)
@given(**sizes, size=st.sampled_from([1.0, 30.0, 1e4, 1e9]), same_direction=st.booleans())
def test_outliers_do_not_move_the_aggregate_far(name, m, f, seed, size, same_direction):
    """With at most f attackers, the aggregate is within a few diameters of the benign models."""
    case, x = CASES[name], models(m, 6, seed)
    f = min(f, case.admits(m))
    directions = models(1 if same_direction else max(1, f), 6, seed + 2)
    x[:f] = size * directions[:f]
    benign = x[f:]
    if not case.is_robust:
        return
    diameter = float(torch.cdist(benign, benign).max())
    distance = float((case(x, f) - benign.mean(0)).norm())
    if case.last == 1 and not case.takes_f and f >= m // 2:
        return
    assert distance <= 4 * (diameter + 1) * (1 + f)


@all_rules
@pytest.mark.parametrize("f", [0, 1, 3])
def test_any_number_of_models_is_aggregated(name, f):
    case = CASES[name]
    for m in range(max(1, case.last), 12):
        aggregate = case(models(m, 4), f)
        assert aggregate.shape == (4,)
        assert aggregate.isfinite().all()
        if m - case.last == 0:  # no model was received
            torch.testing.assert_close(aggregate, models(m, 4)[0])


@all_rules
def test_weights_sum_to_one_and_copies_of_a_model_give_the_model(name):
    case = CASES[name]
    copies = models(1, 5).expand(8, 5).contiguous()
    torch.testing.assert_close(case(copies, 1), copies[0])
    if signature_of(case.rule).reads == "gram" and case.rule is not gram_rules.bulyan:
        rule = functools.partial(case.rule, f=1) if case.takes_f else case.rule
        result = rule(gram(models(8, 5)), *case.given(models(8, 5)))
        assert float(result.sum()) == pytest.approx(1)
        assert (result >= 0).all() or name == "fltrust"


@all_rules
def test_aggregates_of_huge_models_are_finite(name):
    """The models are finite in float32, but their squares and sums are not."""
    case, x = CASES[name], models(9, 6, dtype=torch.float32)
    x[0], x[1] = 3e38, -3e38
    aggregate = case(x, 2)
    assert aggregate.isfinite().all()
    if case.is_robust:
        assert float(aggregate.norm()) < 1e3


# Invalid parameters and extreme models


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
def test_invalid_parameters_are_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call(gram(LINE))


def test_distances_of_nearly_equal_models_next_to_a_huge_model():
    """The models, in float32, differ by 1e-4 of their size. The huge one has values of 1e30."""
    base = models(1, 20_000, dtype=torch.float32)
    buffer = base + 1e-4 * models(6, 20_000, 1, torch.float32)
    buffer[5] = 1e30
    x = buffer[:5].double()
    exact = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square()
    result = gram_rules.squared_distances(gram(buffer))[:5, :5]
    off_diagonal = ~torch.eye(5, dtype=torch.bool)
    assert (result - exact).abs().max() < 1e-13 * float(x.square().sum(1).max())
    assert ((result - exact).abs()[off_diagonal] / exact[off_diagonal]).max() < 1e-5


def test_the_geometric_median_next_to_a_huge_model():
    x = models(9, 50, dtype=torch.float32)
    alone = far = apply(gram_rules.geometric_median, x[:8])
    for size in (1e5, 1e15, 1e30):
        x[8] = size
        median = apply(gram_rules.geometric_median, x)
        assert float((median - alone).norm()) < 1.0
        if size > 1e5:
            torch.testing.assert_close(median, far, rtol=1e-3, atol=1e-3)
        far = median

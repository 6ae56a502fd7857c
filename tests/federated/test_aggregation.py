"""Application of robust rules: number of attackers, entries of the Gram matrix, and memory."""

import functools
import math
import os
import tracemalloc

import numpy as np
import pytest
import torch
from tests.type_checks import VARIABLE
from tests.views import LINE, models
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.federated import aggregation
from fedcb2o.federated.aggregation import (
    base,
    coordinatewise,
    gram_matrix,
    gram_rules,
    own_model_rules,
    preaggregation,
)
from fedcb2o.federated.aggregation.base import (
    apply,
    clip_byzantine_count,
    gram_and_mixing,
    rule_signature,
    signature_of,
    validate_byzantine_count,
)
from fedcb2o.federated.aggregation.gram_matrix import gram
from fedcb2o.rng import stream


def test_f_is_clipped_to_the_largest_admissible_number():
    cases = {
        gram_rules.krum: 2,
        gram_rules.multi_krum: 2,
        gram_rules.bulyan: 1,
        preaggregation.nnm: 3,
        own_model_rules.monna: 3,
    }
    cases |= {
        coordinatewise.trimmed_mean: 3,
        coordinatewise.meamed: 3,
        own_model_rules.ubar: 5,
        own_model_rules.clipped_gossip: 5,
    }
    x = models(7, 5)
    for rule, max_f in cases.items():
        assert clip_byzantine_count(rule, max_f, 7) == clip_byzantine_count(rule, 99, 7) == max_f
        assert clip_byzantine_count(functools.partial(rule, f=1), 1, 7) == 1
        assert clip_byzantine_count(rule, 3, 0) == 0
        assert validate_byzantine_count(rule, max_f, 7) == max_f
        message = rf"`f` = {max_f + 1} attackers are more than \w+ admits among 7 models: at "
        with pytest.raises(ConfigError, match=message):
            validate_byzantine_count(rule, max_f + 1, 7)
        extra_inputs = (torch.rand(7),) if rule is own_model_rules.ubar else ()
        if rule is not preaggregation.nnm:
            assert apply(functools.partial(rule, f=99), x, None, *extra_inputs, clip_f=True).equal(
                apply(functools.partial(rule, f=max_f), x, None, *extra_inputs)
            )


@pytest.mark.parametrize(
    ("name", "f", "needed"),
    [("krum", 1, 5), ("multi_krum", 1, 5), ("multi_krum", 2, 7), ("bulyan", 1, 7),
     ("trimmed_mean", 2, 5), ("meamed", 2, 5), ("monna", 2, 5), ("cs_plus", 3, 5),
     ("clipped_gossip", 3, 5)],
)  # fmt: skip
def test_too_large_f_is_refused_or_clipped_with_one_warning(name, f, needed, caplog):
    """Blanchard et al. need 2 f + 3 models, El Mhamdi et al. 4 f + 3, and means 2 f + 1."""
    rule = functools.partial(getattr(aggregation, name), f=f)
    x = models(needed, 3)
    assert apply(rule, x).isfinite().all()
    few = x[: min(4, needed - 1)]
    message = rf"`f` = {f} attackers are more than {name} admits among 4 models.* needs {needed} m"
    with pytest.raises(ConfigError, match=message):
        apply(rule, few)
    with pytest.raises(ConfigError, match=message):
        rule(few if signature_of(rule).reads == "columns" else gram(few))
    base._warn_of_clipping.cache_clear()
    max_f = clip_byzantine_count(rule, f, 4)
    clipped_rule = functools.partial(rule, f=max_f)
    assert apply(rule, few, clip_f=True).equal(apply(clipped_rule, few))
    apply(rule, few, clip_f=True)
    assert caplog.messages == [
        f"{name} with f = {f} needs {needed} models, and there are 4: f = {max_f} is assumed, and the"
        f" guarantee for f = {f} does not hold."
    ]


def test_too_large_f_of_a_pre_step_or_a_users_rule_is_refused(caplog):
    step = functools.partial(preaggregation.nnm, f=2)
    with pytest.raises(ConfigError, match=r"more than nnm admits among 4 models.* needs 5 models"):
        apply(gram_rules.mean, models(4, 3), mixing=step)
    clipped_step = functools.partial(preaggregation.nnm, f=1)
    expected = apply(gram_rules.mean, models(4, 3), mixing=clipped_step)
    assert apply(gram_rules.mean, models(4, 3), mixing=step, clip_f=True).equal(expected)

    @rule_signature("gram", max_byzantine=lambda m: m - 4)
    def first(gram, *, f):
        return gram_rules.one_hot(0, len(gram))

    message = r"more than first admits among 4 models.* needs 5 models"
    with pytest.raises(ConfigError, match=message):
        apply(functools.partial(first, f=1), models(4, 3))


@pytest.mark.parametrize(
    ("x", "rows", "message"),
    [
        (torch.zeros(0, 3), None, "there is no model to aggregate"),
        (torch.zeros(2, 3), [], "there is no model to aggregate"),
        (torch.zeros(3), None, r"`models` must be \[p, d\]"),
        (torch.zeros(2, 3), [-1], "`rows` must be row numbers from 0 to 1"),
        (torch.zeros(2, 3), [2], "`rows` must be row numbers from 0 to 1"),
        (torch.tensor([[0.0], [math.nan], [1.0]]), None, r"not finite: leave out the rows \[1\]"),
        (np.ma.array([[0.0], [1.0]], mask=[[0], [1]]), None, r"not finite: leave out the rows \[1\]"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_aggregated_are_refused(x, rows, message):
    if os.environ.get(VARIABLE):
        pytest.skip("type checks refuse them first")
    for rule in (coordinatewise.coordinate_median, gram_rules.mean):
        with pytest.raises(ConfigError, match=message):
            apply(rule, x, rows)


def test_integer_models_are_averaged_as_floats():
    x = torch.tensor([[0, 1], [1, 2], [3, 9]])
    if os.environ.get(VARIABLE):
        pytest.skip("type checks refuse them first")
    assert apply(gram_rules.mean, x).tolist() == pytest.approx([4 / 3, 4])
    assert apply(gram_rules.mean, x, torch.tensor([True, True, False])).tolist() == [0.5, 1.5]


@pytest.mark.parametrize("f", [-1, True])
def test_an_invalid_f_is_refused(f):
    message = r"`f`, the number of attackers to assume, must be a whole number from 0 up"
    with pytest.raises(ConfigError, match=message):
        clip_byzantine_count(gram_rules.krum, f, 7)


def test_a_rule_that_trusts_no_model_is_an_error():
    with pytest.raises(ConfigError, match="the rule trusts none of the models"):
        apply(
            gram_rules.sageflow,
            models(2, 4),
            None,
            torch.ones(2),
            torch.full((2,), 9.0),
            torch.ones(2),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [3, 10, 64])
def test_the_gram_matrix_of_any_rows_in_blocks_of_any_size(dtype, size):
    buffer = models(8, 31, dtype=dtype)
    for rows in (None, torch.arange(2, 6), torch.tensor([5, 0, 7])):
        x = (buffer if rows is None else buffer[rows]).double()
        torch.testing.assert_close(gram(buffer, rows, size=size), x @ x.T)
        extra_models = models(2, 31, 1, dtype)
        both = torch.cat([x, extra_models.double()])
        torch.testing.assert_close(gram(buffer, rows, extra=extra_models, size=size), both @ both.T)
        part = gram(buffer, rows, extra=extra_models, last=2, size=size)
        torch.testing.assert_close(part[:, -2:], (both @ both.T)[:, -2:])
        torch.testing.assert_close(part[-2:], (both @ both.T)[-2:])
        torch.testing.assert_close(part.diagonal(), (both @ both.T).diagonal())
        assert part[:-2, :-2].isnan().sum() == len(x) * (len(x) - 1)


def test_rows_and_mixing_equal_a_copied_matrix(monkeypatch):
    monkeypatch.setattr(gram_matrix, "_block_width", lambda m, device: 7)
    buffer = models(9, 31)
    rows = torch.tensor([6, 1, 4, 3, 8])
    target = apply(own_model_rules.fltrust, buffer[rows])
    assert apply(own_model_rules.fltrust, buffer, rows).equal(target)
    target = buffer[rows].quantile(0.5, dim=0)
    torch.testing.assert_close(apply(coordinatewise.coordinate_median, buffer, rows), target)
    rows = rows[:4]
    mixing = functools.partial(preaggregation.nnm, f=1)
    mixed = preaggregation.nnm(gram(buffer[rows]), f=1) @ buffer[rows]
    for rule in (
        coordinatewise.coordinate_median,
        functools.partial(gram_rules.krum, f=0),
        gram_rules.geometric_median,
    ):
        torch.testing.assert_close(apply(rule, buffer, rows, mixing=mixing), apply(rule, mixed))
    # The pre-step mixes the received models and leaves the agent's own model unchanged.
    own = torch.cat(
        [preaggregation.nnm(gram(buffer[rows[:3]]), f=1) @ buffer[rows[:3]], buffer[rows[3:]]]
    )
    rule = functools.partial(own_model_rules.monna, f=1)
    torch.testing.assert_close(apply(rule, buffer, rows, mixing=mixing), apply(rule, own))
    buckets = preaggregation.bucketing(3, stream(0, "buckets"))
    bucketed = torch.cat([buckets @ buffer[rows[:3]], buffer[rows[3:]]])
    torch.testing.assert_close(apply(rule, buffer, rows, mixing=buckets), apply(rule, bucketed))
    # A model outside all buckets has no weight.
    buffer[1] = 1e300
    buckets = torch.tensor([[0.5, 0, 0.5, 0], [0, 0, 0, 1.0]], dtype=torch.float64)
    expected = ((buffer[6] + buffer[4]) / 2 + buffer[3]) / 2
    torch.testing.assert_close(apply(gram_rules.mean, buffer, rows, mixing=buckets), expected)
    result = apply(coordinatewise.coordinate_median, buffer, rows, mixing=buckets)
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("name", ["mean", "trimmed_mean", "krum", "monna", "fltrust"])
def test_only_gram_entries_that_a_rule_reads_are_computed(name):
    rule = getattr(aggregation, name)
    buffer, rows = models(6, 20), torch.tensor([4, 0, 2, 5])
    full, last = gram(buffer[rows]), len(signature_of(rule).own_rows)
    g, p = gram_and_mixing(rule, buffer, rows, None)
    assert p is None
    is_computed = ~g.isnan()
    torch.testing.assert_close(g[is_computed], full[is_computed])
    entries = signature_of(rule).gram_entries
    expected = {"mean": 0, "trimmed_mean": 0, "krum": 16, "monna": 10, "fltrust": 14}[name]
    assert int(is_computed.sum()) == expected, entries
    peers = 4 - last
    f = (peers - 1) // 2
    g, p = gram_and_mixing(rule, buffer, rows, functools.partial(preaggregation.nnm, f=f))
    torch.testing.assert_close(g, full)
    assert p[:peers, :peers].equal(preaggregation.nnm(full[:peers, :peers], f=f))
    assert p[peers:].equal(torch.eye(4, dtype=torch.float64)[peers:])
    assert not p[:peers, peers:].any()


def test_a_rule_without_a_signature_reads_the_gram_matrix():
    def nearest_to_the_first(gram: Tensor) -> Tensor:
        chosen = torch.zeros(len(gram), dtype=torch.float64)
        chosen[1 + int(gram_rules.squared_distances(gram)[0, 1:].argmin())] = 1.0
        return chosen

    assert apply(nearest_to_the_first, LINE).tolist() == [1, 0]


def test_gram_matrix_with_a_non_finite_model_and_without_columns():
    buffer = models(4, 9)
    buffer[2, 8] = math.inf
    result, finite_rows = gram(buffer), torch.tensor([0, 1, 3])
    assert result.diagonal().isfinite().tolist() == [True, True, False, True]
    expected = buffer[finite_rows] @ buffer[finite_rows].T
    torch.testing.assert_close(result[finite_rows][:, finite_rows], expected)
    assert gram(models(3, 0)).equal(torch.zeros(3, 3, dtype=torch.float64))


def test_a_non_finite_model_is_refused_even_with_weight_0():
    def first_and_last(gram: Tensor) -> Tensor:
        return torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64)

    buffer = models(3, 9)
    assert apply(first_and_last, buffer).equal((buffer[0] + buffer[2]) / 2)
    buffer[1] = math.nan
    with pytest.raises(ConfigError, match=r"not finite: leave out the rows \[1\]"):
        apply(first_and_last, buffer)
    assert apply(first_and_last, buffer, torch.tensor([0, 2, 0])).equal(buffer[0])


RULES = {
    "geometric_median": gram_rules.geometric_median,
    "coordinate_median": coordinatewise.coordinate_median,
    "bulyan": functools.partial(gram_rules.bulyan, f=2),
    "meamed": functools.partial(coordinatewise.meamed, f=5),
    "monna": functools.partial(own_model_rules.monna, f=3),
    "fltrust": own_model_rules.fltrust,
}


@pytest.mark.parametrize("name", RULES)
def test_rules_do_not_copy_the_models(name):
    """Peak memory is less than a tenth of the 64 MB of models, which are in non-adjacent rows."""
    from torch.profiler import ProfilerActivity, profile

    buffer, rows = torch.rand(80, 200_000), torch.arange(0, 80, 2)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        tracemalloc.start()
        apply(RULES[name], buffer, rows)
        numpy_peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    allocated = peak = 0
    for event in profiled.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    assert peak + numpy_peak < 0.1 * buffer.nbytes

"""Pre-aggregation steps by hand."""

import functools

import pytest
import torch
from tests.views import LINE

from fedcb2o.errors import ConfigError
from fedcb2o.federated import algorithms
from fedcb2o.federated.aggregation import coordinatewise, own_model_rules, preaggregation
from fedcb2o.federated.aggregation.base import apply
from fedcb2o.federated.aggregation.gram_matrix import gram
from fedcb2o.rng import stream


def test_pre_steps_by_hand():
    assert preaggregation.nnm(gram(LINE), f=2).tolist() == [
        pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 0]),
        pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 0]),
        pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 0]),
        pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 0]),
        pytest.approx([0, 0, 1 / 3, 1 / 3, 1 / 3]),
    ]
    matrix = preaggregation.bucketing(5, stream(0, "buckets"), size=2)
    assert sorted(matrix.sum(0).tolist()) == [0.5, 0.5, 0.5, 0.5, 1.0]
    assert matrix.sum(1).tolist() == [1, 1, 1]
    assert preaggregation.bucketing(3, stream(0, "buckets"), size=1).sum(0).tolist() == [1, 1, 1]


def test_clipping_around_the_agents_model_by_hand():
    """The distances to the last model are 5, 1, 10 and 2; ARC with f = 1 clips the largest one."""
    x = torch.tensor([[4.0, 5.0], [2.0, 1.0], [7.0, 9.0], [1.0, 3.0], [1.0, 1.0]])
    clipped = preaggregation.clipping(gram(x), radius=2.0) @ x.double()
    assert clipped.tolist() == [
        pytest.approx(row) for row in [[2.2, 2.6], [2, 1], [2.2, 2.6], [1, 3], [1, 1]]
    ]
    adaptive = preaggregation.arc(gram(x), f=1) @ x.double()
    assert adaptive.tolist() == [
        pytest.approx(row) for row in [[4, 5], [2, 1], [4, 5], [1, 3], [1, 1]]
    ]
    assert preaggregation.arc(gram(x[-1:]), f=0).tolist() == [[1]]


@pytest.mark.parametrize("rule", [coordinatewise.trimmed_mean, own_model_rules.monna])
def test_a_rule_and_a_pre_step_share_the_agents_model(rule):
    x = torch.tensor([[4.0, 5.0], [2.0, 1.0], [7.0, 9.0], [1.0, 2.5], [1.0, 1.0]])
    step = functools.partial(preaggregation.clipping, radius=2.0)
    bound = functools.partial(rule, f=1)
    clipped = (step(gram(x)) @ x.double()).float()
    torch.testing.assert_close(apply(bound, x, mixing=step), apply(bound, clipped))


def test_clipping_needs_the_agents_model():
    with pytest.raises(ConfigError, match="`arc` clips about the agent's own model, which"):
        algorithms.by_rule(rule="krum", pre_step="arc", own_model="excluded")
    algorithms.by_rule(rule="monna", pre_step="arc", own_model="excluded")

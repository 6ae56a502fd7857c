"""Pre-steps by hand."""

import pytest
from tests.views import LINE

from fedcb2o.federated.aggregation import preaggregation
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

"""The weights that a criterion gives: where everybody is bad, nobody is to be trusted, or nobody answered."""

import pytest
from tests.views import judged

from fedcb2o.federated import algorithms
from fedcb2o.federated.rules import by_num_samples

INF = float("inf")


@pytest.mark.parametrize("own_model", ["excluded", "judged", "trusted"])
def test_all_peers_huge_still_gives_weights(own_model):
    """In the first rounds every peer may be bad: the least bad one counts, and nothing is 0 / 0."""
    view = judged([[1e6, 1e6], [1e300, 0.0], [1e6, 1e6]], [0.5, 0.5])
    mu = algorithms.fedcb2o(own_model=own_model).weigh(view)
    expected = {"excluded": [0.5, 0, 0.5, 0], "judged": [0, 0, 0, 1], "trusted": [1 / 3, 0, 1 / 3, 1 / 3]}
    assert mu.tolist() == pytest.approx(expected[own_model])


@pytest.mark.parametrize(("own_model", "kept"), [("excluded", 0.0), ("judged", 1.0), ("trusted", 0.0)])
def test_nobody_to_be_trusted_keeps_the_model(own_model, kept):
    view = judged([[INF, 1.0], [2.0, INF]], [0.5, 0.5])
    mu = algorithms.fedcb2o(own_model=own_model).weigh(view)
    assert mu[:2].tolist() == [0.0, 0.0]
    assert mu.sum().item() == kept


@pytest.mark.parametrize("own_model", ["excluded", "judged", "trusted"])
@pytest.mark.parametrize("beta", [None, 0.5])
def test_nobody_answered(own_model, beta):
    mu = algorithms.fedcb2o(own_model=own_model, beta=beta).weigh(judged([], [0.5, 0.5]))
    assert mu[:-1].tolist() == []
    assert mu.sum().item() == (own_model != "excluded")
    assert by_num_samples(judged([], [0.5, 0.5]), own_model="excluded").tolist() == []

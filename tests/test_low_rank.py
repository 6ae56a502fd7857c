import pytest
import torch
from torch import nn

from fedcb2o.errors import ConfigError
from fedcb2o.nn import low_rank, parameters
from tests.networks import Adapted


def test_pairs_are_the_factors_of_the_network():
    network = Adapted()
    theta = parameters.flatten(network)
    (pair,) = low_rank.factor_pairs(network)
    assert torch.equal(pair.a(theta), network.lora_A["default"].weight)
    assert torch.equal(pair.b(theta), network.lora_B["default"].weight)


def test_a_network_without_adapters_has_no_pairs():
    assert low_rank.factor_pairs(nn.Linear(2, 2)) == ()
    with pytest.raises(ConfigError, match="needs a model with low-rank adapters"):
        low_rank.require_pairs((), "the attack `factor_mixing`")


def test_products_do_not_depend_on_the_factors():
    pairs = low_rank.factor_pairs(Adapted())
    theta = torch.randn(18, generator=torch.Generator().manual_seed(0))
    other = theta.clone()
    change_of_basis = torch.tensor([[2.0, 1.0], [0.0, -0.5]])
    pairs[0].a(other).copy_(torch.linalg.inv(change_of_basis) @ pairs[0].a(theta))
    pairs[0].b(other).copy_(pairs[0].b(theta) @ change_of_basis)
    products = low_rank.to_products(torch.stack([theta, other]), pairs)
    assert torch.allclose(products[0], products[1], atol=1e-5)
    assert torch.equal(products[0, :4], theta[:4])  # the bias


def test_a_product_of_rank_r_is_factored_exactly():
    """The factors stay near the agent's own factors, and the bias is the vector's."""
    pairs = low_rank.factor_pairs(Adapted())
    own = torch.randn(18, generator=torch.Generator().manual_seed(1))
    vector = low_rank.to_products(own.unsqueeze(0), pairs)[0]
    vector[:4] = 7.0
    factored = low_rank.from_products(vector, own, pairs)
    assert torch.equal(factored[:4], torch.full((4,), 7.0))
    assert torch.allclose(low_rank.to_products(factored.unsqueeze(0), pairs)[0], vector, atol=1e-5)
    a = pairs[0].a(factored)
    assert torch.allclose(a @ a.T, torch.eye(2) * pairs[0].a(own).norm() ** 2 / 2, atol=1e-4)
    assert (a - pairs[0].a(own)).norm() < pairs[0].a(own).norm()


def test_a_product_of_higher_rank_is_truncated():
    """diag(3, 2, 1) of rank 2 is diag(3, 2, 0)."""
    network = Adapted(inputs=3, outputs=3, rank=2)
    pairs = low_rank.factor_pairs(network)
    own = parameters.flatten(network)
    vector = torch.cat([torch.zeros(3), torch.diag(torch.tensor([3.0, 2.0, 1.0])).flatten()])
    factored = low_rank.from_products(vector, own, pairs)
    product = pairs[0].b(factored) @ pairs[0].a(factored)
    assert torch.allclose(product, torch.diag(torch.tensor([3.0, 2.0, 0.0])), atol=1e-5)


def test_a_model_whose_update_is_zero_can_still_be_trained():
    network = Adapted()
    pairs = low_rank.factor_pairs(network)
    own = parameters.flatten(network)
    pairs[0].b(own).zero_()
    factored = low_rank.from_products(low_rank.to_products(own.unsqueeze(0), pairs)[0], own, pairs)
    assert not pairs[0].b(factored).any()
    assert pairs[0].a(factored).norm() == pytest.approx(float(pairs[0].a(own).norm()), rel=1e-5)


@pytest.mark.parametrize("least", [0.5, 1e-6, 0.0])
@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (5, 5)])
def test_truncation_keeps_the_two_largest_singular_values(shape, least):
    """The values are 2 and `least`, also if the square of `least` underflows."""
    outputs, inputs = shape
    network = Adapted(inputs=inputs, outputs=outputs, rank=2)
    pairs = low_rank.factor_pairs(network)
    own = parameters.flatten(network)
    draw = torch.Generator().manual_seed(0)
    u, _ = torch.linalg.qr(torch.randn(outputs, 3, generator=draw, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(inputs, 3, generator=draw, dtype=torch.float64))
    truncated = 2 * torch.outer(u[:, 0], v[:, 0]) + least * torch.outer(u[:, 1], v[:, 1])
    product = truncated + least / 10 * torch.outer(u[:, 2], v[:, 2])
    vector = torch.cat([own[: len(own) - 2 * (inputs + outputs)], product.flatten().float()])
    factored = low_rank.from_products(vector, own, pairs)
    assert torch.allclose(pairs[0].b(factored) @ pairs[0].a(factored), truncated.float(), atol=1e-6)
    assert torch.linalg.matrix_rank(pairs[0].a(factored)) == 2


@pytest.mark.parametrize("weights", [(0.5, 0.25, 0.25, 0.0), (1.0, 0.0, 0.0, 0.0)])
def test_the_average_of_products_equals_the_average_of_full_products(weights):
    """A model without weight may be infinite."""
    pairs = low_rank.factor_pairs(Adapted())
    thetas = torch.randn(4, 18, generator=torch.Generator().manual_seed(2))
    own, w = thetas[0], torch.tensor(weights, dtype=torch.float64)
    vector = w @ low_rank.to_products(thetas, pairs).double()
    expected = low_rank.from_products(vector.float(), own, pairs)
    thetas = torch.cat([thetas[:3], torch.full((1, 18), torch.inf)])
    average = low_rank.average_products(thetas, w, own, pairs)
    assert torch.allclose(average, expected, atol=1e-5)

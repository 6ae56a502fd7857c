"""Attacks, rules and algorithms on the factors of low-rank adapters."""

import functools

import pytest
import torch
from tests.networks import Adapted
from tests.views import rule_input, view_of

from fedcb2o.data import Shard
from fedcb2o.errors import ConfigError
from fedcb2o.federated import aggregation, algorithms, optimisers
from fedcb2o.federated.adversary import THREAT
from fedcb2o.federated.aggregation import _clair
from fedcb2o.federated.attacks import alie, boosting, factor_mixing, ipm, min_max
from fedcb2o.federated.local_update import local_update_
from fedcb2o.federated.run_spec import Training
from fedcb2o.nn import low_rank, parameters
from fedcb2o.rng import stream

DRAW = stream(0, "test")
PAIRS = low_rank.factor_pairs(Adapted())


def adapter_models(seed: int, count: int = 10) -> torch.Tensor:
    return torch.randn(count, 18, generator=torch.Generator().manual_seed(seed))


def attack_view(attack, models, agent=4):
    see = THREAT.get(attack).knows
    return view_of(models=models, agent=agent, see=see, factor_pairs=PAIRS)


@pytest.mark.parametrize("scale", [-4.0, -1.0, 8.0])
def test_factor_mixing_keeps_the_product_and_changes_the_average(scale):
    """The product is honest. The product of averaged factors is the docstring's multiple of it."""
    models = adapter_models(0)
    view = attack_view(factor_mixing, models)
    crafted = factor_mixing(view, DRAW, scale=scale)
    honest = low_rank.to_products(torch.stack([view.own, crafted]), PAIRS)
    assert torch.allclose(honest[0], honest[1], atol=1e-5)

    w = 0.25
    mixed = low_rank.to_products(torch.lerp(view.own, crafted, w).unsqueeze(0), PAIRS)[0]
    multiple = (1 - w) ** 2 + w**2 + w * (1 - w) * (scale + 1 / scale)
    assert torch.allclose(mixed[4:], multiple * honest[0, 4:], atol=1e-4)


def test_factor_mixing_needs_adapters():
    with pytest.raises(ConfigError, match="low-rank adapters"):
        factor_mixing(view_of(), DRAW)
    with pytest.raises(ConfigError, match="must not be 0"):
        factor_mixing(attack_view(factor_mixing, adapter_models(0)), DRAW, scale=0.0)


@pytest.mark.parametrize("attack", [alie, boosting, ipm, min_max])
def test_attacks_on_models_accept_adapters(attack):
    crafted = attack(attack_view(attack, adapter_models(1)), DRAW)
    assert crafted.shape == (18,)
    assert crafted.isfinite().all()


def adapter_view(models, own=-1):
    """View of an agent whose model is row `own` and that received the models of all other rows."""
    me = own % len(models)
    ids = [j for j in range(len(models)) if j != me]
    return rule_input(models, ids, me, factor_pairs=PAIRS, malicious_share=0.25)


def aggregate_of(algorithm, view):
    """Aggregate of a rule that returns a reduction, computed in two blocks of columns."""
    reduction = algorithm.weigh(view, {})[0].outcome
    parts = [reduction.apply_to_buffer(view.models[:, a:b], a) for a, b in ((0, 7), (7, 18))]
    return torch.cat(parts)


@pytest.mark.parametrize("rule", ["mean", "multi_krum", "trimmed_mean"])
def test_a_rule_on_products_equals_the_rule_on_dense_matrices(rule):
    """The aggregate is the product of rank 2 that is nearest to the dense result."""
    models = adapter_models(2, 9)
    view = adapter_view(models)
    algorithm = algorithms.by_rule(rule=rule, space="products")
    aggregate = aggregate_of(algorithm, view)

    dense = low_rank.to_products(models, PAIRS)
    function = getattr(aggregation, rule)
    if rule != "mean":
        function = functools.partial(function, f=2)
    expected = aggregation.apply(function, dense)
    u, s, vt = torch.linalg.svd(expected[4:].view(4, 3), full_matrices=False)
    expected[4:] = (u[:, :2] * s[:2] @ vt[:2]).flatten()
    assert torch.allclose(low_rank.to_products(aggregate[None], PAIRS)[0], expected, atol=1e-4)


def test_a_rule_on_products_is_immune_to_factor_mixing():
    models = adapter_models(3, 1).repeat(8, 1) + 0.01 * adapter_models(4, 8)
    attacked = models.clone()
    attacked[2] = factor_mixing(attack_view(factor_mixing, models, agent=2), DRAW, scale=-8.0)
    on_products = algorithms.by_rule(rule="mean", space="products")
    clean = aggregate_of(on_products, adapter_view(models))
    assert torch.allclose(aggregate_of(on_products, adapter_view(attacked)), clean, atol=1e-4)
    mean = low_rank.to_products(attacked.mean(0)[None], PAIRS)[0, 4:]
    assert (mean - low_rank.to_products(clean[None], PAIRS)[0, 4:]).norm() > 0.5 * mean.norm()


def test_products_need_adapters_and_a_robust_rule():
    view = rule_input(adapter_models(0), [0], 1)
    with pytest.raises(ConfigError, match='`space` = "products" needs a model'):
        algorithms.by_rule(rule="mean", space="products").weigh(view, {})
    with pytest.raises(ConfigError, match="go with robust rules"):
        algorithms.by_rule(rule="clair", space="products")


def test_clair_detects_agents_outside_the_shared_subspace():
    draw = torch.Generator().manual_seed(5)
    basis = torch.linalg.qr(torch.randn(30, 2, generator=draw, dtype=torch.float64))[0]
    inside = [basis @ torch.randn(2, 20, generator=draw).double() for _ in range(8)]
    outside = [torch.randn(30, 20, generator=draw).double() for _ in range(2)]
    low, is_contaminated = _clair.decompose([torch.stack(inside + outside)], 2**0.5 * 10**-0.25)
    assert is_contaminated.tolist() == [False] * 8 + [True] * 2
    vectors = _clair._left_vectors(low[0], 2)
    assert torch.allclose(vectors @ vectors.T, basis @ basis.T, atol=1e-2)


def test_clair_keeps_its_own_update_inside_the_subspace_and_averages_outside():
    """The updates differ only in the first row, which the agent keeps. All other rows are equal."""
    network = Adapted(outputs=4, rank=2)
    models = parameters.flatten(network).repeat(6, 1)
    b = PAIRS[0].b(models)
    b[:, 0] += torch.randn(6, 2, generator=torch.Generator().manual_seed(6))
    view = adapter_view(models)
    own = low_rank.to_products(models[-1:], PAIRS)[0]
    aggregate = aggregate_of(algorithms.by_rule(rule="clair"), view)
    assert torch.allclose(low_rank.to_products(aggregate[None], PAIRS)[0], own, atol=1e-4)


def test_clair_with_equal_models_and_without_peers():
    models = adapter_models(7, 1).repeat(4, 1)
    rule = algorithms.by_rule(rule="clair").weigh.function
    aggregate = aggregate_of(algorithms.by_rule(rule="clair"), adapter_view(models))
    expected = low_rank.to_products(models[:1], PAIRS)
    assert torch.allclose(low_rank.to_products(aggregate[None], PAIRS), expected, atol=1e-4)
    assert rule(adapter_view(models[:1])).outcome.tolist() == []


def test_tad_lora_trains_b_first_and_then_a():
    algorithm = algorithms.tad_lora(switching_interval=2)
    frozen = [algorithm.frozen_factor(n) for n in range(6)]
    assert frozen == ["lora_A", "lora_A", "lora_B", "lora_B", "lora_A", "lora_A"]
    assert algorithms.dec_lora().frozen_factor(0) is None
    with pytest.raises(ConfigError, match="switching_interval"):
        algorithms.tad_lora(switching_interval=0)


@pytest.mark.parametrize("frozen", ["lora_A", "lora_B"])
def test_a_frozen_factor_does_not_change(frozen):
    """The optimiser is AdamW, whose weight decay changes every trained parameter."""
    network = Adapted()
    theta = parameters.flatten(network)
    before = theta.clone()
    training = Training(gamma=0.1, lambda2=1.0, momentum=0.9, batch_size=4, local_epochs=2)
    training = training.model_copy(update={"optimiser": optimisers.adamw})
    shard = Shard(torch.ones(4, 3), torch.tensor([0, 1, 2, 3]))
    local_update_(theta, network, shard, training, stream(0, "x"), frozen=frozen)
    factors = {"lora_A": PAIRS[0].a, "lora_B": PAIRS[0].b}
    for name, factor in factors.items():
        assert torch.equal(factor(theta), factor(before)) == (name == frozen)
    assert not torch.equal(theta[:4], before[:4])

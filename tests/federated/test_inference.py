"""Losses and predictions of models: by hand, of broken models, and in batches."""

import dataclasses

import pytest
import torch
from tests.agents import agent_samples, network
from tests.networks import NETWORKS, different, fresh, shards
from torch import nn

from fedcb2o.data import Shard
from fedcb2o.federated import inference
from fedcb2o.federated.evaluation.models import (
    confusion_matrices,
    linear_confusion,
    measure_samples,
    predicted_class,
)
from fedcb2o.federated.inference import model_losses
from fedcb2o.nn import parameters


def test_a_model_with_non_finite_outputs_has_infinite_losses():
    module = network()
    models = torch.zeros(3, parameters.dimension(module))
    models[1] = torch.nan
    models[2] = 3e38
    shard = agent_samples().samples
    losses = model_losses(module, models, torch.arange(3), shard, 4)
    assert losses.mean.isfinite().tolist() == [True, False, False]
    assert not losses.mean.isnan().any()
    assert losses.mean[0].item() == pytest.approx(torch.log(torch.tensor(4.0)).item())


@pytest.mark.parametrize(("num_classes", "absent"), [(None, 0), (4, 2)])
def test_losses_of_known_samples_may_have_classes_after_the_largest_label(num_classes, absent):
    per_sample = torch.tensor([[1.0, 3.0, 5.0], [torch.nan, 0.0, 1.0]])
    losses = inference.losses_from_samples(per_sample, torch.tensor([0, 0, 1]), num_classes)
    assert losses.mean.tolist() == [3.0, torch.inf]
    result = losses.by_class.tolist()
    assert result == [[2.0, 5.0] + [0.0] * absent, [torch.inf, 1.0] + [0.0] * absent]
    assert losses.present.tolist() == [True, True] + [False] * absent


@pytest.mark.parametrize("num_classes", [2, 7, 10, 15, 16, 30])
def test_logarithms_of_probabilities_have_the_bits_of_pytorch(num_classes):
    draw = torch.Generator().manual_seed(num_classes)
    for shape in ((1, 1, 1), (2, 3, 5), (9, 21, 4), (1, 0, 3)):
        outputs = 20 * torch.randn(*shape, num_classes, generator=draw)
        outputs[:, :1, 0, 0] = torch.inf
        outputs[:, -1:, -1, -1] = -3e38
        expected = torch.nn.functional.log_softmax(outputs, -1)
        assert torch.equal(
            inference._log_softmax(outputs).nan_to_num(7.0), expected.nan_to_num(7.0)
        )


@pytest.mark.parametrize("num_classes", [2, 7, 10, 15, 16])
@pytest.mark.parametrize("count", [1, 5, 64])
def test_cross_entropies_and_gradients_have_the_bits_of_pytorch(num_classes, count):
    draw = torch.Generator().manual_seed(num_classes)
    weight = torch.randn(count, num_classes, 6, generator=draw).requires_grad_()
    x = torch.randn(count, 3, 6, generator=draw)
    y = torch.randint(num_classes, (count, 3), generator=draw)

    def expected(outputs, labels):
        losses = nn.functional.cross_entropy(
            outputs.flatten(0, 1), labels.flatten(), reduction="none"
        )
        return losses.view(labels.shape)

    results = []
    for function in (expected, inference.cross_entropies):
        losses = function(torch.bmm(x, weight.mT), y)
        results.append((losses, *torch.autograd.grad(losses.mean(1).sum(), weight)))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("scale", [1.0, 1e-4, 0.0])
def test_predictions_of_linear_models_in_one_product_are_the_same(scale):
    """Also of models with equal outputs, or with numbers that are not finite or large."""
    draw = torch.Generator().manual_seed(5)
    module = nn.Sequential(nn.Flatten(), nn.Linear(7, 4))
    models = scale * torch.randn(60, 32, generator=draw)
    models[1, 3], models[2, 30], models[3] = torch.inf, torch.nan, 3e38
    models[4, 7:14] = models[4, :7]
    models[4, 29] = models[4, 28]
    test = Shard(torch.randn(50, 7, generator=draw), torch.randint(4, (50,), generator=draw))
    rows = torch.arange(60).flip(0)
    predicted = measure_samples(module, models, rows, test, predicted_class)
    expected = confusion_matrices(predicted, test.y, 4)
    found = linear_confusion(module, models, rows, test, 4)
    assert found is not None
    assert torch.equal(found.long(), expected)
    assert linear_confusion(nn.Linear(7, 4), models, rows, test, 4) is None


def test_batch_means_by_hand():
    module = network()
    models = torch.randn(
        2, parameters.dimension(module), generator=torch.Generator().manual_seed(0)
    )
    shard = agent_samples().samples
    part = dataclasses.replace(shard, x=shard.x[:11], y=shard.y[:11])
    one_by_one = torch.stack(
        [model_losses(module, models, torch.arange(2), dataclasses.replace(part, x=x[None], y=y[None]), 4).mean
         for x, y in zip(part.x, part.y, strict=True)],
        dim=1,
    )  # fmt: skip
    batches = model_losses(
        module, models, torch.arange(2), part, 4, average="batches", batch_size=8
    ).mean
    expected = (one_by_one[:, :8].mean(1) + one_by_one[:, 8:].mean(1)) / 2
    torch.testing.assert_close(batches, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch_size", [2, 3, 64])
@pytest.mark.parametrize("rows", [[1, 2, 3, 4], [4, 0, 2], [3]])
@pytest.mark.parametrize("name", NETWORKS)
def test_batched_evaluation_equals_evaluation_of_single_models(name, rows, batch_size, monkeypatch):
    monkeypatch.setattr(inference, "SAMPLES_PER_PASS", 4)  # several parts, the last one shorter
    module, (data,) = fresh(name), shards(1, 11)
    models, rows = different(module, 5), torch.tensor(rows)
    (images,) = (shard.x for shard in shards(2, 9)[1:])
    reference = images if name == "local" else None
    alone = inference.model_losses(
        module, models, rows, data, 4, models_per_batch=1, reference=reference
    )
    batched = inference.model_losses(
        module, models, rows, data, 4, models_per_batch=batch_size, reference=reference
    )
    for key in ("mean", "by_class", "entropy"):
        torch.testing.assert_close(getattr(batched, key), getattr(alone, key), rtol=1e-5, atol=1e-6)
    per_model = None if reference is None else [reference] * len(rows)
    predicted = [
        measure_samples(
            module,
            models,
            rows,
            data,
            predicted_class,
            models_per_batch=count,
            references=per_model,
        )
        for count in (1, batch_size)
    ]
    assert torch.equal(*predicted)


def test_large_samples_are_evaluated_agent_by_agent(monkeypatch):
    """A product for several agents repeats their samples per model, within `MAX_BATCH_INPUTS`."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    models, rows = torch.randn(9, 21), torch.randint(9, (5, 4))
    x, y = torch.rand(5, 7, 6), torch.randint(3, (5, 7))
    expected = inference.per_agent_losses(module, models, rows, x, y, 3)
    sizes = []
    baddbmm = torch.baddbmm
    monkeypatch.setattr(
        torch, "baddbmm", lambda bias, h, weight: sizes.append(len(h)) or baddbmm(bias, h, weight)
    )
    for max_inputs, counts in ((2 * 4 * 7 * 6, [8, 8, 4]), (1, [4] * 5)):
        sizes.clear()
        monkeypatch.setattr(inference, "MAX_BATCH_INPUTS", max_inputs)
        result = inference.per_agent_losses(module, models, rows, x, y, 3).by_class
        torch.testing.assert_close(result, expected.by_class)
        assert sizes == counts


@pytest.mark.parametrize(
    "wrap", [nn.Sequential, lambda *layers: nn.Sequential(nn.Identity(), *layers)]
)
def test_confusion_counts_each_sample_once(wrap):
    """Three models always predict the class of their largest bias, in a batch and one by one."""
    module = wrap(nn.Flatten(), nn.Linear(2, 3))
    models = torch.zeros(4, parameters.dimension(module))
    for row, answer in ((0, 2), (1, 0), (3, 1)):
        models[row, 6 + answer] = 1.0  # 6 weights, then 3 biases
    test = Shard(torch.rand(150, 2), torch.tensor([0] * 20 + [1] * 50 + [2] * 80))
    predicted = measure_samples(module, models, torch.tensor([0, 1, 3]), test, predicted_class)
    counts = confusion_matrices(predicted, test.y, 3)
    expected = torch.zeros(3, 3, 3, dtype=torch.int64)
    for m, answer in enumerate((2, 0, 1)):
        expected[m, :, answer] = torch.tensor([20, 50, 80])
    assert counts.equal(expected)

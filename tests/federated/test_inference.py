"""Losses of models and how they do in the test: by hand, of broken models, and of several at once as of one by one."""

import dataclasses

import pytest
import torch
from tests.agents import held, network
from tests.networks import NETWORKS, different, fresh, shards
from torch import nn

from fedcb2o.data import Shard
from fedcb2o.federated import (
    confusion_matrices,
    inference,
    measure_samples,
    model_losses,
    predicted_class,
)
from fedcb2o.nn import parameters


def test_a_model_that_is_no_number_has_infinite_losses():
    module = network()
    pool = torch.zeros(3, parameters.dimension(module))
    pool[1] = torch.nan
    pool[2] = 3e38
    shard = held().samples
    losses = model_losses(module, pool, torch.arange(3), shard, 4)
    assert losses.mean.isfinite().tolist() == [True, False, False]
    assert not losses.mean.isnan().any()
    assert losses.mean[0].item() == pytest.approx(torch.log(torch.tensor(4.0)).item())


def test_batch_means_by_hand():
    module = network()
    pool = torch.randn(2, parameters.dimension(module), generator=torch.Generator().manual_seed(0))
    shard = held().samples
    part = dataclasses.replace(shard, x=shard.x[:11], y=shard.y[:11])
    one_by_one = torch.stack(
        [model_losses(module, pool, torch.arange(2), dataclasses.replace(part, x=x[None], y=y[None]), 4).mean
         for x, y in zip(part.x, part.y, strict=True)],
        dim=1,
    )  # fmt: skip
    batches = model_losses(
        module, pool, torch.arange(2), part, 4, average="batches", batch_size=8
    ).mean
    expected = (one_by_one[:, :8].mean(1) + one_by_one[:, 8:].mean(1)) / 2
    torch.testing.assert_close(batches, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("together", [2, 3, 64])
@pytest.mark.parametrize("rows", [[1, 2, 3, 4], [4, 0, 2], [3]])
@pytest.mark.parametrize("name", NETWORKS)
def test_models_are_judged_together_as_one_by_one(name, rows, together, monkeypatch):
    monkeypatch.setattr(inference, "SAMPLES_PER_PASS", 4)  # several parts, the last of them short
    module, (data,) = fresh(name), shards(1, 11)
    pool, rows = different(module, 5), torch.tensor(rows)
    (seen,) = (shard.x for shard in shards(2, 9)[1:])
    reference = seen if name == "local" else None
    alone = inference.model_losses(
        module, pool, rows, data, 4, models_per_batch=1, reference=reference
    )
    found = inference.model_losses(
        module, pool, rows, data, 4, models_per_batch=together, reference=reference
    )
    for key in ("mean", "by_class", "entropy"):
        torch.testing.assert_close(getattr(found, key), getattr(alone, key), rtol=1e-5, atol=1e-6)
    each = None if reference is None else [reference] * len(rows)
    predicted = [
        measure_samples(
            module, pool, rows, data, predicted_class, models_per_batch=some, references=each
        )
        for some in (1, together)
    ]
    assert torch.equal(*predicted)


def test_large_samples_are_judged_agent_by_agent(monkeypatch):
    """Several agents in one product need their samples once for each model: no more of these than `SEEN`."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    pool, rows = torch.randn(9, 21), torch.randint(9, (5, 4))
    x, y = torch.rand(5, 7, 6), torch.randint(3, (5, 7))
    whole, seen, baddbmm = (
        inference.per_agent_losses(module, pool, rows, x, y, 3),
        [],
        torch.baddbmm,
    )
    monkeypatch.setattr(
        torch, "baddbmm", lambda bias, h, weight: seen.append(len(h)) or baddbmm(bias, h, weight)
    )
    for most, counts in ((2 * 4 * 7 * 6, [8, 8, 4]), (1, [4] * 5)):
        seen.clear()
        monkeypatch.setattr(inference, "MAX_BATCH_INPUTS", most)
        torch.testing.assert_close(
            inference.per_agent_losses(module, pool, rows, x, y, 3).by_class, whole.by_class
        )
        assert seen == counts


@pytest.mark.parametrize(
    "wrap", [nn.Sequential, lambda *layers: nn.Sequential(nn.Identity(), *layers)]
)
def test_confusion_counts_each_sample_once(wrap):
    """Three models that always answer the class of their largest bias, evaluated together and one by one."""
    module = wrap(nn.Flatten(), nn.Linear(2, 3))
    pool = torch.zeros(4, parameters.dimension(module))
    for row, answer in ((0, 2), (1, 0), (3, 1)):
        pool[row, 6 + answer] = 1.0  # 6 weights, then 3 biases
    test = Shard(torch.rand(150, 2), torch.tensor([0] * 20 + [1] * 50 + [2] * 80))
    predicted = measure_samples(module, pool, torch.tensor([0, 1, 3]), test, predicted_class)
    counts = confusion_matrices(predicted, test.y, 3)
    expected = torch.zeros(3, 3, 3, dtype=torch.int64)
    for m, answer in enumerate((2, 0, 1)):
        expected[m, :, answer] = torch.tensor([20, 50, 80])
    assert counts.equal(expected)

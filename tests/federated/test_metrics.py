"""The paper's metrics, and the confusion matrix they come from, by hand."""

import pytest
import torch
from torch import nn

from fedcb2o import models
from fedcb2o.data.shard import Shard
from fedcb2o.federated import metrics
from fedcb2o.federated.evaluate import confusion


def test_metrics_by_hand():
    # Rows are true classes: class 0 is right 8 of 10 times, class 1 6 of 10, and taken for class 2 3 times.
    table = torch.tensor([[8, 1, 1], [1, 6, 3], [0, 0, 10]])
    assert metrics.accuracy(table) == pytest.approx(24 / 30)
    assert metrics.source_accuracy(table, 1) == pytest.approx(0.6)
    assert metrics.attack_success_rate(table, 1, 2) == pytest.approx(0.3)


@pytest.mark.parametrize("wrap", [nn.Sequential, lambda *layers: nn.Sequential(nn.Identity(), *layers)])
def test_confusion_counts_each_sample_once(wrap):
    """Three models that always answer the class of their largest bias, evaluated together and one by one."""
    module = wrap(nn.Flatten(), nn.Linear(2, 3))
    pool = torch.zeros(4, models.dimension(module))
    for row, answer in ((0, 2), (1, 0), (3, 1)):
        pool[row, 6 + answer] = 1.0  # 6 weights, then 3 biases
    test = Shard(torch.rand(150, 2), torch.tensor([0] * 20 + [1] * 50 + [2] * 80))
    counts = confusion(module, pool, torch.tensor([0, 1, 3]), test, 3)
    expected = torch.zeros(3, 3, 3, dtype=torch.int64)
    for m, answer in enumerate((2, 0, 1)):
        expected[m, :, answer] = torch.tensor([20, 50, 80])
    assert counts.equal(expected)

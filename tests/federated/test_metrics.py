"""Metrics of the paper and the success of an attack, by hand."""

import pytest
import torch

from fedcb2o.errors import ConfigError
from fedcb2o.federated.evaluation import metrics
from fedcb2o.federated.evaluation.metrics import AttackGoal, false_positive_share


def test_metrics_by_hand():
    # Rows are true classes. Class 0 is right 8 of 10 times. Class 1 is right 6 of 10 times and
    # taken for class 2 3 times.
    table = torch.tensor([[8, 1, 1], [1, 6, 3], [0, 0, 10]])
    assert metrics.accuracy(table) == pytest.approx(24 / 30)
    assert metrics.source_accuracy(table, 1) == pytest.approx(0.6)
    assert metrics.attack_success_rate(table, 1, 2) == pytest.approx(0.3)


def test_attack_success_by_hand():
    table = torch.tensor([[8, 1, 1], [1, 6, 3], [0, 0, 10]])
    assert AttackGoal().source_accuracy(table) is AttackGoal().success_rate(table) is None
    goal = AttackGoal((0, 1), (1, 2))
    assert goal.source_accuracy(table) == pytest.approx((0.8 + 0.6) / 2)
    assert goal.success_rate(table) == pytest.approx((0.1 + 0.3) / 2)
    assert AttackGoal((1,)).source_accuracy(table) == pytest.approx(0.6)
    assert AttackGoal((1,)).success_rate(table) is None
    # Of the 20 samples of classes 0 and 1, 1 + 3 are taken for class 2. Samples of class 2 do not
    # count.
    assert false_positive_share(table, 2) == pytest.approx(4 / 20)
    assert AttackGoal((), (2,)).success_rate(
        torch.eye(3, dtype=torch.int64), table
    ) == pytest.approx(4 / 20)
    assert AttackGoal((), (2,)).success_rate(table) == pytest.approx(4 / 20)
    assert AttackGoal((), (2,)).source_accuracy(table) is None


def test_metrics_of_classes_without_samples_are_refused_or_skipped():
    """A class without samples has no accuracy; the mean and the minimum over classes skip it."""
    empty = torch.zeros(2, 2, dtype=torch.int64)
    for metric in (metrics.accuracy, metrics.balanced_accuracy, metrics.worst_class_accuracy):
        with pytest.raises(ConfigError, match="the test has no sample, so that its share is not"):
            metric(empty)
    table = torch.tensor([[3, 1], [0, 0]])
    assert metrics.balanced_accuracy(table) == metrics.worst_class_accuracy(table) == 0.75
    with pytest.raises(ConfigError, match="the test has no sample of class 1"):
        metrics.source_accuracy(table, 1)
    with pytest.raises(ConfigError, match="the test has no sample of class 1"):
        metrics.attack_success_rate(table, 1, 0)
    with pytest.raises(ConfigError, match="no sample of another class than 0"):
        false_positive_share(table, 0)
    assert AttackGoal((0, 1), (1, 0)).success_rate(table) == 0.25

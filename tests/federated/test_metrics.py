"""Metrics of the paper and the success of an attack, by hand."""

import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau
from sklearn import metrics as sklearn_metrics
from sklearn.calibration import calibration_curve
from tests.type_checks import VARIABLE

from fedcb2o.errors import ConfigError
from fedcb2o.federated.evaluation import metrics
from fedcb2o.federated.evaluation.metrics import (
    AttackGoal,
    EvaluationResult,
    Score,
    compute_metrics,
)
from fedcb2o.federated.plugin_outputs import metric_value
from fedcb2o.federated.ragged import AgentIds

# Rows are true classes. Class 0 is right 8 of 10 times. Class 1 is right 6 of 10 times and taken for
# class 2 3 times.
TABLE = np.array([[8, 1, 1], [1, 6, 3], [0, 0, 10]], np.int32)


def test_metrics_by_hand():
    assert metrics.accuracy(TABLE) == pytest.approx(24 / 30)
    assert metrics.source_accuracy(TABLE, 1) == pytest.approx(0.6)
    assert metrics.attack_success_rate(TABLE, 1, 2) == pytest.approx(0.3)


def test_attack_success_by_hand():
    assert np.isnan(AttackGoal().source_accuracy(TABLE))
    assert np.isnan(AttackGoal().success_rate(TABLE))
    goal = AttackGoal((0, 1), (1, 2))
    assert goal.source_accuracy(TABLE) == pytest.approx((0.8 + 0.6) / 2)
    assert goal.success_rate(TABLE) == pytest.approx((0.1 + 0.3) / 2)
    assert AttackGoal((1,)).source_accuracy(TABLE) == pytest.approx(0.6)
    assert np.isnan(AttackGoal((1,)).success_rate(TABLE))
    # Of the 20 samples of classes 0 and 1, 1 + 3 are taken for class 2. Samples of class 2 do not
    # count.
    assert metrics.false_positive_share(TABLE, 2) == pytest.approx(4 / 20)
    backdoor = AttackGoal((), (2,))
    assert backdoor.success_rate(np.eye(3, dtype=np.int32), TABLE) == pytest.approx(4 / 20)
    assert backdoor.success_rate(TABLE) == pytest.approx(4 / 20)
    assert np.isnan(backdoor.source_accuracy(TABLE))


def test_classes_without_samples_have_no_value():
    """A class without samples has no accuracy; the mean and the minimum over classes skip it."""
    assert np.isnan(metrics.accuracy(np.zeros((2, 2), np.int32)))
    table = np.array([[3, 1], [0, 0]], np.int32)
    assert np.isnan(metrics.source_accuracy(table, 1))
    assert np.isnan(metrics.attack_success_rate(table, 1, 0))
    assert np.isnan(metrics.false_positive_share(table, 0))
    assert AttackGoal((0, 1), (1, 0)).success_rate(table) == 0.25


@given(st.integers(1, 5), st.integers(2, 12), st.integers(0, 2**32 - 1))
def test_agents_together_have_the_metrics_of_agents_alone(count, num_classes, seed):
    """Every agent has the bits that it would have alone, with the sources that its test has."""
    draw = np.random.default_rng(seed)
    shape = (count, num_classes, num_classes)
    tables = draw.integers(0, 4, shape) * (draw.random((count, num_classes, 1)) < 0.7)
    sources = draw.permutation(num_classes)[: num_classes - 1]
    goal = AttackGoal(tuple(sources.tolist()), tuple(draw.permutation(sources).tolist()))
    scores = [Score(table[None], exact=np.zeros(1)) for table in tables]
    order = draw.permutation(count)
    parts = [EvaluationResult(AgentIds(order[[k]]), scores[k], scores[-1]) for k in range(count)]
    whole = EvaluationResult.concatenate(parts)
    assert whole.agents.tolist() == list(range(count))

    columns = compute_metrics(whole, goal)
    for k in range(count):
        alone = compute_metrics(parts[k], goal)
        for name, column in columns.items():
            np.testing.assert_array_equal(column[order[k]], alone[name][0])

        table = tables[k].tolist()
        known = [(c, t) for c, t in zip(goal.sources, goal.targets, strict=True) if sum(table[c])]
        rates = [table[c][t] / sum(table[c]) for c, t in known]
        expected = sum(rates) / len(rates) if rates else math.nan
        np.testing.assert_array_equal(goal.success_rate(tables)[k], expected)


@st.composite
def classified(draw):
    """Draw outputs with ties, and labels that may lack classes."""
    num_classes = draw(st.integers(2, 4))
    n = draw(st.integers(1, 12))
    row = st.lists(st.integers(-3, 3), min_size=num_classes, max_size=num_classes)
    outputs = draw(st.lists(row, min_size=n, max_size=n))
    labels = draw(st.lists(st.integers(0, num_classes - 1), min_size=n, max_size=n))
    return torch.tensor(outputs) / 2, torch.tensor(labels)


@given(classified())
def test_metrics_of_classes_equal_scikit_learn(samples):
    outputs, targets = samples
    p, y = outputs.double().softmax(1).numpy(), targets.numpy()
    predicted, labels = p.argmax(1), range(p.shape[1])
    present = np.unique(y)
    counts = np.bincount(y)[present]
    for metric, score in (
        (metrics.auc, sklearn_metrics.roc_auc_score),
        (metrics.average_precision, sklearn_metrics.average_precision_score),
    ):
        if len(present) < 2:
            assert metric_value(metric, outputs, targets) is None
            continue
        by_class = [score(y == c, p[:, c]) for c in present]
        for average, weights in (("macro", None), ("weighted", counts)):
            expected = np.average(by_class, weights=weights)
            if p.shape[1] == 2:
                expected = score(y, p[:, 1])
            assert metric(outputs, targets, average=average) == pytest.approx(expected)
        if len(present) == p.shape[1] > 2 and metric is metrics.auc:
            whole = score(y, p, multi_class="ovr", labels=labels)
            assert metrics.auc(outputs, targets) == pytest.approx(whole)
        label = int(present[-1])
        assert metric(outputs, targets, label=label) == pytest.approx(by_class[-1])
    for average in ("macro", "weighted"):
        expected = sklearn_metrics.f1_score(y, predicted, average=average, zero_division=0)
        assert metrics.f1(outputs, targets, average=average) == pytest.approx(expected)
    recall = sklearn_metrics.recall_score(y, predicted, labels=present, average=None)
    assert metrics.balanced_accuracy(outputs, targets) == pytest.approx(recall.mean())
    assert metrics.worst_class_accuracy(outputs, targets) == pytest.approx(recall.min())
    expected = sklearn_metrics.log_loss(y, p, labels=labels)
    assert metrics.log_loss(outputs, targets) == pytest.approx(expected)


@given(classified(), st.integers(1, 20))
def test_the_calibration_error_agrees_with_a_calibration_curve(samples, bins):
    outputs, targets = samples
    confidence, predicted = outputs.double().softmax(1).max(1)
    correct = (predicted == targets).numpy()
    shares, means = calibration_curve(correct, confidence.numpy(), n_bins=bins)
    edges = np.linspace(0, 1, bins + 1)
    counts = np.bincount(np.searchsorted(edges[1:-1], confidence.numpy()), minlength=bins)
    expected = np.average(np.abs(shares - means), weights=counts[counts > 0])
    assert metrics.calibration_error(outputs, targets, bins=bins) == pytest.approx(expected)


@given(st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=2, max_size=15))
def test_metrics_of_numbers_equal_scikit_learn(pairs):
    outputs, targets = torch.tensor(pairs, dtype=torch.float32).T / 3
    p, y = outputs.double().numpy(), targets.double().numpy()
    assert metrics.mae(outputs, targets) == pytest.approx(sklearn_metrics.mean_absolute_error(y, p))
    expected = sklearn_metrics.root_mean_squared_error(y, p)
    assert metrics.rmse(outputs.unsqueeze(1), targets) == pytest.approx(expected)
    r2 = metric_value(metrics.r2, outputs, targets)
    concordance = metric_value(metrics.c_index, outputs, targets)
    if len(set(y)) == 1:
        assert r2 is concordance is None
        return
    assert r2 == pytest.approx(sklearn_metrics.r2_score(y, p))
    # Of all pairs with different targets: Somers' D is (concordant - discordant) / pairs.
    signs = np.sign(np.subtract.outer(y, y)) * np.sign(np.subtract.outer(p, p))
    assert concordance == pytest.approx((signs.sum() / (y[:, None] != y).sum() + 1) / 2)
    if len(set(y)) == len(y) and len(set(p)) == len(p):
        assert concordance == pytest.approx((kendalltau(p, y).statistic + 1) / 2)
    if set(y) == {0.0, y.max()}:
        assert concordance == pytest.approx(sklearn_metrics.roc_auc_score(y > 0, p))
    assert metrics.c_index(outputs, targets, risk=True) == pytest.approx(1 - concordance)


def test_the_c_index_of_censored_samples_by_hand():
    # Times 1 (event), 2 (censored), 2 (event), 3 (event). Comparable: 1 with all three others, the
    # event at 2 with the censored one at 2 and with 3. Outputs order four of the five pairs.
    targets = torch.tensor([[1.0, 1], [2, 0], [2, 1], [3, 1]])
    assert metrics.c_index(torch.tensor([0.0, 3, 2, 1]), targets) == pytest.approx(4 / 5)
    assert math.isnan(metrics.c_index(torch.zeros(2, 1), torch.tensor([[1.0, 0], [2, 0]])))


@pytest.mark.skipif(VARIABLE in os.environ, reason="type checks refuse it first")
def test_metrics_refuse_other_targets_and_have_no_value_of_a_broken_model():
    classes, numbers = torch.tensor([0, 1]), torch.tensor([0.5, 1.0])
    outputs = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    with pytest.raises(ConfigError, match="needs classes: an output for each class"):
        metrics.auc(outputs, numbers)
    with pytest.raises(ConfigError, match="needs numbers as targets"):
        metrics.mae(outputs[:, 0], classes)
    with pytest.raises(ConfigError, match="needs numbers as targets"):
        metrics.rmse(outputs, numbers)
    with pytest.raises(ConfigError, match="`bins` must be 1 or more, got 0"):
        metrics.calibration_error(outputs, classes, bins=0)
    assert metric_value(metrics.auc, outputs, classes) == 1.0
    assert metric_value(metrics.auc, outputs * torch.nan, classes) is None
    assert metric_value(metrics.f1, outputs, classes * 0) is not None
    assert metric_value(metrics.auc, outputs, classes * 0) is None

"""Self-assessment of a node: gain over training alone, contributions and leakage."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.peer.test_node import in_memory, lines_of, run_all, simulation_of

from fedcb2o.federated.evaluation.gain import gain_record, paired_gain
from fedcb2o.federated.evaluation.membership import attack_auc, true_positive_rate
from fedcb2o.peer.node.assessment import BASELINE_FILE
from fedcb2o.peer.report.live_table import _format_scores
from fedcb2o.peer.report.node_page import write_node_report
from fedcb2o.peer.report.peer_records import PeerRecords


def correct_predictions(b: int, c: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return correctness masks of two models: b samples only by the first, c only by the second."""
    first, second = np.ones(n, bool), np.ones(n, bool)
    second[:b] = False
    first[b : b + c] = False
    return first, second


@pytest.mark.parametrize(
    ("b", "c", "n", "low", "high"),
    [  # Bonett and Price (2012), equation 5, by hand
        (0, 0, 10, -0.2310, 0.2310),
        (20, 5, 100, 0.0514, 0.2427),
        (8, 0, 8, 0.4281, 1.0),
    ],
)
def test_intervals_of_paired_differences(b, c, n, low, high):
    gain = paired_gain(*correct_predictions(b, c, n))
    p, q = (b + 1) / (n + 2), (c + 1) / (n + 2)
    half = 1.959964 * math.sqrt((p + q - (p - q) ** 2) / (n + 2))
    assert gain.difference == pytest.approx((b - c) / n)
    assert (gain.low, gain.high) == pytest.approx((p - q - half, min(1.0, p - q + half)))
    assert (gain.low, gain.high) == pytest.approx((low, high), abs=2e-4)


def test_class_gains_use_the_samples_of_one_class():
    labels = np.array([0, 0, 2, 2, 2])
    first, second = np.array([1, 1, 0, 1, 1], bool), np.array([1, 0, 0, 0, 1], bool)
    record = gain_record(first, second, labels, ["a", "b", "c"])
    assert list(record["class_gains"]) == ["a", "c"]
    assert record["class_gains"]["c"] == pytest.approx(vars(paired_gain(first[2:], second[2:])))
    assert record["gain"]["accuracy"] == 0.8
    assert gain_record(first[:0], second[:0], labels[:0], ["a"]) == {}


def test_attack_auc_is_the_share_of_correctly_ordered_pairs():
    draw = np.random.default_rng(0)
    members_, non_members = (
        draw.integers(0, 9, 40).astype(float),
        draw.integers(0, 7, 30).astype(float),
    )
    pairs = members_[:, None] - non_members[None]
    expected = ((pairs > 0).mean() + (pairs == 0).mean() / 2).item()
    assert attack_auc(members_, non_members) == pytest.approx(expected)


@pytest.mark.parametrize(("count", "expected"), [(99, 0.25), (100, 0.5), (250, 0.5)])
def test_true_positive_rate_is_measured_at_one_percent_false_positives(count, expected):
    non_members = np.zeros(count)
    non_members[:2] = [5.0, 3.0]  # one of 100 may be above the threshold
    if count == 250:
        non_members[2] = 3.0
    assert (
        true_positive_rate(np.array([6.0, 4.0, 1.0, -1.0])[[0, 1, 3, 3]], non_members) == expected
    )


def test_a_node_reports_its_gain_over_local_training(tmp_path):
    """The local baseline equals a simulation of local training; peers do not change it."""
    changes = {"rounds": 3, "agents": {"num_clusters": 1, "benign": 2, "malicious": 1, "budget": 2}}
    settings, nodes = in_memory(tmp_path, 3, changes)
    run_all(nodes)
    local = {**settings, "algorithm": {"name": "local_training"}, "together": 1}
    models, _ = simulation_of(tmp_path / "local", local)
    for j in (0, 1):
        alone = load_file(tmp_path / f"out-{j}" / BASELINE_FILE)["theta"]
        assert torch.equal(alone, models[j][: len(alone)])
        last = lines_of(tmp_path / f"out-{j}")[-1]
        assert last["gain"]["accuracy"] == pytest.approx(last["accuracy"])
        assert last["gain"]["samples"] == sum(
            class_gain["samples"] for class_gain in last["class_gains"].values()
        )
        assert 0 <= last["sent_auc"] <= 1
        assert 0 <= last["kept_tpr"] <= 1
        averaged = [model for model in last["received"] if 0 < model["weight"] < 0.99]
        assert all(math.isfinite(model["contribution"]) for model in averaged)
        assert averaged
        assert "gain" in _format_scores(last)
    page = write_node_report(tmp_path / "out-0", membership=True).read_text()
    for words in ("Gain over training alone", "local baseline", "Sum of contributions", "TPR at"):
        assert words in page
    read = PeerRecords.read(tmp_path / "out-0")
    assert read.last_assessed.round == 3
    assert [record.alone_rounds for record in read.rounds] == [1, 2, 3]
    mean, count = read.mean_gain
    assert count == 3
    gains = [record.gain.accuracy - record.gain.alone for record in read.rounds]
    assert mean.accuracy - mean.alone == pytest.approx(np.mean(gains))
    assert f"mean of the last 3 rounds {mean}" in page
    assert "In round 3 the local baseline had 3 rounds of training." in page
    reasons = {model.id: model.unused_reason for model in read.rounds[-1].received}
    for model in last_line(tmp_path / "out-0")["received"]:
        assert (model["weight"] == 0) == bool(reasons[model["id"]])


def last_line(folder):
    return lines_of(folder)[-1]


def test_significance_of_a_loss_depends_on_the_number_of_comparisons():
    """With p = 1 / 22 and q = 7 / 22 the upper end is -0.048, or 0.049 for ten comparisons."""
    gain = paired_gain(np.arange(20) >= 6, np.ones(20, bool))
    assert gain.high == pytest.approx(-0.0480, abs=1e-4)
    assert gain.is_loss(1)
    assert not gain.is_loss(10)
    assert paired_gain(np.arange(20) >= 10, np.ones(20, bool)).is_loss(10)
    assert not paired_gain(np.ones(20, bool), np.ones(20, bool)).is_loss(1)

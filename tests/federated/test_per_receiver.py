"""Attacks that craft one model per receiver, by hand."""

import math

import numpy as np
import torch
from tests.views import BENIGN, assert_near, craft, ten_models, view_of


def test_dissensus_keeps_each_receiver_at_its_own_model():
    """With four benign agents and three attackers of equal weight, the mean is the receiver's."""
    models = ten_models()
    sent = craft("dissensus")
    assert sent.shape == (6, 5)
    for k, i in enumerate(BENIGN):
        average = (models[BENIGN].sum(0) + 3 * sent[k]) / 7
        assert_near(average, models[i])


def test_echo_returns_the_receivers_model_plus_the_poison():
    models, sent = ten_models(), craft("echo", scale=0.5)
    poison = models[4] - models[BENIGN].mean(0)  # the attacker is agent 4
    for k, i in enumerate([*BENIGN, 7, 8]):
        assert_near(sent[k], models[i] + 0.5 * poison)


def test_equivocation_sends_two_opposite_models():
    models = ten_models()
    sent = craft("equivocation", z=2.0)
    mean, std = models[BENIGN].mean(0), models[BENIGN].std(0, correction=0)
    for k in range(6):
        assert_near(sent[k], mean + (2 if k % 2 else -2) * std)


def test_spectral_on_a_path():
    """The Fiedler vector of the path 0 - 1 - 2 - 3 is (a, b, -b, -a).

    That of two linked agents is (1, -1) / sqrt(2).
    """
    links = np.zeros((6, 6), dtype=bool)
    for i, j in ((0, 1), (1, 2), (2, 3), (4, 5)):
        links[i, j] = links[j, i] = True
    models = ten_models()
    sent = craft("spectral", eps=0.3, view=view_of(models=models, links=lambda: links))
    a, b = math.cos(math.pi / 8) / math.sqrt(2), math.cos(3 * math.pi / 8) / math.sqrt(2)
    push = 0.3 * 4 / 3  # four benign agents and three attackers
    for ids, rows, fiedler in (
        (BENIGN, [0, 1, 2, 3], [a, b, -b, -a]),
        ([7, 8], [4, 5], [math.sqrt(0.5), -math.sqrt(0.5)]),
    ):
        projection = sum(weight * models[i] for weight, i in zip(fiedler, ids, strict=True))
        for row, weight, i in zip(rows, fiedler, ids, strict=True):
            assert_near(sent[row], models[i] + push * weight * projection)


def test_spectral_on_a_complete_graph_undoes_averaging_along_the_largest_variance():
    """Along this direction, the average is the receiver's own model.

    The sent models differ from it in no other direction.
    """
    models = ten_models()
    sent = craft("spectral")
    mean = models[BENIGN].mean(0)
    u = torch.linalg.svd(models[BENIGN] - mean).Vh[0]
    for k, i in enumerate(BENIGN):
        average = (models[BENIGN].sum(0) + 3 * sent[k]) / 7
        assert_near((average - mean) @ u, (models[i] - mean) @ u)
        assert_near(sent[k] - models[i], ((sent[k] - models[i]) @ u) * u)


def test_spectral_spares_receivers_without_links_or_finite_models():
    links = np.zeros((6, 6), dtype=bool)
    links[0, 1] = links[1, 0] = True
    models = ten_models()
    sent = craft("spectral", view=view_of(models=models, links=lambda: links))
    assert sent[2:].equal(models[[2, 3, 7, 8]])
    assert_near(sent[:2].mean(0), models[:2].mean(0))
    broken = models.clone()
    broken[3] = torch.nan
    sent = craft("spectral", view=view_of(models=broken))
    assert sent[3].isnan().all()
    assert sent[[0, 1, 2, 4, 5]].isfinite().all()


def test_user_isolation_keeps_one_agent_at_its_own_model():
    """The average of all seven models is its own model at agent 2.

    For the other receivers it is the mean of the other three.
    """
    models = ten_models()
    sent = craft("user_isolation", agent=2)
    victim, mean_of_others = models[2], models[[0, 1, 3]].mean(0)
    assert_near((models[BENIGN].sum(0) + 3 * sent[2]) / 7, victim)
    for row in (0, 1, 3, 4, 5):
        assert_near((models[BENIGN].sum(0) + 3 * sent[row]) / 7, mean_of_others)
    wrapped = craft("user_isolation", agent=6, eps=0.0)  # agent 6 of four is agent 2 again
    assert_near(wrapped[2], victim)
    assert_near(wrapped[0], mean_of_others)

"""Attacks on models with another one for every receiver, by hand."""

import math

import numpy as np
import torch
from tests.views import BENIGN, ten_models, view_of

from fedcb2o.federated import attacks
from fedcb2o.rng import stream


def crafted(name, *, view=None, **parameters):
    attack = getattr(attacks, name)
    return attack(view or view_of(attack), stream(0, "draw"), **parameters)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_dissensus_undoes_what_averaging_brings():
    """Four benign agents of one cluster and three attackers, equal weights: the mean of all is the
    receiver's own."""
    models = ten_models()
    found = crafted("dissensus")
    assert found.shape == (6, 5)
    for k, i in enumerate(BENIGN):
        average = (models[BENIGN].sum(0) + 3 * found[k]) / 7
        close(average, models[i])


def test_echo_gives_back_what_it_got_and_the_poison():
    models, found = ten_models(), crafted("echo", scale=0.5)
    poison = models[4] - models[BENIGN].mean(0)  # the attacker is number 4
    for k, i in enumerate([*BENIGN, 7, 8]):
        close(found[k], models[i] + 0.5 * poison)


def test_equivocation_tells_two_stories():
    models = ten_models()
    found = crafted("equivocation", z=2.0)
    mean, std = models[BENIGN].mean(0), models[BENIGN].std(0, correction=0)
    for k in range(6):
        close(found[k], mean + (2 if k % 2 else -2) * std)


def test_spectral_on_a_path():
    """0 - 1 - 2 - 3: the Fiedler vector of a path of four is (a, b, -b, -a), a = cos(pi / 8) /
    sqrt(2) and b = cos(3 pi / 8) / sqrt(2). The two of the other cluster are linked, theirs is
    (1, -1) / sqrt(2)."""
    links = np.zeros((6, 6), dtype=bool)
    for i, j in ((0, 1), (1, 2), (2, 3), (4, 5)):
        links[i, j] = links[j, i] = True
    models = ten_models()
    found = crafted("spectral", eps=0.3, view=view_of(models=models, links=lambda: links))
    a, b = math.cos(math.pi / 8) / math.sqrt(2), math.cos(3 * math.pi / 8) / math.sqrt(2)
    push = 0.3 * 4 / 3  # four benign agents and three attackers
    for ids, places, f in (
        (BENIGN, [0, 1, 2, 3], [a, b, -b, -a]),
        ([7, 8], [4, 5], [math.sqrt(0.5), -math.sqrt(0.5)]),
    ):
        along = sum(weight * models[i] for weight, i in zip(f, ids, strict=True))
        for place, weight, i in zip(places, f, ids, strict=True):
            close(found[place], models[i] + push * weight * along)


def test_spectral_on_a_complete_graph_undoes_averaging_where_models_differ_most():
    """In the direction of the largest variance, and nowhere else, the average of four benign agents
    and three attackers is what the receiver had."""
    models = ten_models()
    found = crafted("spectral")
    mean = models[BENIGN].mean(0)
    u = torch.linalg.svd(models[BENIGN] - mean).Vh[0]
    for k, i in enumerate(BENIGN):
        average = (models[BENIGN].sum(0) + 3 * found[k]) / 7
        close((average - mean) @ u, (models[i] - mean) @ u)
        close(found[k] - models[i], ((found[k] - models[i]) @ u) * u)


def test_spectral_leaves_alone_who_has_no_link_or_no_finite_model():
    links = np.zeros((6, 6), dtype=bool)
    links[0, 1] = links[1, 0] = True
    models = ten_models()
    found = crafted("spectral", view=view_of(models=models, links=lambda: links))
    assert found[2:].equal(models[[2, 3, 7, 8]])
    close(found[:2].mean(0), models[:2].mean(0))
    broken = models.clone()
    broken[3] = torch.nan
    found = crafted("spectral", view=view_of(models=broken))
    assert found[3].isnan().all()
    assert found[[0, 1, 2, 4, 5]].isfinite().all()


def test_user_isolation_cuts_one_agent_off():
    """Agent 2 of four benign agents and three attackers: the plain average of all seven is its own
    model at itself, and the mean of the other three elsewhere."""
    models = ten_models()
    found = crafted("user_isolation", agent=2)
    victim, others = models[2], models[[0, 1, 3]].mean(0)
    close((models[BENIGN].sum(0) + 3 * found[2]) / 7, victim)
    for place in (0, 1, 3, 4, 5):
        close((models[BENIGN].sum(0) + 3 * found[place]) / 7, others)
    none = crafted("user_isolation", agent=6, eps=0.0)  # number 6 of four is number 2 again
    close(none[2], victim)
    close(none[0], others)

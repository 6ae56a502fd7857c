"""What agents hold, against plain indexing: each cluster sees samples its way, and who attacks poisons what it trains
on, from its round on."""

import dataclasses
import functools

import numpy as np
import pytest
import torch

from fedcb2o.data import ClusterTransform, Shard, transforms
from fedcb2o.errors import ConfigError
from fedcb2o.federated import AgentData, Attack, Ragged
from fedcb2o.rng import stream

CLASSES, SEED, FROM = 5, 11, 3
AGENTS, CLUSTER, MALICIOUS = [1, 4, 6, 9], [0, 3, 1, 2], [False, True, False, True]
TRAIN = [[0, 7, 3], [5, 1, 2], [9, 9, 4], [8, 6, 0]]
VALIDATION = [[1, 2], [3, 0], [4, 5], [6, 7]]
SOME = [[0, 1, 2, 3], [3, 0, 1], [2, 0], [1], [2]]


def images(count, seed):
    x = torch.from_numpy(stream(seed, "images").normal(size=(count, 1, 3, 3))).float()
    return Shard(x, torch.arange(count) % CLASSES)


def poison(shard, draw):
    """Every image is shifted by a draw of the agent's, in place, and each label is the next class."""
    shard.x.add_(draw.random())
    return Shard(shard.x, (shard.y + 1) % CLASSES)


def holdings(attack=None):
    return AgentData(
        agents=np.array(AGENTS),
        samples=images(10, 0),
        test=images(6, 1),
        train=Ragged.from_arrays([np.array(one) for one in TRAIN]),
        validation=Ragged.from_arrays([np.array(one) for one in VALIDATION]),
        cluster=np.array(CLUSTER),
        view=ClusterTransform(functools.partial(transforms.rotation), 4, CLASSES, (0.0, 1.0)),
        num_classes=CLASSES,
        malicious=np.array(MALICIOUS),
        attack=attack or Attack(poison=poison, from_round=FROM),
        seed=SEED,
    )


def turned(image, times):
    """An image [1, 3, 3] after so many quarter turns counter-clockwise."""
    for _ in range(times):
        image = torch.stack(
            [torch.stack([image[0, j, 2 - i] for j in range(3)]) for i in range(3)]
        ).unsqueeze(0)
    return image


def seen(k, chosen, samples):
    """What the agent in place k sees of some samples."""
    return torch.stack([turned(samples.x[i], CLUSTER[k]) for i in chosen]), samples.y[chosen]


def hold_equal(found, expected):
    assert len(found[0]) == len(found[1]) == len(expected)
    for x, y, one in zip(*found, expected, strict=True):
        assert x.equal(one[0])
        assert y.equal(one[1])


@pytest.mark.parametrize("some", SOME)
@pytest.mark.parametrize("n", [0, FROM - 1, FROM, FROM + 5])
def test_the_malicious_poison_what_they_train_on_from_their_round_on(some, n):
    held = holdings()
    expected = []
    for k in some:
        x, y = seen(k, TRAIN[k], held.samples)
        if MALICIOUS[k] and n >= FROM:
            x, y = x + stream(SEED, "attack", AGENTS[k]).random(), (y + 1) % CLASSES
        expected.append((x, y))
    before = held.samples.x.clone()
    for _ in range(2):  # in every round from the true samples
        hold_equal(held.training_data(np.array(some), n), expected)
    assert held.samples.x.equal(before)


def test_an_attack_that_asks_is_told_who_it_poisons_for():
    def marked(shard, draw, me, *, by):
        return Shard(torch.full_like(shard.x, by * me), shard.y)

    x, _ = holdings(Attack(poison=functools.partial(marked, by=2))).training_data(
        np.array([1, 3]), 0
    )
    assert [one.unique().tolist() for one in x] == [[2 * AGENTS[1]], [2 * AGENTS[3]]]


def test_nobody_poisons_without_an_attack_on_data():
    held = holdings(Attack(craft=lambda view, draw: view.own))
    hold_equal(
        held.training_data(np.arange(4), 9), [seen(k, TRAIN[k], held.samples) for k in range(4)]
    )


@pytest.mark.parametrize("some", SOME)
def test_nobody_poisons_what_it_judges_on(some):
    held = holdings()
    hold_equal(
        held.gather(np.array(some), held.validation),
        [seen(k, VALIDATION[k], held.samples) for k in some],
    )


def test_the_true_samples_and_the_test_set():
    held = holdings()
    for k in range(4):
        true, ((_, test),) = held.clean_training_data(k), held.test_sets(np.array([k]))
        hold_equal((true.x.unsqueeze(0), true.y.unsqueeze(0)), [seen(k, TRAIN[k], held.samples)])
        hold_equal((test.x.unsqueeze(0), test.y.unsqueeze(0)), [seen(k, list(range(6)), held.test)])


@pytest.mark.parametrize("label", [-1, CLASSES])
def test_labels_that_there_are_not_are_told(label):
    wrong = Attack(poison=lambda shard, draw: Shard(shard.x, torch.full_like(shard.y, label)))
    with pytest.raises(ConfigError, match="the attack returned labels outside 0 to 4"):
        holdings(wrong).training_data(np.arange(4), 0)


def test_agents_see_the_labels_of_their_clusters():
    """Cluster k renames class c to c + k; pixels, and the samples that all agents share, stay as they are."""
    renamed = ClusterTransform(functools.partial(transforms.permute_labels), 4, CLASSES, (0.0, 1.0))
    held = dataclasses.replace(holdings(), view=renamed)
    before = held.samples.y.clone()
    x, y = held.gather(np.array([1, 0, 2]), held.validation)
    assert x.equal(held.samples.x[torch.tensor([[3, 0], [1, 2], [4, 5]])])
    assert y.tolist() == [[(3 + 3) % 5, 3], [1, 2], [(4 + 1) % 5, 1]]
    assert held.samples.y.equal(before)

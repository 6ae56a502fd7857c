"""Data of agents, compared with plain indexing: cluster transforms and poisoning."""

import dataclasses
import functools

import numpy as np
import pytest
import torch

from fedcb2o.data import ClusterTransform, Shard, transforms
from fedcb2o.errors import ConfigError
from fedcb2o.federated.adversary import PER_SAMPLE, Attack
from fedcb2o.federated.agent_group import AgentData
from fedcb2o.federated.ragged import Ragged
from fedcb2o.rng import stream

CLASSES, SEED, FIRST_ROUND = 5, 11, 3
AGENTS, CLUSTER, MALICIOUS = [1, 4, 6, 9], [0, 3, 1, 2], [False, True, False, True]
TRAIN = [[0, 7, 3], [5, 1, 2], [9, 9, 4], [8, 6, 0]]
VALIDATION = [[1, 2], [3, 0], [4, 5], [6, 7]]
MEMBERS = [[0, 1, 2, 3], [3, 0, 1], [2, 0], [1], [2]]


def images(count, seed):
    x = torch.from_numpy(stream(seed, "images").normal(size=(count, 1, 3, 3))).float()
    return Shard(x, torch.arange(count) % CLASSES)


def poison(shard, draw):
    """Shift all images in place by one random number; replace each label by the next class."""
    shard.x.add_(draw.random())
    return Shard(shard.x, (shard.y + 1) % CLASSES)


def agent_data(attack=None):
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
        attack=attack or Attack(poison=poison, from_round=FIRST_ROUND),
        seed=SEED,
    )


def rotated(image, quarter_turns):
    """Rotate an image [1, 3, 3] counter-clockwise by this number of quarter turns."""
    for _ in range(quarter_turns):
        image = torch.stack(
            [torch.stack([image[0, j, 2 - i] for j in range(3)]) for i in range(3)]
        ).unsqueeze(0)
    return image


def expected_samples(k, indices, samples):
    """Samples with these indices as the agent at position k sees them."""
    return torch.stack([rotated(samples.x[i], CLUSTER[k]) for i in indices]), samples.y[indices]


def assert_equal(result, expected):
    assert len(result[0]) == len(result[1]) == len(expected)
    for x, y, pair in zip(*result, expected, strict=True):
        assert x.equal(pair[0])
        assert y.equal(pair[1])


@pytest.mark.parametrize("members", MEMBERS)
@pytest.mark.parametrize("n", [0, FIRST_ROUND - 1, FIRST_ROUND, FIRST_ROUND + 5])
def test_attackers_poison_their_training_data_from_their_first_round(members, n):
    data = agent_data()
    expected = []
    for k in members:
        x, y = expected_samples(k, TRAIN[k], data.samples)
        if MALICIOUS[k] and n >= FIRST_ROUND:
            x, y = x + stream(SEED, "attack", AGENTS[k]).random(), (y + 1) % CLASSES
        expected.append((x, y))
    before = data.samples.x.clone()
    for _ in range(2):  # each round starts from the clean samples
        assert_equal(data.training_data(np.array(members), n), expected)
    assert data.samples.x.equal(before)


@pytest.mark.parametrize("members", MEMBERS)
def test_a_poison_of_single_samples_is_called_once_for_all_attackers(members):
    calls = []

    def flip(shard, draw):
        calls.append(len(shard))
        return Shard(shard.x + 1, (shard.y + 2) % CLASSES)

    @PER_SAMPLE(True)
    def flip_all(shard, draw):
        return flip(shard, draw)

    expected = agent_data(Attack(poison=flip)).training_data(np.array(members), 0)
    sizes, calls[:] = list(calls), []
    assert_equal(
        agent_data(Attack(poison=flip_all)).training_data(np.array(members), 0),
        list(zip(*expected, strict=True)),
    )
    assert calls == ([sum(sizes)] if sizes else [])


def test_an_attack_receives_the_id_of_its_agent():
    def mark(shard, draw, me, *, by):
        return Shard(torch.full_like(shard.x, by * me), shard.y)

    x, _ = agent_data(Attack(poison=functools.partial(mark, by=2))).training_data(
        np.array([1, 3]), 0
    )
    assert [one.unique().tolist() for one in x] == [[2 * AGENTS[1]], [2 * AGENTS[3]]]


def test_training_data_is_clean_without_an_attack_on_data():
    data = agent_data(Attack(craft=lambda view, draw: view.own))
    expected = [expected_samples(k, TRAIN[k], data.samples) for k in range(4)]
    assert_equal(data.training_data(np.arange(4), 9), expected)


@pytest.mark.parametrize("members", MEMBERS)
def test_validation_data_is_not_poisoned(members):
    data = agent_data()
    expected = [expected_samples(k, VALIDATION[k], data.samples) for k in members]
    assert_equal(data.gather(np.array(members), data.validation), expected)


def test_clean_training_data_and_test_sets_are_not_poisoned():
    data = agent_data()
    for k in range(4):
        clean, ((_, test),) = data.clean_training_data(k), data.test_sets(np.array([k]))
        expected = [expected_samples(k, TRAIN[k], data.samples)]
        assert_equal((clean.x.unsqueeze(0), clean.y.unsqueeze(0)), expected)
        expected = [expected_samples(k, list(range(6)), data.test)]
        assert_equal((test.x.unsqueeze(0), test.y.unsqueeze(0)), expected)


@pytest.mark.parametrize("label", [-1, CLASSES])
def test_poisoned_labels_out_of_range_are_refused(label):
    wrong = Attack(poison=lambda shard, draw: Shard(shard.x, torch.full_like(shard.y, label)))
    with pytest.raises(ConfigError, match="the attack returned labels outside 0 to 4"):
        agent_data(wrong).training_data(np.arange(4), 0)


def test_agents_see_the_labels_of_their_clusters():
    """Cluster k renames class c to c + k. Pixels and shared samples do not change."""
    permutation = ClusterTransform(
        functools.partial(transforms.permute_labels), 4, CLASSES, (0.0, 1.0)
    )
    data = dataclasses.replace(agent_data(), view=permutation)
    before = data.samples.y.clone()
    x, y = data.gather(np.array([1, 0, 2]), data.validation)
    assert x.equal(data.samples.x[torch.tensor([[3, 0], [1, 2], [4, 5]])])
    assert y.tolist() == [[(3 + 3) % 5, 3], [1, 2], [(4 + 1) % 5, 1]]
    assert data.samples.y.equal(before)

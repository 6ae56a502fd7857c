"""Partition of samples among agents: counts by hand, and invariants of every population."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcb2o.data import Population, partition
from fedcb2o.data.skews import dirichlet, shards
from fedcb2o.errors import ConfigError, DataError
from fedcb2o.rng import stream

SMALL = {
    "num_clusters": 2,
    "benign": 3,
    "malicious": 2,
    "benign_samples": 20,
    "malicious_samples": 30,
    "validation": 0.25,
    "split": "random",
    "num_classes": 4,
    "seed": 7,
}
LABELS = torch.arange(200) % 4
SKEWS = (None, functools.partial(dirichlet, concentration=0.5), shards)


def samples_of(population: Population, agent: int) -> list[int]:
    return torch.cat([population.train[agent], population.validation[agent]]).tolist()


def all_equal(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_population_of_the_paper():
    """Each of 2 clusters has 35 agents of 500 samples and 15 of 1,200.

    Of the 500, 400 are for training and 100 for validation.
    """
    population = partition(
        torch.arange(42_300) % 47,
        num_clusters=2,
        benign=35,
        malicious=15,
        benign_samples=500,
        malicious_samples=1200,
        validation=0.2,
        split="random",
        num_classes=47,
        seed=0,
        tuning_size=10_000,
    )
    assert population.cluster.tolist() == [0] * 50 + [1] * 50
    assert population.malicious.tolist() == ([False] * 35 + [True] * 15) * 2
    assert [len(t) for t in population.train] == ([400] * 35 + [1200] * 15) * 2
    assert [len(v) for v in population.validation] == ([100] * 35 + [0] * 15) * 2
    assert len(population.tuning) == 42_300 - 35_500


def test_samples_are_drawn_from_named_streams():
    """A change of these streams would change the results of all runs."""
    population = partition(LABELS, **SMALL)
    pool_order = stream(7, "partition", "pool").permutation(200)
    dealt = stream(7, "partition", 1).permutation(pool_order[:120])
    second = dealt[20:40]  # the second benign agent of cluster 1, agent 6 of 10
    order = stream(7, "split", 6).permutation(20)
    assert sorted(population.validation[6].tolist()) == sorted(second[order[:5]].tolist())
    assert sorted(population.train[6].tolist()) == sorted(second[order[5:]].tolist())
    assert population.train[8].tolist() == dealt[60:90].tolist()  # the first attacker of cluster 1
    assert population.tuning.tolist() == pool_order[120:].tolist()


@given(
    num_clusters=st.sampled_from([1, 2, 4]),
    benign=st.integers(1, 4),
    malicious=st.integers(0, 3),
    benign_samples=st.integers(10, 25),
    malicious_samples=st.integers(1, 30),
    split=st.sampled_from(["random", "stratified"]),
    skew=st.sampled_from(SKEWS),
    hold_out=st.booleans(),
    seed=st.integers(0, 2**32),
    tuning_size=st.integers(0, 300),
)
def test_invariants_of_every_population(tuning_size, **settings):
    settings |= {"validation": 0.3, "num_classes": 4}
    population = partition(LABELS, tuning_size=tuning_size, **settings)
    K, per_cluster = settings["num_clusters"], settings["benign"] + settings["malicious"]
    assert (
        len(population.train)
        == len(population.validation)
        == len(population.cluster)
        == K * per_cluster
    )
    num_needed = (
        settings["benign"] * settings["benign_samples"]
        + settings["malicious"] * settings["malicious_samples"]
    )
    images = set()
    for c in range(K):
        of_cluster = []
        for agent in torch.nonzero(population.cluster == c).flatten().tolist():
            train = population.train[agent].tolist()
            validation = population.validation[agent].tolist()
            is_attacker = bool(population.malicious[agent])
            of_agent = (
                sorted(train)
                if is_attacker or not settings["hold_out"]
                else sorted(train + validation)
            )
            assert (
                len(of_agent) == settings["malicious_samples" if is_attacker else "benign_samples"]
            )
            assert len(validation) == 0 if is_attacker else set(validation) <= set(of_agent)
            of_cluster += of_agent
        assert len(set(of_cluster)) == len(of_cluster) == num_needed  # disjoint within a cluster
        images = images or set(of_cluster)
        assert set(of_cluster) == images  # the same images in every cluster
    assert not images & set(population.tuning.tolist())
    assert (
        len(set(population.tuning.tolist()))
        == len(population.tuning)
        == min(tuning_size, 200 - num_needed)
    )


every_draw = given(
    seed=st.integers(0, 2**32),
    split=st.sampled_from(["random", "stratified", "released"]),
    skew=st.sampled_from(SKEWS),
)


@every_draw
def test_cluster_0_is_the_same_for_one_cluster_and_for_two(seed, split, skew):
    settings = SMALL | {"seed": seed, "split": split, "skew": skew}
    one, two = (partition(LABELS, **(settings | {"num_clusters": K})) for K in (1, 2))
    assert all_equal(one.train, two.train[:5])
    assert all_equal(one.validation, two.validation[:5])
    assert torch.equal(one.tuning, two.tuning)


@every_draw
def test_removal_of_attackers_keeps_the_benign_agents(seed, split, skew):
    settings = SMALL | {"seed": seed, "split": split, "skew": skew}
    full = partition(LABELS, **settings)
    reduced = partition(LABELS, **settings, remove_malicious=True)
    benign = [0, 1, 2, 5, 6, 7]
    assert not reduced.malicious.any()
    assert reduced.cluster.tolist() == [0, 0, 0, 1, 1, 1]
    assert all_equal(reduced.train, tuple(full.train[j] for j in benign))
    assert all_equal(reduced.validation, tuple(full.validation[j] for j in benign))
    assert torch.equal(reduced.tuning, full.tuning)


def test_a_skew_deals_the_same_samples_by_its_own_stream():
    settings = SMALL | {"seed": 7}
    calls = []

    def reversed_skew(labels, sizes, draw):
        calls.append((labels, sizes.tolist(), draw.random()))
        return np.repeat(np.arange(5), sizes)[::-1].copy()

    population = partition(LABELS, skew=reversed_skew, **settings)
    pool_order = stream(7, "partition", "pool").permutation(200)
    for c in (0, 1):
        dealt = stream(7, "partition", c).permutation(pool_order[:120])
        labels, sizes, first = calls[c]
        assert labels.tolist() == LABELS[torch.from_numpy(dealt)].tolist()
        assert sizes == [20, 20, 20, 30, 30]
        assert first == stream(7, "skew", c).random()
        # the last agent gets the first samples
        assert population.train[5 * c + 4].tolist() == dealt[:30].tolist()
        assert sorted(samples_of(population, 5 * c)) == sorted(dealt[100:].tolist())
    assert torch.equal(population.tuning, partition(LABELS, **settings).tuning)


@pytest.mark.parametrize(
    ("skew", "message"),
    [
        (
            lambda labels, sizes, draw: None,
            "the skew returned None, expected an array of 120 integers: the agent of ",
        ),
        (lambda labels, sizes, draw: np.zeros(120), r"the skew returned float64 \[120\], expected"),
        (lambda labels, sizes, draw: sizes, r"the skew returned int64 \[5\], expected"),
        (lambda labels, sizes, draw: labels + 2, "gives samples to agents 2 to 5, and a cluster has agents 0 to 4"),
        (lambda labels, sizes, draw: labels * 0, "the skew gives agent 0 120 samples instead of 20"),
    ],
)  # fmt: skip
def test_a_skew_with_invalid_agents_is_refused(skew, message):
    with pytest.raises(ConfigError, match=message):
        partition(LABELS, skew=skew, **SMALL)


def test_without_hold_out_training_adds_the_validation_data():
    held_out, not_held_out = partition(LABELS, **SMALL), partition(LABELS, **SMALL, hold_out=False)
    assert all_equal(not_held_out.validation, held_out.validation)
    result = not_held_out.train[0].tolist()
    assert result == held_out.train[0].tolist() + held_out.validation[0].tolist()
    # attackers have no validation data
    assert torch.equal(not_held_out.train[3], held_out.train[3])


@pytest.mark.parametrize(
    ("split", "fraction", "expected"),
    [
        # 10 samples of class 0, 5 of class 1, 4 of class 2, 1 of class 3
        ("stratified", 0.2, [2, 1, 1, 0]),  # round(0.8) = 1; the single sample trains
        ("stratified", 0.05, [1, 1, 1, 0]),  # at least one
        ("stratified", 0.95, [9, 4, 3, 0]),  # round(9.5) = 10 and 5, 4, but never a whole class
        ("released", 0.2, [2, 1, 4, 1]),  # fewer than 5: the whole class validates
        ("released", 0.5, [5, 2, 2, 1]),
    ],
)
def test_splits_by_class_by_hand(split, fraction, expected):
    labels = torch.tensor([0] * 10 + [1] * 5 + [2] * 4 + [3])
    settings = SMALL | {
        "num_clusters": 1,
        "benign": 1,
        "malicious": 0,
        "validation": fraction,
        "split": split,
    }
    population = partition(labels, **settings)
    assert torch.bincount(labels[population.validation[0]], minlength=4).tolist() == expected
    assert sorted(samples_of(population, 0)) == list(range(20))


@pytest.mark.parametrize("split", ["random", "stratified", "released"])
def test_without_hold_out_all_samples_may_validate(split):
    settings = SMALL | {"split": split, "hold_out": False}
    half, whole = (
        partition(LABELS, **(settings | {"validation": fraction})) for fraction in (0.5, 1.0)
    )
    for j in (~whole.malicious).nonzero().flatten().tolist():
        assert (
            sorted(whole.train[j].tolist())
            == sorted(whole.validation[j].tolist())
            == sorted(half.train[j].tolist())
        )
    small = partition(
        LABELS, **(settings | {"benign_samples": 8, "validation": 0.1, "split": "released"})
    )
    assert all(
        len(v) == len(t) for v, t in zip(small.validation, small.train, strict=True) if len(v)
    )  # classes of fewer than 10 samples


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"benign_samples": 50}, r"3 \* 50 \+ 2 \* 30 = 210, and the pool has 200 samples"),
        ({"num_clusters": 0}, "`num_clusters` must be at least 1, got 0"),
        ({"split": "striped"}, "`split` must be one of random, stratified, released, got 'striped'"),
        ({"benign": 0}, "`benign` must be at least 1, got 0"),
        ({"malicious": -1}, "`malicious` must be at least 0, got -1"),
        ({"benign_samples": 1}, "`benign_samples` must be at least 2, got 1"),
        ({"malicious_samples": 0}, "`malicious_samples` must be at least 1, got 0"),
        ({"tuning_size": -1}, "`tuning_size` must be at least 0, got -1"),
        ({"validation": 0.0}, "`validation` .* above 0 and at most 1, got 0.0"),
        ({"validation": 1.0}, "leaves agent 0 no training data .* set another fraction or `hold_out` = false"),
        ({"validation": float("nan")}, "`validation` .* got nan"),
        ({"validation": 0.01}, "`validation` = 0.01 with `split` = 'random' leaves agent 0 no validation data"),
        ({"split": "released", "benign_samples": 8, "validation": 0.1}, "'released' leaves agent 0 no training data"),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        partition(LABELS, **(SMALL | change))


@pytest.mark.parametrize("label", [-1, 4])
def test_a_label_outside_the_classes_is_refused(label):
    labels = LABELS.clone()
    labels[17] = label
    with pytest.raises(DataError, match="labels must be between 0 and 3"):
        partition(labels, **SMALL)


@pytest.mark.parametrize("removed", [False, True])
def test_clusters_of_unequal_size(removed):
    """Each cluster deals the first samples of one order.

    Removal of attackers does not change the samples of other agents.
    """
    counts = {"num_clusters": 3, "benign": [3, 1, 2], "malicious": [1, 2, 0]}
    population = partition(LABELS, **{**SMALL, **counts}, remove_malicious=removed)
    sizes = [(20, 20, 20, 30), (20, 30, 30), (20, 20)]
    pool_order = stream(7, "partition", "pool").permutation(200)
    agent = split = 0
    for cluster, cluster_sizes in enumerate(sizes):
        dealt = stream(7, "partition", cluster).permutation(pool_order[: sum(cluster_sizes)])
        start = 0
        for size in cluster_sizes:
            of_agent = dealt[start : start + size]
            start += size
            malicious = size == 30
            if not (malicious and removed):
                assert population.cluster[agent] == cluster
                assert population.malicious[agent] == malicious
                assert sorted(samples_of(population, agent)) == sorted(of_agent.tolist())
                if not malicious:
                    order = stream(7, "split", split).permutation(20)
                    assert set(population.validation[agent].tolist()) == {
                        *of_agent[order[:5]].tolist()
                    }
                agent += 1
            split += 1
    assert len(population.cluster) == agent
    assert population.tuning.tolist() == pool_order[90:].tolist()


def test_a_cluster_that_cannot_be_filled_is_refused():
    counts = {"num_clusters": 2, "benign": [3, 9], "malicious": [1, 1]}
    with pytest.raises(ConfigError, match=r"= 9 \* 20 \+ 1 \* 30 = 210, and the pool has 200"):
        partition(LABELS, **{**SMALL, **counts})

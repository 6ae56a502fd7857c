"""Data sets of owners: the owner of each sample, held-out samples, and errors."""

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from fedcb2o import Owners, dataset, datasets
from fedcb2o.data import partition_by_owner
from fedcb2o.errors import ConfigError, DataError

X = np.arange(60, dtype=np.float32).reshape(20, 3)
Y = np.arange(20) % 2
OWNER = np.array(["b"] * 8 + ["a"] * 12)
OTHER = X + 0.5
"""Samples that are not in X."""
SETTINGS = {
    **{"benign": 2, "malicious": 0, "benign_samples": None, "malicious_samples": None},
    **{"validation": 0.25, "split": "random", "seed": 3},
}


def rows(data, indices):
    """Return the row numbers in X of these samples of the pool."""
    return sorted((data.pool.x[indices][:, 0] / 3).int().tolist())


def test_each_owner_is_an_agent_with_its_own_samples():
    data = dataset(X, Y, owner=OWNER)
    assert data.owners.names == ("a", "b")
    assert torch.bincount(data.owners.test).tolist() == [3, 2]  # a quarter of 12 and of 8
    population = partition_by_owner(data, data.owners, **SETTINGS)
    result = (population.names, population.num_clusters, population.cluster.tolist())
    assert result == (("a", "b"), 1, [0, 0])
    for agent, owned, num_validation, tests in (
        (0, range(8, 20), 2, 3),
        (1, range(8), 2, 2),
    ):  # round(9 / 4), round(6 / 4)
        agent_rows = rows(data, population.train[agent]) + rows(data, population.validation[agent])
        test_rows = (data.test.x[population.tests[agent]][:, 0] / 3).int().tolist()
        assert sorted(agent_rows + test_rows) == list(owned)
        assert (len(population.validation[agent]), len(test_rows)) == (num_validation, tests)


def test_test_samples_belong_to_one_owner_or_to_all():
    shared = dataset(X, Y, owner=OWNER, x_test=OTHER[:3], y_test=Y[:3], test_share=0.0)
    assert shared.owners.test.tolist() == [-1] * 3
    assert len(shared.pool) == 20
    mixed = dataset(X, Y, owner=OWNER, x_test=OTHER[:3], y_test=Y[:3])
    assert mixed.owners.test.tolist() == [-1] * 3 + [1] * 2 + [0] * 3  # in the order of the samples
    assigned = dataset(
        X, Y, owner=OWNER, x_test=OTHER[:3], y_test=Y[:3], owner_test=["a", "b", "a"]
    )
    assert assigned.owners.test.tolist() == [0, 1, 0]
    assert len(assigned.pool) == 20


def test_owners_may_have_arrays_data_sets_or_parts():
    """A share is held out for each part that an owner does not have."""
    torch_dataset = TensorDataset(torch.from_numpy(X[8:12]), torch.from_numpy(Y[8:12]))
    parts = {
        "north": (X[:8], Y[:8]),
        "south": {
            "train": torch_dataset,
            "validation": (X[12:14], Y[12:14]),
            "test": (OTHER[14:15], Y[14:15]),
        },
    }
    data = datasets(parts, test=(X[15:], Y[15:]))
    assert data.owners.names == ("north", "south")
    assert sorted(data.owners.test.tolist()) == [-1] * 5 + [0] * 2 + [1]
    assert data.owners.validates.sum() == 2
    population = partition_by_owner(data, data.owners, **SETTINGS)
    assert rows(data, population.train[1]) == [8, 9, 10, 11]
    assert rows(data, population.validation[1]) == [12, 13]
    assert len(population.train[0]) + len(population.validation[0]) == 6
    assert len(population.validation[0]) == 2
    assert datasets([(X, Y), (OTHER, Y)]).owners.names == ("0", "1")


def test_without_hold_out_owners_train_on_all_samples_and_keep_their_validation_part():
    parts = {
        "north": (X[:8], Y[:8]),
        "south": {"train": (X[8:12], Y[8:12]), "validation": (X[12:14], Y[12:14])},
    }
    data = datasets(parts, test=(X[15:], Y[15:]), test_share=0.0)
    population = partition_by_owner(
        data, data.owners, **(SETTINGS | {"hold_out": False, "validation": 1.0})
    )
    assert rows(data, population.train[0]) == rows(data, population.validation[0]) == [*range(8)]
    result = (rows(data, population.train[1]), rows(data, population.validation[1]))
    assert result == ([8, 9, 10, 11, 12, 13], [12, 13])


def test_attackers_and_participants_are_drawn():
    owner = np.repeat(np.arange(10), 4)
    data = dataset(np.random.default_rng(0).normal(size=(40, 2)), np.arange(40) % 2, owner=owner)
    settings = {**SETTINGS, "benign": 3, "malicious": 2}
    populations = [
        partition_by_owner(data, data.owners, **{**settings, "seed": seed}) for seed in range(8)
    ]
    assert all(
        len(population.names) == 5 and int(population.malicious.sum()) == 2
        for population in populations
    )
    assert len({population.names for population in populations}) > 4
    assert len({tuple(population.malicious.tolist()) for population in populations}) > 2
    for population in populations:
        assert all(
            (len(v) == 0) == is_attacker
            for v, is_attacker in zip(population.validation, population.malicious, strict=True)
        )
        names = list(map(int, population.names))
        assert names == sorted(names)
    full, reduced = (
        populations[0],
        partition_by_owner(data, data.owners, **{**settings, "seed": 0}, remove_malicious=True),
    )
    benign = [j for j in range(5) if not full.malicious[j]]
    assert reduced.names == tuple(full.names[j] for j in benign)
    assert all(torch.equal(reduced.train[k], full.train[j]) for k, j in enumerate(benign))


def test_benign_samples_limits_the_samples_of_an_agent():
    data = dataset(X, Y, owner=OWNER)
    population = partition_by_owner(data, data.owners, **{**SETTINGS, "benign_samples": 7})
    assert [
        len(t) + len(v) for t, v in zip(population.train, population.validation, strict=True)
    ] == [7, 6]


def test_targets_may_be_numbers():
    data = dataset(X, -X[:, :2], numbers=True)
    assert (data.class_names, data.num_classes, data.num_outputs) == ((), 1, 2)
    assert (len(data.pool), len(data.test)) == (15, 5)
    assert data.pool.y.dtype == torch.float32
    assert dataset(X, -X[:, 0], owner=OWNER, numbers=True).num_outputs == 1


def test_owners_from_an_npz_file(tmp_path):
    from fedcb2o.data import arrays

    np.savez(
        tmp_path / "my.npz",
        x=X,
        y=Y,
        owner=OWNER,
        x_test=OTHER[:3],
        y_test=Y[:3],
        owner_test=OWNER[:3],
    )
    data = arrays(path="my.npz", data_dir=tmp_path)
    assert data.owners.names == ("a", "b")
    # owner a has no test samples, so 3 of its 12 are held out
    assert sorted(data.owners.test.tolist()) == [0, 0, 0, 1, 1, 1]
    np.savez(tmp_path / "numbers.npz", x=X, y=-X[:, 0])
    assert arrays(path="numbers.npz", data_dir=tmp_path, numbers=True).class_names == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dataset(X, Y, owner=OWNER[:3]), "`owner` names 3 owners, and there are 20 samples"),
        (lambda: dataset(X, Y, owner=X), "`owner` must hold one owner for each sample"),
        (lambda: dataset(X, Y, owner_test=OWNER), "`owner_test` goes with `owner` and `x_test`"),
        (
            lambda: dataset(X, Y, owner=OWNER, x_test=OTHER, y_test=Y, owner_test=["c"] * 20),
            "`owner_test` names c, who owns no sample",
        ),
        (
            lambda: dataset(X, Y, owner=OWNER, x_test=OTHER, y_test=Y, owner_test=[1] * 20),
            "`owner` and `owner_test` must be of one kind",
        ),
        (lambda: dataset(X, Y, owner=["a"] * 19 + ["b"]), "owner 'b' has 1 samples, and holding some out needs"),
        (lambda: dataset(X, Y, numbers=True, class_names=("a", "b")), "`class_names` are those of classes"),
        (lambda: dataset(X, ["a"] * 20, numbers=True), "`y` must hold numbers, got values of type <U1"),
        (lambda: datasets([]), "there must be a data set for each owner, got none"),
        (lambda: datasets("ab"), "must be a list, or a mapping by owners' names, got a str"),
        (lambda: datasets([3]), "owner '0' .train. must be .x, y., or a data set with a length"),
        (
            lambda: datasets([(X, Y), (X[:, :2], Y)]),
            r"owner '0' .train. have shape \(3,\), and those of owner '1' .train. \(2,\)",
        ),
        (
            lambda: datasets([(X + 0.5, Y), (X.astype(np.uint8), Y)]),
            "owner '1' .train. are bytes .uint8., .* owner '0' .train. are numbers from",
        ),
        (lambda: datasets({"a": {"training": (X, Y)}}), "owner 'a' must bring samples to train on"),
        (lambda: datasets([(X, Y[:3])]), "`x of owner '0' .train.` holds 20 samples, and `y of .*` 3 labels"),
        (lambda: datasets([[X, Y, Y]]), "must be samples and labels, .x, y., got 3 things"),
    ],
)  # fmt: skip
def test_invalid_owner_data_are_refused(make, message):
    with pytest.raises(DataError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"benign": 3}, "`agents.benign` . `agents.malicious` = 3, and the data have 2 owners"),
        ({"validation": 0.01}, "leaves owner 'a' no validation data among its 9 samples"),
    ],
)
def test_invalid_settings_of_agents_are_refused(change, message):
    data = dataset(X, Y, owner=OWNER)
    with pytest.raises(ConfigError, match=message):
        partition_by_owner(data, data.owners, **{**SETTINGS, **change})


def test_an_owner_needs_test_samples():
    data = dataset(X, Y, owner=OWNER)
    owners = Owners(
        data.owners.names,
        data.owners.pool,
        torch.zeros(5, dtype=torch.int64),
        data.owners.validates,
    )
    message = "owner 'b' has no test samples: give it some, or a test set for all agents"
    with pytest.raises(DataError, match=message):
        partition_by_owner(data, owners, **SETTINGS)


def test_the_repr_of_a_data_set_is_one_line():
    assert repr(dataset(X, Y, owner=OWNER).owners) == "Owners(a: 9, b: 6)"
    assert "\n" not in repr(dataset(X, Y, owner=OWNER))

"""Data that agents bring: whose each sample is, what is held out of it, and what cannot be."""

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
GIVEN = {
    **{"benign": 2, "malicious": 0, "benign_samples": None, "malicious_samples": None},
    **{"validation": 0.25, "split": "random", "seed": 3},
}


def rows(data, indices):
    """The numbers of samples of X by what they hold."""
    return sorted((data.pool.x[indices][:, 0] / 3).int().tolist())


def test_each_owner_is_an_agent_with_its_own():
    data = dataset(X, Y, owner=OWNER)
    assert data.owners.names == ("a", "b")
    assert torch.bincount(data.owners.test).tolist() == [3, 2]  # a quarter of 12 and of 8
    people = partition_by_owner(data, data.owners, **GIVEN)
    assert (people.names, people.num_clusters, people.cluster.tolist()) == (("a", "b"), 1, [0, 0])
    for agent, own, held, tests in (
        (0, range(8, 20), 2, 3),
        (1, range(8), 2, 2),
    ):  # round(9 / 4), round(6 / 4)
        mine = rows(data, people.train[agent]) + rows(data, people.validation[agent])
        tested = (data.test.x[people.tests[agent]][:, 0] / 3).int().tolist()
        assert sorted(mine + tested) == list(own)
        assert (len(people.validation[agent]), len(tested)) == (held, tests)


def test_test_samples_are_somebodys_or_everybodys():
    everybodys = dataset(X, Y, owner=OWNER, x_test=X[:3], y_test=Y[:3], test_share=0.0)
    assert everybodys.owners.test.tolist() == [-1] * 3
    assert len(everybodys.pool) == 20
    both = dataset(X, Y, owner=OWNER, x_test=X[:3], y_test=Y[:3])
    assert both.owners.test.tolist() == [-1] * 3 + [1] * 2 + [0] * 3  # in the order of the samples
    given = dataset(X, Y, owner=OWNER, x_test=X[:3], y_test=Y[:3], owner_test=["a", "b", "a"])
    assert given.owners.test.tolist() == [0, 1, 0]
    assert len(given.pool) == 20


def test_owners_bring_data_sets():
    """Arrays, a data set of PyTorch, and one with parts of its own; whoever lacks a part has a
    share held out."""
    torch_like = TensorDataset(torch.from_numpy(X[8:12]), torch.from_numpy(Y[8:12]))
    parts = {
        "north": (X[:8], Y[:8]),
        "south": {
            "train": torch_like,
            "validation": (X[12:14], Y[12:14]),
            "test": (X[14:15], Y[14:15]),
        },
    }
    data = datasets(parts, test=(X[15:], Y[15:]))
    assert data.owners.names == ("north", "south")
    assert sorted(data.owners.test.tolist()) == [-1] * 5 + [0] * 2 + [1]
    assert data.owners.validates.sum() == 2
    people = partition_by_owner(data, data.owners, **GIVEN)
    assert rows(data, people.train[1]) == [8, 9, 10, 11]
    assert rows(data, people.validation[1]) == [12, 13]
    assert len(people.train[0]) + len(people.validation[0]) == 6
    assert len(people.validation[0]) == 2
    assert datasets([(X, Y), (X, Y)]).owners.names == ("0", "1")


def test_with_nothing_held_out_owners_train_on_all_and_judge_by_what_they_brought_for_it():
    parts = {
        "north": (X[:8], Y[:8]),
        "south": {"train": (X[8:12], Y[8:12]), "validation": (X[12:14], Y[12:14])},
    }
    data = datasets(parts, test=(X[15:], Y[15:]), test_share=0.0)
    people = partition_by_owner(
        data, data.owners, **(GIVEN | {"hold_out": False, "validation": 1.0})
    )
    assert rows(data, people.train[0]) == rows(data, people.validation[0]) == [*range(8)]
    assert (rows(data, people.train[1]), rows(data, people.validation[1])) == (
        [8, 9, 10, 11, 12, 13],
        [12, 13],
    )


def test_attackers_and_who_takes_part_are_drawn():
    owner = np.repeat(np.arange(10), 4)
    data = dataset(np.random.default_rng(0).normal(size=(40, 2)), np.arange(40) % 2, owner=owner)
    some = {**GIVEN, "benign": 3, "malicious": 2}
    seeds = [partition_by_owner(data, data.owners, **{**some, "seed": seed}) for seed in range(8)]
    assert all(len(people.names) == 5 and int(people.malicious.sum()) == 2 for people in seeds)
    assert len({people.names for people in seeds}) > 4
    assert len({tuple(people.malicious.tolist()) for people in seeds}) > 2
    for people in seeds:
        assert all(
            (len(v) == 0) == bad for v, bad in zip(people.validation, people.malicious, strict=True)
        )
        assert all(
            list(map(int, people.names)) == sorted(map(int, people.names)) for people in seeds
        )
    whole, rest = (
        seeds[0],
        partition_by_owner(data, data.owners, **{**some, "seed": 0}, remove_malicious=True),
    )
    benign = [j for j in range(5) if not whole.malicious[j]]
    assert rest.names == tuple(whole.names[j] for j in benign)
    assert all(torch.equal(rest.train[k], whole.train[j]) for k, j in enumerate(benign))


def test_no_more_samples_than_asked_for():
    data = dataset(X, Y, owner=OWNER)
    people = partition_by_owner(data, data.owners, **{**GIVEN, "benign_samples": 7})
    assert [len(t) + len(v) for t, v in zip(people.train, people.validation, strict=True)] == [7, 6]


def test_numbers_in_place_of_classes():
    data = dataset(X, X[:, :2], numbers=True)
    assert (data.class_names, data.num_classes, data.num_outputs) == ((), 1, 2)
    assert (len(data.pool), len(data.test)) == (15, 5)
    assert data.pool.y.dtype == torch.float32
    assert dataset(X, X[:, 0], owner=OWNER, numbers=True).num_outputs == 1


def test_from_a_file(tmp_path):
    from fedcb2o.data import arrays

    np.savez(
        tmp_path / "my.npz", x=X, y=Y, owner=OWNER, x_test=X[:3], y_test=Y[:3], owner_test=OWNER[:3]
    )
    data = arrays(path="my.npz", data_dir=tmp_path)
    assert data.owners.names == ("a", "b")
    assert sorted(data.owners.test.tolist()) == [
        0,
        0,
        0,
        1,
        1,
        1,
    ]  # a has none there, so 3 of its 12 are held out
    np.savez(tmp_path / "numbers.npz", x=X, y=X[:, 0])
    assert arrays(path="numbers.npz", data_dir=tmp_path, numbers=True).class_names == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: dataset(X, Y, owner=OWNER[:3]),
            "`owner` names 3 owners, and there are 20 samples",
        ),
        (lambda: dataset(X, Y, owner=X), "`owner` must hold one owner for each sample"),
        (
            lambda: dataset(X, Y, owner_test=OWNER),
            "`owner_test` goes with `owner` and `x_test`",
        ),
        (
            lambda: dataset(X, Y, owner=OWNER, x_test=X, y_test=Y, owner_test=["c"] * 20),
            "`owner_test` names c, who owns no sample",
        ),
        (
            lambda: dataset(X, Y, owner=OWNER, x_test=X, y_test=Y, owner_test=[1] * 20),
            "`owner` and `owner_test` must be of one kind",
        ),
        (
            lambda: dataset(X, Y, owner=["a"] * 19 + ["b"]),
            "owner 'b' has 1 samples, and holding some out needs",
        ),
        (
            lambda: dataset(X, Y, numbers=True, class_names=("a", "b")),
            "`class_names` are those of classes",
        ),
        (
            lambda: dataset(X, ["a"] * 20, numbers=True),
            "`y` must hold numbers, got values of type <U1",
        ),
        (lambda: datasets([]), "there must be a data set for each owner, got none"),
        (
            lambda: datasets("ab"),
            "must be a list, or a mapping by owners' names, got a str",
        ),
        (
            lambda: datasets([3]),
            "owner '0' .train. must be .x, y., or a data set with a length",
        ),
        (
            lambda: datasets([(X, Y), (X[:, :2], Y)]),
            r"owner '0' .train. have shape \(3,\), and those of owner '1' .train. \(2,\)",
        ),
        (
            lambda: datasets([(X + 0.5, Y), (X.astype(np.uint8), Y)]),
            "owner '1' .train. are bytes .uint8., .* owner '0' .train. are numbers from",
        ),
        (
            lambda: datasets({"a": {"training": (X, Y)}}),
            "owner 'a' must bring samples to train on",
        ),
        (
            lambda: datasets([(X, Y[:3])]),
            "`x of owner '0' .train.` holds 20 samples, and `y of .*` 3 labels",
        ),
        (
            lambda: datasets([[(X, 1), (X, 2), (X, 3)]]),
            "must be samples and labels, .x, y., got 3 things",
        ),
    ],
)
def test_what_cannot_be(make, message):
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
def test_agents_that_cannot_be(change, message):
    data = dataset(X, Y, owner=OWNER)
    with pytest.raises(ConfigError, match=message):
        partition_by_owner(data, data.owners, **{**GIVEN, **change})


def test_an_owner_needs_test_samples():
    data = dataset(X, Y, owner=OWNER)
    owners = Owners(
        data.owners.names,
        data.owners.pool,
        torch.zeros(5, dtype=torch.int64),
        data.owners.validates,
    )
    with pytest.raises(
        DataError, match="owner 'b' has no test samples: give it some, or a test set for all agents"
    ):
        partition_by_owner(data, owners, **GIVEN)


def test_a_data_set_is_told_in_a_line():
    assert repr(dataset(X, Y, owner=OWNER).owners) == "Owners(a: 9, b: 6)"
    assert "\n" not in repr(dataset(X, Y, owner=OWNER))

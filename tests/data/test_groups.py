"""Splits that divide no group and respect time, and scales of features per agent or agreed."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader

import fedcb2o
from fedcb2o import dataset, datasets
from fedcb2o.data import Scaler, partition_by_owner, sets
from fedcb2o.data._dataset import group_mask
from fedcb2o.errors import ConfigError, DataError
from fedcb2o.experiments.config.datasets import dataset_from_tensors, dataset_tensors

N = 60
X = np.random.default_rng(0).normal(size=(N, 3))
Y = np.arange(N) % 2
RECORDING = np.arange(N) // 6  # ten recordings of six samples
PATIENT = np.arange(N) // 30  # of two patients
ROW = pd.DataFrame(X, columns=list("abc")).assign(y=Y, rec=RECORDING, who=PATIENT)
COLUMNS = (list("abc"), "y")


def rows_of(x):
    """The number of each sample, found by its first feature."""
    return np.array([np.flatnonzero(np.isclose(X[:, 0], value))[0] for value in x[:, 0].tolist()])


def split(data):
    """Rows of the pool and of the test set; each row is in one of them."""
    pool, test = rows_of(data.pool.x), rows_of(data.test.x)
    assert sorted([*pool, *test]) == list(range(N))
    return pool, test


def test_whole_groups_are_held_out():
    pool, test = split(dataset(X, Y, group=RECORDING, test_share=0.3))
    assert not set(RECORDING[pool]) & set(RECORDING[test])
    assert len(test) == 18
    again = split(dataset(X, Y, group=RECORDING.astype(str), test_share=0.3))
    assert again[1].tolist() == test.tolist()
    # of each owner, whose share is rounded to recordings
    data = dataset(X, Y, owner=PATIENT, group=RECORDING, test_share=0.4)
    pool, test = split(data)
    assert np.bincount(PATIENT[test]).tolist() == [12, 12]
    assert not set(RECORDING[pool]) & set(RECORDING[test])
    assert data.groups.pool.tolist() == RECORDING[pool].tolist()


def test_the_last_samples_are_held_out():
    time = np.random.default_rng(1).permutation(N)
    _, test = split(dataset(X, Y, time=time, test_share=0.25))
    assert sorted(time[test]) == list(range(45, 60))
    # of each owner; dates are times
    dates = pd.Timestamp("2020-01-01", tz="UTC") + pd.to_timedelta(time, unit="h")
    _, test = split(dataset(X, Y, owner=PATIENT, time=dates, test_share=0.2))
    for patient in range(2):
        own = time[test][PATIENT[test] == patient]
        assert sorted(own) == sorted(time[patient == PATIENT])[-6:]
    # samples of one time stay together: of 20 at each, the share takes the last ones
    _, test = split(dataset(X, Y, time=np.arange(N) // 20, test_share=0.1))
    assert test.tolist() == list(range(40, 60))


def test_the_groups_that_begin_last_are_held_out():
    start = np.array([5, 3, 9, 1, 7, 0, 2, 8, 4, 6])
    time = start[RECORDING] * 10 + np.arange(N) % 6
    data = dataset(X, Y, group=RECORDING, time=time, test_share=0.2)
    _, test = split(data)
    assert set(RECORDING[test]) == {2, 7}
    assert data.groups.by_time


def test_groups_of_several_owners_are_held_out_for_all():
    day = np.arange(N) % 5
    pool, test = split(dataset(X, Y, owner=PATIENT, group=day, test_share=0.4))
    assert len(set(day[test])) == 2
    assert not set(day[pool]) & set(day[test])
    day[PATIENT == 1] = np.arange(30) % 2
    with pytest.raises(DataError, match="owner '1' is left without training samples"):
        dataset(X, Y, owner=PATIENT, group=day, time=-day, test_share=0.6)


def test_keys_of_tables_loaders_and_data_sets():
    expected = split(dataset(X, Y, group=RECORDING, owner=PATIENT))[1].tolist()
    keys = {"columns": COLUMNS, "group": "rec", "owner": "who"}
    for source in (ROW, ROW.to_dict("records"), ROW.to_dict("list")):
        assert split(dataset(source, **keys))[1].tolist() == expected
    loader = DataLoader(ROW.to_dict("records"), batch_size=7, shuffle=True)
    read = dataset(loader, columns=COLUMNS, group="rec", time="rec", owner="who")
    by_array = dataset(X, Y, group=RECORDING, time=RECORDING, owner=PATIENT)
    assert sorted(split(read)[1]) == sorted(split(by_array)[1])
    with pytest.raises(DataError, match="not those of `group`"):
        dataset(loader, columns=COLUMNS, group=RECORDING)
    with pytest.raises(DataError, match="`group` is a str"):
        dataset(X, Y, group="rec")
    with pytest.raises(DataError, match="no column 'recording'"):
        dataset(ROW, columns=COLUMNS, group="recording")
    tables = {f"p{k}": table for k, table in ROW.groupby("who")}
    data = datasets(tables, columns=COLUMNS, group="rec", time="rec", test_share=0.2)
    _, test = split(data)
    assert set(RECORDING[test]) == {4, 9}
    with pytest.raises(DataError, match="names a column"):
        datasets({"a": (X, Y), "b": (X, Y)}, group="rec")


def test_arrays_of_a_file(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=Y, owner=PATIENT, group=RECORDING, time=RECORDING)
    data = sets.arrays(path="a.npz", data_dir=tmp_path, test_share=0.2, standardise="owner")
    assert data.groups.by_time
    assert data.pool.x[data.owners.pool == 1].mean(0).abs().max() < 1e-6
    np.savez(tmp_path / "b.npz", x=X, y=Y, group=RECORDING[:5])
    with pytest.raises(DataError, match=r"`group` has 5 values, and `x` 60 samples"):
        sets.arrays(path="b.npz", data_dir=tmp_path)


def test_divided_groups_are_counted():
    with pytest.warns(UserWarning, match="6 of 10 samples that are given for test or validation"):
        dataset(X[:50], Y[:50], group=np.arange(50), x_test=X[50:], y_test=Y[50:],
                group_test=[*range(44, 50), *range(60, 64)])  # fmt: skip
    parts = {"a": {"train": ROW[:33], "test": ROW[33:]}}
    with pytest.warns(UserWarning, match="3 of 27 samples"):
        datasets(parts, columns=COLUMNS, group="rec")
    with pytest.raises(DataError, match="`group_test` goes with"):
        dataset(X, Y, group_test=RECORDING)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"group": np.zeros(N, int)}, "the data set has 1 groups, and holding some out needs 2"),
        ({"group": PATIENT, "owner": PATIENT}, "owner '0' has 1 groups"),
        ({"group": X[:, 0]}, "`group` must hold groups"),
        ({"time": ["monday"] * N}, "numbers or dates"),
        ({"time": [np.nan] * N}, "without a time"),
        ({"time": np.arange(N - 1)}, "has 59 values"),
        ({"standardise": "owner"}, "these data have no owners"),
        ({"standardise": "owner", "owner": PATIENT, "x_test": X + 9, "y_test": Y}, "common test"),
    ],
)
def test_wrong_keys(keys, message):
    with pytest.raises(DataError, match=message):
        dataset(X, Y, **keys)


def population(data, **changes):
    settings = {"benign": 2, "malicious": 0, "benign_samples": None, "malicious_samples": None}
    settings |= {"validation": 0.25, "split": "random", "seed": 0} | changes
    return partition_by_owner(data, data.owners, **settings)


def test_agents_validate_on_whole_groups():
    data = dataset(X, Y, owner=PATIENT, group=RECORDING, test_share=0.2)
    for agents in (population(data), population(data, split="stratified", seed=1)):
        for train, validation in zip(agents.train, agents.validation, strict=True):
            groups = [set(data.groups.pool[rows].tolist()) for rows in (train, validation)]
            assert not groups[0] & groups[1]
            assert (len(groups[0]), len(groups[1])) == (3, 1)
    # by time the last ones, in every seed
    data = dataset(X, Y, owner=PATIENT, time=np.arange(N), test_share=0.2)
    for seed in range(2):
        agents = population(data, seed=seed)
        assert agents.validation[0].tolist() == list(range(18, 24))
    data = dataset(X, Y, owner=PATIENT, group=np.arange(N) // 15, test_share=0.5)
    with pytest.raises(ConfigError, match="owner '0' has one group to train on"):
        population(data)
    assert len(population(data, hold_out=False, validation=1.0).validation[0]) == 15


@pytest.mark.parametrize("key", ["group", "time"])
def test_processes_receive_groups(key):
    data = dataset(X, Y, owner=PATIENT, **{key: RECORDING})
    again = dataset_from_tensors(data.names, dataset_tensors(data))
    assert again.groups.by_time == (key == "time")
    assert again.groups.pool.equal(data.groups.pool)
    expected = population(data).validation
    assert all(a.equal(b) for a, b in zip(population(again).validation, expected, strict=True))


def test_agents_that_share_out_a_pool_would_divide_groups(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=Y, group=RECORDING)
    settings = {"name": "a", "rounds": 1, "data": {"name": "arrays", "path": "a.npz"}}
    settings |= {"model": {"name": "logistic"}}
    settings["agents"] = {"num_clusters": 1, "benign": 3, "benign_samples": 9}
    settings["agents"] |= {"malicious": 0, "budget": 2}
    with pytest.raises(ConfigError, match="would divide its groups"):
        fedcb2o.run(settings, seeds=[0], out=tmp_path / "out", data_dir=tmp_path)


def test_share_of_groups_by_hand():
    groups = np.array([0, 0, 0, 1, 2, 2])
    # from the last: 2, 3 or 5 samples
    assert group_mask(groups, 0.5, None).tolist() == [False] * 3 + [True] * 3
    assert group_mask(groups, 0.01, None).tolist() == [False] * 4 + [True] * 2
    assert group_mask(groups, 0.99, None).tolist() == [False] * 3 + [True] * 3


def test_each_owner_scales_its_own():
    x = X * (1 + PATIENT[:, None]) + 5 * PATIENT[:, None]
    data = dataset(x, Y, owner=PATIENT, standardise="owner")
    for owner in range(2):
        own = data.pool.x[data.owners.pool == owner]
        assert own.mean(0).numpy() == pytest.approx(0, abs=1e-6)
        assert own.std(0, correction=0).numpy() == pytest.approx(1, abs=1e-6)
    # test samples have the scale of their owner's pool
    raw = dataset(x, Y, owner=PATIENT)
    own = raw.pool.x[raw.owners.pool == 1].double()
    expected = (raw.test.x[raw.owners.test == 1] - own.mean(0)) / own.std(0, correction=0)
    assert data.test.x[data.owners.test == 1].numpy() == pytest.approx(expected.numpy(), abs=1e-5)


def test_agents_agree_on_a_scale_without_their_samples():
    raw = dataset(X, Y, owner=PATIENT)
    scalers = [Scaler.fit(raw.pool.x[raw.owners.pool == owner]) for owner in range(2)]
    agreed = Scaler.agree(scalers)
    assert agreed.count == len(raw.pool)
    whole = Scaler.fit(raw.pool.x)
    assert agreed.mean.numpy() == pytest.approx(whole.mean.numpy())
    assert agreed.variance.numpy() == pytest.approx(whole.variance.numpy())
    scaled = dataset(X, Y, owner=PATIENT, standardise=agreed)
    pooled = dataset(X, Y, owner=PATIENT, standardise=True)
    for one, other in ((scaled.pool, pooled.pool), (scaled.test, pooled.test)):
        assert one.x.numpy() == pytest.approx(other.x.numpy(), abs=1e-6)
    # a constant feature is only shifted
    flat = Scaler.fit(torch.ones(3, 1))
    assert flat(torch.tensor([[1.0], [3.0]])).tolist() == [[0.0], [2.0]]
    with pytest.raises(DataError, match="the same features"):
        Scaler.agree([whole, flat])
    with pytest.raises(DataError, match="one or more"):
        Scaler.agree([])
    with pytest.raises(DataError, match="needs samples"):
        Scaler.fit(torch.zeros(0, 2))
    with pytest.raises(DataError, match="features of shape"):
        flat(torch.zeros(2, 2))

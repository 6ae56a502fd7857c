"""Samples in two parts of a data set are said with their number."""

import time
import warnings

import numpy as np
import pandas as pd
import pytest
import torch

import fedcb2o
from fedcb2o import dataset, datasets
from fedcb2o.data.overlap import count_shared
from fedcb2o.errors import DataError
from fedcb2o.experiments.config import load_dataset
from fedcb2o.experiments.config.loading import load

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(120, 5)).astype(np.float32)
Y = np.arange(120) % 3


def said(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


def shared(data):
    known = {row.tobytes() for row in data.pool.x.numpy()}
    return sum(row.tobytes() in known for row in data.test.x.numpy())


def test_rows_that_occur_twice_are_counted():
    made = []
    messages = said(lambda: made.append(dataset(np.r_[X, X], np.r_[Y, Y])))
    count = shared(made[0])
    assert count > 20
    assert messages[0].startswith(f"{count} of 60 test samples are samples to train on, too")
    assert "pandas.drop_duplicates" in messages[0]


@pytest.mark.parametrize(
    ("call", "start"),
    [
        (lambda: dataset(X, Y, x_test=X[:40], y_test=Y[:40]), "40 of 40 test samples are"),
        (lambda: dataset(X, Y, x_test=X[:40], y_test=1 - Y[:40] % 2), "40 of 40 test samples are"),
        (lambda: dataset(X, -X[:, 0], x_test=X[:9], y_test=-X[:9, 0], numbers=True), "9 of 9 test samples"),
        (lambda: dataset(X, Y, x_test=X[:9], y_test=Y[:9], standardise=True), "9 of 9 test samples"),
        (lambda: datasets([(X[:60], Y[:60]), (X[60:], Y[60:])], test=(X[50:70], Y[50:70]), test_share=0), "20 of 20 test samples are"),
        (lambda: datasets([{"train": (X, Y), "validation": (X[:7], Y[:7]), "test": (-X, Y)}]), "7 of 7 validation samples are"),
        (lambda: datasets([{"train": (X[:60], Y[:60])}, {"train": (X[60:], Y[60:]), "test": (X[:9], Y[:9])}]), "of 24 test samples are"),
        (lambda: dataset(torch.from_numpy(X).double(), Y, x_test=-0.0 + X[:9], y_test=Y[:9]), "9 of 9"),
        (lambda: dataset((X * 50 + 128).astype(np.uint8), Y, x_test=(X[:9] * 50 + 128).astype(np.uint8), y_test=Y[:9]), "9 of 9"),
    ],
)  # fmt: skip
def test_parts_that_overlap_give_one_warning(call, start):
    messages = said(call)
    assert len(messages) == 1
    assert start in messages[0]


@pytest.mark.parametrize(
    "call",
    [
        lambda: dataset(X, Y),
        lambda: dataset(X, Y, x_test=-X, y_test=Y),
        lambda: dataset(DRAW.integers(4, size=(500, 3)), np.arange(500) % 2),
        lambda: dataset(pd.get_dummies(pd.Series(list("abcd") * 50)), np.arange(200) % 2),
        lambda: dataset(np.arange(40.0)[:, None] % 5, np.arange(40) % 2),
        lambda: dataset(X, Y, x_test=np.r_[DRAW.normal(size=(299, 5)), X[:1]], y_test=Y[[0] * 300]),
    ],
)
def test_parts_without_overlap_and_tables_of_few_values_give_no_warning(call):
    assert not said(call)


def test_a_custom_data_set_is_compared_when_it_is_used():
    x = torch.from_numpy(DRAW.normal(size=(30, 1, 4, 4)).astype(np.float32))
    y = torch.arange(30) % 10
    pool, test = fedcb2o.Shard(x, y), fedcb2o.Shard(x[10:20], y[10:20])
    experiment = load("digits-fedassay")

    def loaded(make):
        data = experiment.data.model_copy(update={"name": make})
        return load_dataset(experiment.model_copy(update={"data": data}), None)

    custom = fedcb2o.Dataset(pool, test, tuple("0123456789"))
    assert [m[:12] for m in said(lambda: loaded(lambda: custom))] == ["10 of 10 tes"]
    with pytest.warns(UserWarning, match="10 of 10 test"):
        checked = dataset(x, y, x_test=x[10:20], y_test=y[10:20])
    assert not said(lambda: loaded(lambda: checked))  # one warning is enough


def test_signs_and_all_values_count():
    x = torch.randn(100, 300, generator=torch.Generator().manual_seed(0))
    flipped = x * torch.tensor([-1.0, -1.0] + [1.0] * 298)
    changed = x.clone()
    changed[:, 123] += 1  # between the values that are probed
    for other in (flipped, changed, -x):
        assert count_shared(other, x) == 0
    assert count_shared(torch.cat([changed, x[:50]]), x) == 50


def test_samples_of_two_types_and_shapes_are_compared():
    x = torch.from_numpy(X)
    assert count_shared(x[:9].double(), x) == count_shared(x[:9], x.double()) == 9
    assert count_shared(x[:9].bfloat16(), x.bfloat16()) == 9
    assert count_shared(x[:9].requires_grad_(), x) == 9
    assert count_shared(x[:0], x) == count_shared(x, x[:, :2]) == 0


def test_large_data_sets_are_compared_in_a_moment():
    x = torch.randint(0, 256, (60_000, 784), dtype=torch.uint8)
    start = time.process_time()
    assert count_shared(x[:10_000], x[10_000:]) == 0
    assert time.process_time() - start < 1  # 0.05 seconds on a quiet machine


# --- whole numbers that float64 cannot tell apart

BASE = 1_700_000_000_000_000_000
STAMPS = BASE + 100 * np.arange(80)
RANKS = np.arange(80)


def expected():
    values = np.column_stack([RANKS, RANKS])
    return (values - values.mean(0)) / values.std(0)


@pytest.mark.parametrize(
    "x",
    [
        np.column_stack([STAMPS, RANKS]),
        np.column_stack([STAMPS, RANKS]).astype(np.uint64),
        np.column_stack([STAMPS, RANKS]).tolist(),
        [[int(stamp), float(rank)] for stamp, rank in zip(STAMPS, RANKS, strict=True)],
        pd.DataFrame({"a": STAMPS, "b": RANKS}),
        pd.DataFrame({"a": STAMPS, "b": RANKS.astype(float)}),
        pd.DataFrame({"a": pd.array(STAMPS, dtype="Int64"), "b": RANKS.astype(float)}),
        np.column_stack([STAMPS, RANKS]).astype(object),
    ],
)
def test_large_whole_numbers_are_standardised_without_loss(x):
    other = [[int(stamp) + 50, float(rank)] for stamp, rank in zip(STAMPS, RANKS, strict=True)]
    y = np.arange(80) % 2
    is_table = isinstance(x, pd.DataFrame)
    data = dataset(
        x,
        y,
        x_test=pd.DataFrame(other, columns=["a", "b"]) if is_table else other,
        y_test=y,
        standardise=True,
    )
    np.testing.assert_allclose(data.pool.x, expected(), atol=1e-6)
    shift = 0.5 / RANKS.std()
    np.testing.assert_allclose(data.test.x, expected() + np.array([shift, 0]), atol=1e-6)
    parts = datasets([(x[:40], y[:40]), (x[40:], y[40:])], standardise=True)
    assert len(torch.cat([parts.pool.x, parts.test.x])[:, 0].unique()) == 80


def test_rounded_numbers_as_labels_or_owners_are_refused():
    ids = (2**53 + 2.0 * np.arange(120) // 60).astype(float)
    with pytest.raises(DataError, match=r"`owner` has owners such as \d+, which float64 rounds"):
        dataset(X, Y, owner=ids)
    with pytest.raises(DataError, match="which float32 rounds: give whole numbers"):
        dataset(X, (2**24 + 2 * Y).astype(np.float32))
    owners = dataset(X, Y, owner=2**60 + np.arange(120) // 60).owners.names
    assert owners == (str(2**60), str(2**60 + 1))


# --- targets of a regression


@pytest.mark.parametrize("kind", [float, int])
def test_numbers_of_many_values_are_taken_for_a_regression(kind):
    y = DRAW.integers(50, 300, 120).astype(kind)
    hint = (
        r"numbers of \d+ values look like the targets of a regression, which needs `numbers=True`"
    )
    with pytest.raises(DataError, match=f"class .* has 1 samples, .*{hint}"):
        dataset(X, y)
    twice = (np.arange(120) // 2 + 50).astype(kind)
    with pytest.warns(UserWarning, match=f"`y` has 60 classes; {hint}"):
        dataset(X, twice)
    assert dataset(X, y, numbers=True).class_names == ()
    assert not said(lambda: dataset(X, np.arange(120) % 24))

"""Arrays, tensors, lists and tables from users: their numbers, or the error."""

import collections
import datetime
import warnings
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from torch.utils.data import TensorDataset

from fedcb2o import dataset, datasets
from fedcb2o.data import Shard, input_arrays
from fedcb2o.data.input_arrays import to_array, to_numbers
from fedcb2o.errors import ConfigError, DataError
from fedcb2o.experiments.config.datasets import validate_shard

X = np.array([[1.0, -2.0], [3.0, 4.0], [-5.0, 6.0], [7.0, 8.0]])
Y = np.array([0, 1, 0, 1])
MASKED = np.ma.masked_less(X, 0)
FRAME = pd.DataFrame(X, columns=["a", "b"])
STRUCTURED = np.array([tuple(row) for row in X], dtype=[("a", "f8"), ("b", "f8")])
TENSOR = torch.from_numpy(X)


class Items:
    """Map-style data set."""

    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class Variable:
    """Variable of a file, which converts to a masked array."""

    def __array__(self, *_arguments, **_options):
        return MASKED


# --- masked and missing values


@pytest.mark.parametrize(
    "values",
    [
        MASKED,
        list(MASKED),
        [[row] for row in MASKED],
        np.array([*MASKED, None], dtype=object)[:4],
        np.ma.array(STRUCTURED, mask=[(False, True)] * 4),
        collections.deque(MASKED),
        Variable(),
        [1.0, np.ma.masked],
        [np.ma.array(1, mask=True), 2],
    ],
)
def test_masked_values_are_refused_at_any_depth(values):
    message = "`x` has masked values: fill them in, or leave these samples out"
    with pytest.raises(DataError, match=message):
        to_array("x", values)


def test_masks_are_refused_in_every_argument():
    masked = np.ma.masked_equal(Y, 1)
    calls = {
        "`y`": lambda: dataset(X, masked),
        "`y` ": lambda: dataset(X, np.ma.masked_less(X, 0), numbers=True),
        "`owner`": lambda: dataset(X, Y, owner=masked),
        "`x_test`": lambda: dataset(X, Y, x_test=list(MASKED), y_test=Y),
        "`y_test`": lambda: dataset(X, Y, x_test=X, y_test=masked),
        "`x of owner 'a' .train.`": lambda: datasets({"a": (list(MASKED), Y)}),
        "`x of owner '0' .train.`": lambda: datasets([Items(*zip(MASKED, Y, strict=True))]),
    }
    for name, call in calls.items():
        with pytest.raises(DataError, match=f"{name.strip()} has masked values"):
            call()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (FRAME.where(FRAME > 0), "`x` has 2 missing values, the first in sample 0 in column 'b'"),
        (FRAME.assign(c=pd.array([1, None, 2, 3], dtype="Int64")), "1 missing .* 1 in column 'c'"),
        (FRAME.assign(c=pd.array([True, True, None, False], dtype="boolean")), "in column 'c'"),
        (FRAME.assign(c=np.array([1, 2, 3, None], dtype=object)), "sample 3 in column 'c'"),
        (FRAME.assign(c=pd.to_datetime(["2020-01-01"] * 3 + [None])), "in column 'c'"),
        (pd.Series([1, None, 2], dtype="Int64"), "1 missing values, the first in sample 1"),
        (pd.Series(["a", None, "b"]), "1 missing values, the first in sample 1"),
        (pd.Series(["a", "b", None], dtype="category"), "the first in sample 2"),
        (["a", float("nan")], "1 missing values, the first in sample 1"),
        (["a", None], "1 missing values, the first in sample 1"),
        ([[1.0, None], [2.0, 3.0]], "1 missing values, the first in sample 0"),
        ([1, pd.NA], "1 missing values, the first in sample 1"),
        ([pd.NaT, pd.NaT], "2 missing values"),
    ],
)
def test_missing_values_are_named_by_sample_and_column(values, message):
    with pytest.raises(DataError, match=message):
        to_array("x", values)


# --- accepted values


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.ma.array(X), X),
        (STRUCTURED, X),
        (STRUCTURED.view(np.recarray), X),
        (np.ma.array(STRUCTURED), X),
        (X.astype(object), X),
        (X.astype(">f8"), X),
        (FRAME.astype("Float64"), X),
        (FRAME.astype("Int64"), X),
        (FRAME.astype("category"), X),
        (FRAME.map(Decimal), X),
        (FRAME.astype(object), X),
        ([row for _, row in FRAME.iterrows()], X),
        ([FRAME.iloc[0], FRAME.iloc[1][["b", "a"]]], X[:2]),
        (pd.get_dummies(pd.DataFrame({"a": [1.5, 2], "c": ["u", "v"]})), [[1.5, 1, 0], [2, 0, 1]]),
        (pd.DataFrame({"a": np.array([0, 200], np.uint8), "b": [True, False]}), [[0, 1], [200, 0]]),
        (pd.DataFrame.sparse.from_spmatrix(sparse.csr_matrix(X)), X),
        ([[2**70, 1]], [[2.0**70, 1]]),
        (pd.Series(list(X)), X),
        (Items(*X), X),
        (TENSOR.clone().requires_grad_(), X),
        ([row.clone().requires_grad_() for row in TENSOR], X),
        (TENSOR.bfloat16(), X),
        ([list(TENSOR.bfloat16())], X[None]),
        ((TENSOR * 1j).conj().imag, -X),
    ],
)
def test_numbers_are_accepted_in_any_array(values, expected):
    np.testing.assert_array_equal(to_numbers("x", values), expected)


def test_a_table_of_mixed_types_is_not_pixels():
    pixels = pd.DataFrame({"a": np.array([0, 200], np.uint8)})
    assert to_numbers("x", pixels).dtype == np.uint8
    assert to_numbers("x", pixels.assign(b=[True, False])).dtype == np.float64


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (pd.Series([3, 5], dtype="Int64"), [3, 5]),
        (pd.Series([True, False], dtype="boolean"), [True, False]),
        (pd.Series(["a", "b"], dtype="category"), ["a", "b"]),
        (np.array(["a", "b"], dtype=np.dtypes.StringDType()), ["a", "b"]),
        (np.array([2**60, 2**60 + 1], dtype=object), [2**60, 2**60 + 1]),
        ([Decimal(1), Decimal(2)], [1, 2]),
        ([torch.tensor(1), torch.tensor(2)], [1, 2]),
    ],
)
def test_labels_are_accepted_in_any_column(labels, expected):
    assert to_array("y", labels).tolist() == expected


# --- refused values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (sparse.csr_matrix(X), r"`x` is a sparse matrix \(csr_matrix\): give its `.toarray\(\)`"),
        (sparse.dok_array(X), r"`x` is a sparse matrix \(dok_array\)"),
        ([sparse.csr_matrix(row) for row in X], r"got csr_matrix: give the `.toarray\(\)` of each"),
        (TENSOR.to_sparse(), r"`x` is a sparse tensor: give its `.to_dense\(\)`"),
        (TENSOR + 0j, "values of type complex128; give real and imaginary parts as"),
        (torch.zeros(2, 2, device="meta"), r"`x` cannot be read as an array \(.*no data!\)$"),
        ((row for row in X), "`x` is a generator: give an array, a list, or a table"),
        ({1, 2}, "`x` is a set: give an array"),
        (Items((X, 0)), r"cannot be read as an array \(.*\); a data set of pairs"),
        ({"a": [1, 2]}, r"`x` is a dict: give .* a table \(pandas.DataFrame\)"),
        ("data.csv", "`x` is a str: give an array"),
        (None, "`x` is missing: give an array"),
        ([{"a": 1}, {"a": 2}], r"got dict: make a table of them \(pandas.DataFrame\)"),
        ([1, "1"], "`x` must hold numbers or words, of one kind, got int and str$"),
        ([[1, "u", 2, "v"]], "got int and str: words are in column 1, 3 .from 0.; leave them out"),
        (FRAME.assign(c="u", d="v"), r"`x` must hold numbers, and its columns 'c', 'd' hold words"),
        (FRAME.assign(c=["u", "v"] * 2), r"`x\['c'\]` must hold numbers, got .*pandas.get_dummies"),
        (FRAME.assign(c=pd.Categorical(["u", "v"] * 2)), r"`x\['c'\]` must hold numbers"),
        (FRAME.assign(c=[1, "2"] * 2), r"`x\['c'\]` must hold .* of one kind, got int and str"),
        (FRAME.assign(c=[[1], [2]] * 2), r"`x\['c'\]` must hold one number for each sample"),
        (FRAME.assign(c=pd.to_datetime(["2020-01-01"] * 4)), r"`x\['c'\]` .* write dates as"),
        (FRAME.assign(c=pd.to_datetime(["2020-01-01"] * 4, utc=True)), "write dates as numbers"),
        (FRAME.assign(c=[datetime.date(2020, 1, 1)] * 4), "write dates as numbers"),
        (FRAME.assign(c=pd.to_timedelta(range(4))), "write durations as numbers"),
    ],
)
def test_errors_for_values_that_are_not_numbers_name_the_cure(values, message):
    with pytest.raises(DataError, match=message) as caught:
        to_numbers("x", values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.eye(2)[Y], r"got shape \(4, 2\): take its argmax along the rows"),
        (np.eye(2, dtype=bool)[Y], "take its argmax"),
        (np.ones((4, 3), int), "rows with several labels or none: for these set `numbers=True`"),
        (np.zeros((4, 3)), "rows with several labels or none"),
        (np.full((4, 2), 0.5), "the targets of a regression need `numbers=True`"),
        (pd.DataFrame({"y": ["a", "b"] * 2}), "take its only column"),
        (np.array([b"a", b"b"] * 2), r"got values of type \|S1: `.astype\(str\)` makes words"),
    ],
)
def test_errors_for_rows_of_labels_name_the_cure(y, message):
    with pytest.raises(DataError, match=message):
        dataset(X, y)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Items({"image": X[0], "label": 0}), r"mappings, with the keys 'image', 'label': give columns="),
        (Items(X, X), r"owner 'a' \(train\) must .* items \(x, y\): its items are of type ndarray"),
        (TensorDataset(TENSOR), r"its items are of type tuple$"),
        (FRAME, r"has the columns a, b: give columns=\(samples, labels\)"),
        (Items(([1.0], "u"), ([2.0], None)), r"`y of owner 'a' \(train\)` has 1 missing values"),
    ],
)  # fmt: skip
def test_items_that_are_not_pairs_are_refused(part, message):
    with pytest.raises(DataError, match=message):
        datasets({"a": part})


def test_owners_with_labels_of_two_kinds_are_refused():
    message = "words in `y of owner 'north' .train.` and numbers in `y of owner 'south' .train.`"
    with pytest.raises(DataError, match=message):
        datasets({"north": (X, ["a", "b"] * 2), "south": (X, Y)})
    message = r"`y of owner '0' .train.` and `y of owner '1' .train.` must hold as many numbers"
    with pytest.raises(DataError, match=message):
        datasets([(X, X), (X, X[:, 0])], numbers=True)


# --- names of columns and rows


def warns_of_reordering(message="in another order: they are matched by their names"):
    return pytest.warns(UserWarning, match=message)


def test_columns_are_matched_by_name():
    with warns_of_reordering("`x_test` has the columns of `x` in another order"):
        data = dataset(FRAME, Y, x_test=FRAME[["b", "a"]], y_test=Y)
    np.testing.assert_array_equal(data.test.x, X)
    with warns_of_reordering():
        data = dataset(STRUCTURED, Y, x_test=STRUCTURED[["b", "a"]], y_test=Y)
    np.testing.assert_array_equal(data.test.x, X)
    with warns_of_reordering("`y_test` has the columns of `y`"):
        data = dataset(X, FRAME, x_test=X, y_test=FRAME[["b", "a"]], numbers=True)
    np.testing.assert_array_equal(data.test.y, X)


def test_columns_of_owners_are_matched_by_name():
    swapped = FRAME[["b", "a"]]
    south = {"train": (swapped, Y), "validation": (FRAME, Y), "test": (swapped, Y)}
    with (
        warns_of_reordering("`x of owner 'south' .test.`"),
        warns_of_reordering("`x of owner 'south' .train.`"),
    ):
        data = datasets({"north": {"train": (FRAME, Y), "test": (FRAME, Y)}, "south": south})
    np.testing.assert_array_equal(data.pool.x, np.concatenate([X, X, X]))
    np.testing.assert_array_equal(data.test.x, np.concatenate([X, X]))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (FRAME.rename(columns={"a": "A"}), "only `x_test` has 'A'; only `x` has 'a'"),
        (FRAME[["a"]], "only `x` has 'b'$"),
        (FRAME.assign(c=1), "only `x_test` has 'c'$"),
        (FRAME.set_axis([1, "a"], axis=1), "only `x_test` has '1'; only `x` has 'b'"),
    ],
)
def test_different_columns_are_refused_by_name(table, message):
    with pytest.raises(DataError, match=f"must have columns of the same names: {message}"):
        dataset(FRAME, Y, x_test=table, y_test=Y)


def test_duplicate_column_names_need_the_same_order():
    table = pd.DataFrame(np.arange(12.0).reshape(4, 3), columns=["a", "a", "b"])
    assert len(dataset(table, Y, x_test=table + 1, y_test=Y).test) == 4
    with pytest.raises(DataError, match="names that occur twice cannot be matched"):
        dataset(table, Y, x_test=table.iloc[:, [0, 2, 1]], y_test=Y)


@pytest.mark.parametrize("other", [X, TENSOR, pd.DataFrame(X), X.tolist()])
def test_arrays_without_names_are_matched_by_position_with_a_warning(other):
    with pytest.warns(UserWarning, match="have no names in common: they are matched by position"):
        data = dataset(FRAME, Y, x_test=other, y_test=Y)
    np.testing.assert_array_equal(data.test.x, X)


def test_equal_names_give_no_warning():
    numbered = pd.DataFrame(X)
    text = pd.DataFrame(X, columns=["0", "1"])  # as in a CSV file
    np.testing.assert_array_equal(dataset(numbered, Y, x_test=text, y_test=Y).test.x, X)


def test_contradicting_row_labels_are_refused():
    labels = pd.Series(Y)
    shuffled = FRAME.iloc[[2, 0, 3, 1]]
    reordered_data = dataset(shuffled, labels.iloc[[2, 0, 3, 1]], x_test=FRAME, y_test=labels)
    np.testing.assert_array_equal(reordered_data.pool.y, Y[[2, 0, 3, 1]])
    part = FRAME.set_axis([5, 6, 7, 8])
    np.testing.assert_array_equal(dataset(part, labels, x_test=FRAME, y_test=Y).pool.y, Y)

    calls = {
        "`x` and `y` have the same row labels": lambda: dataset(shuffled, labels),
        "`x` and `owner` have the same row": lambda: dataset(shuffled, Y, owner=labels),
        "`x_test` and `y_test` have the same": lambda: dataset(
            X, Y, x_test=shuffled, y_test=labels
        ),
        "`x of owner 'a' .train.` and .* same": lambda: datasets({"a": (shuffled, labels)}),
        "`x` and `y` have different row labels": lambda: dataset(
            part, labels.set_axis(list("abcd"))
        ),
    }
    for message, call in calls.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # names of columns
            with pytest.raises(DataError, match=message):
                call()


# --- precision

STAMPS = 1_700_000_000 + 10 * np.arange(40)
CLASSES = np.arange(40) % 2
COARSE = {
    "time stamps": STAMPS,
    "above 2^24": 2**24 + np.arange(40),
    "close to 1": 1 + 1e-9 * np.arange(40),
    "tiny": 1e-60 * (1 + np.arange(40)),
    "with an outlier": np.append(STAMPS[:39], 0),
    "constant": np.full(40, 1_700_000_003),
}


@pytest.mark.parametrize("name", COARSE)
@pytest.mark.parametrize("with_owners", [False, True])
def test_features_are_standardised_before_they_are_rounded(name, with_owners):
    x = np.column_stack([COARSE[name], np.linspace(-1, 1, 40), np.linspace(5, 9, 40)])
    x_test = np.add(x[::-2], [x[:, 0].std(), 0, 0.5])
    if with_owners:
        parts = {
            "a": {"train": (x[:30], CLASSES[:30]), "test": (x_test[:5], CLASSES[:5])},
            "b": {"train": (x[30:], CLASSES[30:]), "test": (x_test[5:], CLASSES[5:20])},
        }
        data = datasets(parts, standardise=True)
    else:
        data = dataset(x, CLASSES, x_test=x_test, y_test=CLASSES[:20], standardise=True)

    std = np.where(np.ptp(x, axis=0) > 0, x.std(0), 1)
    for part, values in ((data.pool, x), (data.test, x_test)):
        expected = (values - x.mean(0)) / std
        np.testing.assert_allclose(part.x, expected, rtol=3e-6, atol=3e-6)
    assert data.pool.x.dtype == torch.float32


def test_ordinary_features_are_rounded_before_they_are_standardised():
    x = np.random.default_rng(0).normal(3, 2, size=(40, 3))
    rounded = x.astype(np.float32)
    data = dataset(x, CLASSES, standardise=True)
    expected = dataset(rounded, CLASSES, standardise=True)
    assert torch.equal(data.pool.x, expected.pool.x)
    assert torch.equal(data.test.x, expected.test.x)


@pytest.mark.parametrize(
    ("name", "num_distinct"),
    [
        ("time stamps", 4),
        ("above 2^24", 21),
        ("close to 1", 1),
        ("tiny", 1),
        ("with an outlier", 5),
    ],
)
def test_values_that_float32_merges_give_a_warning(name, num_distinct):
    assert len(set(COARSE[name].astype(np.float32).tolist())) == num_distinct
    x = np.column_stack([np.arange(40.0), COARSE[name]])
    message = rf"`x` holds 40 different numbers at \[1\], .* has only {num_distinct} for them: .*standardise"
    with pytest.warns(UserWarning, match=message):
        dataset(x, CLASSES)
    reason = f"`y` holds 40 different numbers, .* only {num_distinct} for"
    with pytest.warns(UserWarning, match=reason):
        dataset(np.arange(80.0).reshape(40, 2), COARSE[name], numbers=True)


@pytest.mark.parametrize(
    "values",
    [
        np.random.default_rng(0).normal(size=(20_000, 3)),
        np.random.default_rng(0).random((20_000, 3)),
        np.random.default_rng(0).standard_cauchy((20_000, 3)),
        np.arange(2**24 - 100, 2**24)[:, None],
        STAMPS.astype(np.float32)[:, None],
        np.full((4, 1), 1_700_000_003),
    ],
)
def test_ordinary_numbers_give_no_warning(values):
    input_arrays.warn_of_merged_values("`x` holds", values, "")


# --- custom data sets


def test_masks_and_merged_values_of_a_custom_data_set_are_reported():
    x = torch.arange(8.0).reshape(4, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # masked tensors are experimental
        masked = torch.masked.masked_tensor(x, x > 0)
    with pytest.raises(ConfigError, match="the pool has masked tensors: fill in what is masked"):
        validate_shard("the pool", Shard(masked, torch.from_numpy(Y)), 2)

    close = 1_700_000_000 + torch.arange(8).reshape(4, 2)
    message = r"the pool holds 4 different numbers at \[0\] .*only 1 for"
    with pytest.warns(UserWarning, match=message):
        validate_shard("the pool", Shard(close.double(), torch.from_numpy(Y)), 2)
    with pytest.warns(UserWarning, match="the pool holds as targets 4 different numbers"):
        validate_shard("the pool", Shard(x, close[:, 0]), 0)

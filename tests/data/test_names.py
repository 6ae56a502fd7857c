"""Names of classes and owners: one spelling, one order, and warnings about doubtful labels."""

import unicodedata
import warnings

import numpy as np
import pandas as pd
import pytest

import fedcb2o
from fedcb2o.data import names
from fedcb2o.errors import DataError

X = np.arange(36, dtype=np.float32).reshape(12, 3)
Y = np.arange(12) % 3
COMPOSED = "caf\u00e9"
DECOMPOSED = unicodedata.normalize("NFD", COMPOSED)


@pytest.mark.parametrize(
    "class_names",
    [
        ["ant", "bee", "cat"],
        np.array(["ant", "bee", "cat"]),
        (word for word in ("ant", "bee", "cat")),
        [b"ant", b"bee", b"cat"],
        {2: "cat", 0: "ant", 1: "bee"},
        {np.int64(2): "cat", 0.0: "ant", 1: np.str_("bee")},
        {"2": "cat", "0": "ant", "1": "bee"},
        pd.Series(["cat", "ant", "bee"], index=[2, 0, 1]),
        {"ant": 0, "bee": 1, "cat": 2}.keys(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_class_names_are_in_the_order_of_their_numbers(class_names):
    assert fedcb2o.dataset(X, Y, class_names=class_names).class_names == ("ant", "bee", "cat")


def test_a_mapping_names_labels_of_any_kind():
    y = np.array([10, 7, -1])[Y]
    data = fedcb2o.dataset(X, y, class_names={10: "ten", -1: "none", 7: "seven"}, test_share=0.5)
    assert data.class_names == ("none", "seven", "ten")
    first = data.pool.x[:, 0].long() // 3  # the row of X
    assert data.pool.y.tolist() == [[2, 1, 0][row % 3] for row in first.tolist()]
    words = fedcb2o.dataset(X, np.array(["n", "y"])[Y % 2], class_names={"y": "yes", "n": "no"})
    assert words.class_names == ("no", "yes")


@pytest.mark.parametrize(
    ("class_names", "message"),
    [
        ({"ant", "bee", "cat"}, "is a set, which has no order: give a list"),
        (frozenset("abc"), "is a set, which has no order"),
        ({0: "ant", 1: "bee"}, "`class_names` has no name for the label 2"),
        ({"ant": 0, "bee": 1, "cat": 2}, "names the label 'ant', and labels are whole numbers"),
        ({0: "a", "0": "b", 1: "c", 2: "d"}, "names the label 0 twice"),
        (["ant", None, "cat"], "must be words, one for each class, got None"),
        (["ant", float("nan"), "cat"], "must be words, one for each class, got nan"),
        (["ant", " ", "cat"], "must be words, one for each class, got ' '"),
        ([["ant"], ["bee"], ["cat"]], "must be words, one for each class"),
        (["x", COMPOSED, DECOMPOSED], "of different names"),
    ],
)
def test_class_names_without_order_or_words_are_refused(class_names, message):
    with pytest.raises(DataError, match=message):
        fedcb2o.dataset(X, Y, class_names=class_names)


@pytest.mark.parametrize("dtype", ["U", ">U5", object, pd.CategoricalDtype()], ids=str)
def test_two_spellings_of_a_word_are_one_class(dtype):
    words = np.array([COMPOSED, DECOMPOSED, "x"])[Y]
    y = pd.Series(words).astype(dtype) if isinstance(dtype, pd.CategoricalDtype) else words
    data = fedcb2o.dataset(X, y if y is not words else words.astype(dtype))
    assert data.class_names == (COMPOSED, "x")
    assert data.pool.y.bincount().tolist() == [6, 3]


def test_two_spellings_are_one_owner_and_one_class_name():
    data = fedcb2o.dataset(X, Y % 2, owner=np.array([COMPOSED, DECOMPOSED])[np.arange(12) // 6])
    assert data.owners.names == (COMPOSED,)
    parts = {COMPOSED: (X, Y), DECOMPOSED: (X, Y)}
    with pytest.raises(DataError, match="two owners are called"):
        fedcb2o.datasets(parts)
    custom = fedcb2o.Dataset(data.pool, data.test, (DECOMPOSED, "x"))
    assert custom.class_names == (COMPOSED, "x")


def warnings_of(call):
    """Return the warnings of a call as one text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return "\n".join(str(warning.message) for warning in caught)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["yes", "Yes", "no"], "the classes 'Yes' and 'yes' are almost the same word"),
        (["yes", "yes ", "no"], "the classes 'yes' and 'yes ' are almost the same word"),
        (["yes", "\u200byes", "no"], "almost the same word"),
        (["1", "1.0", "2"], "the classes '1' and '1.0' are almost the same word"),
        (["9", "10", "2"], "numbers written as words, which sort '10', '2', '9'"),
        (["a", "b", "nan"], "the class 'nan' looks like missing labels"),
        (["ant", "bee", "cat"], ""),
        (["1", "2", "3"], ""),
    ],
)
def test_doubtful_labels_give_a_warning(labels, expected):
    message = warnings_of(lambda: fedcb2o.dataset(X, np.array(labels)[Y]))
    assert expected in message
    assert bool(message) == bool(expected)


def test_empty_labels_are_refused():
    with pytest.raises(DataError, match="empty labels"):
        fedcb2o.dataset(X, np.array(["a", "", "b"])[Y])


def test_explicit_names_may_differ_in_case_alone():
    assert not warnings_of(lambda: fedcb2o.dataset(X, Y, class_names=["A", "a", "b"]))


def test_test_labels_without_training_samples_give_a_warning():
    message = warnings_of(lambda: fedcb2o.dataset(X, Y % 2, x_test=X + 0.5, y_test=2 * (Y % 2) - 1))
    assert message == "test samples have labels that no sample to train on has: '-1'"


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (["Yes", "No"], ["yes", "no"], "the classes 'Yes' (of 'a') and 'yes' (of 'b')"),
        ([-1, 1], [0, 1], "'b' with '0', '1'; 'a' with '-1', '1'"),
        ([0, 1, 2], [1, 2, 3], "owners have different labels"),
        (["ja", "nein"], ["yes", "no"], "'a' with 'ja', 'nein'; 'b' with 'no', 'yes'"),
        ([0, 1], [0, 1], ""),
        ([0, 1, 2], [0, 1], ""),
    ],
)
def test_owners_with_different_labels_give_a_warning(first, second, expected):
    parts = {"a": (X, (first * 6)[:12]), "b": (X + 0.5, (second * 6)[:12])}
    message = warnings_of(lambda: fedcb2o.datasets(parts))
    assert expected in message
    assert bool(message) == bool(expected)


def test_many_owners_with_few_classes_each_give_no_warning():
    draw = np.random.default_rng(0)
    parts = {}
    for owner in range(30):
        labels = draw.choice(10, 2, replace=False)
        parts[owner] = (X + owner / 64, labels[np.arange(12) % 2])
    assert not warnings_of(lambda: fedcb2o.datasets(parts))


def test_owners_with_similar_names_give_a_warning():
    message = warnings_of(lambda: fedcb2o.dataset(X, Y % 2, owner=np.array(["a", "A "])[Y % 2]))
    assert "the owners 'A ', 'a' are almost the same word" in message


def test_numbers_of_many_digits_are_compared_exactly():
    assert names.look_alikes(["9007199254740992", "9007199254740993"]) == []
    assert names.look_alikes(["01", "1", "+1.0", "2"]) == [("01", "1", "+1.0")]


@pytest.mark.parametrize("share", [np.float32(0.25), np.array(0.25), np.float64(0.25)])
def test_the_test_share_is_a_number_of_any_library(share):
    assert len(fedcb2o.dataset(X, Y, test_share=share).test) == 3


@pytest.mark.parametrize("label", [-1, -100, 255])
def test_samples_that_seem_to_have_no_label_give_a_warning(label):
    y = np.arange(80) % 4
    x = np.random.default_rng(0).normal(size=(80, 2))
    with pytest.warns(UserWarning, match=f"the class '{label}' next to 0 to 2 looks like"):
        fedcb2o.dataset(x, np.where(y == 3, label, y))
    # Three signs are classes, and labels with names too.
    assert fedcb2o.dataset(x, y % 3 - 1).class_names == ("-1", "0", "1")
    named = {label: "none", 0: "a", 1: "b", 2: "c"}
    fedcb2o.dataset(x, np.where(y == 3, label, y), class_names=named)

"""Ragged of several agents in one array, against Python's lists of lists."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedcb2o.federated import Ragged

nested = st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=6)
some_of_them = nested.flatmap(
    lambda each: st.tuples(
        st.just(each), st.lists(st.integers(0, len(each) - 1), max_size=8) if each else st.just([])
    )
)
kept_of_them = nested.flatmap(
    lambda each: st.tuples(
        st.just(each), st.tuples(*(st.tuples(*[st.booleans()] * len(one)) for one in each))
    )
)


def of(each):
    return Ragged.from_arrays([np.array(one, np.int64) for one in each])


def places(chosen):
    return np.array(chosen, np.int64)


@given(nested)
def test_they_are_read_as_they_were_made(each):
    lists = of(each)
    assert len(lists) == len(each)
    assert lists.tolist() == [one.tolist() for one in lists] == each
    assert [lists[k].tolist() for k in range(len(each))] == each
    assert lists.sizes.tolist() == [len(one) for one in each]
    assert lists.row_ids.tolist() == [k for k, one in enumerate(each) for _ in one]
    assert lists.offsets.tolist() == [sum(len(one) for one in each[:k]) for k in range(len(each))]


@given(st.integers(0, 5))
def test_empty_ones(count):
    assert Ragged.empty(count).tolist() == [[]] * count


@given(st.lists(nested, min_size=1, max_size=4))
def test_joined_they_follow_each_other(parts):
    assert Ragged.concatenate([of(each) for each in parts]).tolist() == [
        one for each in parts for one in each
    ]


@given(some_of_them)
def test_taken_in_any_order_and_twice(each_and_chosen):
    each, chosen = each_and_chosen
    lists = of(each)
    expected = [each[k] for k in chosen]
    assert lists.take(places(chosen)).tolist() == expected
    assert lists.values[lists.flat_index(places(chosen))].tolist() == [
        value for one in expected for value in one
    ]


@given(kept_of_them)
def test_only_what_is_kept(each_and_kept):
    each, kept = each_and_kept
    found = of(each).filter(np.array([keep for one in kept for keep in one], dtype=bool))
    assert found.tolist() == [
        [value for value, keep in zip(*pair, strict=True) if keep]
        for pair in zip(each, kept, strict=True)
    ]


@given(
    st.lists(st.tuples(st.integers(-1, 2), st.lists(st.integers(0, 99), max_size=3)), max_size=7)
)
def test_placed_lists_stand_in_their_places(agents):
    """Each agent belongs to one of three parts or, with -1, to none and has an empty list."""
    parts = [[j for j, (part, _) in enumerate(agents) if part == k] for k in range(3)]
    given = [(places(those), of([agents[j][1] for j in those])) for those in parts]
    expected = [list(one) if part >= 0 else [] for part, one in agents]
    assert Ragged.scatter(len(agents), *given).tolist() == expected
    assert (
        Ragged.scatter(len(agents), *(pair for pair in given if len(pair[0]))).tolist() == expected
    )


def test_nothing_placed():
    assert Ragged.scatter(3).tolist() == [[], [], []]

"""Ragged, the lists of several agents in one array, compared with lists of lists."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedcb2o.federated.ragged import Ragged

nested = st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=6)
rows_and_indices = nested.flatmap(
    lambda rows: st.tuples(
        st.just(rows), st.lists(st.integers(0, len(rows) - 1), max_size=8) if rows else st.just([])
    )
)
rows_and_mask = nested.flatmap(
    lambda rows: st.tuples(
        st.just(rows), st.tuples(*(st.tuples(*[st.booleans()] * len(row)) for row in rows))
    )
)


def ragged(rows):
    return Ragged.from_arrays([np.array(row, np.int64) for row in rows])


def as_indices(indices):
    return np.array(indices, np.int64)


@given(nested)
def test_lists_are_stored_unchanged(rows):
    lists = ragged(rows)
    assert len(lists) == len(rows)
    assert lists.tolist() == [row.tolist() for row in lists] == rows
    assert [lists[k].tolist() for k in range(len(rows))] == rows
    assert lists.sizes.tolist() == [len(row) for row in rows]
    assert lists.list_index.tolist() == [k for k, row in enumerate(rows) for _ in row]
    assert lists.offsets.tolist() == [sum(len(row) for row in rows[:k]) for k in range(len(rows))]


@given(st.integers(0, 5))
def test_empty_lists(count):
    assert Ragged.empty(count).tolist() == [[]] * count


@given(st.lists(nested, min_size=1, max_size=4))
def test_concatenate_joins_lists_in_order(parts):
    assert Ragged.concatenate([ragged(rows) for rows in parts]).tolist() == [
        row for rows in parts for row in rows
    ]


@given(rows_and_indices)
def test_take_allows_any_order_and_repetitions(case):
    rows, indices = case
    lists = ragged(rows)
    expected = [rows[k] for k in indices]
    assert lists.take(as_indices(indices)).tolist() == expected
    assert lists.values[lists.flat_index(as_indices(indices))].tolist() == [
        value for row in expected for value in row
    ]


@given(rows_and_mask)
def test_filter_keeps_the_masked_values(case):
    rows, mask = case
    filtered = ragged(rows).filter(
        np.array([is_kept for row in mask for is_kept in row], dtype=bool)
    )
    assert filtered.tolist() == [
        [value for value, is_kept in zip(*pair, strict=True) if is_kept]
        for pair in zip(rows, mask, strict=True)
    ]


@given(
    st.lists(st.tuples(st.integers(-1, 2), st.lists(st.integers(0, 99), max_size=3)), max_size=7)
)
def test_scatter_puts_lists_at_their_indices(agents):
    """Each agent belongs to one of three parts or, with -1, to none and has an empty list."""
    parts = [[j for j, (part, _) in enumerate(agents) if part == k] for k in range(3)]
    given = [(as_indices(members), ragged([agents[j][1] for j in members])) for members in parts]
    expected = [list(row) if part >= 0 else [] for part, row in agents]
    assert Ragged.scatter(len(agents), *given).tolist() == expected
    assert (
        Ragged.scatter(len(agents), *(pair for pair in given if len(pair[0]))).tolist() == expected
    )


def test_scatter_without_parts_gives_empty_lists():
    assert Ragged.scatter(3).tolist() == [[], [], []]

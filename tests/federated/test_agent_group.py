"""The layout of a pool: every row holds one thing, in the order that is said."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedcb2o.federated import BufferLayout


@given(
    st.lists(st.booleans(), min_size=1, max_size=7),
    st.integers(0, 3),
    st.integers(0, 4),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_no_row_is_used_twice(malicious, more, each, before, draw):
    """The own models anywhere among those that are kept; then what each malicious agent crafts,
    then what was before, then what arrives, and no row between is left out."""
    count, kept = len(malicious), len(malicious) + more
    own = draw.sample(range(kept), count)
    layout = BufferLayout.create(np.array(own), kept, np.array(malicious), each, before)
    assert layout.own.tolist() == own
    crafted = [
        row
        for k in np.flatnonzero(malicious).tolist()
        for row in range(layout.first_received)[layout.crafted_rows(k)]
    ]
    then = [] if layout.previous is None else layout.previous.tolist()
    assert [len(crafted), len(then)] == [each * sum(malicious), count * before]
    assert [*range(kept), *crafted, *then] == list(range(layout.first_received))


def test_a_layout_by_hand():
    layout = BufferLayout.create(
        np.array([3, 0, 4, 1]), 5, np.array([False, True, False, True]), 2, True
    )
    assert [layout.crafted_rows(k) for k in (1, 3)] == [slice(5, 7), slice(7, 9)]
    assert layout.previous is not None
    assert layout.previous.tolist() == [9, 10, 11, 12]
    assert layout.first_received == 13

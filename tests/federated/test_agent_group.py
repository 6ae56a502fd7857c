"""Layout of the model buffer: one model per row, in the documented order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedcb2o.federated.agent_group import BufferLayout


@given(
    st.lists(st.booleans(), min_size=1, max_size=7),
    st.integers(0, 3),
    st.integers(0, 4),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_each_row_is_used_once(malicious, extra_kept, crafted_per_attacker, has_previous, draw):
    """Kept models come first, then crafted, previous and received models. No row is left out."""
    count, kept = len(malicious), len(malicious) + extra_kept
    own = draw.sample(range(kept), count)
    layout = BufferLayout.create(
        np.array(own), kept, np.array(malicious), crafted_per_attacker, has_previous
    )
    assert layout.own.tolist() == own
    crafted = [
        row
        for k in np.flatnonzero(malicious).tolist()
        for row in range(layout.first_received)[layout.crafted_rows(k)]
    ]
    previous_rows = [] if layout.previous is None else layout.previous.tolist()
    result = [len(crafted), len(previous_rows)]
    assert result == [crafted_per_attacker * sum(malicious), count * has_previous]
    assert [*range(kept), *crafted, *previous_rows] == list(range(layout.first_received))


def test_a_layout_by_hand():
    layout = BufferLayout.create(
        np.array([3, 0, 4, 1]), 5, np.array([False, True, False, True]), 2, True
    )
    assert [layout.crafted_rows(k) for k in (1, 3)] == [slice(5, 7), slice(7, 9)]
    assert layout.previous is not None
    assert layout.previous.tolist() == [9, 10, 11, 12]
    assert layout.first_received == 13

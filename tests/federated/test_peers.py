"""Whom each of several agents met and may ask, against plain lists."""

import numpy as np

from fedcb2o.federated.peers import Peers


def test_an_agent_may_be_among_those_it_asks():
    shared = Peers.of([np.arange(4)], np.zeros(2, np.int64), but=np.array([0, 3]))
    assert [shared.ids(k).tolist() for k in range(2)] == [[1, 2, 3], [0, 1, 2]]
    assert shared.counts.tolist() == [3, 3]
    assert [shared.and_(np.array([0, 3])).ids(k).tolist() for k in range(2)] == [[0, 1, 2, 3]] * 2
    own = Peers.of([np.array([2]), np.zeros(0, np.int64)], but=np.array([1, 7]))
    assert own.counts.tolist() == [1, 0]
    assert [own.and_(np.array([1, 7])).ids(k).tolist() for k in range(2)] == [[1, 2], [7]]

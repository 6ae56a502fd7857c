"""What an agent does with peers that keep it waiting."""

from fedcb2o.peer.wire import Backoff


def test_who_stalls_again_and_again_costs_a_few_deadlines():
    patience, cost = Backoff(), 0
    for n in range(200):
        if 1 not in patience.suspended(n):
            cost += 1
            patience.record_stall(1, n)
    assert cost == 10
    assert patience.suspended(0) == {1}


def test_who_is_late_once_is_asked_again_soon():
    patience = Backoff()
    patience.record_stall(1, 10)
    patience.record_stall(2, 10)
    patience.record_stall(2, 12)
    assert [patience.suspended(n) for n in (11, 12, 15, 16)] == [{1, 2}, {2}, {2}, set()]
    patience.record_arrival(1)
    patience.record_stall(1, 20)
    assert [patience.suspended(n) for n in (20, 21, 22)] == [{1}, {1}, set()]

"""Waiting for peers' models, with simulated times."""

import math

import pytest

from fedcb2o.peer.wire.patience import Backoff, Patience, Wait

DEADLINE = 60.0


def test_a_peer_that_always_stalls_costs_a_few_deadlines():
    backoff, cost = Backoff(), 0
    for n in range(200):
        if 1 not in backoff.suspended(n):
            cost += 1
            backoff.record_stall(1, n)
    assert cost == 10
    assert backoff.suspended(0) == {1}


def test_a_peer_that_is_missed_three_times_in_a_row_is_not_asked():
    backoff = Backoff()
    for n in (0, 1):
        backoff.record_miss(1, n)
    backoff.record_arrival(1)
    for n in (3, 4):
        backoff.record_miss(1, n)
    assert backoff.suspended(5) == set()
    backoff.record_miss(1, 5)
    assert [backoff.suspended(n) for n in (6, 7)] == [{1}, set()]


def test_a_peer_that_is_late_once_is_asked_again_soon():
    backoff = Backoff()
    backoff.record_stall(1, 10)
    backoff.record_stall(2, 10)
    backoff.record_stall(2, 12)
    assert [backoff.suspended(n) for n in (11, 12, 15, 16)] == [{1, 2}, {2}, {2}, set()]
    backoff.record_arrival(1)
    backoff.record_stall(1, 20)
    assert [backoff.suspended(n) for n in (20, 21, 22)] == [{1}, {1}, set()]


def simulate(
    seconds: dict[int, float], rounds: int, minimum: float = 1.0, training_seconds: float = 0.5
):
    """Return the duration and the received peers of each round.

    A round asks all peers that are not suspended. Peer i answers after `seconds[i]`.
    """
    patience, backoff, now = Patience(), Backoff(), 0.0
    durations, received = [], []
    for n in range(rounds):
        round_start = now
        asked = sorted(seconds.keys() - backoff.suspended(n))
        needed = sum(not backoff.stall_counts.get(peer) for peer in asked)
        start = round_start + training_seconds
        patience.earn(start, DEADLINE)
        wait = Wait(patience, start, start + DEADLINE, round_start + minimum)
        arrived: set[int] = set()
        for peer in sorted(asked, key=seconds.__getitem__):
            if start + seconds[peer] > wait.end(needed, set(asked) - arrived):
                break
            wait.record_arrival(start + seconds[peer])
            arrived.add(peer)
        end = start + max((seconds[peer] for peer in arrived), default=0.0)
        if len(arrived) < len(asked):
            end = wait.end(needed, set(asked) - arrived)
        patience.spend(max(0.0, end - wait.uncharged_end(needed)))
        for peer in asked:
            if min(end, start + seconds[peer]) > wait.late_after():
                backoff.record_stall(peer, n)
            elif peer not in arrived:
                backoff.record_miss(peer, n)
            else:
                backoff.record_arrival(peer)
            if peer in arrived:
                patience.record_arrival(peer, seconds[peer])
            else:
                patience.record_missing(peer, end - start)
        now = max(end, round_start + minimum)
        durations.append(now - round_start)
        received.append(arrived)
    return durations, received


@pytest.mark.parametrize(
    ("num_late", "delays"),
    [(1, (0.3, 0.6, 0.9, 1.5, 3.0, 10.0, 59.0, math.inf)), (2, (0.9, 10.0, 59.0))],
)
def test_late_peers_add_less_than_30_percent_to_the_time(num_late, delays):
    """The delays are short, just below the deadline, above it, and between these."""
    punctual = dict.fromkeys(range(1, 5), 0.05)
    undisturbed = sum(simulate(punctual, 60)[0])
    for delay in delays:
        late = dict.fromkeys(range(5 - num_late, 5), delay)
        durations, received = simulate({**punctual, **late}, 60)
        assert sum(durations) < 1.3 * undisturbed, delay
        assert all(punctual.keys() - late.keys() <= peers for peers in received)


def test_a_slow_peer_is_received_in_every_round_that_is_long_enough():
    """Without a minimum duration of rounds it is received repeatedly."""
    _, received = simulate({1: 0.05, 2: 0.05, 3: 0.05, 4: 8.0}, 40, minimum=10.0)
    assert all(4 in peers for peers in received)
    _, received = simulate({1: 1.0, 2: 1.0, 3: 1.0, 4: 2.5}, 100, minimum=0.0, training_seconds=2.0)
    assert sum(4 in peers for peers in received) > 20
    _, received = simulate({1: 1.0, 2: 1.0, 3: 1.0, 4: 5.0}, 200, minimum=0.0, training_seconds=2.0)
    assert sum(4 in peers for peers in received[100:]) >= 3


def test_a_minority_of_peers_does_not_change_the_median_time():
    patience = Patience()
    for peer, seconds in enumerate((2.0, 2.1, 2.2, 0.001, 59.0)):
        patience.record_arrival(peer, seconds)
    assert patience.median_seconds == 2.1


def test_a_round_waits_for_half_of_the_answers():
    wait = Wait(Patience(), 0.0, DEADLINE, 0.0)
    assert wait.end(4) == DEADLINE
    wait.record_arrival(1.0)
    assert wait.end(4) == DEADLINE
    assert wait.spares_start == 6.0
    wait.record_arrival(2.0)
    assert wait.end(4, [7]) == 4.0  # 1.5 times the second arrival, and a second of credit
    assert wait.end(3, [7]) == 4.0
    wait.record_failure()
    assert wait.end(6, [7]) == 4.0
    assert wait.end(7, [7]) == DEADLINE

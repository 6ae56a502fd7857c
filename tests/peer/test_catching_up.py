"""Members that an outage moved apart exchange models again, in virtual time."""

import threading
from types import SimpleNamespace

import pytest
from tests.peer import members, pace

from fedcb2o.peer.node import peer_monitor
from fedcb2o.peer.node.peer_monitor import PeerMonitor
from fedcb2o.peer.wire.patience import Backoff

ROUNDS, LAG = 120, 4
ROUND_SECONDS, WORK_SECONDS, DEADLINE = 1.0, 0.3, 18.0
START, OUTAGE = 5.0, 18.0


class Clock:
    """Virtual time of several threads. One thread runs at a time, and time passes in waits only."""

    def __init__(self, num_threads):
        self.now = 0.0
        self._num_missing = num_threads
        self._ends = {}
        self._turn = None
        self._changed = threading.Condition()

    def monotonic(self):
        return self.now

    def is_set(self):
        return False

    def wait(self, seconds):
        """Pause the calling thread."""
        own = threading.current_thread().name
        with self._changed:
            self._num_missing -= self._turn is None
            self._ends[own] = self.now + seconds
            self._pass_on()
            self._changed.wait_for(lambda: self._turn == own)
        return False

    def leave(self):
        """End the calling thread's part."""
        with self._changed:
            self._pass_on()

    def _pass_on(self):
        if self._num_missing or not self._ends:
            return
        self._turn = min(self._ends, key=lambda name: (self._ends[name], name))
        self.now = self._ends.pop(self._turn)
        self._changed.notify_all()


class World:
    """Members whose pace is that of `PeerMonitor`; the last ones may be hostile, and claim rounds.

    Each asks all others, and a round takes `WORK_SECONDS` without its pauses. Where the pair is
    cut, both wait for each other until the deadline, as if they had asked no other member.
    """

    def __init__(self, folder, n, *, pair=(), claim=None, hostile=1, first=None, work=None):
        self.claim = claim
        self.honest = range(n - hostile * (claim is not None))
        self.pair = set(pair)
        self.work = work or {}
        self.rounds = {j: (first or {}).get(j, 0) for j in range(n)}
        self.published = {j: rounds - 1 for j, rounds in self.rounds.items()}
        self.log = {j: [] for j in self.honest}  # time, round, and members with a model
        self.clock = Clock(len(self.honest))
        changes = {"rounds": ROUNDS, "agents": {"benign": n, "malicious": 0}}
        self.federation = members.federated(
            members.identities(folder, n),
            changes=changes,
            lag=LAG,
            round_seconds=ROUND_SECONDS,
            deadline_seconds=DEADLINE,
        )

    def is_cut(self, i, j):
        return {i, j} == self.pair and START <= self.clock.now < START + OUTAGE

    def run(self):
        threads = [
            threading.Thread(target=self.take_part, args=(j,), name=f"{j}", daemon=True)
            for j in self.honest
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(240)
            assert not thread.is_alive()
        return self

    def take_part(self, j):
        try:
            self.train(j)
        finally:
            self.clock.leave()

    def train(self, j):
        others = [i for i in self.rounds if i != j]
        client = Client(self, j)
        transport = SimpleNamespace(connected_peers=lambda: frozenset(others))
        monitor = PeerMonitor(transport, client, self.clock, pace.Times())
        backoff = Backoff()
        self.clock.wait(0.01 * j)
        while self.rounds[j] < ROUNDS:
            start, n = self.clock.now, self.rounds[j]
            self.clock.wait(self.work.get(j, WORK_SECONDS))
            self.published[j] = n
            for i in others:
                if self.is_cut(i, j) and i not in backoff.suspended(n):
                    self.clock.wait(DEADLINE)
                    backoff.record_stall(i, n)
            client.inquire(others)
            received = [i for i in self.honest if i in others and self.published[i] >= n - LAG]
            self.log[j].append((self.clock.now, n, received))
            self.rounds[j] += 1
            monitor.throttle(self.rounds[j], start)
            self.rounds[j] = monitor.next_round(self.rounds[j])

    def cut_off(self, since):
        """Return times, members and rounds after a time without the models of all honest others."""
        return [
            (time, j, n)
            for j, lines in self.log.items()
            for time, n, received in lines
            if time >= since and len(received) < len(self.honest) - 1
        ]

    def seconds_a_round(self, j):
        times = [time for time, *_ in self.log[j]]
        return (times[-1] - times[0]) / (len(times) - 1)


class Client:
    """Client that learns what others claim at once, unless the pair is cut."""

    def __init__(self, world, agent_id):
        self.world, self.agent_id, self.federation = world, agent_id, world.federation
        self.announced_rounds, self.announcement_times = {}, {}
        self.ledger = SimpleNamespace(equivocators=frozenset())

    def inquire(self, peers):
        world = self.world
        for i in peers:
            if not world.is_cut(i, self.agent_id):
                rounds = world.rounds[i]
                if i not in world.honest:
                    rounds = world.claim(self.agent_id, world.rounds[self.agent_id])
                self.announced_rounds[i] = rounds
                self.announcement_times[i] = world.clock.now


CLAIMS = {
    "behind": lambda receiver, n: 0,
    "ahead": lambda receiver, n: ROUNDS,
    "level": lambda receiver, n: n,
    "behind for the cut pair, and ahead for others": lambda i, n: 0 if i < 2 else ROUNDS,
    "ahead for the cut pair, and behind for others": lambda i, n: ROUNDS if i < 2 else 0,
    "level for the cut pair, and behind for others": lambda i, n: n if i < 2 else 0,
}


@pytest.fixture
def simulate(tmp_path, monkeypatch):
    """Return a function that runs a world in its own time."""

    def run(n, **options):
        world = World(tmp_path, n, **options)
        monkeypatch.setattr(peer_monitor, "time", world.clock)
        return world.run()

    return run


@pytest.mark.parametrize(("n", "claim"), [(3, None), (4, None), *((5, c) for c in (None, *CLAIMS))])
def test_after_an_outage_of_a_pair_all_members_get_all_models_within_two_rounds(simulate, n, claim):
    """The fifth member claims other rounds, so that neither group has a majority by itself."""
    world = simulate(n, pair=(0, 1), claim=CLAIMS.get(claim))
    late = world.cut_off(START + OUTAGE)
    assert all([j for _, j, _ in late].count(i) <= 2 for i in world.honest), late
    assert all(len(lines) == ROUNDS for lines in world.log.values())  # without skipped rounds


@pytest.mark.parametrize("behind", [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)])
def test_members_apart_by_less_than_a_deadline_meet_within_two_rounds(simulate, behind):
    """A larger group behind is waited for; a smaller one skips rounds."""
    first = {j: 0 if j in behind else 12 for j in range(5)}
    world = simulate(5, first=first)
    late = world.cut_off(0.0)
    assert all([j for _, j, _ in late].count(i) <= 2 for i in world.honest), late


def test_members_apart_by_more_than_a_deadline_meet_with_the_share_of_time(simulate):
    world = simulate(3, first={0: 0, 1: 0, 2: 24})
    seconds = (24 - DEADLINE) / 0.15 * ROUND_SECONDS
    assert world.cut_off(0.0)
    assert not world.cut_off(seconds + 5)


@pytest.mark.parametrize(("claim", "hostile"), [*((claim, 1) for claim in CLAIMS), ("ahead", 2)])
def test_hostile_members_of_five_change_no_pace_by_their_claims(simulate, claim, hostile):
    world = simulate(5, claim=CLAIMS[claim], hostile=hostile)
    for j in world.honest:
        assert len(world.log[j]) == ROUNDS
        assert ROUND_SECONDS - 0.01 <= world.seconds_a_round(j) < 1.05 * ROUND_SECONDS
    assert not world.cut_off(0.0)


def test_a_hostile_member_gains_little_from_a_slow_one(simulate):
    """Both seem behind, which is half of the others: the fast members wait, on credit."""
    world = simulate(5, claim=CLAIMS["behind"], work={0: 2 * ROUND_SECONDS})
    for j in (1, 2, 3):
        seconds = world.log[j][-1][0] - world.log[j][0][0] - DEADLINE
        assert seconds / (ROUNDS - 1) < 1.3 * ROUND_SECONDS

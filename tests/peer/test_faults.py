"""Real processes that are killed, stopped, cut off and short of disk: nobody loses a round, and nobody waits for long."""

import signal
import statistics
import time
from functools import partial

from tests.peer import faults
from tests.peer.nodes import Nodes, nodes

CHANGES = {
    "rounds": 20,
    "agents": {"benign_samples": 40, "malicious_samples": 40, "budget": 3},
    "model": {"hidden": [16]},
    "training": {"gamma": 0.1},
}
PACE = {"round_seconds": 0.15, "deadline_seconds": 3.0, "lag": 5}
FAIR = {"late", "no answer"}
"""Why a model may be missed between agents who do no wrong."""


def whole(peers: Nodes, *ids: int, rounds: int = CHANGES["rounds"]) -> float:
    """Each of some nodes, by default all, has every round once, nobody has accused anybody, no model was refused, and
    no round took longer than its deadline allows; the mean accuracy at the end of those that are benign."""
    ids = ids or tuple(range(len(peers.identities)))
    for j in ids:
        lines = peers.lines(j)
        assert [line["round"] for line in lines] == list(range(1, rounds + 1)), peers.log(j)
        assert not list(peers.out(j).glob("proofs/*"))
        assert not any(line["refused"] for line in lines), [line["refused"] for line in lines if line["refused"]]
        assert max(line["seconds"]["exchange"] for line in lines) < PACE["deadline_seconds"] + 1.5
        assert (peers.out(j) / "model.safetensors").exists()
    return statistics.mean(line["accuracy"] for j in ids for line in peers.lines(j)[-1:] if "accuracy" in line)


def test_members_that_are_killed_stopped_short_of_disk_and_wrong_about_the_time(tmp_path):
    """One fault each of four in five: all go on from where they were, and end with a model as good as any."""
    with nodes(tmp_path, 5, changes=CHANGES, **PACE) as peers:
        peers.start(0, 1, prepare=partial(faults.lease, 1.0))
        peers.start(2, prepare=partial(faults.full, 6000))
        peers.start(3, prepare=partial(faults.clock, 1.0))
        peers.start(4, prepare=partial(faults.lease, 1.0))
        peers.until(0, 3)
        peers.send(1, signal.SIGKILL)
        peers.send(4, signal.SIGSTOP)
        assert peers.wait(1) == [-signal.SIGKILL]
        peers.start(1, resume=True)
        time.sleep(1.5)
        peers.send(4, signal.SIGCONT)
        assert peers.wait(2) == [2]
        (told,) = peers.log(2).splitlines()
        assert "cannot write" in told
        assert "make room" in told
        assert "--resume" in told
        peers.start(2, resume=True)
        assert peers.wait() == [0] * 5, [peers.log(j) for j in range(5)]
        assert whole(peers) > 0.6

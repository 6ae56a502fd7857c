"""Real processes that are killed, stopped, cut off or short of disk: nobody loses a round, or waits for long."""

import signal
import statistics
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import tomli_w
from tests.peer import faults
from tests.peer import nodes as nodes_module
from tests.peer.nodes import FORKED, Nodes, nodes, wait_for

from fedcb2o.peer.identity import Identity

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


def run(peers: Nodes, j: int, *more: object) -> BaseProcess:
    """A node as a user starts it."""
    simulate = peers.folder / "simulate.toml"
    simulate.write_text(tomli_w.dumps(dict(peers.simulate)))
    log = peers.out(j).with_suffix(".log")
    peers.processes[j] = FORKED.Process(
        target=faults.command,
        args=(log, "peer", "run", peers.federation, "--identity", peers.identities[j], "--simulate", simulate,
              "--out", peers.out(j), "--gather", 20, "--linger", 20, *more),
        daemon=True,
    )  # fmt: skip
    peers.processes[j].start()
    return peers.processes[j]


def test_ctrl_c_and_sigterm_end_a_node_in_order_and_it_goes_on(tmp_path):
    with nodes(tmp_path, 3, changes={**CHANGES, "agents": {**CHANGES["agents"], "budget": 2}}, **PACE) as peers:
        peers.start(0, 1)
        before = 0
        for number, word in ((signal.SIGINT, "Interrupted"), (signal.SIGTERM, "Terminated")):
            run(peers, 2, "--resume")
            peers.until(2, before + 2)
            began = time.monotonic()
            peers.send(2, number)
            assert peers.wait(2, seconds=20) == [128 + number], peers.log(2)
            assert time.monotonic() - began < 10
            assert word in peers.log(2)
            assert "Traceback" not in peers.log(2)
            before = len(peers.lines(2))
        run(peers, 2, "--resume")
        assert peers.wait() == [0] * 3, peers.log(2)
        whole(peers)


def test_one_that_waits_for_others_hears_ctrl_c(tmp_path):
    """In a synchronous federation, where it would wait for the one that never comes."""
    changes = {**CHANGES, "agents": {**CHANGES["agents"], "budget": 1}}
    with nodes(tmp_path, 2, changes=changes, synchronous=True, deadline_seconds=100.0) as peers:
        run(peers, 0, "--gather", 0)
        wait_for(lambda: (peers.out(0) / "signed.jsonl").exists(), 60)
        time.sleep(0.5)
        peers.send(0, signal.SIGINT)
        assert peers.wait(0, seconds=15) == [130], peers.log(0)


def test_who_is_left_alone_finishes_alone_and_nothing_is_begun_twice(tmp_path):
    changes = {**CHANGES, "agents": {**CHANGES["agents"], "budget": 2}}
    with nodes(tmp_path, 3, changes=changes, **PACE) as peers:  # the third never starts
        peers.start(0, 1, gather=1.0)
        peers.until(1, 3)
        peers.send(1, signal.SIGKILL)
        for out, said in ((peers.out(0), "another process is writing"), (tmp_path / "other", "the port is in use")):
            assert said in refused(peers, 0, out=out, resume=True)
        assert peers.wait(0) == [0], peers.log(0)
        before = peers.lines(0)
        assert [line["round"] for line in before] == list(range(1, 21))
        assert not before[-1]["alive"]
        assert "--resume goes on" in refused(peers, 0)
        began = time.monotonic()
        peers.start(0, resume=True)
        assert peers.wait(0) == [0]
        assert time.monotonic() - began < 10
        assert peers.lines(0) == before
        whole(peers, 0)


def refused(peers: Nodes, j: int, *, out: Path | None = None, **options: Any) -> str:
    """The one line that a node says which cannot be started."""
    out = out or peers.out(j)
    work = peers.federation, peers.identities[j], out, peers.simulate, options
    before = len(log.read_text()) if (log := out.with_suffix(".log")).exists() else 0
    process = FORKED.Process(target=nodes_module._run, args=work, daemon=True)
    process.start()
    process.join(30)
    assert process.exitcode == 2
    (line,) = log.read_text()[before:].splitlines()
    return line


def test_a_certificate_that_ends_cuts_its_member_off_until_it_is_renewed(tmp_path):
    with nodes(tmp_path, 4, changes=CHANGES, **{**PACE, "round_seconds": 0.4}) as peers:
        identity = Identity.read(peers.identities[3])
        peers.start(0, 1, 2, gather=60.0)
        for j in (0, 1, 2):
            wait_for(lambda j=j: (peers.out(j) / "federation.toml").exists(), 60)
        identity.renew(until=datetime.now(UTC) + timedelta(seconds=6))
        peers.start(3)
        assert peers.wait(3, seconds=60) == [2], peers.log(3)
        (line,) = peers.log(3).splitlines()
        assert "expired at" in line
        assert "peer renew" in line
        assert "--resume" in line
        before = len(peers.lines(3))
        assert 0 < before < 20
        wait_for(lambda: 3 not in peers.lines(0)[-1]["alive"], 20)
        identity.renew()
        peers.start(3, resume=True)
        assert peers.wait() == [0] * 4, [peers.log(j) for j in range(4)]
        whole(peers)
        assert any(line["received"] for line in peers.lines(3)[before:])

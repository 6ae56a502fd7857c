"""Nodes as real processes that are killed, stopped, disconnected or without disk space."""

import itertools
import json
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Collection
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from tests.peer import faults, members
from tests.peer import nodes as nodes_module
from tests.peer.nodes import FORKED, Nodes, nodes
from tests.peer.proxy import Proxy
from tests.peer.waiting import wait_for
from tests.tiny import ENVIRONMENT, FEDCB2O

from fedcb2o.data import digits
from fedcb2o.peer import (
    Identity,
    amend_federation,
    load_model,
    read_federation,
    sign_federation,
    write_federation,
)

CHANGES = {
    "rounds": 20,
    "agents": {"benign_samples": 40, "malicious_samples": 40, "budget": 3},
    "model": {"hidden": [16]},
    "training": {"gamma": 0.1},
}
PACE = {"round_seconds": 0.15, "deadline_seconds": 3.0, "lag": 5}


def check_runs(
    peers: Nodes, *ids: int, rounds: int = CHANGES["rounds"], stopped: Collection[int] = ()
) -> float:
    """Check complete rounds, no proofs, no refusals and short exchanges; return the mean accuracy.

    Nodes skip rounds only beyond the lag, and never the last ones. The exchanges of `stopped` nodes
    may exceed the deadline.
    """
    ids = ids or tuple(range(len(peers.identities)))
    for j in ids:
        lines = peers.lines(j)
        finished = [0, *(line["round"] for line in lines)]
        last_start = rounds - PACE["lag"]  # the latest round to which a node may skip
        steps = {
            after - before for before, after in itertools.pairwise(finished) if after != last_start
        }
        assert steps <= {1, *range(PACE["lag"] + 2, rounds)}, (finished, peers.log(j))
        assert finished[-1] == rounds, peers.log(j)
        assert not list(peers.out(j).glob("proofs/*"))
        assert not any(line["refused"] for line in lines), [
            line["refused"] for line in lines if line["refused"]
        ]
        if j not in stopped:
            assert (
                max(line["seconds"]["exchange"] for line in lines) < PACE["deadline_seconds"] + 1.5
            )
        assert (peers.out(j) / "model.safetensors").exists()
    return statistics.mean(
        line["accuracy"] for j in ids for line in peers.lines(j)[-1:] if "accuracy" in line
    )


@pytest.mark.slow
def test_nodes_recover_from_kills_stops_full_disks_and_wrong_clocks(tmp_path):
    """Four of five nodes have a fault each; all resume and end with a good model."""
    with nodes(tmp_path, 5, changes=CHANGES, **PACE) as peers:
        peers.start(0, 1, prepare=partial(faults.lease, 1.0))
        peers.start(2, prepare=partial(faults.full, 9000))
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
        (message,) = peers.log(2).splitlines()
        assert "cannot write" in message
        assert "make room" in message
        assert "--resume" in message
        peers.start(2, resume=True)
        assert peers.wait() == [0] * 5, [peers.log(j) for j in range(5)]
        assert check_runs(peers, stopped=[4]) > 0.6


def start_command(peers: Nodes, j: int, *more: object) -> BaseProcess:
    """Start a node with the command line, as a user does."""
    work = peers.out(j).with_suffix(".log"), *arguments(peers, j), *more
    peers.processes[j] = FORKED.Process(target=faults.command, args=work, daemon=True)
    peers.processes[j].start()
    return peers.processes[j]


def arguments(peers: Nodes, j: int) -> list[object]:
    """Return the arguments of `fedcb2o` for a node."""
    simulate = peers.folder / "simulate.toml"
    simulate.write_text(tomli_w.dumps(dict(peers.simulate)))
    command = [
        "peer",
        "run",
        peers.federation,
        "--simulate",
        simulate,
        "--gather",
        "60",
        "--linger",
        "20",
    ]
    return [*command, "--identity", peers.identities[j], "--out", peers.out(j)]


def test_ctrl_c_and_sigterm_end_a_node_cleanly_and_it_resumes(tmp_path):
    changes = {**CHANGES, "agents": {**CHANGES["agents"], "budget": 2}}
    pace = {**PACE, "lag": CHANGES["rounds"]}  # no round is skipped
    with nodes(tmp_path, 3, changes=changes, **pace) as peers:
        peers.start(0, 1)
        before = 0
        for number, word in ((signal.SIGINT, "Interrupted"), (signal.SIGTERM, "Terminated")):
            start_command(peers, 2, "--resume")
            peers.until(2, before + 2)
            peers.send(2, number)
            assert peers.wait(2) == [128 + number], peers.log(2)
            assert word in peers.log(2)
            assert "Traceback" not in peers.log(2)
            before = len(peers.lines(2))
            load_model(peers.out(2))
        start_command(peers, 2, "--resume")
        assert peers.wait() == [0] * 3, peers.log(2)
        check_runs(peers)


def test_ctrl_c_ends_a_node_that_waits_for_peers(tmp_path):
    """The federation is synchronous and the other member never starts."""
    changes = {**CHANGES, "agents": {**CHANGES["agents"], "budget": 1}}
    with nodes(tmp_path, 2, changes=changes, synchronous=True, deadline_seconds=3600.0) as peers:
        start_command(peers, 0, "--gather", 0)
        wait_for(lambda: (peers.out(0) / "signed.jsonl").exists())
        time.sleep(0.5)
        peers.send(0, signal.SIGINT)
        assert peers.wait(0) == [130], peers.log(0)


def test_a_node_without_peers_finishes_and_no_run_starts_twice(tmp_path):
    changes = {**CHANGES, "agents": {**CHANGES["agents"], "budget": 2}}
    with nodes(tmp_path, 3, changes=changes, **PACE) as peers:  # the third never starts
        peers.start(0, 1, gather=1.0)
        peers.until(1, 3)
        peers.send(1, signal.SIGKILL)
        for out, message in (
            (peers.out(0), "another process is writing"),
            (tmp_path / "other", "org-0 already signs for this run in"),
        ):
            assert message in refusal(peers, 0, out=out, resume=True)
        assert peers.wait(0) == [0], peers.log(0)
        before = peers.lines(0)
        assert [line["round"] for line in before] == list(range(1, 21))
        assert not before[-1]["alive"]
        assert "--resume goes on" in refusal(peers, 0)
        peers.start(0, resume=True, gather=3600.0)  # a finished run waits for no member
        assert peers.wait(0) == [0]
        assert peers.lines(0) == before
        check_runs(peers, 0)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_lost_folder_or_an_old_copy_never_causes_a_second_signature(tmp_path):
    """The agent learns its last signed round from its peers."""
    with nodes(
        tmp_path, 4, changes={**CHANGES, "rounds": 30}, **{**PACE, "round_seconds": 0.6}
    ) as peers:

        def has_received(j: int, n: int) -> bool:
            """Return whether agent 0 received a model of agent j from round n or later."""
            return any(
                m["id"] == j and m["round"] >= n
                for line in peers.lines(0)
                for m in line["received"]
            )

        peers.start()
        wait_for(lambda: has_received(2, 2))
        peers.send(2, signal.SIGKILL)
        peers.wait(2)
        shutil.copytree(peers.out(2), tmp_path / "old")
        peers.start(2, resume=True)
        wait_for(lambda: has_received(2, 5) and has_received(3, 2))
        for j in (2, 3):
            peers.send(j, signal.SIGKILL)
            peers.wait(j)
        shutil.rmtree(peers.out(2))
        (tmp_path / "old").rename(peers.out(2))
        shutil.rmtree(peers.out(3))
        message = refusal(peers, 3, gather=3.0)
        assert "that org-3 signed for round" in message
        assert "--resume" in message
        peers.start(2, 3, resume=True)
        assert peers.wait() == [0] * 4, [peers.log(j) for j in range(4)]
        check_runs(peers, rounds=30)
        for j in (2, 3):
            signed = [
                json.loads(line)["round"]
                for line in (peers.out(j) / "signed.jsonl").read_text().splitlines()
            ]
            assert len(signed) < 30
            assert signed == sorted(set(signed))
            assert any(
                j in [model["id"] for model in line["received"]] for line in peers.lines(0)[-8:]
            )


def refusal(peers: Nodes, j: int, *, out: Path | None = None, **options: Any) -> str:
    """Return the only line of output of a node that cannot start."""
    out = out or peers.out(j)
    work = peers.federation, peers.identities[j], out, peers.simulate, options
    before = len(log.read_text()) if (log := out.with_suffix(".log")).exists() else 0
    process = FORKED.Process(target=nodes_module._run, args=work, daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == 2
    (line,) = log.read_text()[before:].splitlines()
    return line


@pytest.mark.slow
@pytest.mark.parametrize(("count", "rounds"), [(4, 20), (8, 50)])
@pytest.mark.timeout(120)
def test_an_expired_certificate_disconnects_a_member_until_renewal(count, rounds, tmp_path):
    changes = {**CHANGES, "rounds": rounds}
    with nodes(tmp_path, count, changes=changes, **{**PACE, "round_seconds": 0.4}) as peers:
        identity = Identity.read(peers.identities[3])
        others = [j for j in range(count) if j != 3]
        peers.start(*others, gather=60.0)
        for j in others:
            wait_for(lambda j=j: (peers.out(j) / "federation.toml").exists())
        identity.renew(until=datetime.now(UTC) + timedelta(seconds=6))
        peers.start(3)
        assert peers.wait(3, seconds=60) == [2], peers.log(3)
        (line,) = peers.log(3).splitlines()
        assert "expired at" in line
        assert "peer renew" in line
        assert "--resume" in line
        before = len(peers.lines(3))
        assert 0 < before < rounds
        wait_for(lambda: 3 not in peers.lines(0)[-1]["alive"])
        identity.renew()
        peers.start(3, resume=True)
        assert peers.wait() == [0] * count, [peers.log(j) for j in range(count)]
        print(f"accuracy {check_runs(peers, rounds=rounds):.3f}; {before} rounds before it ended")
        assert any(line["received"] for line in peers.lines(3)[before:])


LONG = {**CHANGES, "rounds": 50}
MIN_ACCURACY = 0.85
"""Minimum mean accuracy of eight agents after 50 rounds. Chance is 0.1."""


def check_all_ended(peers: Nodes, *, stopped: Collection[int] = ()) -> None:
    """Check that all nodes end without error, with all rounds and a normal accuracy."""
    assert peers.wait(seconds=90) == [0] * 8, [peers.log(j) for j in range(8)]
    accuracy = check_runs(peers, rounds=50, stopped=stopped)
    missed = sum(
        len(line["late"] + line["behind"] + line["no_model"])
        for j in range(8)
        for line in peers.lines(j)
    )
    received = sum(len(line["received"]) for j in range(8) for line in peers.lines(j))
    print(
        f"accuracy {accuracy:.3f}; {received} models arrived and {missed} were missed in 8 x 50 rounds"
    )
    assert accuracy > MIN_ACCURACY


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_slow_and_interrupted_links(tmp_path):
    """Models have 150 kB; one link is slow, and links to another node are cut every 3 s."""
    with ExitStack() as stack:
        peers = stack.enter_context(
            nodes(tmp_path, 8, changes={**LONG, "model": {"hidden": [512]}}, **PACE)
        )
        proxies = []
        for j, options in ((0, {"rate": 1e6}), (1, {"drop": 0.33, "delay": 0.02, "seed": 0})):
            member_port = int(Identity.read(peers.identities[j]).member.endpoint.split(":")[1])
            (port,) = members.free_ports(1)
            proxies.append(stack.enter_context(Proxy(port, port=member_port, **options)))
            peers.start(j, listen=f"127.0.0.1:{port}")
        peers.start(*range(2, 8))
        check_all_ended(peers)
        assert proxies[0].passed[1] > 50 * 150_000
        assert proxies[1].dropped > 5


SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long off(void) { const char *text = getenv("CLOCK_OFF"); return text ? atol(text) : 0; }
int clock_gettime(clockid_t id, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int done = real(id, now);
    if (!done && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += off();
    return done;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec t; int done = clock_gettime(CLOCK_REALTIME, &t);
    now->tv_sec = t.tv_sec; now->tv_usec = t.tv_nsec / 1000; return done;
}
time_t time(time_t *now) {
    struct timespec t; clock_gettime(CLOCK_REALTIME, &t); if (now) *now = t.tv_sec; return t.tv_sec;
}
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.skipif(
    shutil.which("cc") is None, reason="needs a C compiler to change the clock of a process"
)
def test_clocks_that_are_one_hour_slow_or_fast(tmp_path):
    """The clock of the whole process is shifted, including that of TLS."""
    (tmp_path / "clock.c").write_text(SHIM)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", tmp_path / "clock.so", tmp_path / "clock.c", "-ldl"],
        check=True,
    )
    with (
        nodes(tmp_path, 8, changes=LONG, **{**PACE, "round_seconds": 0.3}) as peers,
        ExitStack() as stack,
    ):
        shifted = {}
        for j, offset in ((6, -3600), (7, 3600)):
            environment = {
                **ENVIRONMENT,
                "LD_PRELOAD": str(tmp_path / "clock.so"),
                "CLOCK_OFF": str(offset),
            }
            date = subprocess.run(
                ["date", "+%s"], env=environment, capture_output=True, text=True, check=True
            )
            assert abs(int(date.stdout) - time.time() - offset) < 60
            shifted[j] = subprocess.Popen(
                [FEDCB2O, *arguments(peers, j)], env=environment, stderr=subprocess.PIPE
            )
            stack.callback(shifted[j].kill)
        peers.start(*range(6), gather=60.0)
        assert peers.wait(seconds=100) == [0] * 6
        for process in shifted.values():
            assert process.wait(30) == 0, process.stderr.read()
            process.stderr.close()
        accuracy = check_runs(peers, rounds=50)
        print(f"accuracy {accuracy:.3f}")
        assert accuracy > MIN_ACCURACY
        for j in shifted:
            assert sum(j in line["alive"] for line in peers.lines(0)) > 40
            assert any(j in [model["id"] for model in line["received"]] for line in peers.lines(0))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_new_member_of_a_busy_federation_takes_part(tmp_path):
    """The work of a round fills its minimum duration, so that a late member cannot catch up."""
    pace = {"round_seconds": 0.6, "deadline_seconds": 3.0, "lag": 4}
    changes = {**CHANGES, "rounds": 36, "agents": {"benign": 3, "malicious": 0, "budget": 2}}
    with nodes(tmp_path, 3, changes=changes, most_samples=1000, **pace) as peers:
        data = digits()
        files = [str(tmp_path / f"data-{j}.npz") for j in range(4)]
        for j, file in enumerate(files):
            x, y = data.pool.x[j::4].numpy(), data.pool.y[j::4].numpy()
            np.savez(file, x=x, y=y, class_names=data.class_names)

        def start(j: int, **options: Any) -> None:
            peers.start(
                j, data=files[j], prepare=partial(faults.slow, 0.55), assess_every=0, **options
            )

        for j in range(3):
            start(j)
        peers.until(0, 8)

        # the documented steps: a new version, two signatures of three, restarts one by one
        (port,) = members.free_ports(1)
        new_member = Identity.make(tmp_path / "org-3", name="org-3", endpoint=f"127.0.0.1:{port}")
        new = tmp_path / "federation-2.toml"
        write_federation(
            amend_federation(read_federation(peers.federation), add=[new_member.member]), new
        )
        for folder in peers.identities[:2]:
            sign_federation(new, Identity.read(folder))
        peers.federation = new
        peers.identities.append(new_member.folder)
        for j in range(3):
            peers.send(j, signal.SIGTERM)
            peers.wait(j)
            start(j, resume=True, gather=0.0)
        start(3)

        assert peers.wait(seconds=200) == [0] * 4, [peers.log(j) for j in range(4)]
        assert not list(tmp_path.glob("out-*/proofs/*"))
        for j in range(4):
            lines = peers.lines(j)
            assert lines[-1]["round"] == 36
            first = lines[0]["round"]
            assert (first == 1) == (j < 3)
        first = peers.lines(3)[0]["round"]
        assert 8 < first < 30
        assert len(peers.lines(3)) <= 37 - first
        models = [
            (line["round"], model["weight"] > 0)
            for j in range(3)
            for line in peers.lines(j)
            for model in line["received"]
            if model["id"] == 3
        ]
        print(
            f"began with round {first}; {len(models)} models taken, the first in {min(models)[0]}"
        )
        assert min(models)[0] <= first + 5
        assert len(models) > (36 - first) / 2
        assert any(is_averaged for _, is_averaged in models)
        end_times = [(peers.out(j) / "model.safetensors").stat().st_mtime for j in range(4)]
        assert max(end_times) - min(end_times) < 5 * pace["round_seconds"]


def test_a_removed_member_gets_an_error_and_exit_status_3(tmp_path):
    changes = {**CHANGES, "rounds": 12, "agents": {**CHANGES["agents"], "budget": 2}}
    with nodes(tmp_path, 3, changes=changes, **{**PACE, "round_seconds": 0.5}) as peers:
        old, new = peers.federation, tmp_path / "federation-2.toml"
        (port,) = members.free_ports(1)  # the member that replaces the removed one
        other = Identity.make(tmp_path / "other", name="org-2", endpoint=f"127.0.0.1:{port}")
        write_federation(amend_federation(read_federation(old), replace=[other.member]), new)
        for folder in peers.identities[:2]:
            sign_federation(new, Identity.read(folder))
        peers.federation = new
        peers.start(0, 1, gather=1.0, linger=10.0)
        peers.until(0, 1)
        peers.federation = old
        peers.start(2, gather=1.0, linger=1.0)
        assert peers.wait(2) == [3], peers.log(2)
        assert "Error: org-0, org-1 refuse the certificate of org-2: it was removed" in peers.log(2)
        assert (peers.out(2) / "model.safetensors").exists()
        assert peers.wait(0, 1) == [0, 0], peers.log(0)

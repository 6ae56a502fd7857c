"""Runs of processes through a relay."""

import json
import shutil
import signal
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.peer import faults, members, relays
from tests.peer.nodes import Nodes
from tests.peer.relays import RelayProcess, behind_nat, next_version
from tests.peer.test_transport import ok
from tests.peer.waiting import wait_for

import fedcb2o
from fedcb2o.data import digits
from fedcb2o.peer import read_federation
from fedcb2o.peer.node.preflight import check_members
from fedcb2o.peer.wire.relayed import open_transport


def simulated_models(folder: Path, settings: dict) -> torch.Tensor:
    fedcb2o.run({"together": 1, **settings}, out=folder, workers=1, watch=lambda *_: None)
    (seed,) = settings["seeds"]
    return load_file(folder / f"seed-{seed}" / "checkpoint.safetensors")["models"]


def same_bits(model: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(model.view(torch.int32), expected[: len(model)].view(torch.int32))


@pytest.mark.slow
@pytest.mark.parametrize("listening", [0, 1])
@pytest.mark.parametrize("kind", ["relay", "folder"])
def test_runs_through_a_relay_reproduce_the_simulation(kind, listening, tmp_path):
    orgs = behind_nat(tmp_path, 3, listening)
    settings = members.experiment(3, rounds=3)
    path = tmp_path / "federation.toml"
    members.federated(orgs, changes={"rounds": 3}, path=path, synchronous=True)
    peers = Nodes(tmp_path, path, [org.folder for org in orgs], {"together": 1, **settings})
    (tmp_path / "mailbox").mkdir()
    location = tmp_path / "mailbox"
    relay = None
    if kind == "relay":
        keys = relays.relay_identity(tmp_path)
        relay = RelayProcess(path, keys, location)
        location = relay.location
    try:
        peers.start(relay=location)
        assert peers.wait() == [0] * 3, [peers.log(j) for j in range(3)]
    finally:
        peers.close()
        if relay is not None:
            relay.kill()
    models = simulated_models(tmp_path / "simulation", settings)
    for j in range(3):
        assert same_bits(peers.model(j), models[j])
        assert [(line["refused"], line["late"]) for line in peers.lines(j)] == [({}, [])] * 3


@pytest.mark.slow
def test_no_round_exceeds_its_deadline_while_the_relay_is_down(tmp_path):
    orgs = behind_nat(tmp_path, 3)
    path = tmp_path / "federation.toml"
    members.federated(
        orgs, changes={"rounds": 60}, path=path, round_seconds=0.5, deadline_seconds=4.0
    )
    keys = relays.relay_identity(tmp_path)
    settings = {"together": 1, **members.experiment(3, rounds=60)}
    peers = Nodes(tmp_path, path, [org.folder for org in orgs], settings)
    relay = RelayProcess(path, keys, tmp_path / "mailbox")
    try:
        peers.start(relay=relay.location)
        peers.until(0, 6)
        relay.kill()
        time.sleep(4)
        relay.start()
        done = len(peers.lines(0))
        assert peers.wait() == [0] * 3, [peers.log(j) for j in range(3)]
    finally:
        peers.close()
        relay.kill()
    for j in range(3):
        lines = peers.lines(j)
        assert lines[-1]["round"] == 60
        assert max(line["seconds"]["exchange"] for line in lines) < 4.0 + 0.6
        assert any(line["received"] for line in lines[:5])
        assert any(line["received"] for line in lines[done:]), json.dumps(lines[done:])
        others = sorted({0, 1, 2} - {j})
        assert any(line["relay_down"] == others and line["late"] == [] for line in lines)
        assert lines[-1]["relay_down"] == []


@pytest.mark.slow
@pytest.mark.parametrize("relay_first", [True, False])
def test_a_removed_member_behind_a_relay_ends_in_any_order_of_restarts(relay_first, tmp_path):
    """Its node and its check name the version and the signers."""
    orgs = behind_nat(tmp_path, 3)
    first, path = tmp_path / "federation-1.toml", tmp_path / "federation.toml"
    changes = {"rounds": 500}
    pace = {"round_seconds": 0.5, "deadline_seconds": 20.0, "most_samples": 1000}
    members.federated(orgs, changes=changes, path=first, **pace)
    shutil.copy(first, path)
    keys = relays.relay_identity(tmp_path)
    peers = Nodes(tmp_path, first, [org.folder for org in orgs], members.experiment(3))
    relay = RelayProcess(first, keys, tmp_path / "mailbox")
    data = digits()
    x, y = data.pool.x[::4].numpy(), data.pool.y[::4].numpy()
    np.savez(tmp_path / "data.npz", x=x, y=y, class_names=data.class_names)
    options = {"relay": relay.location, "data": str(tmp_path / "data.npz"), "assess_every": 0}
    try:
        peers.start(**options)
        peers.until(1, 4)
        next_version(path, [orgs[0], orgs[2]], remove=["org-1"])

        def restart_relay() -> None:
            relay.kill()
            relay.work = (path, *relay.work[1:])
            relay.start()

        if relay_first:
            restart_relay()
        else:
            peers.federation = path
            for j in (0, 2):
                peers.send(j, signal.SIGINT)
                peers.wait(j)
                peers.start(j, resume=True, gather=0.0, **options)
        assert peers.wait(1, seconds=60) == [3], [peers.log(j) for j in range(3)]
        notice = (
            "version 2 of the federation, signed by org-0, org-2, removes org-1: this node takes "
            "part no more"
        )
        model = peers.out(1) / "model.safetensors"
        end = f"It ended after round {len(peers.lines(1))}; its model is {model}"
        assert f"Error: {notice}. {end}" in peers.log(1)
        assert model.exists()
        own_result, relay_result, *others = check_members(
            read_federation(first), orgs[1], seconds=8, relay=relay.location
        )
        assert (own_result.name, own_result.error) == ("org-1", notice)
        texts = [result.error for result in (relay_result, *others)]
        if relay_first:
            via_relay = "it is asked through the relay only: see the line of relay"
            assert texts == ["it refuses org-1", via_relay, via_relay]
        else:
            version = "it holds a later version: see the line of org-1"
            assert texts == ["", version, version]
    finally:
        peers.close()
        relay.kill()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["direct", "relay"])
def test_restarts_of_a_member_do_not_stall_the_others(kind, tmp_path):
    """One of three restarts three times while the others ask it for models."""
    orgs = behind_nat(tmp_path, 3, listening=3 if kind == "direct" else 0)
    path = tmp_path / "federation.toml"
    changes = {"rounds": 500, "agents": {"benign": 3, "malicious": 0, "budget": 2}}
    pace = {"round_seconds": 0.5, "deadline_seconds": 60.0}
    members.federated(orgs, changes=changes, path=path, **pace)
    settings = {"together": 1, **members.experiment(3, **changes)}
    peers = Nodes(tmp_path, path, [one.folder for one in orgs], settings)
    keys = relays.relay_identity(tmp_path)
    relay = RelayProcess(path, keys, tmp_path / "mailbox")
    options = {} if kind == "direct" else {"relay": relay.location}

    def has_model(j: int) -> bool:
        return any(2 in [one["id"] for one in line["received"]] for line in peers.lines(j)[-2:])

    try:
        peers.start(prepare=partial(faults.patient, 30.0), **options)
        peers.until(0, 4)
        for _ in range(3):
            peers.send(2, signal.SIGINT)
            assert peers.wait(2, seconds=20) == [130], peers.log(2)
            peers.start(2, resume=True, gather=0.0, **options)
            done = len(peers.lines(2))
            peers.until(2, done + 3)
        for j in (0, 1):
            seconds = max(line["seconds"]["exchange"] for line in peers.lines(j)[1:])
            print(f"longest exchange of org-{j}: {seconds:.2f} s")
            assert seconds < 4.0, peers.log(j)
            wait_for(lambda j=j: has_model(j), message=lambda j=j: peers.log(j))
    finally:
        peers.close()
        relay.kill()


def memory_of(pid: int) -> bytes:
    """Return the writable memory of a process."""
    pieces = []
    with Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, *rest = line.split()
            start, end = (int(number, 16) for number in span.split("-"))
            if rights.startswith("rw") and end - start < 2**28 and "[v" not in rest[-1]:
                try:
                    memory.seek(start)
                    pieces.append(memory.read(end - start))
                except OSError:  # unmapped in the meantime
                    continue
    return b"".join(pieces)


@pytest.mark.slow
def test_a_relay_has_no_plaintext_in_memory_or_files(tmp_path):
    """The name of a box, which the relay knows, shows that the search works."""
    orgs = behind_nat(tmp_path, 2)
    path = tmp_path / "federation.toml"
    federation = members.federated(orgs, path=path)
    keys = relays.relay_identity(tmp_path)
    store = tmp_path / "mailbox"
    relay = RelayProcess(path, keys, store)
    model = torch.randn(2**18, generator=torch.Generator().manual_seed(1)).numpy().tobytes()
    contents: list[bytes] = []
    with ExitStack() as exit_stack:
        exit_stack.callback(relay.kill)
        transports = [open_transport(federation, one, relay=relay.location) for one in orgs]
        for one in transports:
            exit_stack.callback(one.close)
        transports[1].serve(lambda request, reply: reply(ok(model)))
        wait_for(lambda: 1 in transports[0].connected_peers())
        for k in range(8):
            assert transports[0].ask(1, b"%d" % k, 20.0).answer() == ok(model)
            if k >= 6:
                contents.append(memory_of(relay.process.pid or 0))
            contents += [file.read_bytes() for file in store.rglob("*-org-1")]
        box = transports[0].relayed._box.encode()
    content = b"".join(contents)
    assert box in content
    for start in range(0, len(model), 2**17):
        assert model[start : start + 16] not in content

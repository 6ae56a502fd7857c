"""Nodes reproduce a simulation bit for bit, as processes and in one process."""

import asyncio
import dataclasses
import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.agents import ALL_GUARDS, GUARDS
from tests.peer import faults, members
from tests.peer.nodes import nodes
from tests.peer.waiting import Clock
from tests.peer.wire import Wire

import fedcb2o
from fedcb2o.data import digits
from fedcb2o.errors import ConfigError, DataError, RunError
from fedcb2o.experiments.config.loading import load
from fedcb2o.federated import trigger_exchange
from fedcb2o.peer.membership import federation
from fedcb2o.peer.node import agent, engine, peer_monitor, publisher
from fedcb2o.peer.node.node import Node
from fedcb2o.peer.node.observer import NullObserver
from fedcb2o.peer.node.peer_monitor import PeerMonitor
from fedcb2o.peer.node.publisher import ModelPublisher
from fedcb2o.peer.report.peer_records import PeerRecords
from fedcb2o.peer.wire.client import FAILED, PeerClient, _ModelDownload
from fedcb2o.peer.wire.compression import RawCodec
from fedcb2o.peer.wire.equivocation import Ledger, SigningJournal
from fedcb2o.peer.wire.server import Server

CHANGES = {"rounds": 5, "agents": {"num_clusters": 2, "benign": 2, "malicious": 1, "budget": 3}}
JUDGED = {"name": "fedcb2o", "beta": 0.6, "own_model": "judged", "mixing_factor": 1.0}
QUIET = {"gather": 10.0, "linger": 5.0}


def simulation_of(folder, settings):
    """Run a simulation. Return its models after the last round, and its pairs."""
    settings = {"together": 1, **settings}
    run = fedcb2o.run(settings, out=folder, workers=1, watch=lambda *_: None)
    (seed,) = settings["seeds"]
    return load_file(folder / f"seed-{seed}" / "checkpoint.safetensors")["models"], run.pairs


def assert_same(model, expected):
    assert torch.equal(model.view(torch.int32), expected[: len(model)].view(torch.int32))


def model_of(out):
    return load_file(out / "checkpoint.safetensors")["models"][0]


def run_all(peers, seconds=240):
    """Run each node in a thread until it ends; raise the first error."""
    errors = []

    def run(node):
        try:
            node.run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[node], daemon=True) for node in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def in_memory(folder, count, changes, **options):
    """Return the settings of a simulation, and one node per agent on a common wire."""
    orgs = members.identities(folder, count)
    settings = members.experiment(count, **changes)
    fed = members.federated(
        orgs, changes=changes, synchronous=True, deadline_seconds=60.0, **options
    )
    return settings, wired(fed, orgs, folder, simulate=load(settings))


def wired(fed, orgs, folder, data=None, **options):
    """Return one node per organisation on a common wire, with their `data` or other options."""
    wire = Wire()
    return [
        Node(
            fed,
            identity,
            *([data(j)] if data else []),
            out=folder / f"out-{j}",
            connect=joining(wire, j),
            **{**QUIET, **options},
        )
        for j, identity in enumerate(orgs)
    ]


def joining(wire, j):
    return lambda federation, identity: wire.agent(j)


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param({}, id="Algorithm 2"),
        pytest.param({**JUDGED, "guards": ALL_GUARDS}, id="all guards", marks=pytest.mark.slow),
    ],
)
def test_processes_over_tls_reproduce_the_simulation(algorithm, tmp_path):
    """Six agents in two clusters, two of them attackers that flip labels and collude."""
    changes = {**CHANGES, **({"algorithm": algorithm} if algorithm else {})}
    with nodes(tmp_path, 6, changes=changes, synchronous=True, deadline_seconds=60.0) as peers:
        peers.start()
        assert peers.wait() == [0] * 6, [peers.log(j) for j in range(6)]
        models, pairs = simulation_of(tmp_path / "simulation", peers.simulate)
        for j in range(6):
            assert [(line["refused"], line["late"]) for line in peers.lines(j)] == [({}, [])] * 5
            assert_same(peers.model(j), models[j])
            simulated_peers = (
                pairs[(pairs["agent"] == j) & (pairs["peer"] != j)]
                .groupby("round")["peer"]
                .apply(list)
            )
            for line in peers.lines(j):
                assert sorted(entry["id"] for entry in line["received"]) == sorted(
                    simulated_peers[line["round"]]
                )


ALGORITHMS = {
    "FedCBO": {"name": "fedcbo"},
    "released": {
        "name": "fedcb2o",
        "alpha": 2.0,
        "own_model": "trusted",
        "own_candidate": True,
        "first_contact": "whole",
        "own_likelihood": "every_round",
        "mixing_factor": 1.0,
    },
    "T_G": {"name": "fedcb2o", "criterion_from_round": 2, "mixing_factor": 1.0},
    "everyone": {"name": "fedcb2o", "selection": "everyone", "own_model": "judged", "beta": 0.4},
    "columns": {"name": "by_rule", "rule": "trimmed_mean"},
    "memory": {"name": "by_rule", "rule": "foolsgold"},
    "before": {"name": "by_rule", "rule": "norm_clipping"},
    "all guards": {**JUDGED, "guards": ALL_GUARDS},
    **{name: {**JUDGED, "guards": guard} for name, guard in GUARDS.items()},
    "ring": {},
}
SLOW = ("FedCBO", "released", "T_G", "everyone", "before", *GUARDS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in ALGORITHMS]
)
def test_every_kind_of_algorithm_reproduces_the_simulation(name, tmp_path):
    changes = {**CHANGES, "rounds": 3, "algorithm": ALGORITHMS[name]}
    if name == "ring":
        graph = {"budget": 2, "graph": {"name": "ring"}}
        changes = {**CHANGES, "rounds": 3, "agents": {**CHANGES["agents"], **graph}}
    settings, peers = in_memory(tmp_path, 6, changes)
    run_all(peers)
    models, _ = simulation_of(tmp_path / "simulation", settings)
    for j in range(6):
        assert_same(model_of(tmp_path / f"out-{j}"), models[j])


BACKDOOR = {"name": "backdoor", "target": 7, "share": 0.8}
EXCHANGE = {"name": "fedassay", "guards": {"trigger_exchange": 2}}


def sizes_of_triggers(monkeypatch):
    """Return a list that gets the number of bytes of each signed message of triggers."""
    sizes = []
    sign = publisher.sign_triggers

    def count(triggers, *others):
        sizes.append(len(triggers))
        return sign(triggers, *others)

    monkeypatch.setattr(publisher, "sign_triggers", count)
    return sizes


@pytest.mark.parametrize("name", ["backdoor", pytest.param("sign_flip", marks=pytest.mark.slow)])
def test_peers_that_exchange_triggers_reproduce_the_simulation(name, tmp_path, monkeypatch):
    # Models of few samples are moved by less.
    monkeypatch.setattr(trigger_exchange, "_LEAST_RATE", 0.0)
    monkeypatch.setattr(trigger_exchange, "_ERRORS", 0.0)
    sizes = sizes_of_triggers(monkeypatch)
    attack = BACKDOOR if name == "backdoor" else {"name": name}
    changes = {**CHANGES, "attack": attack, "algorithm": EXCHANGE}
    settings, peers = in_memory(tmp_path, 6, changes)
    run_all(peers)
    assert sizes
    assert set(sizes) <= {18, 36}
    models, _ = simulation_of(tmp_path / "simulation", settings)
    for j in range(6):
        assert_same(model_of(tmp_path / f"out-{j}"), models[j])


@pytest.mark.parametrize("signs", [True, False])
def test_false_triggers_change_no_bit_and_forged_ones_are_refused(signs, tmp_path):
    """One of three processes accuses everybody."""
    changes = {"rounds": 4, "agents": {"benign_samples": 40}, "algorithm": EXCHANGE}
    with nodes(tmp_path, 3, changes=changes, synchronous=True, deadline_seconds=60.0) as peers:
        peers.start(0, 1)
        peers.start(2, prepare=partial(faults.accuse, signs=signs))
        assert peers.wait() == [0] * 3, [peers.log(j) for j in range(3)]
        refused = [peers.lines(j)[n]["refused"] for j in range(2) for n in range(4)]
        if not signs:
            assert refused == [{"2": "triggers"}] * 8
            return
        assert refused == [{}] * 8
        models, _ = simulation_of(tmp_path / "simulation", peers.simulate)
        for j in range(3):
            assert_same(peers.model(j), models[j])


def test_private_training_refuses_the_exchange_of_triggers(tmp_path):
    changes = {"algorithm": EXCHANGE, "training": {"privacy": {"epsilon": 3.0}}}
    with pytest.raises(ConfigError, match=r"epsilon of `training\.privacy` does not hold"):
        in_memory(tmp_path / "private", 3, changes)


@pytest.mark.parametrize("buffers", [pytest.param("shared", marks=pytest.mark.slow), "local"])
def test_statistics_of_normalisation_layers_reproduce_the_simulation(buffers, tmp_path):
    path = "tests.networks:with_norms"
    changes = {
        **CHANGES,
        "rounds": 2,
        "model": {"name": path, "buffers": buffers},
        "training": {"batch_size": 7},
    }
    changes["layout"] = "contiguous"
    settings, peers = in_memory(tmp_path, 6, changes)
    run_all(peers)
    models, _ = simulation_of(tmp_path / "simulation", settings)
    simulated = fedcb2o.Run(tmp_path / "simulation")
    for j in range(6):
        assert_same(model_of(tmp_path / f"out-{j}"), models[j])
        network, expected = (
            agent.load_model(tmp_path / f"out-{j}", allowed_functions=[path]),
            simulated.model(j),
        )
        assert network.state_dict().keys() == expected.state_dict().keys()
        for name, tensor in expected.state_dict().items():
            assert tensor.equal(network.state_dict()[name]) or name.endswith(
                "num_batches_tracked"
            ), name


@pytest.mark.parametrize("encoding", ["float32", "top_k", "triggers"])
def test_a_resumed_node_reproduces_the_simulation(encoding, tmp_path, monkeypatch):
    """A node stops after some rounds and resumes, while the others wait for it."""
    changes = {"agents": {"encoding": encoding}}
    if encoding == "triggers":
        # So that the node that stops has some.
        excesses = lambda context, rate, reference: (rate[:-1] - rate[-1:]).clamp(min=0)  # noqa: E731
        monkeypatch.setattr(trigger_exchange, "excesses", excesses)
        changes = {"attack": BACKDOOR, "algorithm": EXCHANGE}
    settings, peers = in_memory(tmp_path, 3, {"rounds": 4, **changes})
    others = threading.Thread(target=run_all, args=[peers[1:]], daemon=True)
    others.start()
    first = peers[0].rounds()
    stop = 3 if encoding == "triggers" else 2
    assert [next(first)["round"] for _ in range(stop)] == [1, 2, 3][:stop]
    for j in (1, 2):  # wait until the others have its last model
        while len(lines_of(tmp_path / f"out-{j}")) < stop:
            time.sleep(0.01)
    first.close()
    with pytest.raises(RunError, match="--resume goes on with it"):
        peers[0].run()
    peers[0].resume = True
    sizes = sizes_of_triggers(monkeypatch)
    peers[0].run()
    others.join(240)
    # It publishes the triggers of its last round.
    assert bool(sizes) == (encoding == "triggers")
    models, _ = simulation_of(tmp_path / "simulation", settings)
    assert [line["round"] for line in lines_of(tmp_path / "out-0")] == [1, 2, 3, 4]
    for j in range(3):
        assert_same(model_of(tmp_path / f"out-{j}"), models[j])
    assert not list(tmp_path.glob("out-*/proofs/*"))


def lines_of(out: Path):
    return [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("attack", ["label_flip", "sign_flip"])
def test_peers_with_top_k_differences_reproduce_the_simulation(attack, tmp_path):
    """Agents ask two of five peers, so that most of them follow differences of several rounds."""
    section = (
        {"name": attack, "source": 9, "target": 4} if attack == "label_flip" else {"name": attack}
    )
    changes = {
        **CHANGES,
        "rounds": 6,
        "attack": section,
        "agents": {**CHANGES["agents"], "budget": 2, "encoding": "top_k"},
    }
    settings, peers = in_memory(tmp_path, 6, changes)
    assert peers[0].federation.encoding == "top_k"
    run_all(peers)
    models, _ = simulation_of(tmp_path / "simulation", settings)
    for j in range(6):
        lines = lines_of(tmp_path / f"out-{j}")
        assert [line["refused"] for line in lines] == [{}] * 6
        assert_same(model_of(tmp_path / f"out-{j}"), models[j])


FOUR = {
    "rounds": 4,
    "agents": {"benign": 3, "malicious": 0},
    "model": {"name": "mlp", "hidden": [32]},
    "training": {"gamma": 0.05, "local_epochs": 3},
}
TERMS = {"most_samples": 500, "deadline_seconds": 20.0, "encoding": "int8"}


@pytest.fixture
def federation_of_three(tmp_path):
    """Three organisations that each train on a third of the digits, at most one round per 0.5 s."""
    orgs = members.identities(tmp_path, 3)
    return orgs, members.federated(orgs, changes=FOUR, round_seconds=0.5, **TERMS)


@pytest.fixture
def fast_federation(tmp_path):
    """Three organisations as in `federation_of_three`, without a minimum duration of rounds."""
    orgs = members.identities(tmp_path, 3)
    return orgs, members.federated(orgs, changes=FOUR, **TERMS)


def test_organisations_with_their_own_data_learn_from_each_other(federation_of_three, tmp_path):
    """Run three nodes with asyncio and int8 models; each final model can be loaded."""
    orgs, fed = federation_of_three
    nodes = wired(fed, orgs, tmp_path, members.share)

    async def train_all():
        return await asyncio.gather(*(node.train() for node in nodes))

    folders = asyncio.run(train_all())
    assert folders == [tmp_path / f"out-{j}" for j in range(3)]
    test = digits().test
    for j, folder in enumerate(folders):
        lines = lines_of(folder)
        network = agent.load_model(folder)
        with torch.no_grad():
            predicted = network(
                test.x.float() / 255 if test.x.dtype == torch.uint8 else test.x.float()
            ).argmax(1)
        accuracy = float((predicted == test.y).float().mean())
        assert accuracy == pytest.approx(lines[-1]["accuracy"], abs=1e-6)
        assert accuracy > 0.7, j
        assert sum(len(line["received"]) for line in lines) >= 4
        assert all(each["bytes"] < 4 * 2410 / 2 for line in lines for each in line["received"])


def test_a_cancelled_task_ends_the_node(federation_of_three, tmp_path):
    orgs, fed = federation_of_three
    node = Node(
        fed,
        orgs[0],
        members.share(0),
        out=tmp_path / "out",
        connect=joining(Wire(), 0),
        gather=3600.0,
    )

    async def cancel_training():
        task = asyncio.create_task(node.train())
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_training())
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_data_of_another_shape_or_with_other_classes_are_refused(federation_of_three, tmp_path):
    orgs, fed = federation_of_three
    whole = members.share(0)
    wide = fedcb2o.Dataset(
        whole.pool, fedcb2o.Shard(torch.zeros(3, 1, 9, 9), whole.test.y[:3]), whole.class_names
    )
    for data, message in (
        (
            wide,
            r"samples of shape \(1, 9, 9\) in their test, and the federation agreed on \(1, 8, 8\)",
        ),
        (
            dataclasses.replace(whole, class_names=whole.class_names[::-1]),
            "the classes 9, 8, 7, 6, 5 and 5 more",
        ),
        (
            dataclasses.replace(whole, class_names=(*whole.class_names, "x")),
            "have 11 classes, .* and the federation 10",
        ),
    ):
        with pytest.raises(DataError, match=message):
            agent.agent_from_dataset(fed, 0, data)
    with pytest.raises(ConfigError, match="not both"):
        Node(fed, orgs[0], out=tmp_path / "out")


def test_a_simulation_that_differs_from_the_federation_is_refused(federation_of_three):
    _, fed = federation_of_three
    other = load(
        members.experiment(3, agents={"benign": 3, "malicious": 0}, algorithm={"name": "fedcbo"})
    )
    with pytest.raises(
        ConfigError, match=r"differs from the federation in .*experiment\.algorithm\.name"
    ):
        agent.simulated_agent(fed, 0, other)
    with pytest.raises(ConfigError, match="has 4 agents, and the federation 3 members"):
        agent.simulated_agent(fed, 0, load(members.experiment(4)))


def test_a_run_folder_belongs_to_one_agent_and_federation(federation_of_three, tmp_path):
    orgs, fed = federation_of_three
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(RunError, match="is not empty and holds no peer's run"):
        isolated_node(fed, orgs[0], members.share(0), tmp_path / "full").run()
    (tmp_path / "mine").mkdir()
    federation.write_federation(fed, tmp_path / "mine" / "federation.toml")
    with pytest.raises(RunError, match="mine is not the folder of a peer's run"):
        isolated_node(fed, orgs[0], members.share(0), tmp_path / "mine").run()
    federation.write_federation(fed, tmp_path / "federation.toml")
    files = tmp_path / "federation.toml", orgs[0].folder
    isolated_node(*files, members.share(0), tmp_path / "out").run()
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700
    federation.write_federation(
        federation.amend_federation(fed, remove=["org-2"]), tmp_path / "2.toml"
    )
    for identity in orgs[:2]:
        second = federation.sign_federation(tmp_path / "2.toml", identity)
    isolated_node(second, orgs[0], members.share(0), tmp_path / "out", resume=True).run()
    info = PeerRecords.read(tmp_path / "out").info
    assert [info.name_of(j) for j in range(3)] == ["org-0", "org-1", "org-2 (removed)"]
    with pytest.raises(
        RunError, match="went on with version 2 of the federation, and the one given is version 1"
    ):
        isolated_node(fed, orgs[0], members.share(0), tmp_path / "out", resume=True).run()
    with pytest.raises(RunError, match="of another federation or agent"):
        isolated_node(fed, orgs[1], members.share(1), tmp_path / "out", resume=True).run()


class Notes(NullObserver):
    """Observer that records the messages for the operator."""

    def __init__(self):
        self.notes = []

    def on_note(self, text):
        self.notes.append(text)


def isolated_node(fed, identity, data, out, wire=None, **options):
    """Return a node that does not wait for other members."""
    connect = joining(wire or Wire(), 0)
    return Node(fed, identity, data, out=out, connect=connect, gather=0.0, linger=0.0, **options)


def test_a_node_that_trains_alone_names_unreachable_members_once(
    fast_federation, tmp_path, monkeypatch
):
    orgs, fed = fast_federation
    monkeypatch.setattr(engine, "_ROUNDS_ALONE", 2)
    message = (
        "this agent has trained alone for 2 rounds: org-1 is not reachable, org-2 is not reachable"
    )
    for seconds, expected in ((60.0, []), (0.0, [message])):
        monkeypatch.setattr(engine, "_SECONDS_ALONE", seconds)
        notes = Notes()
        out = tmp_path / f"out-{seconds}"
        node = isolated_node(fed, orgs[0], members.share(0), out, observer=notes)
        node.run()
        (orgs[0].folder / "runs.toml").unlink()  # the next node uses the same key in another folder
        messages = [note.partition(". ")[0] for note in notes.notes if "trained alone" in note]
        assert messages == expected


def test_a_node_stopped_before_its_start_trains_no_round(fast_federation, tmp_path):
    orgs, fed = fast_federation
    node = isolated_node(fed, orgs[0], members.share(0), tmp_path / "out")
    node.stop()
    node.run()
    assert not (tmp_path / "out" / "signed.jsonl").exists()
    node.run()  # a request to stop applies to one run
    assert len(lines_of(tmp_path / "out")) == 4


def test_training_uses_no_thread_of_the_asyncio_executor(fast_federation, tmp_path):
    """A node trains even if the program's own work occupies the default executor."""
    orgs, fed = fast_federation
    node, release = (
        isolated_node(fed, orgs[0], members.share(0), tmp_path / "out"),
        threading.Event(),
    )

    async def train_with_busy_executor():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        blocker = asyncio.create_task(asyncio.to_thread(release.wait, 240))
        await asyncio.sleep(0)
        try:
            await asyncio.wait_for(node.train(), 240)
        finally:
            release.set()
            await blocker

    asyncio.run(train_with_busy_executor())
    assert len(lines_of(tmp_path / "out")) == 4


def test_silent_peers_do_not_extend_a_wait(fast_federation, monkeypatch):
    _, fed = fast_federation
    clock = Clock(end=0.6)
    monkeypatch.setattr(peer_monitor, "time", clock)

    class Silent(PeerClient):
        def __init__(self):
            self.federation, self.agent_id = fed, 0

        def hello(self, peer, seconds):
            clock.sleep(min(seconds, 0.2))

    monitor = PeerMonitor(Wire().agent(0), Silent(), clock, Notes())
    monitor.wait_for_rounds(lambda: range(1, 30), 0, 0.4, 0.01)
    assert clock.now == pytest.approx(0.4)
    monitor.wait_for_rounds(lambda: range(1, 3000), 0, 60.0, 0.01)  # stopped meanwhile
    assert clock.now == pytest.approx(0.6)


def test_changed_data_or_a_damaged_checkpoint_cause_no_second_signature(fast_federation, tmp_path):
    orgs, fed = fast_federation
    out = tmp_path / "out"
    first = isolated_node(fed, orgs[0], members.share(0), out).rounds()
    assert [next(first)["round"], next(first)["round"]] == [1, 2]
    first.close()
    before = (out / "signed.jsonl").read_text()
    with pytest.raises(
        RunError, match=r"the data differ from those when .* never choose another --out"
    ):
        isolated_node(fed, orgs[0], members.share(1), out, resume=True).run()
    path = out / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        RunError, match="or remove this file alone: --resume then begins again with round 1"
    ):
        isolated_node(fed, orgs[0], members.share(0), out, resume=True).run()
    path.unlink()
    notes = Notes()
    isolated_node(fed, orgs[0], members.share(1), out, resume=True, observer=notes).run()
    assert [line["round"] for line in lines_of(out)] == [1, 2, 3, 4]
    signed = (out / "signed.jsonl").read_text()
    assert signed.startswith(before)
    assert [json.loads(line)["round"] for line in signed.splitlines()] == [0, 1, 2, 3]
    assert sum("no model up to round 2 is offered" in note for note in notes.notes) == 1


def test_equivocation_is_reported_to_the_operator_once(fast_federation, tmp_path):
    orgs, fed = fast_federation
    notes = Notes()
    node = isolated_node(fed, orgs[0], members.share(0), tmp_path / "out", observer=notes)
    for equivocators in ({1}, {1}, {0, 1}, {0, 1}):
        node._report_equivocation(frozenset(equivocators))
    peer_note, own_note = notes.notes
    assert peer_note.startswith(
        "org-1 signed two models for one round, and is asked no more: the proof is in"
    )
    assert "was the key stolen?" in own_note


def test_an_internal_error_in_downloads_is_logged_once_and_counts_as_failed(
    fast_federation, tmp_path, caplog
):
    orgs, fed = fast_federation
    node = isolated_node(fed, orgs[0], members.share(0), tmp_path / "out")
    wire, codec = Wire().agent(0), node._build_codec()
    downloads = PeerClient(fed, orgs[0], wire, Ledger(tmp_path, fed), codec, node.agent.spec.dim)
    for _ in range(2):
        broken = Future()
        broken.set_exception(KeyError("ours"))
        download = _ModelDownload(downloads, 1, 0.0, 0, torch.empty(0))
        download.future = broken
        assert download.result() == FAILED
    (record,) = caplog.records
    assert "KeyError" in record.exc_text


def test_a_node_restarts_from_the_initial_model_after_divergence(tmp_path):
    """A received model with zero outputs gets a large weight.

    Training from the average diverges.
    """
    orgs = members.identities(tmp_path, 3)
    changes = {**FOUR, "model": {"name": "mlp", "hidden": [32] * 4}}
    fed = members.federated(orgs, changes=changes, most_samples=500, deadline_seconds=5.0)
    *hidden, weight, bias = agent.build_network(fed).parameters()
    malicious_model = torch.cat(
        [torch.full((parameter.numel(),), 1e6) for parameter in hidden]
        + [torch.zeros(len(weight) * 32 + len(bias))]
    )
    wire = Wire()
    ledger, transport = Ledger(tmp_path / "liar", fed), wire.agent(1)
    server = Server(fed, 1, orgs[1], ledger, hello_content=dict)
    transport.serve(server.on_request)
    (tmp_path / "liar").mkdir()
    ModelPublisher(
        fed,
        orgs[1],
        RawCodec(len(malicious_model)),
        SigningJournal(tmp_path / "liar"),
        server,
        print,
    ).publish(3, malicious_model, 500)
    notes = Notes()
    isolated_node(fed, orgs[0], members.share(0), tmp_path / "out", wire, observer=notes).run()
    lines = lines_of(tmp_path / "out")
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    assert lines[0]["received"][0]["weight"] > 0.1
    assert (
        "training diverged in round 2: it begins again with the initial model; are the data "
        in "\n".join(notes.notes)
    )


def test_peers_with_different_federations_report_it_and_exchange_no_models(tmp_path):
    """One node has a federation of three rounds, the other node one of six."""
    orgs = members.identities(tmp_path, 2)
    wire, observers, peers = Wire(), [Notes(), Notes()], []
    for j, rounds in enumerate((3, 6)):
        changes = {"rounds": rounds, "agents": {"benign": 2, "malicious": 0, "budget": 1}}
        fed = members.federated(orgs, changes=changes, most_samples=500, deadline_seconds=20.0)
        node = Node(
            fed,
            orgs[j],
            members.share(j),
            out=tmp_path / f"out-{j}",
            connect=joining(wire, j),
            observer=observers[j],
            **QUIET,
        )
        peers.append(node)
    run_all(peers)
    for j in range(2):
        (note,) = [note for note in observers[j].notes if "differing" in note]
        text = "it holds another federation, differing in rounds: send one file to all"
        assert note == f"org-{1 - j}: {text}"
        assert not any(line["received"] for line in lines_of(tmp_path / f"out-{j}"))


def test_an_identity_signs_for_a_run_in_one_folder_only(fast_federation, tmp_path):
    """A second folder is refused, also with --resume. A moved folder is accepted."""
    orgs, fed = fast_federation
    first = isolated_node(fed, orgs[0], members.share(0), tmp_path / "out").rounds()
    assert next(first)["round"] == 1
    first.close()
    for resume in (False, True):
        with pytest.raises(
            RunError,
            match=r"org-0 already signs for this run in \S+/out: give that --out and --resume",
        ):
            isolated_node(fed, orgs[0], members.share(0), tmp_path / "uot", resume=resume).run()
    (tmp_path / "out").rename(tmp_path / "moved")
    isolated_node(fed, orgs[0], members.share(0), tmp_path / "moved", resume=True).run()
    assert [line["round"] for line in lines_of(tmp_path / "moved")] == list(
        range(1, fed.rounds + 1)
    )

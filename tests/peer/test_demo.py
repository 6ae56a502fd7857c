"""Demo: its tables, its Byzantine peer, and the end of its processes."""

import hashlib
import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from tests.peer import members
from tests.peer.folders import line, write_node
from tests.processes import living, needs_proc
from tests.tiny import run_cli

from fedcb2o.data import breast_cancer
from fedcb2o.errors import RunError
from fedcb2o.experiments.config.loading import load
from fedcb2o.peer import Identity, make_federation
from fedcb2o.peer.membership import federation
from fedcb2o.peer.node import demo
from fedcb2o.peer.node.byzantine_peer import EQUIVOCATION_START, FAULTS, ByzantinePeer
from fedcb2o.peer.wire import protocol
from fedcb2o.peer.wire.client import number_fault
from fedcb2o.peer.wire.compression import RawCodec
from fedcb2o.peer.wire.protocol import AnswerStatus, Request, RequestKind

DIM = 300_000  # two chunks
ME, ATTACKER = 0, 1


@pytest.fixture(scope="module")
def parties(tmp_path_factory):
    """Return a federation of two and both identities; the second one is Byzantine."""
    folder = tmp_path_factory.mktemp("parties")
    identities = [
        Identity.make(folder / name, name=name, endpoint=f"127.0.0.1:{port}")
        for name, port in (("hospital-a", 7001), ("hospital-b", 7002))
    ]
    changes = {
        "agents.num_clusters": 1,
        "agents.benign": 2,
        "agents.malicious": 0,
        "agents.budget": 1,
        "rounds": 40,
    }
    experiment = load("digits-fedassay", changes)
    return make_federation(
        experiment, [identity.member for identity in identities], dataset=breast_cancer()
    ), identities


def request_body(attacker, kind, **keys):
    """Return the body of the answer to a request."""
    nonce = secrets.token_bytes(16)
    request = Request(
        kind=kind, run=attacker.federation.run, sender=ME, receiver=ATTACKER, nonce=nonce, **keys
    )
    answer = attacker.answer(request)
    assert answer.status is AnswerStatus.OK
    return answer.body


def refusal_reason(attacker, n):
    """Return why a receiver refuses the attacker's model of round n."""
    body = request_body(attacker, RequestKind.MANIFEST, round=n)
    try:
        signed, *_ = protocol.decode_offer(body)
    except protocol.MalformedError as error:
        return error.reason
    codec = RawCodec(DIM)
    checks = {
        "federation": attacker.federation,
        "peer": ATTACKER,
        "n": n,
        "min_round": 0,
        "dim": DIM,
        "max_bytes": codec.max_bytes,
    }
    reason, manifest = protocol.validate_manifest(signed, **checks)
    if manifest is None:
        return reason
    chunks = [
        bytes(
            request_body(
                attacker,
                RequestKind.MODEL,
                digest=manifest.digest,
                first=k << 20,
                last=((k + 1) << 20) - 1,
            )
        )
        for k in range(len(manifest.chunks))
    ]
    if [hashlib.sha256(chunk).digest() for chunk in chunks] != list(manifest.chunks):
        return "hash"
    row = torch.zeros(DIM)
    return codec.decode_(b"".join(chunks), row) or number_fault(row)


def test_each_kind_of_invalid_answer_is_refused_for_its_own_reason(parties):
    agreement, (_, identity) = parties
    attacker = ByzantinePeer(agreement, identity, DIM)
    reasons = {kind: refusal_reason(attacker, n) for n, kind in enumerate(FAULTS)}
    assert reasons == {
        "random bytes": "malformed",
        "NaN": "not finite",
        "unsigned": "signature",
        "another size": "size",
        "1e38": "bound",
        "other chunks": "hash",
        "another run": "run",
        "another agent's": "signature",
    }


def test_the_byzantine_peer_equivocates_in_the_last_rounds(parties):
    agreement, (_, identity) = parties
    attacker, n = ByzantinePeer(agreement, identity, 10), int(EQUIVOCATION_START * agreement.rounds)
    nonce = bytes(16)
    offers = [
        attacker.answer(
            Request(
                kind=RequestKind.MANIFEST,
                run=agreement.run,
                sender=peer,
                receiver=ATTACKER,
                nonce=nonce,
                round=n,
            )
        )
        for peer in (0, 5)
    ]
    signed = [protocol.decode_offer(data.body)[0] for data in offers]
    manifests = [protocol.verify_member_manifest(data, agreement)[1] for data in signed]
    assert manifests[0].round == manifests[1].round == n
    assert manifests[0].digest != manifests[1].digest


def test_result_tables_match_the_run_directories(tmp_path):
    kinds = [demo.BENIGN, demo.BENIGN, demo.FLIPPER, demo.GARBAGE]
    agents = [
        demo.DemoAgent(name, kind, tmp_path / "keys", tmp_path / name, tmp_path / "log")
        for name, kind in zip("abcd", kinds, strict=True)
    ]
    scores = {"source_accuracy": 0.9, "attack_success_rate": 0.05}
    first = [line(n, (2, 0.1, 100, 0.5)) for n in range(1, 5)]
    write_node(tmp_path / "a", [*first, line(5, (1, 0.1, 100, 0.4), (2, 0.1, 100, 0.1), **scores)])
    write_node(
        tmp_path / "b",
        [line(n, (0, 0.1, 9, 0.25), refused={"3": "size"}) for n in range(1, 6)],
        id=1,
    )
    write_node(tmp_path / "c", [line(1, (0, 0.1, 9, 1.0), refused={"0": "hash"})], id=2)
    (tmp_path / "b" / "proofs").mkdir()
    (tmp_path / "b" / "proofs" / "d-3.proof.toml").write_text('name = "d"')
    results, refused = demo.result_tables(agents).values()
    assert results["proofs"].tolist() == ["0", "0", "0", "1"]
    assert results.loc["a"].tolist() == [demo.BENIGN, "5", "90.0%", "90.0%", "5.0%", "25.0%", "0"]
    assert results["weight"].tolist() == ["25.0%", "40.0%", "5.0%", "0.0%"]
    assert results.loc["d", ["rounds", "accuracy"]].tolist() == ["–", "–"]
    assert refused.to_dict("index") == {"d": {"size": "5"}}  # refusals by attackers are not shown


def replace_nodes(monkeypatch, text):
    """Replace the command of every node by a script."""
    monkeypatch.setattr(demo, "RUN_COMMAND", (sys.executable, "-c", textwrap.dedent(text)))


def record_processes(monkeypatch):
    """Return a list that collects the processes of a demo."""
    processes, start = [], demo._start_agent
    monkeypatch.setattr(
        demo, "_start_agent", lambda *a: processes.append(start(*a)) or processes[-1]
    )
    return processes


def test_all_nodes_are_stopped_after_one_fails(tmp_path, monkeypatch):
    processes = record_processes(monkeypatch)
    replace_nodes(
        monkeypatch,
        """
        import signal, sys, time
        if sys.argv[sys.argv.index("--out") + 1].endswith("hospital-c"):
            sys.exit("Error: no such thing: do another")
        if sys.argv[sys.argv.index("--out") + 1].endswith("hospital-d"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(100)
        """,
    )
    monkeypatch.setattr(demo, "STOP_SECONDS", 1.0)
    with pytest.raises(
        RunError, match="hospital-c failed with status 1: Error: no such thing: do another"
    ):
        demo.run_demo(tmp_path / "demo", rounds=2)
    assert len(processes) == 8
    assert all(process.returncode is not None for process in processes)


def test_nodes_find_modules_beside_the_experiment(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    run_cli("new", tmp_path / "lab", "--template", "peers")
    (tmp_path / "lab" / "mine.py").rename(tmp_path / "lab" / "beside_demo.py")
    file = tmp_path / "lab" / "mine.toml"
    file.write_text(file.read_text().replace("mine:data", "beside_demo:data"))
    replace_nodes(monkeypatch, "import beside_demo; raise SystemExit('found it')")
    with pytest.raises(RunError, match="status 1: found it"):
        demo.run_demo(tmp_path / "demo", experiment=file)


def test_a_folder_that_is_not_empty_is_refused_unchanged(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(RunError, match="is not empty"):
        demo.run_demo(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.slow
@needs_proc
def test_a_signal_ends_all_processes(tmp_path):
    script = f"""
        import sys
        from fedcb2o.cli.signals import SignalGuard
        from pathlib import Path
        from fedcb2o.peer.node import demo

        guard = SignalGuard()
        demo.RUN_COMMAND = (sys.executable, "-c", "import time; time.sleep(100)")
        demo.run_demo(Path({str(tmp_path / "demo")!r}), rounds=2)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stderr=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 60
        logs = tmp_path / "demo" / "logs"
        while len(log_files := list(logs.glob("*.log"))) < 8 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(log_files) == 8
        time.sleep(0.3)
        children = [int(number) for number in _children(process.pid)]
        process.send_signal(signal.SIGTERM)
        _, error_output = process.communicate(timeout=30)
    finally:
        process.kill()
    assert b"KeyboardInterrupt" in error_output
    assert len(children) == 8
    assert [living(os.getsid(child)) for child in children if _is_running(child)] == []


def _children(parent):
    with open(f"/proc/{parent}/task/{parent}/children") as file:  # noqa: PTH123 (a process, not a file)
        return file.read().split()


def _is_running(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_the_whole_demo(tmp_path):
    results, refusals = demo.run_demo(tmp_path / "demo", rounds=30).values()
    kinds = results.groupby("kind").size().to_dict()
    assert kinds == {demo.BENIGN: 5, demo.FLIPPER: 2, demo.GARBAGE: 1}
    percent = results.replace("–", "nan%").map(
        lambda cell: float(cell.removesuffix("%")) if "%" in cell else cell
    )
    benign = percent[percent.kind == demo.BENIGN]
    assert (benign.rounds == "30").all()
    assert benign.accuracy.mean() > 85
    assert benign["attack success"].mean() < 25
    assert percent[percent.kind != demo.BENIGN]["weight"].max() < 5
    garbage = refusals.loc[percent.index[percent.kind == demo.GARBAGE][0]].astype(int)
    assert {"signature", "size", "not finite", "bound", "hash", "run"} <= set(
        garbage[garbage > 0].index
    )
    assert list((tmp_path / "demo").glob("hospital-*/proofs/*.proof.toml"))


def test_another_experiment_has_one_organisation_per_agent(tmp_path):
    team = {"agents.num_clusters": 1, "agents.benign": 2, "agents.malicious": 1, "agents.budget": 2}
    experiment = load("digits-fedassay", team)
    agents, file = demo._prepare_demo(tmp_path, experiment, sends_garbage=False)
    assert [agent.name for agent in agents] == ["hospital-a", "hospital-b", "hospital-c"]
    assert [agent.kind for agent in agents] == [demo.BENIGN, demo.BENIGN, demo.ATTACKER]
    assert federation.read_federation(file).deadline_seconds == 60
    with pytest.raises(RunError, match="at most 26"):
        demo.run_demo(tmp_path / "many", experiment="emnist-fedassay")


@pytest.mark.parametrize("kind", [demo.BENIGN, demo.GARBAGE])
def test_agents_get_permission_for_the_names_of_the_experiment(tmp_path, monkeypatch, kind):
    name = "tests.peer.members:own_criterion"
    algorithm = {"name": "fedcb2o", "criterion": {"name": name}, "alpha": 2.0}
    path = tmp_path / "federation.toml"
    orgs = members.identities(tmp_path, 2)
    members.federated(orgs, changes={"algorithm": algorithm}, path=path)
    commands = []
    monkeypatch.setattr(demo.subprocess, "Popen", lambda words, **_: commands.append(words))
    agent = demo.DemoAgent("org-0", kind, orgs[0].folder, tmp_path / "out", tmp_path / "log")
    demo._start_agent(agent, path, tmp_path)
    assert (name if kind == demo.GARBAGE else f"--own={name}") in commands[0]

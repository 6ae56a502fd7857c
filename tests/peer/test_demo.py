"""Demo: its tables, its Byzantine peer, and no process left at the end."""

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
from tests.peer.folders import line, write_node
from tests.processes import living, needs_proc

from fedcb2o.data import breast_cancer
from fedcb2o.errors import RunError
from fedcb2o.experiments.config.loading import load
from fedcb2o.peer.membership import Identity, federation
from fedcb2o.peer.node import _demo
from fedcb2o.peer.node._byzantine_peer import EQUIVOCATION_START, FAULTS, ByzantinePeer
from fedcb2o.peer.wire import (
    AnswerStatus,
    RawCodec,
    Request,
    RequestKind,
    _protocol,
    rejection_reason,
)

DIM = 300_000  # two chunks
ME, LIAR = 0, 1


@pytest.fixture(scope="module")
def parties(tmp_path_factory):
    """A federation of two, and the identities of both; the second lies."""
    folder = tmp_path_factory.mktemp("parties")
    both = [
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
    return federation.make_federation(
        experiment, [each.member for each in both], dataset=breast_cancer()
    ), both


def asked(liar, kind, **keys):
    """Return the status and body of an answer, or None for an invalid one."""
    nonce = secrets.token_bytes(16)
    request = Request(
        kind=kind, run=liar.federation.run, sender=ME, receiver=LIAR, nonce=nonce, **keys
    )
    try:
        answer = _protocol.decode_answer(liar.answer(request))
    except _protocol.MalformedError:
        return None
    assert answer.nonce == nonce
    assert answer.status is AnswerStatus.OK
    return answer.body


def refused(liar, n):
    """Why what the liar offers in a round is not taken, by all that a receiver checks."""
    body = asked(liar, RequestKind.MANIFEST, round=n)
    if body is None:
        return "no answer"
    signed, _ = _protocol.decode_offer(body)
    coding = RawCodec(DIM)
    told = {
        "federation": liar.federation,
        "peer": LIAR,
        "n": n,
        "min_round": 0,
        "dim": DIM,
        "max_bytes": coding.max_bytes,
    }
    reason, manifest = _protocol.validate_manifest(signed, **told)
    if manifest is None:
        return reason
    chunks = [
        bytes(asked(liar, RequestKind.CHUNK, index=k, digest=manifest.digest))
        for k in range(len(manifest.chunks))
    ]
    if [hashlib.sha256(chunk).digest() for chunk in chunks] != list(manifest.chunks):
        return "hash"
    row = torch.zeros(DIM)
    return coding.decode_(b"".join(chunks), row) or rejection_reason(row)


def test_each_kind_of_garbage_is_refused_for_its_own_reason(parties):
    agreed, (_, lies) = parties
    liar = ByzantinePeer(agreed, lies, DIM)
    found = {kind: refused(liar, n) for n, kind in enumerate(FAULTS)}
    assert found == {
        "random bytes": "no answer",
        "NaN": "not finite",
        "unsigned": "signature",
        "another size": "size",
        "1e38": "bound",
        "other chunks": "hash",
        "another run": "run",
        "another agent's": "signature",
    }


def test_the_garbage_sender_equivocates_in_the_end(parties):
    agreed, (_, lies) = parties
    liar, n = ByzantinePeer(agreed, lies, 10), int(EQUIVOCATION_START * agreed.rounds)
    nonce = bytes(16)
    offers = [
        liar.answer(
            Request(
                kind=RequestKind.MANIFEST,
                run=agreed.run,
                sender=who,
                receiver=LIAR,
                nonce=nonce,
                round=n,
            )
        )
        for who in (0, 5)
    ]
    signed = [_protocol.decode_offer(_protocol.decode_answer(each).body)[0] for each in offers]
    found = [_protocol.verify_member_manifest(each, agreed)[1] for each in signed]
    assert found[0].round == found[1].round == n
    assert found[0].digest != found[1].digest


def test_the_tables_say_what_the_folders_hold(tmp_path):
    kinds = [_demo.BENIGN, _demo.BENIGN, _demo.FLIPPER, _demo.GARBAGE]
    agents = [
        _demo.DemoAgent(name, kind, tmp_path / "keys", tmp_path / name, tmp_path / "log")
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
    results, refused = _demo.result_tables(agents).values()
    assert results["proofs"].tolist() == ["0", "0", "0", "1"]
    assert results.loc["a"].tolist() == [_demo.BENIGN, "5", "90.0%", "90.0%", "5.0%", "25.0%", "0"]
    assert results["weight"].tolist() == ["25.0%", "40.0%", "5.0%", "0.0%"]
    assert results.loc["d", ["rounds", "accuracy"]].tolist() == ["–", "–"]
    assert refused.to_dict("index") == {"d": {"size": "5"}}  # what an attacker refuses is not told


def pretend(monkeypatch, text):
    """Let every node be a script instead."""
    monkeypatch.setattr(_demo, "RUN_COMMAND", (sys.executable, "-c", textwrap.dedent(text)))


def started(monkeypatch):
    """The processes that a demo starts, as they are."""
    found, start = [], _demo._start_agent
    monkeypatch.setattr(_demo, "_start_agent", lambda *a: found.append(start(*a)) or found[-1])
    return found


def test_where_one_fails_all_are_ended(tmp_path, monkeypatch):
    found = started(monkeypatch)
    pretend(
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
    monkeypatch.setattr(_demo, "STOP_SECONDS", 1.0)
    with pytest.raises(
        RunError, match="hospital-c failed with status 1: Error: no such thing: do another"
    ):
        _demo.run_demo(tmp_path / "demo", rounds=2)
    assert len(found) == 8
    assert all(process.returncode is not None for process in found)


def test_a_folder_that_holds_anything_is_left_alone(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(RunError, match="is not empty"):
        _demo.run_demo(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.slow
@needs_proc
def test_a_signal_leaves_no_process(tmp_path):
    script = f"""
        import sys
        from fedcb2o.cli.signals import SignalGuard
        from pathlib import Path
        from fedcb2o.peer.node import _demo as demo

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
        while len(found := list(logs.glob("*.log"))) < 8 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(found) == 8
        time.sleep(0.3)
        children = [int(each) for each in _children(process.pid)]
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert b"KeyboardInterrupt" in said
    assert len(children) == 8
    assert [living(os.getsid(child)) for child in children if _there(child)] == []


def _children(parent):
    with open(f"/proc/{parent}/task/{parent}/children") as file:  # noqa: PTH123 (a process, not a file)
        return file.read().split()


def _there(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_the_whole_demo(tmp_path):
    results, refused = _demo.run_demo(tmp_path / "demo", rounds=30).values()
    kinds = results.groupby("kind").size().to_dict()
    assert kinds == {_demo.BENIGN: 5, _demo.FLIPPER: 2, _demo.GARBAGE: 1}
    percent = results.replace("–", "nan%").map(
        lambda cell: float(cell.removesuffix("%")) if "%" in cell else cell
    )
    benign = percent[percent.kind == _demo.BENIGN]
    assert (benign.rounds == "30").all()
    assert benign.accuracy.mean() > 85
    assert benign["attack success"].mean() < 25
    assert percent[percent.kind != _demo.BENIGN]["weight"].max() < 5
    garbage = refused.loc[percent.index[percent.kind == _demo.GARBAGE][0]].astype(int)
    assert {"signature", "size", "not finite", "bound", "hash", "run"} <= set(
        garbage[garbage > 0].index
    )
    assert list((tmp_path / "demo").glob("hospital-*/proofs/*.proof.toml"))


def test_another_experiment_has_one_organisation_per_agent(tmp_path):
    team = {"agents.num_clusters": 1, "agents.benign": 2, "agents.malicious": 1, "agents.budget": 2}
    experiment = load("digits-fedassay", team)
    agents, file = _demo._prepare_demo(tmp_path, experiment, sends_garbage=False)
    assert [agent.name for agent in agents] == ["hospital-a", "hospital-b", "hospital-c"]
    assert [agent.kind for agent in agents] == [_demo.BENIGN, _demo.BENIGN, _demo.ATTACKER]
    assert federation.read_federation(file).deadline_seconds == 60
    with pytest.raises(RunError, match="at most 26"):
        _demo.run_demo(tmp_path / "many", experiment="emnist-fedassay")

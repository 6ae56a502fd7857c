"""Private training of a node: secret noise, and an epsilon that counts repeated rounds."""

import json
import threading

import pytest
import torch
from tests.peer import members
from tests.peer.nodes import back_up, restore
from tests.peer.test_node import joining, lines_of
from tests.peer.test_own_data import LINES, line
from tests.peer.wire import Wire

from fedcb2o.errors import RunError
from fedcb2o.federated.privacy import spent_epsilon
from fedcb2o.peer import make_federation
from fedcb2o.peer.node.node import Node
from fedcb2o.peer.node.observer import NullObserver
from fedcb2o.peer.node.privacy_ledger import LEDGER_FILE, PrivacyLedger
from fedcb2o.peer.report.peer_records import PeerRecords

QUIET = {"gather": 0.0, "linger": 0.0}


def isolated_node(folder, out: str, privacy, **options):
    """Return the node of one of three members, without links to the others."""
    experiment = {key: value for key, value in LINES.items() if value is not None}
    experiment["training"] = {**experiment["training"], "privacy": privacy}
    experiment = {**experiment, "rounds": 3, "algorithm": {"name": "fedassay"}}
    orgs = federation_of(folder)
    fed = make_federation(
        experiment, [org.member for org in orgs], dataset=line(0), most_samples=100
    )
    connect = joining(Wire(), 0)
    return Node(fed, orgs[0], line(0), out=folder / out, connect=connect, **QUIET, **options)


def federation_of(folder):
    if not (folder / "org-0").exists():
        return members.identities(folder, 3)
    return [members.Identity.read(folder / f"org-{j}") for j in range(3)]


def test_the_epsilon_of_a_resumed_node_counts_the_repeated_round(tmp_path):
    node = isolated_node(tmp_path, "out", {"noise": 2.0})
    rounds = node.rounds()
    first = next(rounds)
    rounds.close()
    ledger = tmp_path / "out" / LEDGER_FILE
    assert json.loads(ledger.read_text()) == {"trained": 1}
    ledger.write_text('{"trained": 2}')  # killed in round 2, after it began to train

    node = isolated_node(tmp_path, "out", {"noise": 2.0}, resume=True)
    node.run()
    training, n = node.agent.spec.training, int(node.agent.data.train.sizes[0])
    epsilons = [record["epsilon"] for record in lines_of(tmp_path / "out")]
    assert epsilons == [spent_epsilon(training, n, 3, trained) for trained in (1, 3, 4)]
    assert first["epsilon"] == epsilons[0] == PeerRecords.read(tmp_path / "out").rounds[0].epsilon


def test_training_noise_does_not_use_the_public_seed(tmp_path):
    seeds = {
        isolated_node(tmp_path, f"out-{k}", {"noise": 2.0}).agent.spec.training_seed for k in (0, 1)
    }
    assert None not in seeds
    assert len(seeds) == 2


def test_a_node_ends_when_its_privacy_budget_is_used_up(tmp_path):
    node = isolated_node(tmp_path, "out", {"epsilon": 4.0})
    rounds = node.rounds()
    next(rounds)
    rounds.close()
    (tmp_path / "out" / LEDGER_FILE).write_text('{"trained": 2}')
    with pytest.raises(RunError, match="budget of epsilon 4 is used up by 3 rounds"):
        isolated_node(tmp_path, "out", {"epsilon": 4.0}, resume=True).run()
    last = lines_of(tmp_path / "out")[-1]
    assert last["round"] == 2
    assert 3.98 < last["epsilon"] <= 4.0


def test_a_node_without_privacy_uses_the_public_seed_and_writes_no_ledger(tmp_path):
    node = isolated_node(tmp_path, "out", None)
    assert node.agent.spec.training_seed is None
    node.run()
    assert "epsilon" not in lines_of(tmp_path / "out")[-1]
    assert not (tmp_path / "out" / LEDGER_FILE).exists()
    assert torch.isfinite(torch.tensor(lines_of(tmp_path / "out")[-1]["train_loss"]))


class Recorder(NullObserver):
    """An observer that keeps the messages for the operator."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_note(self, text: str) -> None:
        self.notes.append(text)


def test_a_restored_node_counts_the_rounds_since_its_backup(tmp_path):
    """The other members have models of rounds after the backup."""
    lag = 2
    wire = Wire()
    orgs = members.identities(tmp_path, 3)
    experiment = {key: value for key, value in LINES.items() if value is not None}
    experiment["training"] = {**experiment["training"], "privacy": {"noise": 2.0}}
    experiment = {**experiment, "rounds": 400, "algorithm": {"name": "fedassay"}}
    fed = make_federation(
        experiment,
        [org.member for org in orgs],
        dataset=line(0),
        most_samples=100,
        round_seconds=0.05,
        lag=lag,
    )

    def node(j: int, out: str, identity, **options):
        path = tmp_path / out
        options = {**QUIET, "assess_every": 0, "connect": joining(wire, j), **options}
        return Node(fed, identity, line(j), out=path, **options)

    others = [node(j, f"out-{j}", orgs[j]) for j in (1, 2)]
    threads = [threading.Thread(target=other.run) for other in others]
    for thread in threads:
        thread.start()
    try:
        first = node(0, "out-0", orgs[0], gather=20.0)
        rounds = first.rounds()
        for _ in range(4):
            next(rounds)
        back_up(orgs[0].folder, tmp_path / "out-0", tmp_path / "backup.tar.gz")
        newest_published = [next(rounds)["round"] for _ in range(6)][-1]
        rounds.close()

        restore(tmp_path / "keys", tmp_path / "new", tmp_path / "backup.tar.gz")
        ledger = tmp_path / "new" / LEDGER_FILE
        assert json.loads(ledger.read_text()) == {"trained": 4}
        identity = members.Identity.read(tmp_path / "keys")
        observer = Recorder()
        second = node(0, "new", identity, gather=20.0, resume=True, observer=observer)
        rounds = second.rounds()
        records = [next(rounds) for _ in range(3)]
        rounds.close()
    finally:
        for other in others:
            other.stop()
        for thread in threads:
            thread.join()

    (note,) = (note for note in observer.notes if "newest known model" in note)
    newest = int(note.partition("org-0: round ")[2].partition(";")[0])
    assert 5 <= newest <= newest_published
    lost = newest + lag + 1 - 4
    training, n = second.agent.spec.training, int(second.agent.data.train.sizes[0])
    epsilons = [record["epsilon"] for record in records]
    assert epsilons == [spent_epsilon(training, n, 400, 4 + lost + k) for k in (1, 2, 3)]
    assert json.loads(ledger.read_text()) == {"trained": 4 + lost + 3}


def test_lost_rounds_are_counted_from_the_restored_checkpoint(tmp_path):
    """The node restarts before the other members answer."""
    agent = isolated_node(tmp_path, "out", {"noise": 2.0}).agent
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / LEDGER_FILE).write_text('{"trained": 5}')
    PrivacyLedger(folder, agent).begin_recovery(4)
    ledger = PrivacyLedger(folder, agent)
    ledger.before_training()
    ledger.begin_recovery(5)
    ledger.end_recovery(12)
    assert json.loads((folder / LEDGER_FILE).read_text()) == {"trained": 6 + 8}
    ledger.end_recovery(30)  # the recovery has already ended
    assert PrivacyLedger(folder, agent).trained == 14

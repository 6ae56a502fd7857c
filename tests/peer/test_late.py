"""Members that join late, are restored, or ask nobody: the distance from their own model."""

import json
import threading

import numpy as np
import pytest
from safetensors.torch import load_file
from tests.peer import members, pace
from tests.peer.nodes import wait_for
from tests.peer.wire import Wire

from fedcb2o.experiments.config.loading import load
from fedcb2o.peer.node import Node
from fedcb2o.peer.node._catch_up import CatchUp

FAR = "too far from the agent's own model"
LATE = 0  # the agent that begins later than the others


def record(round, *weights, **keys):
    return {"round": round, "received": [{"weight": weight} for weight in weights], **keys}


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        ([], 0),
        ([record(1, 0.5), record(2, 0.5)], 0),
        ([record(20)], 3),  # it began with round 20
        ([record(20, 0.5)], 2),
        ([record(20, 0.0, 0.0)], 3),  # no average
        ([record(20, float("nan"))], 2),  # a median has no weights
        ([record(1, 0.5), record(9, 0.5), record(10, 0.0), record(11, 0.1)], 1),
        ([record(9, 0.5), record(10, 0.5), record(11, 0.5), record(12, 0.5)], 0),
        ([record(1, 0.5, catch_up=2)], 2),  # late by less than the lag
        ([record(1, 0.5, catch_up=2), record(2, 0.5)], 1),
    ],
)
def test_rounds_left_follow_from_the_records(lines, left):
    catch_up = CatchUp()
    for each in lines:
        catch_up.add_round(each)
    assert catch_up.rounds_left == left


def test_a_model_that_was_averaged_once_is_not_late_within_the_lag():
    catch_up = CatchUp()
    catch_up.start_if_late(False)
    assert catch_up.rounds_left == 0
    catch_up.add_round(record(1, 0.0))
    catch_up.start_if_late(True)
    assert catch_up.rounds_left == 3
    catch_up.add_round(record(2, 0.5))
    catch_up.add_round(record(3, 0.5))
    catch_up.add_round(record(4, 0.5))
    catch_up.start_if_late(True)
    assert catch_up.rounds_left == 0


class Federation:
    """Nodes of a federation in this process, each in its own thread."""

    def __init__(self, folder, *, rounds, guards=None, count=4):
        self.folder = folder
        who = members.identities(folder, count)
        self.changes = {
            "rounds": rounds,
            "agents": {"benign": count - 1, "malicious": 1, "budget": count - 1},
            "training": {"gamma": 0.2, "local_epochs": 2},
            "algorithm": {"name": "fedassay", **({"guards": guards} if guards else {})},
        }
        self.simulate = members.experiment(count, **self.changes)
        self.made = members.federated(
            who, changes=self.changes, lag=2, round_seconds=0.15, deadline_seconds=5.0
        )
        self.who = who
        self.wire = Wire()
        self.threads = []

    def out(self, j):
        return self.folder / f"out-{j}"

    def node(self, j, *, gather=5.0, **options):
        return Node(
            self.made,
            self.who[j],
            simulate=load({"together": 1, **self.simulate}),
            out=self.out(j),
            connect=lambda federation, identity: self.wire.agent(j),
            observer=pace.Times(),
            gather=gather,
            linger=5.0,
            assess_every=0,
            **options,
        )

    def start(self, *nodes):
        for node in nodes:
            self.threads.append(threading.Thread(target=node.run, daemon=True))
            self.threads[-1].start()

    def join(self):
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()

    def lines(self, j):
        path = self.out(j) / "rounds.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def test_a_late_member_takes_the_models_of_others_and_so_after_a_stop(tmp_path):
    """It is stopped in the rounds in which it catches up, and goes on with those that are left."""
    # a model of round 1 is 0.6 times its norm or more from those of round 14
    federation = Federation(tmp_path, rounds=60, guards={"max_distance": 0.5})
    federation.start(*(federation.node(j) for j in (1, 2, 3)))
    wait_for(lambda: len(federation.lines(1)) >= 14, 60)

    late = federation.node(LATE)
    rounds = late.rounds()
    first = next(rounds)
    while "catch_up" not in first:
        first = next(rounds)
    late.stop()
    rounds.close()
    assert first["round"] > 8
    assert first["catch_up"] == 2
    used = [model["id"] for model in first["received"] if model["weight"] > 0]
    assert used
    assert not [model for model in first["received"] if model.get("admission") == FAR]

    late = federation.node(LATE, resume=True)
    federation.start(late)
    federation.join()
    lines = federation.lines(LATE)
    after = [line for line in lines if line["round"] > first["round"]]
    assert [line["catch_up"] for line in after if "catch_up" in line][-2:] == [1, 0]
    others = np.mean([federation.lines(j)[-1]["accuracy"] for j in (1, 2)])
    assert lines[-1]["accuracy"] > others - 0.1


@pytest.mark.slow
def test_a_member_that_asks_nobody_says_so_and_recovers_after_a_stop(tmp_path, monkeypatch):
    """A former release checked the distance in every round: all likelihoods became 0."""
    federation = Federation(tmp_path, rounds=60, guards={"max_distance": 0.5})
    federation.start(*(federation.node(j) for j in (1, 2, 3)))
    wait_for(lambda: len(federation.lines(1)) >= 14, 60)

    late = federation.node(LATE)
    with monkeypatch.context() as former:
        former.setattr(CatchUp, "start", lambda self: None)
        rounds = late.rounds()
        lines = [next(rounds) for _ in range(3)]
        late.stop()
        rounds.close()
    assert {model["admission"] for model in lines[0]["received"]} == {FAR}
    assert lines[-1]["asked"] == []
    (note,) = [note for note in late.observer.notes if "asks no member" in note]
    assert f"from round {lines[1]['round']} on" in note
    assert f"org-1, org-2, org-3 ({FAR})" in note
    likelihood = load_file(federation.out(LATE) / "checkpoint.safetensors")["likelihood"]
    assert likelihood.tolist() == [0.0, 0.0, 0.0]

    federation.start(federation.node(LATE, resume=True))
    federation.join()
    after = federation.lines(LATE)[3:]
    assert [line["catch_up"] for line in after if "catch_up" in line][-1] == 0
    assert all(line["asked"] for line in after[:5])
    assert sum(model["weight"] for model in after[0]["received"]) > 0

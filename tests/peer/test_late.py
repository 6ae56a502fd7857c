"""Catch-up of late and restored members: rounds without the check of the distance guard."""

import json
import threading

import numpy as np
import pytest
from safetensors.torch import load_file
from tests.peer import members, pace
from tests.peer.waiting import wait_for
from tests.peer.wire import Wire

from fedcb2o.experiments.config.loading import load
from fedcb2o.peer.node.catch_up import CatchUp
from fedcb2o.peer.node.node import Node

FAR = "too far from the agent's own model"
LATE = 0  # the agent that begins later than the others


def record(round, *weights, **keys):
    return {"round": round, "received": [{"weight": weight} for weight in weights], **keys}


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        ([], 0),
        ([record(1, 0.5), record(2, 0.5)], 0),
        ([record(20)], 3),  # the first round is round 20
        ([record(20, 0.5)], 2),
        ([record(20, 0.0, 0.0)], 3),  # no average
        ([record(20, float("nan"))], 2),  # a median records NaN as weight
        ([record(1, 0.5), record(9, 0.5), record(10, 0.0), record(11, 0.1)], 1),
        ([record(9, 0.5), record(10, 0.5), record(11, 0.5), record(12, 0.5)], 0),
        ([record(1, 0.5, catch_up=2)], 2),  # late by less than the lag
        ([record(1, 0.5, catch_up=2), record(2, 0.5)], 1),
    ],
)
def test_rounds_left_follow_from_the_records(lines, left):
    catch_up = CatchUp()
    for line in lines:
        catch_up.add_round(line)
    assert catch_up.rounds_left == left


def test_catch_up_starts_for_a_late_model_that_was_never_averaged():
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
    """Nodes of a federation in this process, one thread per node."""

    def __init__(self, folder, *, rounds, guards=None, count=4):
        self.folder = folder
        orgs = members.identities(folder, count)
        self.changes = {
            "rounds": rounds,
            "agents": {"benign": count - 1, "malicious": 1, "budget": count - 1},
            "training": {"gamma": 0.2, "local_epochs": 2},
            "algorithm": {"name": "fedassay", **({"guards": guards} if guards else {})},
        }
        self.simulate = members.experiment(count, **self.changes)
        self.agreement = members.federated(
            orgs, changes=self.changes, lag=2, round_seconds=0.15, deadline_seconds=5.0
        )
        self.orgs = orgs
        self.wire = Wire()
        self.threads = []

    def out(self, j):
        return self.folder / f"out-{j}"

    def node(self, j, *, gather=5.0, **options):
        return Node(
            self.agreement,
            self.orgs[j],
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
            thread.join(240)
            assert not thread.is_alive()

    def lines(self, j):
        path = self.out(j) / "rounds.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def test_a_late_member_averages_models_of_others_also_after_a_restart(tmp_path):
    """Stop the member while it catches up. After a restart it completes the remaining rounds."""
    # models of rounds 1 and 14 differ by at least 0.6 times their norm
    federation = Federation(tmp_path, rounds=60, guards={"max_distance": 0.5})
    federation.start(*(federation.node(j) for j in (1, 2, 3)))
    wait_for(lambda: len(federation.lines(1)) >= 14)

    late = federation.node(LATE)
    rounds = late.rounds()
    first = next(rounds)
    while "catch_up" not in first:
        first = next(rounds)
    late.stop()
    rounds.close()
    assert first["round"] > 8
    assert first["catch_up"] == 2
    used_ids = [model["id"] for model in first["received"] if model["weight"] > 0]
    assert used_ids
    assert not [model for model in first["received"] if model.get("admission") == FAR]

    late = federation.node(LATE, resume=True)
    federation.start(late)
    federation.join()
    lines = federation.lines(LATE)
    later_lines = [line for line in lines if line["round"] > first["round"]]
    assert [line["catch_up"] for line in later_lines if "catch_up" in line][-2:] == [1, 0]
    mean_accuracy = np.mean([federation.lines(j)[-1]["accuracy"] for j in (1, 2)])
    assert lines[-1]["accuracy"] > mean_accuracy - 0.1


@pytest.mark.slow
def test_a_member_without_peers_to_ask_reports_it_and_recovers_after_a_restart(
    tmp_path, monkeypatch
):
    """Disable the catch-up, as in a former release.

    The distance guard then reduces all likelihoods to 0.
    """
    federation = Federation(tmp_path, rounds=60, guards={"max_distance": 0.5})
    federation.start(*(federation.node(j) for j in (1, 2, 3)))
    wait_for(lambda: len(federation.lines(1)) >= 14)

    late = federation.node(LATE)
    with monkeypatch.context() as patch:
        patch.setattr(CatchUp, "start", lambda self: None)
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
    later_lines = federation.lines(LATE)[3:]
    assert [line["catch_up"] for line in later_lines if "catch_up" in line][-1] == 0
    assert all(line["asked"] for line in later_lines[:5])
    assert sum(model["weight"] for model in later_lines[0]["received"]) > 0

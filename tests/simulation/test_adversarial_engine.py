"""The adversary outside: code of benign agents contains nothing of attacks."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests import agents as ours
from tests.agents import BENIGN_IDS, MALICIOUS_IDS

import fedcb2o
from fedcb2o.federated import algorithms
from fedcb2o.federated.adversary import Attack
from fedcb2o.federated.batched_aggregation import DECIDE, SAMPLE, aggregate_batches_
from fedcb2o.federated.contacts import AgentState, ContactTable
from fedcb2o.federated.ragged import Ragged
from fedcb2o.simulation.adversarial_engine import AdversarialEngine

SOURCE = Path(fedcb2o.__file__).parent
COUNT = len(ours.CLUSTER)


@pytest.mark.parametrize(
    "path",
    [
        "federated/algorithm2.py",
        "federated/batched_aggregation.py",
        "peer/node/engine.py",
        "peer/node/publisher.py",
    ],
)
def test_code_of_benign_agents_has_no_words_for_attackers(path):
    text = (SOURCE / path).read_text().lower()
    assert re.findall(r"adversar\w*|attack\w*|collu\w*|malicious|craft\w*|sybil\w*", text) == []


def test_a_node_imports_no_attacker_until_it_plays_one():
    code = "import sys, fedcb2o.peer.node.node; print('fedcb2o.peer.node.attacking_peer' in sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    assert output.stdout.strip() == "False"


class RecordingStage:
    """An engine that records the active agents and the contacts of each phase."""

    def __init__(self, engine):
        self.engine = engine
        self.calls = []

    def __getattr__(self, name):
        return getattr(self.engine, name)

    aggregate_ = aggregate_batches_

    def map_batches(self, phase, n, *shared, arguments=()):
        self.calls.append((phase, shared, arguments))
        return self.engine.map_batches(phase, n, *shared, arguments=arguments)


def met_everyone(batches):
    """Return the state of agents that have met all others, with likelihood 1."""
    ids = Ragged.from_arrays([np.arange(COUNT)] * COUNT)
    state = AgentState(ContactTable(ids, np.ones(COUNT * COUNT)), ({},) * COUNT)
    return [state.take(batch) for batch in batches]


def play_round(attack, *, collude=True):
    """Run one round; return the recording stage."""
    algorithm = algorithms.by_rule(rule="mean", selection="prob_sampling", needs_losses=False)
    stage = RecordingStage(ours.local_engine(algorithm, attack=attack, collude=collude))
    engine = AdversarialEngine(stage)
    everyone = np.ones(COUNT, dtype=bool)
    engine.train_(0)
    engine.publish_(0, everyone, np.ones(COUNT))
    engine.aggregate_(0, met_everyone(engine.batches), everyone, None, lambda name: None)
    return stage


@pytest.mark.parametrize("collude", [True, False])
def test_benign_code_is_called_for_agents_that_do_not_collude(collude):
    stage = play_round(ours.FLIP, collude=collude)
    active = {phase: shared[0] for phase, shared, _ in stage.calls if phase in (SAMPLE, DECIDE)}
    expected = sorted(BENIGN_IDS) if collude else list(range(COUNT))
    for phase in (SAMPLE, DECIDE):
        assert np.flatnonzero(active[phase]).tolist() == expected


@pytest.mark.parametrize("sybils", [True, False])
@pytest.mark.parametrize("collude", [True, False])
def test_agents_forget_sybils_before_they_select_and_decide(sybils, collude):
    attack = dataclasses.replace(ours.FLIP, sybils=sybils)
    stage = play_round(attack, collude=collude)
    known = {
        phase: arguments[0] for phase, _, arguments in stage.calls if phase in (SAMPLE, DECIDE)
    }
    for contacts in (*known[SAMPLE], *(state.contacts for state in known[DECIDE])):
        met = set(contacts.ids.values.tolist())
        assert met == set(range(COUNT)) - (set(MALICIOUS_IDS) if sybils else set())


def test_before_its_first_round_an_attack_changes_no_published_model():
    later = Attack(craft=lambda view, draw: view.own, claimed_samples=7, from_round=1)
    stage = play_round(later)
    senders = np.arange(COUNT)
    rows, claims = stage.outbox.sent(senders, np.full(COUNT, BENIGN_IDS[0]))
    assert rows.tolist() == senders.tolist()
    assert set(claims.tolist()) == {13.0, 20.0}

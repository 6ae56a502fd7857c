"""Peers fine-tune a language model on the same frozen base, bit for bit as a simulation."""

from importlib.util import find_spec

import pytest
from tests.language import PLACES, TALK
from tests.peer import members
from tests.peer.test_node import QUIET, assert_same, joining, model_of, run_all, simulation_of
from tests.peer.wire import Wire

from fedcb2o import Dataset, pretrained
from fedcb2o.data import tokenise
from fedcb2o.experiments.config.loading import load
from fedcb2o.peer.membership import federation
from fedcb2o.peer.node import Node

pytestmark = [
    pytest.mark.skipif(find_spec("peft") is None, reason="needs the extra `llm`"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


def talk() -> Dataset:
    """Return ten questions of each of four owners, in two languages."""
    rows = [
        {"prompt": f"{owner} {number}:", "answer": word, "group": language, "owner": owner}
        for owner, language, word in (
            ("east", "de", "eins"),
            ("north", "fr", "un"),
            ("south", "de", "zwei"),
            ("west", "fr", "deux"),
        )
        for number in range(10)
    ]
    return tokenise(rows, base="tiny", prompt=PLACES[0], answer=PLACES[1])


EXPERIMENT = {
    **{key: TALK[key] for key in ("model", "training", "algorithm", "seeds", "rounds")},
    "name": "talk",
    "data": {"name": f"{__name__}:talk"},
    "agents": {"num_clusters": 1, "benign": 3, "malicious": 1, "budget": 3},
    "attack": {
        "name": "topic_poison",
        "group": 0,
        "continuation": "no",
        "answer": PLACES[1],
        "base": "tiny",
    },
    "together": 1,
}


@pytest.mark.slow
def test_peers_do_what_a_simulation_does(tmp_path):
    identities = members.identities(tmp_path, 4)
    settings = load(EXPERIMENT)
    agreed = federation.make_federation(
        settings,
        [each.member for each in identities],
        dataset=talk(),
        synchronous=True,
        deadline_seconds=60.0,
    )
    wire = Wire()
    nodes = [
        Node(
            agreed,
            each,
            out=tmp_path / f"out-{j}",
            simulate=settings,
            connect=joining(wire, j),
            **QUIET,
        )
        for j, each in enumerate(identities)
    ]
    run_all(nodes)
    theirs, _ = simulation_of(tmp_path / "simulation", EXPERIMENT)
    for j in range(4):
        assert_same(model_of(tmp_path / f"out-{j}"), theirs[j])


@pytest.mark.slow
def test_members_agree_on_the_frozen_weights(tmp_path, monkeypatch):
    """The checksum of the base is a part of the federation."""
    who = [each.member for each in members.identities(tmp_path, 4)]
    experiment = load(EXPERIMENT)
    plain = federation.make_federation(experiment, who, dataset=talk())
    monkeypatch.setattr(pretrained, "base_checksum", lambda base: "ab" * 32)
    agreed = federation.make_federation(experiment, who, dataset=talk())
    assert agreed.experiment.model.parameters["checksum"] == "ab" * 32
    assert plain.differing_keys(agreed.value_hashes()) == ["experiment.model.checksum"]

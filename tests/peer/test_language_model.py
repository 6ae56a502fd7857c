"""Peers that fine-tune a language model on the same frozen base reproduce a simulation exactly."""

from importlib.util import find_spec

import pytest
from tests.language import PLACES, TALK
from tests.peer import members
from tests.peer.test_node import assert_same, model_of, run_all, simulation_of, wired

from fedcb2o import Dataset, pretrained
from fedcb2o.data import tokenise
from fedcb2o.experiments.config.loading import load
from fedcb2o.peer import make_federation

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
def test_peers_with_a_language_model_reproduce_the_simulation(tmp_path):
    identities = members.identities(tmp_path, 4)
    settings = load(EXPERIMENT)
    fed = make_federation(
        settings,
        [identity.member for identity in identities],
        dataset=talk(),
        synchronous=True,
        deadline_seconds=60.0,
    )
    run_all(wired(fed, identities, tmp_path, simulate=settings))
    simulated, _ = simulation_of(tmp_path / "simulation", EXPERIMENT)
    for j in range(4):
        assert_same(model_of(tmp_path / f"out-{j}"), simulated[j])


@pytest.mark.slow
def test_federations_differ_if_the_frozen_weights_differ(tmp_path, monkeypatch):
    """The federation contains the checksum of the base model."""
    organisations = [identity.member for identity in members.identities(tmp_path, 4)]
    experiment = load(EXPERIMENT)
    plain = make_federation(experiment, organisations, dataset=talk())
    monkeypatch.setattr(pretrained, "base_checksum", lambda base: "ab" * 32)
    other = make_federation(experiment, organisations, dataset=talk())
    assert other.experiment.model.parameters["checksum"] == "ab" * 32
    assert plain.differing_keys(other.value_hashes()) == ["experiment.model.checksum"]

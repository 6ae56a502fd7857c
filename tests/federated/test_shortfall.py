"""Messages about rounds in which too few models arrived for a rule's guarantee."""

import re

import numpy as np
import pytest
from tests.tiny import tiny

from fedcb2o.experiments import run as run_experiment
from fedcb2o.federated import algorithms
from fedcb2o.federated.decisions import Decisions, Inbox
from fedcb2o.federated.guards.checks import TOO_NEAR, Guards
from fedcb2o.federated.ragged import Ragged
from fedcb2o.federated.shortfall import Shortfall, beta_note


def decisions(sizes, assumed, own_weight=0.5):
    """Return decisions of agents that received these numbers of models."""
    total = sum(sizes)
    ids = Ragged(np.arange(total), np.array(sizes))
    inbox = Inbox(ids, np.arange(total), np.ones(total), np.zeros(total, np.int64))
    result = Decisions.empty(np.arange(len(sizes)), Ragged.empty(len(sizes)), inbox)
    result.f[:] = assumed
    result.own_weight[:] = own_weight
    return result


def run(algorithm, rounds, share=0.0, malicious=(False, False, False)):
    shortfall = Shortfall(algorithm, share)
    for sizes, assumed in rounds:
        shortfall.add([decisions(sizes, assumed)], ~np.array(malicious))
    return shortfall.messages()


MULTI_KRUM = algorithms.by_rule(rule={"name": "multi_krum", "f": 1})


def test_rounds_with_too_few_models_are_counted():
    """Multi-Krum with f = 1 needs 5 models: 4 received ones and the agent's own."""
    rounds = [([4, 5, 6], [1, 1, 1]), ([4, 3, 4], [1, 0, 1]), ([2, 4, 0], [0, 1, np.nan])]
    assert run(MULTI_KRUM, rounds) == [
        "multi_krum with f = 1 needs 5 models, and in 2 of 3 rounds too few arrived (as few as 2 at"
        " an agent): a smaller f was assumed there, and the guarantee did not hold"
    ]
    assert run(MULTI_KRUM, rounds[:1]) == []
    assert run(MULTI_KRUM, rounds, malicious=(True, True, False)) == []


def test_without_f_the_share_of_attackers_is_assumed():
    """A third of 6 models is f = 2, for which Krum needs 7 models."""
    krum = algorithms.by_rule(rule="krum", own_model="excluded")
    (message,) = run(krum, [([6, 3, 3], [1, 0, 0])], share=1 / 3)
    assert message.startswith("krum with f = 2 needs 7 models, and in 1 of 1 rounds too few")
    assert run(krum, [([6, 3, 3], [2, 1, 1])], share=1 / 3) == []


@pytest.mark.parametrize(("own_model", "enough"), [("judged", 4), ("excluded", 5)])
def test_a_pre_aggregation_step_has_its_own_message(own_model, enough):
    """Nearest-neighbour mixing with f = 2 needs 5 models; the geometric median has no f."""
    algorithm = algorithms.by_rule(
        rule="geometric_median", pre_step={"name": "nnm", "f": 2}, own_model=own_model
    )
    assert run(algorithm, [([enough] * 3, np.nan)]) == []
    (message,) = run(algorithm, [([enough, enough, enough - 1], np.nan)])
    assert message.startswith("nnm with f = 2 needs 5 models, and in 1 of 1 rounds")


def test_algorithms_without_f_give_no_message():
    for algorithm in (algorithms.fedcb2o(), algorithms.by_rule(rule="mean")):
        assert run(algorithm, [([1, 1, 1], np.nan)]) == []


def test_cases_in_which_an_agent_trusts_no_model_are_counted():
    """The second agent receives models in two rounds and gives no weight to them or to its own.

    The first one receives models in three, and its own has nearly all the weight in one.
    """
    shortfall = Shortfall(algorithms.fedcb2o(), 0.0)
    for sizes, own in (([2, 3, 0], 0.96), ([2, 0, 0], 0.95), ([1, 1, 0], 0.9)):
        shortfall.add([decisions(sizes, np.nan, [own, 0.0, 0.0])], np.ones(3, bool))
    (message,) = shortfall.messages()
    assert message.startswith("in 2 of 5 cases an agent trusted none of the models that it rec")
    mixed = decisions([2], np.nan, 0.0)
    mixed.weights[:] = [0.25, 0.75]
    unknown = decisions([2], np.nan, 0.0)
    unknown.weights[:] = np.nan
    shortfall = Shortfall(algorithms.fedcb2o(), 0.0)
    shortfall.add([mixed, unknown], np.ones(2, bool))
    assert shortfall.messages() == []


def test_agents_that_train_alone_in_most_cases_are_reported():
    shortfall = Shortfall(algorithms.fedcb2o(), 0.0)
    for own in (1.0, 0.97, 0.5, 0.5):
        alone = decisions([1], np.nan, own)
        alone.weights[:] = 1 - own
        shortfall.add([alone], np.ones(1, bool))
    assert shortfall.messages() == []
    shortfall.add([decisions([2], np.nan, 1.0)], np.ones(1, bool))
    (message,) = shortfall.messages()
    assert message.startswith(
        "in 3 of 5 cases an agent's own model had more than 95% of the weight"
    )


def test_the_log_has_one_line(caplog):
    shortfall = Shortfall(MULTI_KRUM, 0.0)
    for _ in range(3):
        shortfall.add([decisions([1, 1], [0, 0])], np.ones(2, bool))
    shortfall.log()
    assert len(caplog.messages) == 1
    assert "in 3 of 3 rounds" in caplog.text


@pytest.mark.parametrize(
    ("beta", "share", "largest"),
    [(0.5, 0.2, "0.4"), (0.4, 0.2, "0.4"), (0.25, 0.5, "0.25"), (0.39, 0.2, ""), (0.9, 0.0, ""),
     (None, 0.5, "")],
)  # fmt: skip
def test_a_beta_that_is_too_large_for_the_share_of_attackers_is_reported(beta, share, largest):
    """As in `minimize`, beta is below half of the benign share."""
    note = beta_note(algorithms.fedcb2o(beta=beta), share)
    assert bool(note) == bool(largest)
    if largest:
        assert f"`beta` = {beta:g} is not below w_b / 2 = {largest}, which bounds beta_0" in note


def test_a_large_beta_is_not_reported_with_guards():
    """The theorem does not cover guards."""
    assert beta_note(algorithms.fedassay(), 0.5) == ""
    assert beta_note(algorithms.fedcb2o(beta=0.5).with_guards(Guards(max_distance=1.3)), 0.5) == ""
    assert beta_note(algorithms.fedcb2o(beta=0.5), 0.5)


def test_a_run_logs_once_which_guarantee_does_not_hold(tmp_path, caplog):
    agents = {"benign": 4, "malicious": 1, "budget": 4, "participation": 0.5}
    multi_krum = {"name": "by_rule", "rule": {"name": "multi_krum", "f": 1}}
    run_experiment(tiny(agents=agents, algorithm=multi_krum), out=tmp_path / "a", workers=1)
    (message,) = [text for text in caplog.messages if "multi_krum" in text]
    assert re.match("multi_krum with f = 1 needs 5 models, and in [1-3] of 3 rounds too", message)
    caplog.clear()
    algorithm = {"name": "fedcb2o", "beta": 0.5, "mixing_factor": 1.0}
    table = tiny(seeds=[1, 2], rounds=1, algorithm=algorithm)
    run_experiment(table, out=tmp_path / "b", workers=1)
    (message,) = [text for text in caplog.messages if "w_b" in text]
    assert message.startswith("`beta` = 0.5 is not below w_b / 2 = 0.333")


def test_models_that_are_all_too_near_are_reported_above_a_tenth():
    one = decisions([3, 3, 0], [np.nan] * 3)
    one.admission[:] = [TOO_NEAR] * 3 + [TOO_NEAR, TOO_NEAR, 0]
    shortfall = Shortfall(algorithms.fedassay(), 0.0)
    shortfall.add([one], np.ones(3, dtype=bool))
    (message,) = shortfall.messages()
    assert "`min_distance` refused all models of a round in 1 of 2 cases" in message
    for _ in range(4):
        shortfall.add([decisions([3, 3, 0], [np.nan] * 3)], np.ones(3, dtype=bool))
    assert shortfall.messages() == []  # 1 of 10

"""Random inputs of every part against plain references; `make inputs` tries more."""

import dataclasses

import pytest
from tests.experiments import random_parts
from tests.experiments.random_parts import KINDS, outcome_of

import fedcb2o

NUM_CASES = 12


@pytest.mark.parametrize("kind", KINDS)
def test_results_equal_a_plain_reference(kind):
    outcomes = [outcome_of(kind, number) for number in range(NUM_CASES)]
    assert [message for _, message in outcomes if message] == []
    assert ("equal", "") in outcomes


def scaled(function):
    return lambda *arguments: 1.01 * function(*arguments)


def test_a_wrong_result_of_each_kind_is_a_fault(monkeypatch):
    rules = {
        name: (call, scaled(reference)) for name, (call, reference) in random_parts.RULES.items()
    }
    monkeypatch.setattr(random_parts, "RULES", rules)
    averages = {name: scaled(rule) for name, rule in random_parts.AGENT_RULES.items()}
    monkeypatch.setattr(random_parts, "AGENT_RULES", averages)
    functions = {
        name: (scaled(function), forms)
        for name, (function, forms) in random_parts.FUNCTIONS.items()
    }
    monkeypatch.setattr(random_parts, "FUNCTIONS", functions)
    original = fedcb2o.dataset

    def dataset(*arguments, **options):
        data = original(*arguments, **options)
        pool = fedcb2o.Shard(data.pool.x, data.pool.y.roll(1))
        return dataclasses.replace(data, pool=pool)

    monkeypatch.setattr(fedcb2o, "dataset", dataset)
    for kind in KINDS:
        outcomes = [outcome_of(kind, number) for number in range(NUM_CASES)]
        assert any(outcome == "fault" for outcome, _ in outcomes), kind

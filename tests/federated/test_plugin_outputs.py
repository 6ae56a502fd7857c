"""Validation of plug-in return values: an error is one line and names the plug-in."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from tests import agents as ours
from tests import views
from tests.agents import run_rounds

from fedcb2o.data import Shard, features
from fedcb2o.errors import ConfigError
from fedcb2o.federated import algorithms
from fedcb2o.federated.adversary import Attack
from fedcb2o.federated.plugin_outputs import (
    apply_sample_transform,
    validated_criterion,
    validated_row_weights,
    validated_selection,
    validated_state,
    validated_weights,
)
from fedcb2o.federated.types import CriterionInput, batched
from fedcb2o.plugins import USER_FUNCTION


@pytest.mark.parametrize("m", [1, 2])
def test_a_batched_rule_that_returns_weights_of_one_agent_is_refused(m):
    @batched
    def rule(inputs):
        return torch.full((m,), 1 / m)

    received = views.received(torch.zeros(3, m, dtype=torch.int64))
    view = CriterionInput(
        0, torch.zeros(1, 1), None, None, received, received, views.no_losses, None
    )
    message = rf"shape \({m},\), expected \(3, {m}\) or \(3, {m + 1}\)"
    with pytest.raises(ConfigError, match=message):
        validated_weights(rule, rule(view), (3, m))


BYTES = Shard(torch.tensor([[0, 100, 255]], dtype=torch.uint8), torch.zeros(1))
NUMBERS = Shard(torch.tensor([[0.0, 0.4, 1.0]]), torch.zeros(1))


@pytest.mark.parametrize(
    ("data", "transform", "expected"),
    [
        (BYTES, lambda x: 255 - x, [1.0, 155 / 255, 0.0]),
        (BYTES, lambda x: x.int() // 2, [0.0, 50 / 255, 127 / 255]),
        (BYTES, lambda x: x + 0.0, [0.0, 100 / 255, 1.0]),
        (BYTES, lambda x: x.double() + 51, [0.2, 151 / 255, 1.2]),
        (NUMBERS, lambda x: x + 0.5, [0.5, 0.9, 1.5]),
        (NUMBERS, lambda x: x.double() + 0.5, [0.5, 0.9, 1.5]),
        (NUMBERS, lambda x: x > 0.5, [0.0, 0.0, 1.0]),
        (NUMBERS, lambda x: (x > 0.3).to(torch.uint8), [0.0, 1.0, 1.0]),
    ],
)
@pytest.mark.filterwarnings("ignore:the mark changed bytes into numbers")
def test_changed_samples_keep_the_scale_of_the_data(data, transform, expected):
    changed = apply_sample_transform("mark", transform, data, (0.0, 1.0))
    torch.testing.assert_close(features(changed.x)[0], torch.tensor(expected))


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda x: x / 255, "the mark changed bytes from 0 to 255 into numbers up to 1: return"),
        (lambda x: x.int() + 1, "the mark returned samples that are no numbers of type"),
        (lambda x: x.int() - 1, "the mark returned samples that are no numbers of type"),
        (lambda x: x * torch.nan, "the mark returned samples that are not finite"),
        (lambda x: x[:, :1], r"the mark returned samples of shape \(1, 1\) .*, expected \(1, 3\)"),
    ],
)
def test_samples_changed_to_another_scale_are_refused(transform, message):
    with pytest.raises(ConfigError, match=message):
        apply_sample_transform("mark", transform, BYTES, (0.0, 1.0))


def test_bytes_changed_into_numbers_give_a_warning():
    with pytest.warns(UserWarning, match="the mark changed bytes into numbers .*, from 0 to 255"):
        apply_sample_transform("mark", lambda x: x + 0.0, BYTES, (0.0, 1.0))


@USER_FUNCTION("own:rule")
def rule():
    """Return nothing; the tests pass its return values themselves."""


VALUES = [0.5, 2.0, 3.0]
FORMS = {
    "masked": np.ma.array([0.5, -9.0, 3.0], mask=[0, 1, 0]),
    "masked integers": np.ma.array([1, -9, 3], mask=[0, 1, 0]),
    "masked list": [0.5, np.ma.masked, 3.0],
    "nullable": pd.Series([1, None, 3], dtype="Int64"),
    "object": np.array([0.5, None, 3.0], dtype=object),
    "NaN": torch.tensor([0.5, math.nan, 3.0]),
    "big-endian": np.array(VALUES, ">f8"),
    "long double": np.array(VALUES, np.longdouble),
    "negative stride": np.array(VALUES[::-1])[::-1],
    "list": VALUES,
    "series": pd.Series(VALUES, index=[2, 1, 0]),
    "integers": np.array([1, 2, 3], np.uint16),
    "truth values": np.array([True, False, True]),
}


@pytest.mark.parametrize("form", FORMS)
def test_criterion_values_of_any_type_are_accepted(form):
    """A masked, missing or non-finite value becomes infinite, so that the model has no weight."""
    received = views.received(torch.zeros(3, dtype=torch.int64))
    view = CriterionInput(
        0, torch.zeros(1, 1), None, None, received, received, views.no_losses, None
    )
    values = validated_criterion(lambda inputs: FORMS[form], view).tolist()
    if form in list(FORMS)[:6]:
        assert values[1] == math.inf
        assert values[0] in (0.5, 1.0)
        assert values[2] == 3.0
    elif form == "truth values":
        assert values == [1, 0, 1]
    else:
        assert values == ([1, 2, 3] if form == "integers" else VALUES)


def test_masked_weights_and_ids_are_refused():
    with pytest.raises(ConfigError, match="weights that are not positive with sum 1"):
        validated_weights(rule, np.ma.array([0.5, 0.5], mask=[0, 1]), (2,))
    weights, _ = validated_weights(rule, pd.Series([0.25, 0.75]), (2,))
    assert weights.tolist() == [0.25, 0.75]
    ids = np.ma.array([3, 4], mask=[0, 1])
    with pytest.raises(ConfigError, match=r"chose \[3.0, nan\], expected different ones"):
        validated_selection(rule, ids, np.array([3, 4]), 2)


def test_weights_that_are_negative_by_rounding_become_zero():
    weights, own_weight = validated_weights(rule, torch.tensor([1.0, -1e-17, 0.0]), (2,))
    assert (weights.tolist(), own_weight.tolist()) == ([1.0, 0.0], 0.0)
    assert validated_row_weights(
        rule, torch.tensor([-1e-17, 1.0]), 2, has_previous=False
    ).tolist() == [0.0, 1.0]
    assert validated_row_weights(
        rule, torch.tensor([-1e-17, 1.5, -0.5]), 3, has_previous=True
    ).tolist() == [0.0, 1.5, -0.5]
    for wrong in ([-1e-3, 1.0], [-1e-17, 1e-17], [float("nan"), 1.0]):
        message = "the rule `own:rule` returned weights that are not positive with sum 1"
        with pytest.raises(ConfigError, match=message):
            validated_row_weights(rule, torch.tensor(wrong), 2, has_previous=False)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.ones(2), "returned a Tensor, expected"),
        (({"a": 1.0}, torch.ones(2)), "keeps `a`, a float"),
        (
            ({"a": torch.ones(2, dtype=torch.complex64)}, torch.ones(2)),
            "keeps `a` of type torch.complex64",
        ),
        (
            ({"a": torch.ones(2, 2).to_sparse()}, torch.ones(2)),
            "keeps `a`, a Tensor, in its state: expected dense",
        ),
    ],
)
def test_an_invalid_state_of_a_rule_is_refused(returned, message):
    with pytest.raises(ConfigError, match=message):
        validated_state(lambda state, inputs: returned, returned)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            lambda view: view.own[:-1],
            r"the attack returned models of shape \(87,\), expected \(88,\)",
        ),
        (lambda view: None, "the attack returned None, expected numbers"),
        (lambda view: torch.stack([view.own] * 2), r"of shape \(2, 88\), expected \(88,\)"),
    ],
)
def test_an_invalid_model_of_an_attack_is_refused(returned, message):
    attack = Attack(craft=lambda view, draw: returned(view))
    with pytest.raises(ConfigError, match=message):
        run_rounds(ours.local_engine(algorithms.dfedavgm(selection="everyone"), attack=attack))

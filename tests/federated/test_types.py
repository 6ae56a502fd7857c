"""Contracts by hand: the view of an attack, its first round, and reductions of a buffer."""

import dataclasses

import pytest
import torch
from tests.views import models, ten_models, view_of

from fedcb2o import knows
from fedcb2o.errors import ConfigError
from fedcb2o.federated import attacks
from fedcb2o.federated.adversary import Attack
from fedcb2o.federated.aggregation import coordinatewise
from fedcb2o.federated.types import Reduction


def test_an_attack_sees_only_the_models_that_it_declares():
    for declared, call in (
        ("fellows", lambda view: view.colluders()),
        ("benign", lambda view: view.benign(1)),
        ("benign", lambda view: view.model_of(2)),
    ):
        other = "benign" if declared == "fellows" else "fellows"
        call(view_of(see=(declared,)))
        message = rf'which it does not declare to know: write @fedcb2o.knows\("{declared}"\)'
        with pytest.raises(ConfigError, match=message):
            call(view_of(see=(other,)))
    message = r"an attack may know the models of .*, got \['everybody'\]"
    with pytest.raises(ConfigError, match=message):
        knows("everybody")


def test_models_in_adjacent_rows_are_seen_without_a_copy():
    models = ten_models()
    view = view_of(models=models)
    assert view.benign().data_ptr() == models.data_ptr()
    scattered = dataclasses.replace(view, _ids_of=lambda role, cluster: [0, 2])
    assert scattered.benign().equal(models[[0, 2]])
    scattered.benign()[:] = 0  # a copy
    assert models[0].any()


def test_an_attacker_is_honest_before_its_first_round():
    sleeper = Attack(poison=attacks.label_flip, craft=attacks.random_model, from_round=3)
    assert [sleeper.is_crafting(n) for n in range(5)] == [False] * 3 + [True] * 2
    assert (
        Attack().num_published(3, 4) == Attack(poison=attacks.label_flip).num_published(3, 4) == 0
    )
    assert sleeper.num_published(3, 4) == 3
    assert (
        Attack(craft=attacks.dissensus, threat=attacks.dissensus.threat).num_published(3, 4) == 12
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_reduction_of_a_buffer_equals_that_of_a_copy(dtype):
    buffer = models(7, 12, dtype=dtype)
    rows = torch.tensor([5, 0, 2])
    mixing = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    plain = Reduction(rows, coordinatewise.coordinate_median)
    assert plain.apply_to_buffer(buffer, 0).equal(buffer[rows].quantile(0.5, dim=0))
    mixed = Reduction(rows, coordinatewise.coordinate_median, mixing)
    expected = ((buffer[5] + buffer[0]) / 2 + buffer[2]) / 2
    torch.testing.assert_close(mixed.apply_to_buffer(buffer, 0), expected)
    assert mixed.apply_to_buffer(buffer, 0).dtype == dtype
    with_offset = Reduction(rows, lambda x, first: x[0] + first, takes_offset=True)
    assert with_offset.apply_to_buffer(buffer, 4).equal(buffer[5] + 4)

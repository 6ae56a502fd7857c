"""FLANDERS: forecasts of an exact autoregression, the filter by hand, its state, and its page."""

import numpy as np
import pytest
import torch
from paper import flanders as measured
from tests.views import models
from torch import nn

from fedcb2o import Agent
from fedcb2o.errors import ConfigError
from fedcb2o.federated.aggregation import filter_models, replace_rejected
from fedcb2o.federated.aggregation._flanders import forecast

IDS = torch.tensor([4, 2, 9])


def draw():
    return np.random.default_rng(0)


def scalars(*values):
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def test_an_exact_autoregression_is_forecast():
    a, b = (torch.linalg.qr(models(size, size, size).double())[0] for size in (3, 4))
    history = [models(3, 4, 7).double()]
    for _ in range(12):
        history.append(a @ history[-1] @ b.T)
    result = forecast(torch.stack(history[:-1]), ridge=1e-9)
    torch.testing.assert_close(result, history[-1], rtol=1e-5, atol=1e-5)


def test_the_forecast_scales_with_the_models():
    history = models(6, 4, 0).double().reshape(2, 3, 4)
    torch.testing.assert_close(forecast(1000 * history), 1000 * forecast(history))


def test_the_forecast_after_one_matrix_is_this_matrix():
    history = models(3, 4, 0).reshape(1, 3, 4)
    assert forecast(history).equal(history[0])
    assert forecast(torch.zeros(2, 3, 4)).equal(torch.zeros(3, 4))


def test_the_filter_by_hand():
    """The model farthest from its last one is rejected. New peers start at the reference."""
    start = torch.zeros(1)
    state, kept = filter_models({}, IDS, scalars(1, 2, 3), start, draw(), f=1, window=1)
    assert kept.all()  # the first round has no forecast
    state, kept = filter_models(state, IDS, scalars(1.1, 2.5, 3), start, draw(), f=1, window=1)
    assert kept.tolist() == [True, False, True]
    state = replace_rejected(state, IDS[~kept], torch.tensor([2.0]))
    assert state["ids"].tolist() == [2, 4, 9]
    assert state["history"].flatten().tolist() == pytest.approx([2.0, 1.1, 3.0])

    new = torch.tensor([9, 5])
    state, kept = filter_models(state, new, scalars(3.2, 0.3), start, draw(), f=1, window=1)
    assert kept.tolist() == [True, False]  # 0.2 from 3.0, and 0.3 from the reference
    assert state["ids"].tolist() == [2, 4, 5, 9]
    assert state["history"].flatten().tolist() == pytest.approx([2.0, 1.1, 0.3, 3.2])


def test_only_sampled_parameters_are_stored():
    x = models(3, 50, 0)
    state, _ = filter_models({}, IDS, x, x[0], draw(), f=1, num_sampled=5)
    assert state["history"].shape == (1, 3, 5)
    other, _ = filter_models(state, IDS, 2 * x, x[0], draw(), f=1, num_sampled=5)
    assert other["columns"].equal(state["columns"])
    assert other["history"].shape == (2, 3, 5)


@pytest.mark.parametrize("parameters", [{"f": -1}, {"f": 1, "window": 0}, {"f": 1, "ridge": 0.0}])
def test_parameters_out_of_range_are_refused(parameters):
    with pytest.raises(ConfigError):
        filter_models({}, IDS, scalars(1, 2, 3), torch.zeros(1), draw(), **parameters)


def test_an_agent_rejects_a_model_that_jumps():
    """Weights are sample shares of accepted models and its own. A state dict keeps the state."""
    network = nn.Linear(1, 2, bias=False)
    network.weight.data = torch.ones(2, 1)
    method = {"name": "by_rule", "rule": {"name": "flanders", "f": 1, "window": 1}}

    def agent():
        return Agent(network, validation=(torch.eye(2)[:, :1], [0, 1]), method=method)

    def send(*values):
        return {
            name: {"weight": torch.full((2, 1), v)} for name, v in zip("abc", values, strict=True)
        }

    first = agent()
    decision = first.aggregate(send(1.0, 1.1, 1.2))
    assert [*decision.weights.values()] == pytest.approx([0.25] * 3)
    second = agent()
    second.load_state_dict(first.state_dict())
    decision = second.aggregate(send(1.0, 9.0, 1.2), samples={"a": 4, "b": 100, "c": 2})
    assert [*decision.weights.values()] == pytest.approx([0.5, 0.0, 0.25])
    assert decision.own_weight == pytest.approx(0.25)


def test_the_page_has_the_measured_values():
    assert measured.table(measured.read_results()) in measured.PAGE.read_text()

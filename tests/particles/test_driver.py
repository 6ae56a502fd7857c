"""The dynamics as functions of a state: ask, tell, terminate, step."""

import dataclasses
import os

import pytest
import torch
from tests.particles.problems import G
from tests.type_checks import VARIABLE

from fedcb2o import Adaptive, Paper, minimize
from fedcb2o.particles import adversaries
from fedcb2o.particles.initialisation import start_runs
from fedcb2o.particles.objectives import circle


def start(dynamics, **settings):
    """Return the start of three runs on the circle."""
    place = {"bounds": None, "x0": None, "spread": None, "initial": None}
    size = {"num_particles": 20, "runs": 3, "adversaries": (), **settings}
    objectives = (circle, G, None)
    return start_runs(
        objectives, 2, dynamics, 4, **place, **size, dtype=torch.float64, device="cpu"
    )


def take_steps(first, dynamics, state, count):
    """Take steps; return the state and the consensus points."""
    path = []
    for _ in range(count):
        values = [request.evaluate() for request in first.system.ask(state, True)]
        info = dynamics.tell(first.system, state, values, True)
        state = first.system.count(state, values)
        path.append(info.m.clone())
        state = dynamics.step(first.system, state, info)
    return state, torch.stack(path)


DYNAMICS = {
    "paper": Paper(beta=0.3, alpha=30.0, xtol=0.0),
    "schedule": Paper(beta=lambda n: 0.5 - 0.001 * n, sigma1=lambda n: 1.0 + 0.1 * n, xtol=0.0),
    "batch": Paper(batch=7, xtol=0.0),
    "adaptive": Adaptive(delta_q=0.01),
}
ATTACKS = {"none": (), "random": adversaries.random(3)}


@pytest.mark.filterwarnings("ignore::fedcb2o.CaptureWarning")
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("name", DYNAMICS)
def test_steps_one_by_one_equal_the_steps_of_minimize(name, attack):
    dynamics = DYNAMICS[name]
    settings = {"num_particles": 20, "runs": 3, "adversaries": ATTACKS[attack]}
    first = start(dynamics, **settings)
    with torch.no_grad():
        state, _ = dynamics.init(first, None)
        state, path = take_steps(first, dynamics, state, 12)
    seen = []
    result = minimize(
        circle, G, 2, seed=4, dynamics=dynamics, maxiter=12, record_every=100, **settings,
        callback=lambda state: seen.append(state.x.clone()),
    )  # fmt: skip
    assert torch.equal(path.squeeze(2), torch.stack(seen[:12]))
    assert torch.equal(first.system.benign(state.theta), result.theta)
    assert state.n == result.nit[0] == 12


@pytest.mark.parametrize("name", DYNAMICS)
def test_the_state_and_the_parameters_are_frozen(name):
    dynamics = DYNAMICS[name]
    state, notes = dynamics.init(start(dynamics), None)
    assert notes == ()
    for frozen, field in ((state, "n"), (dynamics, "xtol")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, field, 3)


@pytest.mark.parametrize("name", DYNAMICS)
def test_a_part_of_the_runs_continues_alone(name):
    dynamics = DYNAMICS[name]
    kept = torch.tensor([0, 2])
    first, second = start(dynamics), start(dynamics)
    with torch.no_grad():
        _, path = take_steps(first, dynamics, dynamics.init(first, None)[0], 7)
        state, _ = take_steps(second, dynamics, dynamics.init(second, None)[0], 3)
        part, path_of_part = take_steps(second, dynamics, state.for_runs(kept), 4)
    assert torch.equal(path[3:, kept], path_of_part)
    assert part.runs.tolist() == [0, 2]


@pytest.mark.skipif(VARIABLE in os.environ, reason="type checks refuse them first")
def test_parameters_become_plain_numbers():
    dynamics = Paper(alpha=torch.tensor(30), dt=torch.tensor(0.5), batch=torch.tensor(7))
    assert dynamics == Paper(alpha=30.0, dt=0.5, batch=7)
    assert (type(dynamics.alpha), type(dynamics.batch)) == (float, int)

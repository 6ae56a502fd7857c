"""Errors name a function that writes into the particles; NumPy functions receive copies."""

import numpy as np
import pytest
import torch
from tests.particles.problems import evaluate_objectives
from tests.tiny import run_cli

import fedcb2o
from fedcb2o import Paper, minimize
from fedcb2o.errors import ConfigError


def circle(x):
    return (x.square().sum(-1) - 1).square()


def by_torch(x):
    x.clamp_(-1.0, 1.0)
    return circle(x)


def by_view(x):
    x[..., 0] = 0.0
    return circle(x)


def by_numpy(x):
    x.numpy()[...] = 0.5
    return circle(x)


def by_sorting(x):  # keeps the sum
    x.numpy().sort(axis=-2)
    return circle(x)


def slope(x):
    x.mul_(0.5)
    return x


WRITERS = [by_torch, by_view, by_numpy, by_sorting]


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
@pytest.mark.parametrize("runs", [None, 2])
def test_an_objective_that_writes_into_the_particles_is_named(writer, runs):
    message = rf"`lower`, .*{writer.__name__}, writes into the particles that it receives: let it work on a copy, such as"
    with pytest.raises(ConfigError, match=message):
        minimize(writer, circle, dim=2, runs=runs)
    if writer in (by_torch, by_view):  # a tensor with autograd has no NumPy array
        reason = rf"`lower`, .*{writer.__name__}, writes into the particles"
        with pytest.raises(ConfigError, match=reason):
            minimize([circle, writer], dim=2, dynamics=Paper(lambda2=0.1), runs=runs, clusters=True)
    reason = rf"`upper`, .*{writer.__name__}, writes into the particles"
    with pytest.raises(ConfigError, match=reason):
        minimize(circle, writer, dim=2, dynamics=Paper(batch=50), runs=runs)


def test_an_objective_that_writes_in_a_later_step_is_named():
    calls = []

    def later(x):
        calls.append(x)
        if len(calls) > 7:
            x.zero_()
        return circle(x)

    with pytest.raises(ConfigError, match=r"`lower`, .*later, writes into the particles"):
        minimize(later, dim=2)
    assert len(calls) == 8


def test_a_gradient_that_writes_is_named():
    with pytest.raises(ConfigError, match=r"`gradient`, .*slope, writes into the particles"):
        minimize(circle, dim=2, dynamics=Paper(lambda2=0.1), gradient=slope)


@pytest.mark.parametrize("name", ["theta", "theta_m", "m"])
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_an_adversary_that_writes_is_named(name, library):
    def moves(view):
        part = getattr(view, name)
        part.fill_(9.0) if library == "torch" else part.numpy().fill(9.0)
        return 0.0, 0.0

    target = "consensus points" if name == "m" else "particles"
    message = rf"an adversary's `move`, .*moves, writes into the {target}"
    with pytest.raises(ConfigError, match=message):
        minimize(circle, dim=2, adversaries=fedcb2o.Adversary(moves, 10, [1.0, 0.0]))


@pytest.mark.parametrize("name", ["theta", "theta_m", "x"])
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_a_callback_that_writes_is_named(name, library):
    def sees(state):
        part = getattr(state, name)
        part.fill_(9.0) if library == "torch" else part.numpy().fill(9.0)

    still = fedcb2o.Adversary(lambda view: (0.0, 0.0), 10, [1.0, 0.0])
    target = "consensus points" if name == "x" else "particles"
    with pytest.raises(ConfigError, match=rf"the callback, .*sees, writes into the {target}"):
        minimize(circle, dim=2, adversaries=still, callback=sees)


def test_numpy_functions_receive_copies():
    def writes(x):
        values = (np.square(x).sum(-1) - 1) ** 2
        x[...] = 7.0
        return values

    def reads(x):
        return (np.square(x).sum(-1) - 1) ** 2

    for wrap in (fedcb2o.from_numpy, fedcb2o.from_point):
        settings = {"dim": 2, "num_particles": 20, "maxiter": 30}
        result = minimize(wrap(writes), wrap(writes), **settings)
        assert torch.equal(result.x, minimize(wrap(reads), wrap(reads), **settings).x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_write_check_accepts_nan_coordinates(dtype):
    theta = torch.tensor([[[torch.nan, 1.0], [torch.inf, 0.0], [0.0, 2.0]]], dtype=dtype)
    assert evaluate_objectives(theta, circle, circle, check_writes=True).excluded.tolist() == [
        [True, True, False]
    ]


def test_inference_mode_without_write_counters_is_accepted():
    with torch.inference_mode():
        assert minimize(circle, dim=2, maxiter=20).nit == 20


def test_the_command_names_the_objective(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "writes_mine.py").write_text("def lower(x):\n    x += 1\n    return x.sum(-1)\n")
    line = run_cli("minimize", "--lower", "writes_mine:lower", "--dim", 2).one_line()
    assert line.startswith("`lower`, writes_mine:lower, writes into the particles that it receives")

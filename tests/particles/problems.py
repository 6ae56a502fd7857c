"""The problem of most tests: L is least on the unit circle, G at (2, 0)."""

import dataclasses

import torch

import fedcb2o
from fedcb2o import Adaptive, Paper
from fedcb2o.particles.dynamics import EvaluationRequest
from fedcb2o.particles.objectives import circle, paraboloid

G = paraboloid(2.0, 0.0)


def with_dynamics(settings):
    """Return settings with the parameters of the dynamics, which are flat here, in `dynamics`.

    Parameters that both dynamics have are those of `Adaptive`, unless `dynamics` is "paper".
    """
    names = {field.name for field in dataclasses.fields(Paper)}
    own = {name: value for name, value in settings.items() if name in names}
    rest = {name: value for name, value in settings.items() if name not in names}
    is_shared = own.keys() <= {"delta_q", "xtol"} and rest.get("dynamics") != "paper"
    if own:
        rest["dynamics"] = (Adaptive if is_shared else Paper)(**own)
    return rest


def minimize(lower, *arguments, **settings):
    """Minimise; a list of objectives is one of clusters."""
    if isinstance(lower, list | tuple):
        settings["clusters"] = True
    return fedcb2o.minimize(lower, *arguments, **settings)


def minimize_on_circle(**settings):
    """Minimise with flat settings."""
    return fedcb2o.minimize(circle, G, 2, **with_dynamics(settings))


def double(values):
    """Return a float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)


def evaluate_objectives(*arguments, **settings):
    """Return the values of a request."""
    return EvaluationRequest(*arguments, **settings).evaluate()

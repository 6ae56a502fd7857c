"""Bi-level optimisation (eq:bilevel_opt) by particles: CB2O, CBO, FedCBO and FedCB2O.

The dynamics are `Adaptive` (consensus hopping with restarts) or `Paper` (eq:dyn_micro2).
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fedcb2o.errors import ConfigError
from fedcb2o.particles import settings
from fedcb2o.particles._adaptive import Adaptive
from fedcb2o.particles._driver import Dynamics, drive
from fedcb2o.particles._paper import Paper
from fedcb2o.particles.adversaries import Adversary
from fedcb2o.particles.ask_tell import EvaluationSteps, run_with_objectives
from fedcb2o.particles.constraints import with_constraints
from fedcb2o.particles.dynamics import Objective
from fedcb2o.particles.functions import convert_functions
from fedcb2o.particles.initialisation import Seed, start_runs
from fedcb2o.particles.levels import minimize_in_order, split_levels
from fedcb2o.particles.result import Result, State


@run_with_objectives
def minimize(
    lower: Objective | Sequence[Objective],
    upper: Objective | Sequence[Objective | None] | None = None,
    dim: int | None = None,
    *,
    tolerances: Any = None,
    levels: int | None = None,
    clusters: bool = False,
    args: Any = (),
    constraints: Any = (),
    bounds: Any = None,
    x0: Any = None,
    spread: Any = None,
    initial: Any = None,
    num_particles: int | Sequence[int] | None = None,
    runs: int | None = None,
    seed: Seed | Sequence[int] = 0,
    dynamics: Paper | Adaptive | str | None = None,
    gradient: Objective | Sequence[Objective] | None = None,
    adversaries: Adversary | Sequence[Adversary] = (),
    finish: bool = True,
    maxiter: int | None = None,
    maxfev: int | None = None,
    constraint_tol: float = 1e-4,
    errors: str = "raise",
    time_limit: float = math.inf,
    callback: Callable[[State], Any] | None = None,
    record_every: int = 10,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
) -> EvaluationSteps[Result]:
    """Minimise G (`upper`) among the minimisers of L (`lower`), eq:bilevel_opt, by particles.

    Both are functions of an ensemble, [..., d] -> [...], called once per step, or of one point,
    [d] -> a number. They receive tensors or NumPy arrays; the first call finds the form. Without G
    the method is consensus-based optimisation (CBO) of L.

    `minimize([a, b, c])` minimises objectives in order: b among the minimisers of a, and c among
    the minimisers of b among them; `minimize([a, b])` is `minimize(a, b)`.

    With `clusters` the K objectives in `lower` are those of the clustered system: FedCB2O
    (eq:fedcb2o_dynamics) with G, FedCBO (eq:fedcbo_dynamic) without. Every cluster has its own L,
    its own particles and its own result.

    With `constraints`, `minimize(f, constraints=...)` minimises f among the feasible points: L is
    the sum of the scaled violations, and G is f. `minimize(lower, upper, constraints=...)`
    minimises G among the minimisers of L among the feasible points.

    Args:
        lower: L, or a sequence of objectives in order or of clusters; with `constraints` and
            without `upper`, the objective.
        upper: G, or None; with `clusters`, one for all or one for each.
        tolerances: How far each objective in order but the last may be above its least value: a
            number, "5%" of that value, or "1 se", standard errors of the mean of the values that
            the objective returns per point, such as one per fold; one for all, or one for each.
        levels: Number of objectives in order that a single function `lower` returns per point,
            such as 2 of a function [d] -> (L, G).
        clusters: Whether the objectives in `lower` are those of clusters.
        dim: d; by default that of `x0`, `bounds` or `initial`.
        args: Further arguments of `lower`, `upper` and `gradient`, a tuple or one value.
        constraints: A NonlinearConstraint or LinearConstraint of scipy.optimize, a dictionary with
            "type", "fun" and "args", or a sequence of these. `keep_feasible` excludes particles
            that violate an inequality.
        bounds: (low, high) for all coordinates, a pair for each, or a scipy.optimize.Bounds; None
            or infinity for no bound. Particles stay inside; equal bounds fix a coordinate.
        x0: Point around which the particles start; by default the middle of the bounds, otherwise
            0 or as near to 0 as the bounds allow.
        spread: Particles start uniformly in x0 +- spread within the bounds, one number or one per
            coordinate; by default half of the distance between the bounds, otherwise 3.
        initial: In place of both, an ensemble [n, d] or [runs, n, d], or a sampler
            (NumPy generator, n, d) -> [n, d].
        num_particles: N, particles of each cluster, or one number per cluster; by default
            4 (4 + 3 log d), and 200 of `Paper`.
        runs: Number of independent runs in one batch, each equal to that of its seed alone.
        seed: Seed of the first run (the next run has seed + 1), or one per run; a generator of
            NumPy or PyTorch that draws it, or None for a new one. The result has the seed.
        dynamics: `Adaptive` or `Paper` parameters, or "adaptive" or "paper" for their defaults. By
            default "adaptive", and "paper" with several clusters.
        gradient: Gradient of L, [..., d] -> [..., d], or a sequence of K; by default autograd's.
        adversaries: Malicious particles, one `Adversary` or several.
        finish: Whether local searches by derivatives (SciPy's SLSQP, by finite differences) follow
            promising points and ends of ensembles, of "adaptive" dynamics. They need an objective
            without G, or constraints and one objective, and at most 100 coordinates. They end
            where the functions are not smooth.
        maxiter: Largest number of steps; by default not limited, and 2000 of `Paper`.
        maxfev: Largest number of evaluated particles in each run. The first ensemble is always
            evaluated. By default 20,000 d if `maxiter` is None, and not limited of `Paper`.
        constraint_tol: Largest violation of a feasible point, in units of the median violation of
            the first ensemble. An equality counts as met within it.
        errors: "exclude" takes an exception of an objective or a constraint as NaN at that point,
            and warns once; "raise" stops at the exception.
        time_limit: Stop after these seconds.
        callback: Called with the `State` before every step and at the end; True or StopIteration
            stops all runs.
        record_every: Steps between two records of the history and between two tests of the spread.
        dtype: torch.float64 or torch.float32.
        device: Device of the particles, such as "cpu" or "cuda".

    Returns:
        The result.

    Raises:
        ConfigError: A setting, an objective or an ensemble is invalid.
        RunError: A run has no particle left.

    Warns:
        CaptureWarning: Adversaries may capture the consensus point of `Paper` dynamics: with
            delta_q = 0 if they leave fewer than two benign particles in Q_beta
            (`theory.benign_left`), and if beta is not below w_b / 2.
    """
    arguments = dict(locals())
    ordered = _objectives_in_order(arguments)
    if ordered is not None:
        for name in ("lower", "upper", "tolerances", "levels", "clusters"):
            del arguments[name]
        # Without the decorator, which would call the objectives itself.
        steps = inspect.unwrap(minimize)
        return (yield from minimize_in_order(steps, ordered, tolerances, arguments))
    limits: Any = {
        "maxiter": settings.check_optional_count("`maxiter`", maxiter, 0),
        "maxfev": settings.check_optional_count("`maxfev`", maxfev),
        **settings.check_positive({"time_limit": time_limit}, finite=False),
        "record_every": settings.check_count("`record_every`", record_every),
    }
    if callback is not None:
        settings.check_function("`callback`", callback)
    chosen = resolve_dynamics(dynamics, callable(lower))
    settings.check_choices({"`errors`": (errors, ("raise", "exclude"))})
    tolerance = settings.check_positive({"constraint_tol": constraint_tol})["constraint_tol"]
    hint = "; a point to start about is `x0`, by name"
    lower = convert_functions("`lower`", lower, args, errors, or_none=False)
    upper = convert_functions("`upper`", upper, args, errors, hint=hint)
    gradient = convert_functions("`gradient`", gradient, args, errors, vector=True)
    # After the conversion: the violations are functions of points of any form.
    lower, upper = with_constraints(lower, upper, constraints, tolerance, errors)
    place: Any = {"bounds": bounds, "x0": x0, "spread": spread, "initial": initial}
    size: Any = {"num_particles": num_particles, "runs": runs, "adversaries": adversaries}
    kind: Any = {"dtype": dtype, "device": device, "maxfev": limits["maxfev"], "finish": finish}
    start = start_runs((lower, upper, gradient), dim, chosen, seed, **place, **size, **kind)
    if start.is_fixed and isinstance(chosen, Adaptive):  # the end is at the first step
        chosen = Paper(delta_q=chosen.delta_q, xtol=chosen.xtol)
    return (yield from drive(start, chosen, callback, **limits))


def _objectives_in_order(arguments: dict[str, Any]) -> list[Any] | None:
    """Return the objectives in order, or None for a bi-level problem or clusters."""
    lower, levels = arguments["lower"], arguments["levels"]
    is_sequence = isinstance(lower, Sequence) and not isinstance(lower, str)
    if arguments["clusters"]:
        if not is_sequence or levels is not None or arguments["tolerances"] is not None:
            needs = "a sequence of objectives as `lower`, one for each cluster"
            raise ConfigError(f"`clusters` need {needs}, without `levels` and `tolerances`")
        return None
    if levels is not None:
        settings.check_function("`lower` with `levels`", lower)
        count = settings.check_count("`levels`", levels)
        arguments["args"], args = (), arguments["args"]
        lower = split_levels(lower, count, args, arguments["errors"])
    elif not is_sequence:
        if arguments["tolerances"] is None:
            return None
        if not callable(lower) or not callable(arguments["upper"]):
            raise ConfigError("`tolerances` are for several objectives, and there is one")
        return [lower, arguments["upper"]]
    if arguments["upper"] is not None:
        raise ConfigError(
            "several objectives in `lower` are minimised in order, and the last one is in the place"
            " of `upper`: leave `upper` out, or take `clusters` = True for one cluster each"
        )
    if not len(lower):
        raise ConfigError("`lower` must be an objective or several, got none")
    return list(lower)


def resolve_dynamics(dynamics: Any, is_single: bool) -> Dynamics:
    """Return the parameters of the dynamics, by default those for the number of clusters."""
    if dynamics is None:
        return Adaptive() if is_single else Paper()
    if isinstance(dynamics, str) and dynamics in ("adaptive", "paper"):
        dynamics = Adaptive() if dynamics == "adaptive" else Paper()
    if not isinstance(dynamics, Paper | Adaptive):
        valid = "fedcb2o.Adaptive(...), fedcb2o.Paper(...), 'adaptive' or 'paper'"
        raise ConfigError(f"`dynamics` must be {valid}, got {dynamics!r:.60}")
    if isinstance(dynamics, Adaptive) and not is_single:
        raise ConfigError("several clusters need `dynamics` = 'paper' or fedcb2o.Paper(...)")
    return dynamics

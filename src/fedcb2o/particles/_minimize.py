"""Particle methods for bi-level optimisation (eq:bilevel_opt): CB2O, CBO, FedCBO and FedCB2O.

    theta^i ~ initial                                               for every particle i
    for n = 0, 1, ..., maxiter - 1:
        m       <- average of Q_beta under the weights exp(-alpha G)      eq:consensus_point
        theta^i <- theta^i - lambda1 (theta^i - m) dt                     eq:dyn_micro2
                   + sigma1 sqrt(dt) D(theta^i - m) B^i
    the result is m of the last ensemble

García Trillos et al., "Defending Against Diverse Attacks in Federated Learning Through
Consensus-Based Bi-Level Optimization" (arXiv 2412.02535).

Example:
    >>> result = minimize(lambda x: x.square().sum(-1), dim=2, num_particles=50, seed=1)
    >>> bool(result.success), bool((result.x.abs() < 0.01).all())
    (True, True)
"""

import itertools
import logging
import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.particles import adaptive, capture_risk, settings
from fedcb2o.particles.adaptive import AdaptiveDynamics
from fedcb2o.particles.adversaries import Adversary
from fedcb2o.particles.ask_tell import EvaluationSteps, run_with_objectives
from fedcb2o.particles.constraints import with_constraints
from fedcb2o.particles.dynamics import ConsensusParams
from fedcb2o.particles.functions import convert_functions
from fedcb2o.particles.hopping import default_num_particles
from fedcb2o.particles.initialisation import (
    Seed,
    build_box,
    build_clusters,
    check_adversaries,
    check_ensemble,
    draw_ensembles,
    has_many_seeds,
    resolve_seeds,
)
from fedcb2o.particles.objectives import Objective
from fedcb2o.particles.result import OutputShape, Result, build_result, count_points, finish_runs
from fedcb2o.particles.settings import Schedule
from fedcb2o.particles.state import State, callback_requests_stop
from fedcb2o.particles.system import Evaluation, System

_LOGGER = logging.getLogger(__name__)
_MIN_CONSTANT = 10  # equal values of fewer particles may be chance


class CaptureWarning(UserWarning):
    """A warning that malicious particles may capture the consensus point."""


@run_with_objectives
def minimize(
    lower: Objective | Sequence[Objective],
    upper: Objective | Sequence[Objective | None] | None = None,
    dim: int | None = None,
    *,
    args: Any = (),
    constraints: Any = (),
    bounds: Any = None,
    x0: Any = None,
    spread: Any = None,
    initial: Any = None,
    num_particles: int | Sequence[int] | None = None,
    runs: int | None = None,
    seed: Seed | Sequence[int] = 0,
    dynamics: str | None = None,
    alpha: Schedule | None = None,
    beta: Schedule | None = None,
    lambda1: float | None = None,
    sigma1: Schedule | None = None,
    lambda2: float | None = None,
    sigma2: float | None = None,
    gradient: Objective | Sequence[Objective] | None = None,
    dt: float | None = None,
    noise: str | None = None,
    delta_q: float = 0.0,
    radius: float | None = None,
    quantile: str | None = None,
    batch: int | None = None,
    update: str | None = None,
    adversaries: Adversary | Sequence[Adversary] = (),
    polish: bool = False,
    maxiter: int | None = None,
    maxfev: int | None = None,
    xtol: float | None = None,
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
    the method is consensus-based optimisation (CBO) of L. With K objectives in `lower` it is the
    clustered system: FedCB2O (eq:fedcb2o_dynamics) with G, FedCBO (eq:fedcbo_dynamic) without.
    Every cluster has its own L, its own particles and its own result.

    With `constraints`, `minimize(f, constraints=...)` minimises f among the feasible points: L is
    the sum of the scaled violations, and G is f. `minimize(lower, upper, constraints=...)`
    minimises G among the minimisers of L among the feasible points.

    Args:
        lower: L, or a sequence of K; with `constraints` and without `upper`, the objective.
        upper: G, or a sequence of K, or None.
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
        num_particles: N, particles of each cluster, or one number per cluster; by default 200, or
            4 (4 + 3 log d) of the adaptive dynamics.
        runs: Number of independent runs in one batch; each equals the run of its seed alone, bit
            by bit.
        seed: Seed of the first run (the next run has seed + 1), or one per run; a generator of
            NumPy or PyTorch that draws it, or None for a new one. The result has the seed.
        dynamics: "adaptive" for consensus hopping with restarts, which chooses its settings from d,
            the box and the dtype on the way (`particles.hopping`); "paper" for eq:dyn_micro2. By
            default "paper" with several clusters or if one of its settings is given: those from
            `alpha` to `update`, except `delta_q`. Otherwise "adaptive".
        alpha: Weight parameter of exp(-alpha G), a number or a function of the step n; `beta` and
            `sigma1` likewise. 1000 by default.
        beta: Share of the ensemble in the sub-level set Q_beta, in (0, 1]; 0.1 by default.
        lambda1: Drift to the consensus point; 1 by default.
        sigma1: Noise of that drift; 1 by default.
        lambda2: Drift down the gradient of each particle's own L; 0 by default.
        sigma2: Noise in proportion to that gradient; 0 by default.
        gradient: Gradient of L, [..., d] -> [..., d], or a sequence of K; by default autograd's.
        dt: Step of time; 0.01 by default.
        noise: "isotropic", as in the paper, or "anisotropic", the default, whose convergence does
            not slow down with d.
        delta_q: Addition to the quantile in eq:Q_beta. The adaptive dynamics take it as tolerance:
            points with L up to min L + delta_q count as minimisers.
        radius: R of eq:Q_beta; particles outside of the ball B_R(0) do not count for the consensus
            point. Infinite by default.
        quantile: "plain", q_beta, the default; "averaged", 2/beta times the integral of q_a over
            [beta/2, beta] as in eq:Q_beta; or "smooth", the share u^2 (3 - 2 u) of a particle in
            Q_beta with u = (q_beta + delta_q - L) / (q_beta - q_{beta/2}) cut to [0, 1].
        batch: M; each step computes its consensus point from M random particles. No particle comes
            twice before all have come once.
        update: With `batch`, whether the particles of the "batch" move, the default, or "all".
        adversaries: Malicious particles, one `Adversary` or several.
        polish: Whether a local search (SciPy's Nelder-Mead) improves x where L does not rise.
        maxiter: Largest number of steps; by default 2000, and not limited in the adaptive dynamics.
        maxfev: Largest number of evaluated particles in each run. The first ensemble is always
            evaluated. By default 20,000 d in the adaptive dynamics, otherwise not limited.
        xtol: Spread of a consensus, the root mean squared distance of the benign particles from the
            consensus point. "paper" stops there; 1e-4 by default. An "adaptive" ensemble collapses
            there; by default 1e-7 of the box (1e-5 for float32), which is also the least value.
        constraint_tol: Largest violation of a feasible point, in units of the median violation of
            the first ensemble. An equality counts as met within it.
        errors: "exclude" takes an exception of an objective or a constraint as NaN at that point,
            and warns once; "raise" stops at the exception.
        time_limit: Stop after these seconds.
        callback: Called with the `State` before every step and at the end; True or StopIteration
            stops all runs.
        record_every: Steps between two records of the history and between two tests of `xtol`.
        dtype: torch.float64 or torch.float32.
        device: Device of the particles, such as "cpu" or "cuda".

    Returns:
        The result.

    Raises:
        ConfigError: A setting, an objective or an ensemble is invalid.
        RunError: A run has no particle left.

    Warns:
        CaptureWarning: Adversaries may capture the consensus point of "paper" dynamics: with
            delta_q = 0 if they leave fewer than two benign particles in Q_beta
            (`capture_risk.benign_left`), and if beta is not below w_b / 2.
    """
    # 1. Choose the dynamics, and check the settings.
    own: dict[str, Any] = {
        **{"alpha": alpha, "beta": beta, "lambda1": lambda1, "sigma1": sigma1, "lambda2": lambda2},
        **{"sigma2": sigma2, "dt": dt, "noise": noise, "radius": radius},
        **{"quantile": quantile, "batch": batch, "update": update},
    }
    is_adaptive = settings.choose_dynamics(dynamics, own, not callable(lower)) == "adaptive"
    plain: dict[str, Any] = {
        name: settings.PAPER[name] if value is None else value for name, value in own.items()
    }
    if maxiter is None and not is_adaptive:
        maxiter = settings.PAPER["maxiter"]
    spread_limit = settings.PAPER["xtol"] if xtol is None else xtol
    not_negative = {
        **{"lambda2": plain["lambda2"], "sigma2": plain["sigma2"]},
        **{"delta_q": delta_q, "xtol": spread_limit},
    }
    numbers = {
        **settings.check_positive({"lambda1": plain["lambda1"], "dt": plain["dt"]}),
        **settings.check_positive(
            {"radius": plain["radius"], "time_limit": time_limit}, finite=False
        ),
        **settings.check_positive(not_negative, or_zero=True),
        **settings.check_positive({"constraint_tol": constraint_tol}),
    }
    lambda2 = numbers["lambda2"]
    sigma2 = numbers["sigma2"]
    step_time = numbers["dt"]
    delta_q = numbers["delta_q"]
    time_limit = numbers["time_limit"]
    dim = _optional_count("`dim`", dim)
    runs = _optional_count("`runs`", runs)
    batch = _optional_count("`batch`", batch)
    maxfev = _optional_count("`maxfev`", maxfev)
    record_every = settings.check_count("`record_every`", record_every)
    if maxiter is not None:
        maxiter = settings.check_count("`maxiter`", maxiter, 0)
    settings.check_choices(
        {
            "`noise`": (plain["noise"], ("anisotropic", "isotropic")),
            "`quantile`": (plain["quantile"], ("plain", "averaged", "smooth")),
            "`update`": (plain["update"], ("batch", "all")),
            "`errors`": (errors, ("raise", "exclude")),
            "`dtype`": (dtype, (torch.float64, torch.float32)),
        }
    )
    settings.check_functions("`lower`", lower)
    settings.check_functions(
        "`upper`", upper, or_none=True, hint="; a point to start about is `x0`, by name"
    )
    settings.check_functions("`gradient`", gradient, or_none=True)
    if callback is not None:
        settings.check_function("`callback`", callback)
    settings.check_memory(runs or 1, 1, dim or 1)
    device = settings.check_device(device)

    # 2. Start the runs.
    lower = convert_functions("`lower`", lower, args, errors)
    upper = convert_functions("`upper`", upper, args, errors)
    gradient = convert_functions("`gradient`", gradient, args, errors, vector=True)
    lower, upper = with_constraints(lower, upper, constraints, numbers["constraint_tol"], errors)
    groups = check_adversaries(adversaries)
    shape = OutputShape(
        single_run=runs is None and not has_many_seeds(seed), single_cluster=callable(lower)
    )
    seeds = resolve_seeds(seed, runs)
    if initial is not None and not callable(initial):
        initial = check_ensemble(initial, len(seeds))
    # A gradient that no term reads would cost a backward pass in each step.
    needs_gradient = lambda2 > 0 or sigma2 > 0
    default = settings.PAPER["num_particles"]
    is_default = num_particles is None and not isinstance(initial, Tensor)
    if is_default and dim is not None:  # before a box of a great many coordinates
        count = default_num_particles(dim) if is_adaptive else default
        settings.check_memory(len(seeds), count, dim)
    walls, box = build_box(bounds, initial, x0, spread, dim)
    if is_adaptive:
        default = default_num_particles(len(box[0]))
    clusters = build_clusters(
        lower, upper, gradient if needs_gradient else False, num_particles, initial, default
    )
    num_benign = clusters[-1].rows.stop
    theta = draw_ensembles(initial, box, num_benign, groups, seeds).to(device, dtype)
    if batch is not None and batch > theta.shape[1]:
        raise ConfigError(
            f"`batch` must be at most the number of particles, {theta.shape[1]}, got {batch}"
        )
    if walls is not None:
        walls = (walls[0].to(theta), walls[1].to(theta))
        theta[:, :num_benign].clamp_(*walls)
    is_fixed = walls is not None and bool(walls[0].eq(walls[1]).all())
    if is_fixed:
        _LOGGER.warning("`bounds` fix all coordinates: the result is the only point within them.")
    elif not sigma2 and theta.eq(theta[:, :1]).all(2).all(1).any():
        raise ConfigError(
            "all particles start at one point, and agree before the first step: spread `initial`"
        )
    start = theta[:, :num_benign].aminmax(dim=1)
    system = System(theta, clusters, groups, seeds, flat=shape.single_run, bounds=walls)

    def params_at(n: int) -> ConsensusParams:
        return ConsensusParams(
            settings.schedule_value("alpha", plain["alpha"], n),
            settings.schedule_value("beta", plain["beta"], n),
            delta_q,
            numbers["radius"],
            averaged=plain["quantile"] == "averaged",
            smooth=plain["quantile"] == "smooth",
        )

    hopping = None
    if is_adaptive and not is_fixed:
        if maxfev is None and maxiter is None:
            maxfev = adaptive.EVALUATIONS_PER_DIM * theta.shape[2]
        hopping = AdaptiveDynamics(
            system,
            None if initial is not None else box,
            delta_q=delta_q,
            xtol=xtol,
            maxfev=maxfev,
        )
        # Hopping has no time of its own. Adversaries and the history need one.
        step_time = adaptive.DT
    elif maxiter is None:
        maxiter = settings.PAPER["maxiter"]
    params = params_at(0)
    sigma1_at_start = settings.schedule_value("sigma1", plain["sigma1"], 0)
    notes: tuple[str, ...] = ()
    if hopping is None:
        notes = _theory_notes(
            system, params, sigma1_at_start, numbers["lambda1"], plain["noise"], batch
        )
    _keep_freed_memory()

    # 3. Take steps until all runs have ended.
    started = time.monotonic()
    records: list[tuple[int, Tensor, Tensor, Tensor]] = []
    ends = []
    for n in itertools.count():
        if n > 0 and (callable(plain["alpha"]) or callable(plain["beta"])):
            params = params_at(n)
        is_late = time.monotonic() - started > time_limit
        is_recorded = is_late or n == maxiter or n % record_every == 0
        # Copies for the check cost memory and time, so that only some steps have them.
        system.check_writes = is_recorded
        evaluation = yield from system.evaluate(None if hopping else params, batch)
        if hopping is not None:
            evaluation = hopping.update(system, evaluation)
        if n == 0 and not is_fixed:
            _warn_of_constants(evaluation)

        # 3a. Look for a reason to stop all runs.
        reason = ""
        if n == maxiter:
            reason = f"maxiter = {maxiter} steps were taken"
        elif is_late:
            reason = f"the time limit of {time_limit:g} s passed"
        if callback is not None and callback_requests_stop(
            callback, shape, system, evaluation, n, step_time
        ):
            is_recorded = True
            reason = "the callback stopped the run"
        if maxfev is not None and not reason:
            cost = system.evaluation_cost(batch)
            if hopping is not None:  # x is evaluated again, and a few points if it differs
                cost += adaptive.CONFIRMATION
            if batch is not None:  # whole ensembles at a record and at the end
                cost += (1 + is_recorded) * system.evaluation_cost()
            if system.num_evaluated + cost > maxfev:
                is_recorded = True
                reason = f"another step would evaluate more than maxfev = {maxfev} particles"

        # 3b. Record the spread, and end the runs that agree.
        agreed = hopping.agreed() if hopping is not None else None
        if is_recorded or (agreed is not None and agreed.any()):
            whole = evaluation
            if batch is not None:
                # A record is of the whole ensemble, so that records do not depend on the batch.
                whole = yield from system.evaluate(params)
            distance = system.spread(whole.m)
            records.append((n, system.runs, whole.m, distance))
            if agreed is None:
                agreed = (distance <= spread_limit).all(1).cpu()
            ending = agreed
            if reason:
                ending = torch.ones_like(agreed)
            if ending.any():
                fields = {} if hopping is None else hopping.fields(theta)
                ends.append(finish_runs(system, whole.m, distance, n, agreed, ending, fields))
                if ending.all():
                    break
                # Runs that have ended cost nothing from here on.
                kept = (~ending).nonzero().squeeze(1)
                system.keep_runs(kept)
                if hopping is not None:
                    hopping.keep_runs(kept)
                evaluation = evaluation.for_runs(kept)

        # 3c. Take the step.
        if hopping is not None:
            hopping.step_(system, n, evaluation, params)
            continue
        system.step_(
            n,
            evaluation,
            params,
            lambda1=numbers["lambda1"],
            sigma1=settings.schedule_value("sigma1", plain["sigma1"], n),
            lambda2=lambda2,
            sigma2=sigma2,
            dt=step_time,
            noise=plain["noise"],
            batch_only=plain["update"] == "batch",
        )

    seconds = time.monotonic() - started
    result = yield from count_points(
        build_result(
            ends,
            records,
            shape,
            clusters,
            seeds,
            start=(start.min, start.max),
            walls=walls,
            delta_q=delta_q,
            dt=step_time,
            xtol=spread_limit,
            reason=reason,
            notes=notes,
            seconds=seconds,
            polish=polish,
        )
    )
    return result


def _optional_count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    return settings.check_count(name, value)


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step.

    glibc keeps up to twice the largest block below 32 MiB that was ever freed (mallopt(3),
    M_MMAP_THRESHOLD).
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


def _warn_of_constants(evaluation: Evaluation) -> None:
    """Warn of an objective that does not distinguish the particles of the first ensemble."""
    for values in evaluation.values:
        name = "upper"
        objective = values.upper
        if objective is None:
            name = "lower"
            objective = values.lower
        finite = objective[objective.isfinite()]
        if len(finite) >= _MIN_CONSTANT and finite.eq(finite[0]).all():
            _LOGGER.warning(
                "`%s` is %g at every particle of the first ensemble: no particle is better than"
                " another, and the consensus is their mean.",
                name,
                finite[0],
            )


def _theory_notes(
    system: System,
    params: ConsensusParams,
    sigma1: float,
    lambda1: float,
    noise: str,
    batch: int | None,
) -> tuple[str, ...]:
    """Return remarks of the theory on the settings, and warn of capture."""
    notes = []
    risks = []
    dim = system.theta.shape[-1]
    w_m = system.malicious_mass
    if noise == "isotropic" and 2 * lambda1 <= dim * sigma1**2:
        notes.append(
            f"2 lambda1 = {2 * lambda1:g} <= d sigma1^2 = {dim * sigma1**2:g}: outside the"
            " convergence theorem (thm:main), as many useful settings are"
        )
    if w_m > 0 and system.clusters[0].upper is not None:
        if params.delta_q == 0:
            num_benign = system.num_benign
            if batch is not None:
                num_benign = max(1, round(batch / system.theta.shape[1] * num_benign))
            risk = capture_risk.explain(params, w_m, num_benign, dim)
            if risk:
                risks.append(risk)
        if params.beta >= (1 - w_m) / 2 - 1e-12:
            risks.append(
                f"beta = {params.beta:g} is not below w_b / 2 = {(1 - w_m) / 2:.3g}, which bounds"
                " beta_0 (eq:beta): the sub-level set may have to hold malicious particles that"
                " are bad for L"
            )
    for risk in risks:
        warnings.warn(risk, CaptureWarning, stacklevel=4)
    return (*notes, *risks)

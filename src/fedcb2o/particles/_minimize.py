"""Minimise G over the minimisers of L (eq:bilevel_opt) by particles: CB2O, CBO, FedCBO and FedCB2O, attacked or not.

    theta^i ~ initial                                               for every particle i
    for n = 0, 1, ..., maxiter - 1:
        m       <- average of Q_beta under the weights exp(-alpha G)      eq:consensus_point, consensus.py
        theta^i <- theta^i - lambda1 (theta^i - m) dt + sigma1 sqrt(dt) D(theta^i - m) B^i      eq:dyn_micro2
    the answer is m of the last ensemble

García Trillos et al., "Defending Against Diverse Attacks in Federated Learning Through Consensus-Based Bi-Level
Optimization" (arXiv 2412.02535).
"""

import itertools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fedcb2o.errors import ConfigError
from fedcb2o.particles import capture_risk, settings
from fedcb2o.particles.adversaries import Adversary
from fedcb2o.particles.ask_tell import EvaluationSteps, run_with_objectives
from fedcb2o.particles.dynamics import ConsensusParams
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
from fedcb2o.particles.objectives import Objective, with_args
from fedcb2o.particles.result import OutputShape, Result, build_result, finish_runs
from fedcb2o.particles.settings import Schedule
from fedcb2o.particles.state import State, callback_requests_stop
from fedcb2o.particles.system import System


class CaptureWarning(UserWarning):
    """Malicious particles may capture the consensus point under these settings."""


@run_with_objectives
def minimize(
    lower: Objective | Sequence[Objective],
    upper: Objective | Sequence[Objective | None] | None = None,
    dim: int | None = None,
    *,
    args: Any = (),
    bounds: Any = None,
    x0: Any = None,
    spread: Any = None,
    initial: Any = None,
    num_particles: int | Sequence[int] | None = None,
    runs: int | None = None,
    seed: Seed | Sequence[int] = 0,
    alpha: Schedule = 1000.0,
    beta: Schedule = 0.1,
    lambda1: float = 1.0,
    sigma1: Schedule = 1.0,
    lambda2: float = 0.0,
    sigma2: float = 0.0,
    gradient: Objective | Sequence[Objective] | None = None,
    dt: float = 0.01,
    noise: str = "anisotropic",
    delta_q: float = 0.0,
    radius: float = math.inf,
    quantile: str = "plain",
    batch: int | None = None,
    update: str = "batch",
    adversaries: Adversary | Sequence[Adversary] = (),
    maxiter: int = 2000,
    maxfev: int | None = None,
    xtol: float = 1e-4,
    time_limit: float = math.inf,
    callback: Callable[[State], Any] | None = None,
    record_every: int = 10,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
) -> EvaluationSteps[Result]:
    """Minimise G (`upper`) among the minimisers of L (`lower`), eq:bilevel_opt, by consensus-based optimisation.

    Both are functions of a whole ensemble, [..., d] -> [...], called once a step. Without G it is consensus-based
    optimisation (CBO) of L. With K objectives in `lower` it is the clustered system: FedCB2O (eq:fedcb2o_dynamics) with
    G, FedCBO (eq:fedcbo_dynamic) without, every cluster with its own L, its own particles and its own answer.

    Args:
        lower: L, or a sequence of K.
        upper: G, or a sequence of K, or None.
        dim: d; read from `x0`, `bounds` or `initial` where it is not given.
        args: what `lower`, `upper` and `gradient` get after the ensemble, a tuple or one value.
        bounds: (low, high) for all coordinates, a pair for each, or a scipy.optimize.Bounds; None or infinity is no
            bound. Particles stay inside.
        x0: the point about which particles start; by default the middle of the bounds, else 0 or as near as they allow.
        spread: they start uniformly in x0 +- spread, one number or one for each coordinate, within the bounds; by
            default half of the way from bound to bound, else 3.
        initial: in place of both, an ensemble [n, d] or [runs, n, d], or a sampler (NumPy generator, n, d) -> [n, d].
        num_particles: N, of each cluster; or one number a cluster. By default 200.
        runs: how many independent runs to take in one batch; each equals the run of its seed alone, bit by bit.
        seed: of the first run (the next has seed + 1), or one for each; a generator of NumPy or PyTorch that draws it,
            or None for another one each time. The result has it.
        alpha: weight parameter of exp(-alpha G), a number or a function of the step n; `beta` and `sigma1` likewise.
        beta: share of the ensemble in the sub-level set Q_beta, in (0, 1].
        lambda1: drift to the consensus point.
        sigma1: noise about the consensus point.
        lambda2: drift down the gradient of the particle's own L.
        sigma2: noise of the size of that gradient.
        gradient: the gradient of L, [..., d] -> [..., d], or a sequence of K; by default autograd's.
        dt: step of time.
        noise: "isotropic", as in the paper, or "anisotropic", whose convergence does not slow down with d.
        delta_q: what eq:Q_beta adds to the quantile.
        radius: R of eq:Q_beta; particles outside the ball B_R(0) have no part in the consensus point.
        quantile: "plain", q_beta, or "averaged", 2/beta times the integral of q_a over [beta/2, beta] as in eq:Q_beta.
        batch: M; each step takes its consensus point from M random particles, each particle once before any is again.
        update: with `batch`, whether those of the "batch" move alone or "all" particles do.
        adversaries: malicious particles, one `Adversary` or several.
        maxiter: steps at most.
        maxfev: particles judged at most in each run, as `nfev` counts; the first ensemble is judged in any case.
        xtol: stop where the root mean squared distance of the benign particles from the consensus point is no more.
        time_limit: stop after so many seconds.
        callback: called with the `State` before every step and at the end; True or StopIteration stops all runs.
        record_every: how many steps lie between two records of the history, and two looks at `xtol`.
        dtype: torch.float64 or torch.float32.
        device: where it runs, as "cpu" or "cuda".

    Raises ConfigError for settings, objectives or ensembles that cannot be, RunError where a run has no particle left
    to agree on. Warns with CaptureWarning where adversaries may capture the consensus point: with delta_q = 0 if they
    leave fewer than two benign particles in Q_beta (`capture.benign_left`), and if beta is not below w_b / 2.
    """
    for name, value in {"lambda1": lambda1, "dt": dt}.items():
        settings.check_positive(f"`{name}`", value)
    for name, value in {"radius": radius, "time_limit": time_limit}.items():
        settings.check_positive(f"`{name}`", value, finite=False)
    for name, value in {
        "lambda2": lambda2,
        "sigma2": sigma2,
        "delta_q": delta_q,
        "xtol": xtol,
    }.items():
        settings.check_not_negative(f"`{name}`", value)
    dim, runs, batch, maxfev = (
        None if value is None else settings.check_count(f"`{name}`", value)
        for name, value in (("dim", dim), ("runs", runs), ("batch", batch), ("maxfev", maxfev))
    )
    record_every = settings.check_count("`record_every`", record_every)
    maxiter = settings.check_count("`maxiter`", maxiter, 0)
    settings.check_choices({
        "`noise`": (noise, ("anisotropic", "isotropic")), "`quantile`": (quantile, ("plain", "averaged")),
        "`update`": (update, ("batch", "all")), "`dtype`": (dtype, (torch.float64, torch.float32)),
    })  # fmt: skip
    settings.check_functions("`lower`", lower)
    settings.reject_point("`upper`", upper)
    settings.check_functions("`upper`", upper, or_none=True)
    settings.check_functions("`gradient`", gradient, or_none=True)
    if callback is not None:
        settings.check_function("`callback`", callback)
    settings.check_memory(runs or 1, 1, dim or 1)
    device = settings.check_device(device)
    lower, upper, gradient = (with_args(each, args) for each in (lower, upper, gradient))
    groups = check_adversaries(adversaries)
    shape = OutputShape(
        single_run=runs is None and not has_many_seeds(seed), single_cluster=callable(lower)
    )
    seeds = resolve_seeds(seed, runs)
    if initial is not None and not callable(initial):
        initial = check_ensemble(initial, len(seeds))
    clusters = build_clusters(
        lower, upper, gradient if lambda2 or sigma2 else False, num_particles, initial
    )
    settings.check_memory(
        len(seeds), clusters[-1].rows.stop, dim or 1
    )  # before there is a box of that many coordinates
    walls, box = build_box(bounds, initial, x0, spread, dim)
    theta = draw_ensembles(initial, box, clusters[-1].rows.stop, groups, seeds).to(device, dtype)
    if batch is not None and batch > theta.shape[1]:
        raise ConfigError(
            f"`batch` must be at most the number of particles, {theta.shape[1]}, got {batch}"
        )
    if walls is not None:
        walls = walls[0].to(theta), walls[1].to(theta)
        theta[:, : clusters[-1].rows.stop].clamp_(*walls)
    if not sigma2 and theta.eq(theta[:, :1]).all(2).all(1).any():
        raise ConfigError(
            "all particles start at one point, and agree before they have looked: spread `initial`"
        )
    start = theta[:, : clusters[-1].rows.stop].aminmax(dim=1)
    system = System(theta, clusters, groups, seeds, flat=shape.single_run, bounds=walls)

    def filter_at(n: int) -> ConsensusParams:
        levels = (
            settings.schedule_value("alpha", alpha, n),
            settings.schedule_value("beta", beta, n),
        )
        return ConsensusParams(*levels, delta_q, radius, averaged=quantile == "averaged")

    by = filter_at(0)
    notes = _theory_notes(
        system, by, settings.schedule_value("sigma1", sigma1, 0), lambda1, noise, batch
    )
    _keep_freed_memory()
    started = time.monotonic()
    records = []
    ends = []
    for n in itertools.count():
        if n > 0 and (callable(alpha) or callable(beta)):
            by = filter_at(n)
        late = time.monotonic() - started > time_limit
        looking = late or n == maxiter or n % record_every == 0
        look = yield from system.evaluate(by, batch, check_writes=looking)
        reason = f"the time limit of {time_limit:g} s passed" if late else ""
        reason = f"maxiter = {maxiter} steps were taken" if n == maxiter else reason
        if callback is not None and callback_requests_stop(
            callback, shape, system, look, n, dt, looking
        ):
            looking = True
            reason = "the callback stopped the run"
        if maxfev is not None and not reason:
            further = system.evaluation_cost(batch) + (
                0 if batch is None else (1 + looking) * system.evaluation_cost()
            )
            if system.num_evaluated + further > maxfev:
                looking = True
                reason = f"another step would judge more than maxfev = {maxfev} particles"
        if looking:
            whole = look if batch is None else (yield from system.evaluate(by))
            spread = system.spread(whole.m)
            records.append((n, system.runs, whole.m, spread))
            agreed = (spread <= xtol).all(1).cpu()
            ending = torch.ones_like(agreed) if reason else agreed
            if ending.any():
                ends.append(finish_runs(system, whole.m, spread, n, agreed, ending, reason))
                if ending.all():
                    break
                kept = (~ending).nonzero().squeeze(1)
                system.keep_runs(kept)
                look = look.for_runs(kept)
        system.step_(
            n, look, by, lambda1=lambda1, sigma1=settings.schedule_value("sigma1", sigma1, n), lambda2=lambda2, sigma2=sigma2,
            dt=dt, noise=noise, batch_only=update == "batch", check_writes=looking,
        )  # fmt: skip
    seconds = time.monotonic() - started
    result = yield from build_result(
        ends, records, shape, clusters, seeds, start=(start.min, start.max), walls=walls, delta_q=delta_q, dt=dt,
        xtol=xtol, notes=notes, seconds=seconds,
    )  # fmt: skip
    return result


def _keep_freed_memory() -> None:
    """Have glibc keep what an objective frees in one step for the next one, in place of returning it to the system.

    It keeps up to twice the largest block that was ever freed below 32 MiB (mallopt(3), M_MMAP_THRESHOLD).
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


def _theory_notes(
    system: System,
    by: ConsensusParams,
    sigma1: float,
    lambda1: float,
    noise: str,
    batch: int | None,
) -> tuple[str, ...]:
    """What the theory says on the settings at the start; warns where they are open to capture."""
    notes = []
    open_to = []
    dim = system.theta.shape[-1]
    w_m = system.malicious_mass
    two_levels = system.clusters[0].upper is not None
    if noise == "isotropic" and 2 * lambda1 <= dim * sigma1**2:
        notes.append(
            f"2 lambda1 = {2 * lambda1:g} <= d sigma1^2 = {dim * sigma1**2:g}: outside the convergence theorem"
            " (thm:main), as many useful settings are"
        )
    if w_m > 0 and two_levels:
        seen = 1.0 if batch is None else batch / system.theta.shape[1]
        if by.delta_q == 0 and (
            told := capture_risk.explain(by, w_m, max(1, round(seen * system.num_benign)), dim)
        ):
            open_to.append(told)
        if by.beta >= (1 - w_m) / 2 - 1e-12:
            open_to.append(
                f"beta = {by.beta:g} is not below w_b / 2 = {(1 - w_m) / 2:.3g}, which bounds beta_0 (eq:beta): the"
                " sub-level set may have to hold malicious particles that are bad for L"
            )
    for note in open_to:
        warnings.warn(note, CaptureWarning, stacklevel=4)
    return (*notes, *open_to)

"""The dynamics of the paper: CB2O, CBO, FedCB2O and FedCBO, for all active runs.

m       <- average of Q_beta under the weights exp(-alpha G)            eq:consensus_point
theta^i <- theta^i - lambda1 (theta^i - m) dt                           eq:dyn_micro2
           + sigma1 sqrt(dt) D(theta^i - m) B^i                         for every particle i
"""

import dataclasses
import functools
import itertools
import logging
import math
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.particles import settings
from fedcb2o.particles.ask_tell import EvaluationSteps
from fedcb2o.particles.dynamics import ConsensusParams, Values, consensus_step_, gradient_step_
from fedcb2o.particles.initialisation import Start, Stop
from fedcb2o.particles.settings import Schedule
from fedcb2o.particles.system import Ensembles, Evaluation, System
from fedcb2o.particles.theory import CaptureWarning, explain_capture

_LOGGER = logging.getLogger(__name__)
# Share of the way from the middle of the region to its side from which a point is at the edge.
_EDGE_SHARE = 0.9
_STEP_SIZES = (0.1, 1.0)  # distances of the points further out, in half widths of the region
_MAX_SINGLE_COORDINATES = 32  # coordinates that are tried one by one, after all at once
_BOUNDARY_MESSAGE = (
    "the particles agreed at the edge of where they started, and L or G is less further out:"
    " let them start in a larger box, by `spread`, `bounds` or `initial`"
)
_FAILURE_MESSAGE = "At the edge of the start region, further out L or G failed (%r)."


@dataclasses.dataclass(frozen=True)
class Paper:
    """Parameters of the dynamics of the paper (eq:dyn_micro2, eq:fedcb2o_dynamics).

    Particles move towards the consensus point, with noise in proportion to their distance from it.

    Attributes:
        alpha: Weight parameter of exp(-alpha G), a number or a function of the step n; `beta` and
            `sigma1` likewise.
        beta: Share of the ensemble in the sub-level set Q_beta, in (0, 1].
        lambda1: Drift to the consensus point.
        sigma1: Noise of that drift.
        lambda2: Drift down the gradient of each particle's own L.
        sigma2: Noise in proportion to that gradient.
        dt: Step of time.
        noise: "isotropic", as in the paper, or "anisotropic", whose convergence does not slow down
            with d.
        delta_q: Addition to the quantile in eq:Q_beta.
        radius: R of eq:Q_beta; particles outside of the ball B_R(0) do not count for the consensus
            point.
        quantile: "plain", q_beta; or "averaged", 2/beta times the integral of q_a over
            [beta/2, beta] as in eq:Q_beta.
        batch: M; each step computes its consensus point from M random particles. No particle comes
            twice before all have come once. None for all particles.
        update: With `batch`, whether the particles of the "batch" move, or "all".
        xtol: Spread of a consensus, the root mean squared distance of the benign particles from the
            consensus point; a run stops there.

    Raises:
        ConfigError: A parameter is out of its range.
    """

    alpha: Schedule = 1000.0
    beta: Schedule = 0.1
    lambda1: float = 1.0
    sigma1: Schedule = 1.0
    lambda2: float = 0.0
    sigma2: float = 0.0
    dt: float = 0.01
    noise: str = "anisotropic"
    delta_q: float = 0.0
    radius: float = math.inf
    quantile: str = "plain"
    batch: int | None = None
    update: str = "batch"
    xtol: float = 1e-4

    keeps_x0: ClassVar[bool] = False
    max_steps: ClassVar[int | None] = 2000  # default of maxiter
    fewest_ensembles: ClassVar[int] = 2  # evaluated ones, so that there is a step

    def __post_init__(self) -> None:
        not_negative = ("lambda2", "sigma2", "delta_q", "xtol")
        checked: dict[str, Any] = {
            **settings.check_positive({"lambda1": self.lambda1, "dt": self.dt}),
            **settings.check_positive({"radius": self.radius}, finite=False),
            **settings.check_positive({n: getattr(self, n) for n in not_negative}, or_zero=True),
            "batch": settings.check_optional_count("`batch`", self.batch),
        }
        for name in ("alpha", "beta", "sigma1"):
            if not callable(getattr(self, name)):
                checked[name] = settings.schedule_value(name, getattr(self, name), 0)
        for name, value in checked.items():
            # The checked values replace those of the user, such as a NumPy number by a Python
            # float.
            object.__setattr__(self, name, value)
        settings.check_choices(
            {
                "`noise`": (self.noise, ("anisotropic", "isotropic")),
                "`quantile`": (self.quantile, ("plain", "averaged")),
                "`update`": (self.update, ("batch", "all")),
            }
        )

    @property
    def needs_gradient(self) -> bool:
        """True if a step uses the gradient of L."""
        return self.lambda2 > 0 or self.sigma2 > 0

    @property
    def can_split(self) -> bool:
        """True if particles at one point may move apart."""
        return self.sigma2 > 0

    def default_num_particles(self, dim: int) -> int:
        """Return the default number of particles of a cluster."""
        return 200

    def init(self, start: Start, maxfev: int | None) -> tuple[Ensembles, tuple[str, ...]]:
        """Return the state before the first step, and remarks of the theory on the parameters."""
        system = start.system
        state = start.ensembles()
        if self.batch is not None:
            if self.batch > (most := system.num_particles):
                text = f"the number of particles, {most}, got {self.batch}"
                raise ConfigError(f"`batch` must be at most {text}")
            state = system.draw_batch(state, self.batch)
        return state, self._notes(system, start.theta.shape[-1])

    def tell(
        self, system: System, state: Ensembles, values: list[Values], check_writes: bool
    ) -> Evaluation:
        """Receive the values, and compute the consensus points."""
        # Parameters are checked in each step otherwise, which a small ensemble would notice.
        params = self._constant_params or self._params_at(state.n)
        return system.consensus(state, values, params, check_writes)

    def terminate(self, state: Ensembles, spread: Tensor) -> Tensor:
        """Return whether each run [runs] has reached a consensus in all clusters."""
        return (spread <= self.xtol).all(1).cpu()

    def step(self, system: System, state: Ensembles, info: Evaluation) -> Ensembles:
        """Take an Euler-Maruyama step (eq:fedcb2o_dynamics).

        If `update` is "batch", the particles outside of the batch stay.
        """
        sigma1: Any = self.sigma1
        if callable(sigma1):
            sigma1 = settings.schedule_value("sigma1", sigma1, state.n)

        def move_(benign: Tensor) -> None:
            # The step moves all particles in place; those outside of the batch are put back.
            before = None
            if self.update == "batch" and info.batch is not None:
                before = benign.clone()
            # All clusters draw at once, so that the numbers do not depend on their number.
            n, draw = system.num_benign, state.streams.normals
            normals = draw("noise", n) if sigma1 else None
            gradient_normals = draw("gradient noise", n) if self.sigma2 else None
            is_single = len(system.clusters) == 1

            def part(tensor: Any, rows: slice) -> Any:
                return tensor if tensor is None or is_single else tensor[:, rows]

            for cluster, values, m in zip(system.clusters, info.values, info.points, strict=True):
                rows = cluster.rows
                theta = part(benign, rows)
                consensus_step_(
                    theta,
                    m,
                    part(normals, rows),
                    lambda1=self.lambda1,
                    sigma1=sigma1,
                    dt=self.dt,
                    noise=self.noise,
                )
                if values.gradient is not None:
                    slope, drawn = values.gradient[:, rows], part(gradient_normals, rows)
                    gradient_step_(
                        theta, slope, drawn, lambda2=self.lambda2, sigma2=self.sigma2, dt=self.dt
                    )
            if before is not None and info.batch is not None:
                still = torch.ones(state.theta.shape[:2], dtype=torch.bool, device=benign.device)
                still = still.scatter(1, info.batch, False)[:, : system.num_benign].unsqueeze(-1)
                benign.copy_(torch.where(still, before, benign))

        moved = system.step_(state, info, self.dt, move_)
        return moved if self.batch is None else system.draw_batch(moved, self.batch)

    def best_values(self, system: System, state: Ensembles, info: Evaluation) -> Tensor:
        """Return the least L of each cluster, and G there [runs, clusters, 2]; else L twice."""
        pairs = []
        for cluster, values in zip(system.clusters, info.values, strict=True):
            # Only benign particles: malicious ones may report any value.
            least, rows = values.lower[:, cluster.rows].min(1, keepdim=True)
            upper = least
            if values.upper is not None:
                upper = values.upper[:, cluster.rows].gather(1, rows)
            pairs.append(torch.cat([least, upper], 1))
        return torch.stack(pairs, 1)

    def answers(
        self, system: System, state: Ensembles, m: Tensor, spread: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, the consensus points and their spreads: x is the consensus point."""
        return system.clamp(m), system.clamp(m), spread

    def judge(
        self, ends: Sequence[Any], x: Tensor, at_x: list[Values], start: Start
    ) -> EvaluationSteps[tuple[Tensor, list[Stop]]]:
        """Return whether each run succeeded [runs], and why it ended."""
        agreed = torch.tensor([end.agreed for end in ends])
        success = agreed
        if agreed.any():
            # The comparison is part of `maxfev`, too.
            spent = max(end.nfev for end in ends) + len(start.system.clusters)
            left = math.inf if start.maxfev is None else start.maxfev - spent
            at_boundary = yield from self._is_at_boundary(x, at_x, start, left)
            success = agreed & ~at_boundary.any(1).cpu()
        reached = Stop("success", f"consensus: spread at most xtol = {self.xtol:g}")
        reasons = [
            reached
            if succeeded
            else Stop("boundary", _BOUNDARY_MESSAGE)
            if end.agreed
            else end.stop
            for end, succeeded in zip(ends, success.tolist(), strict=True)
        ]
        return success, reasons

    def _is_at_boundary(
        self, x: Tensor, at_x: list[Values], start: Start, limit: float
    ) -> EvaluationSteps[Tensor]:
        """Return whether points [runs, clusters] at the edge of the start region improve outside.

        Without bounds, particles may leave the region where they start, but not far, because their
        noise shrinks with their distance from the consensus point. L improves where it falls. G
        improves where it falls and L rises by at most delta_q. A side with a bound is not an edge.
        Points where L or G fails count as no improvement. If the comparison needs more than `limit`
        evaluations, a point at the edge counts as one to improve.
        """
        system = start.system
        low, high = (side.unsqueeze(1) for side in start.extent)
        half = (high - low) / 2
        offset = x - (low + high) / 2
        at_edge = (offset.abs() > _EDGE_SHARE * half) & (half > 0)
        if system.bounds is not None:
            # A bound is where the user wants particles to end.
            at_edge &= torch.where(offset > 0, system.bounds[1], system.bounds[0]).isinf()
        improves = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        if not at_edge.any():
            return improves

        # 1. Directions outwards: in all edge coordinates at once, and in the furthest ones alone.
        step = torch.where(at_edge, offset.sign() * half, 0.0).unsqueeze(2)
        # Only the furthest coordinates are tried: in many dimensions each costs an evaluation.
        distance = (step * offset.unsqueeze(2) / half.square().unsqueeze(2)).nan_to_num(0.0)
        furthest = distance.topk(min(_MAX_SINGLE_COORDINATES, x.shape[2])).indices
        single = step.new_zeros(*x.shape[:2], furthest.shape[-1], x.shape[2])
        single.scatter_(3, furthest.movedim(2, 3), step.gather(3, furthest).movedim(2, 3))
        steps = torch.cat([step, single], 2)
        if len(system.clusters) * len(_STEP_SIZES) * steps.shape[2] > limit:
            return at_edge.any(2)

        # 2. Compare the values there with those at the consensus point.
        is_logged = False
        for (k, cluster), size in itertools.product(enumerate(system.clusters), _STEP_SIZES):
            inner = at_x[k]
            points = x[:, k, None] + size * steps[:, k]
            try:
                outer = yield system.final_request(points, cluster)
            except Exception as error:  # a user's function may fail outside of its domain
                if not is_logged:
                    _LOGGER.warning(_FAILURE_MESSAGE, error)
                is_logged = True
                continue
            # Points with L within delta_q count as minimisers of L, so that only G compares them.
            slack = 0.0 if outer.upper is None else self.delta_q
            better = outer.lower < inner.lower - slack
            if outer.upper is not None and inner.upper is not None:
                better |= (outer.lower <= inner.lower + slack) & (outer.upper < inner.upper)
            improves[:, k] |= better.any(1) & at_edge[:, k].any(1)
        return improves

    @functools.cached_property
    def _constant_params(self) -> ConsensusParams | None:
        """Parameters of all steps; None where a schedule changes them."""
        if callable(self.alpha) or callable(self.beta):
            return None
        return self._params_at(0)

    def _params_at(self, n: int) -> ConsensusParams:
        return ConsensusParams(
            settings.schedule_value("alpha", self.alpha, n),
            settings.schedule_value("beta", self.beta, n),
            self.delta_q,
            self.radius,
            averaged=self.quantile == "averaged",
        )

    def _notes(self, system: System, dim: int) -> tuple[str, ...]:
        """Return remarks of the theory on the parameters, and warn of capture."""
        params = self._params_at(0)
        sigma1 = settings.schedule_value("sigma1", self.sigma1, 0)
        notes = []
        risks = []
        w_m = system.malicious_mass
        if self.noise == "isotropic" and 2 * self.lambda1 <= dim * sigma1**2:
            notes.append(
                f"2 lambda1 = {2 * self.lambda1:g} <= d sigma1^2 = {dim * sigma1**2:g}: outside the"
                " convergence theorem (thm:main), as many useful settings are"
            )
        if w_m > 0 and system.clusters[0].upper is not None:
            if params.delta_q == 0:
                num_benign = system.num_benign
                if self.batch is not None:
                    # The sub-level set is one of the batch, with its share of benign particles.
                    num_benign = max(1, round(self.batch / system.num_particles * num_benign))
                risks += explain_capture(params, w_m, num_benign, dim)
            if params.beta >= (1 - w_m) / 2 - 1e-12:
                risks.append(
                    f"beta = {params.beta:g} is not below w_b / 2 = {(1 - w_m) / 2:.3g}, which"
                    " bounds beta_0 (eq:beta): the sub-level set may have to hold malicious"
                    " particles that are bad for L"
                )
        for risk in risks:
            warnings.warn(risk, CaptureWarning, stacklevel=6)
        return (*notes, *risks)

"""The dynamics of the paper: CB2O, CBO, FedCB2O and FedCBO, for all active runs.

    m       <- average of Q_beta under the weights exp(-alpha G)            eq:consensus_point
    theta^i <- theta^i - lambda1 (theta^i - m) dt                           eq:dyn_micro2
               + sigma1 sqrt(dt) D(theta^i - m) B^i                         for every particle i

García Trillos et al., "Defending Against Diverse Attacks in Federated Learning Through
Consensus-Based Bi-Level Optimization" (arXiv 2412.02535).

Example:
    >>> Paper(beta=0.05, noise="isotropic").sigma1
    1.0
"""

import dataclasses
import functools
import math
import warnings
from typing import ClassVar

from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.particles import capture_risk, settings
from fedcb2o.particles.ask_tell import EvaluationRequest, EvaluationSteps
from fedcb2o.particles.boundary_check import is_boundary_consensus
from fedcb2o.particles.capture_risk import CaptureWarning
from fedcb2o.particles.dynamics import ConsensusParams, Values
from fedcb2o.particles.initialisation import Start, Stop
from fedcb2o.particles.settings import Schedule
from fedcb2o.particles.system import Ensembles, Evaluation, System

_MAX_STEPS = 2000  # default of maxiter
_CONSENSUS_MESSAGE = "consensus: spread at most xtol = {:g}"
_BOUNDARY_MESSAGE = (
    "the particles agreed at the edge of where they started, and L or G is less further out:"
    " let them start in a larger box, by `spread`, `bounds` or `initial`"
)


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
        quantile: "plain", q_beta; "averaged", 2/beta times the integral of q_a over [beta/2, beta]
            as in eq:Q_beta; or "smooth", the share u^2 (3 - 2 u) of a particle in Q_beta with
            u = (q_beta + delta_q - L) / (q_beta - q_{beta/2}) cut to [0, 1].
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

    def __post_init__(self) -> None:
        """Check the parameters, and convert them to plain numbers."""
        not_negative = {name: getattr(self, name) for name in ("lambda2", "sigma2", "delta_q")}
        not_negative["xtol"] = self.xtol
        checked = {
            **settings.check_positive({"lambda1": self.lambda1, "dt": self.dt}),
            **settings.check_positive({"radius": self.radius}, finite=False),
            **settings.check_positive(not_negative, or_zero=True),
        }
        for name in ("alpha", "beta", "sigma1"):
            if not callable(getattr(self, name)):
                checked[name] = settings.schedule_value(name, getattr(self, name), 0)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "batch", settings.check_optional_count("`batch`", self.batch))
        settings.check_choices(
            {
                "`noise`": (self.noise, ("anisotropic", "isotropic")),
                "`quantile`": (self.quantile, ("plain", "averaged", "smooth")),
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

    def default_limits(
        self,
        maxiter: int | None,
        maxfev: int | None,
        dim: int,
    ) -> tuple[int | None, int | None]:
        """Return the largest numbers of steps and of evaluations."""
        return _MAX_STEPS if maxiter is None else maxiter, maxfev

    def init(self, start: Start, maxfev: int | None) -> tuple[Ensembles, tuple[str, ...]]:
        """Return the state before the first step, and remarks of the theory on the parameters."""
        system = start.system
        if self.batch is not None and self.batch > system.num_particles:
            raise ConfigError(
                f"`batch` must be at most the number of particles, {system.num_particles},"
                f" got {self.batch}"
            )
        notes: tuple[str, ...] = self._notes(system, start.theta.shape[-1])
        state = start.ensembles()
        if self.batch is not None:
            state = system.draw_batch(state, self.batch)
        return state, notes

    def ask(self, system: System, state: Ensembles, check_writes: bool) -> list[EvaluationRequest]:
        """Return the requests for the values of the particles."""
        return system.ask(state, check_writes, self.radius)

    def tell(
        self, system: System, state: Ensembles, values: list[Values], check_writes: bool
    ) -> tuple[Ensembles, Evaluation]:
        """Receive the values, and compute the consensus points."""
        params = self._constant_params or self._params_at(state.n)
        info = system.consensus(state, values, params, check_writes)
        return system.count(state, values), info

    def terminate(self, state: Ensembles, spread: Tensor) -> Tensor:
        """Return whether each run [runs] has reached a consensus in all clusters."""
        return (spread <= self.xtol).all(1).cpu()

    def step(self, system: System, state: Ensembles, info: Evaluation) -> Ensembles:
        """Move the particles."""
        sigma1 = self.sigma1
        if callable(sigma1):
            sigma1 = settings.schedule_value("sigma1", sigma1, state.n)
        moved = system.step_(
            state,
            info,
            lambda1=self.lambda1,
            sigma1=sigma1,
            lambda2=self.lambda2,
            sigma2=self.sigma2,
            dt=self.dt,
            noise=self.noise,
            batch_only=self.update == "batch",
        )
        return moved if self.batch is None else system.draw_batch(moved, self.batch)

    def fields(self, state: Ensembles) -> dict[str, Tensor]:
        """Return further fields of the ended runs: x is the consensus point."""
        return {}

    def confirm_(
        self,
        final: dict[str, Tensor],
        at_x: list[Values],
        start: Start,
    ) -> EvaluationSteps[bool]:
        """Keep x, which no single evaluation chose."""
        yield from ()
        return False

    def judge(
        self, final: dict[str, Tensor], at_x: list[Values], start: Start, stops: list[Stop]
    ) -> EvaluationSteps[tuple[Tensor, list[Stop]]]:
        """Return whether each run succeeded [runs], and why it ended."""
        agreed = final["success"]
        success = agreed
        if agreed.any():
            left = math.inf
            if start.maxfev is not None:
                left = start.maxfev - int(final["nfev"].max()) - len(start.system.clusters)
            at_boundary = yield from is_boundary_consensus(
                final["x"],
                at_x,
                start.extent,
                start.system.clusters,
                walls=start.system.bounds,
                delta_q=self.delta_q,
                flat=start.system.flat,
                limit=left,
            )
            success = agreed & ~at_boundary.any(1).cpu()
        reasons = []
        for run, succeeded in enumerate(success.tolist()):
            reason = stops[run]
            if succeeded:
                reason = Stop("success", _CONSENSUS_MESSAGE.format(self.xtol))
            elif agreed[run]:
                reason = Stop("boundary", _BOUNDARY_MESSAGE)
            reasons.append(reason)
        return success, reasons

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
            smooth=self.quantile == "smooth",
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
                    num_benign = max(1, round(self.batch / system.num_particles * num_benign))
                risk = capture_risk.explain(params, w_m, num_benign, dim)
                if risk:
                    risks.append(risk)
            if params.beta >= (1 - w_m) / 2 - 1e-12:
                risks.append(
                    f"beta = {params.beta:g} is not below w_b / 2 = {(1 - w_m) / 2:.3g}, which"
                    " bounds beta_0 (eq:beta): the sub-level set may have to hold malicious"
                    " particles that are bad for L"
                )
        for risk in risks:
            warnings.warn(risk, CaptureWarning, stacklevel=6)
        return (*notes, *risks)

"""The particles of all active runs in one [runs, n, d] tensor.

Benign particles come first, cluster by cluster, then the malicious ones.

The system applies the mathematics of `dynamics`. Stopping, recording and validation of settings
belong to `minimize`.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcb2o import consensus
from fedcb2o.errors import ConfigError
from fedcb2o.particles.adversaries import Adversary, View
from fedcb2o.particles.ask_tell import EvaluationRequest, EvaluationSteps
from fedcb2o.particles.constraints import Constraints
from fedcb2o.particles.dynamics import (
    ConsensusParams,
    Values,
    consensus_point,
    consensus_step_,
    consensus_weights,
    gradient_step_,
)
from fedcb2o.particles.noise import Normals
from fedcb2o.particles.objectives import Objective
from fedcb2o.particles.write_guard import require_unwritten, write_count
from fedcb2o.rng import stream

_PLAIN = ConsensusParams(alpha=0.0, beta=1.0)  # of requests whose values alone count


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The benign particles of one cluster: their objectives and their rows."""

    lower: Objective
    # G, or None.
    upper: Objective | None
    # Gradient of L: a function, True for autograd, False for none.
    gradient: Objective | bool
    rows: slice


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Values and consensus points before a step."""

    values: list[Values]
    # Consensus points [runs, clusters, d].
    m: Tensor
    # Rows of the random batch behind the consensus points [runs, M]; None for all.
    batch: Tensor | None
    # Whether the values are those of all particles, not only of the batch.
    covers_all: bool

    def for_runs(self, kept: Tensor) -> "Evaluation":
        """Return the evaluation of a part of the runs."""
        batch = self.batch
        if batch is not None:
            batch = batch[kept]
        values = [item.map(lambda tensor: tensor[kept]) for item in self.values]
        return Evaluation(values, self.m[kept], batch, self.covers_all)


class System:
    """The ensembles and random streams of the active runs.

    Steps change the ensembles in place. `theta` has all particles [runs, n, d]. `mass` is the share
    of each particle in the measure; None for equal shares. `num_evaluated` counts evaluated
    particles of each run, once per cluster. `bounds` are the low and high ends for the benign
    particles. `check_writes` notices writes of user functions by way of NumPy too.
    """

    def __init__(
        self,
        theta: Tensor,
        clusters: Sequence[Cluster],
        adversaries: Sequence[Adversary],
        seeds: Sequence[int],
        *,
        flat: bool,
        bounds: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Start the runs."""
        self.theta = theta
        self.clusters = clusters
        self.seeds = list(seeds)
        self.runs = torch.arange(len(seeds))
        self.num_benign: int = clusters[-1].rows.stop
        sizes = (adversary.num_particles for adversary in adversaries)
        ends = itertools.accumulate(sizes, initial=self.num_benign)
        self.adversaries = [
            (adversary, slice(*rows))
            for adversary, rows in zip(adversaries, itertools.pairwise(ends), strict=True)
        ]
        self.mass = _mass(theta, self.num_benign, adversaries)
        self.num_evaluated = 0
        self.excluded = torch.zeros(len(seeds), dtype=torch.long)
        self.check_writes = True
        self._flat = flat
        self.bounds = bounds
        self._m_bounds = None if adversaries else bounds
        self._is_fixed: Tensor | None = None
        if self._m_bounds is not None and self._m_bounds[0].eq(self._m_bounds[1]).any():
            self._is_fixed = self._m_bounds[0] == self._m_bounds[1]
        self._normals: dict[str, Normals] = {}
        self._streams: dict[str, list[np.random.Generator]] = {}
        self._order = torch.empty(len(seeds), 0, dtype=torch.long)
        self._split_clusters()

    @property
    def benign(self) -> Tensor:
        """The benign particles, a view [runs, n, d] of the first rows of `theta`."""
        return self.theta[:, : self.num_benign]

    @property
    def malicious(self) -> Tensor:
        """The malicious particles, a view [runs, n_m, d] of the last rows of `theta`.

        n_m is 0 without adversaries.
        """
        return self.theta[:, self.num_benign :]

    @property
    def malicious_mass(self) -> float:
        """Share w_m of the malicious particles in the measure; n_m / n with equal shares."""
        if self.mass is None:
            n: int = self.theta.shape[1]
            return (n - self.num_benign) / n
        return float(self.mass[self.num_benign :].sum())

    def evaluate(
        self, params: ConsensusParams | None, batch: int | None = None
    ) -> EvaluationSteps[Evaluation]:
        """Evaluate all particles or the next batch, and find the consensus points.

        Batches are parts of a random order of the particles. The order is drawn anew when fewer
        particles than a batch are left (Carrillo, Jin, Li and Zhu, "A consensus-based global
        optimization method for high dimensional machine learning problems", 2021, Algorithm 2.1).
        `batch` is its size M; None means all particles. Without `params` there are no consensus
        points, only values.
        """
        rows = None
        counted = self.theta
        mass = self.mass
        if batch is not None:
            rows = self._next_batch(batch)
            counted = _gather_rows(self.theta, rows)
            if mass is not None:
                mass = mass[rows]

        # 1. Request the values.
        covers_all = self._evaluates_all(batch)
        evaluated = self.theta if covers_all else counted
        all_values = []
        for cluster in self.clusters:
            request = self._request(evaluated, cluster, params or _PLAIN, cluster.gradient)
            all_values.append((yield request))
        self.num_evaluated += self.evaluation_cost(batch)

        # 2. Compute the consensus points.
        points = []
        for values in all_values:
            if values.excluded is not None:
                self.excluded += values.excluded.sum(-1).cpu()
            if rows is not None and covers_all:
                values = values.map(functools.partial(_gather_rows, rows=rows))
            if params is None:
                points.append(self.theta[:, 0])
                continue
            points.append(consensus_point(counted, values, params, mass))
        m = torch.stack(points, 1) if len(points) > 1 else points[0].unsqueeze(1)
        if self._is_fixed is not None:  # an average of equal numbers may round to another one
            m = torch.where(self._is_fixed, self.theta[:, :1], m)
        return Evaluation(all_values, m, rows, covers_all)

    def evaluation_cost(self, batch: int | None = None) -> int:
        """Return the particles of each run in the next evaluation, counted once per cluster."""
        if batch is None or self._evaluates_all(batch):
            batch = self.theta.shape[1]
        return len(self.clusters) * batch

    def _evaluates_all(self, batch: int | None) -> bool:
        # Every particle needs its gradient. Without gradients, only the batch is evaluated.
        return batch is None or any(cluster.gradient for cluster in self.clusters)

    def spread(self, m: Tensor) -> Tensor:
        """Return the root mean squared distance of each cluster from its consensus point.

        Consensus points [runs, clusters, d] have distances [runs, clusters].
        """
        squares = [
            (theta - m[:, k : k + 1]).square_().sum(-1).mean(-1)
            for k, (theta, _) in enumerate(self._parts)
        ]
        return torch.stack(squares, 1).sqrt()

    def step_(
        self,
        n: int,
        evaluation: Evaluation,
        params: ConsensusParams,
        *,
        lambda1: float,
        sigma1: float,
        lambda2: float,
        sigma2: float,
        dt: float,
        noise: str,
        batch_only: bool = False,
    ) -> None:
        """Take an Euler-Maruyama step of all particles (eq:fedcb2o_dynamics, eq:dyn_macro).

        All particles, benign and malicious, move from the same theta_t. `evaluation` is that before
        the step. With `batch_only` only the particles of the batch move.
        """
        moves = self._malicious_moves(n, evaluation, params, dt)
        before = None
        if batch_only and evaluation.batch is not None:
            before = self.benign.clone()
        normals = None
        if sigma1:
            normals = self._draw("noise", self.num_benign)
        gradient_normals = None
        if sigma2:
            gradient_normals = self._draw("gradient noise", self.num_benign)

        # 1. Move the benign particles of each cluster.
        for k, (theta, rows) in enumerate(self._parts):
            consensus_step_(
                theta,
                evaluation.m.select(1, k),
                _rows_or_all(normals, rows),
                lambda1=lambda1,
                sigma1=sigma1,
                dt=dt,
                noise=noise,
            )
            gradient = evaluation.values[k].gradient
            if gradient is not None:
                gradient_step_(
                    theta,
                    gradient[:, self.clusters[k].rows],
                    _rows_or_all(gradient_normals, rows),
                    lambda2=lambda2,
                    sigma2=sigma2,
                    dt=dt,
                )

        # 2. Restore those outside the batch.
        if before is not None and evaluation.batch is not None:
            still = torch.ones(self.theta.shape[:2], dtype=torch.bool, device=self.theta.device)
            still = still.scatter(1, evaluation.batch, False)
            still = still[:, : self.num_benign].unsqueeze(-1)
            self.benign.copy_(torch.where(still, before, self.benign))
        self._finish_step_(moves)

    def replace_(
        self,
        n: int,
        evaluation: Evaluation,
        params: ConsensusParams,
        points: Tensor,
        dt: float,
    ) -> None:
        """Replace the benign particles, and move the malicious ones.

        `evaluation` is that before the step. `params` are those of the consensus points in the view
        of adversaries.
        """
        moves = self._malicious_moves(n, evaluation, params, dt)
        self.benign.copy_(points)
        self._finish_step_(moves)

    def clamp(self, m: Tensor) -> Tensor:
        """Return consensus points inside the bounds, which rounding may have left.

        Those that malicious particles moved outside stay there.
        """
        return m if self._m_bounds is None else m.clamp(*self._m_bounds)

    @contextlib.contextmanager
    def forbid_writes(self, name: str, function: Callable[..., Any], m: Tensor) -> Iterator[None]:
        """Refuse writes into particles or consensus points inside a `with` block.

        A write is a ConfigError that names `function`.
        """
        guarded = ((self.theta, "particles"), (m, "consensus points"))
        before = [(write_count(x), x.clone() if self.check_writes else None) for x, _ in guarded]
        yield
        for (x, kind), (count, copy) in zip(guarded, before, strict=True):
            require_unwritten(name, function, x, count, copy, kind)

    def keep_runs(self, kept: Tensor) -> None:
        """Continue with a part of the active runs."""
        chosen = kept.tolist()
        self.theta = self.theta[kept.to(self.theta.device)]
        self.runs = self.runs[kept]
        self.excluded = self.excluded[kept]
        self.seeds = [self.seeds[run] for run in chosen]
        self._order = self._order[kept.to(self._order.device)]
        for name, generators in self._streams.items():
            self._streams[name] = [generators[run] for run in chosen]
        self._split_clusters()
        for normals in self._normals.values():
            normals.keep_runs(chosen)

    def _next_batch(self, size: int) -> Tensor:
        if self._order.shape[1] < size:
            n = self.theta.shape[1]
            orders = [
                torch.from_numpy(generator.permutation(n))
                for generator in self._generators("batches")
            ]
            self._order = torch.stack(orders).to(self.theta.device)
        rows = self._order[:, :size]
        self._order = self._order[:, size:]
        return rows

    def _request(
        self,
        theta: Tensor,
        cluster: Cluster,
        params: ConsensusParams,
        gradient: Objective | bool = False,
    ) -> EvaluationRequest:
        lower = cluster.lower
        if isinstance(lower, Constraints):
            lower = lower.for_runs(self.runs)
        return EvaluationRequest(
            theta,
            lower,
            cluster.upper,
            self._flat,
            gradient,
            params.radius,
            self.check_writes,
        )

    def _split_clusters(self) -> None:
        """Set each cluster's particles and their rows (None for all)."""
        is_single = len(self.clusters) == 1
        self._parts = [
            (self.theta[:, cluster.rows], None if is_single else cluster.rows)
            for cluster in self.clusters
        ]

    def _generators(self, name: str) -> list[np.random.Generator]:
        """Return the generators of a purpose, one per run."""
        if name not in self._streams:
            self._streams[name] = [stream(seed, "particles", name) for seed in self.seeds]
        return self._streams[name]

    def _draw(self, purpose: str, n: int) -> Tensor:
        if purpose not in self._normals:
            self._normals[purpose] = Normals(
                self.seeds,
                f"particles {purpose}",
                n,
                self.theta.shape[-1],
                dtype=self.theta.dtype,
                device=self.theta.device,
            )
        return self._normals[purpose].next()

    def _malicious_moves(
        self, n: int, evaluation: Evaluation, params: ConsensusParams, dt: float
    ) -> list[Tensor]:
        """Return each adversary's particles after the step."""
        return [
            self._move(n, evaluation, params, adversary, rows, dt)
            for adversary, rows in self.adversaries
        ]

    def _finish_step_(self, moves: list[Tensor]) -> None:
        """Apply the bounds, and move the malicious particles."""
        if self.bounds is not None:
            self.benign.clamp_(*self.bounds)
        for (_, rows), moved in zip(self.adversaries, moves, strict=True):
            self.theta[:, rows] = moved

    def _move(
        self,
        n: int,
        evaluation: Evaluation,
        params: ConsensusParams,
        adversary: Adversary,
        rows: slice,
        dt: float,
    ) -> Tensor:
        """Return an adversary's particles after the step (eq:dyn_macro_m)."""
        theta_m = self.theta[:, rows]
        view = View(
            n=n,
            t=n * dt,
            dt=dt,
            theta=self.benign,
            theta_m=theta_m,
            m=evaluation.m,
            m_if=lambda points: self._consensus_if(points, evaluation, params, rows),
            m_without=lambda: self._consensus_if(None, evaluation, params, rows)[:, 0],
            generators=self._generators("adversaries"),
        )

        # 1. Call the user's function and check its result.
        name = "an adversary's `move`"
        with self.forbid_writes(name, adversary.move, evaluation.m):
            pair = adversary.move(view)
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ConfigError(
                "an adversary's `move` must return the pair (a_t, A_t),"
                f" got a {type(pair).__name__}"
            )
        drift, diffusion = pair
        for term, value in (("drift a_t", drift), ("diffusion A_t", diffusion)):
            if not isinstance(value, Tensor | float | int):
                raise ConfigError(
                    f"an adversary's {term} must be a tensor or a number,"
                    f" got a {type(value).__name__}"
                )
            if isinstance(value, Tensor) and value.is_complex():
                raise ConfigError(f"an adversary's {term} must be real, got {value.dtype}")

        # 2. Take the step.
        try:
            moved = theta_m + torch.as_tensor(drift).to(theta_m) * dt
            if isinstance(diffusion, Tensor) or diffusion:
                matrix = torch.as_tensor(diffusion).to(theta_m)
                normals = self._draw(f"adversary {rows.start}", theta_m.shape[1]) * math.sqrt(dt)
                if matrix.ndim == theta_m.ndim + 1:
                    increment = (matrix @ normals.unsqueeze(-1)).squeeze(-1)
                else:
                    increment = matrix * normals
                moved = moved + increment
        except RuntimeError as error:
            raise ConfigError(
                f"an adversary's drift or diffusion does not fit {[*theta_m.shape]}: {error}"
            ) from error
        if moved.shape != theta_m.shape:
            raise ConfigError(
                f"an adversary's drift and diffusion must broadcast to {[*theta_m.shape]},"
                f" they gave {[*moved.shape]}"
            )
        return moved

    def _consensus_if(
        self,
        points: Tensor | None,
        evaluation: Evaluation,
        params: ConsensusParams,
        rows: slice,
    ) -> Tensor:
        """Return the consensus points with all particles of `rows` at each point.

        Shape [runs, c, clusters, d]. Without points, those without these particles,
        [runs, 1, clusters, d].
        """
        size = rows.stop - rows.start
        n = self.theta.shape[1]
        remaining = [row for row in range(n) if not rows.start <= row < rows.stop]
        mass = None if self.mass is None else self.mass[remaining]
        if mass is not None and points is not None:
            mass = torch.cat([mass, self.mass[rows]])  # type: ignore[index]

        results = []
        for cluster, values in zip(self.clusters, evaluation.values, strict=True):
            if not evaluation.covers_all:
                values = self._request(self.theta, cluster, params).evaluate()
                self.num_evaluated += n
            values = values.map(lambda tensor: tensor[:, remaining].unsqueeze(1))
            others = self.theta[:, remaining].unsqueeze(1)
            if values.excluded is not None:
                others = others.masked_fill(values.excluded.unsqueeze(-1), 0.0)
            if points is None:
                mu = consensus_weights(values, params, mass)
                results.append(consensus.point(mu, others))
                continue

            at_points = self._request(points, cluster, params).evaluate()
            self.num_evaluated += points.shape[1]
            at_points = at_points.map(lambda tensor: tensor.unsqueeze(2).expand(-1, -1, size))
            mu = consensus_weights(_concatenate(values, at_points), params, mass)
            moved_mass = mu[..., -size:].sum(-1, keepdim=True)
            results.append(consensus.point(mu[..., :-size], others) + moved_mass * points)
        return torch.stack(results, 2)


def _rows_or_all(normals: Tensor | None, rows: slice | None) -> Tensor | None:
    if normals is None or rows is None:
        return normals
    return normals[:, rows]


def _concatenate(first: Values, second: Values) -> Values:
    """Concatenate the values of two ensembles, [runs, 1, n] and [runs, c, n_m]."""

    def join(left: Tensor | None, right: Tensor | None) -> Any:
        if left is None or right is None:
            return None
        return torch.cat([left.expand(-1, right.shape[1], -1), right], -1)

    lower = join(first.lower, second.lower)
    excluded = None
    if first.excluded is not None or second.excluded is not None:
        excluded = lower.isinf()
    upper = join(first.upper, second.upper)
    return Values(lower, upper, None, join(first.in_ball, second.in_ball), excluded)


def _gather_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Gather each run's rows of [runs, n] or [runs, n, d]."""
    if values.ndim == 2:
        return values.gather(1, rows)
    return values.gather(1, rows.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


def _mass(theta: Tensor, num_benign: int, adversaries: Sequence[Adversary]) -> Tensor | None:
    """Return each particle's share in rho = w_b rho^b + w_m rho^m (eq:dyn_macro).

    None stands for equal shares.
    """
    if all(adversary.mass is None for adversary in adversaries):
        return None

    fixed = sum(adversary.mass for adversary in adversaries if adversary.mass is not None)
    if fixed >= 1:
        raise ConfigError(f"the adversaries' `mass` must add up to less than 1, got {fixed:g}")
    counts = (adversary.num_particles for adversary in adversaries if adversary.mass is None)
    equal_share = (1 - fixed) / (num_benign + sum(counts))
    mass = theta.new_full(theta.shape[1:2], equal_share, dtype=torch.float64)
    start = num_benign
    for adversary in adversaries:
        stop = start + adversary.num_particles
        if adversary.mass is not None:
            mass[start:stop] = adversary.mass / adversary.num_particles
        start = stop
    return mass

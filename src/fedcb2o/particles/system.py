"""The particles of all runs under way: benign ones of every cluster, then malicious ones, in one [runs, n, d] tensor.

It knows the mathematics of `dynamics` and nothing of stopping, recording or checking, which is `minimize`'s.
"""

import contextlib
import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The benign particles of one cluster: their objectives, and which rows they are."""

    lower: Objective
    upper: Objective | None
    gradient: Objective | bool
    rows: slice


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What the benign particles find before a step: the values for every cluster and its consensus point.

    `batch` are the rows that the consensus points are of, [runs, M], or None: all. The values are those of all
    particles where they are `whole`, else of the batch.
    """

    values: list[Values]
    m: Tensor
    batch: Tensor | None
    covers_all: bool

    def for_runs(self, kept: Tensor) -> "Evaluation":
        """The same for some of the runs."""
        batch = None if self.batch is None else self.batch[kept]
        return Evaluation(
            [values.map(lambda part: part[kept]) for values in self.values],
            self.m[kept],
            batch,
            self.covers_all,
        )


class System:
    """The ensembles of the runs under way, and the streams that move them; steps are taken in place."""

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
        self.theta = theta
        self.clusters = clusters
        self.seeds = list(seeds)
        self.runs = torch.arange(len(seeds))
        self.num_benign: int = clusters[-1].rows.stop
        ends = itertools.accumulate(
            (each.num_particles for each in adversaries), initial=self.num_benign
        )
        self.adversaries = [
            (each, slice(*rows))
            for each, rows in zip(adversaries, itertools.pairwise(ends), strict=True)
        ]
        self.mass = _mass(theta, self.num_benign, adversaries)
        self.num_evaluated = 0  # particles of each run, once for every cluster
        self.excluded = torch.zeros(len(seeds), dtype=torch.long)
        self._flat = flat
        self._bounds = bounds
        self._normals: dict[str, Normals] = {}
        self._streams: dict[str, list[np.random.Generator]] = {}
        self._order = torch.empty(len(seeds), 0, dtype=torch.long)
        self._split_clusters()

    @property
    def benign(self) -> Tensor:
        """The benign particles, [runs, n, d]."""
        return self.theta[:, : self.num_benign]

    @property
    def malicious(self) -> Tensor:
        """The malicious particles, [runs, n_m, d]."""
        return self.theta[:, self.num_benign :]

    @property
    def malicious_mass(self) -> float:
        """w_m, the share of the malicious particles in the measure."""
        if self.mass is None:
            n: int = self.theta.shape[1]
            return (n - self.num_benign) / n
        return float(self.mass[self.num_benign :].sum())

    def evaluate(
        self, params: ConsensusParams, batch: int | None = None, check_writes: bool = False
    ) -> EvaluationSteps[Evaluation]:
        """Have all particles judged, or each run's next random batch, and find the consensus points.

        Looked at `closely`, functions that write into the particles by way of NumPy are noticed too.

        The batches are parts of a random order of the particles, which is drawn anew when fewer than a batch are left
        (Carrillo, Jin, Li and Zhu, "A consensus-based global optimization method for high dimensional machine learning
        problems", 2021, Algorithm 2.1).
        """
        theta = self.theta
        mass = self.mass
        rows = None if batch is None else self._next_batch(batch)
        mass = mass if mass is None or rows is None else mass[rows]
        whole = self._evaluates_all(batch)
        seen = theta if rows is None else _gather_rows(theta, rows)
        judged = theta if whole else seen
        values = []
        for cluster in self.clusters:
            values.append(
                (yield self._request(judged, cluster, params, cluster.gradient, check_writes))
            )
        self.num_evaluated += self.evaluation_cost(batch)
        m = []
        for each in values:
            if each.excluded is not None:
                self.excluded += each.excluded.sum(-1).cpu()
            counted = (
                each
                if rows is None or not whole
                else each.map(lambda part: _gather_rows(part, rows))
            )
            m.append(consensus_point(seen, counted, params, mass))
        return Evaluation(
            values, torch.stack(m, 1) if len(m) > 1 else m[0].unsqueeze(1), rows, whole
        )

    def evaluation_cost(self, batch: int | None = None) -> int:
        """How many particles of each run the next look judges, each once for every cluster."""
        return len(self.clusters) * (self.theta.shape[1] if self._evaluates_all(batch) else batch)  # type: ignore[operator]

    def _evaluates_all(self, batch: int | None) -> bool:
        # The gradient is every particle's own affair; without it, those outside the batch need not be judged.
        return batch is None or any(each.gradient for each in self.clusters)

    def spread(self, m: Tensor) -> Tensor:
        """The root mean squared distance of each cluster's particles from its consensus point, [runs, clusters]."""
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
        check_writes: bool = False,
    ) -> None:
        """One Euler-Maruyama step of all particles (eq:fedcb2o_dynamics, eq:dyn_macro), all from the same theta_t."""
        moves = [
            self._move(n, evaluation, params, group, rows, dt, check_writes)
            for group, rows in self.adversaries
        ]
        before = self.benign.clone() if batch_only and evaluation.batch is not None else None
        normals = self._draw("noise", self.num_benign) if sigma1 else None
        shaking = self._draw("gradient noise", self.num_benign) if sigma2 else None
        for k, (theta, rows) in enumerate(self._parts):
            consensus_step_(
                theta,
                evaluation.m.select(1, k),
                normals if normals is None or rows is None else normals[:, rows],
                lambda1=lambda1,
                sigma1=sigma1,
                dt=dt,
                noise=noise,
            )
            slope = evaluation.values[k].gradient
            if slope is not None:
                shake = shaking if shaking is None or rows is None else shaking[:, rows]
                slope = slope[:, self.clusters[k].rows]
                gradient_step_(theta, slope, shake, lambda2=lambda2, sigma2=sigma2, dt=dt)
        if before is not None and evaluation.batch is not None:
            still = torch.ones(self.theta.shape[:2], dtype=torch.bool, device=self.theta.device)
            still = still.scatter(1, evaluation.batch, False)[:, : self.num_benign].unsqueeze(-1)
            self.benign.copy_(torch.where(still, before, self.benign))
        if self._bounds is not None:
            self.benign.clamp_(*self._bounds)
        for (_, rows), moved in zip(self.adversaries, moves, strict=True):
            self.theta[:, rows] = moved

    @contextlib.contextmanager
    def forbid_writes(
        self, name: str, function: Callable[..., Any], m: Tensor, check_writes: bool
    ) -> Iterator[None]:
        """Raises ConfigError if a function that is called inside writes into particles or consensus points."""
        shown = (self.theta, "particles"), (m, "consensus points")
        before = [(write_count(x), x.clone() if check_writes else None) for x, _ in shown]
        yield
        for (x, what), (count, copy) in zip(shown, before, strict=True):
            require_unwritten(name, function, x, count, copy, what)

    def keep_runs(self, kept: Tensor) -> None:
        """Go on with these of the runs under way alone."""
        chosen = kept.tolist()
        self.theta, self.runs = self.theta[kept.to(self.theta.device)], self.runs[kept]
        self.excluded = self.excluded[kept]
        self.seeds = [self.seeds[run] for run in chosen]
        self._order = self._order[kept.to(self._order.device)]
        self._streams = {
            name: [each[run] for run in chosen] for name, each in self._streams.items()
        }
        self._split_clusters()
        for normals in self._normals.values():
            normals.keep_runs(chosen)

    def _next_batch(self, size: int) -> Tensor:
        if self._order.shape[1] < size:
            n = self.theta.shape[1]
            drawn = [each.permutation(n) for each in self._generators("batches")]
            self._order = torch.stack([torch.from_numpy(each) for each in drawn]).to(
                self.theta.device
            )
        rows = self._order[:, :size]
        self._order = self._order[:, size:]
        return rows

    def _request(
        self,
        theta: Tensor,
        cluster: Cluster,
        by: ConsensusParams,
        gradient: Objective | bool = False,
        closely: bool = False,
    ) -> EvaluationRequest:
        return EvaluationRequest(
            theta, cluster.lower, cluster.upper, self._flat, gradient, by.radius, closely
        )

    def _split_clusters(self) -> None:
        """Each cluster's particles, and their rows (None: all)."""
        alone = len(self.clusters) == 1
        self._parts = [
            (self.theta[:, each.rows], None if alone else each.rows) for each in self.clusters
        ]

    def _generators(self, name: str) -> list[np.random.Generator]:
        """Those of a purpose, one a run."""
        if name not in self._streams:
            self._streams[name] = [stream(seed, "particles", name) for seed in self.seeds]
        return self._streams[name]

    def _draw(self, purpose: str, n: int) -> Tensor:
        if purpose not in self._normals:
            dim = self.theta.shape[-1]
            dtype = self.theta.dtype
            device = self.theta.device
            self._normals[purpose] = Normals(
                self.seeds, f"particles {purpose}", n, dim, dtype=dtype, device=device
            )
        return self._normals[purpose].next()

    def _move(
        self,
        n: int,
        look: Evaluation,
        by: ConsensusParams,
        adversary: Adversary,
        rows: slice,
        dt: float,
        closely: bool,
    ) -> Tensor:
        """Where an adversary's particles are after the step (eq:dyn_macro_m)."""
        own = self.theta[:, rows]
        view = View(
            n=n,
            t=n * dt,
            dt=dt,
            theta=self.benign,
            theta_m=own,
            m=look.m,
            m_if=lambda points: self._consensus_if(points, look, by, rows),
            m_without=lambda: self._consensus_if(None, look, by, rows)[:, 0],
            generators=self._generators("adversaries"),
        )
        with self.forbid_writes("an adversary's `move`", adversary.move, look.m, closely):
            moving = adversary.move(view)
        if not isinstance(moving, tuple) or len(moving) != 2:
            raise ConfigError(
                f"an adversary's `move` must return the pair (a_t, A_t), got a {type(moving).__name__}"
            )
        drift, diffusion = moving
        for name, value in (("drift a_t", drift), ("diffusion A_t", diffusion)):
            if not isinstance(value, Tensor | float | int):
                raise ConfigError(
                    f"an adversary's {name} must be a tensor or a number, got a {type(value).__name__}"
                )
        try:
            moved = own + torch.as_tensor(drift).to(own) * dt
            if isinstance(diffusion, Tensor) or diffusion:
                spread = torch.as_tensor(diffusion).to(own)
                normals = self._draw(f"adversary {rows.start}", own.shape[1]) * math.sqrt(dt)
                matrix = spread.ndim == own.ndim + 1
                moved = moved + (
                    (spread @ normals.unsqueeze(-1)).squeeze(-1) if matrix else spread * normals
                )
        except RuntimeError as error:
            raise ConfigError(
                f"an adversary's drift or diffusion does not fit {[*own.shape]}: {error}"
            ) from error
        if moved.shape != own.shape:
            raise ConfigError(
                f"an adversary's drift and diffusion must broadcast to {[*own.shape]}, they gave {[*moved.shape]}"
            )
        return moved

    def _consensus_if(
        self, points: Tensor | None, look: Evaluation, by: ConsensusParams, rows: slice
    ) -> Tensor:
        """The consensus points [runs, c, clusters, d] if all particles of these rows stood at each of c points.

        Without points, those that there would be if they were not there, [runs, 1, clusters, d].
        """
        size = rows.stop - rows.start
        rest = [row for row in range(self.theta.shape[1]) if not rows.start <= row < rows.stop]
        mass = None if self.mass is None else self.mass[rest]
        if mass is not None and points is not None:
            mass = torch.cat([mass, self.mass[rows]])  # type: ignore[index]
        found = []
        for cluster, known in zip(self.clusters, look.values, strict=True):
            values = known if look.covers_all else self._request(self.theta, cluster, by).evaluate()
            values = values.map(lambda part: part[:, rest].unsqueeze(1))
            others = self.theta[:, rest].unsqueeze(1)
            if values.excluded is not None:
                others = others.masked_fill(values.excluded.unsqueeze(-1), 0.0)
            if points is None:
                found.append(consensus.point(consensus_weights(values, by, mass), others))
                continue
            there = (
                self._request(points, cluster, by)
                .evaluate()
                .map(lambda part: part.unsqueeze(2).expand(-1, -1, size))
            )
            mu = consensus_weights(_concatenate(values, there), by, mass)
            found.append(
                consensus.point(mu[..., :-size], others)
                + mu[..., -size:].sum(-1, keepdim=True) * points
            )
        return torch.stack(found, 2)


def _concatenate(these: Values, those: Values) -> Values:
    """The values of two ensembles as one, [runs, c, n]; these are the same for all c."""

    def join(left: Tensor | None, right: Tensor | None, absent: bool) -> Tensor | None:
        if left is None and right is None:
            return None
        left = torch.full_like(these.lower, absent, dtype=torch.bool) if left is None else left
        right = torch.full_like(those.lower, absent, dtype=torch.bool) if right is None else right
        return torch.cat([left.expand(-1, right.shape[1], -1), right], -1)

    lower = torch.cat([these.lower.expand(-1, those.lower.shape[1], -1), those.lower], -1)
    upper = join(these.upper, those.upper, False)
    return Values(
        lower,
        upper,
        None,
        join(these.in_ball, those.in_ball, True),
        join(these.excluded, those.excluded, False),
    )


def _gather_rows(values: Tensor, rows: Tensor) -> Tensor:
    """These rows of [runs, n] or [runs, n, d], others for each run."""
    return values.gather(
        1, rows if values.ndim == 2 else rows.unsqueeze(-1).expand(-1, -1, values.shape[-1])
    )


def _mass(theta: Tensor, num_benign: int, adversaries: Sequence[Adversary]) -> Tensor | None:
    """The share of every particle in the measure rho = w_b rho^b + w_m rho^m (eq:dyn_macro); None: all alike."""
    given = sum(each.mass for each in adversaries if each.mass is not None)
    if all(each.mass is None for each in adversaries):
        return None
    if given >= 1:
        raise ConfigError(f"the adversaries' `mass` must add up to less than 1, got {given:g}")
    alike = num_benign + sum(each.num_particles for each in adversaries if each.mass is None)
    shares = [torch.full((num_benign,), (1 - given) / alike, dtype=torch.float64)]
    for each in adversaries:
        one = (1 - given) / alike if each.mass is None else each.mass / each.num_particles
        shares.append(torch.full((each.num_particles,), one, dtype=torch.float64))
    return torch.cat(shares).to(theta.device)

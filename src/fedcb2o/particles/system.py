"""The particles of all active runs in one [runs, n, d] tensor.

Benign particles come first, cluster by cluster, then the malicious ones. A `System` has the fixed
parts of a problem and applies the mathematics of `dynamics`. `Ensembles` are the state.
"""

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.particles.adversaries import Adversary, View
from fedcb2o.particles.constraints import Constraints
from fedcb2o.particles.dynamics import (
    ConsensusParams,
    EvaluationRequest,
    Objective,
    Values,
    consensus_point,
)
from fedcb2o.particles.functions import forbid_writes
from fedcb2o.particles.noise import Normals
from fedcb2o.rng import stream


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The benign particles of one cluster: their objectives and their rows."""

    lower: Objective
    upper: Objective | None  # G, or None
    gradient: Objective | bool  # gradient of L: a function, True for autograd, False for none
    rows: slice


class Streams:
    """Named random streams, one per active run and purpose; draws advance them.

    `like` [..., d] has the d, dtype and device of normals.
    """

    def __init__(self, seeds: Sequence[int], like: Tensor) -> None:
        self._seeds = list(seeds)
        self._like = like.new_empty(like.shape[-1])
        self._generators: dict[str, list[np.random.Generator]] = {}
        self._normals: dict[str, Normals] = {}

    def generators(self, purpose: str) -> list[np.random.Generator]:
        """Return the generators of a purpose, one per run."""
        if purpose not in self._generators:
            self._generators[purpose] = [stream(seed, "particles", purpose) for seed in self._seeds]
        return self._generators[purpose]

    def normals(self, purpose: str, n: int) -> Tensor:
        """Return the next normals [runs, n, d] of a purpose, a view that later calls overwrite."""
        if purpose not in self._normals:
            name = f"particles {purpose}"
            self._normals[purpose] = Normals(self._seeds, name, n, self._like)
        return self._normals[purpose].next()

    def for_runs(self, kept: Sequence[int]) -> "Streams":
        """Return the streams of a part of the runs, which share these generators."""
        # Generators stay shared: the numbers of a run do not depend on which runs are left.
        part = copy.copy(self)
        part._seeds = [self._seeds[run] for run in kept]
        part._generators = {
            name: [generators[run] for run in kept] for name, generators in self._generators.items()
        }
        for normals in part._normals.values():
            normals.keep_runs(kept)
        return part


@dataclasses.dataclass(frozen=True)
class Ensembles:
    """The state before a step: the ensembles of all active runs.

    A step changes `theta` in place, and advances `streams`. Use only the latest state.
    """

    n: int  # step
    theta: Tensor  # all particles [runs, n, d]
    runs: Tensor  # indices of the active runs
    streams: Streams
    excluded: Tensor  # particles with a NaN or infinite objective so far, of each run
    num_evaluated: int = 0  # evaluated particles of each run so far, counted once per cluster
    # Rows of the random batch behind the consensus points of this step [runs, M]; None for all.
    batch: Tensor | None = None
    # Rest of the random order of the particles from which the next batches come.
    order: Tensor | None = None
    memory: tuple[Any, ...] = ()  # memory of the dynamics, one entry per run

    def advance(self, n: int, excluded: Tensor, evaluated: int) -> "Ensembles":
        """Return the state at step n, after the evaluation of a number of particles."""
        total = self.num_evaluated + evaluated
        # As dataclasses.replace does, which would take a twentieth of a small ensemble's step.
        state = object.__new__(Ensembles)
        vars(state).update(vars(self), n=n, excluded=excluded, num_evaluated=total)
        return state

    def for_runs(self, kept: Tensor) -> "Ensembles":
        """Return the state of a part of the active runs."""
        chosen = kept.tolist()

        def part(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[kept.to(values.device)]

        return dataclasses.replace(
            self,
            theta=self.theta[kept.to(self.theta.device)],
            runs=self.runs[kept],
            streams=self.streams.for_runs(chosen),
            excluded=self.excluded[kept],
            batch=part(self.batch),
            order=part(self.order),
            memory=tuple(self.memory[run] for run in chosen) if self.memory else (),
        )


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Values and consensus points of an ensemble before a step."""

    values: list[Values]
    points: list[Tensor]  # consensus point of each cluster [runs, d]
    params: ConsensusParams  # parameters of the consensus points, those in the view of adversaries
    # Rows of the random batch behind the consensus points [runs, M]; None for all.
    batch: Tensor | None = None
    check_writes: bool = True  # whether writes of user functions by way of NumPy are noticed too

    @functools.cached_property
    def m(self) -> Tensor:
        """Consensus points [runs, clusters, d]; most steps do not need them in one tensor."""
        return torch.stack(self.points, 1)

    def for_runs(self, kept: Tensor) -> "Evaluation":
        """Return the evaluation of a part of the runs."""
        batch = None if self.batch is None else self.batch[kept.to(self.batch.device)]
        values = [item.map(lambda tensor: tensor[kept.to(tensor.device)]) for item in self.values]
        points = [m[kept.to(m.device)] for m in self.points]
        return dataclasses.replace(self, values=values, points=points, batch=batch)


class System:
    """The fixed parts of a particle system: clusters, adversaries, masses and bounds.

    `mass` is the share of each particle in the measure; None for equal shares. `bounds` are the low
    and high ends for the benign particles, and `radius` is R of the ball B_R(0). With `flat`,
    objectives receive the points of a single run as [n, d].
    """

    def __init__(
        self,
        theta: Tensor,
        clusters: Sequence[Cluster],
        adversaries: Sequence[Adversary],
        *,
        flat: bool,
        bounds: tuple[Tensor, Tensor] | None,
        radius: float = math.inf,
    ) -> None:
        self.clusters = clusters
        self.num_benign: int = clusters[-1].rows.stop
        sizes = (adversary.num_particles for adversary in adversaries)
        ends = itertools.accumulate(sizes, initial=self.num_benign)
        rows = itertools.starmap(slice, itertools.pairwise(ends))
        self.adversaries = list(zip(adversaries, rows, strict=True))
        self.mass = _mass(theta, self.num_benign, adversaries)
        self.num_particles: int = theta.shape[1]
        self.needs_gradient = any(cluster.gradient for cluster in clusters)
        self.flat = flat
        self.radius = radius
        self.num_final = 0  # points that the end of the runs has evaluated
        # Points that a user of `Search` evaluated unasked.
        self.own: list[tuple[Tensor, Values]] = []
        self.bounds = bounds
        # Malicious particles may be anywhere, and so may an average with them.
        self._m_bounds = None if adversaries else bounds
        self._is_fixed: Tensor | None = None
        if self._m_bounds is not None and self._m_bounds[0].eq(self._m_bounds[1]).any():
            self._is_fixed = self._m_bounds[0] == self._m_bounds[1]

    def benign(self, theta: Tensor) -> Tensor:
        """Return the benign particles, a view [runs, n, d] of the first rows."""
        return theta[:, : self.num_benign]

    def malicious(self, theta: Tensor) -> Tensor:
        """Return the malicious particles, a view [runs, n_m, d] of the last rows."""
        return theta[:, self.num_benign :]

    @property
    def malicious_mass(self) -> float:
        """Share w_m of the malicious particles in the measure."""
        if self.mass is None:
            return 1 - self.num_benign / self.num_particles
        return float(self.mass[self.num_benign :].sum())

    def ask(self, state: Ensembles, check_writes: bool) -> list[EvaluationRequest]:
        """Return the requests for the values of the ensemble or its batch, one per cluster."""
        theta = state.theta
        if state.batch is not None and not self.needs_gradient:
            theta = _gather_rows(theta, state.batch)
        requests = []
        for cluster in self.clusters:
            lower = cluster.lower
            if isinstance(lower, Constraints):
                # Each run scales its constraints by its own first ensemble.
                lower = lower.for_runs(state.runs)
            objectives = (lower, cluster.upper, self.flat, cluster.gradient)
            requests.append(
                EvaluationRequest(theta, *objectives, self.radius, check_writes, self.own)
            )
        return requests

    def final_request(self, theta: Tensor, cluster: Cluster) -> EvaluationRequest:
        """Return a request at the end of all runs, and count its points."""
        # `nfev` counts these points too, though no step asked for them.
        self.num_final += theta.shape[1]
        return EvaluationRequest(theta, cluster.lower, cluster.upper, self.flat)

    def count(self, state: Ensembles, values: Sequence[Values]) -> Ensembles:
        """Return the state with the evaluated and the excluded particles of a step counted."""
        excluded = state.excluded
        for item in values:
            if item.excluded is not None:
                excluded = excluded + item.excluded.sum(-1).cpu()
        return state.advance(state.n, excluded, self.evaluation_cost(state.batch))

    def consensus(
        self, state: Ensembles, values: list[Values], params: ConsensusParams, check_writes: bool
    ) -> Evaluation:
        """Return the consensus points of the ensemble, or of its batch."""
        rows = state.batch
        counted = state.theta
        mass = self.mass
        if rows is not None:
            counted = _gather_rows(state.theta, rows)
            if mass is not None:
                mass = mass[rows]
        points = []
        for item in values:
            if rows is not None and self.needs_gradient:
                item = item.map(functools.partial(_gather_rows, rows=rows))
            m = consensus_point(counted, item, params, mass)
            if self._is_fixed is not None:  # an average of equal numbers may round to another one
                m = torch.where(self._is_fixed, state.theta[:, 0], m)
            points.append(m)
        return Evaluation(values, points, params, rows, check_writes)

    def draw_batch(self, state: Ensembles, size: int) -> Ensembles:
        """Return the state with the next random batch of `size` particles.

        Batches are parts of a random order of the particles. The order is drawn anew when fewer
        particles than a batch are left (Carrillo, Jin, Li and Zhu, "A consensus-based global
        optimization method for high dimensional machine learning problems", 2021, Algorithm 2.1).
        """
        order = state.order
        if order is None or order.shape[1] < size:
            generators = state.streams.generators("batches")
            orders = np.stack([draw.permutation(self.num_particles) for draw in generators])
            order = torch.from_numpy(orders).to(state.theta.device)
        return dataclasses.replace(state, batch=order[:, :size], order=order[:, size:])

    def evaluation_cost(self, batch: Tensor | None = None) -> int:
        """Return the particles of each run in an evaluation, counted once per cluster."""
        # Every particle needs its gradient. Without gradients, only the batch is evaluated.
        if batch is None or self.needs_gradient:
            return len(self.clusters) * self.num_particles
        return len(self.clusters) * batch.shape[1]

    def spread(self, theta: Tensor, m: Tensor) -> Tensor:
        """Return the root mean squared distance [runs, clusters] of each cluster from m."""
        # By cluster: the distance between clusters is no lack of agreement.
        squares = [
            (theta[:, cluster.rows] - m[:, k : k + 1]).square_().sum(-1).mean(-1)
            for k, cluster in enumerate(self.clusters)
        ]
        return torch.stack(squares, 1).sqrt()

    def step_(
        self, state: Ensembles, evaluation: Evaluation, dt: float, move_: Callable[[Tensor], object]
    ) -> Ensembles:
        """Move all particles from the same theta_t (eq:dyn_macro), and return the next state.

        `evaluation` is that before the step. The particles change in place, the benign ones by
        `move_`.
        """
        # Adversaries see the ensemble before the benign particles move.
        moves = [
            self._move(state, evaluation, adversary, rows, dt)
            for adversary, rows in self.adversaries
        ]
        benign = self.benign(state.theta) if self.adversaries else state.theta
        move_(benign)
        if self.bounds is not None:
            benign.clamp_(*self.bounds)
        for (_, rows), moved in zip(self.adversaries, moves, strict=True):
            state.theta[:, rows] = moved
        return state.advance(state.n + 1, state.excluded, 0)

    def clamp(self, m: Tensor) -> Tensor:
        """Return m inside the bounds, which rounding may have left, but no attacker."""
        return m if self._m_bounds is None else m.clamp(*self._m_bounds)

    def _move(
        self,
        state: Ensembles,
        evaluation: Evaluation,
        adversary: Adversary,
        rows: slice,
        dt: float,
    ) -> Tensor:
        """Return an adversary's particles after the step (eq:dyn_macro_m)."""
        theta_m = state.theta[:, rows]
        view = View(
            n=state.n,
            t=state.n * dt,
            dt=dt,
            theta=self.benign(state.theta),
            theta_m=theta_m,
            m=evaluation.m,
            generators=state.streams.generators("adversaries"),
        )

        # 1. Call the user's function and check its result.
        name = "an adversary's `move`"
        guarded = ((state.theta, "particles"), (evaluation.m, "consensus points"))
        with forbid_writes(name, adversary.move, guarded, evaluation.check_writes):
            pair = adversary.move(view)
        if not isinstance(pair, tuple) or len(pair) != 2:
            got = type(pair).__name__
            raise ConfigError(f"an adversary's `move` must return the pair (a_t, A_t), got a {got}")
        drift, diffusion = pair
        for term, value in (("drift a_t", drift), ("diffusion A_t", diffusion)):
            is_complex = isinstance(value, Tensor) and value.is_complex()
            if is_complex or not isinstance(value, Tensor | float | int):
                got = getattr(value, "dtype", type(value).__name__)
                raise ConfigError(f"an adversary's {term} must be real numbers, got {got}")

        # 2. Take the step.
        try:
            moved = theta_m + torch.as_tensor(drift).to(theta_m) * dt
            if isinstance(diffusion, Tensor) or diffusion:
                matrix = torch.as_tensor(diffusion).to(theta_m)
                normals = state.streams.normals(f"adversary {rows.start}", theta_m.shape[1])
                normals = normals * math.sqrt(dt)
                if matrix.ndim == theta_m.ndim + 1:
                    moved = moved + (matrix @ normals.unsqueeze(-1)).squeeze(-1)
                else:
                    moved = moved + matrix * normals
        except RuntimeError as error:
            raise ConfigError(
                f"an adversary's drift or diffusion does not fit {[*theta_m.shape]}: {error}"
            ) from error
        if moved.shape != theta_m.shape:
            shapes = f"{[*theta_m.shape]}, they gave {[*moved.shape]}"
            raise ConfigError(f"an adversary's drift and diffusion must broadcast to {shapes}")
        return moved


def _gather_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Gather each run's rows of [runs, n] or [runs, n, d]."""
    if values.ndim == 2:
        return values.gather(1, rows)
    return values.gather(1, rows.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


def _mass(theta: Tensor, num_benign: int, adversaries: Sequence[Adversary]) -> Tensor | None:
    """Return each particle's share in rho = w_b rho^b + w_m rho^m (eq:dyn_macro), if not equal."""
    if all(adversary.mass is None for adversary in adversaries):
        return None

    fixed = sum(adversary.mass for adversary in adversaries if adversary.mass is not None)
    if fixed >= 1:
        raise ConfigError(f"the adversaries' `mass` must add up to less than 1, got {fixed:g}")
    counts = (adversary.num_particles for adversary in adversaries if adversary.mass is None)
    # Particles without a mass of their own share what is left.
    equal_share = (1 - fixed) / (num_benign + sum(counts))
    shares = [equal_share] * num_benign
    for adversary in adversaries:
        share = equal_share if adversary.mass is None else adversary.mass / adversary.num_particles
        shares += [share] * adversary.num_particles
    return torch.tensor(shares, dtype=torch.float64, device=theta.device)

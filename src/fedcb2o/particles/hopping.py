"""Consensus hopping: the adaptive dynamics of `minimize`, for one run.

    theta^i ~ N(m, s^2 C)                                     for every particle i
    m, s, C <- weighted average, step size and covariance of the better half of the ensemble

Hopping is the limit of CB2O in which all particles are drawn anew about the consensus point, an
evolution strategy (Fornasier, Huang, Klemenc and Malaspina, "From Consensus-Based Optimization to
Evolution Strategies: Proof of Global Convergence", arXiv 2602.11677). After its collapse an
ensemble starts anew in the box. Each restart freezes its consensus point for twice as many steps,
which doubles its ensemble.

Every ensemble after the first one challenges the best end. It first minimises L among the points
with a smaller G, and then balances L and G as usual. So it leaves minimisers of L with a larger G.

The order of the particles replaces the sharp edge of Q_beta by a slope: G + w V, with
V = sqrt(L - min L - delta_q). The weight w adapts to the ensemble: it grows while the consensus
point violates L as much as the particles around it do, and falls where it does not. Only w's
product with V counts, so that the units of L and G do not matter.

Constraints are met from the outside, and slowly. One particle takes a Newton step towards V = 0.
Half of the evaluations may pass without two separate points of least L. Then L alone counts for a
while, and again in the last tenth.
"""

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from fedcb2o.particles.cloud import Array, Cloud
from fedcb2o.particles.local_search import Found
from fedcb2o.rng import stream

_START_FACTOR = 4  # particles of a restart's first ensemble, relative to the default number
_START_SHARE = 0.2  # share of the first ensemble whose mean is the first consensus point
_HOLD = 0.5  # violation of m, relative to the ensemble's, from which w grows
_GROWTH = 0.4  # largest logarithmic growth of w in a generation, over sqrt(d)
_DECAY = 0.3
_RUNAWAY = 1e4  # growth of w after which a wide ensemble sees no slope of L, only its waves
_MAX_EXCLUDED = 0.25  # share of excluded particles from which w falls: L has one side only
_OVERSHOOT = (0.5, 1.5)  # length of the step of one particle to smaller L, over Newton's
_LATE = 0.5  # share of the budget after which L alone counts for a while, if L has no interior yet
_LAST = 0.9  # share after which it does to the end
_ROUNDING = 1e-14  # relative difference of equal values of L
_TIE = 1e-19  # difference of L that counts as equal, over the spread of L
_CHALLENGE = 1e-3  # decrease of G that a challenge requires, over the spread of G
_CHALLENGE_RADIUS = 0.03  # radius at which a challenge ends
_FLAT = 1e-12  # relative range of the best values of recent generations that is rounding
_MAX_FROZEN = 256  # steps of a frozen consensus point
_NUM_AGREEING = 2
_NUM_AGREEING_WITHOUT_G = 3  # there no ensemble challenges another
_SCOUTS_PER_DIM = 1000
_SCOUTS_SHARE = 2  # evaluations of scouts, over those of ensembles, while searches are local
_FOCUS_BATCHES = 4  # steps of uniform points before an ensemble about a candidate
_FOCUS_SHARE = 0.25  # the same, where ensembles about candidates replace local searches
_MAX_SINGLE = 1 / 3  # share of searches that may end at points of their own
_MAX_FAILURES = 3  # local searches without success in a row, after which there are none
_MAX_ARCHIVE = 4096  # uniform points that candidates are compared with
_FOCUS_STEP = 0.05  # first step size about a candidate, relative to the box
_RIVAL = 1e-6  # difference of objectives that a local search may gain, over their spread
_COARSE = 0.01  # radius at which a local search takes over
_AGREEMENT = 1e-3  # distance of two ends that agree, relative to the box
_INTERIOR = 1e3  # smallest distance of separate points with equal L, over the precision
_L_TOLERANCE = 1e-6  # equal L of two ends, relative to the spread of L in the first ensemble


def default_num_particles(dim: int) -> int:
    """Return the number of particles for d coordinates, 4 (4 + 3 log d)."""
    return int(4 * (4 + 3 * math.log(dim)))


@dataclasses.dataclass(frozen=True)
class End:
    """The end of one search."""

    x: Array  # best judged point [d]
    lower: float
    upper: float  # G at x; L without G
    m: Array  # consensus point [d]
    radius: float  # largest standard deviation of the particles about m, relative to the box
    settled: bool  # whether the ensemble collapsed, or its best value did not change any more
    is_global: bool = False  # whether it is that of an ensemble that started in the whole box


@dataclasses.dataclass(eq=False)
class Hopper:
    """The ensembles of one run, one after the other."""

    seed: int
    low: Array  # of the box [d]
    high: dataclasses.InitVar[Array]
    n: int  # benign particles
    num_malicious: int = 0  # further particles that `update` receives
    walls: tuple[Array, Array] | None = None
    delta_q: float = 0.0
    # Spread of a collapsed ensemble, relative to the box, and in the units of x.
    precision: float = 1e-8
    xtol: float = 0.0
    budget: int | float = math.inf
    can_search: bool = False  # whether local searches may follow (`search_from`)
    has_first: bool = False  # whether the first particle is a user's point
    is_exact: bool = False  # whether every violation counts, however small
    by_value: bool = False  # whether ends of equal value agree, wherever they are

    def __post_init__(self, high: Array) -> None:
        self.evaluated = self.num_scouts = self.num_ensembles = 0
        self.extra = 0  # evaluations outside of the steps of all runs
        self._tie = 0.0 if self.is_exact else _TIE
        self._failures = 0 if self.can_search else _MAX_FAILURES
        self.search_from: Array | None = None  # point from which a local search shall start now
        self._archive = np.zeros((0, len(self.low) + 2))
        self._num_candidates = 0
        self._is_scouting = False
        self._spent = [0, 0]
        self._single = (0, 0)  # numbers of ends, with what was computed from them
        self._table = (0, np.zeros((0, 2)))
        # A basin of 1 / (200 d) of the box has five of them.
        self.num_scouts_needed = _SCOUTS_PER_DIM * len(self.low)
        self._late_generations = 5 + 3 * len(self.low)
        self.width = high - self.low
        self._is_free = self.width > 0
        self._interior = _INTERIOR * self.precision * self.width
        self._collapse = max(self.precision, self.xtol / self.width.max())
        self._generator = stream(self.seed, "particles", "hopping")
        self.ends: list[End] = []
        self._least = self.least_barred = math.inf  # also where G is infinite
        self._is_attained = False
        self._scale = self._upper_scale = 0.0
        self.has_upper = False  # whether there is a G
        self._frozen = 1
        self.has_value = True  # whether a particle of the first ensemble had finite values
        self._weight = 1.0
        self._cloud: Cloud | None
        self._recent: list[float]
        self._batches: list[tuple[Array, Array, Array]]
        self._restart()

    def points(self) -> Array:
        """Draw the particles [n, d] of the next step."""
        shape = (self.n, len(self.low))
        if self._has_ended:
            self._restart()
        if self._cloud is None:
            return self.low + self.width * self._generator.uniform(size=shape)
        normals = self._generator.standard_normal((self.n, int(self._is_free.sum())))
        points = np.repeat(self.m[None], self.n, 0)
        points[:, self._is_free] += self._cloud.stretch(normals) * self.width[self._is_free]
        if not self._batches:
            # m itself is judged, because w adapts to its violation.
            points[0] = self.m
            if self._repair is not None and self.n > 1:
                points[1] = self.m + self._generator.uniform(*_OVERSHOOT) * self._repair
        if self.walls is not None:
            if self._cloud.radius > _CHALLENGE_RADIUS:
                # Many particles exactly at a wall would favour minimisers there.
                low, high = self.walls
                points = np.where(points < low, 2 * low - points, points)
                points = np.where(points > high, 2 * high - points, points)
            points = points.clip(*self.walls)
        return points

    def update(self, points: Array, lower: Array, upper: Array | None) -> None:
        """Receive the values of a step, and move m at the end of a generation.

        `points` include the malicious ones. `lower` is infinite for excluded particles.
        """
        self.has_upper = upper is not None
        lower, upper = _as_levels(lower, upper)
        self._batches.append((points, lower, upper))
        self._count(points, lower)
        if self._cloud is None and np.isfinite(lower).any():
            self._consider(points, lower, self._violation(lower), upper)
            is_focus = self._is_scouting and not self.searches
            if not is_focus:
                candidate = self._candidate(points, lower, upper)
                self.search_from = candidate if self.searches else None
            elif len(self._batches) == self._batches_needed:
                points, lower, upper = map(np.concatenate, zip(*self._batches, strict=True))
                candidate = self._candidate(points, lower, upper)
                if candidate is not None:
                    self._focus(candidate)
                    return
        if len(self._batches) < self._batches_needed:
            return
        points, lower, upper = (np.concatenate(parts) for parts in zip(*self._batches, strict=True))
        self._batches = []
        violation = self._violation(lower)
        # Two separate points of least L mean that the minimisers have an interior, and that min L
        # is reached.
        if self._least < math.inf and not self._is_attained:
            tied = points[violation == 0]
            is_far = abs(tied - self._minimiser) > self._interior
            if self.walls is not None:  # the corners of a box may tie
                is_far &= (tied > self.walls[0]) & (tied < self.walls[1])
            self._is_attained = bool(is_far.any())

        self._has_ended = self._cloud is None and self._is_scouting
        if not self._has_ended:
            move = self._place if self._cloud is None else self._hop
            move(points, lower, violation, upper)

    @property
    def searches(self) -> bool:
        """Return whether local searches have led to better points."""
        return self._failures < _MAX_FAILURES

    @property
    def rival(self) -> float:
        """Largest objective of the end of a local search that may be the best one."""
        return self.best.upper + _RIVAL * self._upper_scale if self.ends else math.inf

    def add_search(self, found: Found) -> None:
        """Receive the end of a local search, and its evaluated points."""
        lowers = found.lowers if self.has_upper else _as_levels(found.lowers, None)[0]
        self._count(found.points, lowers)
        self.extra += len(found.points)
        self._failures = 0 if found.is_settled or found.is_unfinished else self._failures + 1
        # A search that starts before the first step of an ensemble starts from a uniform point.
        is_global = self._cloud is not None and self._cloud.generation > 0
        lower = found.lower if self.has_upper else 0.0
        end = End(found.x, lower, found.upper, found.x, 0.0, found.is_settled, is_global)
        self.ends.append(end)
        # The ensemble goes on to its collapse.
        self._is_refined = is_global and not found.is_settled
        if is_global and found.is_settled:
            self._end_ensemble()

    def add_rest(self, points: Array, lower: Array, upper: Array | None) -> None:
        """Receive points of a last step that is too short to move m."""
        lower, upper = _as_levels(lower, upper)
        self.extra += len(points)
        self._count(points, lower)
        if np.isfinite(lower).any():
            self._consider(points, lower, self._violation(lower), upper)

    def add_own(self, points: Array, lower: Array, upper: Array | None) -> None:
        """Receive points that a user evaluated; the best one is an end."""
        lower, upper = _as_levels(lower, upper)
        spent = (self.evaluated, self._spent.copy())
        self._count(points, lower)
        self.evaluated, self._spent = spent  # they are not part of the budget
        first = np.lexsort((upper, lower))[0]
        if np.isfinite(lower[first]):
            x = np.array(points[first])
            self.ends.append(End(x, float(lower[first]), float(upper[first]), x, 1.0, False))
            if self.searches and self._cloud is None:
                self.search_from = x

    def _count(self, points: Array, lower: Array) -> None:
        """Count evaluated points, and keep the least L."""
        self.evaluated += len(points)
        self._spent[self._is_scouting] += len(points)
        if len(lower) and float(lower.min()) < self._least:
            self._least = float(lower.min())
            self._minimiser = points[lower.argmin()].copy()
            self._is_attained = False

    def _candidate(self, points: Array, lower: Array, upper: Array) -> Array | None:
        """Return the best of uniform points whose neighbours are all worse, or None.

        Neighbours are in a cube that would hold 2 log N of the N uniform points (Rinnooy Kan and
        Timmer, "Stochastic global optimization methods", 1987). Points count by L first, and in
        every other call by G + w V, so that candidates come from different evidence.
        """
        self.num_scouts += len(points)
        rows = np.column_stack(
            [(points - self.low) / np.where(self._is_free, self.width, 1.0), lower, upper]
        )
        self._archive = np.concatenate([self._archive, rows])[-_MAX_ARCHIVE:]
        cubes, lowers, uppers = self._archive[:, :-2], self._archive[:, -2], self._archive[:, -1]
        violation = self._violation(lowers)
        self._num_candidates += 1
        order = self._order(violation, uppers, l_alone=self._num_candidates % 2 == 1)
        rank = np.argsort(order)
        if self.has_first and self.evaluated == len(points):
            return np.array(points[0])
        count = len(order)
        radius = 0.5 * min(1.0, 2 * math.log(count) / count) ** (1 / max(1, self._is_free.sum()))
        newest = sorted(range(count - len(rows), count), key=rank.__getitem__)
        for k in newest:
            better = cubes[order[: rank[k]]]
            is_near = (abs(better - cubes[k]) <= radius).all(1)
            if np.isfinite(violation[k]) and not is_near.any():
                return np.array(points[k - count + len(rows)])
        return None

    def _focus(self, point: Array) -> None:
        """Start an ensemble about a uniform point that is better than its neighbours."""
        self.m = point
        self._batches = []
        self._batches_needed = 1
        self._recent = []
        self._goal = math.inf
        self._is_near = False
        generation = max(4, self.n + self.num_malicious)
        self._cloud = Cloud(int(self._is_free.sum()), generation // 2, _FOCUS_STEP)

    def _end_ensemble(self, *end: End) -> None:
        self.ends += end
        self._has_ended = True
        self.num_ensembles += not self._is_scouting

    def ranked_ends(self) -> list[End]:
        """Return the ends in ascending order of L, and of G where L is equal.

        An unfinished ensemble has not yet balanced L and G within the tolerance for L. It counts if
        the set of minimisers has an interior, or if its L is smaller.
        """
        tolerance = self.lower_tolerance
        ends = list(self.ends)
        current = self._current()
        is_lower = current.lower < min((end.lower for end in ends), default=math.inf) - tolerance
        if self._is_attained or is_lower or not ends:
            ends.append(current)
        least = min(end.lower for end in ends) + self.delta_q + tolerance
        return sorted(ends, key=lambda end: (max(0.0, end.lower - least), end.upper))

    @property
    def best(self) -> End:
        """The best end, or the best point of the first ensemble before its end."""
        return self.ranked_ends()[0]

    @property
    def num_needed(self) -> int:
        """Searches behind a success that ended at one point."""
        return _NUM_AGREEING if self.has_upper else _NUM_AGREEING_WITHOUT_G

    @property
    def is_trusted(self) -> bool:
        """Return whether searches agree, and uniform points led to no better end."""
        if not self.num_ensembles or self.num_scouts < self.num_scouts_needed:
            return False
        best = self.best
        if self.num_agreeing(best) < self.num_needed:
            return False
        is_agreed = self.by_value or self.num_agreeing(best, only_global=True) >= self.num_needed
        return is_agreed or self.num_single <= _MAX_SINGLE * sum(end.settled for end in self.ends)

    @property
    def num_single(self) -> int:
        """Searches that ended where no other one did: the share of unseen ends (Good, 1953)."""
        if self._single[0] != len(self.ends):
            singles = sum(count == 1 for _, count in self.distinct_ends())
            self._single = (len(self.ends), singles)
        return self._single[1]

    def distinct_ends(self) -> list[tuple[End, int]]:
        """Return the ends at separate points, best first, with the searches that ended there."""
        distinct: list[tuple[End, int]] = []
        points = np.zeros((0, len(self.width)))
        for end in self.ranked_ends():
            is_far = (abs(points - end.x) > _AGREEMENT * self.width).any(1).all()
            if is_far and (end.settled or not distinct):
                distinct.append((end, self.num_agreeing(end)))
                points = np.concatenate([points, end.x[None]])
        return distinct

    def num_agreeing(self, best: End, *, only_global: bool = False) -> int:
        """Count the searches that ended at the same point or value."""
        if self.by_value:
            lower = best.lower + self.lower_tolerance
            upper = best.upper + _RIVAL * self._upper_scale
            ends = [end for end in self.ends if end.settled]
            return sum(end.lower <= lower and end.upper <= upper for end in ends)
        if self._table[0] != len(self.ends):
            rows = [[*end.x, end.settled, end.settled and end.is_global] for end in self.ends]
            self._table = (len(self.ends), np.array(rows, dtype=float))
        if not self.ends:
            return 0
        table = self._table[1]
        is_near = (abs(table[:, :-2] - best.x) <= _AGREEMENT * self.width).all(1)
        return int((is_near * table[:, -1 if only_global else -2]).sum())

    @property
    def lower_tolerance(self) -> float:
        """Difference of L that does not count between two ends, at least that of rounding."""
        if self._is_attained or (self.is_exact and self._least == 0):
            return self._rounding
        return max(self._rounding, _L_TOLERANCE * self._scale)

    def _current(self, settled: bool = False) -> End:
        radius = 1.0 if self._cloud is None else self._cloud.radius
        point = (self._x, self._x_lower, self._x_upper, self.m)
        return End(*point, radius, settled, not self._is_scouting)

    def _restart(self) -> None:
        """Start a new ensemble in the box, or draw scouts where they have had fewer points."""
        self._is_refined = False
        self._is_near = False
        share = _SCOUTS_SHARE if self.searches else _FOCUS_SHARE
        self._is_scouting = bool(self.ends) and (
            self._spent[1] < share * self._spent[0]
            or self.num_agreeing(self.best) >= self.num_needed
        )
        # A frozen m for twice as many steps is an ensemble of twice the size with the same
        # memory.
        if self.num_ensembles and not self._is_scouting:
            self._frozen = min(2 * self._frozen, _MAX_FROZEN)
        self._goal = math.inf  # G below which a challenge looks for the least L
        if self.ends and self.has_upper:
            self._goal = self.best.upper - _CHALLENGE * self._upper_scale
        self._cloud = None
        self._recent = []
        self._repair: Array | None = None
        self._batches = []
        particles = _START_FACTOR * default_num_particles(len(self.low)) * self._frozen
        self._batches_needed = max(1, round(particles / self.n))
        if self._is_scouting:
            self._batches_needed = 1 if self.searches else _FOCUS_BATCHES
        self.count = self._batches_needed * self.n
        self._has_ended = False
        self._x = self.m = self.low + self.width / 2
        self._x_lower = self._x_upper = math.inf

    def _place(self, points: Array, lower: Array, violation: Array, upper: Array) -> None:
        """Place the consensus point at the better particles of a first ensemble."""
        # All of the share count alike in L, so that G decides where more points than that are good
        # for L.
        count = max(1, int(_START_SHARE * len(points)))
        level = np.partition(violation, count - 1)[count - 1]
        excess = np.maximum(violation - level, 0) if level < math.inf else violation
        is_challenging = self._is_challenging
        order = self._order(violation, upper) if is_challenging else np.lexsort((upper, excess))
        is_finite = np.isfinite(violation)
        if not is_finite.any():  # draw another first ensemble
            self.has_value = bool(self.ends) or np.isfinite(self._least)
            return
        self.m = points[order[: min(count, int(is_finite.sum()))]].mean(0)
        if not self._scale:
            self._scale = _spread(lower)
            self._upper_scale = _spread(upper)
        slope = _spread(violation)
        self._weight = self._first_weight = _spread(upper) / slope if slope > 0 else 1.0

        generation = max(4, (self.n + self.num_malicious) * self._frozen)
        self._batches_needed = self._frozen
        self._cloud = Cloud(int(self._is_free.sum()), generation // 2)

    def _hop(self, points: Array, lower: Array, violation: Array, upper: Array) -> None:
        """Adapt w, and move m and the distribution of the particles."""
        is_finite = np.isfinite(violation)
        # L alone counts as the budget ends without a set of minimisers.
        share = 0.0 if self._is_attained else self.evaluated / self.budget
        l_alone = share > _LAST or (share > _LATE and self._late_generations > 0)
        if l_alone:
            self._late_generations -= 1
        elif not self._is_challenging:
            self._adapt_weight(violation)
        order = self._order(violation, upper, l_alone=l_alone)
        merit = self._merit(violation, upper)
        self._consider(points, lower, violation, upper)

        cloud = self._cloud
        assert cloud is not None
        half = order[: len(cloud.weights)]
        free = self._is_free
        offsets = (points - self.m)[:, free] / self.width[free]
        # A wall is no slope.
        self._repair = self._newton_step(offsets, violation) if is_finite.all() else None
        self.m = self.m.copy()
        self.m[free] += cloud.update(offsets[half]) * self.width[free]
        if self.walls is not None:
            self.m = self.m.clip(*self.walls)
        if cloud.radius <= _AGREEMENT and not self._is_near:
            # w has changed since earlier points were judged.
            self._is_near = True
            self._x_lower = self._x_upper = math.inf
        # The challenge has found a region. From here L and G are balanced as in every other
        # ensemble.
        if self._is_challenging and cloud.radius <= _CHALLENGE_RADIUS:
            self._goal = math.inf
            self._cloud = Cloud(offsets.shape[1], len(cloud.weights), _CHALLENGE_RADIUS)
            return
        # Limits of generations and of flat ones are those of the CMA-ES.
        longest = 100 + 50 * (len(self.m) + 3) ** 2 / math.sqrt(len(points))
        self._recent.append(merit[order[0]])
        count = round(10 + 30 * len(self.m) / len(points))
        recent = np.array(self._recent[-count:])
        is_flat = len(recent) == count and np.ptp(recent) <= _FLAT * abs(recent).max()
        has_grown = self._weight > _RUNAWAY * self._first_weight
        is_lost = has_grown and cloud.radius > _CHALLENGE_RADIUS
        is_converged = self._is_scouting and cloud.radius <= _AGREEMENT
        if is_converged and self.best.x is not self._x:  # ends at a worse point than another one
            self._end_ensemble()
        elif cloud.radius <= self._collapse or is_flat or cloud.generation > longest or is_lost:
            self._end_ensemble(self._current(bool(is_flat or cloud.radius <= _AGREEMENT)))
        elif self.searches and not self._is_refined and cloud.radius <= _COARSE:
            self.search_from = self._x

    @property
    def _is_challenging(self) -> bool:
        return self._goal < math.inf

    def _order(self, violation: Array, upper: Array, *, l_alone: bool = False) -> NDArray[np.intp]:
        """Sort particles by L alone, by L among those with a smaller G, or by G + w V."""
        if l_alone:
            return np.lexsort((upper, violation))
        if self._is_challenging:
            return np.lexsort((violation, np.maximum(upper - self._goal, 0.0)))
        return np.lexsort((violation, self._merit(violation, upper)))

    def _adapt_weight(self, violation: Array) -> None:
        """Let w grow or fall by the violation of m and of the particles around it."""
        is_finite = np.isfinite(violation)
        others = violation[1:][is_finite[1:]]
        # Without violations w has no effect, and its size would drift.
        if not others.any() and violation[0] <= 0:
            return
        rate = 1 / math.sqrt(len(self.m))
        if is_finite.mean() < 1 - _MAX_EXCLUDED:
            self._weight *= math.exp(-_GROWTH * rate)
        elif violation[0] == 0:
            self._weight *= math.exp(-_DECAY * rate)
        elif not len(others) or violation[0] > _HOLD * others.mean():
            self._weight *= math.exp(_GROWTH * rate)

    def _newton_step(self, offsets: Array, violation: Array) -> Array | None:
        """Return the step to V = 0 by the linear regression of V, or None at V(m) = 0."""
        assert self._cloud is not None
        slope = (violation - violation.mean()) @ offsets / len(violation)
        whitened = self._cloud.whiten(slope)
        steepness = float(whitened @ whitened)
        if violation[0] == 0 or steepness <= 0:
            return None
        # A step out of the region of the particles would end in a corner of the box.
        length = min(violation[0] / steepness, 2 * self._cloud.longest / math.sqrt(steepness))
        step = np.zeros_like(self.m)
        step[self._is_free] = -length * slope * self.width[self._is_free]
        return step

    def _consider(self, points: Array, lower: Array, violation: Array, upper: Array) -> None:
        """Replace the best judged point by a better one."""
        old = self._violation(np.array([self._x_lower]))
        if self._is_attained or self._cloud is None:
            first = np.lexsort((upper, violation))[0]
            is_better = (violation[first], upper[first]) < (float(old[0]), self._x_upper)
        else:
            merit = self._merit(violation, upper)
            first = np.lexsort((violation, merit))[0]
            is_better = bool(merit[first] < self._merit(old, np.array([self._x_upper]))[0])
        if is_better:
            self._x = points[first].copy()
            self._x_lower = float(lower[first])
            self._x_upper = float(upper[first])

    def _merit(self, violation: Array, upper: Array) -> Array:
        """Compute G + w V, infinite for excluded particles."""
        is_finite = np.isfinite(violation)
        return np.where(is_finite, upper + self._weight * np.where(is_finite, violation, 0), np.inf)

    def _violation(self, lower: Array) -> Array:
        """Compute V = sqrt(L - min L - delta_q)."""
        if not np.isfinite(self._least):
            return np.full_like(lower, np.inf)
        least = self._least + self.delta_q + self._rounding
        return np.sqrt(np.maximum(lower - least, 0.0))

    @property
    def _rounding(self) -> float:
        return _ROUNDING * abs(self._least) + self._tie * self._scale


def _as_levels(lower: Array, upper: Array | None) -> tuple[Array, Array]:
    """Return L and G; without G, L is the objective, and every point is feasible (CBO)."""
    if upper is not None:
        return lower, upper
    return np.where(np.isfinite(lower), 0.0, np.inf), lower


def _spread(values: Array) -> float:
    """Return the interquartile range of the finite values."""
    values = values[np.isfinite(values)]
    return float(np.subtract(*np.percentile(values, [75, 25]))) if len(values) else 0.0

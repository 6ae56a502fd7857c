"""Values of single points by workers that may be wrong, die, or lie.

A point is settled by one value, unless there are several workers and a repeat pays: if the value
would be the best one so far, if its worker is suspicious, and for a small random share. Repeats go
to other workers. Two equal values settle a point, and prove a third one wrong.
"""

from collections import Counter
from collections.abc import Hashable

import numpy as np

from fedcb2o.particles.cloud import Array
from fedcb2o.rng import stream

_EQUAL = 1e-6  # relative difference of two values of one point that is rounding
_SUSPICIOUS = 0.25  # suspicion from which every value of a worker is repeated
_REPEATED_SHARE = 0.05  # random share of the points of unsuspicious workers that are repeated
_PRIOR = (0.2, 4.0)  # wrong and checked values assumed of a new worker
_MAX_HOLDERS = 2  # workers that have a point without a value at the same time
_MAX_VALUES = 5  # values after which the median settles a point, as those of noisy functions differ


class Ledger:
    """The values of the points of one request, and the record of each worker."""

    def __init__(self) -> None:
        self._generator = stream(0, "particles", "repeats")
        self._wrong: Counter[Hashable] = Counter()
        self._checked: Counter[Hashable] = Counter()
        self._best: tuple[float, ...] | None = None
        self._known: set[Hashable] = set()
        self.open(np.zeros((0, 1)))

    def open(self, points: Array) -> None:
        """Start with the points [n, d] of a request."""
        self.points = points
        self._values: list[list[tuple[Hashable, Array]]] = [[] for _ in points]
        # Workers that have each point, the latest last.
        self._holders: list[list[Hashable]] = [[] for _ in points]
        self._is_drawn = self._generator.random(len(points)) < _REPEATED_SHARE
        self._settled: list[Array | None] = [None] * len(points)
        self._rows: dict[bytes, list[int]] = {}
        for row, point in enumerate(points):
            self._rows.setdefault(point.tobytes(), []).append(row)

    def rows(self, point: Array) -> list[int]:
        """Return the rows of a point, none of a point that was not requested."""
        return self._rows.get(point.tobytes(), [])

    def hand_out(self, count: int | None, worker: Hashable) -> list[int]:
        """Return up to `count` rows for a worker: repeats, new ones, and then those of others.

        A worker that died never returns its points, so that others receive them again.
        """
        self._known.add(worker)
        open_rows = [row for row in range(len(self.points)) if self._settled[row] is None]
        free = [
            row
            for row in open_rows
            if worker not in self._holders[row]
            and (self._values[row] or len(self._holders[row]) < _MAX_HOLDERS)
        ]
        # Points with a value first: a second one settles them, and the step can go on.
        free.sort(key=lambda row: (not self._values[row], len(self._holders[row]), row))
        rows = free[:count]
        for row in rows:
            self._holders[row].append(worker)
        return rows

    def add(self, row: int, worker: Hashable, value: Array) -> None:
        """Receive the numbers of a point from a worker; a second value of one worker is ignored."""
        if worker is not None and any(worker == other for other, _ in self._values[row]):
            return
        self._known.add(worker)
        self._values[row].append((worker, value))
        if self._settled[row] is None:
            self._settle(row)

    def drop(self, worker: Hashable) -> None:
        """Forget a worker that is gone; the values of a single one left are believed."""
        self._known.discard(worker)
        for row, holders in enumerate(self._holders):
            self._holders[row] = [name for name in holders if name != worker]
            if len(self._known) < 2 and self._values[row] and self._settled[row] is None:
                self._accept(row, self._values[row][-1][1])

    def settled(self) -> tuple[list[int], Array]:
        """Return the rows and the numbers of the settled points."""
        rows = [row for row, value in enumerate(self._settled) if value is not None]
        return rows, np.array([self._settled[row] for row in rows], dtype=float)

    def suspicion(self, worker: Hashable) -> float:
        """Return the share of wrong values of a worker among the checked ones, with a prior."""
        wrong, checked = _PRIOR
        return (self._wrong[worker] + wrong) / (self._checked[worker] + checked)

    def _settle(self, row: int) -> None:
        """Settle a point by one value, by two equal ones, or by the median of many."""
        values = self._values[row]
        worker, value = values[-1]
        if worker is None or (len(values) == 1 and not self._pays(row, worker, value)):
            self._accept(row, value)
            return
        # Two workers that agree are believed: one that lies has to find another with the same lie.
        for _, other in values[:-1]:
            if _are_equal(value, other):
                for name, item in values:
                    self._checked[name] += 1
                    self._wrong[name] += not _are_equal(item, value)
                self._accept(row, value)
                return
        if len(values) >= _MAX_VALUES:
            self._accept(row, np.median([item for _, item in values], axis=0))

    def _pays(self, row: int, worker: Hashable, value: Array) -> bool:
        """Return whether another value of a point is worth its evaluation."""
        if len(self._known) < 2:
            return False
        # A wrong value harms most where it would be the answer.
        is_best = self._best is None or tuple(value) < self._best
        return bool(is_best or self._is_drawn[row] or self.suspicion(worker) > _SUSPICIOUS)

    def _accept(self, row: int, value: Array) -> None:
        self._settled[row] = value
        if np.isfinite(value).all() and (self._best is None or tuple(value) < self._best):
            self._best = tuple(value)


def _are_equal(a: Array, b: Array) -> bool:
    return bool(np.allclose(a, b, rtol=_EQUAL, atol=_EQUAL, equal_nan=True))

"""How robust rules look at models: their form, the Gram matrix, and a rule's outcome a block of columns at a time.

A rule has one of two forms, so that no [m, m, d] temporary and no copy of all models is ever needed. By weights: a
function (gram, ...) -> weights [m] that sum to 1, where gram = X X^T is the Gram matrix of the models, from which all
distances and angles follow. By columns: a function (block) -> [b] of a block of columns [m, b] of the models, each
column for itself. Bulyan has both: it selects by the Gram matrix, then reduces. Pre-steps such as nearest-neighbour
mixing are matrices P [j, m]: the rule then works on the rows of P X.

The models are rows of a pool and stay there; what is held beside them is one block of columns of a few MB.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.errors import ConfigError
from fedcb2o.federated.types import Columns, Reduction
from fedcb2o.plugins import F

Pairs = Literal["none", "last", "all"]
Own = Literal["own", "before"]


@dataclass(frozen=True)
class Form:
    """What a rule looks at: `of` the Gram matrix, columns, or only values per model such as losses.

    `pairs` are the entries of the Gram matrix that it reads, beside the diagonal: none, those with the last rows, or
    all. `last` says which of the last rows are the agent's: its "own" model, that "before" the round, or both in this
    order. `largest` is the largest f, the number of attackers assumed, for m rows; None where there is no f.
    """

    of: Literal["gram", "columns", "values"]
    pairs: Pairs | Callable[[dict[str, Any]], Pairs] = "all"
    last: tuple[Own, ...] = ()
    largest: Callable[[int], int] | None = None


def form(
    of: Literal["gram", "columns", "values"],
    *,
    pairs: Pairs | Callable[[dict[str, Any]], Pairs] = "all",
    last: tuple[Own, ...] = (),
    largest: Callable[[int], int] | None = None,
) -> Callable[[F], F]:
    """Declares a rule's `Form`."""
    return plugins.declare("form", Form(of, pairs, last, largest))


def form_of(rule: Callable[..., Any]) -> Form:
    """The form of a rule, its keywords bound or not; one that declares nothing looks at the whole Gram matrix."""
    return plugins.declared(rule, "form") or Form("gram")


def assumed(rule: Callable[..., Any], f: int, m: int) -> int:
    """The number of attackers among m models that a rule assumes: `f`, or the largest that m models admit.

    Raises ConfigError for an f that is no whole number from 0 up.
    """
    if isinstance(f, bool) or not isinstance(f, int) or f < 0:
        raise ConfigError(f"`f`, the number of attackers to assume, must be a whole number from 0 up, got {f!r}")
    largest = form_of(rule).largest
    return f if largest is None else min(f, max(0, largest(m)))


def check(rule: Callable[..., Any], f: int, m: int) -> None:
    """Raises ConfigError where a rule does not admit `f` attackers among m models even if all of them come."""
    most = assumed(rule, f, m)
    if f > most:
        name = getattr(getattr(rule, "func", rule), "__name__", "the rule")
        raise ConfigError(
            f"`f` = {f} attackers are more than {name} admits among {m} models: at most {most}; "
            "assume fewer, or ask more peers (a larger `budget`)"
        )


BLOCK = 400_000  # numbers at once: 1.6 MB of float32, which stay near the core

Mixing = Float[Tensor, "j n"] | Callable[[Float[Tensor, "n n"]], Float[Tensor, "j n"]]


def blocks(
    pool: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"] | None = None,
    *,
    extra: Float[Tensor, "e d"] | None = None,
    columns: tuple[int, int] | None = None,
    size: int | None = None,
) -> Iterator[tuple[int, Float[Tensor, "m b"]]]:
    """(first column, block) for the rows of a pool and, last, those of `extra`; a block is valid until the next.

    Views where the rows follow each other, else copies into one buffer. `columns` are the first and last + 1.
    """
    start, stop = columns or (0, pool.shape[1])
    first, count = (0, len(pool)) if rows is None else (int(rows[0]) if len(rows) else 0, len(rows))
    follow = rows is None or _follow(rows)
    where = None if rows is None else rows.to(pool.device)
    added = 0 if extra is None else len(extra)
    size = _columns_at_once(count + added, pool.device) if size is None else size
    buffer = pool.new_empty(0 if follow and not added else (count + added) * min(size, max(0, stop - start)))
    for a in range(start, stop, size):
        b = min(a + size, stop)
        if follow and not added:
            yield a, pool[first : first + count, a:b]
            continue
        block = buffer[: (count + added) * (b - a)].view(count + added, b - a)
        if where is None or follow:
            block[:count] = pool[first : first + count, a:b]
        else:
            torch.index_select(pool[:, a:b], 0, where, out=block[:count])
        if extra is not None:
            block[count:] = extra[:, a:b]
        yield a, block


def _follow(rows: Int[Tensor, " m"]) -> bool:
    """Whether rows follow each other."""
    return len(rows) == 0 or bool((rows == torch.arange(int(rows[0]), int(rows[0]) + len(rows))).all())


def _columns_at_once(m: int, device: torch.device) -> int:
    return max(1024, (BLOCK if device.type == "cpu" else 64 * BLOCK) // max(1, m) // 1024 * 1024)


def gram(
    pool: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"] | None = None,
    *,
    extra: Float[Tensor, "e d"] | None = None,
    last: int | None = None,
    columns: tuple[int, int] | None = None,
    size: int | None = None,
) -> Float[Tensor, "k k"]:
    """X X^T of rows X of a pool, and of the rows of `extra` after them, in float64 on the CPU.

    Products and sums are in float64, and float32 numbers multiply exactly there. So a squared distance is wrong by
    at most about 1e-14 of the squared norms of the two models, whatever the other models are: nearly equal models need
    no centring, and a model of huge norm spoils its own entries only, as does one that is not finite. With `last`, only
    the diagonal and the columns of so many last rows are computed, and the others are NaN: one pass at the speed of
    memory. With `columns`, only that range counts: the matrices of ranges add up.
    """
    k = (len(pool) if rows is None else len(rows)) + (0 if extra is None else len(extra))
    home = torch.device("cpu") if pool.device.type == "mps" else pool.device  # Apple's GPUs have no float64
    total = torch.zeros(k, k if last is None else last, dtype=torch.float64, device=home)
    squares = torch.zeros(k, dtype=torch.float64, device=home)
    if size is None:
        size = _columns_at_once(k, pool.device)
        size = min(4096, size) if pool.device.type == "cpu" else size  # rounding grows with the length of a sum
    buffer = torch.empty(k * min(size, pool.shape[1]), dtype=torch.float64, device=home)
    for _, block in blocks(pool, rows, extra=extra, columns=columns, size=size):
        x = buffer[: block.numel()].view(block.shape).copy_(block)
        if last is None:
            total.addmm_(x, x.T)
        else:
            total.addmm_(x, x[k - last :].T)
            squares += x.mul_(x).sum(1)
    total = total.cpu()
    if last is None:
        return (total + total.T) / 2  # a product's two halves may differ in the last bit
    matrix = torch.full((k, k), torch.nan, dtype=torch.float64)
    if last:
        matrix[:, k - last :] = total
        matrix[k - last :] = total.T
        corner = total[k - last :]
        matrix[k - last :, k - last :] = (corner + corner.T) / 2
    matrix.diagonal().copy_(squares)
    return matrix


def finite(
    pool: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"] | None = None,
    *,
    extra: Float[Tensor, "e d"] | None = None,
    size: int | None = None,
) -> Bool[Tensor, " k"]:
    """Which models are finite: the others no rule may see. Where there is a Gram matrix, its diagonal says the same."""
    k = (len(pool) if rows is None else len(rows)) + (0 if extra is None else len(extra))
    good = torch.ones(k, dtype=torch.bool, device=pool.device)
    for _, block in blocks(pool, rows, extra=extra, size=size):
        good &= _finite_rows(block)
    return good.cpu()


def _finite_rows(block: Float[Tensor, "k b"]) -> Bool[Tensor, " k"]:
    """Which rows are finite: their sums are, scaled so that no finite numbers overflow. The fastest way there is."""
    return (block @ block.new_full((block.shape[1],), 2.0**-30)).isfinite()


def weighted(
    pool: Float[Tensor, "p d"],
    weights: Float[Tensor, " k"],
    rows: Int[Tensor, " m"] | None = None,
    *,
    extra: Float[Tensor, "e d"] | None = None,
    size: int | None = None,
) -> Float[Tensor, " d"]:
    """The average of the models under weights; models of weight 0 are not even read."""
    rows = torch.arange(len(pool)) if rows is None else rows
    used = weights != 0
    mine, others = used[: len(rows)], used[len(rows) :]
    extra = extra[others] if extra is not None and others.any() else None
    mu = weights[used].to(pool.device, pool.dtype)

    def average(block: Float[Tensor, "m b"]) -> Float[Tensor, " b"]:
        return mu @ block

    rows = rows[mine]
    if extra is None and len(rows) and _follow(rows):
        return mu @ pool[int(rows[0]) : int(rows[0]) + len(rows)]
    return reduced(pool, average, rows, extra=extra, size=size)


def reduced(
    pool: Float[Tensor, "p d"],
    reduce: Columns,
    rows: Int[Tensor, " m"] | None = None,
    *,
    extra: Float[Tensor, "e d"] | None = None,
    mixing: Float[Tensor, "j k"] | None = None,
    size: int | None = None,
) -> Float[Tensor, " d"]:
    """What `reduce` makes of each block of columns, of the models or, with `mixing` P, of the rows of P X."""
    result = pool.new_empty(pool.shape[1])
    p = None if mixing is None else mixing.to(pool.device, pool.dtype)
    for a, block in blocks(pool, rows, extra=extra, size=size):
        result[a : a + block.shape[1]] = reduce(block if p is None else p @ block)
    return result


def apply(
    rule: Callable[..., Any],
    pool: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"] | None = None,
    *given: Any,
    extra: Float[Tensor, "e d"] | None = None,
    mixing: Mixing | None = None,
    size: int | None = None,
) -> Float[Tensor, " d"]:
    """The model that a rule, its keywords bound by `functools.partial`, makes of rows of a pool and of `extra`.

    The rows come in the order of the rule's `Form`: the agent's own last. `given` is what the rule looks at beside the
    Gram matrix: tensors with a value for each row, or numbers. `mixing` is a pre-step, a matrix or a function of the
    Gram matrix, and leaves the agent's own rows as they are. Models that are not finite are left out before anything
    else; raises ConfigError where none is left or trusted, or the agent's own model is not finite.
    """
    rows = torch.arange(len(pool)) if rows is None else rows
    g = gram_for(rule, pool, rows, extra=extra, mixing=mixing, size=size)
    if g is not None:
        return _applied(rule, pool, rows, given, extra, mixing, size, g, g.diagonal().isfinite())
    m = len(rows) + (0 if extra is None else len(extra))
    nothing = torch.full((m, m), torch.nan, dtype=torch.float64)
    try:  # as if all were finite, which is checked as it goes: one pass over the models
        return _applied(
            rule, pool, rows, given, extra, mixing, size, nothing, torch.ones(m, dtype=torch.bool), check=True
        )
    except _NotFiniteError:
        good = finite(pool, rows, extra=extra, size=size)
        return _applied(rule, pool, rows, given, extra, mixing, size, nothing, good)


def reduce_block(reduction: Reduction, block: Float[Tensor, "p b"]) -> Float[Tensor, " b"]:
    """What a reduction makes of a block of columns of the pool."""
    x, p = block[reduction.rows], reduction.mixing
    return reduction.reduce(x if p is None else p.to(x.device, x.dtype) @ x)


def gram_for(
    rule: Callable[..., Any],
    pool: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"],
    *,
    extra: Float[Tensor, "e d"] | None = None,
    mixing: Mixing | None = None,
    size: int | None = None,
) -> Float[Tensor, "k k"] | None:
    """As much of the Gram matrix as a rule after a pre-step reads; None where it reads nothing of it."""
    form = form_of(rule)
    pairs = form.pairs(getattr(rule, "keywords", {})) if callable(form.pairs) else form.pairs
    if form.of == "columns" or pairs == "none":
        pairs = "all" if callable(mixing) or (mixing is not None and form.of == "gram") else "none"
    elif mixing is not None:
        pairs = "all"
    if pairs == "none":
        return None
    return gram(pool, rows, extra=extra, last=None if pairs == "all" else len(form.last), size=size)


def decide(
    rule: Callable[..., Any],
    g: Float[Tensor, "k k"],
    *given: Any,
    p: Float[Tensor, "j k"] | None = None,
) -> Float[Tensor, " k"] | Reduction:
    """What a rule makes of k models with the Gram matrix `g`, or of the rows of P X: weights of the models, or a
    reduction of some of them."""
    form = form_of(rule)
    everything = torch.arange(len(g))
    if form.of == "columns":
        return Reduction(everything, rule, p)
    made = rule(*given) if form.of == "values" else rule(g if p is None else p @ g @ p.T, *given)
    if isinstance(made, Reduction):
        return made if p is None else Reduction(everything, made.reduce, p[made.rows])
    weights: Tensor = made
    return weights if p is None else p.T @ weights


class _NotFiniteError(Exception):
    """A model may not be finite."""


def _applied(
    rule: Callable[..., Any],
    pool: Float[Tensor, "p d"],
    rows: Int[Tensor, " r"],
    given: tuple[Any, ...],
    extra: Float[Tensor, "e d"] | None,
    mixing: Mixing | None,
    size: int | None,
    g: Float[Tensor, "m m"],
    good: Bool[Tensor, " m"],
    check: bool = False,
) -> Float[Tensor, " d"]:
    """What a rule makes of the `good` models; with `check`, raises where they may not be."""
    last, m = len(form_of(rule).last), len(good)
    if not good.any() or not good[m - last :].all():
        what = "the agent's own model" if good.any() else "every model"
        raise ConfigError(f"{what} holds numbers that are not finite, so there is nothing to aggregate")
    rows, extra = rows[good[: len(rows)]], None if extra is None else extra[good[len(rows) :]]
    given = tuple(v[good] if isinstance(v, Tensor) and v.ndim and len(v) == m else v for v in given)
    g = g[good][:, good]
    p = None if mixing is None else mixing_matrix(mixing, g, last, good)
    outcome = decide(rule, g, *given, p=p)
    if isinstance(outcome, Reduction):

        def checked(block: Float[Tensor, "k b"]) -> Float[Tensor, " b"]:
            if not _finite_rows(block).all():
                raise _NotFiniteError
            return outcome.reduce(block)

        mine, others = outcome.rows[outcome.rows < len(rows)], outcome.rows[outcome.rows >= len(rows)] - len(rows)
        extra = extra[others] if extra is not None and len(others) else None
        reduce = checked if check else outcome.reduce
        return reduced(pool, reduce, rows[mine], extra=extra, mixing=outcome.mixing, size=size)
    if not outcome.any():
        raise ConfigError("the rule trusts none of the models, so there is nothing to aggregate")
    result = weighted(pool, outcome, rows, extra=extra, size=size)
    if check and not result.sum().isfinite():
        raise _NotFiniteError
    return result


def mixing_matrix(
    mixing: Mixing, g: Float[Tensor, "k k"], last: int, good: Bool[Tensor, " m"] | None = None
) -> Float[Tensor, "r c"]:
    """The pre-step's matrix for the models that are left, and the identity for the agent's own rows, which are last.

    `good` are those left of the models that a given matrix was made for.
    """
    peers = len(g) - last
    good = torch.ones(len(g), dtype=torch.bool) if good is None else good
    if callable(mixing):
        p = mixing(g[:peers, :peers])
    else:
        p = mixing[:, good[: len(good) - last]].double()
        p = p[p.sum(1) > 0]
        p = p / p.sum(1, keepdim=True)
    whole = torch.zeros(len(p) + last, peers + last, dtype=torch.float64)
    whole[: len(p), :peers] = p
    whole[len(p) :, peers:] = torch.eye(last)
    return whole

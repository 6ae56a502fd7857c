"""Whom an agent asks for models: A_n (Algorithm 2, line 1).

A selection is a function (contacts, candidates, budget, draw) -> ids; a graph or a network narrows the candidates.
Those here are made for several agents at once.
"""

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.errors import ConfigError
from fedcb2o.federated.contacts import Met, Peers
from fedcb2o.federated.ragged import Lists
from fedcb2o.federated.types import Contacts, Select
from fedcb2o.plugins import Declaration, Named

__all__ = ["everyone", "prob_sampling", "uniform"]

NONE = np.zeros(0, np.int64)

SelectEach = Callable[..., Lists]
"""A selection for several agents: (whom they met, whom they may ask, budget, a draw for each) -> whom they ask; its
further arguments are keywords."""


AT_ONCE = Declaration[SelectEach]("at_once")


def at_once(each: SelectEach) -> Select:
    """A selection for one agent, made from one for several, which it declares: who has several asks that, and trusts
    what it says."""

    @functools.wraps(each)
    def select(
        contacts: Contacts, candidates: Int[Tensor, " c"], budget: int, draw: np.random.Generator, **more: Any
    ) -> Int[Tensor, " s"]:
        return torch.from_numpy(each(Met.of([contacts]), Peers.of([candidates.numpy()]), budget, [draw], **more)[0])

    return AT_ONCE(each)(select)


@at_once
def prob_sampling(
    met: Met,
    peers: Peers,
    budget: int,
    draws: Sequence[np.random.Generator],
    *,
    newcomers: Annotated[float, Field(gt=0, le=1)] | None = None,
) -> Lists:
    """ProbSampling (alg:localAggregation): peers never asked come first, then draws by the likelihood P_n^j.

    There is no top-up: while somebody has not been met, A_n is `budget` of those, or all of them if they are fewer.
    A peer whose likelihood underflowed to 0 is never drawn, so A_n may be smaller than the budget; one that was
    asked and never answered counts as an average one.

    With `newcomers`, beyond the paper, at most that share of the budget, rounded up, goes to peers never asked, and the
    rest to others by their likelihood; where these are too few, newcomers fill it up. So who takes a new identity in
    every round does not fill A_n.
    """
    owner = met.ids.owners
    among, places = peers.find(owner, met.ids.values)
    owner, likelihood = owner[among], met.likelihood[among]
    sizes, counts = np.bincount(owner, minlength=len(met)), peers.counts
    starts, unmet = sizes.cumsum() - sizes, counts - sizes
    fresh, known = [], []
    for a, size, left, draw in zip(starts.tolist(), sizes.tolist(), unmet.tolist(), draws, strict=True):
        P = likelihood[a : a + size]
        most, rest = (budget, 0 if left else budget) if newcomers is None else (_room(P, newcomers, budget), budget)
        fresh.append(_choose(left, most, draw))
        known.append(_likely(P, rest - len(fresh[-1]), draw) if rest else NONE)
    new, old = Lists.of(fresh), Lists.of(known)
    new_ids = peers.at(new.owners, new.values + _met_before(new, Lists(places, sizes)))
    return _merged(new.having(new_ids), old.having(peers.at(old.owners, places[starts[old.owners] + old.values])))


def _room(P: Float[np.ndarray, " k"], newcomers: float, budget: int) -> int:
    """How many may be newcomers: a share of the budget, or what those who were met leave free of it."""
    return max(math.ceil(newcomers * budget - 1e-9), budget - int((_filled(P) > 0).sum()))


def _met_before(ranks: Lists, places: Lists) -> Int[np.ndarray, " s"]:
    """How many peers that an agent has met come before each of those whom it has not: `ranks` number the latter alone,
    from 0, and `places` are where the former are among all.

    As many as have at most `rank` others before them: the i-th that was met has places[i] - i of these.
    """
    others = places.values - (np.arange(len(places.values)) - np.repeat(places.starts, places.sizes))
    span = 1 + max((int(values.max()) for values in (others, ranks.values) if len(values)), default=0)
    asker = ranks.owners
    passed = (places.owners * span + others).searchsorted(asker * span + ranks.values, side="right")
    found: np.ndarray = passed - places.starts[asker]
    return found


@at_once
def uniform(met: Met, peers: Peers, budget: int, draws: Sequence[np.random.Generator]) -> Lists:
    """`budget` peers uniformly at random without replacement: the random batch of DFedAvgM."""
    counts = peers.counts.tolist()
    chosen = [np.sort(draw.choice(n, min(budget, n), replace=False)) for n, draw in zip(counts, draws, strict=True)]
    places = Lists.of(chosen)
    return places.having(peers.at(places.owners, places.values))


@at_once
def everyone(met: Met, peers: Peers, budget: int, draws: Sequence[np.random.Generator]) -> Lists:
    """All peers, whatever the budget: the particles of eq:clustered_csp."""
    return Lists.of([peers.ids(k) for k in range(len(met))])


@at_once
def nobody_else(met: Met, peers: Peers, budget: int, draws: Sequence[np.random.Generator]) -> Lists:
    """No peers: every agent for itself."""
    return Lists.empty(len(met))


def colluding(fellows: Peers, benign: Peers, budget: int, draws: Sequence[np.random.Generator]) -> Lists:
    """The choices of malicious agents (sec:experiments): fellow attackers of its cluster first, then benign agents of
    its cluster at random."""
    near, far, none = fellows.counts.tolist(), benign.counts.tolist(), np.zeros(0, np.int64)
    first = Lists.of([_choose(n, budget, draw) for n, draw in zip(near, draws, strict=True)])
    then = Lists.of(
        [
            draw.choice(others, min(budget - n, others), replace=False) if n <= budget else none
            for n, others, draw in zip(near, far, draws, strict=True)
        ]
    )
    near_ids, far_ids = fellows.at(first.owners, first.values), benign.at(then.owners, then.values)
    return _merged(first.having(near_ids), then.having(far_ids))


def _merged(some: Lists, others: Lists) -> Lists:
    """The numbers of both, ascending, of each."""
    values, owners = np.concatenate([some.values, others.values]), np.concatenate([some.owners, others.owners])
    return Lists(values[np.lexsort((values, owners))], some.sizes + others.sizes)


EXTRA = ("n", "me")
"""What a user's selection may look at beside: the round, and its agent's own id."""


def named(choice: Named) -> functools.partial[Any]:
    """The selection that a configuration means; raises ConfigError, also where it looks at what there is not."""
    select = plugins.named("selection", choice, sys.modules[__name__])
    also_looks_at(select)
    return select


def also_looks_at(select: Select) -> tuple[str, ...]:
    """Which of `EXTRA` a selection looks at; raises ConfigError where it needs anything else."""
    names = plugins.looks_at(getattr(select, "func", select))[4:]
    if unknown := [name for name in names if name not in EXTRA]:
        near = plugins.nearest(unknown[0], EXTRA)
        raise ConfigError(f"the selection looks at `{unknown[0]}`.{near} There is: {', '.join(EXTRA)}")
    return names


def _choose(
    n: int, size: int, draw: np.random.Generator, p: Float[np.ndarray, " n"] | None = None
) -> Int[np.ndarray, " s"]:
    """`size` of the numbers below n without replacement, uniformly or by `p`; all of them where they are fewer."""
    if n <= size and p is None:
        return np.arange(n)
    chosen = draw.choice(n, size, replace=False, p=p)
    chosen.sort()
    return chosen


def _likely(likelihood: Float[np.ndarray, " k"], budget: int, draw: np.random.Generator) -> Int[np.ndarray, " s"]:
    """The places of `budget` peers, drawn by their likelihood."""
    likelihood = _filled(likelihood)
    total = float(torch.from_numpy(likelihood).sum())
    if not total > 0:
        return np.zeros(0, np.int64)
    p = likelihood / total
    return _choose(len(p), min(budget, int((p > 0).sum())), draw, p)


def _filled(likelihood: Float[np.ndarray, " k"]) -> Float[np.ndarray, " k"]:
    """The likelihood, of those who never answered that of an average one."""
    unknown = np.isnan(likelihood)
    if not unknown.any():
        return likelihood
    mean = 1.0 if unknown.all() else float(torch.from_numpy(likelihood).nanmean())
    return np.where(unknown, mean, likelihood)


def remember(
    met: Met,
    asked: Lists,
    answered: Lists,
    losses: Float[np.ndarray, " m"] | None,
    *,
    kappa: float,
    zeta: float,
    first_contact: str,
) -> Met:
    """The contacts of some agents after a round: every peer asked counts as met, and those that answered have a new
    likelihood P <- (1 - zeta) P + zeta exp(-kappa L) (eq:update_sampling_likelihood). An infinite loss adds nothing,
    whatever kappa is.

    `losses` are those of who answered. `first_contact="whole"` sets P to exp(-kappa L) itself when a peer answers for
    the first time (released code). Without `losses` nothing is judged, and P stays as it is.
    """
    span = 1 + max((int(ids.values.max()) for ids in (met.ids, asked) if len(ids.values)), default=0)

    def keys(ids: Lists) -> Int[np.ndarray, " k"]:
        found: np.ndarray = ids.owners * span + ids.values  # they ascend, as agents do and the contacts of each
        return found

    known, new = keys(met.ids), keys(asked)
    if len(known):
        new = new[known.take(known.searchsorted(new), mode="clip") != new]
    ids, likelihood = met.ids, met.likelihood.copy()
    if len(new):
        known = np.concatenate([known, new])
        order = known.argsort(kind="stable")
        known = known[order]
        ids = Lists(
            np.concatenate([ids.values, new % span])[order], ids.sizes + np.bincount(new // span, minlength=len(ids))
        )
        likelihood = np.concatenate([likelihood, np.full(len(new), np.nan)])[order]
    if losses is not None:
        at = known.searchsorted(keys(answered))
        finite = np.isfinite(losses)  # 0 * inf is no number
        old, gain = likelihood[at], torch.exp(-kappa * torch.from_numpy(np.where(finite, losses, 0.0))).numpy() * finite
        first = np.isnan(old)
        average = (1 - zeta) * np.where(first, 0.0, old) + zeta * gain
        likelihood[at] = np.where(first, gain, average) if first_contact == "whole" else average
    return Met(ids, likelihood)

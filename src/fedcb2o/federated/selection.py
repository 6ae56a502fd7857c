"""Whom an agent asks for models: A_n (Algorithm 2, line 1).

A selection is a function (contacts, candidates, budget, draw) -> ids; a graph or a network narrows the candidates.
Those here are made for several agents at once.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.federated import lists
from fedcb2o.federated.peers import Met, Peers
from fedcb2o.federated.types import Contacts, Select

__all__ = ["everyone", "prob_sampling", "uniform"]

SelectEach = Callable[[Met, Peers, int, Sequence[np.random.Generator]], lists.Lists]
"""A selection for several agents: (whom they met, whom they may ask, budget, a draw for each) -> whom they ask."""


def at_once(each: SelectEach) -> Select:
    """A selection for one agent, made from one for several, which it declares: who has several asks that, and trusts
    what it says."""

    @functools.wraps(each)
    def select(
        contacts: Contacts, candidates: Int[Tensor, " c"], budget: int, draw: np.random.Generator
    ) -> Int[Tensor, " s"]:
        return torch.from_numpy(each(Met.of([contacts]), Peers.of([candidates.numpy()]), budget, [draw])[0])

    return plugins.declare("at_once", each)(select)


@at_once
def prob_sampling(met: Met, peers: Peers, budget: int, draws: Sequence[np.random.Generator]) -> lists.Lists:
    """ProbSampling (alg:localAggregation): peers never asked come first, then draws by the likelihood P_n^j.

    There is no top-up: while somebody has not been met, A_n is `budget` of those, or all of them if they are fewer.
    A peer whose likelihood underflowed to 0 is never drawn, so A_n may be smaller than the budget; one that was
    asked and never answered counts as an average one.
    """
    owner = lists.owners(met.sizes)
    among, places = peers.find(owner, met.ids)
    owner, likelihood = owner[among], met.likelihood[among]
    sizes, counts = np.bincount(owner, minlength=len(met)), peers.counts
    starts, unmet = sizes.cumsum() - sizes, counts - sizes
    ranks, num_asked = lists.joined(
        [
            _choose(left, budget, draw) if left else _likely(likelihood[a : a + size], budget, draw)
            for a, size, left, draw in zip(starts.tolist(), sizes.tolist(), unmet.tolist(), draws, strict=True)
        ]
    )
    # A rank among those never met becomes a place among all: it passes those met before which there are no more.
    asker, before = lists.owners(num_asked), places - (np.arange(len(places)) - starts[owner])
    span = 1 + int(counts.max())
    passed = (owner * span + before).searchsorted(asker * span + ranks, side="right") - starts[asker]
    return peers.at(asker, ranks + passed * (unmet > 0)[asker]), num_asked


@at_once
def uniform(met: Met, peers: Peers, budget: int, draws: Sequence[np.random.Generator]) -> lists.Lists:
    """`budget` peers uniformly at random without replacement: the random batch of DFedAvgM."""
    counts = peers.counts.tolist()
    chosen = [np.sort(draw.choice(n, min(budget, n), replace=False)) for n, draw in zip(counts, draws, strict=True)]
    places, num_asked = lists.joined(chosen)
    return peers.at(lists.owners(num_asked), places), num_asked


@at_once
def everyone(met: Met, peers: Peers, budget: int, draws: Sequence[np.random.Generator]) -> lists.Lists:
    """All peers, whatever the budget: the particles of eq:clustered_csp."""
    return lists.joined([peers.ids(k) for k in range(len(met))])


@at_once
def nobody_else(met: Met, peers: Peers, budget: int, draws: Sequence[np.random.Generator]) -> lists.Lists:
    """No peers: every agent for itself."""
    return np.zeros(0, np.int64), np.zeros(len(met), np.int64)


def colluding(fellows: Peers, benign: Peers, budget: int, draws: Sequence[np.random.Generator]) -> lists.Lists:
    """The choices of malicious agents (sec:experiments): fellow attackers of its cluster first, then benign agents of
    its cluster at random."""
    near, far, none = fellows.counts.tolist(), benign.counts.tolist(), np.zeros(0, np.int64)
    first, num_first = lists.joined([_choose(n, budget, draw) for n, draw in zip(near, draws, strict=True)])
    then, num_then = lists.joined(
        [
            draw.choice(others, min(budget - n, others), replace=False) if n <= budget else none
            for n, others, draw in zip(near, far, draws, strict=True)
        ]
    )
    owners = lists.owners(num_first), lists.owners(num_then)
    ids = np.concatenate([fellows.at(owners[0], first), benign.at(owners[1], then)])
    return ids[np.lexsort((ids, np.concatenate(owners)))], num_first + num_then


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
    if (unknown := np.isnan(likelihood)).any():
        mean = 1.0 if unknown.all() else float(torch.from_numpy(likelihood).nanmean())
        likelihood = np.where(unknown, mean, likelihood)
    total = float(torch.from_numpy(likelihood).sum())
    if not total > 0:
        return np.zeros(0, np.int64)
    p = likelihood / total
    return _choose(len(p), min(budget, int((p > 0).sum())), draw, p)


def remember(
    contacts: Contacts,
    asked: Int[Tensor, " s"],
    answered: Int[Tensor, " m"],
    losses: Float[Tensor, " m"] | None,
    *,
    kappa: float,
    zeta: float,
    first_contact: str,
) -> Contacts:
    """The contacts of one agent after a round: see `remember_each`."""
    found = remember_each(
        Met.of([contacts]),
        asked.numpy(),
        np.array([len(asked)]),
        answered.numpy(),
        np.array([len(answered)]),
        None if losses is None else losses.double().numpy(),
        kappa=kappa,
        zeta=zeta,
        first_contact=first_contact,
    )
    return found[0]


def remember_each(
    met: Met,
    asked: Int[np.ndarray, " s"],
    num_asked: lists.Sizes,
    answered: Int[np.ndarray, " m"],
    num_answered: lists.Sizes,
    losses: Float[np.ndarray, " m"] | None,
    *,
    kappa: float,
    zeta: float,
    first_contact: str,
) -> Met:
    """The contacts of some agents after a round: every peer asked counts as met, and those that answered have a new
    likelihood P <- (1 - zeta) P + zeta exp(-kappa L) (eq:update_sampling_likelihood).

    `first_contact="whole"` sets P to exp(-kappa L) itself when a peer answers for the first time (released code).
    Without `losses` nothing is judged, and P stays as it is.
    """
    span = 1 + max((int(ids.max()) for ids in (met.ids, asked) if len(ids)), default=0)

    def keys(ids: Int[np.ndarray, " k"], sizes: lists.Sizes) -> Int[np.ndarray, " k"]:
        found: np.ndarray = lists.owners(sizes) * span + ids  # they ascend, as agents do and the contacts of each
        return found

    known, new = keys(met.ids, met.sizes), keys(asked, num_asked)
    if len(known):
        new = new[known.take(known.searchsorted(new), mode="clip") != new]
    ids, likelihood, sizes = met.ids, met.likelihood.copy(), met.sizes
    if len(new):
        known, ids = np.concatenate([known, new]), np.concatenate([ids, new % span])
        order = known.argsort(kind="stable")
        known, ids = known[order], ids[order]
        likelihood = np.concatenate([likelihood, np.full(len(new), np.nan)])[order]
        sizes = sizes + np.bincount(new // span, minlength=len(sizes))
    if losses is not None:
        at = known.searchsorted(keys(answered, num_answered))
        old, gain = likelihood[at], torch.exp(-kappa * torch.from_numpy(losses)).numpy()
        first = np.isnan(old)
        average = (1 - zeta) * np.where(first, 0.0, old) + zeta * gain
        likelihood[at] = np.where(first, gain, average) if first_contact == "whole" else average
    return Met(ids, likelihood, sizes)


def forget(met: Met, ids: Int[np.ndarray, " g"]) -> Met:
    """The contacts of some agents without some peers: nobody has met these."""
    kept = ~np.isin(met.ids, ids)
    sizes = np.bincount(lists.owners(met.sizes)[kept], minlength=len(met.sizes))
    return Met(met.ids[kept], met.likelihood[kept], sizes)


def nobody() -> Contacts:
    """The contacts of an agent that has met nobody: P_0 = 0 (rem:sampling_likelihood_init)."""
    return Contacts(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64))

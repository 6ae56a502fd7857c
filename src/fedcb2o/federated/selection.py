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
from fedcb2o.federated.contacts import CandidatePeers, ContactTable
from fedcb2o.federated.ragged import Ragged
from fedcb2o.federated.types import Contacts, Select
from fedcb2o.plugins import Declaration, PluginChoice

__all__ = ["everyone", "prob_sampling", "uniform"]

_NO_INDICES = np.zeros(0, np.int64)

_BatchedSelect = Callable[..., Ragged]
"""A selection for several agents: (whom they met, whom they may ask, budget, a draw for each) -> whom they ask; its
further arguments are keywords."""


BATCHED_SELECTION = Declaration[_BatchedSelect]("at_once")


def batched_selection(batched: _BatchedSelect) -> Select:
    """A selection for one agent, made from one for several, which it declares: who has several asks that, and trusts
    what it says."""

    @functools.wraps(batched)
    def select(
        contacts: Contacts,
        candidates: Int[Tensor, " c"],
        budget: int,
        draw: np.random.Generator,
        **more: Any,
    ) -> Int[Tensor, " s"]:
        return torch.from_numpy(
            batched(
                ContactTable.from_contacts([contacts]),
                CandidatePeers.from_lists([candidates.numpy()]),
                budget,
                [draw],
                **more,
            )[0]
        )

    return BATCHED_SELECTION(batched)(select)


@batched_selection
def prob_sampling(
    contacts: ContactTable,
    candidates: CandidatePeers,
    budget: int,
    draws: Sequence[np.random.Generator],
    *,
    newcomers: Annotated[float, Field(gt=0, le=1)] | None = None,
) -> Ragged:
    """ProbSampling (alg:localAggregation): peers never asked come first, then draws by the likelihood P_n^j.

    There is no top-up: while somebody has not been met, A_n is `budget` of those, or all of them if they are fewer.
    A peer whose likelihood underflowed to 0 is never drawn, so A_n may be smaller than the budget; one that was
    asked and never answered counts as an average one.

    With `newcomers`, beyond the paper, at most that share of the budget, rounded up, goes to peers never asked, and the
    rest to others by their likelihood; where these are too few, newcomers fill it up. So who takes a new identity in
    every round does not fill A_n.
    """
    owner = contacts.ids.row_ids
    among, places = candidates.find(owner, contacts.ids.values)
    owner = owner[among]
    likelihood = contacts.likelihood[among]
    sizes = np.bincount(owner, minlength=len(contacts))
    counts = candidates.counts
    starts = sizes.cumsum() - sizes
    unmet = counts - sizes
    fresh = []
    known = []
    for a, size, left, draw in zip(
        starts.tolist(), sizes.tolist(), unmet.tolist(), draws, strict=True
    ):
        P = likelihood[a : a + size]
        most, rest = (
            (budget, 0 if left else budget)
            if newcomers is None
            else (_max_newcomers(P, newcomers, budget), budget)
        )
        fresh.append(_draw_indices(left, most, draw))
        known.append(_draw_by_likelihood(P, rest - len(fresh[-1]), draw) if rest else _NO_INDICES)
    new = Ragged.from_arrays(fresh)
    old = Ragged.from_arrays(known)
    new_ids = candidates.ids_at(new.row_ids, new.values + _known_before(new, Ragged(places, sizes)))
    return _merge(
        new.with_values(new_ids),
        old.with_values(candidates.ids_at(old.row_ids, places[starts[old.row_ids] + old.values])),
    )


def _max_newcomers(P: Float[np.ndarray, " k"], newcomers: float, budget: int) -> int:
    """How many may be newcomers: a share of the budget, or what those who were met leave free of it."""
    return max(math.ceil(newcomers * budget - 1e-9), budget - int((_fill_unknown(P) > 0).sum()))


def _known_before(ranks: Ragged, places: Ragged) -> Int[np.ndarray, " s"]:
    """How many peers that an agent has met come before each of those whom it has not: `ranks` number the latter alone,
    from 0, and `places` are where the former are among all.

    As many as have at most `rank` others before them: the i-th that was met has places[i] - i of these.
    """
    others = places.values - (
        np.arange(len(places.values)) - np.repeat(places.offsets, places.sizes)
    )
    span = 1 + max(
        (int(values.max()) for values in (others, ranks.values) if len(values)), default=0
    )
    asker = ranks.row_ids
    passed = (places.row_ids * span + others).searchsorted(
        asker * span + ranks.values, side="right"
    )
    found: np.ndarray = passed - places.offsets[asker]
    return found


@batched_selection
def uniform(
    contacts: ContactTable,
    candidates: CandidatePeers,
    budget: int,
    draws: Sequence[np.random.Generator],
) -> Ragged:
    """`budget` peers uniformly at random without replacement: the random batch of DFedAvgM."""
    counts = candidates.counts.tolist()
    chosen = [
        np.sort(draw.choice(n, min(budget, n), replace=False))
        for n, draw in zip(counts, draws, strict=True)
    ]
    places = Ragged.from_arrays(chosen)
    return places.with_values(candidates.ids_at(places.row_ids, places.values))


@batched_selection
def everyone(
    contacts: ContactTable,
    candidates: CandidatePeers,
    budget: int,
    draws: Sequence[np.random.Generator],
) -> Ragged:
    """All peers, whatever the budget: the particles of eq:clustered_csp."""
    return Ragged.from_arrays([candidates.ids(k) for k in range(len(contacts))])


@batched_selection
def no_peers(
    contacts: ContactTable,
    candidates: CandidatePeers,
    budget: int,
    draws: Sequence[np.random.Generator],
) -> Ragged:
    """No peers: every agent for itself."""
    return Ragged.empty(len(contacts))


def select_colluding_peers(
    colluders: CandidatePeers,
    benign: CandidatePeers,
    budget: int,
    draws: Sequence[np.random.Generator],
) -> Ragged:
    """The choices of malicious agents (sec:experiments): fellow attackers of its cluster first, then benign agents of
    its cluster at random."""
    near = colluders.counts.tolist()
    far = benign.counts.tolist()
    none = np.zeros(0, np.int64)
    first = Ragged.from_arrays(
        [_draw_indices(n, budget, draw) for n, draw in zip(near, draws, strict=True)]
    )
    then = Ragged.from_arrays(
        [
            draw.choice(others, min(budget - n, others), replace=False) if n <= budget else none
            for n, others, draw in zip(near, far, draws, strict=True)
        ]
    )
    near_ids = colluders.ids_at(first.row_ids, first.values)
    far_ids = benign.ids_at(then.row_ids, then.values)
    return _merge(first.with_values(near_ids), then.with_values(far_ids))


def _merge(members: Ragged, others: Ragged) -> Ragged:
    """The numbers of both, ascending, of each."""
    values = np.concatenate([members.values, others.values])
    owners = np.concatenate([members.row_ids, others.row_ids])
    return Ragged(values[np.lexsort((values, owners))], members.sizes + others.sizes)


_EXTRA_INPUTS = ("n", "me")
"""What a user's selection may look at beside: the round, and its agent's own id."""


def resolve_selection(choice: PluginChoice) -> functools.partial[Any]:
    """The selection that a configuration means; raises ConfigError, also where it looks at what there is not."""
    select = plugins.resolve_and_bind("selection", choice, sys.modules[__name__])
    extra_inputs(select)
    return select


def extra_inputs(select: Select) -> tuple[str, ...]:
    """Which of `EXTRA` a selection looks at; raises ConfigError where it needs anything else."""
    names = plugins.positional_inputs(getattr(select, "func", select))[4:]
    if unknown := [name for name in names if name not in _EXTRA_INPUTS]:
        near = plugins.did_you_mean(unknown[0], _EXTRA_INPUTS)
        raise ConfigError(
            f"the selection looks at `{unknown[0]}`.{near} There is: {', '.join(_EXTRA_INPUTS)}"
        )
    return names


def _draw_indices(
    n: int, size: int, draw: np.random.Generator, p: Float[np.ndarray, " n"] | None = None
) -> Int[np.ndarray, " s"]:
    """`size` of the numbers below n without replacement, uniformly or by `p`; all of them where they are fewer."""
    if n <= size and p is None:
        return np.arange(n)
    chosen = draw.choice(n, size, replace=False, p=p)
    chosen.sort()
    return chosen


def _draw_by_likelihood(
    likelihood: Float[np.ndarray, " k"], budget: int, draw: np.random.Generator
) -> Int[np.ndarray, " s"]:
    """The places of `budget` peers, drawn by their likelihood."""
    likelihood = _fill_unknown(likelihood)
    total = float(torch.from_numpy(likelihood).sum())
    if not total > 0:
        return np.zeros(0, np.int64)
    p = likelihood / total
    return _draw_indices(len(p), min(budget, int((p > 0).sum())), draw, p)


def _fill_unknown(likelihood: Float[np.ndarray, " k"]) -> Float[np.ndarray, " k"]:
    """The likelihood, of those who never answered that of an average one."""
    unknown = np.isnan(likelihood)
    if not unknown.any():
        return likelihood
    mean = 1.0 if unknown.all() else float(torch.from_numpy(likelihood).nanmean())
    return np.where(unknown, mean, likelihood)

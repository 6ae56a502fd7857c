"""Peer selections: the peers A_n that an agent asks (Algorithm 2, line 1).

A selection is a function (contacts, candidates, budget, generator, *, ...) -> ids. A graph or a
network narrows the candidates. The built-in selections take several agents at once.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.docstrings import share_entries
from fedcb2o.federated.contacts import CandidatePeers, ContactTable
from fedcb2o.federated.ragged import Ragged
from fedcb2o.federated.types import Contacts, Select
from fedcb2o.plugins import Declaration, PluginChoice
from fedcb2o.rng import subsets, weighted_subsets

__all__ = ["everyone", "prob_sampling", "uniform"]

_MAX_NUMBERS = 2**17  # of several lists at once, which fit a core's cache with their copies

# (contacts, candidates, budget, generators, *, ...) -> peers to ask, with one list per agent.
_BatchedSelect = Callable[..., Ragged]

BATCHED_SELECTION = Declaration[_BatchedSelect]("at_once")


def batched_selection(batched: _BatchedSelect) -> Select:
    """Turn a selection for several agents into one for one agent, which declares it."""

    @functools.wraps(batched)
    def select(
        contacts: Contacts,
        candidates: Int[Tensor, " c"],
        budget: int,
        draw: np.random.Generator,
        *inputs: Any,
        **parameters: Any,
    ) -> Int[Tensor, " s"]:
        table = ContactTable.from_contacts([contacts])
        peers = CandidatePeers.from_lists([candidates.numpy()])
        return torch.from_numpy(batched(table, peers, budget, [draw], *inputs, **parameters)[0])

    return BATCHED_SELECTION(batched)(select)


@batched_selection
def prob_sampling(
    contacts: ContactTable,
    candidates: CandidatePeers,
    budget: int,
    draws: Sequence[np.random.Generator],
    newcomer_share: float | None = None,
) -> Ragged:
    """Sample peers with probability proportional to their likelihood (ProbSampling).

    Peers that were never asked come first (alg:localAggregation). There is no top-up: while an
    agent has unknown peers, it asks `budget` of them, or all if there are fewer. A peer whose
    likelihood underflowed to 0 is never drawn, so that fewer than `budget` peers may be drawn. A
    peer that was asked and never answered counts as an average one.

    The guard `newcomer_share` (beyond the paper) limits unknown peers to a share of the budget, so
    that an attacker with a new identity in every round does not fill it. Unknown peers
    fill up the budget where too few are known.

    Args:
        contacts: Contacts of each agent, with the likelihoods P_n^j.
        newcomer_share: Largest share of unknown peers, in (0, 1], rounded up; None for all.
    """
    agent = contacts.ids.list_index
    is_candidate, positions = candidates.find(agent, contacts.ids.values)
    sizes = np.bincount(agent[is_candidate], minlength=len(contacts))
    known = Ragged(positions, sizes)
    likelihood = _fill_unknown(Ragged(contacts.likelihood[is_candidate], sizes))
    num_unknown = candidates.counts - sizes
    # A peer whose likelihood is 0 is not drawn.
    num_drawable = np.bincount(known.list_index[likelihood.values > 0], minlength=len(known))

    # There is no top-up: while an agent has unknown peers, it asks them alone.
    max_new = np.full(len(known), budget)
    total = np.where(num_unknown > 0, 0, budget)
    if newcomer_share is not None:
        # Unknown peers fill up the budget where too few are known.
        share = math.ceil(newcomer_share * budget - 1e-9)
        max_new = np.maximum(share, budget - num_drawable)
        total[:] = budget
    new = Ragged(*subsets(draws, num_unknown, max_new))
    old_sizes = np.where(total > 0, np.minimum(total - new.sizes, num_drawable), 0)
    old = _draw_by_likelihood(likelihood, old_sizes, draws)

    new_positions = Ragged(new.values + _known_before(new, known), new.sizes)
    old_positions = Ragged(positions[known.offsets[old.list_index] + old.values], old.sizes)
    return _merge(candidates.ids_at(new_positions), candidates.ids_at(old_positions))


def _known_before(ranks: Ragged, known: Ragged) -> Int[np.ndarray, " s"]:
    """Count the known candidates before each unknown one.

    `ranks` number the unknown candidates alone, and `known` are positions among all. The i-th known
    candidate has known[i] - i unknown ones before it; it comes before rank r if they are at most r.
    """
    indices = np.arange(len(known.values)) - np.repeat(known.offsets, known.sizes)
    unknown_before = known.values - indices
    numbers = [values for values in (unknown_before, ranks.values) if len(values)]
    span = 1 + max((int(values.max()) for values in numbers), default=0)
    keys = known.list_index * span + unknown_before
    passed = keys.searchsorted(ranks.list_index * span + ranks.values, side="right")
    counts: np.ndarray = passed - known.offsets[ranks.list_index]
    return counts


@batched_selection
def uniform(
    contacts: ContactTable,
    candidates: CandidatePeers,
    budget: int,
    draws: Sequence[np.random.Generator],
    newcomer_share: float | None = None,
) -> Ragged:
    """Sample peers uniformly without replacement: the random batch of DFedAvgM.

    Args:
        contacts: Contacts of each agent; used with `newcomer_share` alone.
        budget: M, the number of peers to ask.
        newcomer_share: Largest share of peers that were never asked, as in `prob_sampling`.
    """
    if newcomer_share is not None:
        # With equal likelihoods, ProbSampling is uniform among the known peers.
        equal = ContactTable(contacts.ids, np.ones_like(contacts.likelihood))
        batched = BATCHED_SELECTION.get(prob_sampling)
        assert batched is not None
        return batched(equal, candidates, budget, draws, newcomer_share)
    sizes = np.full(len(contacts), budget)
    return candidates.ids_at(Ragged(*subsets(draws, candidates.counts, sizes)))


@batched_selection
def everyone(
    contacts: ContactTable,
    candidates: CandidatePeers,
    budget: int,
    draws: Sequence[np.random.Generator],
) -> Ragged:
    """Return all peers, whatever the budget: the particles of eq:clustered_csp.

    Args:
        budget: Not used.
        draws: Not used.
    """
    return Ragged.from_arrays([candidates.ids(k) for k in range(len(contacts))])


@batched_selection
def no_peers(
    contacts: ContactTable,
    candidates: CandidatePeers,
    budget: int,
    draws: Sequence[np.random.Generator],
) -> Ragged:
    """Return no peers, for agents that train alone."""
    return Ragged.empty(len(contacts))


def select_colluding_peers(
    colluders: CandidatePeers,
    benign: CandidatePeers,
    budget: int,
    draws: Sequence[np.random.Generator],
) -> Ragged:
    """Select fellow attackers, and then benign agents of the cluster at random, ascending."""
    num_fellows = colluders.counts
    fellows = subsets(draws, num_fellows, np.full(len(draws), budget))
    # With more fellows than it may ask, a colluder asks no benign agent.
    size = np.maximum(budget - num_fellows, 0)
    others = subsets(draws, benign.counts, size)
    return _merge(colluders.ids_at(Ragged(*fellows)), benign.ids_at(Ragged(*others)))


def _merge(first: Ragged, second: Ragged) -> Ragged:
    """Return the numbers of both lists of each agent, ascending."""
    span = 1 + max(lists.values.max(initial=0) for lists in (first, second))
    keys = [lists.list_index * span + lists.values for lists in (first, second)]
    merged = np.sort(np.concatenate(keys), kind="stable")  # fast for sorted sequences
    return Ragged(merged % span, first.sizes + second.sizes)


_EXTRA_INPUTS = ("n", "me")  # further inputs of a user's selection: the round, and the agent's id


def resolve_selection(choice: PluginChoice) -> functools.partial[Any]:
    """Return the selection that a configuration names, with its parameters."""
    select = plugins.resolve_and_bind("selection", choice, sys.modules[__name__])
    extra_inputs(select)
    return select


def extra_inputs(select: Select) -> tuple[str, ...]:
    """Return the further inputs that a selection takes: "n" and "me"."""
    return plugins.extra_inputs("selection", getattr(select, "func", select), _EXTRA_INPUTS, 4)


def _draw_by_likelihood(
    likelihood: Ragged, sizes: Int[np.ndarray, " a"], draws: Sequence[np.random.Generator]
) -> Ragged:
    """Draw indices with probability proportional to the likelihood, `sizes` of each agent."""
    chosen = np.zeros((len(sizes), sizes.max(initial=0)), np.int64)
    for rows, values in _equal_lists(likelihood, sizes > 0):
        p = values / torch.from_numpy(values).sum(1, keepdim=True).numpy()
        numbers = weighted_subsets(draws, rows, p, sizes[rows])
        chosen[rows, : numbers.shape[1]] = numbers
    return Ragged(chosen[np.arange(chosen.shape[1]) < sizes[:, None]], sizes)


def _fill_unknown(likelihood: Ragged) -> Ragged:
    """Replace NaN, of a peer that never answered, by the agent's mean likelihood."""
    is_unknown = np.isnan(likelihood.values)
    if not is_unknown.any():
        return likelihood
    agent = likelihood.list_index
    means = np.ones(len(likelihood))  # of an agent that no peer answered
    has_both = np.isin(np.arange(len(means)), agent[is_unknown])
    has_both &= np.isin(np.arange(len(means)), agent[~is_unknown])
    for rows, values in _equal_lists(likelihood, has_both):
        means[rows] = torch.from_numpy(values).nanmean(1).numpy()
    values = np.where(is_unknown, means[agent], likelihood.values)
    return Ragged(values, likelihood.sizes)


def _equal_lists(
    lists: Ragged, is_wanted: Bool[np.ndarray, " a"]
) -> Iterator[tuple[Int[np.ndarray, " r"], Float[np.ndarray, "r k"]]]:
    """Group the lists of equal length, at most `_MAX_NUMBERS` at once: indices, and numbers."""
    for size in np.unique(lists.sizes[is_wanted]).tolist():
        rows = np.flatnonzero(is_wanted & (lists.sizes == size))
        step = max(1, _MAX_NUMBERS // max(1, size))
        for part in np.split(rows, range(step, len(rows), step)):
            yield part, lists.values[lists.flat_index(part)].reshape(len(part), size)


_ARGUMENTS = {
    "contacts": "Contacts of each agent.",
    "candidates": "Peers that each agent may ask.",
    "budget": "M, the largest number of peers to ask.",
    "draws": "Source of randomness of each agent.",
}
for _name in __all__:
    share_entries(globals()[_name], _ARGUMENTS, "Ids to ask, ascending.")

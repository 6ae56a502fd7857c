"""Whom an agent asks for models: A_n (Algorithm 2, line 1).

A selection is a function (contacts, candidates, budget, draw) -> ids; a graph or a network narrows the candidates.
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedcb2o.federated.types import Contacts, Peers, lazily

__all__ = ["everyone", "prob_sampling", "uniform"]


@lazily
def prob_sampling(
    contacts: Contacts, candidates: Int[Tensor, " c"] | Peers, budget: int, draw: np.random.Generator
) -> Int[Tensor, " s"]:
    """ProbSampling (alg:localAggregation): peers never asked come first, then draws by the likelihood P_n^j.

    There is no top-up: while somebody has not been met, A_n is `budget` of those, or all of them if they are fewer.
    A peer whose likelihood underflowed to 0 is never drawn, so A_n may be smaller than the budget; one that was
    asked and never answered counts as an average one.
    """
    peers, known = Peers.of(candidates), contacts.ids.numpy()
    among = peers.has(known)
    met = peers.places(known[among])
    unmet = len(peers) - len(met)
    if unmet:
        ranks = _choose(unmet, budget, draw)
        return peers.at(ranks + (met - np.arange(len(met))).searchsorted(ranks, side="right"))
    likelihood = contacts.likelihood.numpy()[among]
    if (unknown := np.isnan(likelihood)).any():
        mean = 1.0 if unknown.all() else float(torch.from_numpy(likelihood).nanmean())
        likelihood = np.where(unknown, mean, likelihood)
    total = float(torch.from_numpy(likelihood).sum())
    if not total > 0:
        return peers.at(met[:0])
    p = likelihood / total
    return peers.at(_choose(len(p), min(budget, int((p > 0).sum())), draw, p))


@lazily
def uniform(
    contacts: Contacts, candidates: Int[Tensor, " c"] | Peers, budget: int, draw: np.random.Generator
) -> Int[Tensor, " s"]:
    """`budget` peers uniformly at random without replacement: the random batch of DFedAvgM."""
    peers = Peers.of(candidates)
    return peers.at(np.sort(draw.choice(len(peers), min(budget, len(peers)), replace=False)))


@lazily
def everyone(
    contacts: Contacts, candidates: Int[Tensor, " c"] | Peers, budget: int, draw: np.random.Generator
) -> Int[Tensor, " s"]:
    """All peers, whatever the budget: the particles of eq:clustered_csp."""
    return Peers.of(candidates).ids


def colluding(
    fellows: Int[Tensor, " f"] | Peers, benign: Int[Tensor, " b"] | Peers, budget: int, draw: np.random.Generator
) -> Int[Tensor, " s"]:
    """A malicious agent's choice (sec:experiments): fellow attackers of its cluster first, then benign agents
    of its cluster at random."""
    fellows, benign = Peers.of(fellows), Peers.of(benign)
    if len(fellows) > budget:
        return fellows.at(_choose(len(fellows), budget, draw))
    others = benign.at(draw.choice(len(benign), min(budget - len(fellows), len(benign)), replace=False))
    return torch.cat([fellows.ids, others]).sort().values


def _choose(
    n: int, size: int, draw: np.random.Generator, p: Float[np.ndarray, " n"] | None = None
) -> Int[np.ndarray, " s"]:
    """`size` of the numbers below n without replacement, uniformly or by `p`; all of them where they are fewer."""
    if n <= size and p is None:
        return np.arange(n)
    return np.sort(draw.choice(n, size, replace=False, p=p))


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
    """Contacts after a round: every peer asked counts as met, and those that answered have a new likelihood
    P <- (1 - zeta) P + zeta exp(-kappa L) (eq:update_sampling_likelihood).

    `first_contact="whole"` sets P to exp(-kappa L) itself when a peer answers for the first time (released code).
    Without `losses` nothing is judged, and P stays as it is.
    """
    ids, likelihood = contacts.ids.numpy(), contacts.likelihood.numpy()
    new = asked.numpy()
    new = new[~Peers(ids).has(new)]
    ids = np.concatenate([ids, new])
    order = ids.argsort()
    ids, likelihood = ids[order], np.concatenate([likelihood, np.full(len(new), np.nan)])[order]
    if losses is not None:
        at = ids.searchsorted(answered.numpy())
        old, gain = likelihood[at], torch.exp(-kappa * losses.double()).numpy()
        first = np.isnan(old)
        average = (1 - zeta) * np.where(first, 0.0, old) + zeta * gain
        likelihood[at] = np.where(first, gain, average) if first_contact == "whole" else average
    return Contacts(torch.from_numpy(ids), torch.from_numpy(likelihood))


def forget(contacts: Contacts, ids: Int[Tensor, " g"]) -> Contacts:
    """The contacts without some peers: nobody has met these."""
    kept = ~torch.isin(contacts.ids, ids)
    return Contacts(contacts.ids[kept], contacts.likelihood[kept])


def nobody() -> Contacts:
    """The contacts of an agent that has met nobody: P_0 = 0 (rem:sampling_likelihood_init)."""
    return Contacts(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64))

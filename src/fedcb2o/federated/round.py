"""Algorithm 2, LocalAggregation: one agent asks, judges what it received, and weighs it (alg:localAggregation).

Who answers `exchange` (the other rows of a simulation, a cluster, a network) is the caller's business.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.errors import ConfigError
from fedcb2o.federated.algorithms import Algorithm
from fedcb2o.federated.rules import by_samples, tensor_of
from fedcb2o.federated.selection import colluding, remember
from fedcb2o.federated.types import Contacts, Judged, Local, Losses, Peers, Received, Reduction, Weighed

Exchange = Callable[[Int[Tensor, " s"]], Received]
Judge = Callable[[Received, Received], Losses]
"""(what several agents received [a, m], they themselves [a, 1]) -> the losses of both [a, m + 1], each on its data."""


@dataclass(frozen=True)
class Asking:
    """An agent about to ask: itself as if it was received, whom it may ask, who answers, and what it knows."""

    me: Received
    contacts: Contacts
    candidates: Peers
    exchange: Exchange
    local: Local


@dataclass(frozen=True)
class Colluder:
    """A malicious agent about to ask: `fellows` and `benign` are the other agents of its cluster, which it knows."""

    me: Received
    contacts: Contacts
    fellows: Peers
    benign: Peers
    exchange: Exchange
    draw: np.random.Generator


@dataclass(frozen=True)
class Mixed:
    """What an agent decided in a round: whom it asked, and the weights of the consensus point m_j over the models that
    it received from them (`ids`, in `rows` of the pool) and its own, before the mixing factor.

    The weights sum to 1, or to 0 where nobody answered or nobody is trusted: then the agent keeps its model. Where a
    rule works on columns, m_j is the `reduction` and the weights are NaN. `before` is the row and weight of the model
    that it began the round with, and `f` the number of attackers assumed, where a rule has such.
    """

    contacts: Contacts
    asked: Int[Tensor, " s"]
    ids: Int[Tensor, " m"]
    rows: Int[Tensor, " m"]
    weights: Float[Tensor, " m"]
    own_weight: float
    factor: float
    own_loss: float
    before: tuple[int, float] | None = None
    reduction: Reduction | None = None
    f: int | None = None


def local_aggregation(
    algorithm: Algorithm, n: int, agents: Sequence[Asking], budget: int, gamma: float, judge: Judge
) -> list[Mixed]:
    """Lines 1 to 6 of Algorithm 2 for each of some agents, and the factor of line 7.

    Those that received equally many models are judged and weighed at once.
    """
    asked = [_asked(algorithm, each, budget) for each in agents]
    received = [each.exchange(ids) for each, ids in zip(agents, asked, strict=True)]
    mixed = {}
    for some, theirs in _alike(received):
        selves = _stacked([agents[k].me for k in some])
        both = judge(theirs, selves) if algorithm.judges else None
        losses, own = (None, None) if both is None else (_part(both, slice(None, -1)), _part(both, slice(-1, None)))
        judged = Judged(n, losses, own, theirs, selves, agents[some[0]].local)
        means = [None] * len(some) if losses is None else losses.mean.unbind()
        own_losses = [float("nan")] * len(some) if own is None else own.mean.flatten().tolist()
        contacts = [
            remember(
                agents[k].contacts,
                asked[k],
                received[k].ids,
                mean,
                kappa=algorithm.kappa,
                zeta=algorithm.zeta,
                first_contact=algorithm.first_contact,
            )
            for k, mean in zip(some, means, strict=True)
        ]
        decided = _decided(algorithm, judged, [agents[k].local for k in some])
        for k, met, loss, (mu, own_weight, more) in zip(some, contacts, own_losses, decided, strict=True):
            ids, rows, factor = received[k].ids, received[k].rows, algorithm.factor(gamma)
            mixed[k] = Mixed(met, asked[k], ids, rows, mu, own_weight, factor, loss, **more)
    return [mixed[k] for k in range(len(agents))]


def _asked(algorithm: Algorithm, agent: Asking, budget: int) -> Int[Tensor, " s"]:
    """Line 1: whom an agent asks; raises ConfigError where the selection chose whom it may not."""
    peers = agent.candidates
    if algorithm.own_candidate:
        peers = peers.with_(agent.me.ids)
    candidates: Any = peers if plugins.declared(algorithm.select, "lazily") else peers.ids
    asked = tensor_of("selection", algorithm.select(agent.contacts, candidates, budget, agent.local.draw)).cpu()
    asked = asked if asked.numel() else asked.long()  # an empty list has no integer type
    if asked.ndim != 1:
        raise ConfigError(f"the selection returned shape {tuple(asked.shape)}, expected ids of shape [s]")
    if asked.dtype != torch.int64 or not peers.has(asked.numpy()).all() or len(set(asked.tolist())) < len(asked):
        raise ConfigError(f"the selection chose {asked.tolist()}, expected different ones of {peers.ids.tolist()}")
    if len(asked) > budget and not algorithm.asks_everyone:
        raise ConfigError(f"the selection chose {len(asked)} peers, more than `budget` = {budget}: {asked.tolist()}")
    return asked


def _decided(
    algorithm: Algorithm, judged: Judged, locals: Sequence[Local]
) -> list[tuple[Float[Tensor, " m"], float, dict[str, Any]]]:
    """Lines 5 and 6 for some agents: the weights of what each received, of its own model, and what else there is."""
    m = judged.received.ids.shape[1]
    if plugins.declared(algorithm.weigh, "together"):
        mu, own = split_weights(algorithm.weigh(judged), m)  # type: ignore[arg-type]
        return [(each, weight, {}) for each, weight in zip(mu.unbind(), own.tolist(), strict=True)]
    found: list[tuple[Tensor, float, dict[str, Any]]] = []
    for k, local in enumerate(locals):
        decided = algorithm.weigh(_one(judged, k, local))
        outcome, f = (decided.outcome, decided.f) if isinstance(decided, Weighed) else (decided, None)
        if isinstance(outcome, Reduction):
            unknown = torch.full((m,), torch.nan, dtype=torch.float64)
            found.append((unknown, float("nan"), {"reduction": outcome, "f": f}))
            continue
        before = None
        if isinstance(decided, Weighed) and local.before is not None and len(outcome) == m + 2:
            before, outcome = (local.before, float(outcome[-1])), outcome[:-1]
        mu, own = split_weights(outcome, m, rest=0.0 if before is None else before[1])
        found.append((mu, float(own), {"before": before, "f": f}))
    return found


def _alike(received: Sequence[Received]) -> Iterator[tuple[list[int], Received]]:
    """Which agents received equally many models, and what they received."""
    alike: dict[int, list[int]] = {}
    for k, models in enumerate(received):
        alike.setdefault(models.ids.shape[0], []).append(k)
    for some in alike.values():
        yield some, _stacked([received[k] for k in some])


def _stacked(received: Sequence[Received]) -> Received:
    """What several agents received, equally many models each."""
    ids, rows, samples = ([getattr(each, name) for each in received] for name in ("ids", "rows", "num_samples"))
    return Received(torch.stack(ids), torch.stack(rows), received[0].pool, torch.stack(samples))


def _part(losses: Losses, some: slice) -> Losses:
    """The losses of some of the models."""
    return Losses(losses.mean[..., some], losses.by_class[..., some, :], losses.present, losses.entropy[..., some])


def _one(judged: Judged, k: int, local: Local) -> Judged:
    """What one of several agents looks at."""

    def losses(of: Losses | None) -> Losses | None:
        return None if of is None else Losses(of.mean[k], of.by_class[k], of.present[k], of.entropy[k])

    def received(of: Received) -> Received:
        return Received(of.ids[k], of.rows[k], of.pool, of.num_samples[k])

    return Judged(
        judged.n, losses(judged.losses), losses(judged.own), received(judged.received), received(judged.me), local
    )


def colluders_aggregation(agents: Sequence[Colluder], budget: int, *, own_model: bool) -> list[Mixed]:
    """The aggregation of malicious agents: fellow attackers first, weights by numbers of samples (sec:experiments)."""
    asked = [colluding(each.fellows, each.benign, budget, each.draw) for each in agents]
    received = [each.exchange(ids) for each, ids in zip(agents, asked, strict=True)]
    mixed = {}
    for some, theirs in _alike(received):
        me = _stacked([agents[k].me for k in some]) if own_model else None
        mu, own = split_weights(by_samples(theirs, me), theirs.ids.shape[1])
        for k, weights, own_weight in zip(some, mu.unbind(), own.tolist(), strict=True):
            ids, rows, contacts = received[k].ids, received[k].rows, agents[k].contacts
            mixed[k] = Mixed(contacts, asked[k], ids, rows, weights, own_weight, 1.0, float("nan"))
    return [mixed[k] for k in range(len(agents))]


def stay(contacts: Contacts) -> Mixed:
    """What an agent does in a round in which it is offline: it keeps its model."""
    none = torch.zeros(0, dtype=torch.int64)
    return Mixed(contacts, none, none, none, none.double(), 0.0, 1.0, float("nan"))


def split_weights(
    weights: Float[Tensor, "*a k"], m: int, *, rest: float = 0.0
) -> tuple[Float[Tensor, "*a m"], Float[Tensor, "*a"]]:
    """The weights of m received models, and that of the own one; with the `rest` they sum to 1.

    Raises ConfigError for weights of another shape, or that are not a convex combination (or all zero).
    """
    weights = tensor_of("rule", weights)
    if weights.ndim == 0 or weights.shape[-1] not in (m, m + 1):
        raise ConfigError(f"the rule returned weights of shape {tuple(weights.shape)}, expected ({m},) or ({m + 1},)")
    weights = weights.cpu().double()
    total = weights.sum(-1) + rest
    good = weights.isfinite().all(-1) & (weights >= 0).all(-1) & (((total - 1).abs() < 1e-6) | (total == 0))
    if not good.all():
        wrong = weights[~good].tolist() if weights.ndim > 1 else weights.tolist()
        raise ConfigError(f"the rule returned weights that are not positive with sum 1: {wrong}")
    return weights[..., :m], weights[..., m:].sum(-1)

"""Algorithm 2, LocalAggregation: one agent asks, judges what it received, and weighs it (alg:localAggregation).

Who answers `exchange` (the other rows of a simulation, a cluster, a network) is the caller's business.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.errors import ConfigError
from fedcb2o.federated import lists
from fedcb2o.federated.algorithms import Algorithm
from fedcb2o.federated.peers import Met, Peers
from fedcb2o.federated.rules import by_samples
from fedcb2o.federated.selection import colluding, remember_each
from fedcb2o.federated.types import NOBODYS, Judged, Local, Losses, Received, Reduction, Weighed
from fedcb2o.plugins import tensor_of

Sizes = lists.Sizes
Exchange = Callable[[Int[np.ndarray, " s"], Sizes], tuple[Received, Sizes]]
"""(whom some agents ask, one agent's after the other's, how many each) -> what they receive, in the same way."""
Judge = Callable[[Received, Received], Losses]
"""(what several agents received [a, m], they themselves [a, 1]) -> the losses of both [a, m + 1], each on its data."""


@dataclass(frozen=True)
class Asking:
    """Some agents about to ask: themselves [a, 1] as if they were received, whom each met, may ask and draws with, who
    answers, and what the agent in a place knows beside."""

    me: Received
    met: Met
    candidates: Peers
    draws: Sequence[np.random.Generator]
    exchange: Exchange
    local: Callable[[int], Local]


@dataclass(frozen=True)
class Colluding:
    """Malicious agents about to ask: of each `fellows` and `benign` are the other agents of its cluster, which it
    knows."""

    me: Received
    fellows: Peers
    benign: Peers
    draws: Sequence[np.random.Generator]
    exchange: Exchange


@dataclass(frozen=True)
class Mixed:
    """What an agent decided in a round: whom it asked, and the weights of the consensus point m_j over the models that
    it received from them (`ids`, in `rows` of the pool) and its own, before the mixing factor.

    The weights sum to 1, or to 0 where nobody answered or nobody is trusted: then the agent keeps its model. Where a
    rule works on columns, m_j is the `reduction` and the weights are NaN. `before` is the row and weight of the model
    that it began the round with, and `f` the number of attackers assumed, where a rule has such.
    """

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


@dataclass(frozen=True)
class Choices:
    """What some agents decided in a round: as `Mixed`, but in arrays over all of them, one agent's lists after those of
    the one before; what few rules have, by agent."""

    agents: Int[np.ndarray, " a"]
    num_asked: Sizes
    asked: Int[np.ndarray, " s"]
    num_received: Sizes
    ids: Int[np.ndarray, " m"]
    rows: Int[np.ndarray, " m"]
    weights: Float[np.ndarray, " m"]
    own_weight: Float[np.ndarray, " a"]
    factor: Float[np.ndarray, " a"]
    own_loss: Float[np.ndarray, " a"]
    before: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    reductions: Mapping[int, Reduction] = field(default_factory=dict)
    f: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, mixed: Sequence[Mixed]) -> "Choices":
        """What the agents 0, 1, ... decided."""
        parts = {name: [getattr(one, name).numpy() for one in mixed] for name in ("asked", "ids", "rows", "weights")}
        each = {name: np.array([getattr(one, name) for one in mixed]) for name in ("own_weight", "factor", "own_loss")}
        return cls(
            agents=np.arange(len(mixed)),
            num_asked=np.array([len(one) for one in parts["asked"]]),
            num_received=np.array([len(one) for one in parts["ids"]]),
            **{name: np.concatenate(arrays) for name, arrays in parts.items()},
            **each,
            before={j: one.before for j, one in enumerate(mixed) if one.before is not None},
            reductions={j: one.reduction for j, one in enumerate(mixed) if one.reduction is not None},
            f={j: one.f for j, one in enumerate(mixed) if one.f is not None},
        )

    @classmethod
    def joined(cls, parts: "Sequence[Choices]") -> "Choices":
        """What the agents of all parts decided, in ascending order."""

        def whole(name: str) -> Any:
            return np.concatenate([getattr(one, name) for one in parts])

        order = whole("agents").argsort()
        found = {name: whole(name)[order] for name in ("agents", "own_weight", "factor", "own_loss")}
        for size, names in (("num_asked", ("asked",)), ("num_received", ("ids", "rows", "weights"))):
            sizes = whole(size)
            places = lists.places(sizes, order)
            found |= {size: sizes[order], **{name: whole(name)[places] for name in names}}
        for name in ("before", "reductions", "f"):
            found[name] = {j: each for one in parts for j, each in getattr(one, name).items()}
        return cls(**found)

    def __len__(self) -> int:
        return len(self.agents)

    def __getitem__(self, k: int) -> Mixed:
        received = (self.ids, self.rows, self.weights)
        ids, rows, weights = (torch.from_numpy(lists.part(values, self.num_received, k)) for values in received)
        asked, j = torch.from_numpy(lists.part(self.asked, self.num_asked, k)), int(self.agents[k])
        own_weight, factor, own_loss = (float(each[k]) for each in (self.own_weight, self.factor, self.own_loss))
        before, reduction, f = self.before.get(j), self.reductions.get(j), self.f.get(j)
        return Mixed(asked, ids, rows, weights, own_weight, factor, own_loss, before, reduction, f)

    def __iter__(self) -> Iterator[Mixed]:
        return (self[k] for k in range(len(self)))


def local_aggregation(
    algorithm: Algorithm, n: int, agents: Asking, budget: int, gamma: float, judge: Judge
) -> tuple[Met, Choices]:
    """Lines 1 to 6 of Algorithm 2 for each of some agents, and the factor of line 7; whom they have met then.

    Those that received equally many models are judged and weighed at once.
    """
    count = len(agents.draws)
    asked, num_asked = _asked(algorithm, agents, budget)
    received, sizes = agents.exchange(asked, num_asked)
    loss, own_loss = np.full(len(received.ids), np.nan), np.full(count, np.nan)
    weights, own_weight, more = np.empty(len(received.ids)), np.empty(count), dict[str, dict[int, Any]]()
    for some, where, theirs in _alike(received, sizes):
        selves, losses, own = _of(agents.me, some), None, None
        if algorithm.judges:
            both = judge(theirs, selves)
            losses, own = _part(both, slice(None, -1)), _part(both, slice(-1, None))
            loss[where], own_loss[some] = losses.mean.flatten().numpy(), own.mean.flatten().numpy()
        mu, mine = _decided(algorithm, Judged(n, losses, own, theirs, selves, NOBODYS), agents.local, some, more)
        weights[where], own_weight[some] = mu.flatten().numpy(), mine.numpy()
    met = remember_each(
        agents.met,
        asked,
        num_asked,
        received.ids.numpy(),
        sizes,
        loss if algorithm.judges else None,
        kappa=algorithm.kappa,
        zeta=algorithm.zeta,
        first_contact=algorithm.first_contact,
    )
    ids, rows, factor = received.ids.numpy(), received.rows.numpy(), np.full(count, algorithm.factor(gamma))
    who = agents.me.ids.flatten().numpy()
    return met, Choices(who, num_asked, asked, sizes, ids, rows, weights, own_weight, factor, own_loss, **more)


def _asked(algorithm: Algorithm, agents: Asking, budget: int) -> lists.Lists:
    """Line 1: whom the agents ask; raises ConfigError where a user's selection chose whom it may not."""
    peers, several = agents.candidates, plugins.declared(algorithm.select, "at_once")
    if algorithm.own_candidate:
        peers = peers.and_(agents.me.ids.flatten().numpy())
    if several is not None:
        found: lists.Lists = several(agents.met, peers, budget, agents.draws)
        return found
    asked = []
    for k, (contacts, draw) in enumerate(zip(agents.met, agents.draws, strict=True)):
        chosen = algorithm.select(contacts, torch.from_numpy(peers.ids(k)), budget, draw)
        asked.append(_checked(chosen, peers, k, budget))
    return lists.joined(asked)


def _checked(asked: Any, peers: Peers, k: int, budget: int) -> Int[np.ndarray, " s"]:
    """The ids that a user's selection returned for the agent in place k; raises ConfigError unless they are different
    ones of its peers, and no more than the budget."""
    asked = tensor_of("selection", asked).cpu()
    asked = asked if asked.numel() else asked.long()  # an empty list has no integer type
    if asked.ndim != 1:
        raise ConfigError(f"the selection returned shape {tuple(asked.shape)}, expected ids of shape [s]")
    ours = asked.dtype == torch.int64 and len(set(asked.tolist())) == len(asked)
    if not (ours and peers.find(np.full(len(asked), k), asked.numpy())[0].all()):
        raise ConfigError(f"the selection chose {asked.tolist()}, expected different ones of {peers.ids(k).tolist()}")
    if len(asked) > budget:
        raise ConfigError(f"the selection chose {len(asked)} peers, more than `budget` = {budget}: {asked.tolist()}")
    found: np.ndarray = asked.numpy()
    return found


def _decided(
    algorithm: Algorithm,
    judged: Judged,
    local: Callable[[int], Local],
    some: Int[np.ndarray, " a"],
    more: dict[str, dict[int, Any]],
) -> tuple[Float[Tensor, "a m"], Float[Tensor, " a"]]:
    """Lines 5 and 6 for `some` agents, which received equally many: the weights of what each received, and of its own
    model. What else there is goes into `more`."""
    m = judged.received.ids.shape[1]
    if plugins.declared(algorithm.weigh, "together"):
        made = tensor_of("rule", algorithm.weigh(judged))
        if made.ndim != 2 or len(made) != len(some):
            raise ConfigError(
                f"the rule, which is declared `together`, returned weights of shape {tuple(made.shape)}, expected "
                f"({len(some)}, {m}) or ({len(some)}, {m + 1})"
            )
        return split_weights(made, m)
    weights = torch.full((len(some), m + 1), torch.nan, dtype=torch.float64)
    for row, k in enumerate(some.tolist()):
        knows, j = local(k), int(judged.me.ids[row])
        decided = algorithm.weigh(_one(judged, row, knows))
        outcome, f = (decided.outcome, decided.f) if isinstance(decided, Weighed) else (decided, None)
        if f is not None:
            more.setdefault("f", {})[j] = f
        if isinstance(outcome, Reduction):
            more.setdefault("reductions", {})[j] = outcome
            continue
        rest = 0.0
        if isinstance(decided, Weighed) and knows.before is not None and len(outcome) == m + 2:
            rest, outcome = float(outcome[-1]), outcome[:-1]
            more.setdefault("before", {})[j] = knows.before, rest
        weights[row, :-1], weights[row, -1] = split_weights(outcome, m, rest=rest)
    return weights[:, :-1], weights[:, -1]


def _alike(
    received: Received, sizes: Sizes
) -> Iterator[tuple[Int[np.ndarray, " a"], Int[np.ndarray, " k"] | slice, Received]]:
    """Which agents received equally many models, where these lie, and they themselves [a, m]."""
    kinds, first = np.unique(sizes, return_index=True)
    for m in sizes[np.sort(first)].tolist():
        some = np.flatnonzero(sizes == m)
        where = slice(None) if len(kinds) == 1 else lists.places(sizes, some)
        yield some, where, _of(received, where, (len(some), m))


def _of(received: Received, where: Int[np.ndarray, " k"] | slice, shape: tuple[int, int] = (-1, 1)) -> Received:
    """Some of what was received."""
    chosen = where if isinstance(where, slice) else torch.from_numpy(where)
    parts = [each[chosen].view(shape) for each in (received.ids, received.rows, received.num_samples)]
    return Received(parts[0], parts[1], received.pool, parts[2])


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


def colluders_aggregation(agents: Colluding, budget: int, *, own_model: bool) -> Choices:
    """The aggregation of malicious agents: fellow attackers first, weights by numbers of samples (sec:experiments)."""
    count = len(agents.draws)
    asked, num_asked = colluding(agents.fellows, agents.benign, budget, agents.draws)
    received, sizes = agents.exchange(asked, num_asked)
    weights, own_weight = np.empty(len(received.ids)), np.empty(count)
    for some, where, theirs in _alike(received, sizes):
        mu, own = split_weights(by_samples(theirs, _of(agents.me, some) if own_model else None), theirs.ids.shape[1])
        weights[where], own_weight[some] = mu.flatten().numpy(), own.numpy()
    ids, rows, who = received.ids.numpy(), received.rows.numpy(), agents.me.ids.flatten().numpy()
    ones = np.ones(count)
    return Choices(who, num_asked, asked, sizes, ids, rows, weights, own_weight, ones, np.full(count, np.nan))


def stay() -> Mixed:
    """What keeps its model in a round, asking nobody."""
    none = torch.zeros(0, dtype=torch.int64)
    return Mixed(none, none, none, none.double(), 0.0, 1.0, float("nan"))


def idle(agents: Int[np.ndarray, " a"]) -> Choices:
    """What agents do in a round in which they are offline: they keep their models."""
    no, none = np.zeros(len(agents)), np.zeros(0, np.int64)
    sizes, unknown = no.astype(np.int64), np.full(len(agents), np.nan)
    return Choices(agents, sizes, none, sizes, none, none, none.astype(float), no, no + 1.0, unknown)


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

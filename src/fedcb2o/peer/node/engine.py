"""One agent among real peers as an engine: a block of one, whose `exchange` is the network (alg:localAggregation).

The pool is [own | crafted | before | inbox]. A model that arrived lies in a row of the inbox until the round has mixed.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedcb2o.federated.admission import believed, extents
from fedcb2o.federated.agent_group import Block
from fedcb2o.federated.algorithm2 import ask
from fedcb2o.federated.batched_training import train_
from fedcb2o.federated.decisions import Choices, Inbox
from fedcb2o.federated.metrics import Tested
from fedcb2o.federated.mixing import mix_, mixture
from fedcb2o.federated.publishing import craft_, outbox
from fedcb2o.federated.ragged import Lists
from fedcb2o.federated.validation import tested
from fedcb2o.kernels import dispatch
from fedcb2o.peer.node.publisher import Offers
from fedcb2o.peer.wire.client import Arrival, Downloads

T = TypeVar("T")

ONE = np.zeros(1, np.int64)  # the place of the only agent


class Among:
    """The engine of one agent, whose model was the `first` before all rounds. `may_ask(n)` are the ids of those whom it
    may ask now; it `offers` its models by one part, and gets others' by `downloads`. `arrivals` and `failures` tell how
    the last exchange went, by peer, and `seconds` how long it took."""

    def __init__(
        self,
        block: Block,
        offers: Offers,
        downloads: Downloads,
        may_ask: Callable[[int], Sequence[int]],
        first: Float[Tensor, " d"],
    ) -> None:
        self.block, self.offers, self.downloads, self.may_ask = block, offers, downloads, may_ask
        self.first = first
        self.terms, self.attackers = block.terms, block.attackers
        self.me = int(block.agents[0])
        self.parts = [block.agents]
        self.arrivals: Mapping[int, Arrival] = {}
        self.failures: Mapping[int, str] = {}
        self.seconds = 0.0

    def each(self, function: Callable[..., T], *common: Any, own: Sequence[Sequence[Any]] = ()) -> list[T]:
        """What a function finds for the agent; whom it asks, among those that are there."""
        block = self._among(self.may_ask(int(common[0]))) if function is ask else self.block
        with dispatch.by(self.terms.primitives.linear, self.terms.primitives.convolution):
            call = functools.partial(function, block, ONE, *(each[0] for each in own), *common)
            found: Any = call()
            if function is train_ and self._diverged(int(common[0]), *found):
                self._row(int(block.layout.own[0])).copy_(self.first)
                found = call()
            return [found]

    def _diverged(self, n: int, losses: Float[np.ndarray, " 1"], sizes: Float[np.ndarray, " 1"]) -> bool:
        """Whether training led nowhere, as it may from an average with a model that was made for this: a peer ends
        nobody. In a simulation of such models it is their success."""
        if (np.isfinite(losses) & np.isfinite(sizes)).all() or self.attackers.attack.crafts(n):
            return False
        self.offers.tell(
            f"training diverged in round {n + 1}: it begins again with the initial model; are the data on the agreed "
            "scale?"
        )
        return True

    def _among(self, there: Sequence[int]) -> Block:
        """The same block where the agent may ask only those that are there."""
        near = self.terms.neighbours
        wanted = set(there) if near is None else set(there) & set(near[self.me].tolist())
        nobody = torch.zeros(0, dtype=torch.int64)
        lists = [nobody] * self.terms.num_agents
        lists[self.me] = torch.tensor(sorted(wanted), dtype=torch.int64)
        return dataclasses.replace(self.block, terms=dataclasses.replace(self.terms, neighbours=tuple(lists)))

    def publish_(self, n: int, online: Bool[np.ndarray, " N"], sizes: Float[np.ndarray, " N"]) -> None:
        """Offer the model that the agent trained; an attacker of a simulation crafts first, from what it downloads."""
        block, layout, box = self.block, self.block.layout, outbox(self.block, n)
        num_samples, claims = int(box.num_samples[0]), int(box.claims[0])
        theta, deceived = self._row(int(layout.own[0])), self.attackers.benign
        if not box.deceives[0] and claims == num_samples:
            self.offers.publish(n, theta, num_samples)
            return
        if box.deceives[0]:  # fellows look at what each trained
            self.offers.deceive(n, theta, num_samples, dict.fromkeys(deceived.tolist()), claims)
            craft_(block, ONE, n, np.ones(self.terms.num_agents, dtype=bool), self._look(n))
        rows = box.rows(np.zeros(len(deceived), np.int64), deceived).tolist()
        crafted = {to: self._row(row) for to, row in zip(deceived.tolist(), rows, strict=True)}
        self.offers.deceive(n, theta, num_samples, crafted, claims)

    def _look(self, n: int) -> Callable[[list[int]], Float[Tensor, "m d"]]:
        """What an attacker may see: its own model and those of others that it downloads now; where one does not come
        it takes its own for it."""

        def look(ids: list[int]) -> Float[Tensor, "m d"]:
            seen = self.downloads.look(n, [i for i in ids if i != self.me])
            own = self._row(int(self.block.layout.own[0]))
            return torch.stack([seen.get(i, own) for i in ids]) if ids else torch.zeros(0, self.terms.dim)

        return look

    def exchange(self, n: int, asked: Sequence[Lists], deadline: float | None) -> list[Inbox]:
        """Download, in one go, what the asked peers offer; who has not answered by the deadline is missed."""
        ids, own = asked[0].values.tolist(), int(self.block.layout.own[0])
        slots = {i: self.block.layout.inbox + k for k, i in enumerate(i for i in ids if i != self.me)}
        rows = {i: self._row(row) for i, row in slots.items()}
        began = time.monotonic()
        self.arrivals, self.failures = self.downloads.fetch(n, rows, deadline)
        self.seconds = time.monotonic() - began
        there = np.array([i == self.me or i in self.arrivals for i in ids], dtype=bool)
        kept = [i for i in ids if i == self.me or i in self.arrivals]
        mine = self.block.holdings.train.sizes.astype(float)[0]
        claims = np.array([mine if i == self.me else self.arrivals[i].num_samples for i in kept], dtype=float)
        rounds = np.array([n if i == self.me else self.arrivals[i].round for i in kept], np.int64)
        places = np.array([own if i == self.me else slots[i] for i in kept], np.int64)
        return [Inbox(asked[0].only(there), places, believed(claims, self.terms.most_samples), rounds)]

    def mix_(self, choices: Sequence[Choices]) -> Bool[np.ndarray, " N"]:
        """theta <- W theta for the agent; whether it is finite then, of all others True."""
        layout = self.block.layout
        mix_(self.block.pool, mixture(choices[0], layout.own, layout.before), 0, self.terms.dim)
        finite = np.ones(self.terms.num_agents, dtype=bool)
        finite[self.me] = np.isfinite(extents(self.block.pool, layout.own.tolist())).all()
        return finite

    def evaluate(self) -> dict[int, Tested]:
        """What the agent's model does on its own test samples."""
        return dict(zip([self.me], tested(self.block, ONE), strict=True))

    def _row(self, row: int) -> Float[Tensor, " d"]:
        return self.block.pool[row]

"""What agents publish after LocalUpdate: the model that each trained or, from an attacker, what it crafts."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o.data._dataset import Shard
from fedcb2o.federated.admission import believed, extents
from fedcb2o.federated.agent_group import Block
from fedcb2o.federated.decisions import Inbox
from fedcb2o.federated.inference import Reference
from fedcb2o.federated.plugin_outputs import crafted_of, tried_of
from fedcb2o.federated.ragged import Lists, Places
from fedcb2o.federated.types import Knowledge, Losses, View
from fedcb2o.federated.validation import losses_by
from fedcb2o.rng import stream

Look = Callable[[list[int]], Float[Tensor, "m d"]]
"""The ids of some agents -> the models that they trained in this round: what an attacker may see, as it declared."""


@dataclass(frozen=True)
class Outbox:
    """What the agents of a block publish in a round, and what they say of it: `rows` of the pool with the `own` models,
    or from `crafts` on with those that an attacker makes, where it `deceives`, for everybody or for `each` of the
    `receivers`; and how many samples each says that it trained on, and to `receivers` who are lied to."""

    own: Int[np.ndarray, " a"]
    crafts: Int[np.ndarray, " a"]
    deceives: Bool[np.ndarray, " a"]
    each: bool
    receivers: Int[np.ndarray, " r"]
    num_samples: Float[np.ndarray, " a"]
    claims: Float[np.ndarray, " a"]

    def rows(self, senders: Places, receivers: Int[np.ndarray, " m"]) -> Int[np.ndarray, " m"]:
        """The rows of what agents in some places publish, one for each of the receivers."""
        place, deceived = self._deceived(receivers)
        crafted = self.crafts[senders] + (place if self.each else 0)
        found: np.ndarray = np.where(self.deceives[senders] & deceived, crafted, self.own[senders])
        return found

    def claimed(self, senders: Places, receivers: Int[np.ndarray, " m"]) -> Float[np.ndarray, " m"]:
        """How many samples agents in some places say that they trained on, to each of the receivers."""
        _, deceived = self._deceived(receivers)
        found: np.ndarray = np.where(deceived, self.claims[senders], self.num_samples[senders])
        return found

    def arrived(
        self,
        n: int,
        asked: Lists,
        receivers: Int[np.ndarray, " a"],
        good: Bool[np.ndarray, " rows"],
        most_samples: int,
    ) -> Inbox:
        """What some agents receive in round n of those whom they asked, all of whom are in this block: where the rows
        of its pool are `good`."""
        senders, to = asked.values, receivers[asked.owners]
        rows = self.rows(senders, to)
        there = good[rows]
        claims = believed(self.claimed(senders, to), most_samples)
        return Inbox(asked.only(there), rows[there], claims[there], np.full(there.sum(), n))

    def _deceived(self, receivers: Int[np.ndarray, " m"]) -> tuple[Places, Bool[np.ndarray, " m"]]:
        """Where some agents stand among the receivers, and whether they are there."""
        place = self.receivers.searchsorted(receivers)
        return place, self.receivers.take(place, mode="clip") == receivers


def outbox(block: Block, n: int) -> Outbox:
    """What the agents of a block publish in round `n`.

    Only benign agents are deceived: fellow attackers receive the models that each trained.
    """
    attack, layout, holdings = block.attackers.attack, block.layout, block.holdings
    samples = holdings.train.sizes.astype(float)
    claims = np.where(holdings.malicious & attack.lies(n), float(attack.claims or 0), samples)
    return Outbox(
        own=layout.own,
        crafts=layout.crafts,
        deceives=holdings.malicious & attack.crafts(n),
        each=attack.threat.each_receiver,
        receivers=block.attackers.benign,
        num_samples=samples,
        claims=claims,
    )


def craft_(
    block: Block, some: Places, n: int, finite: Bool[np.ndarray, " N"], look: Look
) -> list[Float[np.ndarray, " r"]]:
    """What malicious agents in some places craft, into their rows of the pool; the extents of these models.

    `finite` says whose models of all agents are: the others are not seen, and craft nothing.
    """
    terms, attackers, attack = block.terms, block.attackers, block.attackers.attack
    assert attack.craft is not None
    craft = attack.craft

    def ids_of(whose: Knowledge, cluster: int) -> list[int]:
        members = attackers.sides.get((whose, cluster), np.zeros(0, np.int64))
        return members[finite[members]].tolist()  # type: ignore[no-any-return]

    done = []
    for k in some.tolist():
        j, cluster, rows = int(block.agents[k]), int(block.holdings.cluster[k]), block.layout.crafted(k)
        fellows, benign = (attackers.sides[whose, cluster] for whose in ("fellows", "benign"))
        if not (finite[j] and finite[benign].any()):
            done.append(np.full(block.layout.each, np.nan))
            continue
        data, reference = block.holdings.true(k), block.reference(k)

        def losses(models: Float[Tensor, "m d"], data: Shard = data, reference: Reference | None = reference) -> Losses:
            models = tried_of(craft, models, terms.dim).to(block.pool)
            return losses_by(terms, models, torch.arange(len(models)), data, reference)

        view = View(
            n=n,
            agent=j,
            cluster=cluster,
            num_clusters=attackers.num_clusters,
            num_fellows=len(fellows),
            num_benign=len(benign),
            receivers=torch.from_numpy(attackers.benign.copy()),
            own=block.pool[int(block.layout.own[k])].clone(),
            before=block.pool[rows.start].clone(),  # where LocalUpdate left it
            data=Shard(data.x.cpu().clone(), data.y.cpu().clone()),
            losses=losses,
            threat=attack.threat,
            _ids_of=ids_of,
            _look=look,
            _links=functools.partial(attackers.links, terms.neighbours),
        )
        published = block.pool[rows]
        crafted = craft(view, stream(terms.seed, "craft", n, j))
        published.copy_(crafted_of(craft, crafted, (len(published), terms.dim)))
        done.append(extents(published, range(len(published))))
    return done

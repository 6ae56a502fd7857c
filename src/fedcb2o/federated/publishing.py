"""What agents publish after LocalUpdate: the model that each trained or, from an attacker, what it crafts."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o.data._dataset import Shard
from fedcb2o.federated.admission import clip_claimed_samples, max_abs
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.decisions import Inbox
from fedcb2o.federated.inference import Reference
from fedcb2o.federated.plugin_outputs import validated_crafted_models, validated_queries
from fedcb2o.federated.ragged import Indices, Ragged
from fedcb2o.federated.types import AttackView, Knowledge, Losses
from fedcb2o.federated.validation import training_losses
from fedcb2o.rng import stream

Peek = Callable[[list[int]], Float[Tensor, "m d"]]
"""The ids of some agents -> the models that they trained in this round: what an attacker may see, as it declared."""


@dataclass(frozen=True)
class Outbox:
    """What the agents of a block publish in a round, and what they say of it: `rows` of the pool with the `own` models,
    or from `crafts` on with those that an attacker makes, where it `deceives`, for everybody or for `each` of the
    `receivers`; and how many samples each says that it trained on, and to `receivers` who are lied to."""

    own: Int[np.ndarray, " a"]
    first_crafted: Int[np.ndarray, " a"]
    is_attacking: Bool[np.ndarray, " a"]
    per_receiver: bool
    receivers: Int[np.ndarray, " r"]
    num_samples: Float[np.ndarray, " a"]
    claimed_samples: Float[np.ndarray, " a"]

    def rows(self, senders: Indices, receivers: Int[np.ndarray, " m"]) -> Int[np.ndarray, " m"]:
        """The rows of what agents in some places publish, one for each of the receivers."""
        place, deceived = self._locate_receivers(receivers)
        crafted = self.first_crafted[senders] + (place if self.per_receiver else 0)
        found: np.ndarray = np.where(
            self.is_attacking[senders] & deceived, crafted, self.own[senders]
        )
        return found

    def samples_claimed_to(
        self, senders: Indices, receivers: Int[np.ndarray, " m"]
    ) -> Float[np.ndarray, " m"]:
        """How many samples agents in some places say that they trained on, to each of the receivers."""
        _, deceived = self._locate_receivers(receivers)
        found: np.ndarray = np.where(
            deceived, self.claimed_samples[senders], self.num_samples[senders]
        )
        return found

    def deliver(
        self,
        n: int,
        asked: Ragged,
        receivers: Int[np.ndarray, " a"],
        admissible: Bool[np.ndarray, " rows"],
        max_samples: int,
    ) -> Inbox:
        """What some agents receive in round n of those whom they asked, all of whom are in this block: where the rows
        of its pool are `good`."""
        senders = asked.values
        to = receivers[asked.row_ids]
        rows = self.rows(senders, to)
        there = admissible[rows]
        claims = clip_claimed_samples(self.samples_claimed_to(senders, to), max_samples)
        return Inbox(asked.filter(there), rows[there], claims[there], np.full(there.sum(), n))

    def _locate_receivers(
        self, receivers: Int[np.ndarray, " m"]
    ) -> tuple[Indices, Bool[np.ndarray, " m"]]:
        """Where some agents stand among the receivers, and whether they are there."""
        place = self.receivers.searchsorted(receivers)
        return place, self.receivers.take(place, mode="clip") == receivers


def make_outbox(group: AgentGroup, n: int) -> Outbox:
    """What the agents of a block publish in round `n`.

    Only benign agents are deceived: fellow attackers receive the models that each trained.
    """
    attack = group.adversary.attack
    layout = group.layout
    holdings = group.data
    samples = holdings.train.sizes.astype(float)
    claims = np.where(
        holdings.malicious & attack.misreports_samples(n),
        float(attack.claimed_samples or 0),
        samples,
    )
    return Outbox(
        own=layout.own,
        first_crafted=layout.first_crafted,
        is_attacking=holdings.malicious & attack.is_crafting(n),
        per_receiver=attack.threat.each_receiver,
        receivers=group.adversary.benign_ids,
        num_samples=samples,
        claimed_samples=claims,
    )


def craft_models_(
    group: AgentGroup, some: Indices, n: int, finite: Bool[np.ndarray, " N"], peek: Peek
) -> list[Float[np.ndarray, " r"]]:
    """What malicious agents in some places craft, into their rows of the pool; the extents of these models.

    `finite` says whose models of all agents are: the others are not seen, and craft nothing.
    """
    terms = group.spec
    attackers = group.adversary
    attack = group.adversary.attack
    assert attack.craft is not None
    craft = attack.craft

    def ids_of(whose: Knowledge, cluster: int) -> list[int]:
        members = attackers.members_by_role.get((whose, cluster), np.zeros(0, np.int64))
        return members[finite[members]].tolist()  # type: ignore[no-any-return]

    done = []
    for k in some.tolist():
        j = int(group.agents[k])
        cluster = int(group.data.cluster[k])
        rows = group.layout.crafted_rows(k)
        fellows, benign = (
            attackers.members_by_role[whose, cluster] for whose in ("fellows", "benign")
        )
        if not (finite[j] and finite[benign].any()):
            done.append(np.full(group.layout.crafted_per_attacker, np.nan))
            continue
        data = group.data.clean_training_data(k)
        reference = group.reference(k)

        def losses(
            models: Float[Tensor, "m d"],
            data: Shard = data,
            reference: Reference | None = reference,
        ) -> Losses:
            models = validated_queries(craft, models, terms.dim).to(group.models)
            return training_losses(terms, models, torch.arange(len(models)), data, reference)

        view = AttackView(
            n=n,
            agent=j,
            cluster=cluster,
            num_clusters=attackers.num_clusters,
            num_colluders=len(fellows),
            num_benign=len(benign),
            receivers=torch.from_numpy(attackers.benign_ids.copy()),
            own=group.models[int(group.layout.own[k])].clone(),
            previous=group.models[rows.start].clone(),  # where LocalUpdate left it
            data=Shard(data.x.cpu().clone(), data.y.cpu().clone()),
            losses=losses,
            threat=attack.threat,
            _ids_of=ids_of,
            _peek=peek,
            _links=functools.partial(attackers.benign_adjacency, terms.neighbours),
        )
        published = group.models[rows]
        crafted = craft(view, stream(terms.seed, "craft", n, j))
        published.copy_(validated_crafted_models(craft, crafted, (len(published), terms.dim)))
        done.append(max_abs(published, range(len(published))))
    return done

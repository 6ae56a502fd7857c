"""Published models of a round: what agents trained or, from an attacker, what it crafted.

>>> import numpy as np
>>> outbox = Outbox(
...     own=np.array([0, 1]),
...     first_crafted=np.array([2, 2]),
...     is_attacking=np.array([False, True]),
...     per_receiver=False,
...     receivers=np.array([0]),
...     num_samples=np.array([50.0, 50.0]),
...     claimed_samples=np.array([50.0, 90.0]),
... )
>>> outbox.rows(np.array([1, 1]), np.array([0, 1])).tolist()
[2, 1]
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o.data import Shard
from fedcb2o.federated.adversary import AttackView, Knowledge
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.decisions import Inbox
from fedcb2o.federated.guards.acceptance import max_abs
from fedcb2o.federated.plugin_outputs import validated_crafted_models, validated_queries
from fedcb2o.federated.ragged import Indices, Ragged
from fedcb2o.federated.types import Losses
from fedcb2o.federated.validation import training_losses
from fedcb2o.rng import stream

Peek = Callable[[list[int]], Float[Tensor, "m d"]]
"""Ids of agents -> the models that they trained in this round."""


@dataclass(frozen=True)
class Outbox:
    """Models that the agents of a group publish, and the numbers of samples that they claim.

    The benign `receivers`, in ascending order, get crafted models and false claims. `own` and
    `first_crafted` are rows of the model buffer; with `per_receiver`, an attacker has one row per
    receiver from `first_crafted` on. `num_samples` are the true numbers.
    """

    own: Int[np.ndarray, " a"]
    first_crafted: Int[np.ndarray, " a"]
    is_attacking: Bool[np.ndarray, " a"]
    per_receiver: bool
    receivers: Int[np.ndarray, " r"]
    num_samples: Float[np.ndarray, " a"]
    claimed_samples: Float[np.ndarray, " a"]

    def rows(self, senders: Indices, receivers: Int[np.ndarray, " m"]) -> Int[np.ndarray, " m"]:
        """Return the rows of published models, one per pair of sender and receiver."""
        position = self.receivers.searchsorted(receivers)
        is_deceived = self.receivers.take(position, mode="clip") == receivers
        crafted = self.first_crafted[senders] + (position if self.per_receiver else 0)
        gets_crafted = self.is_attacking[senders] & is_deceived
        rows: np.ndarray = np.where(gets_crafted, crafted, self.own[senders])
        return rows

    def samples_claimed_to(
        self, senders: Indices, receivers: Int[np.ndarray, " m"]
    ) -> Float[np.ndarray, " m"]:
        """Return the claimed numbers of samples, one per pair of sender and receiver."""
        is_deceived = np.isin(receivers, self.receivers)
        claims: np.ndarray = np.where(
            is_deceived, self.claimed_samples[senders], self.num_samples[senders]
        )
        return claims

    def deliver(
        self,
        n: int,
        asked: Ragged,
        receivers: Int[np.ndarray, " a"],
        admissible: Bool[np.ndarray, " rows"],
        max_samples: int,
    ) -> Inbox:
        """Deliver models within the group (alg:localAggregation, line 2).

        The ids of the peers that receivers asked are indices in the group. `admissible` tells for
        each row of the buffer whether it is received. At most `max_samples` samples are believed.
        """
        senders = asked.values
        to = receivers[asked.row_ids]
        rows = self.rows(senders, to)
        arrives = admissible[rows]
        claims = np.minimum(self.samples_claimed_to(senders, to), max_samples)
        rounds = np.full(arrives.sum(), n)
        return Inbox(asked.filter(arrives), rows[arrives], claims[arrives], rounds)


def make_outbox(group: AgentGroup, n: int) -> Outbox:
    """Return what the agents of a group publish in round n."""
    attack, layout = group.adversary.attack, group.layout
    malicious = group.data.malicious
    num_samples = group.data.train.sizes.astype(float)
    claims_falsely = attack.claimed_samples is not None and n >= attack.from_round
    # Only benign agents are deceived: fellow attackers receive the models that each trained.
    return Outbox(
        own=layout.own,
        first_crafted=layout.first_crafted,
        is_attacking=malicious & attack.is_crafting(n),
        per_receiver=attack.threat.each_receiver,
        receivers=group.adversary.benign_ids,
        num_samples=num_samples,
        claimed_samples=np.where(
            malicious & claims_falsely, float(attack.claimed_samples or 0), num_samples
        ),
    )


def craft_models_(
    group: AgentGroup, members: Indices, n: int, finite: Bool[np.ndarray, " N"], peek: Peek
) -> list[Float[np.ndarray, " r"]]:
    """Have attackers craft models, into their rows of the buffer.

    A model that is not `finite` is not seen. `peek` gives an attacker the models that it declared
    to know. Returns the largest absolute values of each attacker's models; NaN for one that crafts
    none.
    """
    largest = []
    for k in members.tolist():
        fellows = _members(group, "fellows", k)
        benign = _members(group, "benign", k)
        # An attacker whose model is broken, or that could see broken ones only, crafts none.
        if finite[group.agents[k]] and (finite[benign].any() or not len(benign)):
            view = _attack_view(group, k, n, finite, peek, len(fellows), len(benign))
            largest.append(_craft_(group, k, view))
        else:
            largest.append(np.full(group.layout.crafted_per_attacker, np.nan))
    return largest


def _members(group: AgentGroup, role: Knowledge, k: int) -> Int[np.ndarray, " n"]:
    """Return the agents of one role in an attacker's cluster."""
    return group.adversary.members_by_role[role, int(group.data.cluster[k])]


def _craft_(group: AgentGroup, k: int, view: AttackView) -> Float[np.ndarray, " r"]:
    """Have one attacker craft its models; return their largest absolute values."""
    craft = group.adversary.attack.craft
    assert craft is not None
    published = group.models[group.layout.crafted_rows(k)]
    output = craft(view, stream(group.spec.seed, "craft", view.n, view.agent))
    shape = (len(published), group.spec.dim)
    published.copy_(validated_crafted_models(craft, output, shape))
    return max_abs(published, range(len(published)))


def _attack_view(
    group: AgentGroup,
    k: int,
    n: int,
    finite: Bool[np.ndarray, " N"],
    peek: Peek,
    num_colluders: int,
    num_benign: int,
) -> AttackView:
    """Return the view of the attacker at index k."""
    adversary, attack = group.adversary, group.adversary.attack
    data, reference = group.data.clean_training_data(k), group.reference(k)
    rows = group.layout.crafted_rows(k)

    def ids_of(role: Knowledge, cluster: int) -> list[int]:
        members = adversary.members_by_role.get((role, cluster), np.zeros(0, np.int64))
        ids: list[int] = members[finite[members]].tolist()
        return ids

    def losses(models: Float[Tensor, "m d"]) -> Losses:
        assert attack.craft is not None
        models = validated_queries(attack.craft, models, group.spec.dim).to(group.models)
        indices = torch.arange(len(models))
        return training_losses(group.spec, models, indices, data, reference)

    # Copies, because an attack may write into its view.
    return AttackView(
        n=n,
        agent=int(group.agents[k]),
        cluster=int(group.data.cluster[k]),
        num_clusters=adversary.num_clusters,
        num_colluders=num_colluders,
        num_benign=num_benign,
        receivers=torch.from_numpy(adversary.benign_ids.copy()),
        own=group.models[int(group.layout.own[k])].clone(),
        previous=group.models[rows.start].clone(),  # where LocalUpdate left it
        data=Shard(data.x.cpu().clone(), data.y.cpu().clone()),
        losses=losses,
        factor_pairs=group.spec.factor_pairs,
        threat=attack.threat,
        _ids_of=ids_of,
        _peek=peek,
        _links=functools.partial(adversary.benign_adjacency, group.spec.neighbours),
    )

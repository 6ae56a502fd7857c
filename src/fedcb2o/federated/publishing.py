"""Published models of a round: what agents trained or, from an attacker, what it crafted."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from fedcb2o.data import Shard, features
from fedcb2o.federated.adversary import Adversary, AttackView, Knowledge
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.decisions import Inbox
from fedcb2o.federated.guards.acceptance import max_abs
from fedcb2o.federated.inference import bound_networks, per_sample_losses
from fedcb2o.federated.plugin_outputs import validated_crafted_models, validated_queries
from fedcb2o.federated.ragged import AgentIds, Indices, Members, Ragged, Rows
from fedcb2o.federated.top_k import advance_
from fedcb2o.federated.types import Losses
from fedcb2o.federated.validation import training_losses
from fedcb2o.rng import stream

Peek = Callable[[list[int]], Float[Tensor, "m d"]]
"""Ids of agents -> the models that they trained in this round."""


@dataclass(frozen=True, kw_only=True)
class Outbox:
    """Rows that agents publish, whether each row can be received, and claims of samples."""

    own: Int[np.ndarray, " a"]
    num_samples: Float[np.ndarray, " a"]
    is_sent: Bool[np.ndarray, " rows"]

    def sent(self, senders: Members, receivers: AgentIds) -> tuple[Rows, Float[np.ndarray, " m"]]:
        """Return the row and the claimed samples of what each sender sends to each receiver."""
        return Rows(self.own[senders]), self.num_samples[senders]

    def deliver(self, n: int, asked: Ragged, receivers: AgentIds, max_samples: int) -> Inbox:
        """Deliver models (alg:localAggregation, line 2); believe at most `max_samples` samples."""
        senders = Members(asked.values)
        to = AgentIds(receivers[asked.list_index])
        rows, claims = self.sent(senders, to)
        arrives = self.is_sent[rows]
        num_samples = np.minimum(claims[arrives], max_samples)
        rounds = np.full(len(num_samples), n)
        return Inbox(asked.filter(arrives), Rows(rows[arrives]), num_samples, rounds)


@dataclass(frozen=True, kw_only=True)
class DeceptiveOutbox(Outbox):
    """An outbox with crafted models and false claims for the benign `receivers`, which ascend.

    `first_crafted` are rows of the model buffer; with `per_receiver`, an attacker has one row per
    receiver from there on. Fellow attackers receive the models that each trained.
    """

    first_crafted: Int[np.ndarray, " a"]
    is_crafting: Bool[np.ndarray, " a"]
    per_receiver: bool
    receivers: Int[np.ndarray, " r"]
    claimed_samples: Float[np.ndarray, " a"]

    def sent(self, senders: Members, receivers: AgentIds) -> tuple[Rows, Float[np.ndarray, " m"]]:
        """Return the row and the claimed samples of what each sender sends to each receiver."""
        # Past the end the position is clipped, where the ids differ.
        position = self.receivers.searchsorted(receivers)
        is_deceived = self.receivers.take(position, mode="clip") == receivers
        crafted = self.first_crafted[senders] + (position if self.per_receiver else 0)
        gets_crafted = self.is_crafting[senders] & is_deceived
        rows = np.where(gets_crafted, crafted, self.own[senders])
        claims = np.where(is_deceived, self.claimed_samples[senders], self.num_samples[senders])
        return Rows(rows), claims


def make_outbox(group: AgentGroup, is_agent_sent: Bool[np.ndarray, " a"]) -> Outbox:
    """Return what the agents of a group publish, of those whose `is_agent_sent` is True."""
    rows = group.layout.own
    # Receivers decode what was sent, which differs from the trained model.
    if group.layout.sent is not None:
        rows = np.where(_is_exact(group), rows, group.layout.sent)
    # Rows of received models are never published.
    is_row_sent = np.zeros(group.layout.first_received, dtype=bool)
    is_row_sent[rows] = is_agent_sent
    return Outbox(own=rows, num_samples=group.data.num_samples, is_sent=is_row_sent)


def encode_(group: AgentGroup, members: Members, n: int, is_sent: Bool[np.ndarray, " N"]) -> None:
    """Move the published models of agents that publish in round n towards their models."""
    assert group.layout.sent is not None
    chosen = members[is_sent[group.agents[members]] & ~_is_exact(group)[members]]
    for k in chosen.tolist():
        advance_(group.models[int(group.layout.sent[k])], group.models[int(group.layout.own[k])])


def _is_exact(group: AgentGroup) -> Bool[np.ndarray, " a"]:
    """Return True for attackers who craft models: no receiver can hold them to an encoding."""
    adversary = group.adversary
    return group.data.malicious & (adversary is not None and adversary.attack.deceives)


def deceptive_outbox(
    group: AgentGroup, outbox: Outbox, n: int, is_crafted_sent: Mapping[int, Bool[np.ndarray, " r"]]
) -> DeceptiveOutbox:
    """Return what a group with attackers publishes in round n.

    `outbox` has the models that its agents trained. `is_crafted_sent` tells by an attacker's index
    for each of its crafted models whether it can be received.
    """
    adversary = _adversary_of(group)
    attack, malicious = adversary.attack, group.data.malicious
    is_sent = outbox.is_sent.copy()
    for k, is_model_sent in is_crafted_sent.items():
        is_sent[group.layout.crafted_rows(k)] = is_model_sent
    claims = outbox.num_samples
    if attack.claimed_samples is not None and n >= attack.from_round:
        claims = np.where(malicious, float(attack.claimed_samples), claims)
    return DeceptiveOutbox(
        own=outbox.own,
        num_samples=outbox.num_samples,
        is_sent=is_sent,
        first_crafted=group.layout.first_crafted,
        is_crafting=malicious & attack.is_crafting(n),
        per_receiver=attack.threat.each_receiver,
        receivers=adversary.benign_ids,
        claimed_samples=claims,
    )


def craft_models_(
    group: AgentGroup, members: Indices, n: int, finite: Bool[np.ndarray, " N"], peek: Peek
) -> list[Float[np.ndarray, " r"]]:
    """Have attackers craft models, into their rows of the buffer.

    They see only `finite` models. Returns the largest absolute values of each attacker's models;
    NaN for one that crafts none.
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


def _adversary_of(group: AgentGroup) -> Adversary:
    assert group.adversary is not None, "no agent attacks outside of simulations"
    return group.adversary


def _members(group: AgentGroup, role: Knowledge, k: int) -> Int[np.ndarray, " n"]:
    """Return the agents of one role in an attacker's cluster."""
    return _adversary_of(group).members_by_role[role, int(group.data.cluster[k])]


def _craft_(group: AgentGroup, k: int, view: AttackView) -> Float[np.ndarray, " r"]:
    """Have one attacker craft its models; return their largest absolute values."""
    craft = _adversary_of(group).attack.craft
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
    adversary = _adversary_of(group)
    attack = adversary.attack
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

    def sample_losses(
        models: Float[Tensor, "m d"], labels: Shaped[Tensor, "m n *target"] | None = None
    ) -> Float[Tensor, "m n"]:
        m = len(models)
        models = models.to(group.models)
        # One model per batch would be bound to the network, without a gradient.
        batch = bound_networks(group.spec.module, models, torch.arange(m), max(m, 2), reference)
        _, network = next(batch)
        outputs = network(features(data.x).unsqueeze(0))
        targets = data.y.expand(m, *data.y.shape) if labels is None else labels.to(data.y)
        return per_sample_losses(group.spec.training.loss, outputs, targets, 2).cpu()

    server = group.spec.algorithm.server

    def server_step(models: Float[Tensor, "m d"]) -> Float[Tensor, " d"]:
        assert server is not None
        # As the server itself steps in this round, with the same random numbers.
        x, last = group.models[group.spec.num_agents :][:2]
        training = group.spec.training.in_round(n)
        draw = stream(group.spec.seed, "server", n)
        return server.step(models, x, last, training.lambda2 * training.gamma, draw)[0]

    # Copies, because an attack may write into its view. The first crafted row still holds the model
    # from before the round: `adversarial_engine._remember_models_` put it there before training.
    return AttackView(
        n=n,
        agent=int(group.agents[k]),
        cluster=int(group.data.cluster[k]),
        num_clusters=adversary.num_clusters,
        num_colluders=num_colluders,
        num_benign=num_benign,
        receivers=torch.from_numpy(adversary.benign_ids.copy()),
        own=group.models[int(group.layout.own[k])].clone(),
        previous=group.models[rows.start].clone(),
        data=Shard(data.x.cpu().clone(), data.y.cpu().clone()),
        losses=losses,
        sample_losses=sample_losses,
        factor_pairs=group.spec.factor_pairs,
        threat=attack.threat,
        server=None if server is None else server_step,
        _ids_of=ids_of,
        _peek=peek,
        _links=functools.partial(adversary.benign_adjacency, group.spec.neighbours),
    )

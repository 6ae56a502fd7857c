"""Attackers around an engine: a wrapper plays the malicious agents (sec:experiments).

The code of benign agents contains nothing of attacks. The wrapper

- gives sybils new identities: benign agents have never met them;
- lets colluders ask each other first, and average by numbers of samples;
- lets attackers craft models, and claim numbers of samples, for benign agents.

Attackers that poison data or do not collude are otherwise like benign agents. The wrapper also
keeps to a clock, if there is one: it decides which agents train, and which models arrive.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Bool, Float

from fedcb2o.federated import batched_aggregation
from fedcb2o.federated.agent_group import AgentGroup, Phase
from fedcb2o.federated.aggregation.sample_average import sample_weights
from fedcb2o.federated.batched_aggregation import SAMPLE, aggregate_batches_
from fedcb2o.federated.contacts import AgentState, ContactTable
from fedcb2o.federated.decisions import Decisions, Inbox
from fedcb2o.federated.guards.acceptance import is_acceptable, max_abs
from fedcb2o.federated.local_update import TrainResult, train_
from fedcb2o.federated.publishing import Outbox, deceptive_outbox
from fedcb2o.federated.ragged import AgentIds, Members, Positions, Ragged
from fedcb2o.federated.selection import select_colluding_peers
from fedcb2o.federated.validation import own_models
from fedcb2o.rng import agent_streams
from fedcb2o.simulation.clock import Clock
from fedcb2o.simulation.rounds import BenignEngine


class Stage(BenignEngine, batched_aggregation.BatchEngine, Protocol):
    """An engine on which attackers can be played."""

    group: AgentGroup
    outbox: Outbox | None

    def craft_models_(
        self, n: int, is_finite: Bool[np.ndarray, " N"]
    ) -> dict[int, Float[np.ndarray, " r"]]:
        """Craft the attackers' models; return their largest absolute values by index in the group.

        Attackers see the models that their threat model allows.
        """

    def replace_outbox(self, n: int, outbox: Outbox) -> None:
        """Publish other models of round n."""


class AdversarialEngine:
    """An engine in which the malicious agents of a simulation attack (sec:experiments).

    It has the methods of `rounds.Engine`.
    """

    def __init__(self, engine: Stage, clock: Clock | None = None) -> None:
        adversary = engine.group.adversary
        assert adversary is not None
        self.engine = engine
        self.clock = clock
        self.adversary = adversary
        self.spec = engine.spec
        self.batches = engine.batches
        self.benign = ~adversary.malicious
        self.may_break = adversary.attack.is_crafting
        self._deceives = adversary.attack.deceives
        self.evaluate = engine.evaluate

    def train_(self, n: int) -> list[TrainResult]:
        """Train the models of all agents; attackers remember theirs from before, if they craft."""
        if self.adversary.attack.is_crafting(n):
            # The rows of crafted models are free until the agents publish.
            self.engine.map_batches(_REMEMBER, n)
        if self.clock is not None:
            return self.engine.map_batches(_TRAIN_SOME, n, self.clock.trains)
        return self.engine.train_(n)

    def publish_(
        self, n: int, online: Bool[np.ndarray, " N"], max_abs: Float[np.ndarray, " N"]
    ) -> None:
        """Publish the models of all agents; attackers craft models and claim samples."""
        self.engine.publish_(n, online, max_abs)
        if not self._deceives:
            return
        group = self.engine.group
        is_sent = {}
        if self.adversary.attack.is_crafting(n):
            for k, crafted in self.engine.craft_models_(n, np.isfinite(max_abs)).items():
                # An attacker that is offline publishes nothing, also no crafted model.
                is_sent[k] = is_acceptable(crafted) & online[group.agents[k]]
        assert self.engine.outbox is not None
        outbox = deceptive_outbox(group, self.engine.outbox, n, is_sent)
        self.engine.replace_outbox(n, outbox)

    def aggregate_(
        self,
        n: int,
        states: Sequence[AgentState],
        active: Bool[np.ndarray, " N"],
        deadline: float | None,
        on_step: Callable[[str], None],
    ) -> tuple[list[AgentState], list[Decisions], Bool[np.ndarray, " N"]]:
        """Run LocalAggregation (Algorithm 2); colluders have one of their own."""
        if self.adversary.attack.sybils:
            # Benign code sees no contact with an attacker, who is new under its new identity.
            identities = self.adversary.new_identities(n)
            states = [state.without(identities) for state in states]
        colluding = self.adversary.colluding
        options: dict[str, Any] = {}
        if self.clock is not None:
            options["arrive"] = functools.partial(self.clock.deliver_, self.batches)
        if colluding[np.concatenate(self.batches)].any():
            contacts = [state.contacts for state in states]
            options["sampled"] = self.sample_peers(n, contacts, active)
            options["amend_"] = functools.partial(self._average_by_samples_, n, active & colluding)
        # Attackers that do not collude run Algorithm 2 as benign agents do.
        elif self.clock is None:
            return self.engine.aggregate_(n, states, active, deadline, on_step)
        # Colluders decide afterwards, by `_average_by_samples_`.
        is_benign = active & ~colluding
        return aggregate_batches_(self.engine, n, states, is_benign, deadline, on_step, **options)

    def sample_peers(
        self, n: int, contacts: Sequence[ContactTable], active: Bool[np.ndarray, " N"]
    ) -> list[Ragged]:
        """Sample the peers that active agents ask (line 1); colluders ask each other first."""
        colluding = self.adversary.colluding
        sampled = self.engine.map_batches(SAMPLE, n, active & ~colluding, arguments=[contacts])
        if not colluding.any():
            return sampled
        return self.engine.map_batches(_COLLUDE, n, active & colluding, arguments=[sampled])

    def _average_by_samples_(
        self,
        n: int,
        active: Bool[np.ndarray, " N"],
        inboxes: Sequence[Inbox],
        decisions: Sequence[Decisions],
    ) -> None:
        """Weigh all models that colluders received by numbers of samples; they have no guards."""
        group = self.engine.group
        for inbox, batch in zip(inboxes, decisions, strict=True):
            positions = Positions(np.flatnonzero(active[batch.agents]))
            for equal, entries, received in inbox.group_by_size(positions):
                own = None
                if self.adversary.averages_own_model:
                    members = group.agents.searchsorted(batch.agents[equal])
                    own = own_models(group, members, n)
                mu = sample_weights(received, own)
                num_received = received.ids.shape[-1]
                batch.weights[entries] = mu[..., :num_received].flatten().numpy()
                batch.own_weight[equal] = mu[..., num_received:].sum(-1).numpy()


def _remember_models_(group: AgentGroup, members: Members, n: int) -> None:
    """Copy the models of attackers to their first crafted rows, before they train."""
    layout = group.layout
    for k in members[group.data.malicious[members]].tolist():
        group.models[layout.first_crafted[k]] = group.models[layout.own[k]]


def _sample_fellows(
    group: AgentGroup, members: Members, sampled: Ragged, n: int, active: Bool[np.ndarray, " N"]
) -> Ragged:
    """Sample the peers that active colluders ask, all of their own clusters.

    `sampled` has the peers that the others ask.
    """
    spec, adversary = group.spec, group.adversary
    assert adversary is not None
    positions = Positions(np.flatnonzero(active[group.agents[members]]))
    agents = AgentIds(group.agents[members[positions]])
    fellows, others = adversary.colluding_peers(agents, spec.neighbours)
    generators = agent_streams(spec.seed, "select", n, agents=agents.tolist())
    chosen = select_colluding_peers(fellows, others, spec.agents.budget, generators)
    # The others keep the peers that they have sampled.
    rest = np.setdiff1d(np.arange(len(members)), positions)
    return Ragged.scatter(len(members), (rest, sampled.take(rest)), (positions, chosen))


def _train_some_(
    group: AgentGroup, members: Members, n: int, trains: Bool[np.ndarray, " N"]
) -> TrainResult:
    """Train some members of a batch in place; the loss of the others is NaN."""
    chosen = trains[group.agents[members]]
    losses = np.full(len(members), np.nan)
    has_trained = True
    if chosen.any():
        losses[chosen], _, has_trained = train_(group, members[chosen], n)
    return losses, max_abs(group.models, group.layout.own[members].tolist()), has_trained


_TRAIN_SOME = Phase(_train_some_)
_REMEMBER = Phase(_remember_models_, is_cheap=True)
_COLLUDE = Phase(_sample_fellows, is_cheap=True)

"""Engine of one agent among real peers.

A benign agent runs `algorithm2.local_aggregation_` itself, with the network as its download. A
malicious or inactive one runs the batched code, whose `exchange` is the network.

The rounds are those of every engine (alg:localAggregation). The model buffer is [own | crafted |
previous | received]. A received model stays in its row until the round has mixed.
"""

import dataclasses
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o.federated import (
    AgentGroup,
    AgentState,
    ContactTable,
    Decisions,
    EvaluationResult,
    Inbox,
    Ragged,
    algorithm2,
    batched_aggregation,
    craft_models_,
    evaluate_models,
    make_outbox,
    max_abs,
    mix_,
    mixing_matrix,
    train_,
)
from fedcb2o.federated.guards.checks import ADMITTED, OUTCOMES
from fedcb2o.kernels import dispatch
from fedcb2o.peer._denormals import flush_denormals
from fedcb2o.peer.node._catch_up import CatchUp
from fedcb2o.peer.node._peer_monitor import PeerMonitor
from fedcb2o.peer.node._publisher import ModelPublisher
from fedcb2o.peer.node._reasons import relay_error
from fedcb2o.peer.wire._client import SILENT_REASONS, Arrival, PeerClient

_T = TypeVar("_T")

_ONLY_AGENT = np.zeros(1, np.int64)  # position of the agent in its group
_ROUNDS_ALONE = 5  # in a row without an answer, after which the operator gets a message,
_SECONDS_ALONE = 30.0  # if they took this time: longer than a restart of the relay


class PeerEngine:
    """Engine of one agent.

    Args:
        group: The group of this agent.
        publisher: Publisher of its models.
        client: Client that downloads other models.
        monitor: Monitor of the members that may be asked.
        initial_model: The agent's model before all rounds, shape [d].
        before_training: Called before the agent trains.

    Attributes:
        arrivals: Models that arrived in the last exchange, by peer.
        failures: Reasons of the missing models in the last exchange, by peer.
        exchange_seconds: Duration of the last exchange.
        free_until: Monotonic time until which an exchange may wait without delaying the round.
        catch_up: Rounds in which the guard `max_distance` is not checked.
    """

    def __init__(
        self,
        group: AgentGroup,
        publisher: ModelPublisher,
        client: PeerClient,
        monitor: PeerMonitor,
        initial_model: Float[Tensor, " d"],
        before_training: Callable[[], None] = lambda: None,
    ) -> None:
        self.group = group
        self.before_training = before_training
        self.publisher = publisher
        self.client = client
        self.monitor = monitor
        self.initial_model = initial_model
        self.spec = group.spec
        self.adversary = group.adversary
        self.agent_id = int(group.agents[0])
        self.batches = [group.agents]
        self.arrivals: Mapping[int, Arrival] = {}
        self.failures: Mapping[int, str] = {}
        self.exchange_seconds = 0.0
        self.free_until = 0.0
        self.catch_up = CatchUp()
        self._rounds_alone = 0
        self._last_answer = time.monotonic()
        self._has_warned = False
        self._unlikely = frozenset[int]()  # contacts of likelihood 0, which are never asked
        self._last_outcomes: dict[int, int] = {}  # outcome of the last received model, by peer
        self._has_warned_of_likelihoods = False

    def map_batches(
        self,
        function: Callable[..., _T],
        *shared: Any,
        arguments: Sequence[Sequence[Any]] = (),
    ) -> list[_T]:
        """Apply a function to the group.

        A peer must not end because its training diverged, for instance from an average with a model
        that was crafted for this. It then trains once more, from the initial model.

        Args:
            function: A step of a round; the candidates are set for `sample_peers`.
            *shared: Arguments for all groups; the first one is the round.
            arguments: Arguments of each group.

        Returns:
            The result for the only group.
        """
        n = int(shared[0])
        group = (
            self._with_candidates(n) if function is batched_aggregation.sample_peers else self.group
        )
        own_arguments = (argument[0] for argument in arguments)
        if function is train_:
            self.before_training()
        call = functools.partial(function, group, _ONLY_AGENT, *own_arguments, *shared)
        with dispatch.use_kernels(self.spec.kernels.linear, self.spec.kernels.convolution):
            result: Any = call()
            if function is train_ and self._has_diverged(n, *result[:2]):
                self._own_model().copy_(self.initial_model)
                result = call()
        return [result]

    def _has_diverged(
        self, n: int, losses: Float[np.ndarray, " 1"], max_abs: Float[np.ndarray, " 1"]
    ) -> bool:
        """Check the training results, unless a simulated attack crafts models."""
        is_finite = (np.isfinite(losses) & np.isfinite(max_abs)).all()
        if is_finite or self.adversary.attack.is_crafting(n):
            return False
        self.publisher.notify(
            f"training diverged in round {n + 1}: it begins again with the initial model; are the "
            "data on the agreed scale?"
        )
        return True

    def _with_candidates(self, n: int) -> AgentGroup:
        """Return the group with the candidates of round `n` as neighbours."""
        candidates = self._candidates(n)
        neighbours = [torch.zeros(0, dtype=torch.int64)] * self.spec.num_agents
        neighbours[self.agent_id] = torch.tensor(candidates, dtype=torch.int64)
        spec = dataclasses.replace(self.spec, neighbours=tuple(neighbours))
        return dataclasses.replace(self.group, spec=spec)

    def _candidates(self, n: int) -> list[int]:
        """Return the peers that may be asked in a round, by ascending id."""
        candidates = set(self.monitor.candidates(n))
        if self.spec.neighbours is not None:
            candidates &= set(self.spec.neighbours[self.agent_id].tolist())
        return sorted(candidates)

    def aggregate_(
        self,
        n: int,
        states: Sequence[AgentState],
        active: Bool[np.ndarray, " N"],
        deadline: float | None,
        on_step: Callable[[str], None],
    ) -> tuple[list[AgentState], list[Decisions], Bool[np.ndarray, " N"]]:
        """Run Algorithm 2 for the agent (alg:localAggregation); a simulated attacker colludes.

        Args:
            n: The round.
            states: The state of the only group.
            active: Agents that take part in the round.
            deadline: Time in seconds after which models are missing.
            on_step: Called with the name of each finished step.

        Returns:
            The new state and the decisions of the only group; and for each agent True, except for
            this one if its model is not finite.
        """
        colludes = self.adversary.colluding[self.agent_id]
        if colludes or not active[self.agent_id]:
            return batched_aggregation.aggregate_batches_(
                self, n, states, active, deadline, on_step
            )

        agent = self._with_candidates(n)
        contacts = states[0].contacts.forget(self.adversary.new_identities(n))
        self.catch_up.start_if_late(self.monitor.is_late(n))
        if self.catch_up.rounds_left:  # its own model is the outlier
            agent = _without_max_distance(agent)
            contacts = contacts.forget(_unlikely_peers(contacts))
        state = AgentState(contacts, states[0].rule_states)
        self._unlikely = frozenset(_unlikely_peers(contacts).tolist())
        kernels = dispatch.use_kernels(self.spec.kernels.linear, self.spec.kernels.convolution)
        with kernels, flush_denormals():  # models that were received are evaluated
            state, decisions = algorithm2.local_aggregation_(
                agent, n, state, lambda ids: self._download(n, ids, deadline), on_step
            )
        peers = decisions.received.values.tolist()
        outcomes = dict(zip(peers, decisions.admission.tolist(), strict=True))
        self._last_outcomes.update(outcomes)
        return [state], [decisions], self._is_finite()

    def publish_(
        self, n: int, online: Bool[np.ndarray, " N"], max_abs: Float[np.ndarray, " N"]
    ) -> None:
        """Offer the trained model; an attacker of a simulation crafts models first.

        Args:
            n: The round.
            online: Agents that are online; all real peers are.
            max_abs: Largest absolute parameters of the trained models.
        """
        outbox = make_outbox(self.group, n)
        num_samples = int(outbox.num_samples[0])
        claimed_samples = int(outbox.claimed_samples[0])
        theta = self._own_model()
        if not outbox.is_attacking[0] and claimed_samples == num_samples:
            self.publisher.publish(n, theta, num_samples)
            return

        receivers = self.adversary.benign_ids
        if outbox.is_attacking[0]:
            # colluders look at each other's trained models before they craft
            pending = dict.fromkeys(receivers.tolist())
            self.publisher.publish_attack(n, theta, num_samples, pending, claimed_samples)
            online = np.ones(self.spec.num_agents, dtype=bool)
            craft_models_(self.group, _ONLY_AGENT, n, online, self._peek(n))
        rows = outbox.rows(np.zeros(len(receivers), np.int64), receivers).tolist()
        crafted = {
            receiver: self.group.models[row]
            for receiver, row in zip(receivers.tolist(), rows, strict=True)
        }
        self.publisher.publish_attack(n, theta, num_samples, crafted, claimed_samples)

    def _peek(self, n: int) -> Callable[[list[int]], Float[Tensor, "m d"]]:
        """Return an attacker's view, with its own model for missing ones."""

        def peek(ids: list[int]) -> Float[Tensor, "m d"]:
            models = self.client.peek(n, [i for i in ids if i != self.agent_id])
            own_model = self._own_model()
            if not ids:
                return torch.zeros(0, self.spec.dim)
            return torch.stack([models.get(i, own_model) for i in ids])

        return peek

    def exchange(self, n: int, asked: Sequence[Ragged], deadline: float | None) -> list[Inbox]:
        """Download the models of the asked peers (alg:localAggregation, line 2).

        Args:
            n: The round.
            asked: The asked agents; attackers ask themselves too.
            deadline: Time in seconds after which models are missing.

        Returns:
            The received models of the only group.
        """
        return [self._fetch(n, asked[0].values.tolist(), [], deadline)]

    def _download(self, n: int, asked: Ragged, deadline: float | None) -> Inbox:
        """Download the models of the asked peers, or of other candidates in place of late ones."""
        ids = asked.values.tolist()
        self._warn_if_all_unlikely(n, ids)
        spares = [peer for peer in self._candidates(n) if peer not in ids]
        start = n % max(1, len(spares))  # not always the same ones
        return self._fetch(n, ids, [*spares[start:], *spares[:start]], deadline)

    def _fetch(
        self, n: int, ids: list[int], spares: Sequence[int], deadline: float | None
    ) -> Inbox:
        peers = [i for i in ids if i != self.agent_id]
        first_row = self.group.layout.first_received
        rows = {peer: first_row + k for k, peer in enumerate(peers)}
        targets = {peer: self.group.models[row] for peer, row in rows.items()}

        start = time.monotonic()
        self.monitor.audit(n, peers)
        self.arrivals, self.failures = self.client.fetch(
            n, targets, deadline, spares=spares, free_until=self.free_until
        )
        self.exchange_seconds = time.monotonic() - start
        self._warn_if_alone()

        own_samples = self.group.data.train.sizes.astype(float)[0]
        own_row = int(self.group.layout.own[0])
        received = {i: (own_samples, n, own_row) for i in ids if i == self.agent_id}
        for i, arrival in self.arrivals.items():
            received[i] = (arrival.num_samples, arrival.round, rows[arrival.row_owner])
        entries = [received[i] for i in sorted(received)]
        claims = np.array([claim for claim, _, _ in entries], dtype=float)
        rounds = np.array([round for _, round, _ in entries], np.int64)
        buffer_rows = np.array([row for _, _, row in entries], np.int64)
        num_samples = np.minimum(claims, self.spec.max_samples)
        senders = Ragged.from_arrays([np.array(sorted(received), np.int64)])
        return Inbox(senders, buffer_rows, num_samples, rounds)

    def _warn_if_alone(self) -> None:
        """Name the members that did not answer, after some rounds without any answer."""
        is_alone = all(reason in SILENT_REASONS for reason in self.failures.values())
        if self.arrivals or not is_alone or self._has_warned_of_likelihoods:
            self._rounds_alone = 0
            self._last_answer = time.monotonic()
            self._has_warned = False
            return
        self._rounds_alone += 1
        seconds = time.monotonic() - self._last_answer
        is_short = self._rounds_alone < _ROUNDS_ALONE or seconds < _SECONDS_ALONE
        if is_short or self._has_warned or relay_error(self.client.transport):
            return
        self._has_warned = True
        linked = self.monitor.reachable()
        states = [
            f"{self.monitor.federation.members[i].name} "
            f"{'does not answer' if i in linked else 'is not reachable'}"
            for i in sorted(self.monitor.other_members)
        ]
        self.publisher.notify(
            f"this agent has trained alone for {self._rounds_alone} rounds: {', '.join(states)}. A "
            "newer version of the federation may have removed or changed it: `fedcb2o peer check`, "
            "or ask for the newest file"
        )

    def _warn_if_all_unlikely(self, n: int, asked: Sequence[int]) -> None:
        """Name the members that are not asked, because the likelihood of all is 0."""
        candidates = self._candidates(n)
        if asked or not candidates or not self._unlikely.issuperset(candidates):
            self._has_warned_of_likelihoods = False
            return
        if self._has_warned_of_likelihoods:
            return
        self._has_warned_of_likelihoods = True
        members = self.monitor.federation.members
        names = defaultdict[str, list[str]](list)
        for i in candidates:
            reason = "before this start"
            if i in self._last_outcomes:
                outcome = self._last_outcomes[i]
                reason = "loss too high" if outcome == ADMITTED else OUTCOMES[outcome]
            names[reason].append(members[i].name)
        states = [f"{', '.join(who)} ({reason})" for reason, who in names.items()]
        lag = self.monitor.federation.lag
        self.publisher.notify(
            f"this agent asks no member from round {n + 1} on: by their last models, the sampling "
            f"likelihood of all reachable members is 0: {', '.join(states)}. Check that its data "
            "have the scale and the classes of the others. Then stop it for more than "
            f"{lag} rounds: with --resume it skips them, and asks all members again"
        )

    def mix_(self, decisions: Sequence[Decisions]) -> Bool[np.ndarray, " N"]:
        """Average the models in place: theta <- W theta (alg:localAggregation, line 7).

        Args:
            decisions: The weights of the only group.

        Returns:
            True for each agent, except for this one if its model is not finite.
        """
        layout = self.group.layout
        matrix = mixing_matrix(decisions[0], layout.own, layout.previous)
        with flush_denormals():
            mix_(self.group.models, matrix, 0, self.spec.dim)
        return self._is_finite()

    def _is_finite(self) -> Bool[np.ndarray, " N"]:
        is_finite = np.ones(self.spec.num_agents, dtype=bool)
        largest = max_abs(self.group.models, self.group.layout.own.tolist())
        is_finite[self.agent_id] = np.isfinite(largest).all()
        return is_finite

    def evaluate(self) -> dict[int, EvaluationResult]:
        """Evaluate the agent's model on its own test samples.

        Returns:
            The result by agent.
        """
        (result,) = evaluate_models(self.group, _ONLY_AGENT)
        return {self.agent_id: result}

    def _own_model(self) -> Float[Tensor, " d"]:
        return self.group.models[int(self.group.layout.own[0])]


def _unlikely_peers(contacts: ContactTable) -> Int[np.ndarray, " z"]:
    """Return the contacts that are never asked."""
    ids: Int[np.ndarray, " z"] = contacts.ids.values[contacts.likelihood == 0]
    return ids


def _without_max_distance(group: AgentGroup) -> AgentGroup:
    """Return the group without the guard `max_distance`."""
    algorithm = group.spec.algorithm
    guards = algorithm.guards.model_copy(update={"max_distance": False})
    spec = dataclasses.replace(group.spec, algorithm=algorithm.with_guards(guards))
    return dataclasses.replace(group, spec=spec)

"""Engine of one agent among real peers.

The agent runs `algorithm2.local_aggregation_` itself, with the network as its download.

The rounds are those of every engine (alg:localAggregation). The model buffer is [own | previous |
received]. A received model stays in its row until the round has mixed.
"""

import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o.federated import algorithm2, single_agent, trigger_exchange
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.contacts import AgentState, ContactTable
from fedcb2o.federated.decisions import Decisions, Inbox
from fedcb2o.federated.evaluation.metrics import EvaluationResult
from fedcb2o.federated.evaluation.models import evaluate_models
from fedcb2o.federated.guards.acceptance import max_abs
from fedcb2o.federated.guards.checks import ADMITTED, OUTCOMES
from fedcb2o.federated.local_update import TrainResult, train_
from fedcb2o.federated.ragged import Members, Ragged
from fedcb2o.kernels import dispatch
from fedcb2o.peer._denormals import flush_denormals
from fedcb2o.peer.node.catch_up import CatchUp
from fedcb2o.peer.node.peer_monitor import PeerMonitor
from fedcb2o.peer.node.publisher import ModelPublisher
from fedcb2o.peer.node.reasons import relay_error
from fedcb2o.peer.wire.client import SILENT_REASONS, Arrival, PeerClient

_ONLY_MEMBER = Members(np.zeros(1, np.int64))  # index of the agent in its group
_ROUNDS_ALONE = 5  # in a row without an answer, after which the operator gets a message,
_SECONDS_ALONE = 30.0  # if they took this time: longer than a restart of the relay


class PeerEngine:
    """Engine of one agent.

    `initial_model` is the agent's model before all rounds. Of the last exchange, `arrivals` has the
    models that arrived and `failures` the reasons of missing ones, by peer. An exchange may wait
    until `free_until`, in monotonic time, without delaying the round. `catch_up` counts the rounds
    in which the guard `max_distance` is not checked. `triggers` are published with the next model.
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
        # Nothing is known of the others: all count as benign.
        self.benign = np.ones(self.spec.num_agents, dtype=bool)
        self.agent_id = int(group.agents[0])
        # One batch of one agent: the rounds are those of simulations.
        self.batches = [group.agents]
        self.arrivals: Mapping[int, Arrival] = {}
        self.failures: Mapping[int, str] = {}
        self.exchange_seconds = 0.0
        self.free_until = 0.0
        self.catch_up = CatchUp()
        self.triggers = b""
        self._rounds_alone = 0
        self._last_answer = time.monotonic()
        self._has_warned = False
        self._unlikely = frozenset[int]()  # contacts of likelihood 0, which are never asked
        self._last_outcomes: dict[int, int] = {}  # outcome of the last received model, by peer
        self._has_warned_of_likelihoods = False

    def may_break(self, n: int) -> bool:
        """Return False: an agent whose training diverged begins again with the initial model."""
        return False

    def train_(self, n: int) -> list[TrainResult]:
        """Train the agent's model (LocalUpdate).

        A peer must not end because its training diverged, for instance from an average with a model
        that was made for this. It then trains once more, from the initial model.
        """
        self.before_training()
        with self._kernels():
            result = train_(self.group, _ONLY_MEMBER, n)
            if not np.isfinite(result[:2]).all():
                self.publisher.notify(
                    f"training diverged in round {n + 1}: it begins again with the initial model; "
                    "are the data on the agreed scale?"
                )
                # The initial model is finite, and all members have it.
                self._own_model().copy_(self.initial_model)
                result = train_(self.group, _ONLY_MEMBER, n)
        return [result]

    def _kernels(self) -> contextlib.AbstractContextManager[None]:
        kernels = self.spec.kernels
        return dispatch.use_kernels(kernels.linear, kernels.convolution)

    def _with_candidates(self, n: int) -> AgentGroup:
        """Return the group with the candidates of round `n` as neighbours."""
        spec = single_agent.with_candidates(self.spec, self.agent_id, self._candidates(n))
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
        """Run Algorithm 2 for the agent (alg:localAggregation), which is active in every round."""
        agent = self._with_candidates(n)
        contacts = states[0].contacts
        self.catch_up.start_if_late(self.monitor.is_late(n))
        # After skipped rounds the agent's own model is the outlier.
        if self.catch_up.rounds_left:
            agent = _without_max_distance(agent)
            contacts = contacts.forget(_unlikely_peers(contacts))
        state = AgentState(contacts, states[0].rule_states)
        self._unlikely = frozenset(_unlikely_peers(contacts).tolist())
        with self._kernels(), flush_denormals():  # models that were received are evaluated
            state, decisions = algorithm2.local_aggregation_(
                agent, n, state, lambda ids: self._download(n, ids, deadline), on_step
            )
        self.triggers = trigger_exchange.published_bytes(state.rule_states[0])
        peers = decisions.received.values.tolist()
        outcomes = dict(zip(peers, decisions.admission.tolist(), strict=True))
        self._last_outcomes.update(outcomes)
        return [state], [decisions], self._is_finite()

    def publish_(
        self, n: int, online: Bool[np.ndarray, " N"], max_abs: Float[np.ndarray, " N"]
    ) -> None:
        """Offer the trained model; all real peers are online."""
        num_samples = int(self.group.data.train.sizes[0])
        self.publisher.publish(n, self._own_model(), num_samples, self.triggers)

    def _download(self, n: int, asked: Ragged, deadline: float | None) -> Inbox:
        """Download the models of the asked peers, or of other candidates in place of late ones."""
        ids = asked.values.tolist()
        self._warn_if_all_unlikely(n, ids)
        spares = [peer for peer in self._candidates(n) if peer not in ids]
        # Every round begins with another spare, so that all are asked at times.
        start = n % max(1, len(spares))
        return self._fetch(n, ids, [*spares[start:], *spares[:start]], deadline)

    def _fetch(
        self, n: int, ids: list[int], spares: Sequence[int], deadline: float | None
    ) -> Inbox:
        # An agent that sampled itself has that model already.
        peers = [i for i in ids if i != self.agent_id]
        first_row = self.group.layout.first_received
        rows = {peer: first_row + k for k, peer in enumerate(peers)}
        # Models arrive where they are averaged, without a copy.
        targets = {peer: self.group.models[row] for peer, row in rows.items()}

        start = time.monotonic()
        self.monitor.audit(n, peers)
        self.arrivals, self.failures = self.client.fetch(
            n, targets, deadline, spares=spares, free_until=self.free_until
        )
        self.exchange_seconds = time.monotonic() - start
        self._warn_if_alone()

        models = {
            i: (rows[arrival.row_owner], float(arrival.num_samples), arrival.round)
            for i, arrival in self.arrivals.items()
        }
        triggers = {i: arrival.triggers for i, arrival in self.arrivals.items()}
        return single_agent.inbox_of_one(self.group, n, ids, models, triggers)

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
        # A relay that is down has a message of its own.
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

    def _is_finite(self) -> Bool[np.ndarray, " N"]:
        # Of other agents nothing is known here: their own nodes check them.
        is_finite = np.ones(self.spec.num_agents, dtype=bool)
        largest = max_abs(self.group.models, self.group.layout.own.tolist())
        is_finite[self.agent_id] = np.isfinite(largest).all()
        return is_finite

    def evaluate(self) -> EvaluationResult:
        """Evaluate the agent's model on its own test samples."""
        return evaluate_models(self.group, _ONLY_MEMBER)

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

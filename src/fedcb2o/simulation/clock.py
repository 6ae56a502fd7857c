"""A clock for rounds: the simulated time of LocalUpdate and of downloads, per agent.

The clock decides who trains, answers and mixes in a round, and which models arrive. It never
computes: without it, rounds are as they are.

An agent's LocalUpdate takes the seconds of its samples. A model of `model_bytes` from i to j takes

    latency_i + latency_j + model_bytes / min(upload_i / k_i, download_j / m_j)

seconds, if k_i agents download from i in the round and j downloads m_j models: a fair share, which
agents keep to the end. A model does not arrive if either of both agents goes offline before.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from fedcb2o.federated.decisions import Inbox
from fedcb2o.federated.ragged import AgentIds
from fedcb2o.simulation.traces import ClockSection, Traces

_HOUR = 3600.0


class Clock:
    """The time of a run, in seconds from its start.

    `samples` are those that each agent's LocalUpdate reads. `state` is that of a checkpoint.
    `trains` and `answers` are the agents that complete LocalUpdate in the round, and then mix; and
    the agents that others can ask.
    """

    def __init__(
        self,
        section: ClockSection,
        traces: Traces,
        samples: Float[np.ndarray, " N"],
        model_bytes: int,
        state: Float[np.ndarray, " N_and_1"] | None = None,
    ) -> None:
        self.section = section
        self.traces = traces
        self.model_bytes = section.model_bytes or model_bytes
        self.is_asynchronous = section.mode == "asynchronous"
        self._duration = traces.seconds_per_sample * samples
        self.now = 0.0 if state is None else float(state[-1])
        # The end of the LocalUpdate that an agent has begun; NaN for one that is idle.
        self._finish = np.full(len(samples), np.nan) if state is None else state[:-1].copy()
        self._record: dict[str, Any] = {}

    @property
    def state(self) -> Float[np.ndarray, " N_and_1"]:
        """The end of the LocalUpdate that agents have begun, and the time, for a checkpoint."""
        return np.append(self._finish, self.now)

    @property
    def record(self) -> dict[str, Any]:
        """The last round: hours since the start of the run, counts of bytes, models and agents."""
        return self._record

    def begin_(self) -> None:
        """Begin a round: agents that are online and idle begin LocalUpdate."""
        self.answers, self._until = self.traces.presence(self.now)
        is_idle = np.isnan(self._finish) & self.answers
        self._finish[is_idle] = self.now + self._duration[is_idle]
        # An agent that finished while it was offline publishes when it is back.
        self._ready = np.fmax(self._finish, self.now)
        wait = self.section.interval if self.is_asynchronous else self.section.deadline
        self._limit = np.inf if wait is None else self.now + wait
        ends_first = np.minimum(self._until, self._limit)
        self.trains: Bool[np.ndarray, " N"] = self.answers & (self._ready <= ends_first)
        self._end = float(self._ready[self.trains].max(initial=self.now))
        if not self.is_asynchronous:
            # A round waits for stragglers to its deadline, and not for agents that went offline.
            if (self.answers & (self._ready > self._limit) & (self._until > self._limit)).any():
                self._end = self._limit
            self.answers = self.trains

    def deliver_(self, batches: Sequence[AgentIds], inboxes: Sequence[Inbox]) -> list[Inbox]:
        """Return the models that arrive in time, of all that agents download in a round."""
        # Of all batches at once, because agents of several batches share a link.
        receivers = np.concatenate(
            [agents[inbox.ids.list_index] for agents, inbox in zip(batches, inboxes, strict=True)]
        )
        senders = np.concatenate([inbox.ids.values for inbox in inboxes])
        arrival = self._arrival(senders, receivers)
        cut = np.minimum(self._until[senders], self._until[receivers])
        limit = np.full(len(arrival), self._limit)
        if self.is_asynchronous:
            limit = self._ready[receivers] + (self.section.deadline or np.inf)
        arrives = arrival <= np.minimum(cut, limit)
        done = np.minimum(np.minimum(arrival, cut), limit)
        self._end = float(done.max(initial=self._end))

        if self.is_asynchronous:
            # An agent begins its next LocalUpdate when it waits for no model any more.
            np.maximum.at(self._ready, receivers, done)
        self._record = {
            "bytes": self.model_bytes * int(arrives.sum()),
            "undelivered": len(arrives) - int(arrives.sum()),
        }
        starts = np.cumsum([len(inbox.rows) for inbox in inboxes])[:-1]
        parts = zip(inboxes, np.split(arrives, starts), strict=True)
        return [inbox.filter(keep) for inbox, keep in parts]

    def _arrival(self, senders: np.ndarray, receivers: np.ndarray) -> Float[np.ndarray, " m"]:
        """Return when each model arrives."""
        traces, count = self.traces, len(self._ready)
        uploads = np.bincount(senders, minlength=count)
        downloads = np.bincount(receivers, minlength=count)
        rate = np.minimum(
            traces.upload[senders] / uploads[senders],
            traces.download[receivers] / downloads[receivers],
        )
        start = self._ready[receivers]
        if not self.is_asynchronous:  # the peer must have trained; else its latest model is there
            start = np.maximum(start, self._ready[senders])
        latency = traces.latency[senders] + traces.latency[receivers]
        arrival: np.ndarray = start + latency + self.model_bytes / rate
        return arrival

    def end_(self) -> None:
        """End the round; `now` is then the start of the next one."""
        if self.is_asynchronous:
            assert self.section.interval is not None
            # No agent is idle: the next LocalUpdate begins where the last download ended.
            self._finish[self.trains] = (self._ready + self._duration)[self.trains]
            self.now += self.section.interval
        else:
            self._finish[self.trains] = np.nan
            self.now = self._end
        self._record["hours"] = self.now / _HOUR
        self._record["trained"] = int(self.trains.sum())

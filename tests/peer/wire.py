"""Transport in one process, without a network."""

import random
import threading
import time

from fedcb2o.peer.wire.protocol import Answer, Question
from fedcb2o.peer.wire.transport import RequestHandler


class Wire:
    """Wire between agents in one process that loses or delays a share of the messages."""

    def __init__(self, *, lost: float = 0.0, late: float = 0.0, seed: int = 0) -> None:
        self.lost, self.late = lost, late
        self.agents: dict[int, Wired] = {}
        self._draw, self._lock = random.Random(seed), threading.Lock()

    def agent(self, id: int) -> "Wired":
        """Return a new transport of one agent; it replaces an earlier one."""
        self.agents[id] = Wired(self, id)
        return self.agents[id]

    def passes(self) -> bool:
        """Wait for the delay of one message and return whether it arrives."""
        with self._lock:
            lost, late = self._draw.random() < self.lost, self._draw.random() * self.late
        time.sleep(late)
        return not lost


class Wired:
    """Transport of one agent on a wire."""

    def __init__(self, wire: Wire, id: int) -> None:
        self.wire, self.id, self.handler, self.closed = wire, id, None, False
        self.handler: RequestHandler | None

    def ask(self, peer: int, request: bytes, timeout: float) -> Question:
        question = Question(time.monotonic() + timeout)
        if self.closed or peer == self.id or peer not in self.connected_peers():
            return Question()
        work = (self.wire.agents[peer], request, question)
        threading.Thread(target=self._send, args=work, daemon=True).start()
        return question

    def serve(self, handler: RequestHandler) -> None:
        self.handler = handler

    def connected_peers(self) -> frozenset[int]:
        connected = {
            id for id, agent in self.wire.agents.items() if id != self.id and not agent.closed
        }
        return frozenset() if self.closed else frozenset(connected)

    def close(self) -> None:
        self.closed = True

    def _send(self, peer: "Wired", request: bytes, question: Question) -> None:
        if peer.handler is None:
            question.put(None)
        elif self.wire.passes():
            peer.handler(bytes(request), lambda answer: self._reply(peer, answer, question))

    def _reply(self, peer: "Wired", answer: Answer | None, question: Question) -> None:
        # A connection that ends is noticed, and the question is asked again.
        if peer.closed:
            question.put(None)
        elif self.wire.passes():
            question.put(answer)

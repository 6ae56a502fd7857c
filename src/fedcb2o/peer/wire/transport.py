"""Transport of requests and answers: the interface and `Https`.

Only the signature in a request identifies its author. A transport may lose requests and answers,
and gives up after a while. It never raises because of a peer's fault.

An agent listens on one port, and asks each other agent on connections of its own. The listening end
accepts every certificate of a member, lets in requests only, and forwards nothing.
"""

import json
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeAlias, runtime_checkable

from fedcb2o.errors import RunError
from fedcb2o.peer._closeable import Closeable
from fedcb2o.peer.membership.federation import Federation
from fedcb2o.peer.membership.identity import Identity
from fedcb2o.peer.wire.dialer import CONNECT_SECONDS, STATE_TARGET, Dialer
from fedcb2o.peer.wire.http_requests import HttpRequest
from fedcb2o.peer.wire.listener import Listener, open_listening_socket, raise_descriptor_limit
from fedcb2o.peer.wire.protocol import (
    Answer,
    AnswerStatus,
    Question,
    Responder,
)

Reply: TypeAlias = Callable[[Answer | None], None]
RequestHandler: TypeAlias = Callable[[bytes, Reply], str | None]

ASK_SECONDS = 1.0  # time to send a short message
CLOSE_SECONDS = CONNECT_SECONDS + 1  # time to close a transport
_DETAILS = {
    AnswerStatus.NOT_HERE: "it is not here any more, or never was",
    AnswerStatus.ANOTHER_VERSION: "the protocol here is version 1",
    AnswerStatus.NO_SUCH_PART: "the model ends before this range",
    AnswerStatus.ANOTHER_RUN: "the federation here is another one",
    AnswerStatus.BUSY: "too many requests: ask less often",
    AnswerStatus.NOT_YET: "no model for this round exists yet",
}


@runtime_checkable
class Transport(Protocol):
    """Interface to exchange requests and answers; safe in any thread."""

    def ask(self, peer: int, request: bytes, timeout: float) -> Question:
        """Send a request now; its unchecked answer is that of the returned question.

        It is None after `timeout` seconds, or early if the link is lost or the peer gives none.
        """

    def serve(self, handler: RequestHandler) -> None:
        """Handle incoming requests from now on.

        The handler is called in any thread with each request and its `reply`. It must return at
        once, with the reason if it turned the request away. `reply` may be called later, once, from
        any thread, and does not wait for the reader. None means no answer.
        """

    def connected_peers(self) -> frozenset[int]:
        """Return the agents with a working link."""

    def close(self) -> None:
        """Close all links within a few seconds; a second call does nothing."""


class Https(Closeable):
    """Transport over HTTPS, which listens at its own endpoint, another "HOST:PORT", or not."""

    def __init__(
        self, federation: Federation, identity: Identity, *, listen: bool | str = True
    ) -> None:
        identity.check_certificate()
        agent_id = federation.id_of(identity.member)
        members = federation.members
        # Every member may open 16 connections, and a usual limit is 1024 files.
        raise_descriptor_limit()

        self._handler: RequestHandler | None = None
        self._closed = threading.Event()
        self._state = federation_state(federation)
        self._listener: Listener | None = None
        self._dialers = {
            id: Dialer(identity, member)
            for id, member in members.items()
            if id != agent_id and not member.is_outbound_only
        }
        self._dialers_by_name = {members[id].name: one for id, one in self._dialers.items()}
        if listen:
            address = identity.member.endpoint if listen is True else listen
            listening = open_listening_socket(address)
            self._listener = Listener(
                listening,
                identity,
                [*members.values()],
                self._on_request,
                uploads=federation.limits.uploads,
                per_peer=federation.limits.per_peer,
            )
        for dialer in self._dialers.values():
            dialer.start()

    @property
    def is_listening(self) -> bool:
        """True if other members can ask this agent."""
        return self._listener is not None

    def ask(self, peer: int, request: bytes, timeout: float) -> Question:
        dialer = self._dialers.get(peer)
        if dialer is None or timeout <= 0:
            return Question()
        return dialer.ask(request, timeout)

    def serve(self, handler: RequestHandler) -> None:
        if self._listener is None:
            raise RunError(
                "a transport that does not listen cannot serve: open it with listen=True"
            )
        self._handler = handler

    def connected_peers(self) -> frozenset[int]:
        return frozenset(id for id, dialer in self._dialers.items() if dialer.is_connected)

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        for dialer in self._dialers.values():
            dialer.stop()
        if self._listener is not None:
            self._listener.close()
        end = time.monotonic() + CLOSE_SECONDS
        for dialer in self._dialers.values():
            dialer.thread.join(max(0.0, end - time.monotonic()))

    def _on_request(self, request: HttpRequest, respond: Responder) -> None:
        """Answer a sign of life; hand any other request to the handler."""
        if request.member is not None and request.member.name in self._dialers_by_name:
            self._dialers_by_name[request.member.name].note_request()
        if (request.method, request.target) == ("GET", STATE_TARGET):
            respond(200, self._state, [("content-type", "application/json")])
        elif self._handler is not None:
            self._handler(encode_http(request), partial(_answer, respond))


def _answer(respond: Responder, answer: Answer | None) -> None:
    """Answer a request over HTTPS; without an answer it is refused when `respond` is dropped."""
    if answer is None:
        return
    if answer.status is AnswerStatus.OK:
        is_part = any(name == "content-range" for name, _ in answer.headers)
        respond(206 if is_part else 200, answer.body, answer.headers)
    else:
        headers = [("retry-after", "1")] if answer.status.is_temporary else []
        respond(answer.status, _DETAILS[answer.status], headers)


def encode_http(request: HttpRequest) -> bytes:
    """Return the lines of a request that are signed, and its signature."""
    lines = [f"{request.method} {request.target}"]
    for name in ("Range", "Authorization"):
        if name.lower() in request.headers:
            lines.append(f"{name}: {request.headers[name.lower()]}")
    return "\n".join(lines).encode("latin-1")


def federation_state(federation: Federation) -> bytes:
    """Return the version of the federation that a node or a relay holds, as JSON."""
    state = {
        "run": federation.run.hex(),
        "version": federation.version,
        "federation": federation.digest.hex(),
    }
    return json.dumps(state).encode()

"""Transport of requests and answers: the interface and `Https`.

Only the signature in a request identifies its author. A transport may lose requests and answers,
and gives up after a while. It never raises because of a peer's fault.

An agent listens on one port, and asks each other agent on connections of its own. The listening end
accepts every certificate of a member, lets in requests only, and forwards nothing.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeAlias, runtime_checkable

from fedcb2o.errors import RunError
from fedcb2o.peer.membership.federation import Federation
from fedcb2o.peer.membership.identity import Identity
from fedcb2o.peer.wire.dialer import CONNECT_SECONDS, STATE_TARGET, Dialer
from fedcb2o.peer.wire.http_requests import HttpRequest, problem
from fedcb2o.peer.wire.listener import (
    Listener,
    Responder,
    open_listening_socket,
    raise_descriptor_limit,
)
from fedcb2o.peer.wire.protocol import MAX_REQUEST_BYTES, Answer, AnswerStatus

Reply: TypeAlias = Callable[[Answer | None], None]
RequestHandler: TypeAlias = Callable[[bytes, Reply], None]

ASK_SECONDS = 1.0
"""Time to send a short message."""
SEND_SECONDS = 120.0
"""Time to send an answer: 1 MiB with seven others before it, at 70 kB/s."""
CLOSE_SECONDS = CONNECT_SECONDS + 1
"""Time to close a transport."""
_DETAILS = {
    AnswerStatus.NOT_HERE: "it is not here any more, or never was",
    AnswerStatus.ANOTHER_VERSION: "the protocol here is version 1",
    AnswerStatus.NO_SUCH_PART: "the model ends before this range",
    AnswerStatus.ANOTHER_RUN: "the federation here is another one",
    AnswerStatus.BUSY: "too many requests: ask less often",
    AnswerStatus.NOT_YET: "no model for this round exists yet",
}
_RETRY_SECONDS = "1"


@runtime_checkable
class Transport(Protocol):
    """Interface to exchange requests and answers; safe in any thread."""

    def ask(self, peer: int, request: bytes, timeout: float) -> Iterable[Answer]:
        """Send a request now; return its unchecked answer, if one arrives.

        The iterator ends after `timeout` seconds, or early if the link is lost or the peer gives no
        answer.
        """
        ...

    def serve(self, handler: RequestHandler) -> None:
        """Handle incoming requests from now on.

        The handler is called in any thread with each request and its `reply`; it must return at
        once. `reply` may be called later, once, from any thread. None means no answer. It may block
        on a slow reader.
        """
        ...

    def connected_peers(self) -> frozenset[int]:
        """Return the agents with a working link."""
        ...

    def close(self) -> None:
        """Close all links within a few seconds; a second call does nothing."""
        ...


class Https:
    """Transport over HTTPS, with links kept in the background.

    Requests are accepted at the member's own endpoint, or at another "HOST:PORT".
    """

    def __init__(
        self, federation: Federation, identity: Identity, *, listen: bool | str = True
    ) -> None:
        identity.check_certificate()
        agent_id = federation.id_of(identity.member)
        members = federation.members
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
            self._listener = Listener(listening, identity, [*members.values()], self._on_request)
            self._listener.start()
        for dialer in self._dialers.values():
            dialer.start()

    @property
    def is_listening(self) -> bool:
        """True if other members can ask this agent."""
        return self._listener is not None

    def ask(self, peer: int, request: bytes, timeout: float) -> Iterator[Answer]:
        dialer = self._dialers.get(peer)
        if dialer is None or timeout <= 0:
            return iter(())
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

    def __enter__(self) -> "Https":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_request(self, request: HttpRequest, respond: Responder) -> None:
        """Answer a sign of life; hand any other request to the handler."""
        if request.member is not None and request.member.name in self._dialers_by_name:
            self._dialers_by_name[request.member.name].note_request()
        if (request.method, request.target) == ("GET", STATE_TARGET):
            respond(200, [("content-type", "application/json")], self._state, 0.0)
        elif request.method != "GET":
            respond.refuse(405, "GET")
        elif self._handler is not None:
            data = encode_http(request)
            if len(data) <= MAX_REQUEST_BYTES:
                self._handler(data, partial(_answer, respond))


def _answer(respond: Responder, answer: Answer | None) -> None:
    """Answer a request over HTTPS; without an answer it is refused when `respond` is dropped."""
    if answer is None:
        return
    status = answer.status
    if status is not AnswerStatus.OK:
        headers = [("retry-after", _RETRY_SECONDS)] if status.is_temporary else []
        respond(status, headers, problem(status, _DETAILS[status]))
        return
    code = 206 if any(name == "content-range" for name, _ in answer.headers) else 200
    respond(code, answer.headers, answer.body)


def encode_http(request: HttpRequest) -> bytes:
    """Return the lines of a request that are signed, and its signature."""
    lines = [f"{request.method} {request.target}"]
    for name in ("Range", "Authorization"):
        if name.lower() in request.headers:
            lines.append(f"{name}: {request.headers[name.lower()]}")
    with suppress(UnicodeEncodeError):
        return "\n".join(lines).encode("ascii")
    return b""


def federation_state(federation: Federation) -> bytes:
    """Return the version of the federation that a node or a relay holds, as JSON."""
    state = {
        "run": federation.run.hex(),
        "version": federation.version,
        "federation": federation.digest.hex(),
    }
    return json.dumps(state).encode()

"""Transport of requests and answers: the interface and `Zenoh`, over TLS.

Requests and answers are bytes; only the signature in them identifies their author. A transport may
lose them and gives up after a while. It never raises because of a peer's fault.

An agent listens on one session and opens a separate session to each other agent, which trusts only
that member's root. Answers on such a link therefore come from the asked member, or from a holder of
its key, and no member can suppress the answers or links of another. The listening session accepts
every certificate of a member, lets in requests only, and forwards nothing.
"""

import base64
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from queue import Empty, Queue
from typing import Any, Protocol, TypeAlias, runtime_checkable

import zenoh

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.peer.membership.federation import Federation
from fedcb2o.peer.membership.identity import Identity, Member

Reply: TypeAlias = Callable[[bytes], None]
RequestHandler: TypeAlias = Callable[[bytes, Reply], None]

MAX_ANSWERS = 4
"""Answers to one request that are read: an honest peer gives one."""
MAX_REQUEST_BYTES = 2**9
MAX_ANSWER_BYTES = 2**21
"""Largest accepted message: a chunk with its header, or the longest manifest."""
_MAX_WAITING_REQUESTS = 1024
"""Requests that wait for the handler; beyond these the oldest are dropped."""
_MAX_EXTRA_LINKS = 256
"""Incoming links beyond one per member; each may hold two partial messages."""
_MAX_PENDING_LINKS = 64
"""Incoming links that have not shown a certificate."""
_HANDSHAKE_SECONDS = 10.0
"""Time after which an incoming link without a certificate is closed."""
_DIAL_SECONDS = 4.0
"""Time to open a link before the next attempt."""
LEASE_SECONDS = 10.0
"""Time without a sign of life after which a link is down."""
_SEND_SECONDS = 120.0
"""Time to send an answer: 1 MiB with seven others before it, at 70 kB/s."""
_RETRY_SECONDS = (0.25, 2.0)
"""First and longest pause between two attempts to open a link."""
CLOSE_SECONDS = _DIAL_SECONDS + 1
"""Time to close a transport."""


@runtime_checkable
class Transport(Protocol):
    """Interface to exchange requests and answers; safe in any thread."""

    def ask(self, peer: int, request: bytes, timeout: float) -> Iterable[bytes]:
        """Send a request now.

        Args:
            peer: The receiving agent.
            request: The encoded request.
            timeout: Time in seconds after which the answers end.

        Returns:
            A few answers, unchecked, as they arrive. They end early if the link is lost or the peer
            has sent all of them.
        """
        ...

    def serve(self, handler: RequestHandler) -> None:
        """Handle incoming requests from now on.

        Args:
            handler: Called in one thread with each request and its `reply`; must return at once.
                `reply` may be called later, once, from any thread. An empty reply means no answer.
                It may block on a slow reader.
        """
        ...

    def connected_peers(self) -> frozenset[int]:
        """Return the agents with a working link.

        Returns:
            Their ids.
        """
        ...

    def close(self) -> None:
        """Close all links within a few seconds; a second call does nothing."""
        ...


class Zenoh:
    """Transport over zenoh with TLS, with links kept in the background.

    Args:
        federation: The federation.
        identity: This organisation.
        listen: Accept requests, at the member's own endpoint or at this "HOST:PORT".

    Raises:
        ConfigError: The identity cannot be used, or a member has an IPv6 address.
        RunError: The transport cannot listen.
    """

    def __init__(
        self, federation: Federation, identity: Identity, *, listen: bool | str = True
    ) -> None:
        identity.check_certificate()
        agent_id = federation.id_of(identity.member)
        members = federation.members
        for member in members.values():
            if member.endpoint.startswith("["):
                raise ConfigError(
                    f"{member.endpoint} of {member.name} is an IPv6 address, and links take names "
                    "and IPv4 addresses: give that machine a name, and its member a new endpoint"
                )

        self._own_key = _key_expression(agent_id)
        self._incoming: zenoh.Session | None = None
        self._links: dict[int, zenoh.Session] = {}
        self._handler_threads: list[threading.Thread] = []
        self._open_requests: set[object] = set()  # requests whose callbacks zenoh may still call
        sessions: list[zenoh.Session] = []
        # also at the end of the program, while threads still run
        self._close = weakref.finalize(
            self, _close_sessions, sessions, self._handler_threads, self._open_requests
        )
        try:
            if listen:
                address = identity.member.endpoint if listen is True else listen
                self._incoming = _open_listening_session(
                    identity, members.values(), self._own_key, address
                )
                sessions.append(self._incoming)
            for id, member in members.items():
                if id != agent_id:
                    self._links[id] = _open_peer_session(identity, member, _key_expression(id))
                    sessions.append(self._links[id])
        except BaseException:
            self.close()
            raise

    @property
    def is_listening(self) -> bool:
        """True if other members can ask this agent."""
        return self._incoming is not None

    def ask(self, peer: int, request: bytes, timeout: float) -> Iterator[bytes]:
        session = self._links.get(peer)
        end = time.monotonic() + timeout
        if session is None or timeout <= 0:
            return iter(())

        replies: Queue[Any] = Queue()
        cancellation = zenoh.CancellationToken()
        open_requests = self._open_requests

        def on_reply(reply: Any) -> None:  # on a thread of all links: must not block
            if replies.qsize() < MAX_ANSWERS:
                replies.put(reply)

        def on_end() -> None:
            replies.put(None)
            open_requests.discard(replies)

        open_requests.add(replies)
        try:
            session.get(
                _key_expression(peer),
                zenoh.handlers.Callback(on_reply, on_end, indirect=False),
                target=zenoh.QueryTarget.ALL,
                consolidation=zenoh.ConsolidationMode.NONE,
                congestion_control=zenoh.CongestionControl.BLOCK,  # of the answers too
                payload=request,
                timeout=timeout,
                cancellation_token=cancellation,
            )
        except zenoh.ZError:  # closed
            open_requests.discard(replies)
            return iter(())
        return _iterate_answers(replies, end, cancellation)

    def serve(self, handler: RequestHandler) -> None:
        if self._incoming is None:
            raise RunError(
                "a transport that does not listen cannot serve: open it with listen=True"
            )
        queryable = self._incoming.declare_queryable(
            self._own_key, zenoh.handlers.RingChannel(_MAX_WAITING_REQUESTS), complete=True
        )
        thread = threading.Thread(
            target=_handle_requests,
            args=(queryable, self._own_key, handler),
            name="fedcb2o-hear",
            daemon=True,
        )
        self._handler_threads.append(thread)
        thread.start()

    def connected_peers(self) -> frozenset[int]:
        connected = set()
        for id, session in self._links.items():
            with suppress(zenoh.ZError):  # closed
                if session.info.peers_zid():
                    connected.add(id)
        return frozenset(connected)

    def close(self) -> None:
        self._close()

    def __enter__(self) -> "Zenoh":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _key_expression(agent: int) -> str:
    return f"fedcb2o/agents/{agent}"


def _iterate_answers(
    replies: "Queue[Any]", end: float, cancellation: zenoh.CancellationToken
) -> Iterator[bytes]:
    """Yield the replies to one request, up to the first None."""
    try:
        for _ in range(MAX_ANSWERS):
            reply = replies.get(timeout=max(0.0, end - time.monotonic()))
            if reply is None:
                return
            if reply.ok is not None:
                yield reply.ok.payload.to_bytes()
    except Empty:
        return
    finally:
        cancellation.cancel()  # type: ignore[no-untyped-call]


def _handle_requests(queryable: Any, key: str, handler: RequestHandler) -> None:
    """Pass requests to the handler until the session is closed."""
    while True:
        try:
            query = queryable.recv()
        except zenoh.ZError:
            return
        reply = partial(_reply, query, key)
        try:
            content = query.payload.to_bytes() if query.payload is not None else b""
            handler(content, reply)
        except Exception:
            logging.getLogger(__name__).exception("a request could not be handled")
            reply(b"")
        del query, reply  # ends an unanswered request now, not with the next one


def _reply(query: Any, key: str, answer: bytes) -> None:
    # the errors: the sender is gone, or this is not the first answer
    with suppress(zenoh.ZError, RuntimeError), query:
        if answer:
            query.reply(key, answer)


def _close_sessions(
    sessions: Iterable[zenoh.Session],
    handler_threads: Iterable[threading.Thread],
    open_requests: Collection[object],
) -> None:
    """Close all sessions at once, and leave a slow one behind.

    Closing waits for a link that is being opened, at most `_DIAL_SECONDS`. The threads are no
    daemon threads: one that returns into Python during its shutdown ends the process, so that
    waiting callbacks of zenoh must return before.
    """
    end = time.monotonic() + CLOSE_SECONDS
    threads = [
        threading.Thread(target=_close_session, args=(session,), name="fedcb2o-close")
        for session in sessions
    ]
    for thread in threads:
        thread.start()
    for thread in (*threads, *handler_threads):
        thread.join(max(0.0, end - time.monotonic()))
    while open_requests and time.monotonic() < end:
        time.sleep(0.005)


def _close_session(session: zenoh.Session) -> None:
    with suppress(zenoh.ZError):
        session.close()  # type: ignore[no-untyped-call]


def _open_listening_session(
    identity: Identity, members: Iterable[Member], key: str, address: str
) -> zenoh.Session:
    """Open the session that accepts requests of all members, and nothing else."""
    roots = [member.root for member in members]
    send_limit = "transport/link/tx/queue/congestion_control/block/wait_before_close"
    settings = {
        "listen/endpoints": [f"tls/{address}"],
        "access_control": _access_rules(
            key, incoming=["query"], outgoing=["declare_queryable", "reply"]
        ),
        "transport/unicast/max_sessions": _MAX_EXTRA_LINKS + len(roots),
        "transport/unicast/accept_pending": _MAX_PENDING_LINKS,
        "transport/unicast/accept_timeout": _milliseconds(_HANDSHAKE_SECONDS),
        "transport/link/rx/max_message_size": MAX_REQUEST_BYTES,
        send_limit: int(_SEND_SECONDS * 1e6),
    }
    try:
        return _open_session(identity, roots, settings)
    except zenoh.ZError as error:
        raise _listen_error(address, str(error)) from error


def _open_peer_session(identity: Identity, member: Member, key: str) -> zenoh.Session:
    """Open the session with one member, which trusts only that member's root."""
    first_pause, longest_pause = _RETRY_SECONDS
    settings = {
        "connect/endpoints": [f"tls/{member.endpoint}"],
        "connect/retry": {
            "period_init_ms": _milliseconds(first_pause),
            "period_max_ms": _milliseconds(longest_pause),
            "period_increase_factor": 2,
        },
        "access_control": _access_rules(
            key, incoming=["declare_queryable", "reply"], outgoing=["query"]
        ),
        "transport/unicast/max_sessions": 1,
        "transport/unicast/open_timeout": _milliseconds(_DIAL_SECONDS),
        "transport/link/rx/max_message_size": MAX_ANSWER_BYTES,
    }
    return _open_session(identity, [member.root], settings)


def _open_session(
    identity: Identity, roots: Iterable[str], settings: Mapping[str, Any]
) -> zenoh.Session:
    """Open a session without discovery, over TLS with certificates on both sides."""
    config = zenoh.Config()
    common = {
        "mode": "peer",
        "listen/endpoints": [],
        "scouting/multicast/enabled": False,
        "scouting/gossip/enabled": False,
        "open/return_conditions": {"connect_scouted": False, "declares": False},
        "transport/shared_memory/enabled": False,
        "transport/unicast/qos/enabled": False,
        "transport/link/protocols": ["tls"],
        "transport/link/tx/lease": _milliseconds(LEASE_SECONDS),
        "transport/link/tls": {
            "root_ca_certificate_base64": base64.b64encode("".join(roots).encode()).decode(),
            "enable_mtls": True,
            "verify_name_on_connect": True,
            "close_link_on_expiration": True,
            "listen_certificate": str(identity.tls_certificate),
            "listen_private_key": str(identity.tls_key),
            "connect_certificate": str(identity.tls_certificate),
            "connect_private_key": str(identity.tls_key),
        },
    }
    for key, value in {**common, **settings}.items():
        config.insert_json5(key, json.dumps(value))
    return zenoh.open(config)


def _access_rules(key: str, *, incoming: list[str], outgoing: list[str]) -> dict[str, Any]:
    """Return rules that allow only these messages on one key."""
    flows = (("ingress", incoming), ("egress", outgoing))
    rules = [
        {
            "id": flow,
            "permission": "allow",
            "flows": [flow],
            "messages": messages,
            "key_exprs": [key],
        }
        for flow, messages in flows
    ]
    return {
        "enabled": True,
        "default_permission": "deny",
        "rules": rules,
        "subjects": [{"id": "anybody"}],
        "policies": [{"rules": ["ingress", "egress"], "subjects": ["anybody"]}],
    }


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds)


def _listen_error(address: str, error: str) -> RunError | ConfigError:
    """Translate zenoh's error at a listening address."""
    if "in use" in error:
        return RunError(
            f"cannot listen on {address}: the port is in use; is another peer running? "
            "Stop it first"
        )
    if "assign" in error:
        return RunError(
            f"cannot listen on {address}: no address of this machine; if others reach it by the "
            "address of another machine, say what to bind here: --listen 0.0.0.0:PORT"
        )
    if "denied" in error:
        return RunError(f"cannot listen on {address}: permission denied; take a port above 1023")
    if any(word in error for word in ("invalid", "lookup")):
        return ConfigError(
            f"cannot listen on {address!r}: it must be HOST:PORT of this machine, such as "
            "0.0.0.0:7447"
        )
    return RunError(f"cannot listen on {address}: {error.split(' at /')[0]}")

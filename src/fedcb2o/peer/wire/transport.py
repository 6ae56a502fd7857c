"""How bytes come and go between agents: `Transport`, of which `Zenoh` is the one over TLS.

A request and its answer are bytes; who wrote them is known by the signature in them alone. A transport may lose them,
and gives up after a while; it never raises for a peer's fault.

Each agent listens on one session, and opens one session of its own to each other agent, in which it trusts that
member's root and no other. So what comes back on that link was said by the member that was asked, or by somebody to
whom it lent its key, and no member can keep another's answers or links away. On the session that listens, everybody
with a certificate of any member is heard, questions are the only thing that is let in, and nothing is passed on.
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
"""Of one request: a link gives the first of them, what follows is a fault or a lie."""
MAX_REQUEST_BYTES = 2**9
MAX_ANSWER_BYTES = 2**21
"""Bytes of a message that is taken in, of a chunk with its head or of the longest manifest."""
_MAX_WAITING_REQUESTS = 1024
"""Requests that wait to be heard; beyond these the oldest are dropped."""
_MAX_EXTRA_LINKS = 256
"""Incoming links at once, beyond one a member; each may hold two messages of MOST_REQUEST that are not whole yet."""
_MAX_PENDING_LINKS = 64
"""Incoming links at once that have not shown a certificate; what they wait for is given up after HANDSHAKE."""
_HANDSHAKE_SECONDS = 10.0
_DIAL_SECONDS = 4.0
"""Seconds in which a link must be open; it is then tried again."""
LEASE_SECONDS = 10.0
"""Seconds without a sign of life after which a link is down."""
_SEND_SECONDS = 120.0
"""Seconds that an answer may take to leave: 1 MiB with seven others before it, at 70 kB/s."""
_RETRY_SECONDS = (0.25, 2.0)
"""Seconds after which a link is tried again, at first and at most."""
CLOSE_SECONDS = _DIAL_SECONDS + 1
"""Seconds that closing may take."""


@runtime_checkable
class Transport(Protocol):
    """Who can ask other agents and be asked by them; safe to use from any thread."""

    def ask(self, peer: int, request: bytes, timeout: float) -> Iterable[bytes]:
        """Send a request now; the answers as they come, a few at most, until `timeout` seconds have passed.

        It ends earlier where the link is lost or the peer says no more. Whoever asked checks what it gets.
        """
        ...

    def serve(self, handler: RequestHandler) -> None:
        """Call `hear(request, reply)` for each request that comes from now on, in one thread; it must return at once.

        `reply` may be called later, once, from any thread; empty, it says that there is no answer. It may block on a
        slow reader, and then only the one who called it.
        """
        ...

    def connected_peers(self) -> frozenset[int]:
        """The agents whose link is up."""
        ...

    def close(self) -> None:
        """Give all links up, within a few seconds; twice does no more."""
        ...


class Zenoh:
    """One agent of a federation over TLS, with links to all others that are made and made again in the background.

    `listen`: whether others may ask it, at its own endpoint or, where that is another machine's, at this "HOST:PORT".
    Raises ConfigError for an identity that cannot be used, RunError where it cannot listen.
    """

    def __init__(
        self, federation: Federation, identity: Identity, *, listen: bool | str = True
    ) -> None:
        identity.check_certificate()
        me = federation.id_of(identity.member)
        members = federation.members
        for member in members.values():
            if member.endpoint.startswith("["):
                raise ConfigError(
                    f"{member.endpoint} of {member.name} is an IPv6 address, and links take names and IPv4 addresses: "
                    "give that machine a name, and its member a new endpoint"
                )
        self._mine = _key_expression(me)
        self._incoming: zenoh.Session | None = None
        self._links: dict[int, zenoh.Session] = {}
        sessions: list[zenoh.Session] = []
        self._hears: list[threading.Thread] = []
        self._open: set[object] = set()  # requests of which zenoh may still call back
        # At the end of the program too, while threads still run.
        self._close = weakref.finalize(self, _close_sessions, sessions, self._hears, self._open)
        try:
            if listen:
                place = identity.member.endpoint if listen is True else listen
                self._incoming = _open_listening_session(
                    identity, members.values(), self._mine, place
                )
                sessions.append(self._incoming)
            for id, member in members.items():
                if id != me:
                    self._links[id] = _open_peer_session(identity, member, _key_expression(id))
                    sessions.append(self._links[id])
        except BaseException:
            self.close()
            raise

    @property
    def is_listening(self) -> bool:
        """Whether others can ask it."""
        return self._incoming is not None

    def ask(self, peer: int, request: bytes, timeout: float) -> Iterator[bytes]:  # noqa: D102
        session = self._links.get(peer)
        end = time.monotonic() + timeout
        if session is None or timeout <= 0:
            return iter(())
        replies: Queue[Any] = Queue()
        stop = zenoh.CancellationToken()
        still_open = self._open

        def take(reply: Any) -> None:  # on a thread of all links: never wait here
            if replies.qsize() < MAX_ANSWERS:
                replies.put(reply)

        def over() -> None:
            replies.put(None)
            still_open.discard(replies)

        still_open.add(replies)
        try:
            session.get(
                _key_expression(peer),
                zenoh.handlers.Callback(take, over, indirect=False),
                target=zenoh.QueryTarget.ALL,
                consolidation=zenoh.ConsolidationMode.NONE,
                congestion_control=zenoh.CongestionControl.BLOCK,  # of the answers too
                payload=request,
                timeout=timeout,
                cancellation_token=stop,
            )
        except zenoh.ZError:  # closed
            still_open.discard(replies)
            return iter(())
        return _iterate_answers(replies, end, stop)

    def serve(self, handler: RequestHandler) -> None:  # noqa: D102
        if self._incoming is None:
            raise RunError(
                "a transport that does not listen cannot serve: open it with listen=True"
            )
        asked = self._incoming.declare_queryable(
            self._mine, zenoh.handlers.RingChannel(_MAX_WAITING_REQUESTS), complete=True
        )
        self._hears.append(
            threading.Thread(
                target=_handle_requests,
                args=(asked, self._mine, handler),
                name="fedcb2o-hear",
                daemon=True,
            )
        )
        self._hears[-1].start()

    def connected_peers(self) -> frozenset[int]:  # noqa: D102
        alive = set()
        for id, session in self._links.items():
            with suppress(zenoh.ZError):  # closed
                if session.info.peers_zid():
                    alive.add(id)
        return frozenset(alive)

    def close(self) -> None:  # noqa: D102
        self._close()

    def __enter__(self) -> "Zenoh":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _key_expression(agent: int) -> str:
    return f"fedcb2o/agents/{agent}"


def _iterate_answers(
    replies: "Queue[Any]", end: float, stop: zenoh.CancellationToken
) -> Iterator[bytes]:
    """What is in the replies to one request, up to the first None; whoever stops early lets the rest go."""
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
        stop.cancel()  # type: ignore[no-untyped-call]


def _handle_requests(queryable: Any, key: str, handler: RequestHandler) -> None:
    """Pass on what is asked until the session is closed."""
    while True:
        try:
            query = queryable.recv()
        except zenoh.ZError:
            return
        reply = partial(_reply, query, key)
        try:
            handler(query.payload.to_bytes() if query.payload is not None else b"", reply)
        except Exception:
            logging.getLogger(__name__).exception("a request could not be heard")
            reply(b"")
        del query, reply  # one that nobody answers ends here, not with the next


def _reply(query: Any, key: str, answer: bytes) -> None:
    with (
        suppress(zenoh.ZError, RuntimeError),
        query,
    ):  # the asker is gone, or this is not the first answer
        if answer:
            query.reply(key, answer)


def _close_sessions(
    sessions: Iterable[zenoh.Session],
    hears: Iterable[threading.Thread],
    still_open: Collection[object],
) -> None:
    """Close all at once; one that takes too long is left to itself, and the program ends when it is done.

    Closing waits for a link that is just being opened, for no longer than DIAL. (No daemon threads: one that comes back
    into Python while that is shut down takes the whole process with it. So what waits in zenoh comes back before.)
    """
    end = time.monotonic() + CLOSE_SECONDS
    threads = [
        threading.Thread(target=_close_session, args=(session,), name="fedcb2o-close")
        for session in sessions
    ]
    for thread in threads:
        thread.start()
    for thread in (*threads, *hears):
        thread.join(max(0.0, end - time.monotonic()))
    while still_open and time.monotonic() < end:
        time.sleep(0.005)


def _close_session(session: zenoh.Session) -> None:
    with suppress(zenoh.ZError):
        session.close()  # type: ignore[no-untyped-call]


def _open_listening_session(
    identity: Identity, members: Iterable[Member], key: str, address: str
) -> zenoh.Session:
    """The session that hears the questions of all members, and nothing else of anybody."""
    roots = [member.root for member in members]
    settings = {
        "listen/endpoints": [f"tls/{address}"],
        "access_control": _access_rules(
            key, incoming=["query"], outgoing=["declare_queryable", "reply"]
        ),
        "transport/unicast/max_sessions": _MAX_EXTRA_LINKS + len(roots),
        "transport/unicast/accept_pending": _MAX_PENDING_LINKS,
        "transport/unicast/accept_timeout": _milliseconds(_HANDSHAKE_SECONDS),
        "transport/link/rx/max_message_size": MAX_REQUEST_BYTES,
        "transport/link/tx/queue/congestion_control/block/wait_before_close": int(
            _SEND_SECONDS * 1e6
        ),
    }
    try:
        return _open_session(identity, roots, settings)
    except zenoh.ZError as error:
        raise _listen_error(address, str(error)) from error


def _open_peer_session(identity: Identity, member: Member, key: str) -> zenoh.Session:
    """The session with one member, to which its root alone is trusted: no other can answer in its place."""
    first, most = _RETRY_SECONDS
    settings = {
        "connect/endpoints": [f"tls/{member.endpoint}"],
        "connect/retry": {
            "period_init_ms": _milliseconds(first),
            "period_max_ms": _milliseconds(most),
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
    """A session that links to nobody but as told, over TLS with certificates on both sides."""
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
    """What may pass on one key, in and out; all else is denied."""
    return {
        "enabled": True,
        "default_permission": "deny",
        "rules": [
            {
                "id": flow,
                "permission": "allow",
                "flows": [flow],
                "messages": messages,
                "key_exprs": [key],
            }
            for flow, messages in (("ingress", incoming), ("egress", outgoing))
        ],
        "subjects": [{"id": "anybody"}],
        "policies": [{"rules": ["ingress", "egress"], "subjects": ["anybody"]}],
    }


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds)


def _listen_error(address: str, error: str) -> RunError | ConfigError:
    """What to raise where nobody can be heard at a place."""
    if "in use" in error:
        return RunError(
            f"cannot listen on {address}: the port is in use; is another peer running? Stop it first"
        )
    if "assign" in error:
        return RunError(
            f"cannot listen on {address}: no address of this machine; where others reach it by the address of another, "
            "say what to bind here: --listen 0.0.0.0:PORT"
        )
    if "denied" in error:
        return RunError(f"cannot listen on {address}: permission denied; take a port above 1023")
    if any(word in error for word in ("invalid", "lookup")):
        return ConfigError(
            f"cannot listen on {address!r}: it must be HOST:PORT of this machine, such as 0.0.0.0:7447"
        )
    return RunError(f"cannot listen on {address}: {error.split(' at /')[0]}")

"""Transport of requests and answers: the interface and `Zenoh`, over TLS.

Requests and answers are bytes; only the signature in them identifies their author. A transport may
lose them and gives up after a while. It never raises because of a peer's fault.

An agent listens on one port and opens a separate link to each other agent, which trusts only that
member's root. Answers on such a link therefore come from the asked member, or from a holder of its
key, and no member can suppress the answers or links of another. The listening end accepts every
certificate of a member, lets in requests only, and forwards nothing.

The bytes are those of zenoh's wire protocol, so that programs with zenoh can take part. They are
read here, because zenoh keeps what a remote declares and accepts links of strangers slowly.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from queue import Empty, Queue
from typing import Protocol, TypeAlias, runtime_checkable

from fedcb2o.errors import FedCB2OError, RunError
from fedcb2o.peer.membership.federation import Federation
from fedcb2o.peer.membership.identity import Identity, Member
from fedcb2o.peer.wire import _zenoh_messages as messages
from fedcb2o.peer.wire._link import HANDSHAKE_SECONDS, LEASE_SECONDS, Link, TlsStream
from fedcb2o.peer.wire._listener import (
    Listener,
    open_listening_socket,
    raise_descriptor_limit,
)
from fedcb2o.peer.wire._protocol import BytesLike
from fedcb2o.peer.wire._tls import dial
from fedcb2o.peer.wire._zenoh_messages import (
    Final,
    Interest,
    Message,
    Query,
    ZenohError,
    encode_declarations,
    encode_final,
    encode_query,
    encode_reply,
)

Reply: TypeAlias = Callable[[bytes], None]
RequestHandler: TypeAlias = Callable[[bytes, Reply], None]

MAX_ANSWERS = 4
"""Answers to one request that are read: an honest peer gives one."""
MAX_REQUEST_BYTES = 2**9
MAX_ANSWER_BYTES = 2**21
"""Largest accepted message: a chunk with its header, or the longest manifest."""
_MESSAGE_HEAD_BYTES = 2**10
"""Bytes around a request or an answer."""
MAX_LINKS_PER_MEMBER = 4
"""Incoming links of one member; the newest ones remain."""
_REQUEST_BURST = 2048
"""Requests of one member that are read at once."""
_REQUESTS_PER_SECOND = 400
"""Requests of one member that are read later."""
_MAX_LATE_ANSWERS = 256
"""Answers to questions that were given up, which cost a member nothing."""
_DIAL_SECONDS = 4.0
"""Time to open a link before the next attempt."""
ASK_SECONDS = 1.0
"""Time to send a short message."""
_HEARTBEAT_SECONDS = 0.5
_FIRST_PAUSE = 0.1
_PAUSE_GROWTH = 1.6
_LONGEST_PAUSE = 60.0
"""Pause between two attempts to open a link to a member that never answers."""
_MAX_FAILURES = 20
_ABUSE_PAUSE = 10.0
"""Pause after a link that was closed for what its member sent; it grows by this each time."""
CLOSE_SECONDS = _DIAL_SECONDS + 1
"""Time to close a transport."""


@runtime_checkable
class Transport(Protocol):
    """Interface to exchange requests and answers; safe in any thread."""

    def ask(self, peer: int, request: bytes, timeout: float) -> Iterable[BytesLike]:
        """Send a request now; return a few unchecked answers as they arrive.

        They end after `timeout` seconds, or early if the link is lost or the peer has sent all of
        them.
        """
        ...

    def serve(self, handler: RequestHandler) -> None:
        """Handle incoming requests from now on.

        The handler is called in any thread with each request and its `reply`; it must return at
        once. `reply` may be called later, once, from any thread. An empty reply means no answer. It
        may block on a slow reader.
        """
        ...

    def connected_peers(self) -> frozenset[int]:
        """Return the agents with a working link."""
        ...

    def close(self) -> None:
        """Close all links within a few seconds; a second call does nothing."""
        ...


class Zenoh:
    """Transport over TLS in zenoh's wire protocol, with links kept in the background.

    Requests are accepted at the member's own endpoint, or at another "HOST:PORT".
    """

    def __init__(
        self, federation: Federation, identity: Identity, *, listen: bool | str = True
    ) -> None:
        identity.check_certificate()
        agent_id = federation.id_of(identity.member)
        members = federation.members
        raise_descriptor_limit()

        self._own_key = _key_expression(agent_id)
        self._handler: RequestHandler | None = None
        self._links_in: dict[str, list[Link]] = {member.name: [] for member in members.values()}
        self._paces = {name: Pace() for name in self._links_in}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._listener: Listener | None = None
        self._dialers = {
            id: _Dialer(identity, member, _key_expression(id))
            for id, member in members.items()
            if id != agent_id and not member.is_outbound_only
        }
        self._dialers_by_name = {members[id].name: one for id, one in self._dialers.items()}
        if listen:
            address = identity.member.endpoint if listen is True else listen
            listening = open_listening_socket(address)
            self._listener = Listener(listening, identity, [*members.values()], self._on_link)
            self._listener.start()
        for dialer in self._dialers.values():
            dialer.start()
        self._heartbeat = threading.Thread(
            target=self._keep_links_alive, name="fedcb2o-links", daemon=True
        )
        self._heartbeat.start()

    @property
    def is_listening(self) -> bool:
        """True if other members can ask this agent."""
        return self._listener is not None

    def ask(self, peer: int, request: bytes, timeout: float) -> Iterator[BytesLike]:
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
        for link in self._open_links():
            link.close()
        if self._listener is not None:
            self._listener.close()
        end = time.monotonic() + CLOSE_SECONDS
        for thread in (self._heartbeat, *(one.thread for one in self._dialers.values())):
            thread.join(max(0.0, end - time.monotonic()))

    def __enter__(self) -> "Zenoh":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_links(self) -> list[Link]:
        with self._lock:
            incoming = [link for links in self._links_in.values() for link in links]
        outgoing = [one.link for one in self._dialers.values() if one.link is not None]
        return [*incoming, *outgoing]

    def _keep_links_alive(self) -> None:
        while not self._closed.wait(_HEARTBEAT_SECONDS):
            for link in self._open_links():
                link.keep_alive()

    def _on_link(self, stream: TlsStream, member: Member, expires: float) -> None:
        """Serve a link of a member; its newest links replace older ones."""
        if self._closed.is_set():
            stream.release()
            return
        name = member.name
        links = self._links_in[name]
        link = Link(stream, MAX_REQUEST_BYTES + _MESSAGE_HEAD_BYTES, self._own_key, expires)
        with self._lock:
            links.append(link)
            surplus = links[:-MAX_LINKS_PER_MEMBER]
        for old in surplus:
            old.close()
        threading.Thread(
            target=self._serve_link, args=(link, name), name="fedcb2o-hear", daemon=True
        ).start()
        # A member that dials is there, so that no pause is needed.
        if name in self._dialers_by_name:
            self._dialers_by_name[name].wake()

    def _serve_link(self, link: Link, name: str) -> None:
        def on_message(message: Message) -> None:
            if isinstance(message, Query):
                self._paces[name].wait(link.closed)
                self._handle(link, message)
            elif isinstance(message, Interest):
                link.allowance.charge(0)
                link.send(encode_declarations(self._own_key, message.id), seconds=ASK_SECONDS)
            else:
                link.allowance.charge(0)

        try:
            link.open(HANDSHAKE_SECONDS, is_listening=True)
            link.run(on_message)
        except (OSError, ZenohError):
            link.close()
            link.stream.release()
        finally:
            with self._lock:
                self._links_in[name].remove(link)

    def _handle(self, link: Link, query: Query) -> None:
        reply = _Reply(link, query.id, self._own_key)
        if not query.is_own_key or len(query.payload) > MAX_REQUEST_BYTES:
            return
        try:
            if self._handler is not None:
                self._handler(query.payload, reply)
        except Exception:
            logging.getLogger(__name__).exception("a request could not be handled")
            reply(b"")


class _Reply:
    """Function that answers one request; without an answer the request ends with this object."""

    def __init__(self, link: Link, id: int, key: bytes) -> None:
        self._link = link
        self._id = id
        self._key = key
        self._is_open = True

    def __call__(self, answer: bytes) -> None:
        if not self._is_open:
            return
        self._is_open = False
        final = encode_final(self._id)
        with suppress(OSError):  # the sender is gone
            if answer:
                self._link.send(encode_reply(self._id, self._key, answer), final)
            else:
                self._link.send(final, seconds=ASK_SECONDS)

    def __del__(self) -> None:
        if not self._link.closed.is_set():
            self(b"")


class Pace:
    """Pace of one member's requests: a member that asks faster delays itself only.

    Both numbers are those of a member's requests by default.
    """

    def __init__(self, burst: float | None = None, per_second: float | None = None) -> None:
        self._burst = float(_REQUEST_BURST if burst is None else burst)
        self._per_second = _REQUESTS_PER_SECOND if per_second is None else per_second
        self._left = self._burst
        self._updated = time.monotonic()
        self._lock = threading.Lock()

    def wait(self, closed: threading.Event) -> None:
        """Wait until one more request may be read, or until `closed`."""
        with self._lock:
            delay = (1 - self._grow()) / self._per_second
            self._left -= 1
        if delay > 0:
            closed.wait(delay)

    def take(self) -> bool:
        """Count one more request, and return True, if it may be read now."""
        with self._lock:
            may_read = self._grow() >= 1
            self._left -= may_read
        return may_read

    def _grow(self) -> float:
        """Return the number of requests that may be read now; the caller holds the lock."""
        now = time.monotonic()
        grown = self._left + (now - self._updated) * self._per_second
        self._left = min(self._burst, grown)
        self._updated = now
        return self._left


class _Dialer:
    """Link to one member, opened again after its end, and questions on it.

    The pause between two attempts grows with every failure. A member that opens a link itself is
    dialled at once.
    """

    def __init__(self, identity: Identity, member: Member, key: bytes) -> None:
        self._identity = identity
        self._member = member
        self._key = key
        self.link: Link | None = None
        self.attempts = 0
        self._stopped = threading.Event()
        self._woken = threading.Event()
        self._lock = threading.Lock()
        self._next_id = 0
        self._waiting: dict[int, Queue[BytesLike | None]] = {}
        self._ended: dict[int, None] = {}  # questions that were given up
        self.thread = threading.Thread(target=self._run, name="fedcb2o-dial", daemon=True)

    def start(self) -> None:
        self.thread.start()

    @property
    def is_connected(self) -> bool:
        return self.link is not None

    def wake(self) -> None:
        """Dial at once, because the member can be reached."""
        self._woken.set()

    def stop(self) -> None:
        self._stopped.set()
        self._woken.set()
        if self.link is not None:
            self.link.close()

    def ask(self, request: bytes, timeout: float) -> Iterator[BytesLike]:
        end = time.monotonic() + timeout
        link = self.link
        if link is None:
            return iter(())
        replies: Queue[BytesLike | None] = Queue()
        with self._lock:
            # Request ids have 32 bits.
            self._next_id = self._next_id % (2**31) + 1
            id = self._next_id
            self._waiting[id] = replies
        try:
            message = encode_query(id, self._key, request, timeout)
            link.send(message, seconds=min(timeout, ASK_SECONDS))
        except OSError:
            self._forget(id)
            return iter(())
        # The link was lost in the meantime.
        if self.link is not link:
            replies.put(None)
        return self._iterate_answers(id, replies, end)

    def _iterate_answers(
        self, id: int, replies: "Queue[BytesLike | None]", end: float
    ) -> Iterator[BytesLike]:
        """Yield the replies to one request, up to the first None."""
        try:
            for _ in range(MAX_ANSWERS):
                answer = replies.get(timeout=max(0.0, end - time.monotonic()))
                if answer is None:
                    return
                yield answer
        except Empty:
            return
        finally:
            self._forget(id)

    def _forget(self, id: int) -> None:
        with self._lock:
            if self._waiting.pop(id, None) is None:
                return
            self._ended[id] = None
            if len(self._ended) > _MAX_LATE_ANSWERS:
                del self._ended[next(iter(self._ended))]

    def _on_message(self, link: Link, message: Message) -> None:
        if isinstance(message, Final):
            with self._lock:
                replies = self._waiting.pop(message.id, None)
            if replies is not None:
                replies.put(None)
            elif message.id not in self._ended:
                link.allowance.charge(0)
        elif isinstance(message, messages.Reply):
            replies = self._waiting.get(message.id)
            payload = message.payload or b""
            if replies is not None and replies.qsize() < MAX_ANSWERS:
                if payload:
                    replies.put(payload)
                return
            with self._lock:
                # An answer to a question that was given up is no fault of the remote.
                is_late = self._ended.pop(message.id, 0) is None
            if not is_late:
                link.allowance.charge(len(payload))
        else:
            link.allowance.charge(0)
            if isinstance(message, Interest):
                link.send(encode_declarations(b"", message.id), seconds=ASK_SECONDS)

    def _run(self) -> None:
        failures = 0
        abuses = 0
        while not self._stopped.is_set():
            self.attempts += 1
            self._woken.clear()
            started = time.monotonic()
            is_abusive = False
            try:
                link = self._connect()
            except ZenohError:
                is_abusive = True
            except (OSError, ValueError, FedCB2OError):
                pass  # not there, another certificate, or our own is being renewed
            else:
                self.link = link
                if not self._stopped.is_set():
                    is_abusive = link.run(partial(self._on_message, link))
                link.close()
                link.stream.release()
                self.link = None
                self._end_requests()
                # A link that ends at once counts as a failure, or it would be opened without
                # pauses.
                if time.monotonic() - started > LEASE_SECONDS and not is_abusive:
                    failures = 0
            failures = min(_MAX_FAILURES, failures + 1)
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * _PAUSE_GROWTH**failures)
            if is_abusive:
                abuses = min(_MAX_FAILURES, abuses + 1)
                self._stopped.wait(_ABUSE_PAUSE * abuses)
            else:
                # Many members that start together would else dial in step.
                self._woken.wait(pause * random.uniform(0.8, 1.2))
            # Also after `wake`, so that a member that dials again and again costs little.
            self._stopped.wait(_FIRST_PAUSE)

    def _end_requests(self) -> None:
        with self._lock:
            waiting = list(self._waiting.values())
            self._waiting.clear()
        for replies in waiting:
            replies.put(None)

    def _connect(self) -> Link:
        stream, expires = dial(self._identity, self._member, _DIAL_SECONDS)
        try:
            link = Link(stream, MAX_ANSWER_BYTES + _MESSAGE_HEAD_BYTES, expires=expires.timestamp())
            link.open(_DIAL_SECONDS, is_listening=False)
        except BaseException:
            stream.release()
            raise
        return link


def _key_expression(agent: int) -> bytes:
    return b"fedcb2o/agents/%d" % agent

"""Client end of HTTPS: questions to one member, and signs of its life, by urllib3.

Each member has a pool of connections that trusts only its root. Answers therefore come from the
asked member, or from a holder of its key. Whatever a member answers, its own connections alone wait
for it, and no answer is longer than a bound.
"""

import http.client
import math
import random
import select
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import urllib3
from urllib3.connection import HTTPSConnection
from urllib3.exceptions import HTTPError, ProtocolError
from urllib3.util import Timeout, make_headers, parse_url

from fedcb2o.errors import ConfigError, FedCB2OError
from fedcb2o.peer._closeable import Closeable
from fedcb2o.peer.membership.certificates import parse_endpoint
from fedcb2o.peer.membership.identity import Identity, Member
from fedcb2o.peer.wire.protocol import (
    Answer,
    AnswerStatus,
    MalformedError,
    Question,
    decode_status,
)
from fedcb2o.peer.wire.tls import client_context, close_wrapped, remote_member

LEASE_SECONDS = 10.0  # time without a sign of life after which a member is not connected
_HEARTBEAT_SECONDS = 2.5
MAX_ANSWER_BYTES = 2**21  # largest accepted answer: a chunk of a model, or the longest manifest
MAX_REQUESTS = 6  # questions to one member at once; further ones wait
CONNECT_SECONDS = 4.0  # time to open a connection
_PIECE_BYTES = 2**20
_FIRST_PAUSE = 0.1
_PAUSE_GROWTH = 1.6
_LONGEST_PAUSE = 60.0  # pause between two attempts to reach a member that never answers
_MAX_FAILURES = 20
_REFUSALS = (401, 403)  # codes of requests that get no answer
STATE_TARGET = "/v1/federation"
STATE_BYTES = 2**12


def proxy_of(host: str) -> str:
    """Return the proxy for a host by HTTPS_PROXY and NO_PROXY; an empty text for none."""
    proxies = urllib.request.getproxies_environment()
    proxy = proxies.get("https", "")
    # Typeshed lacks this function, which urllib documents by `NO_PROXY`.
    is_exempt = urllib.request.proxy_bypass_environment(host, proxies)  # type: ignore[attr-defined]
    if not proxy or is_exempt:
        return ""
    if "://" not in proxy:
        proxy = f"http://{proxy}"
    if not proxy.lower().startswith(("http://", "https://")):
        scheme = proxy.partition("://")[0]
        raise ConfigError(
            f"HTTPS_PROXY names a proxy of the kind {scheme}: set one that begins with http:// or "
            "https://, or NO_PROXY=" + host
        )
    return proxy


class Pool(Closeable):
    """Connections to a member or relay, through the proxy of this machine's settings.

    Beyond `size` of them, requests wait. `on_connect` is called with each connection after its
    handshake; its errors refuse it.
    """

    def __init__(
        self,
        member: Member,
        context: ssl.SSLContext,
        size: int,
        on_connect: Callable[[ssl.SSLSocket], object] = lambda connection: None,
    ) -> None:
        address, port = parse_endpoint(member.endpoint)
        host = str(address)
        self._connections = WeakSet[HTTPSConnection]()
        connections = self._connections

        # Only the class of its connections gives access to them after the handshake.
        class Connection(HTTPSConnection):
            def connect(self) -> None:
                try:
                    super().connect()
                    assert isinstance(self.sock, ssl.SSLSocket)
                    on_connect(self.sock)
                except Exception as error:
                    close_wrapped(error)
                    raise
                connections.add(self)

        options: dict[str, Any] = {"maxsize": size, "block": True, "ssl_context": context}
        manager = urllib3.PoolManager(**options)
        if proxy := proxy_of(host):
            credentials = parse_url(proxy).auth
            headers = make_headers(proxy_basic_auth=credentials) if credentials else None
            manager = urllib3.ProxyManager(proxy, proxy_headers=headers, **options)
        self._pool = manager.connection_from_host(host, port, "https")
        self._pool.ConnectionCls = Connection

    @property
    def socket(self) -> socket.socket | None:
        """The socket of one connection, None without one."""
        return next((one.sock for one in self._connections), None)

    def close(self) -> None:
        """End all connections, also for threads that use them."""
        for connection in list(self._connections):
            # The thread that uses a connection closes it. The method of an SSLSocket would take TLS
            # away while that thread reads.
            with suppress(OSError, TypeError):
                socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)
        self._pool.close()

    def exchange(
        self,
        method: str,
        target: str,
        *,
        end: float,
        max_bytes: int,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> tuple[int, bytes]:
        """Send one request; return the status and the body of the answer.

        It ends at the monotonic time `end` with an OSError or an HTTPError of urllib3. A longer or
        compressed answer is a MalformedError.
        """
        left = max(0.01, end - time.monotonic())
        response = self._pool.urlopen(
            method,
            target,
            body=body,
            headers={"Accept-Encoding": "identity", **(headers or {})},
            timeout=Timeout(connect=min(left, CONNECT_SECONDS), read=left),
            pool_timeout=left,  # type: ignore[arg-type]
            # A signed request is valid once, so that urllib3 must not repeat it.
            retries=False,
            redirect=False,
            preload_content=False,
            # A short compressed answer could fill the memory.
            decode_content=False,
        )
        content = b""
        try:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise MalformedError("malformed")
            pieces = []
            while piece := response.read(_PIECE_BYTES, decode_content=False):
                pieces.append(piece)
                if sum(map(len, pieces)) > max_bytes:
                    raise MalformedError("malformed")
                if time.monotonic() > end:
                    raise TimeoutError("the answer takes too long")
            content = b"".join(pieces)
        except BaseException:
            # A connection with the rest of an answer is of no further use.
            response.close()
            raise
        finally:
            response.release_conn()
        return response.status, content


def tls_error(error: BaseException) -> ssl.SSLError | None:
    """Return the error of TLS in an error, or in that of urllib3 behind it."""
    causes = (error, *error.args, error.__cause__, *getattr(error.__cause__, "args", ()))
    return next((one for one in causes if isinstance(one, ssl.SSLError)), None)


class Dialer:
    """Connections to one member, opened again after their end, and questions on them.

    The pause between two attempts grows with every failure. A member that sends a request itself is
    dialled at once.
    """

    def __init__(self, identity: Identity, member: Member) -> None:
        self._identity = identity
        self._member = member
        self.is_connected = False
        self.attempts = 0
        self._heard = 0.0
        self._stopped = threading.Event()
        self._woken = threading.Event()
        self._lock = threading.Lock()
        self._pool: Pool | None = None
        self._control: Pool | None = None
        self._expires = math.inf  # of the member's certificate, by the system clock
        self._open = set[Question]()  # without an answer so far
        self._workers = ThreadPoolExecutor(MAX_REQUESTS, "fedcb2o-ask")
        self.thread = threading.Thread(target=self._run, name="fedcb2o-dial", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def note_request(self) -> None:
        """Dial at once if a member that was silent sends a request."""
        now = time.monotonic()
        if now - self._heard > LEASE_SECONDS:
            self._woken.set()
        self._heard = now

    def stop(self) -> None:
        self._stopped.set()
        self._woken.set()
        self._disconnect()
        # Not between a look at `_stopped` and the submission after it.
        with self._lock:
            self._workers.shutdown(wait=False)

    def ask(self, request: bytes, timeout: float) -> Question:
        """Send a request now; beyond `MAX_REQUESTS` of them, it waits."""
        question = Question(time.monotonic() + timeout)
        with self._lock:
            if not self.is_connected or self._stopped.is_set():
                return Question()
            self._open.add(question)
            self._workers.submit(self._ask, request, question)
        return question

    def _ask(self, request: bytes, question: Question) -> None:
        answer = None
        if question in self._open and question.end > time.monotonic():
            answer = self._send(request, question.end)
        with self._lock:
            self._open.discard(question)
        question.put(answer)

    def _send(self, request: bytes, end: float) -> Answer | None:
        line, *fields = request.decode("ascii").split("\n")
        headers = dict(one.split(": ", 1) for one in fields)
        target = line.partition(" ")[2]
        pool = self._pool
        if pool is None:
            return None
        try:
            code, body = pool.exchange(
                "GET", target, end=end, max_bytes=MAX_ANSWER_BYTES, headers=headers
            )
            if code in _REFUSALS:
                return None
            status = decode_status(code)
            return Answer(status, body if status is AnswerStatus.OK else b"")
        except (HTTPError, OSError, AttributeError, ValueError) as error:
            # urllib3 raises AttributeError for a connection that another thread closed.
            is_malformed = isinstance(error, ValueError) or _is_unreadable(error)
            return Answer(AnswerStatus.MALFORMED) if is_malformed else None

    def _run(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            self.attempts += 1
            self._woken.clear()
            started = time.monotonic()
            # Not there, another certificate, another program, or our own is being renewed.
            with suppress(HTTPError, OSError, ValueError, FedCB2OError, AttributeError):
                self._stay_connected()
            self._disconnect()
            # Connections that end at once are a failure, or they would be opened without pauses.
            if time.monotonic() - started > LEASE_SECONDS:
                failures = 0
            failures = min(_MAX_FAILURES, failures + 1)
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * _PAUSE_GROWTH**failures)
            # Many members that start together would else dial in step.
            self._woken.wait(pause * random.uniform(0.8, 1.2))
            # Also after `note_request`, so that a member that comes and goes costs little.
            self._stopped.wait(_FIRST_PAUSE)

    def _stay_connected(self) -> None:
        """Ask for signs of life until one is missing."""
        context = client_context(self._identity, self._member)
        self._expires = math.inf
        self._pool = Pool(self._member, context, MAX_REQUESTS, self._check)
        # Signs of life have a connection that no download keeps busy.
        self._control = Pool(self._member, context, 1, self._check)
        seconds = CONNECT_SECONDS
        while not self._stopped.is_set() and time.time() < self._expires:
            end = time.monotonic() + seconds
            code, _ = self._control.exchange("GET", STATE_TARGET, end=end, max_bytes=STATE_BYTES)
            if code != http.HTTPStatus.OK:
                return
            self.is_connected = True
            seconds = LEASE_SECONDS - _HEARTBEAT_SECONDS
            if self._is_lost(self._control.socket):
                return

    def _check(self, connection: ssl.SSLSocket) -> None:
        """Refuse a certificate that the member's root did not issue directly."""
        _, expires = remote_member(connection, [self._member])
        self._expires = expires.timestamp()

    def _is_lost(self, sock: socket.socket | None) -> bool:
        """Wait; return True if the member closes its connection, or does not end its answers."""
        if sock is None:
            return True
        readable = select.poll()
        readable.register(sock, select.POLLIN)
        # Nothing is to be read between two answers. `stop` shuts the socket down.
        if readable.poll(1000 * _HEARTBEAT_SECONDS):
            return True
        with self._lock:
            oldest = min((one.end for one in self._open), default=math.inf)
        return time.monotonic() > oldest + LEASE_SECONDS

    def _disconnect(self) -> None:
        """Close all connections, and end the questions on them."""
        with self._lock:
            self.is_connected = False
            questions = [*self._open]
            self._open.clear()
        for question in questions:
            question.put(None)
        for pool in (self._pool, self._control):
            if pool is not None:
                pool.close()


def _is_unreadable(error: Exception) -> bool:
    """Say whether a member sent something else than an answer of HTTP."""
    causes: tuple[Any, ...] = error.args if isinstance(error, ProtocolError) else ()
    lost = (http.client.RemoteDisconnected, http.client.IncompleteRead)
    return any(
        isinstance(cause, http.client.HTTPException) and not isinstance(cause, lost)
        for cause in causes
    )

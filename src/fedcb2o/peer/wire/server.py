"""Answers to what members ask, within limits: whoever asks too much or reads slowly delays nobody else.

A request is heard on the transport's thread, where it is checked and put into its sender's own short queue. Threads
take from these in turn. A slow reader holds as many threads as one member may; one that holds a thread for longer than
`patience` no longer counts among the uploads at once, and another thread takes its place.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeAlias

from fedcb2o.peer.membership.federation import Federation
from fedcb2o.peer.membership.federation_schema import Limits
from fedcb2o.peer.membership.identity import Identity
from fedcb2o.peer.wire.equivocation import Ledger
from fedcb2o.peer.wire.protocol import (
    CHUNK_BYTES,
    REQUEST_BYTES,
    REQUEST_CONTEXT,
    Answer,
    AnswerStatus,
    BytesLike,
    MalformedError,
    Manifest,
    Request,
    RequestKind,
    decode_manifest,
    decode_request,
    encode_hello,
    encode_offer,
)

Reply: TypeAlias = Callable[[bytes], None]
_AnswerContent: TypeAlias = Callable[[], tuple[AnswerStatus, BytesLike]]

MAX_PENDING = (
    16  # requests of one member that wait; for twice as many it is told that they are too many
)
MAX_BUSY_ANSWERS = 16  # answers to one member that it asks too often, until it has asked less
MAX_NONCES = 2048  # of one member that are remembered
_UNKNOWN_VERSION_LIMITS = Limits(answers_per_minute=60, uploads=1, per_peer=1)
"""What those get together whose version of the protocol is another, so that nothing of them can be checked."""


@dataclass(frozen=True)
class Snapshot:
    """A model as it is sent, and its signed manifest."""

    manifest: bytes
    content: BytesLike

    @cached_property
    def decoded_manifest(self) -> Manifest:
        """What the manifest says."""
        return decode_manifest(self.manifest)[0]

    @cached_property
    def digest(self) -> bytes:
        """What the manifest is called by."""
        return self.decoded_manifest.digest

    def chunk(self, k: int) -> memoryview:
        """The k-th chunk, without a copy; an empty one past the end."""
        return memoryview(self.content).cast("B")[k * CHUNK_BYTES : (k + 1) * CHUNK_BYTES]


@dataclass(frozen=True)
class ServerCounts:
    """What a server did so far."""

    requests: int  # heard, whatever became of them
    answered: int  # as they asked
    sent: Mapping[int, int]  # bytes by member
    refused: Mapping[str, int]  # requests by reason


@dataclass
class _ClientQuota:
    """One member's queue, and what it has used of its limits."""

    limits: Limits
    id: int | None  # None: strangers
    tokens: float
    filled: float  # when
    queue: deque[tuple[bytes, Reply, _AnswerContent]] = field(default_factory=deque)
    active: int = 0
    nonces: dict[bytes, None] = field(default_factory=dict)  # the oldest first

    def accept_nonce(self, nonce: bytes) -> bool:
        """Whether this nonce was not used, which it now is."""
        if nonce in self.nonces:
            return False
        self.nonces[nonce] = None
        if len(self.nonces) > MAX_NONCES:
            del self.nonces[next(iter(self.nonces))]
        return True

    def remaining(self, now: float) -> float:
        """How many answers are left of its limit a minute; below zero are those that it was told are too many."""
        most = float(self.limits.answers_per_minute)
        self.tokens = min(most, self.tokens + (now - self.filled) * most / 60)
        self.filled = now
        return self.tokens


class Server:
    """Answers for one agent: HELLO with what `about` gives, its last two snapshots, and manifests that it received."""

    def __init__(
        self,
        federation: Federation,
        agent_id: int,
        identity: Identity,
        ledger: Ledger,
        *,
        hello_content: Callable[[], Mapping[str, Any]],
        slow_after_seconds: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._federation = federation
        self._me = agent_id
        self._identity = identity
        self._ledger = ledger
        self._about = hello_content
        self._patience = slow_after_seconds
        self._clock = clock
        self._ids = {member.key: id for id, member in federation.members.items()}
        self._published: tuple[
            tuple[Snapshot, Mapping[int, Snapshot | None]], ...
        ] = ()  # the newest first

        now = clock()
        limits = {id: federation.limits for id in federation.members if id != agent_id} | {
            None: _UNKNOWN_VERSION_LIMITS
        }
        self._peers = {
            id: _ClientQuota(each, id, float(each.answers_per_minute), now)
            for id, each in limits.items()
        }
        self._changed = threading.Condition()  # its lock guards what follows, and the peers
        self._waiting: dict[int | None, _ClientQuota] = {}  # whose queues are not empty, in turn
        self._since: dict[int, float] = {}  # when each busy thread began
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._requests = self._answered = 0
        self._sent: Counter[int] = Counter()
        self._refused: Counter[str] = Counter()

    @property
    def counts(self) -> ServerCounts:
        """What it did so far."""
        with self._changed:
            return ServerCounts(
                self._requests, self._answered, dict(+self._sent), dict(+self._refused)
            )

    def publish(
        self, snapshot: Snapshot, overrides: Mapping[int, Snapshot | None] | None = None
    ) -> None:
        """Serve this snapshot, and go on with that of the round before.

        Simulated attackers serve `to` some members others, or none yet, and may publish twice for one round.
        """
        if overrides is None:
            self._ledger.record(
                snapshot.manifest
            )  # whoever else signs with this key is found out too
        published = ((snapshot, dict(overrides or {})), *self._published)
        rounds = sorted({each.decoded_manifest.round for each, _ in published})[-2:]
        self._published = tuple(
            each for each in published if each[0].decoded_manifest.round in rounds
        )[:4]

    def on_request(self, request: bytes, reply: Reply) -> None:
        """Check a request and see to its answer; at once, and without ever raising. What is not signed gets none."""
        try:
            reason = self._turn_away_or_queue(request, reply)
        except Exception:  # whatever it is, the transport's thread goes on
            reason = self._log_failure()
        with self._changed:
            self._requests += 1
            if reason:
                self._refused[reason] += 1

    def close(self) -> None:
        """Answer no more; waits for answers under way, but not long."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            for peer in self._peers.values():
                peer.queue.clear()
            self._changed.notify_all()
            threads = list(self._threads)
        end = time.monotonic() + 1
        for thread in threads:
            thread.join(max(0, end - time.monotonic()))

    def _turn_away_or_queue(self, data: bytes, reply: Reply) -> str:
        """Why a request is turned away; "" where it is not."""
        try:
            request, body, signature = decode_request(data)
        except MalformedError as error:
            if error.reason == "version" and len(data) >= REQUEST_BYTES:
                with self._changed:
                    strangers = self._peers[None]
                    if strangers.remaining(self._clock()) >= 1:
                        strangers.tokens -= 1
                        self._enqueue(
                            strangers,
                            bytes(16),
                            reply,
                            partial(_empty_answer, AnswerStatus.ANOTHER_VERSION),
                        )
            return error.reason
        same = request.run == self._federation.run
        if same and request.receiver != self._me:
            return "receiver"
        sender = (
            self._ids.get(request.digest, self._me)
            if request.kind is RequestKind.HELLO
            else request.sender
        )
        member = self._federation.members.get(sender)
        if member is None or sender == self._me:
            return "member"
        peer = self._peers[sender]
        with self._changed:
            if (
                peer.remaining(self._clock()) < 1 - MAX_BUSY_ANSWERS
            ):  # a flood costs no look at signatures
                return "rate"
            if len(peer.queue) >= 2 * MAX_PENDING:
                return "pending"
        if not member.verify(REQUEST_CONTEXT + body, signature):
            return "signature"
        with self._changed:
            reason = ""
            content = partial(self._answer_content, sender, request)
            if not peer.accept_nonce(request.nonce):
                return "replay"
            peer.tokens -= 1
            if peer.tokens < 0:
                reason = "rate"
                content = partial(_empty_answer, AnswerStatus.BUSY)
            elif not same and request.kind is not RequestKind.HELLO:
                reason = "run"
                content = partial(_empty_answer, AnswerStatus.ANOTHER_RUN)
            elif len(peer.queue) >= MAX_PENDING:
                reason = "pending"
                content = partial(_empty_answer, AnswerStatus.BUSY)
            self._enqueue(peer, request.nonce, reply, content)
        return reason

    def _log_failure(self) -> str:
        """A fault of ours, the first of which is logged."""
        if not self._refused["failed"]:
            logging.getLogger(__name__).exception("a request could not be answered")
        return "failed"

    def _enqueue(
        self, peer: _ClientQuota, nonce: bytes, reply: Reply, content: _AnswerContent
    ) -> None:
        """Queue an answer, unless even those that turn away have become too many; the lock is held."""
        if self._closed or len(peer.queue) >= 2 * MAX_PENDING:
            return
        peer.queue.append((nonce, reply, content))
        self._waiting.setdefault(peer.id, peer)
        self._ensure_idle_thread()
        self._changed.notify()

    def _ensure_idle_thread(self) -> None:
        """See that at least one thread is not busy; the lock is held."""
        if len(self._threads) == len(self._since):
            thread = threading.Thread(
                target=self._serve_queue,
                args=(len(self._threads),),
                daemon=True,
                name="fedcb2o-serve",
            )
            thread.start()
            self._threads.append(thread)

    def _serve_queue(self, me: int) -> None:
        while (taken := self._dequeue(me)) is not None:
            self._send_answer(me, *taken)
            del taken  # and with it the transport's end of the request

    def _send_answer(
        self, me: int, peer: _ClientQuota, nonce: bytes, reply: Reply, content: _AnswerContent
    ) -> None:
        """One answer, which may take long."""
        try:
            status, body = content()
            answer = Answer(nonce, status, body).encode()
            reply(answer)
        except Exception:  # it ends this answer, and not the thread
            status = None
            answer = b""
            self._log_failure()
        with self._changed:
            peer.active -= 1
            del self._since[me]
            self._answered += status is AnswerStatus.OK
            self._refused["failed"] += status is None
            if peer.id is not None:
                self._sent[peer.id] += len(answer)
            self._changed.notify()

    def _dequeue(self, me: int) -> tuple[_ClientQuota, bytes, Reply, _AnswerContent] | None:
        """The next answer that a thread is to give, when its turn has come; None when there will be none."""
        with self._changed:
            while not self._closed:
                if (peer := self._next_client()) is not None:
                    del self._waiting[peer.id]
                    taken = peer.queue.popleft()
                    if peer.queue:
                        self._waiting[peer.id] = peer
                    peer.active += 1
                    self._since[me] = self._clock()
                    if self._waiting:
                        self._ensure_idle_thread()
                    return peer, *taken
                self._changed.wait(self._patience if self._waiting else None)
        return None

    def _next_client(self) -> _ClientQuota | None:
        """Whose turn it is, of those that have not as many uploads at once as they may."""
        late = self._clock() - self._patience
        if sum(since > late for since in self._since.values()) >= self._federation.limits.uploads:
            return None
        return next(
            (peer for peer in self._waiting.values() if peer.active < peer.limits.per_peer), None
        )

    def _answer_content(self, sender: int, request: Request) -> tuple[AnswerStatus, BytesLike]:
        """What a member gets for a request that is in order."""
        if request.kind is RequestKind.HELLO:
            return AnswerStatus.OK, encode_hello(self._about(), request.nonce, self._identity.sign)
        if request.kind is RequestKind.WITNESS:
            signed = self._ledger.get(request.index, request.round, request.digest)
            return (AnswerStatus.NOT_HERE, b"") if signed is None else (AnswerStatus.OK, signed)
        found = [to.get(sender, snapshot) for snapshot, to in self._published]
        snapshots = [snapshot for snapshot in found if snapshot is not None]
        if request.kind is RequestKind.MANIFEST:
            return self._newest_offer(snapshots, request.round)
        for snapshot in snapshots:
            if snapshot.digest == request.digest and request.index < len(
                snapshot.decoded_manifest.chunks
            ):
                return AnswerStatus.OK, snapshot.chunk(request.index)
        return AnswerStatus.NOT_HERE, b""

    def _newest_offer(self, snapshots: list[Snapshot], n: int) -> tuple[AnswerStatus, BytesLike]:
        """The newest manifest that an agent in round `n` takes, and what was seen of others."""
        rounds = [snapshot.decoded_manifest.round for snapshot in snapshots]
        if self._federation.synchronous:
            if n not in rounds:
                return AnswerStatus.NOT_HERE if rounds and n < min(
                    rounds
                ) else AnswerStatus.NOT_YET, b""
            chosen = snapshots[rounds.index(n)]
        elif not rounds or rounds[0] < n - self._federation.lag:
            return AnswerStatus.NOT_YET, b""
        else:
            chosen = snapshots[0]
        others = [seen for seen in self._ledger.digests() if seen[0] != self._me]
        return AnswerStatus.OK, encode_offer(chosen.manifest, others)


def _empty_answer(status: AnswerStatus) -> tuple[AnswerStatus, BytesLike]:
    return status, b""

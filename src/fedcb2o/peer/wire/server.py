"""Server that answers members' requests within limits.

A request is checked on the transport's thread and put into its sender's own short queue. Threads
serve the queues in turn. A slow reader occupies at most as many threads as one member may. A thread
that needs longer than `slow_after_seconds` no longer counts among the simultaneous uploads, and
another thread takes its place.

Example:
    >>> Snapshot(b"manifest", bytes(10)).part(4, None).nbytes
    6
"""

import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

from fedcb2o.peer.membership.federation import Federation, file_content
from fedcb2o.peer.membership.federation_schema import Limits
from fedcb2o.peer.membership.identity import Identity, Member
from fedcb2o.peer.wire.equivocation import Ledger
from fedcb2o.peer.wire.pace import Pace
from fedcb2o.peer.wire.protocol import (
    MAX_HELLO_BYTES,
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
    num_chunks,
)
from fedcb2o.peer.wire.transport import Reply

_AnswerContent: TypeAlias = Callable[[], Answer]

MAX_PENDING = 16  # waiting requests of one member; from then on BUSY, from twice as many nothing
MAX_BUSY_ANSWERS = 16  # answers to one member that it asks too often, until it has asked less
MAX_NONCES = 2048  # remembered, of one member
_JSON = (("content-type", "application/json"),)
_FOREIGN_LIMITS = Limits(answers_per_minute=60, uploads=1, per_peer=1)
"""Limits of a member's requests of other runs, and of all requests with another version together.

A receiver of another run could replay its requests here, so they never use up a member's own limit.
"""


@dataclass(frozen=True)
class Snapshot:
    """An encoded model and its signed manifest."""

    manifest: bytes
    content: BytesLike

    @cached_property
    def decoded_manifest(self) -> Manifest:
        """The manifest."""
        return decode_manifest(self.manifest)[0]

    @cached_property
    def digest(self) -> bytes:
        """Digest of the manifest."""
        return self.decoded_manifest.digest

    def part(self, first: int, last: int | None) -> memoryview:
        """Return the bytes from `first` to `last`, or to the end, without copying them."""
        return memoryview(self.content).cast("B")[first : None if last is None else last + 1]


@dataclass
class _ServerCounts:
    """Totals: requests, those answered with OK, sent bytes by member, refusals by reason."""

    requests: int = 0
    answered: int = 0
    sent: Counter[int] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)


@dataclass
class _ClientQuota:
    """Queue of one member and its use of the limits."""

    limits: Limits
    id: int | None  # None for former members, and for senders with another version
    clock: InitVar[Callable[[], float]]
    queue: deque[tuple[Reply, _AnswerContent]] = field(default_factory=deque)
    active: int = 0
    nonces: dict[bytes, None] = field(default_factory=dict)  # the oldest first

    def __post_init__(self, clock: Callable[[], float]) -> None:
        # BUSY answers beyond the limit make it negative.
        answers = self.limits.answers_per_minute
        self.pace = Pace(answers, answers / 60, clock)

    def accept_nonce(self, nonce: bytes) -> bool:
        """Remember a nonce; return False if it was used before."""
        if nonce in self.nonces:
            return False
        self.nonces[nonce] = None
        if len(self.nonces) > MAX_NONCES:
            del self.nonces[next(iter(self.nonces))]
        return True


@dataclass(eq=False)
class Server:
    """Server of one agent's description, last two snapshots and received manifests.

    `hello_content` returns this agent's description of itself. An upload that takes longer than
    `slow_after_seconds` no longer counts among the simultaneous ones. Members in `incompatible` get
    only this agent's description of itself.
    """

    federation: Federation
    agent_id: int
    identity: Identity
    ledger: Ledger
    _: KW_ONLY
    hello_content: Callable[[], Mapping[str, Any]]
    slow_after_seconds: float = 0.25
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        federation = self.federation
        self.incompatible: Collection[int] = ()
        self._ids = {member.key: id for id, member in federation.members.items()}
        self._former_members = {member.key: member for _, member in federation.former_members()}
        # The newest first, with other snapshots for some members.
        self._published: tuple[tuple[Snapshot, Mapping[int, Snapshot | None]], ...] = ()

        others = [id for id in federation.members if id != self.agent_id]
        clock = self.clock
        self._quotas = {id: _ClientQuota(federation.limits, id, clock) for id in others}
        self._foreign_quotas = {id: _ClientQuota(_FOREIGN_LIMITS, id, clock) for id in others}
        self._former_quota = _ClientQuota(_FOREIGN_LIMITS, None, clock)
        self._version_quota = _ClientQuota(_FOREIGN_LIMITS, None, clock)  # of other versions
        self._changed = threading.Condition()  # its lock guards what follows, and the quotas
        # Quotas with a queue that is not empty, in turn, by their identity.
        self._waiting: dict[int, _ClientQuota] = {}
        self._busy_since: dict[int, float] = {}  # start time of each busy thread
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._counts = _ServerCounts()

    @property
    def counts(self) -> _ServerCounts:
        """Totals so far."""
        with self._changed:
            counts = self._counts
            # `+` leaves out members and reasons with 0.
            return replace(counts, sent=+counts.sent, refused=+counts.refused)

    def publish(
        self, snapshot: Snapshot, overrides: Mapping[int, Snapshot | None] | None = None
    ) -> None:
        """Serve a snapshot, and continue to serve that of the previous round.

        Simulated attackers give `overrides`: other snapshots for some members, or None for none
        yet. They may publish twice in one round.
        """
        if overrides is None:
            # The ledger finds another user of the same key.
            self.ledger.record(snapshot.manifest)
        published = ((snapshot, dict(overrides or {})), *self._published)
        rounds = {entry.decoded_manifest.round for entry, _ in published}
        served = sorted(rounds)[-2:]
        fitting = (one for one in published if one[0].decoded_manifest.round in served)
        self._published = tuple(itertools.islice(fitting, 4))

    def on_request(self, request: bytes, reply: Reply) -> str:
        """Check a request and queue its answer, without waiting; return why it is turned away."""
        try:
            reason = self._turn_away_or_queue(request, reply)
        except Exception:
            # The transport's thread must go on.
            reason = self._log_failure()
        with self._changed:
            self._counts.requests += 1
            self._counts.refused[reason] += bool(reason)
        return reason

    def close(self) -> None:
        """Stop answering; wait at most a second for running answers."""
        with self._changed:
            self._closed = True
            for quota in self._waiting.values():
                quota.queue.clear()
            self._waiting.clear()
            self._changed.notify_all()
            threads = list(self._threads)
        end = time.monotonic() + 1
        for thread in threads:
            thread.join(max(0, end - time.monotonic()))

    def _turn_away_or_queue(self, data: bytes, reply: Reply) -> str:
        """Return the reason why a request is refused, or an empty text."""
        try:
            request, body, signature = decode_request(data)
        except MalformedError as error:
            with self._changed:
                quota = self._version_quota
                if error.reason == "version" and quota.pace.take():
                    self._enqueue(quota, reply, partial(Answer, AnswerStatus.ANOTHER_VERSION))
            return error.reason

        is_hello = request.kind is RequestKind.HELLO
        is_same_run = request.run == self.federation.run
        if is_same_run and request.receiver != self.agent_id:
            return "receiver"
        sender = request.sender
        former: Member | None = None
        # The sender of a HELLO is found by its key: ids may differ between two files.
        if is_hello:
            sender = self._ids.get(request.digest, self.agent_id)
            former = self._former_members.get(request.digest) if is_same_run else None
        is_former = former is not None
        quotas = self._quotas if is_same_run else self._foreign_quotas
        if not is_former and sender not in quotas:
            return "member"
        member = former or self.federation.members[sender]
        quota = self._former_quota if is_former else quotas[sender]
        with self._changed:
            # A few BUSY answers beyond the limit let an honest member ask less often.
            fewest = 1 - MAX_BUSY_ANSWERS if is_same_run and not is_former else 1
            if quota.pace.left() < fewest:
                # Before the signature is verified, so that a flood is cheap.
                return "rate"
            if len(quota.queue) >= 2 * MAX_PENDING:
                return "pending"
        # Only a signed request counts: others could use up a member's limit.
        if not member.verify(REQUEST_CONTEXT + body, signature):
            return "signature"

        with self._changed:
            if not quota.accept_nonce(request.nonce):
                return "replay"
            cost = self._cost(sender, request)
            may_answer = quota.pace.left() >= cost
            quota.pace.spend(cost if may_answer else 1)
            reason = ""
            content: _AnswerContent = partial(self._answer_content, sender, request)
            if is_former:
                # Only a relay leads to it; it gets the new version.
                file = file_content(self.federation).decode()
                content = partial(self._hello, request.nonce, file=file)
            elif not may_answer:
                reason = "rate"
                content = partial(Answer, AnswerStatus.BUSY)
            elif not is_same_run and not is_hello:
                reason = "run"
                content = partial(Answer, AnswerStatus.ANOTHER_RUN)
            elif sender in self.incompatible and not is_hello:
                reason = "version"
                content = partial(Answer, AnswerStatus.ANOTHER_VERSION)
            elif len(quota.queue) >= MAX_PENDING:
                reason = "pending"
                content = partial(Answer, AnswerStatus.BUSY)
            self._enqueue(quota, reply, content)
        return reason

    def _hello(self, nonce: bytes, **more: str) -> Answer:
        """Return a description of this agent, with more content if it fits."""
        body = encode_hello({**self.hello_content(), **more}, nonce, self.identity.sign)
        if more and len(body) > MAX_HELLO_BYTES:
            return self._hello(nonce)
        return Answer(AnswerStatus.OK, body, _JSON)

    def _log_failure(self) -> str:
        """Log the first unexpected error."""
        if not self._counts.refused["failed"]:
            logging.getLogger(__name__).exception("a request could not be answered")
        return "failed"

    def _enqueue(self, quota: _ClientQuota, reply: Reply, content: _AnswerContent) -> None:
        """Queue an answer, unless too many wait; the caller holds the lock."""
        if self._closed or len(quota.queue) >= 2 * MAX_PENDING:
            return
        quota.queue.append((reply, content))
        self._waiting.setdefault(id(quota), quota)
        self._ensure_idle_thread()
        self._changed.notify()

    def _ensure_idle_thread(self) -> None:
        """Start a thread if all are busy; the caller holds the lock."""
        if len(self._threads) == len(self._busy_since):
            thread = threading.Thread(target=self._serve_queue, daemon=True, name="fedcb2o-serve")
            thread.start()
            self._threads.append(thread)

    def _serve_queue(self) -> None:
        while (task := self._dequeue()) is not None:
            self._send_answer(*task)
            # With it goes the transport's end of the request.
            del task

    def _send_answer(self, quota: _ClientQuota, reply: Reply, content: _AnswerContent) -> None:
        """Compute and send one answer, which may take long."""
        answer: Answer | None = None
        try:
            answer = content()
            reply(answer)
        except Exception:
            # It ends this answer, but not the thread.
            answer = None
            self._log_failure()
        with self._changed:
            quota.active -= 1
            del self._busy_since[threading.get_ident()]
            self._counts.answered += answer is not None and answer.status is AnswerStatus.OK
            self._counts.refused["failed"] += answer is None
            if quota.id is not None and answer is not None:
                self._counts.sent[quota.id] += len(answer.body)
            self._changed.notify()

    def _dequeue(self) -> tuple[_ClientQuota, Reply, _AnswerContent] | None:
        """Wait for a thread's next answer; None after the server was closed."""
        with self._changed:
            while not self._closed:
                quota = self._next_client()
                if quota is None:
                    self._changed.wait(self.slow_after_seconds if self._waiting else None)
                    continue
                del self._waiting[id(quota)]
                task = quota.queue.popleft()
                if quota.queue:
                    self._waiting[id(quota)] = quota
                quota.active += 1
                self._busy_since[threading.get_ident()] = self.clock()
                if self._waiting:
                    self._ensure_idle_thread()
                return quota, *task
        return None

    def _next_client(self) -> _ClientQuota | None:
        """Return the next member in turn that may have another upload."""
        threshold = self.clock() - self.slow_after_seconds
        num_uploads = sum(start > threshold for start in self._busy_since.values())
        if num_uploads >= self.federation.limits.uploads:
            return None
        for quota in self._waiting.values():
            if quota.active < quota.limits.per_peer:
                return quota
        return None

    def _visible(self, sender: int) -> list[Snapshot]:
        """Return the snapshots that a member may download, the newest first."""
        visible = [overrides.get(sender, snapshot) for snapshot, overrides in self._published]
        return [snapshot for snapshot in visible if snapshot is not None]

    def _find(self, sender: int, request: Request) -> tuple[Snapshot, memoryview] | None:
        """Return the snapshot that a request for a model names, and the part of it."""
        for snapshot in self._visible(sender):
            if snapshot.digest == request.digest:
                return snapshot, snapshot.part(request.first, request.last)
        return None

    def _cost(self, sender: int, request: Request) -> int:
        """Return the number of answers as which a request counts: one for each MiB of a model."""
        found = self._find(sender, request) if request.kind is RequestKind.MODEL else None
        return 1 if found is None else max(1, num_chunks(found[1].nbytes))

    def _answer_content(self, sender: int, request: Request) -> Answer:
        """Return the answer to a valid request."""
        if request.kind is RequestKind.HELLO:
            return self._hello(request.nonce)
        if request.kind is RequestKind.WITNESS:
            signed = self.ledger.get(request.index, request.round, request.digest)
            return Answer(AnswerStatus.OK, signed) if signed else Answer(AnswerStatus.NOT_HERE)
        if request.kind is RequestKind.MANIFEST:
            return self._newest_offer(self._visible(sender), request.round)
        found = self._find(sender, request)
        if found is None:
            return Answer(AnswerStatus.NOT_HERE)
        snapshot, part = found
        size = snapshot.decoded_manifest.size
        if not part:
            return Answer(
                AnswerStatus.NO_SUCH_PART, headers=(("content-range", f"bytes */{size}"),)
            )
        headers = [("etag", f'"{request.digest.hex()}"'), ("accept-ranges", "bytes")]
        if part.nbytes < size:
            last = request.first + part.nbytes - 1
            headers.append(("content-range", f"bytes {request.first}-{last}/{size}"))
        return Answer(AnswerStatus.OK, part, tuple(headers))

    def _newest_offer(self, snapshots: list[Snapshot], n: int) -> Answer:
        """Return the newest manifest for an agent in round `n`, with digests."""
        rounds = [snapshot.decoded_manifest.round for snapshot in snapshots]
        chosen = 0
        if self.federation.synchronous:
            if n not in rounds:
                is_past = bool(rounds) and n < min(rounds)
                return Answer(AnswerStatus.NOT_HERE if is_past else AnswerStatus.NOT_YET)
            chosen = rounds.index(n)
        elif not rounds or rounds[0] < n - self.federation.lag:
            return Answer(AnswerStatus.NOT_YET)
        others = [digest for digest in self.ledger.digests() if digest[0] != self.agent_id]
        return Answer(AnswerStatus.OK, encode_offer(snapshots[chosen].manifest, others), _JSON)

"""Server that answers members' requests within limits.

A request is checked and answered in the transport's thread. This takes less than a millisecond: an
answer is a view of an encoded model, or short. The transport sends it as fast as its reader reads.
"""

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any

from fedcb2o.peer.membership.federation import Federation, file_content
from fedcb2o.peer.membership.identity import Identity, Member
from fedcb2o.peer.wire.equivocation import Ledger
from fedcb2o.peer.wire.pace import Nonces, Pace
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

MAX_BUSY_ANSWERS = 16  # answers to one member that it asks too often, until it has asked less
_JSON = (("content-type", "application/json"),)
_FOREIGN_PER_MINUTE = 60
"""Answers to a member's requests of other runs, and to all requests with another version together.

A receiver of another run could replay its requests here, so they never use up a member's own limit.
"""


@dataclass(frozen=True)
class Snapshot:
    """An encoded model, its signed manifest, and signed triggers, empty without any."""

    manifest: bytes
    content: BytesLike
    triggers: bytes = b""

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
    """Totals: requests answered with OK, sent bytes by member, refusals by reason."""

    answered: int = 0
    sent: Counter[int] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)


@dataclass
class _ClientQuota:
    """One member's use of the limits."""

    pace: Pace  # of answers; BUSY ones beyond the limit make it negative
    nonces: Nonces = field(default_factory=Nonces)


@dataclass(eq=False)
class Server:
    """Server of one agent's description, last two snapshots and received manifests.

    `hello_content` returns this agent's description of itself. Requests may come from several
    threads.
    """

    federation: Federation
    agent_id: int
    identity: Identity
    ledger: Ledger
    _: KW_ONLY
    hello_content: Callable[[], Mapping[str, Any]]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        federation = self.federation
        self._ids = {member.key: id for id, member in federation.members.items()}
        self._former_members = {member.key: member for _, member in federation.former_members()}
        # The newest first, with other snapshots for some members.
        self._published: tuple[tuple[Snapshot, Mapping[int, Snapshot | None]], ...] = ()

        others = [id for id in federation.members if id != self.agent_id]
        self._quotas = {id: self._quota(federation.limits.answers_per_minute) for id in others}
        self._foreign_quotas = {id: self._quota(_FOREIGN_PER_MINUTE) for id in others}
        self._former_quota = self._quota(_FOREIGN_PER_MINUTE)  # of all former members
        self._version_quota = self._quota(_FOREIGN_PER_MINUTE)  # of other versions
        self._lock = threading.Lock()  # of nonces and counts
        self._counts = _ServerCounts()

    def _quota(self, answers_per_minute: int) -> _ClientQuota:
        return _ClientQuota(Pace(answers_per_minute, answers_per_minute / 60, self.clock))

    @property
    def counts(self) -> _ServerCounts:
        """Totals so far."""
        with self._lock:
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
            self.ledger.record(snapshot.manifest, snapshot.decoded_manifest)
        published = ((snapshot, dict(overrides or {})), *self._published)
        rounds = {entry.decoded_manifest.round for entry, _ in published}
        served = sorted(rounds)[-2:]
        fitting = (one for one in published if one[0].decoded_manifest.round in served)
        self._published = tuple(itertools.islice(fitting, 4))

    def on_request(self, request: bytes, reply: Reply) -> str:
        """Check and answer a request; return why it is turned away, or an empty text."""
        answer: Answer | None = None
        sender: int | None = None
        try:
            reason, sender, answer = self._check_and_answer(request)
            if answer is not None:
                reply(answer)
        except Exception:
            # The transport's thread must go on.
            reason, answer = "failed", None
            if not self._counts.refused["failed"]:
                logging.getLogger(__name__).exception("a request could not be answered")
        with self._lock:
            self._counts.refused[reason] += bool(reason)
            self._counts.answered += answer is not None and answer.status is AnswerStatus.OK
            if sender is not None and answer is not None:
                self._counts.sent[sender] += len(answer.body)
        return reason

    def _check_and_answer(self, data: bytes) -> tuple[str, int | None, Answer | None]:
        """Return why a request is turned away, the member that sent it, and the answer."""
        try:
            request, body, signature = decode_request(data)
        except MalformedError as error:
            may_answer = error.reason == "version" and self._version_quota.pace.take()
            answer = Answer(AnswerStatus.ANOTHER_VERSION) if may_answer else None
            return error.reason, None, answer

        is_hello = request.kind is RequestKind.HELLO
        is_same_run = request.run == self.federation.run
        if is_same_run and request.receiver != self.agent_id:
            return "receiver", None, None
        sender = request.sender
        former: Member | None = None
        # The sender of a HELLO is found by its key: ids may differ between two files.
        if is_hello:
            # An unknown key has the id of this agent, which has no quota.
            sender = self._ids.get(request.digest, self.agent_id)
            former = self._former_members.get(request.digest) if is_same_run else None
        is_former = former is not None
        quotas = self._quotas if is_same_run else self._foreign_quotas
        if not is_former and sender not in quotas:
            return "member", None, None
        member = former or self.federation.members[sender]
        quota = self._former_quota if is_former else quotas[sender]
        # A few BUSY answers beyond the limit let an honest member ask less often.
        fewest = 1 - MAX_BUSY_ANSWERS if is_same_run and not is_former else 1
        if quota.pace.left() < fewest:
            # Before the signature is verified, so that a flood is cheap.
            return "rate", sender, None
        # Only a signed request counts: others could use up a member's limit.
        if not member.verify(REQUEST_CONTEXT + body, signature):
            return "signature", sender, None
        with self._lock:
            is_new = quota.nonces.accept(request.nonce)
        if not is_new:
            return "replay", sender, None

        cost = self._cost(sender, request)
        may_answer = quota.pace.left() >= cost
        quota.pace.spend(cost if may_answer else 1)
        if is_former:
            # Only a relay leads to it; it gets the new version.
            file = file_content(self.federation).decode()
            return "", None, self._hello(request.nonce, file=file)
        if not may_answer:
            return "rate", sender, Answer(AnswerStatus.BUSY)
        if not is_same_run and not is_hello:
            return "run", sender, Answer(AnswerStatus.ANOTHER_RUN)
        return "", sender, self._answer(sender, request)

    def _hello(self, nonce: bytes, **more: str) -> Answer:
        """Return a description of this agent, with more content if it fits."""
        body = encode_hello({**self.hello_content(), **more}, nonce, self.identity.sign)
        if more and len(body) > MAX_HELLO_BYTES:
            return self._hello(nonce)
        return Answer(AnswerStatus.OK, body, _JSON)

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

    def _answer(self, sender: int, request: Request) -> Answer:
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
        size = memoryview(snapshot.content).nbytes
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
        offer = encode_offer(snapshots[chosen].manifest, others, snapshots[chosen].triggers)
        return Answer(AnswerStatus.OK, offer, _JSON)

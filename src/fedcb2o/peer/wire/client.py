"""Download of peers' models: line 2 of Algorithm 2 (alg:localAggregation).

No peer is trusted. Before other code sees a model, it passes these checks in this order: the form
of the answer, `protocol.validate_manifest` (member, signature, run, version, agent, round, size),
then hash, type, finiteness and bound. A model that fails is dropped and counted by its reason.

In each round an agent also asks the members whose models it does not download for their manifests.
It compares the digests in these answers with its own (`equivocation`), and learns their rounds.
"""

import functools
import hashlib
import logging
import math
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.errors import DataError
from fedcb2o.federated.guards.acceptance import is_acceptable, max_abs
from fedcb2o.peer._denormals import flush_
from fedcb2o.peer.membership.federation import Federation, removal_notice
from fedcb2o.peer.membership.identity import Identity
from fedcb2o.peer.wire import protocol
from fedcb2o.peer.wire.compression import Codec, Int8Codec, RawCodec, TopKCodec
from fedcb2o.peer.wire.equivocation import Ledger
from fedcb2o.peer.wire.patience import Backoff, Patience, Wait
from fedcb2o.peer.wire.protocol import (
    Answer,
    AnswerStatus,
    Manifest,
    Question,
    Request,
    RequestKind,
)
from fedcb2o.peer.wire.transport import Transport

_CHUNKS_IN_FLIGHT = 4  # of one model
_MAX_TRIES = 3  # at a peer that does not answer
_MAX_WITNESSES = 4  # manifests that one answer may make us ask for
_RETRY_SECONDS = 0.01, 0.25  # first and longest pause before a peer without a model is asked again
HELLO_SECONDS = 2.0  # time for an answer to HELLO
_GRACE_SECONDS = 0.5  # time after the deadline to check models that have arrived
_WITNESS_SECONDS = 2.0  # time for an answer to WITNESS
_AUDIT_SECONDS = 5.0  # time for an answer to MANIFEST alone
_MAX_AUDITS = 32  # members that are asked for a manifest alone, per round
_MAX_DOWNLOADS = 2**15
_MAX_FILES = 3  # of one member, which must hold a later version of the federation
_LATE, _NO_ANSWER, _MOVED_ON, _EQUIVOCATION = "late", "no answer", "not here", "equivocation"
FAILED = "failed"  # an unexpected error: a peer never breaks a round
NOT_YET = "not yet"
_RETRIABLE_REASONS = (_NO_ANSWER, NOT_YET, "busy")  # of a missing model, which may soon be gone
SILENT_REASONS = (_LATE, _NO_ANSWER)  # reasons of a missing model of a peer that did not answer
BLAMELESS_REASONS = (_LATE, *_RETRIABLE_REASONS, _MOVED_ON)  # no fault of the peer


class StoppedError(Exception):
    """The agent was asked to stop."""


@dataclass(frozen=True)
class Arrival:
    """A model that arrived.

    `num_samples` is claimed by the sender. `seconds` includes the checks of the model. `row_owner`
    is the peer whose row holds the model: itself, or the one in whose place it was asked.
    `triggers` has what `read_triggers` returned, None without any.
    """

    round: int
    num_samples: int
    size: int
    seconds: float
    row_owner: int
    triggers: Any = None


@dataclass(eq=False)
class PeerClient:
    """Client that asks other members for models and descriptions.

    After `stop`, a download ends with StoppedError. `on_removal` is called with a notice if a
    signed later version removes or changes this member. `read_triggers` reads what a member
    published next to its model, or raises DataError; without it nothing of this is read.

    `last_rounds` has the round of the last manifest accepted from each peer; older ones are
    refused. `announced_rounds` has the round that each peer announced last, by a manifest or a
    hello, and `announcement_times` its monotonic time. Nothing proves it.
    """

    federation: Federation
    identity: Identity
    transport: Transport
    ledger: Ledger
    codec: Codec
    dim: int
    stop: threading.Event = field(default_factory=threading.Event)
    on_removal: Callable[[str], None] = lambda notice: None
    read_triggers: Callable[[bytes], Any] | None = None

    def __post_init__(self) -> None:
        self.agent_id = self.federation.id_of(self.identity.member)
        self.last_rounds: dict[int, int] = {}
        self.announced_rounds: dict[int, int] = {}
        self.announcement_times: dict[int, float] = {}
        self.backoff = Backoff()
        self.patience = Patience()
        self.received_bytes = 0
        self.has_logged_error = False
        self.lock = threading.Lock()
        # As many threads as downloads, of which late ones outlast their round.
        self.pool = ThreadPoolExecutor(_MAX_DOWNLOADS, "download")
        self._audited: set[int] = set()  # peers whose answer to an audit is awaited
        self._inquired: set[int] = set()  # peers whose answer to HELLO is awaited
        self._files_read = Counter[int]()

    def fetch(
        self,
        n: int,
        rows: Mapping[int, Float[Tensor, " d"]],
        deadline: float | None,
        *,
        spares: Sequence[int] = (),
        free_until: float = 0.0,
    ) -> tuple[dict[int, Arrival], dict[int, str]]:
        """Download the models of some peers at once into their rows.

        `patience` says how long the round waits. Spare peers are asked in place of late ones, the
        first ones first. A synchronous round waits for all models until its deadline, by default
        that of the federation. Waiting costs nothing until the monotonic time `free_until`.

        The arrivals, and the reasons of the missing models, are by ascending id. Nothing is written
        to the rows after the return.
        """
        if not rows:
            return {}, {}
        seconds = self.federation.deadline_seconds if deadline is None else deadline
        exchange = _Exchange(self, n, rows, seconds, spares, free_until)
        try:
            exchange.wait()
            return exchange.results()
        finally:
            exchange.close()

    def audit(self, n: int, peers: Iterable[int]) -> None:
        """Ask members for their manifests in the background; nothing waits for the answers.

        Of more than 32 members, another part is asked in each round.
        """
        ids = sorted(peers)
        start = n * _MAX_AUDITS % max(1, len(ids))
        for peer in [*ids[start:], *ids[:start]][:_MAX_AUDITS]:
            ask = functools.partial(self.compare_digests, n, peer)
            self.ask_in_background(peer, self._audited, ask)

    @property
    def is_auditing(self) -> bool:
        """True while answers to audits are awaited."""
        return bool(self._audited)

    def ask_in_background(self, peer: int, awaited: set[int], ask: Callable[[], object]) -> None:
        """Ask a member in a thread of the pool, unless its answer to such a question is awaited."""
        with self.lock:
            if peer in awaited:
                return
            awaited.add(peer)

        def run() -> None:
            try:
                ask()
            except Exception as error:
                # An error in the background must not end as a message of Python.
                self.log_error(error)
            finally:
                with self.lock:
                    awaited.discard(peer)

        self.pool.submit(run)

    def compare_digests(self, n: int, peer: int, seconds: float = _AUDIT_SECONDS) -> None:
        """Compare a member's digests of manifests with this agent's, and keep its manifest.

        A member that is too far behind to have one says its round.
        """
        session = _PeerSession(self, peer, time.monotonic() + seconds)
        if session.fetch_manifest(n) == NOT_YET:
            self.hello(peer, HELLO_SECONDS)

    def note_manifest(self, peer: int, round: int) -> None:
        """Note the round of a manifest that a peer signed."""
        with self.lock:
            self.last_rounds[peer] = max(round, self.last_rounds.get(peer, 0))
        self._note_round(peer, round)

    def _note_round(self, peer: int, round: int) -> None:
        self.announced_rounds[peer] = round
        self.announcement_times[peer] = time.monotonic()

    def _note_file(self, peer: int, file: object) -> None:
        """Read the versions of the federation that a member sends to a former member."""
        with self.lock:
            # Each file takes time to parse, which a hostile member could use up.
            may_read = isinstance(file, str) and self._files_read[peer] < _MAX_FILES
            self._files_read[peer] += may_read
        if may_read:
            content = str(file).encode("utf-8", "replace")
            if notice := removal_notice(self.federation, self.identity.member, content):
                self.on_removal(notice)

    def inquire(self, peers: Iterable[int]) -> None:
        """Ask members that gave no model for their description, in the background.

        A member with a later version of the federation, which removes this one, sends that version.
        """
        for peer in peers:
            ask = functools.partial(self.hello, peer, HELLO_SECONDS)
            self.ask_in_background(peer, self._inquired, ask)

    def log_error(self, error: BaseException) -> None:
        """Log the first unexpected error only."""
        if not self.has_logged_error:
            self.has_logged_error = True
            logging.getLogger(__name__).error("a model could not be downloaded", exc_info=error)

    def hello(self, peer: int, seconds: float) -> dict[str, Any] | None:
        """Return a peer's signed description of itself, None if none came in time."""
        member = self.federation.members[peer]
        session = _PeerSession(self, peer, time.monotonic() + seconds)
        nonce = secrets.token_bytes(16)
        key = self.identity.member.key
        answer = session.answer(session.ask(RequestKind.HELLO, digest=key, nonce=nonce))
        try:
            content = protocol.decode_hello(answer.body if answer else b"", nonce, member)
        except protocol.MalformedError:
            return None
        round = content.get("round")
        # JSON's true is an int in Python, but no round.
        if type(round) is int and 0 <= round <= self.federation.rounds:
            self._note_round(peer, round)
        self._note_file(peer, content.get("file"))
        return content

    def newest_own_manifest(
        self, peers: Iterable[int], seconds: float
    ) -> tuple[set[int], Manifest | None]:
        """Return the peers that answer, and the newest manifest of this agent that they hold."""
        end = time.monotonic() + seconds
        rounds = self.federation.rounds
        silent = set(peers)
        answered = set[int]()
        manifests = list[Manifest]()
        while silent and time.monotonic() < end and not self.stop.is_set():
            sessions = {peer: _PeerSession(self, peer, end) for peer in silent}
            questions = {
                peer: session.ask(RequestKind.WITNESS, index=self.agent_id)
                for peer, session in sessions.items()
            }
            for peer, question in questions.items():
                answer = sessions[peer].answer(question) or Answer(AnswerStatus.MALFORMED)
                _, manifest = protocol.verify_member_manifest(answer.body, self.federation)
                if manifest and manifest.agent == self.agent_id and manifest.round < rounds:
                    manifests.append(manifest)
                elif answer.status is not AnswerStatus.NOT_HERE:
                    continue
                answered.add(peer)
            silent -= answered
            # A new link may not lead to the other agent yet.
            if silent:
                self.stop.wait(_RETRY_SECONDS[1])
        return answered, max(manifests, key=lambda manifest: manifest.round, default=None)

    def peek(self, n: int, ids: Iterable[int]) -> dict[int, Float[Tensor, " d"]]:
        """Download models for an attacker of a simulation; missing ones are left out."""
        rows = {i: torch.empty(self.dim) for i in ids}
        arrivals, _ = self.fetch(n, rows, None)
        return {i: rows[i] for i in arrivals}


@dataclass(eq=False)
class _PeerSession:
    """Requests to one peer until a monotonic time; counts the received bytes."""

    client: PeerClient
    peer: int
    end: float

    def __post_init__(self) -> None:
        self.received_bytes = 0
        self.signed_triggers = b""  # of the last valid manifest

    def ask(self, kind: RequestKind, **fields: Any) -> Question:
        """Send a request now."""
        client = self.client
        run, sender = client.federation.run, client.agent_id
        request = Request(kind=kind, run=run, sender=sender, receiver=self.peer, **fields)
        left = max(0.0, self.end - time.monotonic())
        return client.transport.ask(self.peer, request.encode(client.identity.sign), left)

    def answer(self, question: Question) -> Answer | None:
        """Wait for the answer to a request, and count its bytes."""
        answer = question.answer()
        if answer is not None:
            self.received_bytes += len(answer.body)
            with self.client.lock:
                self.client.received_bytes += len(answer.body)
        return answer

    def fetch_manifest(self, n: int) -> Manifest | str:
        """Return a valid manifest, or the reason why there is none."""
        answer = self.answer(self.ask(RequestKind.MANIFEST, round=n))
        if answer is None:
            return _NO_ANSWER
        if answer.status is not AnswerStatus.OK:
            return answer.status.label
        return self._validate_offer(n, answer.body)

    def _validate_offer(self, n: int, body: protocol.BytesLike) -> Manifest | str:
        """Return an offer's valid manifest or a reason; fetch conflicting manifests."""
        client = self.client
        codec = client.codec
        try:
            signed, digests, self.signed_triggers = protocol.decode_offer(body)
        except protocol.MalformedError as error:
            return error.reason
        reason, manifest = protocol.validate_manifest(
            signed,
            federation=client.federation,
            peer=self.peer,
            n=n,
            min_round=client.last_rounds.get(self.peer, 0),
            dim=client.dim,
            min_bytes=codec.min_bytes,
            max_bytes=codec.max_bytes,
            encoding=codec.encoding,
            base=codec.expected_base,
        )
        if manifest is None:
            return reason

        client.ledger.record(signed, manifest)
        client.note_manifest(self.peer, manifest.round)
        # A member may claim any digests, and each question for them costs a request.
        self._fetch_witnesses(client.ledger.find_conflicts(digests)[:_MAX_WITNESSES])
        if self.peer in client.ledger.equivocators:
            return _EQUIVOCATION
        return manifest

    def _fetch_witnesses(self, conflicts: Collection[protocol.ManifestDigest]) -> None:
        """Ask for the manifests of conflicting digests; the ledger keeps proofs only."""
        client = self.client
        # No peer accepts a longer manifest.
        longest = protocol.manifest_bytes(client.codec.max_bytes)
        end = min(self.end, time.monotonic() + _WITNESS_SECONDS)
        session = _PeerSession(client, self.peer, end)
        questions = [
            session.ask(RequestKind.WITNESS, round=n, index=agent, digest=digest)
            for agent, n, digest in conflicts
        ]
        witnesses: dict[tuple[int, int], dict[bytes, bytes]] = {}
        for (agent, n, digest), question in zip(conflicts, questions, strict=True):
            answer = session.answer(question)
            if answer and answer.status is AnswerStatus.OK and len(answer.body) <= longest:
                witnesses.setdefault((agent, n), {})[digest] = bytes(answer.body)
        for (agent, n), signed in witnesses.items():
            client.ledger.prove(agent, n, signed)


@dataclass(eq=False)
class _Exchange:
    """Downloads of one round; waiting costs nothing until the monotonic time `free_until`."""

    client: PeerClient
    n: int
    rows: Mapping[int, Float[Tensor, " d"]]
    seconds: float
    spares: Sequence[int]
    free_until: float

    def __post_init__(self) -> None:
        self.is_synchronous = self.client.federation.synchronous
        # A synchronous round has the models of the sampled peers, so that its bits are those of a
        # simulation.
        others = [peer for peer in self.spares if peer not in self.rows]
        self.spares = [] if self.is_synchronous else others
        start = time.monotonic()
        self.client.patience.earn(start, self.seconds)
        self.rules = Wait(self.client.patience, start, start + self.seconds, self.free_until)
        self.downloads = dict[int, _ModelDownload]()
        for peer, row in self.rows.items():
            self._submit(peer, row)

    def _submit(self, peer: int, row: Float[Tensor, " d"]) -> None:
        download = _ModelDownload(self.client, peer, self.rules.deadline, self.n, row)
        self.downloads[peer] = download
        download.future = self.client.pool.submit(download.run)

    def wait(self) -> None:
        """Wait until all models arrived, or the round goes on without the missing ones."""
        rules = self.rules
        charged_from = math.inf
        stalls = self.client.backoff.stall_counts
        # A peer that stalled before must not delay this round, too.
        asked = sum(not stalls.get(peer) for peer in self.rows)
        while pending := self._update():
            now = time.monotonic()
            end = rules.end(asked, [one.peer for one in pending])
            if self.is_synchronous or end == rules.deadline:
                end = rules.deadline + _GRACE_SECONDS
            if now >= end:
                break
            if rules.has_enough(asked) and math.isinf(charged_from):
                charged_from = max(now, rules.uncharged_end(asked))
            if now >= rules.spares_start and self.spares:
                self._ask_spares(len(pending))
                continue
            pause = min(end - now, _RETRY_SECONDS[1])
            if self.spares:
                pause = min(pause, rules.spares_start - now)
            wait([one.future for one in pending], pause, FIRST_COMPLETED)
            if self.client.stop.is_set():
                raise StoppedError
        self.client.patience.spend(max(0.0, time.monotonic() - charged_from))

    def _update(self) -> "list[_ModelDownload]":
        """Note downloads that ended, and return the others."""
        for one in self.downloads.values():
            if one.future.done() and math.isinf(one.ended):
                one.ended = time.monotonic()
                if one.future.exception() is None and isinstance(one.future.result(), Arrival):
                    self.rules.record_arrival(one.ended)
                else:
                    self.rules.record_failure()
        return [one for one in self.downloads.values() if math.isinf(one.ended)]

    def _ask_spares(self, count: int) -> None:
        """Ask as many other peers as models are missing."""
        chosen = self.spares[:count]
        self.spares = []
        # A spare's model has memory of its own until it is known which row stays free.
        row = next(iter(self.rows.values()))
        for peer in chosen:
            self._submit(peer, torch.empty_like(row))

    def results(self) -> tuple[dict[int, Arrival], dict[int, str]]:
        """End all downloads; return arrivals and the reasons of missing models, by id."""
        self._update()
        client = self.client
        late_after = self.rules.late_after()
        now = time.monotonic()
        arrivals = dict[int, Arrival]()
        failures = dict[int, str]()
        for peer, download in self.downloads.items():
            result = download.result()
            is_missing = math.isinf(download.ended)
            if isinstance(result, Arrival):
                arrivals[peer] = result
                client.patience.record_arrival(peer, result.seconds)
            else:
                failures[peer] = result
            if is_missing:
                client.patience.record_missing(peer, now - self.rules.start)
            if min(download.ended, now) > late_after:
                client.backoff.record_stall(peer, self.n)
            elif is_missing:
                client.backoff.record_miss(peer, self.n)
            elif isinstance(result, Arrival):
                client.backoff.record_arrival(peer)
        arrivals = self._place(arrivals)
        # A silent member may have removed this one, and tells so in its description.
        client.inquire(peer for peer, why in failures.items() if why in (*SILENT_REASONS, NOT_YET))
        failures = {peer: reason for peer, reason in failures.items() if peer in self.rows}
        return dict(sorted(arrivals.items())), dict(sorted(failures.items()))

    def _place(self, arrivals: Mapping[int, Arrival]) -> dict[int, Arrival]:
        """Move models of spare peers into rows of missing models."""
        free = [peer for peer in self.rows if peer not in arrivals]
        placed = dict[int, Arrival]()
        for peer, arrival in sorted(arrivals.items()):
            if peer in self.rows:
                placed[peer] = arrival
            elif free:
                slot = free.pop(0)
                self.rows[slot].copy_(self.downloads[peer].row)
                placed[peer] = replace(arrival, row_owner=slot)
        return placed

    def close(self) -> None:
        """Write nothing from now on."""
        # The threads end at their deadline, for which no round should wait.
        for download in self.downloads.values():
            download.cancel()


@dataclass(eq=False)
class _ModelDownload(_PeerSession):
    """Download of one peer's model into a row: manifest, then chunks."""

    n: int
    row: Float[Tensor, " d"]
    future: "Future[Arrival | str]" = field(init=False)
    ended: float = math.inf  # monotonic time

    def __post_init__(self) -> None:
        super().__post_init__()
        self.is_open = True
        self.lock = threading.Lock()

    def result(self) -> Arrival | str:
        """End the download, and return the arrival or a reason."""
        self.cancel()
        if not self.future.done():
            return _LATE
        error = self.future.exception()
        if error is None:
            return self.future.result()
        self.client.log_error(error)
        return FAILED

    def cancel(self) -> None:
        """Write nothing from now on, and send no requests."""
        with self.lock:
            self.is_open = False

    def run(self) -> Arrival | str:
        """Download the model, with retries.

        In a synchronous federation a peer without a model is asked again until the deadline.
        Otherwise a peer is asked again a few times if it does not answer, because a message may be
        lost, or if its snapshot was replaced by a newer one.
        """
        start = time.monotonic()
        pause = _RETRY_SECONDS[0]
        tries = 0
        while self.is_open and (left := self.end - time.monotonic()) > 0:
            result = self._attempt(start)
            tries += 1
            if self.client.federation.synchronous:
                may_retry = result in _RETRIABLE_REASONS
            else:
                may_retry = tries < _MAX_TRIES and result in (_NO_ANSWER, _MOVED_ON)
            if not may_retry:
                return result
            time.sleep(min(pause, left))
            pause = min(2 * pause, _RETRY_SECONDS[1])
        return _LATE

    def _attempt(self, start: float) -> Arrival | str:
        manifest = self.fetch_manifest(self.n)
        if isinstance(manifest, str):
            return manifest
        try:
            triggers = self._read_triggers(manifest)
        except (protocol.MalformedError, DataError):
            return "triggers"
        codec = self.client.codec
        if reason := (
            self._follow(manifest, codec)
            if isinstance(codec, TopKCodec)
            else self._fetch_whole(manifest, codec)
        ):
            return reason
        with self.lock:
            if not self.is_open:
                return _LATE
            if reason := number_fault(self.row):
                return reason
            # Denormal numbers would make every computation with the model slow.
            flush_(self.row)
        seconds = time.monotonic() - start
        size = self.received_bytes
        round, num_samples = manifest.round, manifest.num_samples
        return Arrival(round, num_samples, size, seconds, row_owner=self.peer, triggers=triggers)

    def _read_triggers(self, manifest: Manifest) -> Any:
        """Verify and read the triggers next to a manifest; return None without any."""
        read = self.client.read_triggers
        if read is None or not self.signed_triggers:
            return None
        member = self.client.federation.members[self.peer]
        return read(protocol.verify_triggers(self.signed_triggers, manifest, member))

    def _fetch_whole(self, manifest: Manifest, codec: RawCodec | Int8Codec) -> str:
        """Download the bytes of a manifest and decode them; return an empty text or a reason."""
        # Its size is that of a valid manifest: no peer makes this agent allocate more.
        buffer = codec.buffer(manifest.size, self.row)
        part = range(manifest.size)
        if reason := self._fetch_chunks(manifest, part, buffer, manifest.chunks):
            return reason
        with self.lock:
            if not self.is_open:
                return _LATE
            return "content" if codec.decode_(buffer, self.row) else ""

    def _follow(self, manifest: Manifest, codec: TopKCodec) -> str:
        """Download the differences from the peer's last model, or else its whole model."""
        reason = ""
        for part in codec.ranges(self.peer, manifest.round):
            buffer = memoryview(bytearray(len(part)))
            # The hash of the model is that of a manifest, whatever the bytes on the way.
            expected = [b""] * protocol.num_chunks(len(part))
            if reason := self._fetch_chunks(manifest, part, buffer, expected):
                return reason
            with self.lock:
                if not self.is_open:
                    return _LATE
                reason = codec.follow_(self.peer, manifest, buffer, self.row)
            if not reason:
                break
        return reason

    def _fetch_chunks(
        self, manifest: Manifest, part: range, buffer: memoryview, hashes: Sequence[bytes]
    ) -> str:
        """Fill the buffer by chunks with these hashes, empty for any; return "" or a reason."""
        count = len(hashes)
        whole = hashlib.sha256()
        # Several chunks are requested at once, so that the link never idles.
        pending = deque(
            self._request_chunk(manifest, part, k) for k in range(min(count, _CHUNKS_IN_FLIGHT))
        )
        for k, expected in enumerate(hashes):
            start = k * protocol.CHUNK_BYTES
            size = min(protocol.CHUNK_BYTES, len(part) - start)

            chunk, reason = self._valid_chunk(pending.popleft(), size, expected)
            # Once more, because a message may be lost.
            if reason and time.monotonic() < self.end:
                question = self._request_chunk(manifest, part, k)
                chunk, reason = self._valid_chunk(question, size, expected)
            if reason:
                # After the deadline a missing answer is no fault of the peer.
                return _LATE if time.monotonic() > self.end else reason

            if k + _CHUNKS_IN_FLIGHT < count:
                pending.append(self._request_chunk(manifest, part, k + _CHUNKS_IN_FLIGHT))
            whole.update(chunk)
            with self.lock:
                if not self.is_open:
                    return _LATE
                buffer[start : start + size] = chunk
        is_whole = hashes is not manifest.chunks or whole.digest() == manifest.sha256
        return "" if is_whole else "hash"

    def _valid_chunk(
        self, question: Question, size: int, expected: bytes
    ) -> tuple[protocol.BytesLike, str]:
        """Return a chunk with the expected hash and an empty text, or a reason."""
        answer = self.answer(question)
        if answer is None:
            return b"", _NO_ANSWER
        # The peer may have replaced the snapshot.
        if answer.status is not AnswerStatus.OK:
            return b"", answer.status.label
        digest = hashlib.sha256(answer.body).digest()
        is_valid = len(answer.body) == size and expected in (b"", digest)
        return answer.body, "" if is_valid else "hash"

    def _request_chunk(self, manifest: Manifest, part: range, k: int) -> Question:
        first = part.start + k * protocol.CHUNK_BYTES
        last = min(first + protocol.CHUNK_BYTES, part.stop) - 1
        return self.ask(RequestKind.MODEL, digest=manifest.digest, first=first, last=last)


def number_fault(theta: Float[Tensor, " d"]) -> str:
    """Return the fault of a received model's numbers: "", "bound" or "not finite"."""
    largest = float(max_abs(theta.unsqueeze(0), [0])[0])
    if is_acceptable(np.array([largest])).all():
        return ""
    return "bound" if math.isfinite(largest) else "not finite"

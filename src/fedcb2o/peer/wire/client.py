"""Line 2 of Algorithm 2 among real peers: download what each asked peer offers, and take no peer's word for anything.

Each arrival passes, in this order, before its model is seen by anything else: the answer's form, `protocol.refusal`
(member, signature, run, version, agent, round, size), then hash, type, finiteness and bound. What fails is dropped and
counted by its reason.
"""

import contextlib
import hashlib
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.federated.admission import is_admissible, max_abs
from fedcb2o.peer.membership.federation import Federation
from fedcb2o.peer.membership.identity import Identity
from fedcb2o.peer.wire import protocol
from fedcb2o.peer.wire.compression import Codec
from fedcb2o.peer.wire.equivocation import Ledger
from fedcb2o.peer.wire.protocol import Answer, AnswerStatus, Manifest, Request, RequestKind
from fedcb2o.peer.wire.transport import Transport

CHUNKS_IN_FLIGHT = 4  # chunks of a model that are asked for at once
_MAX_TRIES = 3  # at a peer from which nothing comes
_MAX_WITNESSES = 4  # manifests that one answer may make us ask for
_RETRY_SECONDS = (
    0.01,
    0.25,
)  # seconds until a peer that has nothing yet is asked again: at first, at most
HELLO_SECONDS = 2.0  # in which a peer that is there says how far it is
_GRACE_SECONDS = 0.5  # seconds beyond the deadline for what has arrived to be looked at
_MAX_STALLS = 5  # that count: who stalls so often rests for 31 rounds
_LATE = "late"
_NO_ANSWER = "no answer"
_MOVED_ON = "not here"
_EQUIVOCATION = "equivocation"
FAILED = "failed"  # at something that nobody thought of: a peer never breaks a round
NOT_YET = "not yet"
_RETRIABLE_REASONS = (_NO_ANSWER, NOT_YET, "busy")
"""Why nothing came, which may be otherwise soon."""
BLAMELESS_REASONS = (_LATE, *_RETRIABLE_REASONS, _MOVED_ON)
"""Why nothing came that says nothing against the peer."""


class StoppedError(Exception):
    """The agent was told to end."""


@dataclass(frozen=True)
class Arrival:
    """A model that arrived: of which round, its claimed samples, how many bytes it took and how many seconds."""

    round: int
    num_samples: int
    size: int
    seconds: float


class Backoff:
    """Whom not to ask for a while: who kept a round waiting for more than half of its deadline, and for nothing, rests
    for one round, the next time for 3, then 7 and so on; each model that arrives takes one time back. So a peer that
    answers nothing, or begins and never ends, costs a few deadlines and not one in each round."""

    def __init__(self) -> None:
        self.stall_counts: dict[int, int] = {}
        self.suspended_until: dict[int, int] = {}

    def record_stall(self, peer: int, n: int) -> None:
        """Round n waited for it, for nothing."""
        self.stall_counts[peer] = min(_MAX_STALLS, self.stall_counts.get(peer, 0) + 1)
        self.suspended_until[peer] = n + 2 ** self.stall_counts[peer]

    def record_arrival(self, peer: int) -> None:
        """Its model came."""
        self.stall_counts[peer] = max(0, self.stall_counts.get(peer, 0) - 1)

    def suspended(self, n: int) -> set[int]:
        """Who is not asked in round n."""
        return {peer for peer, until in self.suspended_until.items() if n < until}


class PeerClient:
    """Downloads for agent `me`. `least` is the round of the last model that it had from each peer: no older one is
    taken again. `patience` knows who kept it waiting, and `received` counts bytes. Once `stop` is set, a fetch ends
    with StoppedError."""

    def __init__(
        self,
        federation: Federation,
        identity: Identity,
        transport: Transport,
        ledger: Ledger,
        codec: Codec,
        dim: int,
        stop: threading.Event | None = None,
    ) -> None:
        self.federation = federation
        self.identity = identity
        self.transport = transport
        self.ledger = ledger
        self.codec = codec
        self.dim = dim
        self.agent_id = federation.id_of(identity.member)
        self.last_rounds: dict[int, int] = {}
        self.backoff = Backoff()
        self.received_bytes = 0
        self.has_logged_error = False
        self.stop = threading.Event() if stop is None else stop
        self.lock = threading.Lock()

    def fetch(
        self, n: int, rows: Mapping[int, Float[Tensor, " d"]], deadline: float | None
    ) -> tuple[dict[int, Arrival], dict[int, str]]:
        """Download the models of some peers into rows of theirs, within `deadline` seconds: what arrived, and of the
        others why it did not. After it returns nothing is written to the rows."""
        if not rows:
            return {}, {}
        began = time.monotonic()
        until = began + (self.federation.deadline_seconds if deadline is None else deadline)
        pool = ThreadPoolExecutor(len(rows), thread_name_prefix="download")
        tasks = {peer: _ModelDownload(self, n, peer, row, until) for peer, row in rows.items()}
        futures = {peer: pool.submit(task.run) for peer, task in tasks.items()}
        arrivals = dict[int, Arrival]()
        failures = dict[int, str]()
        try:
            self._wait(futures.values(), (began + until) / 2)
            slow = {peer for peer, future in futures.items() if not future.done()}
            self._wait(futures.values(), until + _GRACE_SECONDS)
            for peer, task in tasks.items():
                found = task.result(futures[peer])
                if isinstance(found, Arrival):
                    arrivals[peer] = found
                    self.last_rounds[peer] = found.round
                    self.backoff.record_arrival(peer)
                else:
                    failures[peer] = found
                    if peer in slow:
                        self.backoff.record_stall(peer, n)
        finally:
            for task in tasks.values():
                task.cancel()
            pool.shutdown(wait=False, cancel_futures=True)
        return dict(sorted(arrivals.items())), dict(sorted(failures.items()))

    def _wait(self, running: Collection["Future[Arrival | str]"], until: float) -> None:
        """Wait for all, until a moment; raises StoppedError where the agent is told to end meanwhile."""
        while (left := until - time.monotonic()) > 0 and wait(
            running, min(left, _RETRY_SECONDS[1])
        ).not_done:
            if self.stop.is_set():
                raise StoppedError

    def hello(self, peer: int, seconds: float) -> dict[str, Any] | None:
        """What a peer says of itself, or None where nothing that it signed came in time."""
        member = self.federation.members[peer]
        key = self.identity.member.key
        for answer in _PeerSession(self, peer, time.monotonic() + seconds).ask(
            RequestKind.HELLO, digest=key
        ):
            with contextlib.suppress(protocol.MalformedError):
                return protocol.decode_hello(answer.body, answer.nonce, member)
        return None

    def newest_own_manifest(self, peers: Iterable[int], seconds: float) -> Manifest | None:
        """The newest manifest that some peers can show which this agent signed."""
        until = time.monotonic() + seconds
        silent = set(peers)
        found = list[Manifest]()
        while silent and time.monotonic() < until and not self.stop.is_set():
            asked = [
                (
                    peer,
                    _PeerSession(self, peer, until).ask(RequestKind.WITNESS, index=self.agent_id),
                )
                for peer in silent
            ]
            for peer, answers in asked:
                for answer in answers:
                    silent.discard(peer)
                    manifest = protocol.verify_member_manifest(answer.body, self.federation)[1]
                    if (
                        manifest is not None
                        and manifest.agent == self.agent_id
                        and manifest.round < self.federation.rounds
                    ):
                        found.append(manifest)
            if silent:  # a link that is just there may not yet lead to who answers
                self.stop.wait(_RETRY_SECONDS[1])
        return max(found, key=lambda manifest: manifest.round, default=None)

    def peek(self, n: int, ids: Iterable[int]) -> dict[int, Float[Tensor, " d"]]:
        """The models of some peers in tensors of their own: what an attacker of a simulation sees."""
        rows = {i: torch.empty(self.dim) for i in ids}
        found, _ = self.fetch(n, rows, None)
        return {i: rows[i] for i in found}


class _PeerSession:
    """Questions to one peer until a moment; `size` are the bytes of what came back."""

    def __init__(self, of: PeerClient, peer: int, until: float) -> None:
        self.client = of
        self.peer = peer
        self.end = until
        self.received_bytes = 0

    def ask(
        self,
        kind: RequestKind,
        *,
        round: int = 0,
        index: int = 0,
        digest: bytes = protocol.ZERO_DIGEST,
    ) -> "Iterator[Answer]":
        """Ask now; the answers to this very request as they come."""
        of = self.client
        nonce = secrets.token_bytes(16)
        request = Request(
            kind=kind,
            run=of.federation.run,
            sender=of.agent_id,
            receiver=self.peer,
            nonce=nonce,
            round=round,
            index=index,
            digest=digest,
        )
        left = max(0.0, self.end - time.monotonic())
        return self._read(
            of.transport.ask(self.peer, request.encode(of.identity.sign), left), nonce
        )

    def _read(self, coming: Iterable[bytes], nonce: bytes) -> "Iterator[Answer]":
        for data in coming:
            self.received_bytes += len(data)
            with self.client.lock:
                self.client.received_bytes += len(data)
            with contextlib.suppress(protocol.MalformedError):
                answer = protocol.decode_answer(data)
                if answer.nonce == nonce:
                    yield answer


class _ModelDownload:
    """One model from one peer: its manifest, then its chunks, into a row, until a moment."""

    def __init__(
        self, of: PeerClient, n: int, peer: int, row: Float[Tensor, " d"], until: float
    ) -> None:
        self.client = of
        self.n = n
        self.peer = peer
        self.row = row
        self.deadline = until
        self.session = _PeerSession(of, peer, until)
        self.is_open, self.lock = True, threading.Lock()

    def result(self, running: "Future[Arrival | str]") -> "Arrival | str":
        """What it found; who is not done is late."""
        self.cancel()
        if not running.done():
            return _LATE
        if (error := running.exception()) is None:
            return running.result()
        if not self.client.has_logged_error:  # a fault of ours, the first of which is logged
            self.client.has_logged_error = True
            logging.getLogger(__name__).error("a model could not be downloaded", exc_info=error)
        return FAILED

    def cancel(self) -> None:
        """Write nothing from now on, and ask no more."""
        with self.lock:
            self.is_open = False

    def run(self) -> "Arrival | str":
        """The arrival, or why there is none; who has nothing yet is asked again where a round waits for everybody, and
        else a few times who says nothing, as a message may be lost, or has a newer one by now."""
        began = time.monotonic()
        pause = _RETRY_SECONDS[0]
        tries = 0
        while self.is_open and (left := self.deadline - time.monotonic()) > 0:
            found = self._attempt(began)
            tries = tries + 1
            again = (
                found in _RETRIABLE_REASONS
                if self.client.federation.synchronous
                else tries < _MAX_TRIES and found in (_NO_ANSWER, _MOVED_ON)
            )
            if isinstance(found, Arrival) or not again:
                return found
            time.sleep(min(pause, left))
            pause = min(2 * pause, _RETRY_SECONDS[1])
        return _LATE

    def _attempt(self, began: float) -> "Arrival | str":
        """The arrival, where the peer has a model and gives it."""
        manifest = self._fetch_manifest()
        if isinstance(manifest, str):
            return manifest
        room = self.client.codec.buffer(manifest.size, self.row)
        if failed := self._fetch_chunks(manifest, room):
            return failed
        with self.lock:
            if not self.is_open:
                return _LATE
            if self.client.codec.decode_(room, self.row):
                return "content"
            if failed := rejection_reason(self.row):
                return failed
        return Arrival(
            manifest.round,
            manifest.num_samples,
            self.session.received_bytes,
            time.monotonic() - began,
        )

    def _fetch_manifest(self) -> "Manifest | str":
        """A manifest that passes, or why there is none."""
        reason = _NO_ANSWER
        for answer in self.session.ask(RequestKind.MANIFEST, round=self.n):
            if answer.status is not AnswerStatus.OK:
                reason = answer.status.label
                continue
            found = self._validate_offer(answer.body)
            if isinstance(found, Manifest):
                return found
            reason = found
        return reason

    def _validate_offer(self, body: protocol.BytesLike) -> "Manifest | str":
        """The manifest in an offer, where it passes; what it says of others' is looked into where it is a conflict."""
        of = self.client
        federation = self.client.federation
        try:
            signed, digests = protocol.decode_offer(body)
        except protocol.MalformedError as error:
            return error.reason
        reason, manifest = protocol.validate_manifest(
            signed,
            federation=federation,
            peer=self.peer,
            n=self.n,
            min_round=of.last_rounds.get(self.peer, 0),
            dim=of.dim,
            min_bytes=of.codec.min_bytes,
            max_bytes=of.codec.max_bytes,
            encoding=of.codec.encoding,
            base=of.codec.base,
        )
        if manifest is None:
            return reason
        of.ledger.record(signed)
        longest = protocol.manifest_bytes(of.codec.max_bytes)  # no longer one was taken by anybody
        for agent, n, digest in of.ledger.find_conflicts(digests)[:_MAX_WITNESSES]:
            for answer in self.session.ask(
                RequestKind.WITNESS, round=n, index=agent, digest=digest
            ):
                if answer.status is AnswerStatus.OK and len(answer.body) <= longest:
                    of.ledger.record(bytes(answer.body))
        return _EQUIVOCATION if self.peer in of.ledger.equivocators else manifest

    def _fetch_chunks(self, manifest: Manifest, room: memoryview) -> str:
        """Fill the room with the chunks of a snapshot, some in flight at once; "" or why not."""
        count = len(manifest.chunks)
        whole = hashlib.sha256()
        asked = deque(self._request_chunk(manifest, k) for k in range(min(count, CHUNKS_IN_FLIGHT)))
        for k, expected in enumerate(manifest.chunks):
            start = k * protocol.CHUNK_BYTES
            answers = asked.popleft()
            size = min(protocol.CHUNK_BYTES, manifest.size - start)
            chunk, reason = self._first_valid_chunk(answers, size, expected)
            if chunk is None and time.monotonic() < self.deadline:
                chunk, reason = self._first_valid_chunk(
                    self._request_chunk(manifest, k), size, expected
                )
            if chunk is None:
                return _LATE if time.monotonic() > self.deadline else reason
            if k + CHUNKS_IN_FLIGHT < count:
                asked.append(self._request_chunk(manifest, k + CHUNKS_IN_FLIGHT))
            whole.update(chunk)
            with self.lock:
                if not self.is_open:
                    return _LATE
                room[start : start + size] = chunk
        return "" if whole.digest() == manifest.sha256 else "hash"

    def _first_valid_chunk(
        self, answers: "Iterator[Answer]", size: int, expected: bytes
    ) -> "tuple[protocol.BytesLike | None, str]":
        """The first chunk with the expected hash, or None and why it did not come."""
        reason = _NO_ANSWER
        for answer in answers:
            if (
                answer.status is not AnswerStatus.OK
            ):  # a peer that has moved on since has this model no more
                reason = answer.status.label
            elif len(answer.body) == size and _sha256(answer.body) == expected:
                return answer.body, ""
            else:
                reason = "hash"
        return None, reason

    def _request_chunk(self, manifest: Manifest, k: int) -> "Iterator[Answer]":
        return self.session.ask(RequestKind.CHUNK, index=k, digest=manifest.digest)


def rejection_reason(theta: Float[Tensor, " d"]) -> str:
    """Why a model's numbers are not received; "" where they are."""
    size = float(max_abs(theta.unsqueeze(0), [0])[0])
    if is_admissible(np.array([size])).all():
        return ""
    return "bound" if math.isfinite(size) else "not finite"


def _sha256(content: protocol.BytesLike) -> bytes:
    return hashlib.sha256(content).digest()
